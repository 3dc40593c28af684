"""Faults of runs that torchrun has launched, on one machine and on two hosts, and what has to hold."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

# before torch, which it gives one thread
from harness import REPO, RUN, SCRATCH, Job, case, close, newest_state, same_as_through, train

from support import checkpoint


class Torchrun(Job):
    """train.py with n processes on this machine, as torchrun starts them."""

    def __init__(self, n, *args, out, launcher=('--standalone',), env={}, prefix=(), command=None):
        super().__init__()
        command = command or [sys.executable, '-m', 'torch.distributed.run', *launcher,
                              f'--nproc_per_node={n}', str(REPO / 'train.py')]
        with self.console.open('w') as console:
            self.p = subprocess.Popen([*prefix, *command, *RUN, f'--out_dir={out}', *args], stdout=console,
                                      stderr=console, env={**os.environ, **env}, start_new_session=True)

    def workers(self):
        """The process numbers of the workers, by rank."""
        return list(map(int, Path(f'/proc/{self.p.pid}/task/{self.p.pid}/children').read_text().split()))

    def is_running(self):
        return self.p.poll() is None

    def status(self):
        return self.p.returncode

    def lose(self):
        """kill -9 of torchrun and all that it started."""
        if self.is_running():
            for pid in [*self.workers(), self.p.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.p.wait()


@case('slow')
def torchrun_is_stopped(quick):
    """SIGTERM to torchrun"""
    out, flags = SCRATCH / 'agent', ['--save_interval=10000', '--eval_interval=0']
    job = Torchrun(2, '--max_iters=4000', *flags, out=out).until('iter 20:')
    job.p.send_signal(signal.SIGTERM)
    job.wait()
    text = job.text()
    assert 'stopped by SIGTERM after' in text, text[-2000:]
    assert 'torchrun --standalone --nproc_per_node=2' in text, text[-2000:]
    n = newest_state(out)['iter_num']
    same_as_through(out, f'--max_iters={n}', '--lr_decay_iters=4000', *flags, ranks=2, log=False)
    return "all processes stop after the same iteration and save"


@case('slow')
def torchrun_is_killed(quick):
    """kill -9 of torchrun"""
    out = SCRATCH / 'orphans'
    flags = ['--max_iters=100000', '--save_interval=100000', '--eval_interval=0']
    job = Torchrun(2, *flags, out=out).until('iter 20:')
    workers, t0 = job.workers(), time.time()
    assert len(workers) == 2
    job.p.kill()
    while any(Path(f'/proc/{pid}').exists() for pid in workers):
        assert time.time() < t0 + 30, 'orphans train on'
        time.sleep(0.05)
    assert checkpoint.newest(str(out)), job.text()[-1000:]
    return f"the orphans saved and ended {time.time() - t0:.1f} s later"


@case('slow')
def a_process_is_killed_and_restarted(quick):
    """kill -9 of one process under torchrun --max-restarts, 6 times"""
    times, launcher = [], ['--standalone', '--max-restarts=2']
    for i in range(6):
        out = SCRATCH / f'restart{i}'
        job = Torchrun(2, '--init_from=auto', '--max_iters=300', out=out, launcher=launcher)
        job.until(f'iter {20 + 3 * i}:')
        os.kill(job.workers()[i % 2], signal.SIGKILL)
        t0 = time.time()
        assert job.wait() == 0, job.text()[-3000:]
        times.append(time.time() - t0)
        same_as_through(out, '--max_iters=300', ranks=2, log=False)
    return f"6 of 6 resumed and ended with the same bits, {min(times):.0f} to {max(times):.0f} s later"


# -----------------------------------------------------------------------------
# two hosts


def shell(line):
    subprocess.run(line, shell=True, check=True)


def hosts():
    """Two network namespaces joined by a cable; inside a user namespace of its own."""
    for i in (1, 2):
        shell(f'ip netns add h{i}')
    shell('ip link add v1 netns h1 type veth peer name v2 netns h2')
    for i in (1, 2):
        shell(f'ip -n h{i} addr add 10.77.0.{i}/24 dev v{i}')
        shell(f'ip -n h{i} link set v{i} up && ip -n h{i} link set lo up')


def cable(state):
    shell(f'ip -n h1 link set v1 {state}')


def by_script(i, out, *args, nodes='2', wait='600'):
    """One process on the host i, by runs/multinode.sh."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return Torchrun(1, *args, out=out, prefix=['ip', 'netns', 'exec', f'h{i}'],
                    command=['bash', str(REPO / 'runs' / 'multinode.sh'), '10.77.0.1', nodes],
                    env={'NPROC': '1', 'WAIT': wait, 'VIRTUAL_ENV': sys.prefix, 'PATH': path})


