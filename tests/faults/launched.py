"""Faults of runs that torchrun has launched, on one machine and on two hosts, and what has to hold."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# before torch, which it gives one thread
from harness import PATIENCE, REPO, RUN, SCRATCH, case, close, fingerprint, newest_state, through, train

from support import checkpoint


class Torchrun:
    """train.py with n processes on this machine, as torchrun starts them."""

    everyone = []

    def __init__(self, n, *args, out, launcher=('--standalone',), env=None, prefix=(), command=None):
        self.console = open(Path(tempfile.mkdtemp(dir=SCRATCH)) / 'console', 'w+')
        if command is None:
            command = [sys.executable, '-m', 'torch.distributed.run', *launcher, f'--nproc_per_node={n}',
                       str(REPO / 'train.py')]
        self.p = subprocess.Popen([*prefix, *command, *RUN, f'--out_dir={out}', *args],
                                  stdout=self.console, stderr=self.console, env={**os.environ, **(env or {})},
                                  start_new_session=True)
        self.everyone.append(self)

    def text(self):
        with open(self.console.name, errors='replace') as f:
            return f.read()

    def until(self, words, limit=90):
        """Wait until the console shows `words`."""
        end = time.time() + PATIENCE * limit
        while words not in self.text():
            here = time.time() < end and self.p.poll() is None
            assert here, f"{words!r} did not show up:\n{self.text()[-3000:]}"
            time.sleep(0.02)
        return self

    def workers(self):
        """The process numbers of the workers, by rank."""
        found = {}
        for folder in Path('/proc').iterdir():
            if folder.name.isdigit():
                try:
                    words, env, parent = describe_process(folder)
                except (OSError, ValueError):
                    continue
                is_ours = parent == self.p.pid and b'RANK' in env
                if is_ours and any(word.endswith(b'train.py') for word in words):
                    found[int(env[b'RANK'])] = int(folder.name)
        return found

    def wait(self, limit=120):
        try:
            return self.p.wait(PATIENCE * limit)
        except subprocess.TimeoutExpired:
            os.killpg(self.p.pid, signal.SIGKILL)
            said = self.text()[-3000:]
            raise AssertionError(f"torchrun did not end within {limit} s:\n{said}") from None

    def lose(self):
        """kill -9 of torchrun and all that it started."""
        if self.p.poll() is None:
            for pid in [*self.workers().values(), self.p.pid]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.p.wait()


def describe_process(folder):
    """(words of its command, its environment, its parent's number) of a process's folder in /proc."""
    words = (folder / 'cmdline').read_bytes().split(b'\0')
    pairs = (folder / 'environ').read_bytes().split(b'\0')
    env = dict(pair.split(b'=', 1) for pair in pairs if b'=' in pair)
    parent = int((folder / 'stat').read_text().rsplit(')', 1)[1].split()[1])
    return words, env, parent


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
    want = train(f'--max_iters={n}', '--lr_decay_iters=4000', *flags, ranks=2).out
    assert fingerprint(out) == fingerprint(want)
    return "all processes stop after the same iteration and save"


@case('slow')
def torchrun_is_killed(quick):
    """kill -9 of torchrun"""
    out = SCRATCH / 'orphans'
    flags = ['--max_iters=100000', '--save_interval=100000', '--eval_interval=0']
    job = Torchrun(2, *flags, out=out).until('iter 20:')
    workers = job.workers()
    assert len(workers) == 2
    job.p.kill()
    t0 = time.time()
    while any(Path(f'/proc/{pid}').exists() for pid in workers.values()) and time.time() < t0 + 30:
        time.sleep(0.05)
    assert time.time() < t0 + 30, 'orphans train on'
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
        assert fingerprint(out) == through('--max_iters=300', ranks=2)[0]
    return f"6 of 6 resumed and ended with the same hash, {min(times):.0f} to {max(times):.0f} s later"


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


def on_host(i, out, *args):
    """One process of two on the host i, by torchrun."""
    return Torchrun(1, *args, out=out, prefix=['ip', 'netns', 'exec', f'h{i}'],
                    env={'GLOO_SOCKET_IFNAME': f'v{i}', 'NCCL_SOCKET_IFNAME': f'v{i}'},
                    launcher=['--nnodes=2', f'--node_rank={i - 1}', '--master_addr=10.77.0.1',
                              '--master_port=29577'])


def by_script(i, out, *args, nodes='2', wait='600'):
    """One process on the host i, by runs/multinode.sh."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return Torchrun(1, *args, out=out, prefix=['ip', 'netns', 'exec', f'h{i}'],
                    command=['bash', str(REPO / 'runs' / 'multinode.sh'), '10.77.0.1', nodes],
                    env={'NPROC': '1', 'WAIT': wait, 'VIRTUAL_ENV': sys.prefix, 'PATH': path})


