"""
Training over a slow link beside the formulas below: two hosts (network namespaces on this machine, no rights
needed), each way of their cable limited to so many megabits a second by tc's token bucket. Prints the table
of dev/records/scaling.md.

    $ unshare -rnm python dev/measure_network.py
    $ unshare -rnm python dev/measure_network.py --rates=50,200 --accumulation=1 --flags='--shard=0'
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
from launched import Torchrun, hosts
from harness import SCRATCH

parser = argparse.ArgumentParser()
parser.add_argument('--rates', default='0,1000,200,50', help='Mbit/s; 0: as fast as it goes')
parser.add_argument('--accumulation', default='1,8')
parser.add_argument('--iterations', type=int, default=10)
parser.add_argument('--flags', default='')
args = parser.parse_args()
FLAGS = ['--n_layer=5', '--n_head=4', '--n_embd=256', '--block_size=32', '--batch_size=1', '--dropout=0',
         '--matrix_optimizer=adamw', '--learning_rate=1e-3', '--eval_interval=0', '--eval_iters=1',
         '--save_interval=10000', f'--max_iters={4 + args.iterations}', '--warmup_iters=1',
         *shlex.split(args.flags)]


# Bytes that each of G processes sends in an iteration, for N parameters. Rings: each sends
# (G - 1) / G of what is gathered or scattered.

def ddp(N, G):
    return 2 * (G - 1) / G * 4 * N  # float32 gradients, once however many micro-batches there are


def full(N, G, micro_batches):
    # float32 weights gathered for forward and backward of each micro-batch, gradients scattered once
    return (G - 1) / G * (2 * micro_batches + 1) * 4 * N


def formula(N, micro_batches):
    return full(N, 2, micro_batches) if '--shard=0' in FLAGS else ddp(N, 2)


def sh(line):
    return subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout


def sent():
    """Bytes that each host has sent, headers and all."""
    return [json.loads(sh(f'ip -n h{i} -s -j link show v{i}'))[0]['stats64']['tx']['bytes'] for i in (1, 2)]


def measure(mbit, accumulation, port):
    for i in (1, 2):
        sh(f'ip netns exec h{i} tc qdisc del dev v{i} root 2> /dev/null || true')
        if mbit:
            limit = f'rate {mbit}mbit burst {max(64, mbit)}kb latency 100ms'
            sh(f'ip netns exec h{i} tc qdisc add dev v{i} root tbf {limit}')
    out = SCRATCH / f'{mbit}-{accumulation}'
    jobs = []
    for i in (1, 2):
        launcher = ['--nnodes=2', f'--node_rank={i - 1}', '--master_addr=10.77.0.1', f'--master_port={port}']
        flags = [*FLAGS, f'--gradient_accumulation_steps={2 * accumulation}']
        jobs.append(Torchrun(1, *flags, out=out, launcher=launcher, prefix=['ip', 'netns', 'exec', f'h{i}'],
                             env={'GLOO_SOCKET_IFNAME': f'v{i}'}))
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
    print('| Mbit/s | micro-batches per host | MB sent by each, formula | measured | ratio | '
          'ms of the fastest iteration, nothing hidden | measured |\n|---|---|---|---|---|---|---|')
    alone = {}  # ms where the link is no limit
    for n, mbit in enumerate(int(word) for word in args.rates.split(',')):
        for accumulation in (int(word) for word in args.accumulation.split(',')):
            N, ms, bytes = measure(mbit, accumulation, 29600 + 10 * n + accumulation)
            alone.setdefault(accumulation, ms)
            want = formula(N, accumulation)
            predicted = '-'
            if mbit:
                first, sending = alone[accumulation], want / mbit / 125  # ms
                predicted = f'{first:,.0f} + {sending:,.0f} = {first + sending:,.0f}'
            cells = f'{want / 1e6:.2f} | {bytes / 1e6:.2f} | {bytes / want:.3f}'
            link = f'{mbit or "no limit"} | {accumulation}'
            print(f"| {link} | {cells} | {predicted} | {ms:,.0f} |", flush=True)
    print(f"\n{N:,} parameters")
finally:
    for job in Torchrun.everyone:
        job.lose()
    shutil.rmtree(SCRATCH, ignore_errors=True)
