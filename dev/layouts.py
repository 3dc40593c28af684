"""
The same run in every layout: one process, DDP, FSDP, hybrid, for each network and optimizer; the table for
dev/records/layouts.md.

    $ python dev/layouts.py [--quick] > dev/records/layouts.md

Each line is a run of 12 iterations (quick: 8) in float32 with accumulation, clipping (which bites), grouped
heads, evaluations and samples; gloo on CPUs. Ends with status 1 if a layout's losses are not those of one
process up to rounding.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(os.path.dirname(HERE), 'tests', 'faults'), HERE]
# before torch: it sets one thread
from harness import PLACE, fingerprint, log_without_times, newest_state, train

import torch.distributed.fsdp  # what a run imports on its way is imported here, once
import torch.distributed.tensor
from common import machine

from support import devices, samples, sharding, shared_muon  # noqa: F401

quick = '--quick' in sys.argv
N = 8 if quick else 12  # iterations
BASE = [*PLACE, '--dataset=tiny', '--block_size=16', '--batch_size=1', '--gradient_accumulation_steps=8',
        '--n_layer=3', '--n_head=4', '--n_embd=32', f'--max_iters={N}', '--warmup_iters=2',
        f'--eval_interval={N // 2}', '--eval_iters=3', '--grad_clip=0.3', '--learning_rate=1e-2',
        f'--save_interval={N // 4}', '--keep_checkpoints=9', f'--sample_interval={N}', '--sample_tokens=4']
LAYOUTS = {'one process': (1, []), 'DDP, 2': (2, []), 'DDP, 4': (4, []), 'FSDP, 2': (2, ['--shard=0']),
           'FSDP, 4': (4, ['--shard=0']), 'hybrid, 2 x 2': (4, ['--shard=2'])}
NETWORKS = {'gpt2, AdamW': ['--arch=gpt2'],
            'llama, AdamW': ['--arch=llama', '--n_kv_head=2'],
            'llama, Muon': ['--arch=llama', '--n_kv_head=2', '--matrix_optimizer=muon'],
            'modern, AdamW': ['--arch=modern', '--n_kv_head=2'],
            'modern, Muon': ['--arch=modern', '--n_kv_head=2', '--matrix_optimizer=muon']}
networks = ['gpt2, AdamW', 'modern, Muon'] if quick else list(NETWORKS)
layouts = ['FSDP, 2', 'hybrid, 2 x 2'] if quick else list(LAYOUTS)[1:]
some = networks[-1:] if quick else networks  # for what is not compared in every layout
wrong = []
done = {}  # runs that others may ask for again


def run(name, layout, *args, **kwargs):
    """The folder of a run of the network `name`."""
    ranks, flags = LAYOUTS[layout]
    return train(*NETWORKS[name], *flags, *args, base=BASE, ranks=ranks, **kwargs).out


def plain_run(name, layout):
    if (name, layout) not in done:
        done[name, layout] = run(name, layout)
    return done[name, layout]


def result(out):
    """(training loss of the last iteration, validation loss, weights)"""
    rows = log_without_times(out)
    return float(rows[-2]['loss']), float(rows[-1]['val_loss']), newest_state(out)['model']


def distance(a, b):
    """The largest relative distance of two tensors of one name."""
    return max(((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-9)).item() for name in b)


LIMIT = 1e-5  # of losses in float32: rounding, and no more


def row(what, out, want, limit):
    """Print a row of the table; note what differs by more than `limit` from the run in the folder `want`."""
    (loss, val, weights), (want_loss, want_val, want_weights) = result(out), result(want)
    gap = distance(weights, want_weights)
    # Muon magnifies what a matrix hardly has
    if not (abs(loss - want_loss) < limit and abs(val - want_val) < limit and gap < 10 * limit):
        wrong.append(what)
    print(f"| {what} | {loss:.6f} | {val:.6f} | {gap:.1e} |", flush=True)


def every_layout():
    for name in networks:
        one = plain_run(name, 'one process')
        row(f'{name}, one process', one if quick else run(name, 'one process'), one, 1e-12)
        for layout in layouts[1:] if quick and name != networks[-1] else layouts:
            row(f'{name}, {layout}', plain_run(name, layout), one, LIMIT)


def small_chunks():
    """Sabotage: the loss is computed seven tokens at a time."""
    devices.choose_loss_chunk_size = lambda *args: 7


def saves_memory(name):
    what = '--activation_checkpointing'
    out = run(name, 'FSDP, 2', what, sabotage=small_chunks)
    row(f'{name}, FSDP, 2, {what}, chunked loss', out, plain_run(name, 'one process'), LIMIT)
    half = run(name, 'one process', '--dtype=bfloat16')
    loss, val, _ = result(half)
    row(f"{name}, FSDP, 2, in bfloat16, whose losses in one process are {loss:.6f} and {val:.6f}",
        run(name, 'FSDP, 2', '--dtype=bfloat16'), half, 2e-2)


def changes_on_the_way(name):
    """A run that is resumed in one layout after another, a few iterations in each."""
    out, chain = None, ['FSDP, 4', 'DDP, 2', 'one process', 'FSDP, 2']
    chain = chain[-2:] if quick else chain
    for i, layout in enumerate(chain):
        end = N * (i + 1) // len(chain)
        out = run(name, layout, '--init_from=auto', f'--max_iters={end}', f'--lr_decay_iters={N}', out=out)
    row(f"{name}, in turns {' -> '.join(chain)}", out, plain_run(name, 'one process'), LIMIT)


def resumed_in_the_same(name, layout):
    through = fingerprint(plain_run(name, layout))
    out = run(name, layout, f'--max_iters={N // 2}', f'--lr_decay_iters={N}')
    run(name, layout, '--init_from=resume', f'--max_iters={N}', f'--lr_decay_iters={N}', out=out)
    same = fingerprint(out) == through
    if not same:
        wrong.append(f'{name}, {layout}, resumed')
    print(f"- {name}, {layout}: {'the same' if same else 'ANOTHER'}", flush=True)


command = 'python dev/layouts.py --quick' if quick else 'python dev/layouts.py'
print('# The same run in every layout', '', f"`{command}`; {machine()}.", '',
      __doc__.split('\n\n')[-1].strip(), '',
      '| network and optimizer, layout | last training loss | validation loss | '
      'weights apart (the worst tensor, relative) |', '|---|---|---|---|', sep='\n')
every_layout()
print('', 'What saves memory, or changes the layout on the way, beside the same run in one process:', '',
      '| | last training loss | validation loss | weights apart |', '|---|---|---|---|', sep='\n')
for name in some:
    saves_memory(name)
    changes_on_the_way(name)
print('', 'Exact: stopped halfway and resumed in the same layout, the weights and the state of',
      'the optimizer are, bit for bit, those of a run that went through:', '', sep='\n')
for layout in layouts[:1] if quick else ('FSDP, 2', 'hybrid, 2 x 2'):
    for name in some:
        resumed_in_the_same(name, layout)
print('', f"NOT the same: {'; '.join(wrong)}" if wrong else 'All are the same up to rounding.', sep='\n')
sys.exit(bool(wrong))
