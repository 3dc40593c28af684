"""A run that is killed, stopped or out of disk loses nothing but the iterations since its newest
checkpoint."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import REPO, TINY, assert_equal, load_checkpoint, losses_of

import configurator


@pytest.fixture
def flags(data_dir, tmp_path):
    return [*TINY, '--dataset=toy', f'--data_dir={data_dir}', f"--out_dir={tmp_path / 'out'}",
            '--dropout=0.1']


def start(*args, until):
    """train.py in a process of its own, in the background, once it has printed a line that begins so."""
    process = subprocess.Popen([sys.executable, str(REPO / 'train.py'), *map(str, args)],
                               stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith(until):
            break
    return process


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bits(works, flags, tmp_path):
    flags += ['--max_iters=150', '--eval_interval=5', '--auto_resume']
    rng = random.Random(1)
    for _ in range(3):
        process = start(*flags, until='iter ')
        time.sleep(rng.random())
        process.kill()
        process.communicate()
        for path in (tmp_path / 'out').glob('ckpt*.pt'):  # at every instant whole checkpoints only
            torch.load(path, weights_only=True)
    works('train.py', *flags)
    works('train.py', *flags, f"--out_dir={tmp_path / 'whole'}")
    whole, parts = load_checkpoint(tmp_path / 'whole'), load_checkpoint(tmp_path / 'out')
    assert_equal(whole['model'], parts['model'])
    assert_equal(whole['optimizer']['state'], parts['optimizer']['state'])
    assert losses_of(tmp_path / 'whole') == losses_of(tmp_path / 'out')


USR1 = getattr(signal, 'SIGUSR1', signal.SIGTERM)  # not on Windows


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, USR1])
def test_a_signal_saves_at_once_and_a_resume_ends_with_the_same_bits(script, works, flags, tmp_path,
                                                                     monkeypatch, number):
    works('train.py', *flags, f"--out_dir={tmp_path / 'whole'}")

    def print_and_signal(text):
        print(text)
        if text.startswith('iter 2:'):
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(configurator, "print0", print_and_signal)
        result = script('train.py', *flags)
    assert result.status == 128 + number
    assert load_checkpoint(tmp_path / 'out')['iter_num'] == 3
    assert 'step 3:' not in result.out  # it was saved before an evaluation, which may take long
    works('train.py', *flags, '--init_from=resume')
    assert_equal(load_checkpoint(tmp_path / 'whole')['model'], load_checkpoint(tmp_path / 'out')['model'])


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of its own, with room for two checkpoints of the tiny run and a half."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    command = ['mount', '-t', 'tmpfs', '-o', 'size=1100k', 'tmpfs', str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip('no file system can be mounted here')
    yield folder
    subprocess.run(['umount', '-l', str(folder)], check=True)


def test_on_a_full_disk_the_run_goes_on_and_the_older_checkpoints_stay(script, works, flags, small_disk):
    out = small_disk / 'out'
    flags += [f'--out_dir={out}', '--save_interval=2']
    works('train.py', *flags, '--max_iters=2')
    size = (out / 'ckpt_00000002.pt').stat().st_size
    free = os.statvfs(small_disk)
    (small_disk / 'filler').write_bytes(bytes(free.f_bavail * free.f_frsize - size // 2))
    result = script('train.py', *flags, '--init_from=resume', '--max_iters=6')
    assert result.status == 1  # it trained to its end, and could not save that
    assert 'iter 5:' in result.out and 'warning' in result.out + result.err
    assert load_checkpoint(out)['iter_num'] == 2
    assert not list(out.glob('*.tmp'))
    (small_disk / 'filler').unlink()
    works('train.py', *flags, '--init_from=resume', '--max_iters=6')
    assert load_checkpoint(out)['iter_num'] == 6


def test_two_runs_do_not_write_into_one_folder(script, flags):
    process = start(*flags, '--max_iters=1000000', '--eval_interval=10', until='iter 30:')
    second = script('train.py', *flags, '--init_from=resume')
    process.kill()
    process.communicate()
    assert second.status == 2
