"""What several tests use: a tiny dataset, flags of a tiny run; run scripts, and compare runs."""

import csv
import gc
import io
import os
import pickle
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
os.environ['CUDA_VISIBLE_DEVICES'] = ''  # the same tests on every machine; for a GPU, see runs/gpu_check.sh
os.environ['OMP_NUM_THREADS'] = '1'  # for tiny networks, a second thread only waits
os.environ['HF_HUB_OFFLINE'] = '1'  # no test waits for the network
os.environ['WANDB_MODE'] = 'offline'

import torch  # only now, because it reads these variables

from configurator import InputError

TEXT = ''.join(f'{a} times {b} is {a * b}.\n' for a in range(60) for b in range(60))

# a run of train.py that takes about a second
TINY = [
    '--device=cpu', '--dtype=float32', '--compile=False', '--block_size=16', '--batch_size=4',
    '--gradient_accumulation_steps=1', '--n_layer=2', '--n_head=2', '--n_embd=32', '--max_iters=6',
    '--warmup_iters=2', '--eval_interval=3', '--eval_iters=2', '--learning_rate=1e-2',
]


def copy_code(folder):
    """Copy the scripts, and what they import, to another folder."""
    for path in REPO.glob('*.py'):
        shutil.copy(path, folder)
    shutil.copytree(REPO / 'flatgpt', folder / 'flatgpt', ignore=shutil.ignore_patterns('__pycache__'))


def forget_modules(monkeypatch):
    """Let this project's modules be imported again, until the end of the test."""
    names = ['flatgpt', *(path.stem for path in REPO.glob('*.py'))]
    names += [f'flatgpt.{path.stem}' for path in REPO.glob('flatgpt/*.py')]
    for name in names:
        if name != 'configurator':  # its InputError is the one that run_here() expects
            monkeypatch.setitem(sys.modules, name, None)  # restored after the test, or removed
            del sys.modules[name]


