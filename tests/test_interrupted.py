"""A run that is killed, stopped or out of disk loses nothing but the iterations since its newest
checkpoint."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import REPO, TINY, assert_equal, load_checkpoint, losses_of, run_script

FLAGS = [*TINY, '--dataset=toy', '--max_iters=200', '--lr_decay_iters=200', '--eval_interval=20',
         '--log_interval=20', '--dropout=0.1']


def start(*args):
    """train.py in a process of its own, in the background."""
    return subprocess.Popen([sys.executable, str(REPO / 'train.py'), *map(str, args)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, 'it did not happen in time'
        time.sleep(0.01)


@pytest.fixture(scope='module')
def uninterrupted(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'whole'
    result = run_script('train.py', *FLAGS, f'--data_dir={data_dir}', f'--out_dir={out}')
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bits(data_dir, tmp_path, uninterrupted):
    out = tmp_path / 'out'
    flags = [*FLAGS, f'--data_dir={data_dir}', f'--out_dir={out}', '--auto_resume']
    rng = random.Random(1)
    for _ in range(3):
        process = start(*flags)
        wait_for(lambda: out.exists() and list(out.glob('ckpt_0*.pt')) or process.poll() is not None)
        time.sleep(rng.random())
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for path in out.glob('ckpt*.pt'):  # at every instant the folder holds whole checkpoints only
            torch.load(path, weights_only=True)
    result = run_script('train.py', *flags)
    assert result.returncode == 0, result.stderr
    whole, parts = load_checkpoint(uninterrupted), load_checkpoint(out)
    assert_equal(whole['model'], parts['model'])
    assert_equal(whole['optimizer']['state'], parts['optimizer']['state'])
    assert losses_of(out) == losses_of(uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_at_once_and_a_resume_ends_with_the_same_bits(data_dir, tmp_path, uninterrupted,
                                                                     number):
    out = tmp_path / 'out'
    flags = [*FLAGS, f'--data_dir={data_dir}', f'--out_dir={out}']
    process = start(*flags, '--log_interval=1', '--save_interval=0')
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith('iter 30:'):
            process.send_signal(number)
    process.wait()
    assert process.returncode == 128 + number
    last_iter = int(re.findall(r'^iter (\d+):', ''.join(lines), re.M)[-1])
    assert load_checkpoint(out)['iter_num'] == last_iter + 1
    assert not any(line.startswith(f'step {last_iter + 1}:') for line in lines)  # saved before it evaluates
    if number == signal.SIGTERM:
        result = run_script('train.py', *flags, '--init_from=resume')
        assert result.returncode == 0, result.stderr
        assert_equal(load_checkpoint(uninterrupted)['model'], load_checkpoint(out)['model'])


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of its own, with room for two checkpoints of the tiny run and a half."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    command = ['mount', '-t', 'tmpfs', '-o', 'size=1100k', 'tmpfs', str(folder)]
    mounted = subprocess.run(command, capture_output=True)
    if mounted.returncode:
        pytest.skip('no file system can be mounted here')
    yield folder
    subprocess.run(['umount', '-l', str(folder)], check=True)


def test_on_a_full_disk_the_run_goes_on_and_the_older_checkpoints_stay(data_dir, small_disk):
    out = small_disk / 'out'
    flags = [*TINY, '--dataset=toy', f'--data_dir={data_dir}', f'--out_dir={out}', '--save_interval=2']
    assert run_script('train.py', *flags, '--max_iters=2').returncode == 0
    size = (out / 'ckpt_00000002.pt').stat().st_size
    free = os.statvfs(small_disk)
    (small_disk / 'filler').write_bytes(bytes(free.f_bavail * free.f_frsize - size // 2))
    result = run_script('train.py', *flags, '--init_from=resume', '--max_iters=6')
    assert result.returncode == 1  # it trained to its end, and could not save that
    assert 'iter 5:' in result.stdout and 'warning' in result.stdout + result.stderr
    assert load_checkpoint(out)['iter_num'] == 2
    assert not list(out.glob('*.tmp'))
    (small_disk / 'filler').unlink()
    result = run_script('train.py', *flags, '--init_from=resume', '--max_iters=6')
    assert result.returncode == 0, result.stderr
    assert load_checkpoint(out)['iter_num'] == 6


def test_two_runs_do_not_write_into_one_folder(data_dir, tmp_path):
    out = tmp_path / 'out'
    flags = [*FLAGS, f'--data_dir={data_dir}', f'--out_dir={out}', '--max_iters=1000000']
    process = start(*flags)
    wait_for(lambda: list(out.glob('ckpt_0*.pt')))
    second = run_script('train.py', *flags, '--init_from=resume')
    process.kill()
    process.communicate()
    assert second.returncode == 2 and second.stderr.startswith('error: ')
