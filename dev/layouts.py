"""
The same run in every layout: one process, DDP, FSDP, hybrid, for each network and optimizer; the table for dev/records/layouts.md.

    $ python dev/layouts.py [--quick] > dev/records/layouts.md

Each line is a run of 12 iterations in float32 with accumulation, clipping (which bites), grouped heads, evaluations and samples; gloo on CPUs. Ends
with status 1 if a layout's losses are not those of one process up to rounding.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'tests', 'faults'))
from harness import PLACE, fingerprint, log_without_times, train  # before torch: it sets one thread

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import checkpoint
from races import machine

BASE = [*PLACE, '--dataset=tiny', '--block_size=16', '--batch_size=1', '--gradient_accumulation_steps=8', '--n_layer=3', '--n_head=4', '--n_embd=32', '--max_iters=12',
        '--warmup_iters=2', '--eval_interval=6', '--eval_iters=3', '--grad_clip=0.3', '--learning_rate=1e-2', '--save_interval=3', '--keep_checkpoints=9', '--sample_interval=12',
        '--sample_tokens=20', '--write_report=False']
LAYOUTS = {'one process': (1, []), 'DDP, 2': (2, []), 'DDP, 4': (4, []), 'full, 2': (2, ['--shard=full']), 'full, 4': (4, ['--shard=full']),
           'hybrid, 2 x 2': (4, ['--shard=full', '--shard_size=2'])}
NETWORKS = {'gpt2, AdamW': ['--arch=gpt2'], 'llama, AdamW': ['--arch=llama', '--n_kv_head=2'], 'llama, Muon': ['--arch=llama', '--n_kv_head=2', '--matrix_optimizer=muon'],
            'modern, AdamW': ['--arch=modern', '--n_kv_head=2'], 'modern, Muon': ['--arch=modern', '--n_kv_head=2', '--matrix_optimizer=muon']}
quick = '--quick' in sys.argv
wrong = []


def run(layout, *args, **kwargs):
    ranks, flags = LAYOUTS[layout]
    return train(*flags, *args, base=BASE, ranks=ranks, **kwargs).out


def result(out):
    """(training loss of the last iteration, validation loss, the largest distance of a parameter tensor from `want`'s)."""
    rows = log_without_times(out)
    return float(rows[-2]['loss']), float(rows[-1]['val_loss']), checkpoint.read(checkpoint.newest(str(out)))['model']


def apart(a, b):
    return max(((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-9)).item() for name in b)


def compare(name, out, want, limit):
    """A row of the table; notes what differs by more than `limit`."""
    (loss, val, weights), (loss_, val_, weights_) = result(out), want
    gap = apart(weights, weights_)
    if not (abs(loss - loss_) < limit and abs(val - val_) < limit and gap < 200 * limit):  # Muon's bfloat16 blows up what a matrix hardly has
        wrong.append(name)
    return f"| {name} | {loss:.6f} | {val:.6f} | {gap:.1e} |"


print('# The same run in every layout', '', f"`python dev/layouts.py{' --quick' * quick}`; {machine()}.", '', __doc__.split('\n\n')[-1].strip().replace('\n', ' '), '',
      '| network and optimizer, layout | last training loss | validation loss | weights apart (the worst tensor, relative) |', '|---|---|---|---|', sep='\n')
networks = {name: NETWORKS[name] for name in ('gpt2, AdamW', 'modern, Muon')} if quick else NETWORKS
layouts = ['full, 2', 'hybrid, 2 x 2'] if quick else list(LAYOUTS)[1:]
wants = {}
for name, flags in networks.items():
    limit = 1e-3 if 'Muon' in name else 1e-4  # Muon works in bfloat16 inside
    wants[name] = result(run('one process', *flags))
    print(compare(f'{name}, one process', run('one process', *flags), wants[name], 1e-12))
    for layout in layouts:
        print(compare(f'{name}, {layout}', run(layout, *flags), wants[name], limit), flush=True)

print('', 'What saves memory, or changes the layout on the way, beside the same run in one process:', '', '| | last training loss | validation loss | weights apart |', '|---|---|---|---|', sep='\n')
for name, flags in list(networks.items())[-1:] if quick else networks.items():
    limit = 1e-3 if 'Muon' in name else 1e-4
    for what in (['--activation_checkpointing', '--chunked_loss'],):
        print(compare(f"{name}, full, 2, {' '.join(what)}", run('full, 2', *flags, *what), wants[name], limit), flush=True)
    out, chain = None, ['full, 4', 'DDP, 2', 'one process', 'full, 2'][-2 if quick else 0:]
    for i, layout in enumerate(chain):  # a few iterations in each
        until = 12 * (i + 1) // len(chain)
        out = run(layout, *flags, '--init_from=auto', f'--max_iters={until}', '--lr_decay_iters=12', out=out)
    print(compare(f"{name}, in turns {' -> '.join(chain)}", out, wants[name], limit), flush=True)

print('', 'Exact: stopped after 6 iterations and resumed in the same layout, the weights and the state of the optimizer are, bit for bit, those of a run that went through:', '', sep='\n')
for layout in ['full, 2'] if quick else ['full, 2', 'hybrid, 2 x 2']:
    for name, flags in list(networks.items())[-1:] if quick else networks.items():
        through = fingerprint(run(layout, *flags))
        out = run(layout, *flags, '--max_iters=6', '--lr_decay_iters=12')
        same = fingerprint(run(layout, *flags, '--init_from=resume', '--max_iters=12', '--lr_decay_iters=12', out=out)) == through
        wrong += [] if same else [f'{name}, {layout}, resumed']
        print(f"- {name}, {layout}: {'the same' if same else 'ANOTHER'}", flush=True)
print('', f"{'All are the same up to rounding.' if not wrong else 'NOT the same: ' + '; '.join(wrong)}", sep='\n')
sys.exit(bool(wrong))
