"""
Threads on a CPU that other programs use, too.

OpenMP divides each operation among threads, and one that is done spins until the others are: it keeps its
core busy. Alone that is the fastest way to wait. In company a thread spins on the core that the late one
needs, and an iteration takes many times as long (dev/records/shared_cpu.md).
"""

import collections
import glob
import os
import statistics
import threading
import time

import torch

INTERVAL = 0.5  # seconds between two looks
CROWDED, ALONE = 0.12, 0.06  # share of the time in which threads that could run wait for a core
CALM = 4  # looks without company before threads spin again


def watch(device):
    """From now on waiting threads sleep while other programs use the cores, and spin while not; this changes
    no bit of a result. Returns a few words for the run plan."""
    n = torch.get_num_threads()
    if device.type != 'cpu' or n == 1:
        return '1 thread'
    # read by OpenMP while torch is loaded: whoever sets them has chosen how threads wait
    chosen = [name for name in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT') if name in os.environ]
    if chosen:
        return f"{n} threads (waiting as {' and '.join(chosen)} says)"
    if not uses_libgomp() or seconds_of_threads() == (0, 0):
        return f'{n} threads'
    threading.Thread(target=Watch(n).work, daemon=True).start()
    return f'{n} threads (they spin only while no other program uses the cores)'


def uses_libgomp():
    """Whether the threads are those of GNU's OpenMP, as in torch's wheels for Linux."""
    if not os.path.exists('/proc/self/maps'):
        return False
    with open('/proc/self/maps') as f:
        maps = f.read()
    return 'libgomp' in maps and 'libomp' not in maps and 'libiomp' not in maps


def seconds_of_threads():
    """Seconds that the threads of this process (ran, waited for a core), as Linux counts them."""
    ran = waited = 0
    for path in glob.glob('/proc/self/task/*/schedstat'):
        try:
            with open(path) as f:
                times = f.read().split()
        except OSError:  # the thread has ended
            continue
        ran, waited = ran + int(times[0]), waited + int(times[1])
    return ran / 1e9, waited / 1e9


class Watch:
    """Looks twice a second whether this process has company."""

    def __init__(self, n_threads):
        self.n_threads, self.calm = n_threads, 0
        self.company_left = None  # an event, while there is company

    def work(self):
        before = seconds_of_threads()
        while True:
            time.sleep(INTERVAL)
            now = seconds_of_threads()
            ran, waited = now[0] - before[0], now[1] - before[1]
            self.look(waited / max(ran + waited, 1e-9))
            before = now

    def look(self, share):
        """share: of the time in which threads could have run, in which they waited for a core."""
        self.calm = self.calm + 1 if share < ALONE else 0
        if self.company_left is None and share > CROWDED:
            self.company_left = sleep_instead_of_spinning(self.n_threads)
        elif self.company_left is not None and self.calm >= CALM:
            self.company_left.set()
            self.company_left = None


def sleep_instead_of_spinning(n_threads):
    """Until the event that this returns is set. libgomp's threads spin 300,000 times before they sleep, but
    only 100 times while the process has more of them than there are cores (libgomp's wait.h: do_spin). So
    have more, which do nothing: each thread that begins a parallel operation gets a team of its own."""
    until = threading.Event()

    def have_a_team():
        torch.ones(2**17)  # large enough to be divided
        until.wait()  # the team ends with its thread
    cores = len(os.sched_getaffinity(0))
    for _ in range((cores - n_threads) // (n_threads - 1) + 1):
        threading.Thread(target=have_a_team, daemon=True).start()
    return until


class Pace:
    """Tells once if iterations take many times as long as they could, in a run of more than `patience`
    seconds: in a shorter one there is nothing to gain."""

    def __init__(self, patience=20):
        self.time_to_tell = time.monotonic() + patience
        self.fastest, self.latest, self.told = float('inf'), collections.deque(maxlen=5), False

    def note(self, ms):
        """ms: of the latest iteration. Returns a line, or None."""
        self.latest.append(ms)
        self.fastest = min(self.fastest, ms)
        times = statistics.median(self.latest) / self.fastest
        if self.told or len(self.latest) < 5 or times < 3 or time.monotonic() < self.time_to_tell:
            return None
        self.told = True
        return (f"note: iterations take {times:.1f} times as long as the fastest one, {self.fastest:.0f} ms: "
                "other programs use the cores. this changes the time, not the result")
