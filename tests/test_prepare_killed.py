"""
Whatever happens to prepare.py, what looks finished is finished, and run again it ends with the bytes of an
undisturbed run.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import REPO, TEXT, own_process
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
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
'''


class Forks:
    def __init__(self):
        code = [sys.executable, '-c', FORKS.format(repo=str(REPO))]
        self.process = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, *args, kill_at=0):
        """The pid of prepare.py with these arguments."""
        self.process.stdin.write(json.dumps([kill_at, [str(arg) for arg in args]]) + '\n')
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def wait(self):
        return int(self.process.stdout.readline())

    def run(self, *args, kill_at=0):
        self.start(*args, kill_at=kill_at)
        return self.wait()


@pytest.fixture
def forks():
    if not hasattr(os, 'fork'):
        pytest.skip('kills forked processes')
    found = Forks()
    yield found
    found.process.stdin.close()
    found.process.wait()


def make_texts(folder, n, size):
    """n documents of very different lengths, in files of several kinds, and one of `size` bytes."""
    folder.mkdir()
    rng = random.Random(1)
    for i in range(0, n, 100):
        with open(folder / f'{i:04d}.jsonl', 'w') as f:
            for j in range(i, i + 100):
                begin, length = rng.randrange(50_000), int(3 * 10 ** rng.uniform(0, 4))
                f.write(json.dumps({'text': f'document {j} ' + TEXT[begin:begin + length]}) + '\n')
    (folder / 'a.txt').write_text(TEXT * (size // len(TEXT)))
    (folder / 'z.md').write_text(TEXT[:5000])


def args_for(tmp_path, where, *more):
    return ['mine', f"--input={tmp_path / 'in'}", f'--data_dir={tmp_path / where}', '--tokenizer=byte', *more]


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob('*.bin')}


def looks_finished(folder):
    """What train.py would say: does the folder pass for a whole dataset?"""
    try:
        Dataset(folder.name, folder.parent)
        return True
    except SystemExit:
        return False


def test_killed_twenty_times_it_ends_with_the_same_bytes(tmp_path, forks, capsys):
    make_texts(tmp_path / 'in', 700, 9_000_000)
    more = ['--shard_tokens=130000']
    assert forks.run(*args_for(tmp_path, 'whole', *more)) == 0
    want = bytes_of(tmp_path / 'whole' / 'mine')
    assert len(want) > 50
    folder, kills, rng = tmp_path / 'data' / 'mine', 0, random.Random(7)
    progress = folder / 'unfinished' / 'progress.json'
    while True:
        begun = time_saved(progress)
        pid = forks.start(*args_for(tmp_path, 'data', *more))
        # let it save something new, so that it comes to an end in our lifetime
        while kills < 20 and time_saved(progress) in (None, begun) and is_running(pid):
            time.sleep(0.001)
        if kills < 20 and is_running(pid):
            time.sleep(rng.uniform(0, 0.004))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = forks.wait()
        if status == -signal.SIGKILL:
            kills += 1
            assert not looks_finished(folder) or bytes_of(folder) == want, capsys.readouterr().err
            continue
        assert status == 0 and bytes_of(folder) == want and looks_finished(folder)
        assert not (folder / 'unfinished').exists()
        if kills == 20:
            break
        shutil.rmtree(folder)  # it was too fast for us: once more


def time_saved(progress):
    try:
        return progress.stat().st_mtime_ns
    except OSError:
        return None


def is_running(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False


@pytest.mark.parametrize('before', ['nothing', 'another set'])
def test_killed_at_every_change_of_the_disk(tmp_path, forks, before, capsys):
    (tmp_path / 'in').mkdir()
    # one document: its end becomes val.bin, which takes one step more
    (tmp_path / 'in' / 'a.txt').write_text(TEXT)
    more = [f'--shard_tokens={len(TEXT) // 2}', '--val_fraction=0.3']
    folder, old, whole = (tmp_path / where / 'mine' for where in ('data', 'old', 'whole'))
    if before == 'another set':
        assert forks.run(*args_for(tmp_path, 'old', f'--shard_tokens={len(TEXT) // 3}')) == 0
    assert forks.run(*args_for(tmp_path, 'whole', *more)) == 0
    want = bytes_of(whole)
    args = args_for(tmp_path, 'data', *more)
    for k in range(2 if before == 'another set' else 1, 1000, 2):
        shutil.rmtree(folder, ignore_errors=True)
        if before != 'nothing':
            shutil.copytree(old, folder)
        status = forks.run(*args, kill_at=k)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if folder.exists() and looks_finished(folder):
            unchanged = before == 'another set' and bytes_of(folder) == bytes_of(old)
            assert unchanged or bytes_of(folder) == want, k
        assert forks.run(*args) == 0 and bytes_of(folder) == want and looks_finished(folder), k
        assert not (folder / 'unfinished').exists()
    assert k > 20 and bytes_of(folder) == want


def test_nanogpts_sets_continue_too(tmp_path, forks):
    (tmp_path / 'input.txt').write_text(TEXT)
    args = ['shakespeare_char', f"--input={tmp_path / 'input.txt'}", f'--shard_tokens={len(TEXT) // 5}']
    assert forks.run(*args, f"--data_dir={tmp_path / 'whole'}") == 0
    args.append(f"--data_dir={tmp_path / 'data'}")
    for k in range(1, 1000, 2):
        shutil.rmtree(tmp_path / 'data', ignore_errors=True)
        if forks.run(*args, kill_at=k) == 0:
            break
        assert forks.run(*args) == 0
        assert files_of(tmp_path, 'shakespeare_char') == bytes_of(tmp_path / 'whole' / 'shakespeare_char'), k
    assert k > 10


# -----------------------------------------------------------------------------
# signals


def start(*args):
    # tests that run in the background inherit that SIGINT is ignored
    return subprocess.Popen([sys.executable, str(REPO / 'prepare.py'), *args], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


@pytest.mark.skipif(sys.platform != 'linux', reason='sends signals')
def test_stopped_by_a_signal_it_ends_at_once_and_continues_later(tmp_path, gpt2):
    (tmp_path / 'in').mkdir()
    for i in range(4):
        (tmp_path / 'in' / f'{i}.txt').write_text(f'{i}' + TEXT * 20)
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
        for _ in range(100):
            if not os.popen(f'pgrep -g {process.pid}').read():
                break
            time.sleep(0.05)
        else:
            assert False, 'a worker lives on'
    done = own_process('prepare.py', name, *args)
    assert done.status == 0 and 'continuing' in done.out, done.err


@pytest.mark.skipif(sys.platform != 'linux', reason='kills a process')
def test_a_worker_that_is_killed_is_one_line(tmp_path, gpt2):
    (tmp_path / 'a.txt').write_text(TEXT * 150)
    process = start('mine', f"--input={tmp_path / 'a.txt'}", '--tokenizer=gpt2', '--workers=2',
                    f"--data_dir={tmp_path / 'data'}")
    while not (workers := os.popen(f'pgrep -P {process.pid}').read().split()):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(int(workers[0]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.count('\n') == 1 and '--workers' in err, err


# -----------------------------------------------------------------------------
# one writer, full disks


@pytest.mark.skipif(sys.platform == 'win32', reason='no file locks')
def test_a_second_prepare_into_the_same_dataset_is_refused(script, tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT)
    args = ['mine', f"--input={tmp_path / 'a.txt'}", '--tokenizer=byte', f"--data_dir={tmp_path / 'data'}"]
    assert script('prepare.py', *args).status == 0
    before = files_of(tmp_path, 'mine')
    holder = lock(tmp_path / 'data' / 'mine', 'prepare.py')
    (tmp_path / 'data' / 'mine' / 'unfinished').mkdir()  # as the other one would have
    result = own_process('prepare.py', *args)
    assert result.status == 2 and result.err.count('\n') == 1, result.err
    assert 'another prepare.py' in result.err
    assert (tmp_path / 'data' / 'mine' / 'unfinished').exists(), 'the work of the other one is left alone'
    holder.close()
    assert script('prepare.py', *args).status == 0 and files_of(tmp_path, 'mine') == before


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

    def limited(size):
        code = [sys.executable, '-c', LIMITED.format(repo=str(REPO)), str(size), *args]
        return subprocess.run(code, capture_output=True, text=True)
    done = limited(2_000_000)  # not even one shard
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and 'make room' in done.stderr, done.stderr
    assert not (tmp_path / 'data' / 'mine').exists()
    done = limited(3_000_000)  # shards fit, what comes last does not
    if done.returncode:
        assert done.stderr.count('\n') == 1 and 'make room' in done.stderr
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
        draft.add({'train': (np.arange(1500, dtype='<u2') % 3, 0)}, 0, (0, 0, 1500))
        draft.save()
        if damaged:
            (folder / damaged).write_bytes((folder / damaged).read_bytes()[:-1])
        draft = Draft(str(folder), dict(shard_tokens=1000), files)
        assert draft.resume() == (damaged is None), damaged
        out = capsys.readouterr()
        assert ('starting anew' in out.out) == bool(damaged) and not out.err


@pytest.mark.parametrize('content', ['[1]', '5', '{', '{"splits": 3}', '{"then": 5}', '{"then": {"splits": [1]}}',
                                     '{"command": 5, "splits": {}}', '{"splits": {"train": 1}, "then": {}}'])
def test_an_odd_meta_json_is_no_obstacle(script, tmp_path, content):
    folder = tmp_path / 'data' / 'mine'
    (folder / 'unfinished' / 'a folder').mkdir(parents=True)
    (folder / 'meta.json').write_text(content)
    (tmp_path / 'book.txt').write_text(TEXT)
    args = 'mine', f"--input={tmp_path / 'book.txt'}", '--tokenizer=byte', f"--data_dir={tmp_path / 'data'}"
    (folder / 'train.bin').write_bytes(b'12')
    result = script('prepare.py', 'mine', '--show', args[-1])
    assert result.status == 2 and result.err.count('\n') == 1, result.err
    result = script('prepare.py', *args)
    assert result.status == 0 and looks_finished(folder), result.err
    assert not (folder / 'unfinished').exists()
