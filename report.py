"""
What a run leaves to be looked at: run.json (what was asked for, on what, how it ended), report.md and loss.png, made of what lies
in its folder and nothing else. train.py calls this at its start and end; plot.py makes the report again any time.

    report.Run('out', ...)       run.json, at the start; .end(...) completes it and writes the report
    report.write('out')          report.md and loss.png, from run.json, log.csv, eval.json and samples.md
    report.draw(['a', 'b'], 'curves.png', x='tokens', y='loss')
"""

import csv
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

from configurator import warn
from dataset import write_whole

FILES = ('run.json', 'report.md', 'loss.png', 'samples.md', 'eval.json')  # what a new run in the folder removes


class Stopwatch(dict):
    """Seconds spent on this and that: `with spent('eval'): ...` adds to spent['eval']."""

    @contextmanager
    def __call__(self, what):
        t0 = time.perf_counter()
        try:
            yield
        finally:
            self[what] = self.get(what, 0.0) + time.perf_counter() - t0


def write_json(path, value):
    """Whole or not at all; a number that is not finite, which JSON lacks, becomes null."""
    plain = lambda v: ({str(k): plain(x) for k, x in v.items()} if isinstance(v, dict) else [plain(x) for x in v] if isinstance(v, (list, tuple)) else
                       v if not isinstance(v, float) or math.isfinite(v) else None)
    write_whole(path, json.dumps(plain(value), indent=1, ensure_ascii=False).encode())


def read_json(path):
    """{} where there is none, or none that can be read."""
    try:
        with open(path, encoding='utf-8') as f:
            value = json.load(f)
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError):
        return {}


class Run:
    """run.json. What follows from the knobs is `facts`; each start and each resume is a session of its own."""

    def __init__(self, out_dir, knobs, facts, going_on, iter_num, enabled=True):
        self.out_dir, self.path = out_dir, os.path.join(out_dir, 'run.json') if enabled else None
        if enabled:
            packages = {name: version(name) for name in ('torch', 'numpy', 'tiktoken', 'tokenizers', 'wandb') if name in sys.modules}
            session = {'started': now(), 'from_iter': iter_num, 'command': shlex.join([os.path.basename(sys.executable), *sys.argv]), 'machine': platform.node(),
                       'system': platform.platform(), 'cpus': os.cpu_count(), 'python': platform.python_version(), **packages, **commit(), 'outcome': None}
            before = read_json(self.path).get('sessions', []) if going_on else []
            self.content = {**facts, 'knobs': knobs, 'outcome': None, 'sessions': [*before, session]}
            self.write()

    def end(self, outcome, with_report, **figures):
        """`outcome`: done, stopped by ..., gave up: ...; `figures`: what came out."""
        if not self.path:
            return
        self.content.update(outcome=outcome, **figures)
        self.content['sessions'][-1].update(outcome=outcome, ended=now(), to_iter=figures.get('iterations'))
        self.write()
        if with_report:
            try:
                note = write(self.out_dir)
                print(f"report: {os.path.join(self.out_dir, 'report.md')}" + (f" ({note})" if note else ''), flush=True)
            except Exception as e:  # a picture is no reason to end otherwise than the run did
                warn(f"no report ({type(e).__name__}: {e}). python plot.py {self.out_dir} --report=True makes it")

    def write(self):
        try:
            write_json(self.path, self.content)
        except OSError as e:  # a full disk must not end a run
            warn(f"{self.path} could not be written ({e.strerror}), the run goes on")


def now():
    return time.strftime('%Y-%m-%d %H:%M:%S %z')


def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # used from its source tree
        return getattr(sys.modules[name], '__version__', None)


