"""Whatever happens to prepare.py, what looks finished is finished, and run again it ends with the bytes of an undisturbed run."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO, TEXT, own_process

from dataset import Dataset


def corpus(folder, n=300, size=20):
    """Documents of very different lengths, in files of several kinds."""
    folder.mkdir()
    rng = random.Random(1)
    texts = [f'document {i} ' + TEXT[(a := rng.randrange(50_000)):a + int(3 * 10 ** rng.uniform(0, 4))] for i in range(n)]
    for i in range(0, n, 100):
        (folder / f'{i:03d}.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts[i:i + 100]))
    (folder / 'a.txt').write_text(TEXT * size)
    (folder / 'z.md').write_text(TEXT[:5000])
    return folder


def bytes_of(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.suffix == '.bin'}


def args_for(tmp_path, where, *more):
    return ['mine', f"--input={tmp_path / 'in'}", f'--data_dir={tmp_path / where}', '--tokenizer=byte', *more]


def looks_finished(folder):
    """What train.py would say, in another process' words: does the folder pass for a whole dataset?"""
    try:
        Dataset(folder.name, folder.parent)
        return True
    except SystemExit:
        return False


def test_killed_twenty_times_it_ends_with_the_same_bytes(tmp_path, capsys):
    corpus(tmp_path / 'in', 2000, 30_000_000 // len(TEXT))
    more = ['--shard_tokens=400000']
    assert own_process('prepare.py', *args_for(tmp_path, 'whole', *more)).status == 0
    want = bytes_of(tmp_path / 'whole' / 'mine')
    assert len(want) > 50
    folder, kills, rng = tmp_path / 'data' / 'mine', 0, random.Random(7)
    progress = folder / 'unfinished' / 'progress.json'
    while True:
        process = subprocess.Popen([sys.executable, str(REPO / 'prepare.py'), *args_for(tmp_path, 'data', *more)], stdout=subprocess.DEVNULL)
        begun = progress.stat().st_mtime_ns if progress.exists() else 0
        while kills < 20 and process.poll() is None:  # let it save something new, so that it comes to an end in our lifetime
            if progress.exists() and progress.stat().st_mtime_ns != begun:
                time.sleep(rng.uniform(0, 0.02))
                process.kill()
                break
            time.sleep(0.001)
        if process.wait() == 0:
            break
        kills += 1
        assert process.returncode == -signal.SIGKILL and not looks_finished(folder), capsys.readouterr().err
    assert kills == 20
    assert bytes_of(folder) == want and looks_finished(folder) and not (folder / 'unfinished').exists()


# forks that run prepare.py and are killed at their k-th call that changes something on the disk; 0 for never
KILLED_AT = '''
import os, runpy, sys
sys.path.insert(0, {repo!r})
import corpus
def count(real):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)
    return call
for name in ('replace', 'fsync', 'remove', 'unlink', 'rmdir', 'mkdir'):
    setattr(os, name, count(getattr(os, name) if name != 'fsync' else lambda fd: None))  # of use when the power fails; slow
for line in sys.stdin:
    left = int(line)
    if (pid := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = ['prepare.py', *{args!r}]
        runpy.run_path({prepare!r}, run_name='__main__')
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
'''


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='kills forked processes')
@pytest.mark.parametrize('before', ['nothing', 'another set', 'parts to join'])
def test_killed_at_every_change_of_the_disk(tmp_path, before, capsys):
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in' / 'a.txt').write_text(TEXT)  # one document: its end becomes val.bin, which takes one step more
    more = [f'--shard_tokens={len(TEXT) // 2}', '--val_fraction=0.3']
    folder, old, whole = (tmp_path / where / 'mine' for where in ('data', 'old', 'whole'))
    assert own_process('prepare.py', *args_for(tmp_path, 'whole', *more)).status == 0
    if before == 'another set':
        assert own_process('prepare.py', *args_for(tmp_path, 'old', f'--shard_tokens={len(TEXT) // 3}')).status == 0
    if before == 'parts to join':
        (tmp_path / 'in' / 'b.txt').write_text(TEXT[::-1])
        assert own_process('prepare.py', *args_for(tmp_path, 'whole', *more)).status == 0
        for part in ('1/2', '2/2'):
            assert own_process('prepare.py', *args_for(tmp_path, 'old', *more, f'--part={part}')).status == 0
        more = ['--join']
    want = bytes_of(whole)
    code = KILLED_AT.format(repo=str(REPO), prepare=str(REPO / 'prepare.py'), args=args_for(tmp_path, 'data', *more))
    child = subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(kill_at):
        child.stdin.write(f'{kill_at}\n'), child.stdin.flush()
        return int(child.stdout.readline())

    for k in range(2 if before == 'another set' else 1, 1000, 2):
        shutil.rmtree(folder, ignore_errors=True)
        if before != 'nothing':
            shutil.copytree(old, folder)
        status = run(k)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if folder.exists() and looks_finished(folder):
            assert bytes_of(folder) == want or before == 'another set' and bytes_of(folder) == bytes_of(old), k
        assert run(0) == 0 and bytes_of(folder) == want and looks_finished(folder) and not list(folder.glob('[pu]*')), k
    assert k > 20 and bytes_of(folder) == want
    child.stdin.close()
    child.wait()