LONG = '--max_iters=300 --save_interval=5 --eval_interval=100 --ddp_timeout=10'.split()


def end_well(jobs, out, *flags):
    """All of `jobs` end with status 0, and `out` holds what one process would have made, alone and
    undisturbed."""
    for job in jobs:
        assert job.wait(200) == 0, job.text()[-4000:]
    close(out, train(*flags).out)


def resumes(job):
    """The workers of `job` lost the others, said so in one line each, and train again."""
    job.until('resuming from', limit=150)
    assert 'error: lost contact' in job.text() and 'Error: [' not in job.text(), job.text()[-4000:]


@case('namespaces', 'slow')
def a_cable_is_cut_and_mended(quick):
    """runs/multinode.sh on two hosts; the cable is cut for 3 s, then for 20 s with ddp_timeout=10"""
    hosts()
    out = SCRATCH / 'mended'
    jobs = [by_script(i, out, *LONG) for i in (1, 2)]
    jobs[0].until('iter 30:')
    cable('down')
    time.sleep(3)
    cable('up')
    jobs[0].until('iter 100:')
    assert not any('lost contact' in job.text() for job in jobs), 'three seconds cost no more than that'
    cable('down')
    time.sleep(20)
    cable('up')
    resumes(jobs[0])  # who prints
    assert 'error: lost contact' in jobs[1].text()
    end_well(jobs, out, *LONG)
    return ("3 s: it waits and continues; 20 s: both hosts' processes give up after 10, and train again once "
            "the cable is mended; the weights of one process up to rounding")


@case('namespaces', 'slow')
def a_host_comes_back(quick):
    """a host that comes before the head; kill -9 of all that runs on one of two hosts, then the same line
    there once more"""
    hosts()
    out = SCRATCH / 'back'
    alone = by_script(2, out, *LONG, wait='2')
    assert alone.wait() == 2, alone.text()
    waits, error = alone.text().splitlines()
    assert waits.startswith('this is 10.77.0.2; it starts when 2 machines'), waits
    assert error.startswith('error: nobody answers at the head (10.77.0.1:29500) within 2 s.'), error
    jobs = [by_script(i, out, *LONG) for i in (1, 2)]
    jobs[0].until('iter 50:')
    jobs[1].lose()
    jobs[1] = by_script(2, out, *LONG)
    resumes(jobs[0])
    end_well(jobs, out, *LONG)
    return ("it waits for the head, and says so, and in a line if none comes; both train again after the kill; the "
            "weights of one process up to rounding")


@case('namespaces', 'slow')
def a_host_is_lost(quick):
    """two hosts of --nnodes=1:2; one vanishes (its cable is cut first, so there is no goodbye), the other
    continues alone"""
    hosts()
    out = SCRATCH / 'lost'
    jobs = [by_script(i, out, *LONG, nodes='1:2') for i in (1, 2)]
    jobs[0].until('iter 50:')
    cable('down')
    jobs[1].lose()
    resumes(jobs[0])
    jobs[0].until('x 4 micro-batches x 1 process\n')
    end_well(jobs[:1], out, *LONG)
    return "it continues alone, with the same samples; the weights of one process up to rounding"


@case('namespaces', 'slow')
def a_host_joins(quick):
    """--nnodes=1:2 with one host; a second one comes while it trains"""
    hosts()
    out = SCRATCH / 'grown'
    flags = ['--max_iters=100000', '--save_interval=1000', '--eval_interval=0']
    jobs = [by_script(1, out, *flags, nodes='1:2').until('iter 10:', limit=120)]
    jobs.append(by_script(2, out, *flags, nodes='1:2'))
    jobs[0].until('x 2 micro-batches x 2 processes', limit=120)
    seen = len(jobs[0].text())
    while jobs[0].text()[seen:].count('iter ') < 20:
        time.sleep(0.02)
    for job in jobs:
        job.p.send_signal(signal.SIGTERM)
    for job in jobs:
        job.wait()
    # once for the newcomer
    assert sum(job.text().count('stopped by SIGTERM') for job in jobs) == 2, jobs[0].text()[-3000:]
    n = newest_state(out)['iter_num']
    close(out, train(*flags, f'--max_iters={n}', '--lr_decay_iters=100000').out)
    return (f"it saves, starts again with both of them, {n} iterations; the weights of one process up to "
            "rounding")
