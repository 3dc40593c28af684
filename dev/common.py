"""What the measurements share: running our scripts, tokens to train on, and words for a table."""

import json
import multiprocessing
import os
import pickle
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)


def flags_of(settings):
    """{'n_layer': 4} as ['--n_layer=4']."""
    return [f'--{name}={value}' for name, value in settings.items()]


def run_script(script, *flags, cwd=REPO, launcher=(), fork=False):
    """The output of a script in the folder `cwd`; if it fails, this one ends with its last line. fork: run
    it in a copy of this process, which saves the seconds of importing torch."""
    words = [script, *map(str, flags)]
    with tempfile.TemporaryFile('w+') as out, tempfile.TemporaryFile('w+') as err:
        if fork:
            import torch._dynamo  # every optimizer imports it, for two seconds: here once
            sys.stdout.flush()
            args = words, cwd, out.fileno(), err.fileno()
            process = multiprocessing.get_context('fork').Process(target=run_forked, args=args)
            process.start()
            process.join()
            status = process.exitcode
        else:
            command = [sys.executable, *launcher, *words]
            status = subprocess.run(command, cwd=cwd, stdout=out, stderr=err).returncode
        out.seek(0)
        err.seek(0)
        if status:
            last = (err.read().strip().splitlines() or ['it printed no error'])[-1]
            command = ' '.join(words)
            raise SystemExit(f'error: a script ended with status {status} ({last}). it was: {command}')
        return out.read()


def run_forked(words, cwd, out, err):
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))  # the folder's own files: it may be another checkout
    sys.modules['matplotlib'] = None  # no picture of a run that nobody looks at
    sys.argv = words
    runpy.run_path(words[0], run_name='__main__')


class Enough(Exception):
    """Raised in a script to end it."""


def after_each_update(function, script, *flags):
    """Run a script of ours in this process, and function(n) after its n-th update, counted from 1, until
    that returns True. So a training step can be looked into without a copy of it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook
    n = 0

    def hook(*_):
        nonlocal n
        n += 1
        if function(n):
            raise Enough
    handle, argv = register_optimizer_step_post_hook(hook), sys.argv
    sys.argv = [os.path.join(REPO, script), *flags]
    try:
        runpy.run_path(sys.argv[0], run_name='__main__')
    except Enough:
        pass
    finally:
        handle.remove()
        sys.argv = argv


def make_tokens(data_dir, vocab_size, n=2**22):
    """Write a dataset of n made-up tokens that we and nanoGPT can read; returns its name. It is a walk over
    the vocabulary whose next step is one of four, so no loss stays below ln 4 = 1.386."""
    name = f'made_up_{vocab_size}'
    folder = os.path.join(data_dir, name)
    os.makedirs(folder, exist_ok=True)
    steps = np.random.default_rng(1).integers(4, size=n)
    dtype = 'uint16' if vocab_size <= 2**16 else 'uint32'  # nanoGPT reads the first alone
    ids = (steps.cumsum() % vocab_size).astype(np.dtype(dtype).newbyteorder('<'))
    for split in ('train', 'val'):
        ids.tofile(os.path.join(folder, f'{split}.bin'))
    meta = {'tokenizer': {'kind': 'byte'}, 'vocab_size': vocab_size, 'end_of_text': None, 'dtype': dtype}
    with open(os.path.join(folder, 'meta.json'), 'w') as f:
        json.dump({**meta, 'splits': {}}, f)
    with open(os.path.join(folder, 'meta.pkl'), 'wb') as f:
        pickle.dump({'vocab_size': vocab_size}, f)
    return name


def check_peer(folder, knob='peer', project='nanoGPT'):
    """The problem with the path of a checkout, in a list; [] if there is none."""
    if folder is None or os.path.isfile(os.path.join(folder, 'train.py')):
        return []
    return [f"no train.py in this folder ({folder}). name a checkout of {project} with --{knob}=PATH"]


def median_and_range(values, digits=0):
    low, high = min(values), max(values)
    return f"{statistics.median(values):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def table(*rows):
    """The rows, the first of which is the head, as lines of Markdown."""
    lines = ['| ' + ' | '.join(str(cell) for cell in row) + ' |' for row in rows]
    return [lines[0], '|---' * len(rows[0]) + '|', *lines[1:]]


def draw_curves(curves, path, title, ylabel, line=None, xlabel='seconds of training'):
    """{contestant: [curve of each seed]} as the picture `path`, where there is matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return print(f'no {path}: matplotlib is not installed')
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(7.5, 4.4), dpi=130)
    colors = '#7f8c9b', '#c23b22', '#1f6fb2', '#2f8f4e', '#a56cc1', '#c98a1b'
    for color, (label, runs) in zip(colors, curves.items()):
        for curve in runs:
            xs, ys = [s for _, s, _ in curve], [loss for _, _, loss in curve]
            ax.plot(xs, ys, color=color, linewidth=1.4, alpha=0.85, label=label)
            ax.plot(xs[-1], ys[-1], 'o', color=color, markersize=4)
            label = None  # once per contestant
    if line:
        ax.axhline(line, color='#999999', linewidth=0.8, linestyle=':')
        ax.annotate(f'{line}', (0, line), xytext=(4, 3), textcoords='offset points', fontsize=8)
    # without the steep beginning, which would flatten all the rest
    ax.set_ylim(top=1.15 * np.median([curve[:3][-1][2] for runs in curves.values() for curve in runs]))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, fontsize=11)
    ax.grid(alpha=0.25)
    ax.spines[['top', 'right']].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    fig.tight_layout()
    fig.savefig(path)
    plt.close(fig)


def write_record(path, lines):
    """Write the lines of a record, and print them."""
    with open(path, 'w') as f:
        f.write('\n'.join(lines) + '\n')
    print('\n'.join(lines), flush=True)


def given_flags(args):
    """Command-line arguments as a record shows them: quoted for a shell, paths of this machine left out."""
    shown = [arg.split('=')[0] + '=...' if os.path.sep in arg else arg for arg in args]
    return ' '.join(map(shlex.quote, shown))


def machine():
    """Commit, versions and hardware, for the record."""
    from support.devices import choose_dtype  # not above: a forked run of another checkout imports its own
    try:
        git = ['git', 'describe', '--always', '--dirty']
        commit = subprocess.run(git, cwd=REPO, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # a note where there is no git: see dev/gpu_records.py
        note = os.path.join(REPO, 'out-carried', 'commit')
        commit = open(note).read().strip() if os.path.exists(note) else 'unknown'
    if torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
    else:
        name = 'CPU'
        if os.path.exists('/proc/cpuinfo'):
            with open('/proc/cpuinfo') as f:
                names = [line.split(':')[1].strip() for line in f if line.startswith('model name')]
            name = (names or [name])[0]
        dtype, _ = choose_dtype('auto', torch.device('cpu'))
        hardware = f"{os.cpu_count()} CPUs, {name}, {dtype}"
    return f"commit {commit}; torch {torch.__version__}; {hardware}; {time.strftime('%Y-%m-%d')}"