def commit():
    """The commit of the code, and whether anything in it was changed since."""
    git = lambda *args: subprocess.run(['git', '-C', os.path.dirname(os.path.abspath(__file__)), *args], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    try:
        return {'commit': git('rev-parse', 'HEAD'), 'changed_since': git('status', '--porcelain', '--untracked-files=no') != ''}
    except (OSError, subprocess.SubprocessError):
        return {'commit': None}


# -----------------------------------------------------------------------------
# reading


def read_log(out_dir):
    """log.csv as {column: [number or None]}."""
    with open(os.path.join(out_dir, 'log.csv'), newline='', encoding='utf-8') as f:
        rows = [row for row in csv.DictReader(f) if (row.get('iter') or '').isdigit()]
    columns = rows[0].keys() if rows else []

    def number(text):
        try:
            return float(text)
        except (TypeError, ValueError):
            return None
    log = {name: [number(row[name]) for row in rows] for name in columns if name}
    # a row with an evaluation alone tells neither tokens nor time: those of the iterations made by then
    for name in ('tokens', 'seconds'):
        last, each = (0, 0.0), 0.0
        for i, (it, value) in enumerate(zip(log.get('iter', []), log.get(name, []))):
            if value is None:
                log[name][i] = last[1] + (it - last[0]) * each
            else:
                each = (value - last[1]) / max(1, it + 1 - last[0])
                last = it + 1, value
    return log


def points(log, x, y):
    """[(x, y)] of the rows that have both."""
    return [(a, b) for a, b in zip(log.get(x, []), log.get(y, [])) if a is not None and b is not None and math.isfinite(b)]


def smooth(values):
    """A running mean over a thirtieth of the curve to either side, three values at least; narrower at its steep beginning."""
    half, sums = max(3, len(values) // 30) if len(values) > 60 else 0, [0.0]  # a short curve is best as it is
    for value in values:
        sums.append(sums[-1] + value)
    windows = [(i - min(half, i), min(i + min(half, i), len(values) - 1) + 1) for i in range(len(values))]
    return [(sums[b] - sums[a]) / (b - a) for a, b in windows]


def spikes(log):
    """[(iteration, loss before, loss, gradient norm)] where the loss leaps out of what it did in the twenty rows before."""
    found, recent = [], []
    for row, (it, loss, norm) in enumerate(zip(log.get('iter', []), log.get('loss', []), log.get('grad_norm', []))):
        if loss is None:
            continue
        if len(recent) == 20:
            middle = statistics.median(recent)
            usual = statistics.median(abs(value - middle) for value in recent)
            if not math.isfinite(loss) or loss - middle > max(0.25, 12 * usual):
                found.append((row, (int(it), middle, loss, norm)))
                continue  # it is not what is usual; the next one may belong to the same spike
        recent = [*recent[-19:], loss]
    return [spike for i, (row, spike) in enumerate(found) if i == 0 or row > found[i - 1][0] + 3]


def remarks(log):
    """What in a log a person should not overlook, a sentence each."""
    out = [f"The loss leapt from about {before:.3f} to {loss:.3f} at iteration {it:,}" + (f" (gradient norm {norm:.2f})" if norm is not None else '') + "."
           for it, before, loss, norm in spikes(log)]
    out = out[:5] + ([f"There are {len(out) - 5} more such leaps."] if len(out) > 5 else [])
    if out:
        out.append("Leaps that come often, or do not heal at once, call for smaller rates, a longer warm-up or a smaller `grad_clip`.")
    val = points(log, 'iter', 'val_loss')
    if val:
        best = min(val, key=lambda point: point[1])
        after = [loss for it, loss in val if it > best[0]]
        if len(after) >= 2 and after[-1] > 1.01 * best[1]:
            train = dict(points(log, 'iter', 'train_loss'))
            fell = f", while that of the training text went from {train[best[0]]:.3f} to {train[val[-1][0]]:.3f}" if best[0] in train and val[-1][0] in train else ''
            out.append(f"The validation loss rose from {best[1]:.4f} at iteration {best[0]:,.0f} to {after[-1]:.4f}{fell}: it learns the text by heart. "
                       "The best weights are in ckpt_best.pt; more text, `--dropout` or a smaller model would help.")
    waits = [percent for percent in log.get('data', []) if percent is not None]
    if waits and (percent := statistics.median(waits)) > 10:
        out.append(f"{percent:.0f}% of the time went into waiting for data: the disk is slow, or the model small.")
    return out


def difference(runs):
    """A name for each run: the knobs in which they differ, or the folder's name where that says nothing."""
    knobs = [read_json(os.path.join(run, 'run.json')).get('knobs', {}) for run in runs]
    aside = {'out_dir', 'data_dir', 'wandb_run_name', 'init_from', 'overwrite', 'resume_from', 'max_minutes', 'device', 'backend', 'ddp_timeout'}
    differ = [name for name in knobs[0] if name not in aside and any(k.get(name) != knobs[0][name] for k in knobs)] if all(knobs) else []
    names = [', '.join(f"{name} {k.get(name)}" for name in differ) for k in knobs]
    folders = [os.path.basename(os.path.abspath(run)) for run in runs]
    return folders if len(runs) == 1 or len(set(names)) < len(runs) or max(map(len, names)) > 60 else names


# -----------------------------------------------------------------------------
# drawing

UNITS = {'iter': 'iterations', 'tokens': 'tokens', 'loss': 'loss (nats per token)', 'val_loss': 'validation loss (nats per token)', 'bpb': 'bits per byte (validation)',
         'perplexity': 'perplexity (validation)', 'grad_norm': 'gradient norm', 'lr': 'learning rate', 'tokens_per_second': 'tokens per second',
         'hellaswag': 'HellaSwag accuracy', 'core': 'CORE', 'memory_gb': 'memory (GB)', 'mfu': 'MFU (%)', 'ms': 'milliseconds per iteration'}
COLORS = ('#2b5c8a', '#c2572b', '#3f7f4f', '#7a4a93', '#b8860b', '#4d4d4d', '#1f8a8a', '#a83e5b')  # apart in print and for most eyes


def axis(values, name):
    """(what to divide the x values by, the axis's label): thousands, millions, minutes, ..."""
    top = max(values, default=1)
    if name == 'time':
        return next(((size, f'{unit} of training') for size, unit in ((3600, 'hours'), (60, 'minutes')) if top >= 3 * size), (1, 'seconds of training'))
    return next(((size, f'{UNITS[name]} ({unit})') for size, unit in ((1e12, 'trillions'), (1e9, 'billions'), (1e6, 'millions')) if top >= size), (1, UNITS[name]))


def draw(runs, path, x='tokens', y='loss', title=None, rate=False):
    """The curves of `runs` (folders) as a PNG: each logged value pale, a running mean over it, evaluations as points. With `rate`
    a strip with the learning rate below. Raises ImportError without matplotlib, ValueError where there is nothing to draw."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    logs, names, column = [read_log(run) for run in runs], difference(runs), 'seconds' if x == 'time' else x
    with plt.rc_context({'font.size': 10, 'axes.edgecolor': '#888888', 'axes.labelcolor': '#222222', 'xtick.color': '#444444', 'ytick.color': '#444444'}):
        fig, axes = plt.subplots(2 if rate else 1, figsize=(7.2, 4.9 if rate else 4.3), dpi=150, sharex=True, squeeze=False, layout='constrained',
                                 height_ratios=[5, 1] if rate else [1])
        ax = axes[0][0]
        scale, label = axis([a for log in logs for a in log.get(column, []) if a is not None], x)
        visible, ends, empty = [], [], True
        for log, name, color in zip(logs, names, COLORS * (1 + len(runs) // len(COLORS))):
            raw = points(log, column, y)
            marked = points(log, column, 'val_loss') if y == 'loss' else raw if y in ('val_loss', 'bpb', 'perplexity', 'hellaswag', 'core') else []
            raw = [] if marked is raw else raw
            empty = empty and not raw and not marked
            best = (max if y in ('hellaswag', 'core') else min)(marked, key=lambda point: point[1]) if marked else None
            single, name = len(runs) == 1, name if best is None else f'{name}: {best[1]:.4g}'
            if raw:
                some = slice(None, None, 1 + len(raw) // 4000)  # more points than pixels only cost memory
                xs, ys = [a / scale for a, _ in raw][some], smooth([b for _, b in raw])[some]
                ax.plot(xs, [b for _, b in raw][some], color=color, alpha=0.25, linewidth=0.8, zorder=1)
                ax.plot(xs, ys, color=color, linewidth=1.6, zorder=2, label=('training batches, smoothed' if y == 'loss' else UNITS.get(y, y)) if single else name)
                visible += [b for a, b in zip(xs, ys) if a >= 0.05 * xs[-1] or len(raw) <= 60]
            if marked:
                xs, ys = [a / scale for a, _ in marked], [b for _, b in marked]
                marker = '#c2572b' if single and raw else color
                ax.plot(xs, ys, color=marker, linewidth=1.2, linestyle='-' if single or not raw else '--', marker='o', markersize=3.5 if len(xs) < 60 else 2, zorder=3,
                        label='validation' if single else None if raw else name)
                visible += [b for a, b in marked if a >= 0.05 * marked[-1][0] or len(marked) <= 3]
                if single:
                    ends.append((best[0] / scale, best[1], marker))
        if empty:
            plt.close(fig)
            raise ValueError(f"no {y} in {', '.join(runs)}")
        for a, b, color in ends:
            ax.annotate(f'{b:.4g}', (a, b), textcoords='offset points', xytext=(0, -13), ha='right' if a > 0.8 * ax.get_xlim()[1] else 'center', fontsize=9, color=color,
                        bbox=dict(facecolor='white', edgecolor='none', alpha=0.75, pad=0.8), zorder=4)
        low, high = min(visible), max(visible)  # without the first twentieth, which would flatten all the rest
        margin = 0.12 * (high - low) or 0.1 * abs(high) or 1
        ax.set_ylim(low - 1.6 * margin, high + margin)
        if not single and y == 'loss' and any(points(log, 'iter', 'val_loss') for log in logs):
            ax.plot([], [], color='#666666', linestyle='--', marker='o', markersize=3.5, linewidth=1.2, label='validation (the numbers: its best)')
        ax.set_ylabel(UNITS.get(y, y))
        ax.legend(frameon=False, fontsize=9)
        if title:
            ax.set_title(title, fontsize=11, loc='left')
        if rate:
            strip = axes[1][0]
            rates = points(logs[0], column, 'lr') or [(0, 0)]
            strip.plot(*zip(*[(a / scale, b) for a, b in rates[::1 + len(rates) // 4000]]), color='#777777', linewidth=1.4)
            strip.set_ylabel('rate')
            strip.set_ylim(bottom=0)
            strip.yaxis.set_major_locator(MaxNLocator(2))
            strip.ticklabel_format(axis='y', style='sci', scilimits=(-2, 3))
        for each in axes[:, 0]:
            each.grid(alpha=0.25, linewidth=0.6)
            each.spines[['top', 'right']].set_visible(False)
            each.margins(x=0.01)
        axes[-1][0].set_xlabel(label)
        if scale == 1 and x != 'time':
            axes[-1][0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:,.0f}'))
        fig.savefig(path + '.tmp', format='png')
        plt.close(fig)
    os.replace(path + '.tmp', path)


# -----------------------------------------------------------------------------
# writing


def duration(seconds):
    seconds = round(seconds)
    return f"{seconds // 3600:.0f}h{seconds % 3600 // 60:02.0f}m" if seconds >= 3600 else f"{seconds // 60:.0f}m{seconds % 60:02.0f}s"


def write(out_dir):
    """report.md and loss.png of the run in out_dir, from what lies there. Returns a note if there is no picture, else None."""
    run, log, note = read_json(os.path.join(out_dir, 'run.json')), read_log(out_dir), None
    try:
        draw([out_dir], os.path.join(out_dir, 'loss.png'), title=os.path.basename(os.path.abspath(out_dir)), rate=True)
    except ImportError:
        note = "no loss.png, as matplotlib is not installed: pip install matplotlib, then python plot.py " + f"{out_dir} --report=True"
    except Exception as e:  # the page matters more than the picture
        note = f"no loss.png: {e}"
    write_whole(os.path.join(out_dir, 'report.md'), '\n'.join(page(out_dir, run, log, picture=note is None)).encode())
    return note


def page(out_dir, run, log, picture):
    """The lines of report.md."""
    sessions = run.get('sessions') or [{}]
    seen = lambda name: [value for value in log.get(name, []) if value is not None]
    last = lambda name: (seen(name) or [None])[-1]
    yield f"# {os.path.basename(os.path.abspath(out_dir))}\n"
    made, planned = run.get('iterations', int(max([last('iter') or 0] + [it + 1 for it, _ in points(log, 'iter', 'loss')]))), run.get('max_iters')
    tokens, seconds = made * run['tokens_per_iter'] if 'tokens_per_iter' in run else int(last('tokens') or 0), run.get('seconds', last('seconds') or 0)
    outcome = run.get('outcome') or 'killed, or still running'
    yield f"**{outcome[0].upper() + outcome[1:]}** after {made:,}" + (f" of {planned:,}" if planned else '') + f" iterations, {tokens:,} tokens, {duration(seconds)} of training."
    val = points(log, 'iter', 'val_loss')
    if val:
        it, best = min(val, key=lambda point: point[1])
        bits = dict(points(log, 'iter', 'bpb')).get(it)
        yield f"Best validation loss **{best:.4f}** (perplexity {math.exp(min(best, 700)):.2f}" + (f", {bits:.4f} bits per byte" if bits else '') + f") at iteration {it:,.0f}" + (
            f"; the last one was {val[-1][1]:.4f}." if val[-1][0] != it else ", the last one." if it else "; it was not evaluated since it began.")
    yield ''
    if picture:
        yield "![The loss](loss.png)\n"
    notes = remarks(log)
    if notes:
        yield "## To look at\n"
        yield from (f"- {note}" for note in notes)
        yield ''
    yield "## What it was\n\n| | |\n|---|---|"
    if run.get('plan'):
        yield from (f"| {line[:10].strip()} | {line[10:].replace('|', ' ')} |" for line in run['plan'])
    speeds = seen('tokens_per_second')
    if speeds:
        yield f"| speed | {statistics.median(speeds):,.0f} tokens/s in the median" + (f", MFU {statistics.median(seen('mfu')):.1f}%" if seen('mfu') else '') + (
            f", {last('memory_gb'):.2f} GB of memory at most" if last('memory_gb') else '') + " |"
    spent = {word: last(f'{name}_seconds') for name, word in (('eval', 'evaluating'), ('save', 'saving'), ('sample', 'sampling'))}
    yield f"| time | {duration(last('seconds') or 0)} training" + ''.join(f", {duration(seconds)} {word}" for word, seconds in spent.items() if seconds) + " |"
    s = sessions[-1]
    if s:
        yield f"| machine | {s.get('machine')}, {s.get('system')}, {s.get('cpus')} CPUs, Python {s.get('python')}, torch {s.get('torch')} |"
        yield f"| code | commit {(s.get('commit') or 'unknown')[:12]}{', with changes' if s.get('changed_since') else ''} |"
    if run.get('dataset'):
        yield from (f"| {split}.bin | {part.get('tokens', 0):,} tokens, sha256 {(part.get('sha256') or 'unknown')[:16]} |" for split, part in run['dataset'].get('splits', {}).items())
    yield ''
    yield "| started | from iteration | ended | how |\n|---|---|---|---|"
    yield from (f"| {s.get('started')} | {s.get('from_iter', 0):,} | {s.get('ended', '')} | {s.get('outcome') or 'killed, or still running'} |" for s in sessions if s)
    yield f"\n```sh\n{sessions[-1].get('command', '')}\n```\n" if s else ''
    tests = [name for name in ('hellaswag', 'core') if seen(name)]
    evaluated = [i for i in range(len(log.get('iter', []))) if any(log.get(name, [None] * (i + 1))[i] is not None for name in ('val_loss', 'train_loss', *tests))]
    if evaluated:
        chosen = [evaluated[round(k * (len(evaluated) - 1) / 11)] for k in range(12)] if len(evaluated) > 12 else evaluated
        names = [name for name in ('iter', 'tokens', 'train_loss', 'val_loss', 'bpb', *tests, 'seconds') if seen(name)]
        heads = {'iter': 'iteration', 'train_loss': 'training loss', 'val_loss': 'validation loss', 'bpb': 'bits per byte', 'seconds': 'training time'}
        show = lambda name, value: '' if value is None else duration(value) if name == 'seconds' else f'{value:,.0f}' if name in ('iter', 'tokens') else f'{value:.4f}'
        yield "## Evaluations\n"
        yield '| ' + ' | '.join(heads.get(name, name) for name in names) + ' |'
        yield '|' + '---:|' * len(names)
        yield from ('| ' + ' | '.join(show(name, log[name][i]) for name in names) + ' |' for i in dict.fromkeys(chosen))
        yield ''
    found = read_json(os.path.join(out_dir, 'eval.json'))
    if found.get('texts') or found.get('tasks'):
        yield f"## By eval.py, after {found.get('iter', 0):,} iterations\n"
        for name, r in found.get('texts', {}).items():
            yield f"- {name}: loss {r['loss']:.4f} ± {r['loss_error'] or 0:.4f}, perplexity {r['perplexity']:.2f}" + (f", {r['bpb']:.4f} ± {r['bpb_error'] or 0:.4f} bits per byte" if r['bpb'] else '') + f" over {r['tokens']:,} tokens"
        if found.get('tasks'):
            yield "\n| task | examples | questions | accuracy | chance |\n|---|---:|---:|---:|---:|"
            cut = lambda r: f" ({r['truncated']:,} cut short)" if r.get('truncated') else ''
            yield from (f"| {name} | {r['shots']} | {r['questions']:,}{cut(r)} | {100 * r['accuracy']:.2f} ± {100 * r['error']:.2f} % | {100 * r['chance']:.1f} % |" for name, r in found['tasks'].items())
        yield f"\nCORE {found['core']:.4f}" if found.get('core') is not None else ''
        yield ''
    try:
        with open(os.path.join(out_dir, 'samples.md'), encoding='utf-8') as f:
            latest = re.split(r'(?m)^## (?=after [\d,]+ iterations$)', f.read())[-1]
        yield f"## Samples, {latest}" if latest.strip() else ''
    except OSError:
        pass
