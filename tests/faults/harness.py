"""What the cases share: training runs as child processes. They are forked from a process that has imported
torch already, so they start in a moment, and they can be killed, stopped and sabotaged."""

import atexit
import gc
import hashlib
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'  # tiny networks; and a fork takes no thread along
REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO), str(REPO / 'tests')]

import torch
import torch._dynamo  # what a run imports on its way is imported here, once
import torch.distributed.optim
import torch.nn.parallel
from conftest import make_dataset, rows

from support import checkpoint, guard, load, parallel, report, setup, signals

# in memory where that is possible: a slow disk only costs time, as a kill loses nothing the kernel was given
SCRATCH = Path(tempfile.mkdtemp(prefix='faults-', dir='/dev/shm' if os.access('/dev/shm', os.W_OK) else None))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
make_dataset(SCRATCH / 'data')
# what no checkpoint hands on
PLACE = ['--device=cpu', '--dtype=float32', '--compile=False', f'--data_dir={SCRATCH}/data']
# dropout, a schedule, momentum, evaluations in between: everything that a resume has to continue
RUN = [*PLACE, '--dataset=tiny', '--block_size=16', '--batch_size=2', '--gradient_accumulation_steps=4',
       '--arch=modern', '--matrix_optimizer=muon', '--n_layer=1', '--n_head=2', '--n_embd=32',
       '--dropout=0.1', '--max_iters=32', '--warmup_iters=5', '--eval_interval=7', '--eval_iters=2',
       '--save_interval=1', '--learning_rate=1e-2']

# on a busy machine: PATIENCE=5 python tests/faults/run.py waits five times as long for what has to come
PATIENCE = float(os.environ.get('PATIENCE', 1))
CASES = {}  # name: (function, marks)


def case(*marks):
    """Makes a function a case: its docstring is its line in the table; it returns what was seen, or raises
    AssertionError. Marks: 'slow' cases are left out of the quick round; 'namespaces': it runs in namespaces
    of its own, where it may mount disks and lay cables."""
    def add(function):
        CASES[function.__name__] = (function, marks)
        return function
    return add


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


class Job:
    """A run in other processes, whose output goes to the file `console`."""

    everyone = []

    def __init__(self):
        self.console = Path(tempfile.mkdtemp(dir=SCRATCH)) / 'console'
        self.console.touch()
        self.everyone.append(self)

    def text(self):
        return self.console.read_text(errors='replace')

    def until(self, words, limit=90):
        """Wait until the console shows `words`."""
        end, goes_on = time.time() + PATIENCE * limit, True
        while words not in self.text():
            assert goes_on, f"{words!r} did not show up:\n{self.text()[-3000:]}"
            goes_on = self.is_running() and time.time() < end
            time.sleep(0.005)
        return self

    def wait(self, limit=120):
        """The exit status (of the first process): negative for the signal that killed it."""
        end = time.time() + PATIENCE * limit
        while self.is_running():
            if time.time() > end:
                self.lose()
                raise AssertionError(f"it did not end within {limit} s:\n{self.text()[-3000:]}")
            time.sleep(0.01)
        return self.status()


class Child(Job):
    """train.py in a process of its own, or in `ranks` processes that act as one run, without torchrun.
    `sabotage` is called in each of them first."""

    def __init__(self, *args, out=None, sabotage=None, ranks=1):
        super().__init__()
        self.out, port = Path(out or tempfile.mkdtemp(dir=SCRATCH)), free_port()
        args = [f'--out_dir={self.out}', *map(str, args)]
        gc.freeze()  # collecting what the children share with us would only copy it
        self.processes = []
        for rank in range(ranks):
            env = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks,
                       MASTER_ADDR='127.0.0.1', MASTER_PORT=port) if ranks > 1 else {}
            fork = multiprocessing.get_context('fork').Process
            self.processes.append(fork(target=self.become, args=(args, sabotage, env)))
            self.processes[-1].start()
        gc.unfreeze()

    def become(self, args, sabotage, env):
        """Run train.py in this process, and end with its status."""
        console = os.open(self.console, os.O_WRONLY | os.O_APPEND)
        os.dup2(console, 1)
        os.dup2(console, 2)
        sys.stdout, sys.stderr = os.fdopen(1, 'w'), os.fdopen(2, 'w')
        os.environ.update({name: str(value) for name, value in env.items()})
        for number in (signal.SIGHUP, signal.SIGQUIT):  # ignored under nohup, and behind a script's &
            signal.signal(number, signal.SIG_DFL)
        sys.argv = [str(REPO / 'train.py'), *args]
        signals.started, signals.parent = time.monotonic(), os.getppid()  # as if it were imported now
        report.write = lambda out_dir: []  # it takes longer than the training
        status = 1
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
                with suppress(OSError):
                    stream.flush()
            os._exit(status)

    def is_running(self):
        return any([process.is_alive() for process in self.processes])

    def status(self):
        self.statuses = [process.exitcode for process in self.processes]
        return self.statuses[0]

    def stop(self, number=signal.SIGTERM):
        """It stops at the signal `number`."""
        self.signal(number)
        assert self.wait() == 128 + number, self.text()[-3000:]
        return self

    def signal(self, number, rank=None):
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.is_alive():
                os.kill(process.pid, number)

    def lose(self):
        self.signal(signal.SIGKILL)


