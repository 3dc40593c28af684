"""What the races share: running scripts, reading curves, the table's words and the pictures. A curve is [(iteration, seconds, loss)]."""

import csv
import importlib.util
import os
import subprocess
import sys
import time

import numpy as np
import torch

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import fail


def python(*args, cwd=HERE):
    """The output of a script; the race ends if it fails."""
    done = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ['it said nothing'])[-1]
        fail(f"{args[0]} ended with status {done.returncode} ({last}). the command was: python {' '.join(map(str, args))}")
    return done.stdout


def read_log(out_dir):
    """The rows of log.csv, as dicts of strings."""
    with open(os.path.join(out_dir, 'log.csv'), newline='') as f:
        return list(csv.DictReader(f))


def pace(out_dir):
    """Seconds per iteration by log.csv, without its first line."""
    rows = [row for row in read_log(out_dir) if row['seconds']]
    return (float(rows[-1]['seconds']) - float(rows[0]['seconds'])) / (int(rows[-1]['iter']) - int(rows[0]['iter']))


def reached(curve, loss):
    """Seconds at the first evaluation that shows `loss` or less."""
    return next((seconds for _, seconds, value in curve if value <= loss), None)


def at(curve, seconds):
    """The last loss before `seconds` were over, None if there was none."""
    return ([value for _, s, value in curve if s <= seconds] or [None])[-1]


def spread(values, digits=3):
    """Mean (smallest to largest)."""
    if None in values:
        return 'never' if not any(values) else f"{sum(v is not None for v in values)} of {len(values)} did"
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def machine():
    """Commit, versions and hardware, for the record."""
    from parallel import choose_dtype
    commit = subprocess.run(['git', 'describe', '--always', '--dirty'], cwd=HERE, capture_output=True, text=True).stdout.strip()
    cpu = 'CPU'
    if os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo') as f:
            cpu = next((line.split(':')[1].strip() for line in f if line.startswith('model name')), cpu)
    what = torch.cuda.get_device_name() if torch.cuda.is_available() else \
        f"{os.cpu_count()} CPUs, {cpu}, bfloat16 {'yes' if choose_dtype('auto', torch.device('cpu'))[0] == 'bfloat16' else 'no'}"
    return f"commit {commit}; torch {torch.__version__}; {what}; {time.strftime('%Y-%m-%d')}"


def draw(curves, path, title, ylabel, line=None, xlabel='seconds of training'):
    """{contestant: [curve of each seed]} as a picture, where there is matplotlib."""
    if importlib.util.find_spec('matplotlib') is None:
        return print(f"no picture ({os.path.basename(path)}), as there is no matplotlib")
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(7.5, 4.4), dpi=130)
    for color, (label, runs) in zip(('#7f8c9b', '#c23b22', '#1f6fb2', '#2f8f4e', '#a56cc1'), curves.items()):
        for i, curve in enumerate(runs):
            points = [(s, value) for _, s, value in curve if s > 0.5] or [(s, value) for _, s, value in curve]
            ax.plot(*zip(*points), color=color, linewidth=1.4, alpha=0.85, label=label if i == 0 else None)
            ax.plot(*points[-1], 'o', color=color, markersize=4)
    if line:
        ax.axhline(line, color='#999999', linewidth=0.8, linestyle=':')
        ax.annotate(f'{line}', (0, line), xytext=(4, 3), textcoords='offset points', fontsize=8, color='#666666')
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_ylim(top=np.median([c[min(len(c) - 1, 2)][2] for runs in curves.values() for c in runs]) * 1.15)
    ax.set_title(title, fontsize=11)
    ax.grid(alpha=0.25)
    ax.spines[['top', 'right']].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    fig.tight_layout()
    fig.savefig(path)
