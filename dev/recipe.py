"""
A configuration, seed by seed: the loss over all of val.bin after its iterations, and the seconds of training
that they took, without evaluations and checkpoints.

    $ python dev/recipe.py quickstart
    $ python dev/recipe.py laptop --text=input.txt --seeds=8

The table goes to dev/records/recipe_quickstart.md or recipe_laptop.md.
"""

import os
import sys
from typing import Literal

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import configure, fail

# -----------------------------------------------------------------------------
which: Literal['quickstart', 'laptop'] = 'quickstart'  # of which configuration
seeds = 3  # runs
first_seed = 1
flags = ''  # more of them, for all runs: '--max_iters=9000 --dropout=0.1'
text: str = None  # tinyshakespeare's file. None: prepare.py downloads it
out = os.path.join(HERE, 'dev', 'records')  # where the table goes
# -----------------------------------------------------------------------------
knobs, given = configure(globals(), positional='which')
if seeds < 1:
    fail(f"seeds is out of range ({seeds}). use 1 or more")

import math
import tempfile

from common import draw_curves, given_flags, machine, run_script, table, write_record
from support.report import points, read_log

# the configuration, its dataset, iterations between evaluations
config, dataset, interval = {'quickstart': ('quickstart', 'pystdlib', 0),
                             'laptop': ('train_shakespeare_char_laptop', 'shakespeare_char', 120)}[which]


def train(seed):
    """The curve [(iteration, seconds of training, loss in nats)] of a run with this seed."""
    folder = os.path.join(work, 'out')
    own = [f'--out_dir={folder}', f'--data_dir={work}', f'--seed={seed}', f'--eval_interval={interval}',
           '--eval_iters=0', '--sample_interval=0', '--overwrite', '--keep_checkpoints=1']
    run_script('train.py', f'config/{config}.py', '--device=cpu', *own, *flags.split())
    log = read_log(folder)
    evaluations = zip(points(log, 'iter', 'val_loss'), points(log, 'seconds', 'val_loss'))
    return [(int(it), seconds, loss) for (it, loss), (seconds, _) in evaluations]


os.makedirs(out, exist_ok=True)
with tempfile.TemporaryDirectory() as work:
    run_script('prepare.py', dataset, f'--data_dir={work}', *([f'--input={text}'] if text else []))
    curves = []
    for seed in range(first_seed, first_seed + seeds):
        curves.append(train(seed))
        print(seed, *curves[-1][-1], flush=True)
rows = [('seed', 'iterations', 'seconds', 'loss', 'bits')]
ends = [(seed, *curve[-1]) for seed, curve in enumerate(curves, first_seed)]
for seed, n, seconds, loss in [*ends, ('mean', *(sum(column) / seeds for column in list(zip(*ends))[1:]))]:
    rows.append((seed, f'{n:,.0f}', f'{seconds:.1f}', f'{loss:.4f}', f'{loss / math.log(2):.4f}'))
lines = [f'# config/{config}.py', '', f'`python dev/recipe.py {given_flags(sys.argv[1:])}`; {machine()}.', '',
         'Loss in nats per token over all of val.bin with the last weights, bits, seconds of training.', '',
         *table(*rows)]
if which == 'laptop':
    draw_curves({'this recipe': curves}, os.path.join(out, 'recipe_laptop.png'),
                'Shakespeare by characters on two CPU cores', 'validation loss (nats per character)', 1.4697)
    lines += ['', "nanoGPT's README: 1.4697, the best validation loss of 10.7 million parameters after",
              'three minutes on an A100, by 200 random batches of 64 windows. Here all of val.bin is read in',
              'windows of 256 characters. Shape, momentum, norms and rates were chosen on the last tenth of',
              'train.bin, the number of iterations by the clock.', '', '![The loss](recipe_laptop.png)']
write_record(os.path.join(out, f'recipe_{which}.md'), lines)
