"""Standard output and error that are closed or go away, and the signals of terminals that are closed."""

import json
import os
import signal
import subprocess
import time

import pytest
import warm
from conftest import NO_PICTURES, REPO, TINY, make_dataset

from configurator import fail
from support import signals
from support.distributed import Distributed

RUN = [*TINY, '--dataset=tiny']


@pytest.fixture
def trained(tmp_path, script):
    """A folder with the dataset tiny in data/ and a run in out/."""
    make_dataset(tmp_path / 'data')
    assert script('train.py', *RUN, *where(tmp_path)).status == 0
    return tmp_path


def where(place, out='out'):
    return [f"--data_dir={place / 'data'}", f"--out_dir={place / out}"]


def status_of(name, place, files, *args):
    """The exit status of a script that has these files as standard input, output and error."""
    process = warm.Process(name, *arguments(name, place), *args, files=files, env={'PYTHONPATH': NO_PICTURES})
    return process.wait(200)[0]


@pytest.fixture
def no_reader():
    """The end of a pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def arguments(name, place):
    if name == 'train.py':
        return [*RUN, *where(place, 'another')]
    if name == 'sample.py':
        return [*where(place), '--device=cpu', '--num_samples=1', '--max_new_tokens=3']
    if name == 'eval.py':
        return [*where(place), '--device=cpu', '--eval_tokens=64']
    if name == 'prepare.py':
        (place / 'book.txt').write_text('A text. ' * 500)
        return ['books', '--tokenizer=byte', f"--input={place / 'book.txt'}", f"--data_dir={place / 'data'}"]
    return [*where(place), f"--to={place / 'hf'}"]


@pytest.mark.parametrize('name', ['train.py', 'sample.py', 'eval.py', 'prepare.py', 'export.py'])
def test_closed_streams_change_nothing_but_what_is_seen(trained, name):
    assert status_of(name, trained, [None, None, None]) == 0
    if name == 'train.py':
        content = b''.join(path.read_bytes() for path in (trained / 'another').iterdir() if path.name != 'log.csv')
        assert b'iter 0: loss' not in content, 'no file has taken the place of standard output'


@pytest.mark.parametrize('name, outcome', [
    ('train.py', 'another/run.json'), ('eval.py', 'out/eval.json'), ('prepare.py', 'data/books/meta.json'),
    ('export.py', 'hf/config.json')])
def test_a_reader_that_ends_does_not_end_the_work(trained, no_reader, name, outcome):
    with open(os.devnull) as nothing:
        assert status_of(name, trained, [nothing.fileno(), no_reader, no_reader]) == 0
    assert (trained / outcome).exists()


def test_without_a_reader_a_run_that_gives_up_still_says_so_in_run_json(trained, no_reader):
    flags = ['--max_iters=60', '--learning_rate=1e14', '--grad_clip=0', '--eval_interval=0']
    with open(os.devnull) as nothing:
        assert status_of('train.py', trained, [nothing.fileno(), no_reader, no_reader], *flags) == 3
    assert json.loads((trained / 'another' / 'run.json').read_text())['outcome'].startswith('gave up')


# -----------------------------------------------------------------------------


@pytest.fixture
def stop(monkeypatch):
    """A Stop, whose handlers go with the test."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in (*signals.TO_STOP, 'SIGUSR2')}
    yield lambda: signals.Stop(Distributed('cpu'))
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)


@pytest.mark.parametrize('name', ['SIGHUP', 'SIGQUIT'])
def test_a_closed_terminal_is_a_request_to_save_and_stop_unless_it_is_ignored(stop, name):
    number = getattr(signal, name)
    now = stop()
    os.kill(os.getpid(), number)
    assert now.poll() == 'stop' and now.exit_status() == 128 + number and now.reason() == name
    signal.signal(number, signal.SIG_IGN)  # as nohup does
    now = stop()
    os.kill(os.getpid(), number)
    assert now.poll() is None and signal.getsignal(number) == signal.SIG_IGN


def test_signals_within_two_seconds_are_one_request(stop, monkeypatch):
    now, killed = stop(), []
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    assert now.poll() == 'stop' and now.reason() == 'SIGHUP'
    later = time.monotonic() + 2.1
    monkeypatch.setattr(signals.time, 'monotonic', lambda: later)
    monkeypatch.setattr(signals.os, 'kill', lambda pid, number: killed.append(number))
    now.on_stop(signal.SIGTERM, None)
    assert killed == [signal.SIGTERM], 'a later one ends it at once'


# -----------------------------------------------------------------------------


def test_torchrun_shows_our_line_at_the_end_of_its_report(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    monkeypatch.setenv('TORCHELASTIC_ERROR_FILE', str(tmp_path / 'error.json'))
    with pytest.raises(SystemExit):
        fail('unknown knob (--x). see\npython train.py --help')
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / 'error.json'))
    report = str(ChildFailedError('train.py', {0: failure}))
    assert 'error: unknown knob (--x). see python train.py --help' in report and 'elastic/errors.html' not in report


def test_multinode_without_a_gpu_asks_for_a_number_of_processes():
    env = {**os.environ, 'CUDA_VISIBLE_DEVICES': '', 'NPROC': ''}
    done = subprocess.run(['bash', 'runs/multinode.sh', '127.0.0.1', '1'], cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and 'NPROC=2' in done.stderr, done.stderr
