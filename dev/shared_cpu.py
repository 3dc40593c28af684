"""
How much slower is a training step when other programs use the cores?

    $ python dev/shared_cpu.py                                       # beside each kind of company
    $ python dev/shared_cpu.py --beside=busy3 --other=PATH_TO_ANOTHER_FLATGPT
    $ GOMP_SPINCOUNT=1000 python dev/shared_cpu.py --beside=train2   # with another setting

Each turn starts train.py as it is and times its steps: first alone, then beside N processes that do nothing
but count (busyN), or N other trainings of the same checkout (trainN). Company gets a few seconds before the
steps count. The checkouts take turns. Nothing is written but what is printed.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
beside = 'busy1,busy3,train2'  # kinds of company; 'alone' measures only that
other: str = None  # another checkout of flatgpt to compare with
rounds = 1  # turns of each checkout
seconds = 8.0  # of steps that count, alone and in company
settle = 5.0  # seconds before, for each
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time

from common import REPO, flags_of, machine, make_tokens, median_and_range, table

TOY = dict(n_layer=4, n_head=4, n_embd=128, batch_size=12, block_size=64, gradient_accumulation_steps=1,
           eval_interval=0, max_iters=10**6, device='cpu', compile=False,
           max_minutes=3)  # so that one that is forgotten ends
ITERATION = re.compile(r'iter \d+: loss .*?time ([\d.]+)ms')
BUSY = [sys.executable, '-c', 'while True: pass']


class Training:
    """A train.py that runs until it is killed; `steps` are the (time of arrival, ms) that it has printed."""

    def __init__(self, checkout, folder, name):
        dataset = make_tokens(folder, 65, 2**18)
        flags = flags_of({**TOY, 'data_dir': folder, 'dataset': dataset,
                          'out_dir': os.path.join(folder, name)})
        self.steps, self.notes = [], []
        command = [sys.executable, '-u', 'train.py', *flags]
        self.process = subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for line in self.process.stdout:
            if found := ITERATION.match(line):
                self.steps.append((time.monotonic(), float(found[1])))
            elif line.startswith('note:'):
                self.notes.append(line.strip())

    def wait_for(self, n):
        while len(self.steps) < n:
            if self.process.poll() is not None:
                raise SystemExit(f'error: train.py ended with status {self.process.returncode}')
            time.sleep(0.05)

    def median_ms(self, processes):
        """(median of the steps that begin from now on, for some seconds, and at least three of them; the
        cores that were used by others than `processes` meanwhile)"""
        since, used = time.monotonic(), used_by_others(processes)
        time.sleep(seconds)

        def found():
            return [ms for when, ms in list(self.steps) if when - ms / 1000 >= since]
        while len(found()) < 3:
            time.sleep(0.1)
        used = used_by_others(processes) - used
        return statistics.median(found()), used / (time.monotonic() - since)


def used_by_others(processes):
    """Seconds of all cores since the machine started, without those of these processes; Linux only."""
    with open('/proc/stat') as f:
        user, nice, system, _, _, irq, softirq, *_ = map(int, f.readline().split()[1:])
    total = user + nice + system + irq + softirq
    for process in [*processes, None]:
        with open(f"/proc/{process.pid if process else 'self'}/stat") as f:
            total -= sum(map(int, f.read().rpartition(')')[2].split()[11:13]))
    return total / os.sysconf('SC_CLK_TCK')


def turn(checkout, company):
    """(ms of a step alone, ms in company, the most cores that others used in either time, notes)"""
    kind, number = re.fullmatch('([a-z]+?)([0-9]*)', company).groups()
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            training = Training(checkout, folder, 'measured')
            processes.append(training.process)
            training.wait_for(5)
            time.sleep(settle)
            alone, used = training.median_ms(processes)
            if kind == 'alone':
                return alone, alone, used, training.notes
            trainings = []
            for i in range(int(number)):
                if kind == 'busy':
                    processes.append(subprocess.Popen(BUSY))
                else:
                    trainings.append(Training(checkout, folder, f'other{i}'))
                    processes.append(trainings[-1].process)
            for another in trainings:
                another.wait_for(2)
            time.sleep(settle)
            ms, used_later = training.median_ms(processes)
            return alone, ms, max(used, used_later), training.notes
        finally:
            for process in processes:
                process.kill()
                process.wait()


if __name__ == '__main__':
    problems = out_of_range(knobs, above_zero='rounds seconds', from_zero='settle')
    problems += [f"no such company ({word}). use alone, busy1, busy2, ..., train1, train2, ..."
                 for word in beside.split(',') if not re.fullmatch('alone|(busy|train)[1-9]', word)]
    if other is not None and not os.path.isfile(os.path.join(other, 'train.py')):
        problems.append(f"no train.py in the other checkout ({other}). name one of flatgpt with --other=PATH")
    if problems:
        fail(*problems)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left running
    checkouts = {'this': REPO, **({'other': os.path.abspath(other)} if other else {})}
    print(machine() + '\n', flush=True)
    rows = []
    for company in beside.split(','):
        found = {name: [] for name in checkouts}
        for _ in range(rounds):
            for name, checkout in checkouts.items():
                alone, ms, used, notes = turn(checkout, company)
                print(f"{name}, {company}: {alone:.1f} ms alone, {ms:.1f}; others used {used:.2f} cores; "
                      f"{'; '.join(notes)}", flush=True)
                found[name].append((alone, ms, ms / alone, used))
        for name, measured in found.items():
            cells = [median_and_range(column, 2) for column in zip(*measured)]
            rows.append((name, company, *cells))
    head = ('checkout', 'beside', 'ms alone', 'ms in company', 'times', 'cores used by others')
    print('\n' + '\n'.join(table(head, *rows)))
