"""What the cases share: training runs as child processes. They are forked from a process that has imported
torch already, so they start in a moment, and they can be killed, stopped and sabotaged."""

import atexit
import csv
import gc
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
import torch._dynamo  # what a run imports on its way is imported here, once
import torch.distributed.optim
import torch.nn.parallel
from conftest import make_dataset

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
    AssertionError. Marks: 'slow' cases are left out of the quick round; 'tmpfs' and 'hosts' need what they
    say."""
    def add(function):
        CASES[function.__name__] = (function, marks)
        return function
    return add


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


class Child:
    """train.py in a process of its own, or in `ranks` processes that act as one run, without torchrun.
    `sabotage` is called in each of them first."""

    everyone = []

    def __init__(self, *args, out=None, sabotage=None, ranks=1):
        self.out = Path(out or tempfile.mkdtemp(dir=SCRATCH))
        self.console = Path(tempfile.mkdtemp(dir=SCRATCH)) / 'console'
        port = free_port()
        sys.stdout.flush()
        gc.freeze()  # collecting what the children share with us would only copy it
        self.pids, self.statuses = [], None
        for rank in range(ranks):
            env = {}
            if ranks > 1:
                env = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks,
                           MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
            pid = os.fork()
            if pid == 0:
                self.become([f'--out_dir={self.out}', *map(str, args)], sabotage, env)
            self.pids.append(pid)
            self.everyone.append(pid)
        gc.unfreeze()

    def become(self, args, sabotage, env):
        """Run train.py in this process, and end with its status."""
        fd = os.open(self.console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout, sys.stderr = os.fdopen(1, 'w'), os.fdopen(2, 'w')
        os.environ.update({name: str(value) for name, value in env.items()})
        for number in (signal.SIGHUP, signal.SIGQUIT):  # ignored under nohup, and behind a script's &
            signal.signal(number, signal.SIG_DFL)
        sys.argv = [str(REPO / 'train.py'), *args]
        signals.started, signals.parent = time.monotonic(), os.getppid()  # as if it were imported now
        report.write = lambda out_dir: None  # it takes longer than the training
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
                try:
                    stream.flush()
                except OSError:
                    pass
            os._exit(status)

    def text(self):
        return self.console.read_text(errors='replace') if self.console.exists() else ''

    def wait(self, limit=120):
        """The exit status (of the first process): negative for the signal that killed it."""
        if self.statuses is not None:
            return self.statuses[0]
        limit *= PATIENCE
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
            time.sleep(0.01)
        self.statuses = [statuses[pid] for pid in self.pids]
        return self.statuses[0]

    def until(self, words, limit=60):
        """Wait until the console shows `words`."""
        end = time.time() + PATIENCE * limit
        while words not in self.text():
            if time.time() > end:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"{words!r} did not show up:\n{self.text()[-2000:]}")
            time.sleep(0.005)
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
    """The same run, resumed: it needs no flag but where it is."""
    return train('--init_from=resume', *args, out=out, base=PLACE, **kwargs)


def end_all():
    """No child of a case that failed may train on."""
    for pid in Child.everyone:
        try:
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
        except (ChildProcessError, ProcessLookupError):
            pass


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
            os.kill(os.getpid(), signal.SIGTERM)
    return before_each_update(stop)


def slowly(seconds):
    """Sabotage: so many seconds of sleep in each iteration, for what has to happen meanwhile."""
    return before_each_update(lambda it: time.sleep(seconds))


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
            try:
                return real(*args, **kwargs)
            finally:  # also after an error, such as that of a file that is not there
                if calls[0] == nth and when == 'after':
                    die()
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


TIMES = ('seconds', 'ms', 'tokens_per_second', 'mfu', 'data', 'memory_gb', 'eval_seconds', 'save_seconds',
         'sample_seconds')


def close(out, other):
    """The newest checkpoints of two folders have the same weights up to rounding."""
    weights = newest_state(other)['model']
    for name, p in newest_state(out)['model'].items():
        torch.testing.assert_close(p, weights[name], atol=1e-4, rtol=1e-3)


def log_without_times(out):
    """The rows of log.csv, as dicts of strings, without what no two runs have in common."""
    with open(Path(out) / 'log.csv', newline='') as f:
        rows = list(csv.DictReader(f))
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


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


_stopped = {}


def stopped_at(k):
    """The folder of a run that was stopped after k iterations; made once, so not to be changed."""
    if k not in _stopped:
        _stopped[k] = train(sabotage=stop_at(k), expect=143).out
    return _stopped[k]


def some_run():
    """A folder of one's own with a run that was stopped after 30 of its 32 iterations."""
    return copy(stopped_at(30))
