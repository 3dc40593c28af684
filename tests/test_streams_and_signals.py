"""Standard output and error that are closed or go away, and the signals of terminals that are closed."""

import os
import shutil
import signal

import pytest
import warm
from conftest import HANDLED, NO_PICTURES, REPO, TINY, captured, make_dataset

from configurator import fail
from support import signals
from support.parallel import Distributed


@pytest.fixture
def trained(tmp_path, script):
    """A folder with the dataset tiny in data/ and a run in out/."""
    make_dataset(tmp_path / 'data')
    (tmp_path / 'book.txt').write_text('A text. ' * 500)
    assert script('train.py', *TINY, '--dataset=tiny', f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}").status == 0
    return tmp_path


@pytest.mark.parametrize('name, flags, outcome', [
    ('train.py', [*TINY, '--dataset=tiny', '--overwrite', '--data_dir={}/data', '--out_dir={}/another'], 'another/run.json'),
    ('sample.py', '--out_dir={}/out --device=cpu --num_samples=1 --max_new_tokens=3'.split(), None),
    ('eval.py', '--out_dir={}/out --data_dir={}/data --device=cpu --eval_tokens=64'.split(), 'out/eval.json'),
    ('prepare.py', 'books --overwrite --tokenizer=byte --input={}/book.txt --data_dir={}/data'.split(), 'data/books/meta.json'),
    ('export.py', ['--out_dir={}/out', '--to={}/hf'], 'hf/config.json')])
def test_streams_that_are_closed_or_have_no_reader_change_nothing_but_what_is_seen(trained, name, flags, outcome):
    reader, unread = os.pipe()
    os.close(reader)
    with open(os.devnull) as nothing:
        for files in ([None, None, None], [nothing.fileno(), unread, unread]):
            process = warm.Process(name, *[flag.format(trained) for flag in flags], files=files, env={'PYTHONPATH': NO_PICTURES})
            assert process.wait(200)[0] == 0 or (not outcome and files[1])  # `| head` ends sample.py
            if outcome:
                (trained / outcome).unlink()
                shutil.rmtree(trained / 'hf', ignore_errors=True)
    os.close(unread)
    saved = [path.read_bytes() for path in trained.glob('another/*') if path.name != 'log.csv']
    assert not any(b'iter 0: loss' in content for content in saved), 'no file has taken the place of standard output'


def test_the_line_to_continue_is_seen_where_tee_has_ended(tmp_path):
    make_dataset(tmp_path / 'data')
    process = warm.Process('train.py', *TINY, '--dataset=tiny', '--max_iters=100000', '--eval_interval=0',
                           f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}", env={'PYTHONPATH': NO_PICTURES})
    shown = b''
    while b'iter 3:' not in shown:
        shown += process.stdout.read(10_000)
    assert b'\ntime      about ' in shown.split(b'iter ')[0], 'how long it takes, before the first long wait'
    process.stdout.close()  # Ctrl-C ends both sides of `| tee log.txt`
    process.interrupt()
    status, said = process.wait()
    assert status == 130 and 'to continue: ' in said.splitlines()[-1]


# -----------------------------------------------------------------------------


def test_a_request_to_stop_that_is_ignored_stays_ignored():
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        now = signals.Stop(Distributed('cpu'))
        signal.raise_signal(signal.SIGHUP)
        assert now.poll() is None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -----------------------------------------------------------------------------


def test_torchrun_shows_our_line_at_the_end_of_its_report(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    monkeypatch.setenv('TORCHELASTIC_ERROR_FILE', f'{tmp_path}/error.json')
    with pytest.raises(SystemExit):
        fail('unknown knob (--x). see\npython train.py --help')
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=f'{tmp_path}/error.json')
    report = str(ChildFailedError('train.py', {0: failure}))
    assert 'error: unknown knob (--x). see python train.py --help' in report and 'elastic/errors.html' not in report


def test_several_machines_without_gpus_want_a_number_of_processes():
    env = {**os.environ, 'NPROC': '', 'VIRTUAL_ENV': 'x'}
    line = ['bash', 'runs/multinode.sh', '127.0.0.1', '1']
    done = captured(line, cwd=REPO, env=env)
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and 'NPROC=2' in done.stderr, done.stderr
