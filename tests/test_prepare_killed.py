"""
Whatever happens to prepare.py, what looks finished is finished, and run again it ends with the bytes of an
undisturbed run.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import REPO, TEXT, captured, is_refused, own_process
from test_read_text import files_of

from dataset import Dataset
from support.hub_datasets import File
from support.files import lock
from support.tokenizer import make_tokenizer
from support.write_dataset import Draft

# runs prepare.py in forks, which need not import anything, and kills each at its k-th call that changes
# something on the disk; 0: never
FORKS = '''
import json, os, runpy, sys
sys.path.insert(0, {repo!r})
sys.argv = ['prepare.py']
runpy.run_path({repo!r} + '/prepare.py')  # imports
import support.write_dataset
support.write_dataset.SAVE_EVERY = 0
def count(real):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)
    return call
os.fsync = lambda fd: None  # of use when the power fails; slow
for name in ('replace', 'fsync', 'remove', 'unlink', 'rmdir', 'mkdir'):
    setattr(os, name, count(getattr(os, name)))
for line in sys.stdin:
    left, args = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = ['prepare.py', *args]
        runpy.run_path({repo!r} + '/prepare.py', run_name='__main__')
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
'''


@pytest.fixture
def run():
    """run(*args, kill_at=k): the status of prepare.py with these arguments."""
    if not hasattr(os, 'fork'):
        pytest.skip('kills forked processes')
    process = subprocess.Popen([sys.executable, '-c', FORKS.format(repo=str(REPO))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(*args, kill_at=0):
        process.stdin.write(json.dumps([kill_at, [str(arg) for arg in args]]) + '\n')
        process.stdin.flush()
        return int(process.stdout.readline())
    yield call
    process.stdin.close()
    process.wait()


def looks_finished(folder):
    """What train.py would say: does the folder pass for a whole dataset?"""
    try:
        Dataset(folder.name, folder.parent)
        return True
    except SystemExit:
        return False


@pytest.mark.parametrize('name', ['several', 'another set', 'shakespeare_char'])
def test_killed_at_every_change_of_the_disk(tmp_path, run, name):
    """A document of several portions and small ones; one alone, whose end becomes val.bin, in place of
    another set; nanoGPT's set."""
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in' / 'a.txt').write_text(TEXT * (35 if name == 'several' else 1))
    args = [name, f"--input={tmp_path / 'in' / 'a.txt'}", '--val_fraction=0.3',
            f'--shard_tokens={len(TEXT) // 2}', '--overwrite']
    if name == 'several':
        lines = (json.dumps({'text': f'document {i} ' + TEXT[97 * i:99 * i]}) + '\n' for i in range(300))
        (tmp_path / 'in' / 'b.jsonl').write_text(''.join(lines))
        args[1:] = [f"--input={tmp_path / 'in'}", '--val_fraction=0.3', f'--shard_tokens={len(TEXT) * 5}']
    if name != 'shakespeare_char':
        args.append('--tokenizer=byte')
    folder = tmp_path / 'data' / name
    old = {}
    if name == 'another set':
        assert run(*args, '--shard_tokens=20000', f"--data_dir={tmp_path / 'old'}") == 0
        old = files_of(tmp_path, name, 'old')
    assert run(*args, f"--data_dir={tmp_path / 'whole'}") == 0
    want = files_of(tmp_path, name, 'whole')
    args.append(f'--data_dir={folder.parent}')
    for k in range(1, 1000, 3):
        shutil.rmtree(folder, ignore_errors=True)
        if old:
            shutil.copytree(tmp_path / 'old' / name, folder)
        status = run(*args, kill_at=k)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if folder.exists() and looks_finished(folder):
            assert files_of(tmp_path, name) in (want, old), k
        assert run(*args) == 0 and files_of(tmp_path, name) == want and looks_finished(folder), k
        assert not (folder / 'unfinished').exists()
    assert k > 10 and files_of(tmp_path, name) == want and len(want) > 2


# -----------------------------------------------------------------------------
# signals


SAVES_ALWAYS = '''
import runpy, sys
sys.path.insert(0, {repo!r})
import support.write_dataset
support.write_dataset.SAVE_EVERY = 0
sys.argv[0] = {repo!r} + '/prepare.py'
runpy.run_path(sys.argv[0], run_name='__main__')
'''


