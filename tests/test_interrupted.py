"""A run that is killed, stopped or out of disk space loses only what came after its newest checkpoint."""

import errno
import io
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import REPO, TEXT, TINY, assert_same_run, char_dataset, load_checkpoint, losses_of

import configurator
from flatgpt import benchmarks
import model


@pytest.fixture
def tiny(tiny):
    return [*tiny, '--dropout=0.1']


def start(*args, until):
    """Start train.py in the background. Return its process once it has printed a line that begins so."""
    process = subprocess.Popen([sys.executable, REPO / 'train.py', *args], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith(until):
            break
    return process


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(train, tiny, out, tmp_path):
    flags = ['--max_iters=150', '--eval_interval=5', '--auto_resume']
    rng = random.Random(1)
    for _ in range(3):
        process = start(*tiny, *flags, until='iter ')
        time.sleep(rng.random())
        process.kill()
        process.communicate()
        for path in out.glob('ckpt*.pt'):  # complete at every instant
            torch.load(path, weights_only=True)
    train(*flags)
    train(*flags, f"--out_dir={tmp_path / 'complete'}")
    assert_same_run(tmp_path / 'complete', out)


@pytest.fixture
def signal_at(monkeypatch):
    """signal_at('iter 2:', number) sends this process a signal when it prints a line that begins so."""
    def set_up(beginning, number):
        def print_and_signal(text):
            print(text)
            if text.startswith(beginning):
                signal.raise_signal(number)
        monkeypatch.setattr(configurator, 'print0', print_and_signal)
    return set_up


@pytest.fixture(scope='module')
def complete(works, data_dir, tmp_path_factory):
    """Return the folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp('complete') / 'out'
    works('train.py', *TINY, '--dropout=0.1', '--dataset=toy', f'--data_dir={data_dir}',
          f'--out_dir={folder}')
    return folder


@pytest.mark.parametrize('name', ['SIGTERM', 'SIGINT', 'SIGUSR1', 'SIGHUP'])
def test_a_signal_saves_at_once_and_a_resume_ends_with_the_same_bits(script, train, tiny, out, complete,
                                                                     signal_at, name):
    if not hasattr(signal, name):
        pytest.skip('Windows has only the first two')
    number = getattr(signal, name)
    handler = signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    signal_at('iter 2:', number)
    result = script('train.py', *tiny)
    signal.signal(number, handler)
    assert result.status == 128 + number
    assert load_checkpoint(out)['iter_num'] == 3
    assert 'step 3:' not in result.out  # saved before an evaluation, which may take long
    train('--init_from=resume')
    assert_same_run(complete, out)


@pytest.mark.skipif(not hasattr(signal, 'SIGHUP'), reason='this system has no SIGHUP')
def test_under_nohup_a_run_continues_after_its_terminal_is_closed(train, out, signal_at):
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal_at('iter 2:', signal.SIGHUP)
    train()
    signal.signal(signal.SIGHUP, handler)
    assert load_checkpoint(out)['iter_num'] == 6


def test_a_signal_is_answered_at_once_and_ends_a_long_evaluation(tiny, out, tmp_path):
    # the last evaluation reads both splits, which takes 20 seconds or more
    char_dataset(tmp_path / 'data', 'long', 16 * TEXT)
    t0 = time.perf_counter()
    sizes = ['--arch=modern', '--n_layer=4', '--n_embd=192', '--block_size=256', '--batch_size=8']
    process = start(*tiny, *sizes, '--dataset=long', f"--data_dir={tmp_path / 'data'}", '--max_iters=1',
                    '--eval_interval=0', '--eval_iters=0', until='iter 0:')
    seconds_to_start = time.perf_counter() - t0  # two or three; more on a busy machine
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    t0 = time.perf_counter()
    assert 'SIGTERM' in process.stdout.readline()
    rest = process.communicate()[0]
    assert time.perf_counter() - t0 < max(2, seconds_to_start)
    assert process.returncode == 128 + signal.SIGTERM
    assert 'step 1' not in rest
    assert load_checkpoint(out)['iter_num'] == 1


def test_a_signal_ends_benchmarks_and_the_run_saves(script, tiny, out, tmp_path, monkeypatch):
    (tmp_path / 'a.jsonl').write_text('{"context": "2 times 3 is ", "continuation": "6"}\n' * 3)
    is_correct = benchmarks.is_correct

    def signal_first(*args):
        signal.raise_signal(signal.SIGTERM)
        return is_correct(*args)

    monkeypatch.setattr(benchmarks, 'is_correct', signal_first)
    result = script('train.py', *tiny, f"--tasks={tmp_path / 'a.jsonl'}", '--tasks_interval=2',
                    '--eval_interval=0')
    assert result.status == 128 + signal.SIGTERM and 'accuracy' not in result.out
    assert load_checkpoint(out)['iter_num'] == 3


def test_on_a_full_disk_the_run_continues_and_the_older_checkpoints_stay(
        script, train, tiny, out, monkeypatch):
    save = torch.save

    def save_on_a_full_disk(state, file):
        if isinstance(file, io.BytesIO):
            return save(state, file)
        file.write(b'PK')
        raise OSError(errno.ENOSPC, 'No space left on device')

    train('--max_iters=2')
    with monkeypatch.context() as patch:
        patch.setattr(torch, 'save', save_on_a_full_disk)
        result = script('train.py', *tiny, '--init_from=resume')
    assert result.status == 1  # it has trained to its end, but its last checkpoint is not saved
    assert 'iter 5:' in result.out and 'warning' in result.out + result.err
    assert load_checkpoint(out)['iter_num'] == 2 and not list(out.glob('*.tmp'))
    train('--init_from=resume')
    assert load_checkpoint(out)['iter_num'] == 6


def test_two_runs_do_not_write_into_one_folder(script, tiny):
    process = start(*tiny, '--max_iters=1000000', '--eval_interval=10', until='step 10:')
    second = script('train.py', *tiny, '--init_from=resume')
    process.kill()
    process.communicate()
    assert second.status == 2


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that advances only in training, by clock.seconds per forward pass."""
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
        train, script, tiny, out, tmp_path, clock, signal_at):
    # six seconds, at 0.1 s per iteration, whatever the other budgets are
    flags = ['--train_minutes=0.1', '--max_tokens=64', '--lr_decay_iters=2']
    complete = tmp_path / 'complete'
    assert 'budget: 60 iterations' in train(*flags, f'--out_dir={complete}').out
    assert load_checkpoint(complete)['iter_num'] == 60
    rates = [float(row[2]) for row in losses_of(complete)]
    assert rates[20] > 0.009 and min(rates) == rates[-1] < 0.0011  # the decay ends with the run

    signal_at('iter 40:', signal.SIGTERM)
    assert script('train.py', *tiny, *flags).status == 128 + signal.SIGTERM
    clock.seconds = 0.3  # a slower machine
    train(*flags, '--auto_resume')
    assert load_checkpoint(out)['iter_num'] == 60
    assert_same_run(complete, out)


def test_a_clock_that_is_set_again_on_a_resume_includes_the_seconds_before(train, out, clock):
    train('--train_minutes=0.1', '--eval_interval=0')
    train('--init_from=resume', '--train_minutes=0.2')
    assert load_checkpoint(out)['iter_num'] == 120
    train('--init_from=resume', '--max_iters=125')  # replaces the clock
    assert load_checkpoint(out)['iter_num'] == 125
