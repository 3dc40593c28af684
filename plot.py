"""
Draw runs, from their log.csv, and write their reports. Needs matplotlib, no GPU.

    $ python plot.py out-quickstart                                       # curves.png
    $ python plot.py out-a out-b out-c --x=time --y=bpb --to=bpb.png      # named by the knobs in which they differ
    $ python plot.py out-quickstart --report=True                         # its report.md and loss.png
"""

import sys

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
x = 'tokens'  # 'tokens', 'iter', 'time' (of training, without evaluating and saving)
y = 'loss'  # 'loss' (and val_loss beside it), 'bpb', or any column of log.csv
to = 'curves.png'  # where the picture goes
title: str = None  # above the picture
report = False  # True: no picture of all, but report.md and loss.png in each run's folder
# -----------------------------------------------------------------------------
_words = [arg for arg in sys.argv[1:] if not arg.startswith('-') and not arg.endswith('.py')]  # the runs' folders
sys.argv[1:] = [arg for arg in sys.argv[1:] if arg not in _words]
knobs, given = configure(globals())

import os

import report as reports

problems = out_of_range(knobs, words=dict(x='tokens iter time'))
if not _words:
    problems.append("no runs. name their folders: python plot.py out")
problems += [f"no log.csv in {run}. name the folder of a run that train.py made" for run in _words if not os.path.isfile(os.path.join(run, 'log.csv'))]
if problems:
    fail(*problems)
try:
    if report:
        for run in _words:
            print(reports.write(run) or f"written: {os.path.join(run, 'report.md')} and loss.png")
    else:
        reports.draw(_words, to, x, y, title)
        print(f"written: {to}")
except ImportError:
    fail("to draw, a package is needed that is not installed (matplotlib). pip install matplotlib")
except ValueError as e:
    fail(f"nothing to draw ({e}). columns that log.csv has: {', '.join(name for name, values in reports.read_log(_words[0]).items() if any(v is not None for v in values))}")
except OSError as e:
    fail(f"cannot be written ({e.filename or to}: {e.strerror}). name another file with --to")
