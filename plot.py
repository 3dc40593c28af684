"""
Draw runs, from their log.csv, and write their reports. Needs matplotlib, no GPU. A view fits all behind a
curve's first tenth, and of four values or some more behind the first one.

    $ python plot.py out-quickstart                                       # curves.png
    $ python plot.py out-a out-b out-c --x=time --y=bpb --to=bpb.png      # named by the knobs that differ
    $ python plot.py out-quickstart --report=True                         # its report.md and loss.png
"""

import csv
import os
from typing import Literal

from configurator import configure, fail
from support.report import comparison, draw, groups, read_log, write
from support.console import make_output_last

# -----------------------------------------------------------------------------
runs: list | str = []  # their folders; plain words
x: Literal['tokens', 'iter', 'time'] = 'tokens'  # time: of training, without evaluating and saving
y = 'loss'  # 'loss' (and val_loss beside it), 'bpb', or any column of log.csv, your own ones too
to = 'curves.png'  # where the picture goes
report = False  # True: instead of one picture of all, report.md and loss.png in each run's folder
# -----------------------------------------------------------------------------
knobs, given = configure(globals(), positional='runs')
make_output_last()

if not runs:
    fail("no runs. name their folders: python plot.py out")
for run in runs:
    if not os.path.isfile(os.path.join(run, 'log.csv')):
        fail(f"no log.csv in {run}. name the folder of a run that train.py made")
try:
    if report:
        for run in runs:
            print('\n'.join(write(run)))
    else:
        logs = {name: [read_log(run) for run in folders]
                for name, folders in groups(dict.fromkeys(runs)).items()}
        draw(logs, to, x, y)
        print(*comparison(logs, y), "losses compare where text, tokenizer, block_size and eval_iters x "
              "batch_size are the same; of one text bpb with any tokenizer, eval.py's always",
              f"written: {to}", sep='\n')
except ImportError:
    fail("to draw, a package is needed that is not installed (matplotlib). pip install matplotlib")
except (ValueError, csv.Error) as e:
    fail(f"nothing to draw ({e}). --y takes a column of log.csv that has numbers")
except OSError as e:
    fail(f"cannot be written ({e.filename or to}: {e.strerror}). name another file with --to")