def run_script(name, *args, env=None, cwd=None, timeout=300):
    """Run a script of this repository in another process: .returncode, .stdout, .stderr."""
    command = [sys.executable, str(REPO / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd,
                          env={**os.environ, **(env or {})})


def run_processes(n, name, *args, timeout=300):
    """Run a script in n processes with torchrun's variables. Return the output of the first one, and the
    highest exit status."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    env = {**os.environ, 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port), 'WORLD_SIZE': str(n),
           'LOCAL_WORLD_SIZE': str(n)}
    command = [sys.executable, str(REPO / name), *map(str, args)]
    processes = []
    for rank in range(n):
        processes.append(subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**env, 'RANK': str(rank), 'LOCAL_RANK': str(rank)}))
    outputs = [process.communicate(timeout=timeout) for process in processes]
    return subprocess.CompletedProcess(command, max(process.returncode for process in processes), *outputs[0])


def char_dataset(folder, name='toy', text=TEXT):
    """Write a dataset of characters to folder/name, as nanoGPT's prepare.py does. Return `folder`."""
    path = Path(folder) / name
    path.mkdir(parents=True)
    chars = sorted(set(text))
    stoi = {c: i for i, c in enumerate(chars)}
    itos = {i: c for i, c in enumerate(chars)}
    ids = np.array([stoi[c] for c in text], dtype=np.uint16)
    n = int(0.9 * len(ids))
    ids[:n].tofile(path / 'train.bin')
    ids[n:].tofile(path / 'val.bin')
    (path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': len(chars), 'stoi': stoi, 'itos': itos}))
    return Path(folder)


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    """Return a folder that contains the dataset `toy`."""
    return char_dataset(tmp_path_factory.mktemp('data'))


def data_file(name):
    """Return the path of a real text or cache in the folder FLATGPT_TEST_DATA, or skip the test."""
    path = Path(os.environ.get('FLATGPT_TEST_DATA', 'nowhere')) / name
    if not path.exists():
        pytest.skip(f'FLATGPT_TEST_DATA has no {name}')
    return path


def run_here(path, *args):
    """Run a script in this process, because importing torch takes seconds: .status, .out, .err, .globals.

    The globals are empty if the script has called sys.exit().
    """
    names = ['SIGTERM', 'SIGINT', 'SIGHUP', 'SIGUSR1', 'SIGPIPE']
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows lacks some of them
    handlers = {number: signal.getsignal(number) for number in numbers}
    n_threads = torch.get_num_threads()
    out = io.TextIOWrapper(io.BytesIO(), 'utf-8', write_through=True)
    err = io.StringIO()
    result = SimpleNamespace(status=0, globals={})
    with (patch.object(sys, 'argv', [str(REPO / path), *map(str, args)]),
          patch.object(sys, 'excepthook', sys.excepthook), redirect_stdout(out), redirect_stderr(err)):
        try:
            result.globals = runpy.run_path(str(REPO / path), run_name='__main__')
        except SystemExit as e:
            result.status = e.code or 0
        except InputError as e:
            with pytest.raises(SystemExit) as exit_info:
                sys.excepthook(type(e), e, e.__traceback__)
            result.status = exit_info.value.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            torch.set_num_threads(n_threads)
            gc.unfreeze()
    result.out = out.buffer.getvalue().decode()
    result.err = err.getvalue()
    return result


@pytest.fixture(scope='session')
def script():
    """Return run_here: script('train.py', '--max_iters=3')."""
    return run_here


@pytest.fixture(scope='session')
def works(script):
    """Return run_here with a check that the script ends with status 0."""
    def run(path, *args):
        result = script(path, *args)
        assert result.status == 0, result.err
        return result
    return run


@pytest.fixture
def out(tmp_path):
    return tmp_path / 'out'


@pytest.fixture
def tiny(data_dir, out):
    """Return the flags of a run of about a second, on the dataset `toy`, whose folder is `out`."""
    return [*TINY, '--dataset=toy', f'--data_dir={data_dir}', f'--out_dir={out}']


@pytest.fixture
def train(works, tiny):
    """train('--max_iters=7') runs train.py with the flags of `tiny` and these, and checks its status."""
    def run(*flags, path='train.py'):
        return works(path, *tiny, *flags)
    return run


def knobs_of(script, *args):
    """Run a script with these arguments, up to its call of configure(). Return its globals."""
    source = (REPO / script).read_text()
    end = re.search(r'^ *(config, given = )?configure\(.*$', source, re.M).end()
    names = {'__name__': '__main__', '__file__': str(REPO / script)}
    argv = [script, *map(str, args)]
    with patch.object(sys, 'argv', argv), patch.object(sys, 'excepthook', sys.excepthook):
        exec(compile(source[:end], script, 'exec'), names)
    return names


def load_checkpoint(folder, name='ckpt.pt'):
    return torch.load(Path(folder) / name, weights_only=True)


def read_log(folder):
    """Return the rows of log.csv as dicts of strings."""
    with open(Path(folder) / 'log.csv', newline='') as f:
        return list(csv.DictReader(f))


def losses_of(folder):
    """Return (iteration, loss, learning rate, gradient norm) of the rows of log.csv, as strings."""
    rows = [row for row in read_log(folder) if row['loss']]
    return [(row['iter'], row['loss'], row['lr'], row['grad_norm']) for row in rows]


def assert_equal(a, b):
    """Check that two nested states of tensors and numbers are bit-identical."""
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_same_weights(folder, other):
    """Check that two runs end with bit-identical weights and moments."""
    ckpt = load_checkpoint(folder)
    other_ckpt = load_checkpoint(other)
    assert_equal(ckpt['model'], other_ckpt['model'])
    assert_equal(ckpt['optimizer']['state'], other_ckpt['optimizer']['state'])


def assert_same_run(folder, other):
    """Check that two runs have bit-identical losses, weights and moments."""
    assert losses_of(folder) == losses_of(other)
    assert_same_weights(folder, other)


def assert_close_run(folder, other):
    """Check that two runs have the same losses, learning rates, norms and weights up to rounding."""
    for row, other_row in zip(losses_of(folder), losses_of(other), strict=True):
        for value, other_value in zip(row, other_row):
            assert float(value) == pytest.approx(float(other_value), rel=1e-4)
    torch.testing.assert_close(load_checkpoint(folder)['model'], load_checkpoint(other)['model'],
                               atol=3e-4, rtol=1e-3)
