"""What the tests share: the scripts run in this process (importing torch takes seconds) or, where that matters, in their own."""

import csv
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [f'{REPO}', f'{REPO}/dev', f'{REPO}/tests/faults']
os.environ.setdefault('HF_HUB_OFFLINE', '1')  # no test waits for the network; those of the Hub bring a server
# no GPU, whose autograd threads no fork survives; tiny nets make a second thread wait, so two tests run at a time
os.environ |= dict(CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1')

import torch

from support import errors, load

TINY = ('--device=cpu --dtype=float32 --compile=False --block_size=16 --batch_size=4 --gradient_accumulation_steps=1 '
        '--n_layer=2 --n_head=2 --n_embd=32 --max_iters=6 --warmup_iters=2 --eval_interval=3 --eval_iters=2 '
        '--learning_rate=1e-2').split()
NO_PICTURES = str(REPO / 'tests' / 'no_matplotlib')  # reports without a picture: drawing takes a second
TEXT = ''.join(f"{a} times {b} is {a * b}.\n" for a in range(60) for b in range(60))
captured = functools.partial(subprocess.run, capture_output=True, text=True)  # .stdout and .stderr are what it said
HANDLED = [getattr(signal, name) for name in 'SIGINT SIGTERM SIGUSR1 SIGUSR2 SIGHUP SIGQUIT'.split()]


class Evil:
    """Unpickled by the ordinary reader, it makes the file `canary`."""
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


class Result:
    def __init__(self, status, out, err, script=None):
        self.status, self.out, self.err, self.globals = status, out, err, script or {}

    def losses(self):
        """{iteration: loss} as printed."""
        return {int(line.split(':')[0][5:]): float(line.split('loss ')[1].split(',')[0])
                for line in self.out.splitlines() if line.startswith('iter ')}


def explained(*error):
    """The status with which a hook of support/errors.py ends the process, or None."""
    end, os._exit = os._exit, sys.exit
    try:
        sys.excepthook(*error)
    except SystemExit as e:
        return e.code
    finally:
        os._exit = end


@pytest.fixture
def script(capsys, monkeypatch):
    """script('train.py', '--max_iters=3') -> Result: runs in this process. The report of a training run has no
    picture, unless pictures=True."""
    def run(name, *args, pictures=False):
        monkeypatch.setattr(errors, 'EXPLAINED', {})  # no script explains another's
        monkeypatch.setattr(sys, 'argv', [str(REPO / name), *map(str, args)])
        excepthook = sys.excepthook
        handlers = {n: signal.getsignal(n) for n in HANDLED}
        capsys.readouterr()
        status, found = 0, None
        try:
            with monkeypatch.context() as patch:
                if name == 'train.py' and not pictures:
                    patch.setitem(sys.modules, 'matplotlib', None)
                found = runpy.run_path(str(REPO / name), run_name='__main__')
        except SystemExit as e:
            status = e.code or 0
        except Exception:
            status = explained(*sys.exc_info())
            if status is None:
                raise
        finally:
            sys.excepthook = excepthook
            for number, handler in handlers.items():
                signal.signal(number, handler)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err, found)
    return run


@pytest.fixture
def works(script):
    """works('train.py', '--max_iters=3') -> Result of a script that has to end well."""
    def run(*args, **kwargs):
        result = script(*args, **kwargs)
        assert result.status == 0, result.out[-2000:] + result.err[-2000:]
        return result
    return run


@pytest.fixture
def prepare(script, tmp_path):
    """prepare('mine', '--input=a.txt', ...) -> Result; the dataset is in tmp_path/data, of bytes if nothing else
    is said."""
    def run(name, *args):
        args = [f'--input={arg}' if isinstance(arg, os.PathLike) else arg for arg in args]
        if not any(str(arg).startswith(('--tokenizer', '--show', '--chat')) for arg in args):
            args.append('--tokenizer=byte')
        return script('prepare.py', name, *args, f"--data_dir={tmp_path / 'data'}")
    return run


