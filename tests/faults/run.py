"""
Break a run in every way at hand, and compare bits.

    $ python tests/faults/run.py               # everything, about a quarter of an hour
    $ python tests/faults/run.py --record=dev/records/faults.md
    $ python tests/faults/run.py --quick --only=truncated --seed=7
"""

import argparse
import os
import random
import shlex
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument('--quick', action='store_true', help='fewer kills, without the slow cases')
parser.add_argument('--only', default='', help='cases, separated by commas')
parser.add_argument('--seed', type=int, default=int(time.time()) % 100000)
parser.add_argument('--record', default='', help='write the table there')
parser.add_argument('--inside', default='', help='a case that is in its namespaces by now')
args = parser.parse_args()

import cases
import launched
from harness import CASES, PATIENCE, REPO, Job


def in_namespaces(name):
    """What the case `name` has seen, in a user, a mount and a network namespace of its own."""
    new = 'unshare -rnm bash -c'.split()
    if subprocess.run([*new, 'mount -t tmpfs tmpfs /run && ip link'], capture_output=True).returncode:
        return 'skipped: no namespaces here'
    script = shlex.join([sys.executable, __file__, f'--inside={name}', f'--seed={args.seed}'])
    done = subprocess.run([*new, f'mount -t tmpfs tmpfs /run && {script}'], capture_output=True, text=True,
                          timeout=600 * PATIENCE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


def run_all():
    """Rows (what is broken, what was seen, the case's name)."""
    rows, chosen = [], args.only.split(',') if args.only else list(CASES)
    for name, (function, marks) in CASES.items():
        too_slow = args.quick and 'slow' in marks and not args.only
        if name not in chosen or too_slow:
            continue
        begin, cpu = time.time(), sum(os.times()[:4])
        try:
            seen = in_namespaces(name) if 'namespaces' in marks else function(args.quick)
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
        print(CASES[args.inside][0](args.quick))
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
    for job in Job.everyone:  # no run of a case that failed may train on
        job.lose()
sys.exit(status)
