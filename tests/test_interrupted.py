"""A run that is killed, stopped or out of disk loses nothing but the iterations since its newest
checkpoint."""

import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import REPO, TEXT, TINY, assert_equal, char_dataset, load_checkpoint, losses_of, read_log

import benchmarks
import configurator
import model


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


# Windows has the first two only
SIGNALS = [getattr(signal, name) for name in ['SIGTERM', 'SIGINT', 'SIGUSR1', 'SIGHUP'] if hasattr(signal, name)]
needs_hangup = pytest.mark.skipif(not hasattr(signal, 'SIGHUP'), reason='this system has no SIGHUP')


@pytest.fixture
def on_hangup():
    """on_hangup(signal.SIG_IGN) sets what SIGHUP does, until the test ends."""
    if not hasattr(signal, 'SIGHUP'):
        yield lambda handler: None
        return
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def signal_at(monkeypatch):
    """signal_at('iter 2:', number): the process gets this signal once it has printed such a line."""
    def set_up(beginning, number):
        def print_and_signal(text):
            print(text)
            if text.startswith(beginning):
                signal.raise_signal(number)
        monkeypatch.setattr(configurator, 'print0', print_and_signal)
    return set_up


@pytest.mark.parametrize('number', SIGNALS)
def test_a_signal_saves_at_once_and_a_resume_ends_with_the_same_bits(script, works, flags, tmp_path,
                                                                     monkeypatch, signal_at, on_hangup,
                                                                     number):
    works('train.py', *flags, f"--out_dir={tmp_path / 'whole'}")
    on_hangup(signal.SIG_DFL)
    signal_at('iter 2:', number)
    result = script('train.py', *flags)
    monkeypatch.undo()
    assert result.status == 128 + number
    assert load_checkpoint(tmp_path / 'out')['iter_num'] == 3
    assert 'step 3:' not in result.out  # it was saved before an evaluation, which may take long
    works('train.py', *flags, '--init_from=resume')
    assert_equal(load_checkpoint(tmp_path / 'whole')['model'], load_checkpoint(tmp_path / 'out')['model'])


@needs_hangup
def test_under_nohup_a_run_outlives_its_terminal(works, flags, tmp_path, signal_at, on_hangup):
    on_hangup(signal.SIG_IGN)
    signal_at('iter 2:', signal.SIGHUP)
    works('train.py', *flags)
    assert load_checkpoint(tmp_path / 'out')['iter_num'] == 6


def test_a_signal_is_answered_at_once_and_ends_a_long_evaluation(flags, tmp_path):
    # at the end of the run: both splits, 20 seconds and more
    char_dataset(tmp_path / 'data', 'long', 16 * TEXT)
    t0 = time.perf_counter()
    sizes = ['--arch=modern', '--n_layer=4', '--n_embd=192', '--block_size=256', '--batch_size=8']
    process = start(*flags, *sizes, '--dataset=long', f"--data_dir={tmp_path / 'data'}", '--max_iters=1',
                    '--eval_interval=0', '--eval_iters=0', until='iter 0:')
    seconds_to_start = time.perf_counter() - t0  # two or three; more on a busy machine
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    t0 = time.perf_counter()
    assert 'SIGTERM' in process.stdout.readline()
    rest = process.communicate()[0]
    seconds = time.perf_counter() - t0
    assert process.returncode == 128 + signal.SIGTERM
    assert 'step 1' not in rest and 'stopped' in rest
    assert load_checkpoint(tmp_path / 'out')['iter_num'] == 1
    assert seconds < max(2, seconds_to_start)


def test_a_signal_ends_benchmarks_and_the_run_saves(script, flags, tmp_path, monkeypatch):
    (tmp_path / 'a.jsonl').write_text('{"context": "2 times 3 is ", "continuation": "6"}\n' * 3)
    is_correct = benchmarks.is_correct

    def signal_first(*args):
        signal.raise_signal(signal.SIGTERM)
        return is_correct(*args)

    monkeypatch.setattr(benchmarks, 'is_correct', signal_first)
    result = script('train.py', *flags, f"--tasks={tmp_path / 'a.jsonl'}", '--tasks_interval=2',
                    '--eval_interval=0')
    assert result.status == 128 + signal.SIGTERM and 'accuracy' not in result.out
    assert load_checkpoint(tmp_path / 'out')['iter_num'] == 3
    assert 'a.jsonl' not in read_log(tmp_path / 'out')[-1]


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


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still, except for clock.seconds in each forward pass that trains."""
    now = SimpleNamespace(seconds=0.1, time=0.0)
    forward = model.GPT.forward

    def timed_forward(self, *args, **options):
        if self.training:
            now.time += now.seconds
        return forward(self, *args, **options)

    monkeypatch.setattr(model.GPT, 'forward', timed_forward)
    monkeypatch.setattr(time, 'perf_counter', lambda: now.time)
    return now


def test_the_clock_sets_the_number_of_iterations_once_and_a_resume_keeps_it_to_the_bit(
        works, script, flags, tmp_path, clock, signal_at):
    # six seconds, whatever else says how long the run is; 0.1 s per iteration
    flags = [*flags, '--train_minutes=0.1', '--max_tokens=64', '--lr_decay_iters=2']
    result = works('train.py', *flags, f"--out_dir={tmp_path / 'whole'}")
    assert 'budget: 60 iterations' in result.out
    whole = load_checkpoint(tmp_path / 'whole')
    assert whole['iter_num'] == 60
    rates = [float(row[2]) for row in losses_of(tmp_path / 'whole')]
    assert rates[20] > 0.009 and min(rates) == rates[-1] < 0.0011  # the decay ends with the run

    signal_at('iter 40:', signal.SIGTERM)
    assert script('train.py', *flags).status == 128 + signal.SIGTERM
    clock.seconds = 0.3  # a slower machine
    works('train.py', *flags, '--auto_resume')
    parts = load_checkpoint(tmp_path / 'out')
    assert parts['iter_num'] == 60
    assert_equal(whole['model'], parts['model'])
    assert_equal(whole['optimizer']['state'], parts['optimizer']['state'])


def test_a_clock_that_is_set_again_on_a_resume_counts_the_seconds_before(works, flags, tmp_path, clock):
    works('train.py', *flags, '--train_minutes=0.1')
    works('train.py', *flags, '--init_from=resume', '--train_minutes=0.2')
    assert load_checkpoint(tmp_path / 'out')['iter_num'] == 120
    works('train.py', *flags, '--init_from=resume', '--max_iters=125')  # takes the place of the clock
    assert load_checkpoint(tmp_path / 'out')['iter_num'] == 125