def bytes_in(data):
    """As prepare.py has counted them, in all splits of a Dataset."""
    return sum(split['bytes'] for split in data.meta['splits'].values())


def is_refused(result, *words, lines=1):
    """One line on standard error with these words, and status 2."""
    assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == lines, result.err
    assert all(word in result.err for word in words), result.err


def own_process(name, *args, cwd=REPO, env=None, timeout=300, launcher=None):
    """The same in a process of its own, or under a launcher such as torchrun; returns a Result."""
    done = captured([*(launcher or [sys.executable]), str(REPO / name), *map(str, args)], cwd=cwd, timeout=timeout,
                    env={**os.environ, 'PYTHONPATH': NO_PICTURES, **(env or {})})
    return Result(done.returncode, done.stdout, done.stderr)


def torchrun(n, name, *args, restarts=0, **kwargs):
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}',
                f'--max-restarts={restarts}']
    return own_process(name, *args, launcher=launcher, env={'OMP_NUM_THREADS': '1'}, **kwargs)


def make_dataset(data_dir, name='tiny', text=TEXT, val=True):
    """A character dataset, written by hand."""
    folder = Path(data_dir) / name
    folder.mkdir(parents=True, exist_ok=True)
    chars = sorted(set(text))
    ids = np.array(list(map(chars.index, text)), dtype='<u2')
    cut = len(ids) * 9 // 10 if val else len(ids)
    splits = {'train': ids[:cut], **({'val': ids[cut:]} if val else {})}
    for split, part in splits.items():
        part.tofile(folder / f'{split}.bin')
    (folder / 'meta.json').write_text(json.dumps({
        'tokenizer': {'kind': 'char', 'chars': ''.join(chars)}, 'vocab_size': len(chars), 'end_of_text': None, 'dtype': 'uint16',
        'splits': {split: {'tokens': len(part)} for split, part in splits.items()}}))
    return folder


def nanogpt_meta(chars):
    """What nanoGPT's prepare.py writes into meta.pkl."""
    return {'vocab_size': len(chars), 'itos': dict(enumerate(chars)), 'stoi': {c: i for i, c in enumerate(chars)}}


@pytest.fixture
def out(tmp_path):
    """The folder of a run with the flags `tiny`."""
    return tmp_path / 'out'


@pytest.fixture
def tiny(tmp_path, out):
    """The flags of a run of a second or two, on a dataset of its own."""
    make_dataset(tmp_path / 'data')
    return [*TINY, f"--data_dir={tmp_path / 'data'}", '--dataset=tiny', f'--out_dir={out}']


def saved(folder, name='ckpt.pt'):
    """A checkpoint of a run."""
    return load.read(str(Path(folder) / name))


def rows(folder):
    """Those of a run's log.csv, as dicts of strings."""
    with open(Path(folder) / 'log.csv', newline='') as f:
        return list(csv.DictReader(f))


def same(a, b):
    """Whether two states, of nested dicts and lists, are equal to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


@pytest.fixture
def test_data():
    """The folder with real texts that FLATGPT_TEST_DATA names."""
    folder = os.environ.get('FLATGPT_TEST_DATA')
    if not folder or not os.path.isdir(folder):
        pytest.skip('real texts: FLATGPT_TEST_DATA names no folder')
    return Path(folder)


@pytest.fixture
def gpt2(monkeypatch):
    """tiktoken's GPT-2 encoding, from the cache that came with the test data or is on this machine."""
    folder = os.environ.get('FLATGPT_TEST_DATA')
    if folder and 'TIKTOKEN_CACHE_DIR' not in os.environ and os.path.isdir(os.path.join(folder, 'tiktoken_cache')):
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', os.path.join(folder, 'tiktoken_cache'))
    import tiktoken
    try:
        return tiktoken.get_encoding('gpt2')
    except OSError:
        pytest.skip("GPT-2's vocabulary: neither in TIKTOKEN_CACHE_DIR nor to be fetched")
