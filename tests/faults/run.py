"""
Break a run in every way at hand, and compare bits.

    $ python tests/faults/run.py               # everything, about a quarter of an hour
    $ python tests/faults/run.py --record=dev/records/faults.md
    $ python tests/faults/run.py --quick --only=truncated --seed=7
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument('--quick', action='store_true', help='fewer kills, without the slow cases')
parser.add_argument('--only', default='', help='cases, separated by commas')
parser.add_argument('--seed', type=int, default=int(time.time()) % 100000)
parser.add_argument('--record', default='', help='write the table there')
parser.add_argument('--inside', default='', help='a part that runs in namespaces of its own')
args = parser.parse_args()

import cases
import launched
from harness import CASES, REPO, end_all


def succeeds(*command):
    return shutil.which(command[0]) and subprocess.run(command, capture_output=True).returncode == 0


def missing(marks):
    """Why this machine cannot run a case, or None."""
    if 'tmpfs' in marks and not succeeds('unshare', '-rm', 'true'):
        return 'no user namespaces here'
    if 'hosts' in marks and not (shutil.which('ip') and succeeds('unshare', '-rnm', 'true')):
        return 'no network namespaces here'
    return None


def run_all():
    """Rows (what is broken, what was seen, the case's name)."""
    rows, chosen = [], args.only.split(',') if args.only else list(CASES)
    for name, (function, marks) in CASES.items():
        too_slow = args.quick and 'slow' in marks and not args.only
        if name not in chosen or too_slow:
            continue
        begin, cpu, reason = time.time(), sum(os.times()[:4]), missing(marks)
        try:
            seen = f'skipped: {reason}' if reason else function(args.quick)
        except (Exception, SystemExit) as e:
            seen = f'FAILED: {type(e).__name__}: {str(e)[-3000:]}'
        rows.append((function.__doc__, seen, name))
        spent = sum(os.times()[:4]) - cpu
        print(f"{name}: {seen} ({time.time() - begin:.0f} s, {spent:.0f} of them computing)", flush=True)
    return rows


HEADER = """# What was broken, and what held

`python tests/faults/run.py --seed={seed}`; {machine}; {seconds:.0f} s.

A tiny network of the `modern` kind, AdamW and Muon, dropout 0.1, a checkpoint after every update unless the
case says otherwise; float32 on a CPU, gloo. "The same bits": a hash over every parameter and every tensor of
the optimizer equals that of a run nobody disturbed.

| fault | what was seen | case |
|---|---|---|
"""


def write_record(path, rows, seconds):
    sys.path.insert(0, str(REPO / 'dev'))
    from common import machine
    with open(path, 'w') as f:
        f.write(HEADER.format(seed=args.seed, machine=machine(), seconds=seconds))
        for fault, seen, name in rows:
            f.write(f"| {' '.join(fault.split())} | {' '.join(seen.split())} | `{name}` |\n")


def main():
    random.seed(args.seed)
    if args.inside:
        part = getattr(cases, args.inside, None) or getattr(launched, args.inside)
        part()
        return 0
    print(f"seed {args.seed}", flush=True)
    begin = time.time()
    rows = run_all()
    seconds, failed = time.time() - begin, sum('FAILED' in seen for _, seen, _ in rows)
    print(f"{len(rows)} cases, {failed} failed, {seconds:.0f} s", flush=True)
    if args.record:
        write_record(args.record, rows, seconds)
    return 1 if failed else 0


try:
    status = main()
finally:
    end_all()
    for job in launched.Torchrun.everyone:
        job.lose()
sys.exit(status)