def start(*args):
    # tests that run in the background inherit that SIGINT is ignored
    return subprocess.Popen([sys.executable, '-c', SAVES_ALWAYS.format(repo=str(REPO)), *args], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


@pytest.mark.skipif(sys.platform != 'linux', reason='sends signals')
def test_stopped_by_a_signal_it_ends_at_once_and_continues_later(tmp_path, gpt2):
    (tmp_path / 'in').mkdir()
    for i in range(4):
        (tmp_path / 'in' / f'{i}.txt').write_text(f'{i}' + TEXT * 30)
    args = [f"--input={tmp_path / 'in'}", '--tokenizer=gpt2', '--workers=2', '--shard_tokens=300000',
            f"--data_dir={tmp_path / 'data'}"]
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        name = f'mine{number:d}'
        process, begun = start(name, *args), time.time()
        progress = tmp_path / 'data' / name / 'unfinished' / 'progress.json'
        while not progress.exists():
            assert process.poll() is None and time.time() < begun + 60
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert process.returncode == status and 'Traceback' not in err, err
    done = own_process('prepare.py', name, *args)
    assert done.status == 0 and 'continuing' in done.out, done.err


# -----------------------------------------------------------------------------
# one writer, full disks


@pytest.mark.skipif(sys.platform == 'win32', reason='no file locks')
def test_a_second_prepare_into_the_same_dataset_is_refused(prepare, tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT)
    assert prepare('mine', tmp_path / 'a.txt').status == 0
    holder = lock(tmp_path / 'data' / 'mine', 'prepare.py')
    (tmp_path / 'data' / 'mine' / 'unfinished').mkdir()  # as the other one would have
    args = f"--input={tmp_path / 'a.txt'}", f"--data_dir={tmp_path / 'data'}"
    is_refused(own_process('prepare.py', 'mine', *args), 'another prepare.py')
    assert (tmp_path / 'data' / 'mine' / 'unfinished').exists(), 'the work of the other one is left alone'
    holder.close()
    assert prepare('mine', tmp_path / 'a.txt').status == 0


LIMITED = '''
import resource, runpy, sys
size = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
sys.path.insert(0, {repo!r})
sys.argv[0] = {repo!r} + '/prepare.py'
runpy.run_path(sys.argv[0], run_name='__main__')
'''


@pytest.mark.skipif(sys.platform != 'linux', reason='limits the size of files')
def test_a_disk_that_fills_up_is_one_line_and_the_next_run_continues(script, tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT * 60)
    args = ['mine', f"--input={tmp_path / 'a.txt'}", '--tokenizer=byte', f"--data_dir={tmp_path / 'data'}",
            '--shard_tokens=1500000']
    for size in (2_000_000, 3_000_000):  # not even one shard; shards fit, what comes last may not
        code = [sys.executable, '-c', LIMITED.format(repo=str(REPO)), str(size), *args]
        done = captured(code)
        if done.returncode or size == 2_000_000:
            assert done.returncode == 2 and done.stderr.count('\n') == 1 and 'make room' in done.stderr
    assert script('prepare.py', *args).status == 0
    data = Dataset('mine', tmp_path / 'data')
    assert data.train.n + data.val.n == len(TEXT) * 60 + 1


def test_what_an_earlier_run_left_damaged_is_not_continued(tmp_path, capsys):
    files = [File('a.txt', 100, '1')]
    for number, damaged in enumerate(('train_000000.bin', 'train_000001.bin', 'progress.json', None)):
        folder = tmp_path / str(number)
        folder.mkdir()
        draft = Draft(str(folder), dict(shard_tokens=1000), files)
        draft.start(make_tokenizer({'kind': 'char', 'chars': 'abc'}))
        draft.add([('train', np.arange(1500, dtype='<u2') % 3)], (0, 0, 1500), None)
        draft.save()
        if damaged:
            (folder / damaged).write_bytes((folder / damaged).read_bytes()[:-1])
        draft = Draft(str(folder), dict(shard_tokens=1000), files)
        assert draft.resume() == (damaged is None), damaged
        out = capsys.readouterr()
        assert ('starting anew' in out.out) == ('bin' in str(damaged)) and not out.err