def train(*args, expect=0, base=RUN, **kwargs):
    """A run to its end; the child."""
    child = Child(*base, *args, **kwargs)
    status = child.wait()
    assert status == expect, f"status {status}, not {expect}:\n{child.text()[-3000:]}"
    assert 'Traceback' not in child.text(), child.text()[-3000:]
    return child


def resume(out, *args, **kwargs):
    """The same run, resumed: it needs no flag but where it is."""
    return train('--init_from=resume', *args, out=out, base=PLACE, **kwargs)


# -----------------------------------------------------------------------------
# sabotage: functions that are called in the child first


def before_each_update(function):
    """Sabotage: function(iteration) before each update."""
    def sabotage():
        real = guard.Guard.step

        def step(self, it, *args):
            function(it)
            return real(self, it, *args)
        guard.Guard.step = step
    return sabotage


def stop_at(k):
    """Sabotage: a SIGTERM during the update of iteration k - 1, so that the run stops after k."""
    def stop(it):
        if it == k - 1:
            signal.raise_signal(signal.SIGTERM)
    return before_each_update(stop)


def slowly(seconds):
    """Sabotage: so many seconds of sleep in each iteration, for what has to happen meanwhile."""
    return before_each_update(lambda it: time.sleep(seconds))


def die_at(module, function, nth):
    """Sabotage: kill -9 in place of the nth call of module.function."""
    def sabotage():
        real, calls = getattr(module, function), []

        def wrapped(*args, **kwargs):
            calls.append(1)
            if len(calls) == nth:
                signal.raise_signal(signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(module, function, wrapped)
    return sabotage


# -----------------------------------------------------------------------------
# what a run has left


def newest_state(out):
    return load.read(checkpoint.newest(str(out)))


def fingerprint(out):
    """A hash of every bit of the newest checkpoint's parameters and optimizer."""
    state = newest_state(out)
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


TIMES = 'seconds ms tokens_per_second mfu data memory_gb eval_seconds save_seconds sample_seconds'.split()


def close(out, other):
    """The newest checkpoints of two folders have the same weights up to rounding."""
    weights = newest_state(other)['model']
    for name, p in newest_state(out)['model'].items():
        torch.testing.assert_close(p, weights[name], atol=1e-4, rtol=1e-3)


def log_without_times(out):
    """The rows of log.csv, as dicts of strings, without what no two runs have in common."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows(out)]


@cache
def through(*args, **kwargs):
    """(fingerprint, log) of the undisturbed run with these flags; made once."""
    out = train(*args, **kwargs).out
    return fingerprint(out), log_without_times(out)


def same_as_through(out, *args, log=True, **kwargs):
    """Assert that the run in `out` ended as the undisturbed one did."""
    want, want_log = through(*args, **kwargs)
    assert fingerprint(out) == want, f"{fingerprint(out)}, not {want}"
    assert not log or log_without_times(out) == want_log, 'log.csv differs'


@cache
def stopped():
    """The folder of a run that was stopped after 30 of its 32 iterations; made once, so not to be changed."""
    return train(sabotage=stop_at(30), expect=143).out


def some_run():
    """A copy of such a folder."""
    return Path(shutil.copytree(stopped(), tempfile.mkdtemp(dir=SCRATCH), dirs_exist_ok=True))
