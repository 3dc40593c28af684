"""
Training over a slow link, held against the formulas of scaling.py: two hosts (network namespaces on this machine, no rights needed), each way of their
cable let through at so many megabits a second by tc's token bucket. Prints the table of dev/records/scaling.md.

    $ unshare -rnm python dev/measure_network.py
    $ unshare -rnm python dev/measure_network.py --rates=50,200 --accumulation=1 --flags='--shard=full'
"""

import argparse
import csv
import json
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / 'tests' / 'faults'))
from cases import Torchrun, hosts
from harness import SCRATCH

from scaling import ddp, full

parser = argparse.ArgumentParser()
parser.add_argument('--rates', default='0,1000,200,50', help='Mbit/s; 0: as fast as it goes')
parser.add_argument('--accumulation', default='1,8')
parser.add_argument('--iterations', type=int, default=10)
parser.add_argument('--flags', default='')
args = parser.parse_args()
FLAGS = ['--n_layer=5', '--n_head=4', '--n_embd=256', '--block_size=32', '--batch_size=1', '--dropout=0', '--matrix_optimizer=adamw', '--learning_rate=1e-3', '--eval_interval=0', '--eval_iters=1',
         '--save_interval=10000', f'--max_iters={4 + args.iterations}', '--warmup_iters=1', *shlex.split(args.flags)]


def sh(line):
    return subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout


def sent():
    """Bytes that each host has sent, headers and all."""
    return [json.loads(sh(f'ip -n h{i} -s -j link show v{i}'))[0]['stats64']['tx']['bytes'] for i in (1, 2)]


def measure(mbit, accumulation, port):
    for i in (1, 2):
        sh(f'ip netns exec h{i} tc qdisc del dev v{i} root 2> /dev/null || true')
        if mbit:
            sh(f'ip netns exec h{i} tc qdisc add dev v{i} root tbf rate {mbit}mbit burst {max(64, mbit)}kb latency 100ms')
    out = SCRATCH / f'{mbit}-{accumulation}'
    jobs = [Torchrun(1, *FLAGS, f'--gradient_accumulation_steps={2 * accumulation}', out=out, prefix=['ip', 'netns', 'exec', f'h{i}'], env={'GLOO_SOCKET_IFNAME': f'v{i}'},
                     launcher=['--nnodes=2', f'--node_rank={i - 1}', '--master_addr=10.77.0.1', f'--master_port={port}']) for i in (1, 2)]
    jobs[0].until('iter 3:', limit=200)
    before = sent()
    jobs[0].until(f'iter {3 + args.iterations}:', limit=400)
    bytes = [(b - a) / args.iterations for a, b in zip(before, sent())]
    for job in jobs:
        assert job.wait(400) == 0, job.text()[-3000:]
    with open(out / 'log.csv', newline='') as f:
        ms = [float(row['ms']) for row in csv.DictReader(f) if row['ms'] and int(row['iter']) > 3]
    N = json.loads((out / 'run.json').read_text())['parameters']
    return N, min(ms), statistics.mean(bytes)  # the fastest: what else the machine does is not ours


try:
    sh('mount -t tmpfs tmpfs /run')
    hosts()
    formula = (lambda N, k: full(N, 2, k, width=4)) if '--shard=full' in args.flags else (lambda N, k: ddp(N, 2, k))
    print('| Mbit/s | micro-batches per host | MB sent by each, formula | measured | ratio | ms of the fastest iteration, nothing hidden | measured |\n|---|---|---|---|---|---|---|')
    alone = {}  # ms where the link is no limit
    for n, mbit in enumerate(int(word) for word in args.rates.split(',')):
        for accumulation in (int(word) for word in args.accumulation.split(',')):
            N, ms, bytes = measure(mbit, accumulation, 29600 + 10 * n + accumulation)
            alone.setdefault(accumulation, ms)
            want = formula(N, accumulation)
            predicted = f"{alone[accumulation]:,.0f} + {want / mbit / 125:,.0f} = {alone[accumulation] + want / mbit / 125:,.0f}" if mbit else '-'
            print(f"| {mbit or 'no limit'} | {accumulation} | {want / 1e6:.2f} | {bytes / 1e6:.2f} | {bytes / want:.3f} | {predicted} | {ms:,.0f} |", flush=True)
    print(f"\n{N:,} parameters")
finally:
    for job in Torchrun.everyone:
        job.lose()
    shutil.rmtree(SCRATCH, ignore_errors=True)
