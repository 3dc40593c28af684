"""
The same run in every layout: one process, DDP, FSDP, hybrid, for each network and optimizer; the table for
dev/records/layouts.md.

    $ python tests/faults/layouts.py [--quick] > dev/records/layouts.md

Each line is a run of 12 iterations (quick: 8) in float32 with accumulation, clipping (which bites), grouped
heads, evaluations and samples; gloo on CPUs. Ends with status 1 if a layout's losses are not those of one
process up to rounding.
"""

import sys
from functools import cache

from harness import PLACE, REPO, fingerprint, log_without_times, newest_state, train

sys.path.append(f'{REPO}/dev')
from common import machine

from support import devices

quick = '--quick' in sys.argv
N = 8 if quick else 12  # iterations
BASE = [*PLACE, '--dataset=tiny', '--block_size=16', '--batch_size=1', '--gradient_accumulation_steps=8',
        '--n_layer=3', '--n_head=4', '--n_kv_head=2', '--n_embd=32', f'--max_iters={N}', '--warmup_iters=2',
        f'--eval_interval={N // 2}', '--eval_iters=3', '--grad_clip=0.3', '--learning_rate=1e-2',
        f'--save_interval={N // 4}', '--keep_checkpoints=9', f'--sample_interval={N}', '--sample_tokens=4']
LAYOUTS = {'one process': (1, []), 'DDP, 2': (2, []), 'DDP, 4': (4, []), 'FSDP, 2': (2, ['--shard=0']),
           'FSDP, 4': (4, ['--shard=0']), 'hybrid, 2 x 2': (4, ['--shard=2'])}
NETWORKS = {f'{arch}, {rule}': [f'--arch={arch}', f'--matrix_optimizer={rule.lower()}']
            for arch, rule in (('gpt2', 'AdamW'), ('llama', 'AdamW'), ('llama', 'Muon'), ('modern', 'AdamW'),
                               ('modern', 'Muon'))}
CHAIN = ['FSDP, 4', 'DDP, 2', 'one process', 'FSDP, 2']  # resumed in one after another
if quick:
    NETWORKS = {'modern, Muon': NETWORKS['modern, Muon']}
    CHAIN = CHAIN[-2:]
HALF = ['--dtype=bfloat16']
LIMIT = 1e-5  # of losses in float32: rounding, and no more
wrong = []


def run(name, layout, *args, **kwargs):
    """The folder of a run of the network `name`."""
    ranks, flags = LAYOUTS[layout]
    return train(*NETWORKS[name], *flags, *args, base=BASE, ranks=ranks, **kwargs).out


plain_run = cache(run)


def result(out):
    """(training loss of the last iteration, validation loss, weights)"""
    rows = log_without_times(out)
    return float(rows[-2]['loss']), float(rows[-1]['val_loss']), newest_state(out)['model']


def row(what, out, want, limit=LIMIT):
    """Print a row of the table; note what differs by more than `limit` from the run in the folder `want`."""
    (loss, val, a), (want_loss, want_val, b) = result(out), result(want)
    gap = max(((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-9)).item() for name in b)
    # Muon magnifies what a matrix hardly has
    if not (abs(loss - want_loss) < limit and abs(val - want_val) < limit and gap < 10 * limit):
        wrong.append(what)
    print(f"| {what} | {loss:.6f} | {val:.6f} | {gap:.1e} |", flush=True)


def every_layout():
    for name in NETWORKS:
        one = plain_run(name, 'one process')
        for layout in ('FSDP, 2', 'hybrid, 2 x 2') if quick else list(LAYOUTS)[1:]:
            row(f'{name}, {layout}', plain_run(name, layout), one)


def small_chunks():
    """Sabotage: the loss is computed seven tokens at a time."""
    devices.choose_loss_chunk_size = lambda *args: 7


def saves_memory(name):
    what, one = '--activation_checkpointing', plain_run(name, 'one process')
    row(f'{name}, FSDP, 2, {what}, chunked loss', run(name, 'FSDP, 2', what, sabotage=small_chunks), one)
    row(f'{name}, FSDP, 2, bfloat16, beside one process in bfloat16', run(name, 'FSDP, 2', *HALF),
        run(name, 'one process', *HALF), 2e-2)


def changes_on_the_way(name):
    """A run that is resumed in one layout after another, a few iterations in each."""
    out = None
    for i, layout in enumerate(CHAIN, 1):
        end = [f'--max_iters={N * i // len(CHAIN)}', f'--lr_decay_iters={N}']
        out = run(name, layout, '--init_from=auto', *end, out=out)
    row(f"{name}, in turns {' -> '.join(CHAIN)}", out, plain_run(name, 'one process'))


def resumed_in_the_same(name, layout):
    out = run(name, layout, f'--max_iters={N // 2}', f'--lr_decay_iters={N}')
    run(name, layout, '--init_from=resume', f'--max_iters={N}', f'--lr_decay_iters={N}', out=out)
    same = fingerprint(out) == fingerprint(plain_run(name, layout))
    if not same:
        wrong.append(f'{name}, {layout}, resumed')
    print(f"- {name}, {layout}: {'the same' if same else 'ANOTHER'}", flush=True)


command = 'python tests/faults/layouts.py' + ' --quick' * quick
print('# The same run in every layout', '', f"`{command}`; {machine()}.", '',
      __doc__.split('\n\n')[-1].strip(), '',
      '| network and optimizer, layout | last training loss | validation loss | '
      'weights apart (the worst tensor, relative) |', '|---|---|---|---|', sep='\n')
every_layout()
print('', 'What saves memory, or changes the layout on the way, beside the same run in one process:', '',
      '| | last training loss | validation loss | weights apart |', '|---|---|---|---|', sep='\n')
for name in NETWORKS:
    saves_memory(name)
    changes_on_the_way(name)
print('', 'Exact: stopped halfway and resumed in the same layout, the weights and the state of',
      'the optimizer are, bit for bit, those of a run that went through:', '', sep='\n')
for layout in list(LAYOUTS)[2:4 if quick else None]:
    for name in NETWORKS:
        resumed_in_the_same(name, layout)
print('', f"NOT the same: {'; '.join(wrong)}" if wrong else 'All are the same up to rounding.', sep='\n')
sys.exit(bool(wrong))
