"""Scripts in processes of their own that start at once: forked from one that has imported torch."""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
from multiprocessing.reduction import DupFd
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


class File:
    """A file descriptor that travels into another process; None: a closed one."""

    def __init__(self, fd):
        self.fd = fd

    def __reduce__(self):
        if self.fd is None:
            return File, (None,)
        return open_again, (DupFd(self.fd),)


def open_again(dup):
    return File(dup.detach())


def main(name, args, env, files, repo):
    """What the new process does."""
    for number, file in enumerate(files):
        os.close(number) if file.fd is None else os.dup2(file.fd, number)
    sys.stdin, sys.stdout, sys.stderr = (None if file.fd is None else open(fd, mode, closefd=False)
                                         for fd, (file, mode) in enumerate(zip(files, 'rww')))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    os.chdir(repo)
    sys.argv = [str(repo / name), *args]
    sys.path.insert(0, str(repo))
    runpy.run_path(sys.argv[0], run_name='__main__')


class Process:
    """`python NAME ARGS` in the folder `repo`. Its output comes through the pipe `stdout`; or `terminal`, a
    file descriptor, is its standard input and output; or `files` are its three file descriptors."""

    def __init__(self, name, *args, terminal=None, files=None, env={}, repo=REPO):
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(['torch', 'torch._dynamo', 'warm'])
        self.errors = tempfile.TemporaryFile()
        self.stdout, ours = None, []
        if files is None and terminal is None:
            out, end = os.pipe()
            ours = [os.open(os.devnull, os.O_RDONLY), end]
            self.stdout = open(out, 'rb', buffering=0)
            files = [*ours, self.errors.fileno()]
        elif files is None:
            files = [terminal, terminal, self.errors.fileno()]
        work = name, [str(arg) for arg in args], env, [File(fd) for fd in files], repo
        self.process = context.Process(target=main, args=work, daemon=True)
        self.process.start()
        for fd in ours:
            os.close(fd)

    def interrupt(self):
        os.kill(self.process.pid, signal.SIGINT)

    def wait(self, timeout=60):
        """(exit status, what it wrote to standard error)"""
        self.process.join(timeout)
        assert self.process.exitcode is not None, 'it has not ended'
        self.errors.seek(0)
        return self.process.exitcode, self.errors.read().decode()


def processes(n, name, *args):
    """[(exit status, output, errors)] of n processes that find each other as under torchrun."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    env = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
    started = [Process(name, *args, env={**env, 'RANK': str(i), 'LOCAL_RANK': str(i)}) for i in range(n)]
    outputs = [p.stdout.read().decode() for p in started]
    return [(*p.wait(), out) for p, out in zip(started, outputs)]