def in_namespaces(function):
    """The last line that `function` prints, run in a user and a network namespace of its own."""
    script = [sys.executable, str(REPO / 'tests' / 'faults' / 'run.py'), f'--inside={function.__name__}']
    line = f'mount -t tmpfs tmpfs /run && {shlex.join(script)}'
    done = subprocess.run(['unshare', '-rnm', 'bash', '-c', line], capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


@case('hosts', 'slow')
def two_hosts(quick):
    """two hosts in network namespaces; a cable cut between them"""
    return in_namespaces(on_two_hosts)


def on_two_hosts():
    hosts()
    out = SCRATCH / 'hosts'
    jobs = [on_host(i, out) for i in (1, 2)]
    for job in jobs:
        assert job.wait() == 0, job.text()[-3000:]
    close(out, train().out)
    out = SCRATCH / 'cut'
    jobs = [on_host(i, out, '--max_iters=100000', '--ddp_timeout=10') for i in (1, 2)]
    jobs[0].until('iter 20:')
    cable('down')
    ended, took = ends_within(150, jobs)
    cable('up')
    n = newest_state(out)['iter_num']
    flags = [f'--max_iters={n + 20}', '--lr_decay_iters=100000']
    jobs = [on_host(i, out, '--init_from=auto', *flags) for i in (1, 2)]
    for job in jobs:
        assert job.wait() == 0, job.text()[-3000:]
    close(out, train(*flags).out)
    which = f"both ended within {took:.0f} s"
    if ended < 2:
        which = (f"{ended} of 2 launchers ended within {took:.0f} s (the other's torchrun was ended by hand "
                 "after 150)")
    print(f"the weights of one process up to rounding; cut: {which}; joined again: the same")


def ends_within(limit, jobs):
    """(how many of `jobs` end by themselves within `limit` seconds, none of them well; how long that took)"""
    t0, ended = time.time(), []
    while len(ended) < len(jobs) and time.time() < t0 + limit:
        ended = [job.p.poll() for job in jobs if job.p.poll() is not None]
        time.sleep(0.2)
    took = time.time() - t0
    for job in jobs:
        if job.p.poll() is None:
            os.killpg(job.p.pid, signal.SIGKILL)
            job.p.wait()
    assert ended and 0 not in ended
    return len(ended), took


LONG = ['--max_iters=300', '--save_interval=5', '--eval_interval=100', '--ddp_timeout=10']


def end_well(jobs, out, limit=200):
    """All of `jobs` end with status 0, and `out` holds what one process would have made, alone and
    undisturbed."""
    for job in jobs:
        assert job.wait(limit) == 0, job.text()[-4000:]
    close(out, train(*LONG).out)


def lost_contact(job):
    """The workers of `job` lost the others, which they said in one line each, without a traceback."""
    assert 'error: lost contact' in job.text() and 'Error: [' not in job.text(), job.text()[-4000:]


def resumes(job, limit):
    """Seconds until the workers of `job` train again."""
    t0 = time.time()
    job.until('resuming from', limit=limit)
    return time.time() - t0


@case('hosts', 'slow')
def a_cable_is_cut_and_mended(quick):
    """runs/multinode.sh on two hosts; the cable is cut for 3 s, then for 20 s with ddp_timeout=10"""
    return in_namespaces(on_a_mended_cable)


def on_a_mended_cable():
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
    again = resumes(jobs[0], limit=120)
    for job in jobs:
        lost_contact(job)
    end_well(jobs, out)
    print("3 s: it waits and continues; 20 s: both hosts' processes give up after 10, and train again "
          f"{again:.0f} s after the cable was mended; the hash of one process")


@case('hosts', 'slow')
def a_host_comes_back(quick):
    """a host that comes before the head; kill -9 of all that runs on one of two hosts, then the same line
    there once more"""
    return in_namespaces(on_a_host_that_comes_back)


def on_a_host_that_comes_back():
    hosts()
    out = SCRATCH / 'back'
    alone = by_script(2, out, *LONG, wait='2')
    assert alone.wait() == 2 and alone.text().count('\n') == 1, alone.text()
    says = 'error: nobody answers at the head (10.77.0.1:29500) within 2 s.'
    assert alone.text().startswith(says), alone.text()
    jobs = [by_script(i, out, *LONG) for i in (1, 2)]
    jobs[0].until('iter 50:')
    jobs[1].lose()
    jobs[1] = by_script(2, out, *LONG)
    again = resumes(jobs[0], limit=120)
    lost_contact(jobs[0])
    end_well(jobs, out)
    print("it waits for the head, and says so in a line if none comes; both train again "
          f"{again:.0f} s after the kill; the hash of one process")


@case('hosts', 'slow')
def a_host_is_lost(quick):
    """two hosts of --nnodes=1:2; one vanishes (its cable is cut first, so there is no goodbye), the other
    continues alone"""
    return in_namespaces(on_a_lost_host)


def on_a_lost_host():
    hosts()
    out = SCRATCH / 'lost'
    jobs = [by_script(i, out, *LONG, nodes='1:2') for i in (1, 2)]
    jobs[0].until('iter 50:')
    cable('down')
    jobs[1].lose()
    again = resumes(jobs[0], limit=150)
    jobs[0].until('x 4 micro-batches x 1 process\n')
    lost_contact(jobs[0])
    end_well(jobs[:1], out)
    print(f"it continues alone {again:.0f} s later, with the same samples; the hash of one process")


@case('hosts', 'slow')
def a_host_joins(quick):
    """--nnodes=1:2 with one host; a second one comes while it trains"""
    return in_namespaces(on_a_host_that_joins)


def on_a_host_that_joins():
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
    stops = sum(job.text().count('stopped by SIGTERM') for job in jobs)
    assert stops == 2, jobs[0].text()[-3000:]
    n = newest_state(out)['iter_num']
    close(out, train(*flags, f'--max_iters={n}', '--lr_decay_iters=100000').out)
    print(f"it saves, starts again with both of them, {n} iterations in all; the weights of one process up to rounding")
