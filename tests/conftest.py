"""What the tests share: a tiny dataset, tiny flags, the scripts run as a person runs them."""

import csv
import gc
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
os.environ['CUDA_VISIBLE_DEVICES'] = ''  # the same tests on every machine; a GPU's are in runs/gpu_check.sh
os.environ['OMP_NUM_THREADS'] = '1'  # tiny networks: a second thread only waits
os.environ['HF_HUB_OFFLINE'] = '1'  # no test waits for the network
os.environ['WANDB_MODE'] = 'offline'

import torch  # only now: it looks at the environment

from configurator import InputError

TEXT = ''.join(f'{a} times {b} is {a * b}.\n' for a in range(60) for b in range(60))

# a run of train.py that takes a second or two
TINY = [
    '--device=cpu', '--dtype=float32', '--compile=False', '--block_size=16', '--batch_size=4',
    '--gradient_accumulation_steps=1', '--n_layer=2', '--n_head=2', '--n_embd=32', '--max_iters=6',
    '--warmup_iters=2', '--eval_interval=3', '--eval_iters=2', '--learning_rate=1e-2',
]


def run_script(name, *args, env=None, cwd=None, timeout=300):
    """Run a script of the project in a process of its own: .returncode, .stdout, .stderr."""
    command = [sys.executable, str(REPO / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd,
                          env={**os.environ, **(env or {})})


def run_processes(n, name, *args, timeout=300):
    """The same in n processes that train together, as torchrun starts them: the first one's result."""
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
    """A dataset of characters in folder/name, as nanoGPT's prepare.py writes it. Returns `folder`."""
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
    """A folder with the dataset `toy`."""
    return char_dataset(tmp_path_factory.mktemp('data'))


def data_file(name):
    """The path of a real text or cache, in the folder that FLATGPT_TEST_DATA names; the test is skipped
    without."""
    path = Path(os.environ.get('FLATGPT_TEST_DATA', 'nowhere')) / name
    if not path.exists():
        pytest.skip(f'FLATGPT_TEST_DATA has no {name}')
    return path


@pytest.fixture
def script(monkeypatch, capsys):
    """script('train.py', '--max_iters=3') runs a script in this process, as importing torch takes seconds:
    .status, .out, .err, .globals (of a script that ended by itself)."""
    signals = [signal.SIGTERM, signal.SIGINT]
    for name in ('SIGHUP', 'SIGUSR1', 'SIGPIPE'):
        if hasattr(signal, name):  # not on Windows
            signals.append(getattr(signal, name))

    def run(path, *args):
        monkeypatch.setattr(sys, 'argv', [str(REPO / path), *map(str, args)])
        handlers = {number: signal.getsignal(number) for number in signals}
        n_threads = torch.get_num_threads()
        excepthook = sys.excepthook
        capsys.readouterr()
        status = 0
        found = {}
        try:
            found = runpy.run_path(str(REPO / path), run_name='__main__')
        except SystemExit as e:
            status = e.code or 0
        except InputError as e:
            with pytest.raises(SystemExit) as exit_info:
                sys.excepthook(type(e), e, e.__traceback__)
            status = exit_info.value.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            torch.set_num_threads(n_threads)
            sys.excepthook = excepthook
            gc.unfreeze()
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, out=out, err=err, globals=found)

    return run


@pytest.fixture
def works(script):
    """The same, of a script that has to end with status 0."""
    def run(path, *args):
        result = script(path, *args)
        assert result.status == 0, result.err
        return result
    return run


def knobs_of(script):
    """Run a script up to and with its call of configure(): its globals."""
    source = (REPO / script).read_text()
    end = re.search(r'^ *(config, given = )?configure\(.*$', source, re.M).end()
    names = {'__name__': '__main__', '__file__': str(REPO / script)}
    exec(compile(source[:end], script, 'exec'), names)
    return names


def load_checkpoint(folder, name='ckpt.pt'):
    return torch.load(Path(folder) / name, weights_only=True)


def read_log(folder):
    """The rows of log.csv as dicts of texts."""
    with open(Path(folder) / 'log.csv', newline='') as f:
        return list(csv.DictReader(f))


def losses_of(folder):
    """[(iteration, loss, learning rate, gradient norm)] of log.csv, as it has them."""
    rows = [row for row in read_log(folder) if row['loss']]
    return [(row['iter'], row['loss'], row['lr'], row['grad_norm']) for row in rows]


def assert_equal(a, b):
    """Two states are the same to the bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b):
            assert_equal(one, other)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b
