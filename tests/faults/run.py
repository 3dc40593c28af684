"""
Break a run in every way at hand, and compare bits.

    $ python tests/faults/run.py                          # all of it, about a quarter of an hour, and the table in dev/records/faults.md
    $ python tests/faults/run.py --quick --only=truncated --seed=7
"""

import argparse
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
from harness import REPO, SCRATCH, end_all


def missing(marks):
    """Why this machine cannot run a case, or None."""
    can = lambda *command: shutil.which(command[0]) and subprocess.run(command, capture_output=True).returncode == 0
    if 'tmpfs' in marks and not can('unshare', '-rm', 'true'):
        return 'no user namespaces here'
    if 'hosts' in marks and not (shutil.which('ip') and can('unshare', '-rnm', 'true')):
        return 'no network namespaces here'


random.seed(args.seed)
status = 0
try:
    if args.inside:
        getattr(cases, args.inside)()
        sys.exit(0)
    print(f"seed {args.seed}", flush=True)
    rows, t0 = [], time.time()
    for name, (function, marks) in cases.CASES.items():
        if (args.only and name not in args.only.split(',')) or (args.quick and 'slow' in marks and not args.only):
            continue
        begin, reason = time.time(), missing(marks)
        try:
            seen = f'skipped: {reason}' if reason else function(args.quick)
        except AssertionError as e:
            seen, status = f'FAILED: {str(e)[:3000]}', 1
        rows.append((function.__doc__, seen, name))
        print(f"{name}: {seen} ({time.time() - begin:.0f} s)", flush=True)
    print(f"{len(rows)} cases, {sum('FAILED' in seen for _, seen, _ in rows)} failed, {time.time() - t0:.0f} s", flush=True)
    if args.record:
        sys.path.insert(0, str(REPO / 'dev'))
        from races import machine
        with open(args.record, 'w') as f:
            f.write(f"# What was broken, and what held\n\n`python tests/faults/run.py --seed={args.seed}`; {machine()}; {time.time() - t0:.0f} s.\n\n"
                    "A tiny network of the `modern` kind, AdamW and Muon, dropout 0.1, a checkpoint after every update unless the case says otherwise; float32 on a CPU, gloo.\n"
                    "\"The same bits\": a hash over every parameter and every tensor of the optimizer equals that of a run nobody disturbed.\n\n"
                    "| fault | what was seen | case |\n|---|---|---|\n" + ''.join(f"| {' '.join(fault.split())} | {' '.join(seen.split())} | `{name}` |\n" for fault, seen, name in rows))
finally:
    end_all()
    for job in cases.Torchrun.everyone:
        job.lose()
    shutil.rmtree(SCRATCH, ignore_errors=True)
sys.exit(status)
