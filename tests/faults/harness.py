"""What the cases share: training runs as children that start in a moment, as they are forked from a process that has torch already,
and that can be killed, stopped, starved and sabotaged."""

import csv
import hashlib
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'  # tiny networks; and a fork takes no thread along
REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO), str(REPO / 'tests')]

import torch
import torch._dynamo  # what a run imports on its way, imported once
import torch.distributed.optim
import torch.nn.parallel

import checkpoint
import optim
import parallel
from conftest import make_dataset

# in memory where that is possible: a kill spares what the kernel has been given, and a slow disk only costs time here
SCRATCH = Path(tempfile.mkdtemp(prefix='faults-', dir='/dev/shm' if os.access('/dev/shm', os.W_OK) else None))
make_dataset(SCRATCH / 'data')
# dropout, a scheduled rate, momentum, evaluations between: everything that a resume has to take up again
PLACE = ['--device=cpu', '--dtype=float32', '--compile=False', f'--data_dir={SCRATCH}/data']  # what no checkpoint hands on
RUN = [*PLACE, '--dataset=tiny', '--block_size=16', '--batch_size=2', '--gradient_accumulation_steps=4', '--arch=modern',
       '--matrix_optimizer=muon', '--n_layer=1', '--n_head=2', '--n_embd=32', '--dropout=0.1', '--max_iters=40', '--warmup_iters=5', '--eval_interval=7', '--eval_iters=2',
       '--save_interval=1', '--learning_rate=1e-2', '--write_report=False']


class Child:
    """train.py in a process of its own. `sabotage` is called in it first; `ranks` processes act as one run, without torchrun."""

    everyone = []

    def __init__(self, *args, out=None, sabotage=None, env=None, ranks=1, script='train.py'):
        self.out = Path(out or tempfile.mkdtemp(dir=SCRATCH))
        self.console = Path(tempfile.mkdtemp(dir=SCRATCH)) / 'console'
        args = [f'--out_dir={self.out}', *map(str, args)] if script == 'train.py' else list(map(str, args))
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = s.getsockname()[1]
        sys.stdout.flush()
        self.pids, self.statuses = [], None
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                self.become(script, args, sabotage, {**(env or {}), **({} if ranks == 1 else dict(
                    RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR='127.0.0.1', MASTER_PORT=port))})
            self.pids.append(pid)
            self.everyone.append(pid)

    def become(self, script, args, sabotage, env):
        fd = os.open(self.console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.environ.update({name: str(value) for name, value in env.items()})
        sys.stdout, sys.stderr = os.fdopen(1, 'w'), os.fdopen(2, 'w')
        sys.argv = [str(REPO / script), *args]
        status = 1
        parallel.begin, parallel.parent = time.monotonic(), os.getppid()  # as if it were imported now
        try:
            if sabotage:
                sabotage()
            runpy.run_path(sys.argv[0], run_name='__main__')
            status = 0
        except SystemExit as e:
            status = e.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:
                    pass
            os._exit(status)

    def text(self):
        return self.console.read_text(errors='replace') if self.console.exists() else ''

    def wait(self, limit=120):
        """The exit status (of the first process): negative for the signal that killed it."""
        if self.statuses is None:
            end, statuses = time.time() + limit, {}
            while len(statuses) < len(self.pids):
                for pid in set(self.pids) - set(statuses):
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        statuses[pid] = os.waitstatus_to_exitcode(status)
                if time.time() > end:
                    self.signal(signal.SIGKILL)
                    for pid in set(self.pids) - set(statuses):
                        os.waitpid(pid, 0)
                    raise AssertionError(f"it did not end within {limit} s:\n{self.text()[-2000:]}")
                time.sleep(0.005)
            self.statuses = [statuses[pid] for pid in self.pids]
        return self.statuses[0]

    def until(self, words, limit=60):
        """Wait until the console shows `words`."""
        end = time.time() + limit
        while words not in self.text():
            if time.time() > end:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"{words!r} did not show up:\n{self.text()[-2000:]}")
            time.sleep(0.003)
        return self

    def signal(self, number, rank=None):
        for pid in self.pids if rank is None else [self.pids[rank]]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass


def train(*args, expect=0, base=RUN, **kwargs):
    """A run to its end; the child."""
    child = Child(*base, *args, **kwargs)
    status = child.wait()
    assert status == expect, f"status {status}, not {expect}:\n{child.text()[-3000:]}"
    assert expect in (0, -9) or 'Traceback' not in child.text(), child.text()[-3000:]
    return child


def resume(out, *args, **kwargs):
    """The same run, taken up again: it needs no flag but where it is."""
    return train('--init_from=resume', *args, out=out, base=PLACE, **kwargs)


def stop_at(k):
    """Sabotage: a SIGTERM while the update of iteration k - 1 is made, so that the run stops after k."""
    def sabotage():
        real = optim.Guard.step

        def step(self, it, *args):
            if it == k - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, it, *args)
        optim.Guard.step = step
    return sabotage


def fingerprint(out):
    """A hash of every bit of the newest checkpoint's parameters and optimizer."""
    state = checkpoint.read(checkpoint.newest(str(out)))
    digest = hashlib.sha256(str(state['iter_num']).encode())

    def take(value, name):
        if torch.is_tensor(value):
            digest.update(name.encode() + str(value.dtype).encode() + value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                take(value[key], f'{name}/{key}')
    take(state['model'], 'model')
    take(state['optimizer']['state'], 'optimizer')
    return digest.hexdigest()[:16]


def log_without_times(out):
    times = ('seconds', 'ms', 'tokens_per_second', 'mfu', 'data', 'memory_gb', 'eval_seconds', 'save_seconds', 'sample_seconds')
    with open(Path(out) / 'log.csv', newline='') as f:
        return [{name: value for name, value in row.items() if name not in times} for row in csv.DictReader(f)]


def end_all():
    """No child of a case that failed shall train on."""
    for pid in Child.everyone:
        try:
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
        except (ChildProcessError, ProcessLookupError):
            pass


_through = {}


def through(*args, **kwargs):
    """(fingerprint, log) of the undisturbed run with these flags; made once."""
    key = (args, tuple(sorted(kwargs.items())))
    if key not in _through:
        out = train(*args, **kwargs).out
        _through[key] = fingerprint(out), log_without_times(out)
    return _through[key]


def same_as_through(out, *args, log=True, **kwargs):
    """Assert that the run in `out` ended as the undisturbed one did."""
    want, want_log = through(*args, **kwargs)
    assert fingerprint(out) == want, f"{fingerprint(out)}, not {want}"
    if log:
        assert log_without_times(out) == want_log, 'log.csv differs'
    return want


def copy(out):
    """Another folder with the same files, the links among them as links."""
    new = Path(tempfile.mkdtemp(dir=SCRATCH)) / 'out'
    shutil.copytree(out, new)
    for name in ('ckpt.pt', 'ckpt_best.pt'):
        for number in sorted(new.glob('ckpt_0*.pt')):
            if (Path(out) / name).exists() and os.path.samefile(Path(out) / name, Path(out) / number.name):
                os.remove(new / name)
                os.link(number, new / name)
    return new


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(module, function, when, nth):
    """Sabotage: kill -9 before or after the nth call of module.function."""
    def sabotage():
        real, calls = getattr(module, function), [0]

        def wrapped(*args, **kwargs):
            calls[0] += 1
            if calls[0] == nth and when == 'before':
                die()
            result = real(*args, **kwargs)
            if calls[0] == nth and when == 'after':
                die()
            return result
        setattr(module, function, wrapped)
    return sabotage
