"""What a run's log.csv says: its curves, what in them a person should not overlook, pictures with matplotlib
(loss.png), and report.md, made from what is in the folder: run.json, log.csv, eval.json, samples.md."""

import contextlib
import csv
import math
import os
import re
import statistics

from support.console import format_duration
from support.files import read_json, write_whole

ROWS = 12  # of the table of evaluations, at most
NO_END = 'killed, or still running'

# -----------------------------------------------------------------------------
# numbers

# columns of an iteration, made with its update; all others but `iter` can belong to an evaluation before it
OF_ITERATIONS = ('progress', 'loss', 'loss_smooth', 'lr', 'grad_norm', 'tokens', 'tokens_total', 'epoch',
                 'ms', 'tokens_per_second', 'mfu', 'data', 'memory_gb', 'seconds')
# knobs that do not tell what a run is
ASIDE = {'out_dir', 'data_dir', 'wandb_run_name', 'init_from', 'resume_from', 'overwrite', 'max_minutes',
         'device', 'backend', 'ddp_timeout'}


def read_log(out_dir):
    """log.csv as {column: [number or None]}, with `tokens` and `seconds` in all rows. A row that has both an
    evaluation and iteration N becomes two: the evaluation came first, when N iterations were made. A row
    without a loss is an evaluation's alone."""
    with open(os.path.join(out_dir, 'log.csv'), newline='', encoding='utf-8', errors='replace') as f:
        found = [row for row in rows_of(f) if re.fullmatch('[0-9]{1,15}', row.get('iter') or '')]
    columns = [name for name in found[0] if name] if found else []
    found = [{name: number(row[name]) for name in columns} for row in found]
    for row in found:
        for name in {'tokens', 'seconds'} & row.keys():
            row[name] = row[name] if math.isfinite(row[name] or 0) else None
    evaluated = evaluation_columns(found, columns)
    rows = []
    for row in found:
        before = {name: row[name] for name in evaluated if row[name] is not None}
        if row.get('loss') is None:
            rows.append(row)
            continue
        after = {name: row[name] for name in columns if name not in before}
        if before:
            rows.append({'iter': row['iter'], **before})
        if not before or any(value is not None for name, value in after.items() if name != 'iter'):
            rows.append(after)
    for name in ('tokens', 'seconds'):
        if name in columns:
            fill(rows, name)
    return {name: [row.get(name) for row in rows] for name in columns}


def rows_of(file):
    """The rows of an open csv file, up to one that is damaged."""
    with contextlib.suppress(csv.Error):
        yield from csv.DictReader(file)


def number(text):
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def evaluation_columns(rows, columns):
    """Columns of evaluations: they have values only in rows that contain an evaluation."""
    markers = [name for name in ('eval_seconds', 'train_loss', 'val_loss') if name in columns]
    between = [row for row in rows if all(row[name] is None for name in markers)]
    return [name for name in columns if name != 'iter' and name not in OF_ITERATIONS
            and all(row[name] is None for row in between)]


def fill(rows, name):
    """Give rows without `name` (tokens, seconds) its value after `iter` iterations: on the line between the
    iterations around it, or on the last such line where no iteration follows."""
    known = [(0, 0.0)]
    for row in rows:
        if row.get(name) is not None:  # an iteration's is that of its end
            known.append((row['iter'] + (row.get('loss') is not None), row[name]))
    i = 1
    for row in rows:
        if row.get(name) is not None:
            continue
        while i < len(known) - 1 and known[i][0] < row['iter']:
            i += 1
        if row['iter'] == 0:
            row[name] = 0.0
        elif len(known) > 1:
            (x0, y0), (x1, y1) = known[i - 1], known[i]
            row[name] = y0 + (row['iter'] - x0) * (y1 - y0) / max(1, x1 - x0)


def points(log, x, y):
    """[(x, y)] of the rows that have both."""
    pairs = zip(log.get(x, []), log.get(y, []))
    return [(a, b) for a, b in pairs if a is not None and b is not None and math.isfinite(b)]


def values(log, name):
    """The numbers in a column."""
    return [value for value in log.get(name, []) if value is not None]


def is_evaluation(log, name):
    """Whether a column of read_log's is measured now and then, instead of at each logged iteration."""
    rows = zip(log.get('loss', []), log.get(name, []))
    return all(value is None for loss, value in rows if loss is not None)


def smooth(curve):
    """A running mean over a thirtieth of the curve to either side, at least three values; fewer near its
    ends, where it may be steep. A short curve stays as it is."""
    if len(curve) <= 60:
        return list(curve)
    width, sums = max(3, len(curve) // 30), [0.0]
    for value in curve:
        sums.append(sums[-1] + value)
    means = []
    for i in range(len(curve)):
        start, end = i - min(width, i), min(i + min(width, i), len(curve) - 1) + 1
        means.append((sums[end] - sums[start]) / (end - start))
    return means


def spikes(log):
    """[(iteration, loss before, loss, gradient norm)] where the loss is far above its twenty values
    before."""
    found, recent = [], []
    rows = zip(log.get('iter', []), log.get('loss', []), log.get('grad_norm', []))
    rows = [row for row in rows if row[1] is not None]
    last = None  # where the latest spike was seen
    for i, (it, loss, norm) in enumerate(rows):
        if len(recent) == 20:
            median = statistics.median(recent)
            deviation = statistics.median(abs(value - median) for value in recent)
            if not math.isfinite(loss) or loss - median > max(0.25, 12 * deviation):
                if last is None or i > last + 3:  # else it belongs to the same spike
                    found.append((int(it), median, loss, norm))
                last = i
                continue  # it does not count as usual
        recent = [*recent[-19:], loss]
    return found


def remarks(log):
    """What a person should not overlook, as sentences."""
    return [*remarks_on_spikes(log), *remarks_on_validation(log), *remarks_on_waiting(log)]


def remarks_on_spikes(log):
    out = []
    for it, before, loss, norm in spikes(log):
        gradient = '' if norm is None else f" (gradient norm {norm:.2f})"
        out.append(f"The loss leapt from about {before:.3f} to {loss:.3f} at iteration {it:,}{gradient}.")
    if len(out) > 5:
        out[5:] = [f"There are {len(out) - 5} more such leaps."]
    if out:
        out.append("If leaps come often, or the loss does not come back at once, use a smaller learning "
                   "rate, a longer warmup or a smaller `grad_clip`.")
    return out


def remarks_on_validation(log):
    """Whether the run diverged or overfits. A dataset without validation is judged by its training loss."""
    name, word = 'val_loss', 'validation'
    if not points(log, 'iter', name):
        name, word = 'train_loss', 'training'
    evaluations = points(log, 'iter', name)
    if not evaluations:
        return []
    it, best = min(evaluations, key=lambda point: point[1])
    end, last = evaluations[-1]
    text = f"The {word} loss rose from {best:.4f} at iteration {it:,.0f} to {last:.4f} at {end:,.0f}"
    train = dict(points(log, 'iter', 'train_loss'))
    if it in train and end in train:
        if name == 'val_loss':
            text += f", while the training loss went from {train[it]:.4f} to {train[end]:.4f}"
        if train[end] >= train[it]:  # it does not even know the text that it was trained on
            diverged = f"{text}: the run diverged. Use a smaller learning rate or a longer warmup."
            return [diverged] if last > 1.05 * best else []
    if name == 'val_loss' and last > 1.01 * best and len([i for i, _ in evaluations if i > it]) >= 2:
        return [f"{text}: the model overfits. The best weights are in ckpt_best.pt; more text, `--dropout` "
                "or a smaller model would help."]
    return []


def remarks_on_waiting(log):
    percent = statistics.median(values(log, 'data') or [0])
    if percent <= 10:
        return []
    return [f"{percent:.0f}% of the time was spent waiting for data: the disk is slow, or the model small."]


def difference(runs):
    """A name for each run: the knobs in which they differ, or its folder's name where that does not help."""
    knobs = [read_json(os.path.join(run, 'run.json')).get('knobs') for run in runs]
    folders = [os.path.basename(os.path.abspath(run)) for run in runs]
    if len(runs) == 1 or not all(each and isinstance(each, dict) for each in knobs):
        return folders
    every = {name for each in knobs for name in each} - ASIDE
    differ = sorted(name for name in every if any(each.get(name) != knobs[0].get(name) for each in knobs))
    names = [', '.join(f"{name} {each.get(name)}" for name in differ) for each in knobs]
    useful = len(set(names)) == len(runs) and max(map(len, names)) <= 60
    return names if useful else folders


# -----------------------------------------------------------------------------
# pictures

# column of log.csv: (label (unit), whether higher is better; None: neither is). Others go by their own name
METRICS = {
    'iter': ('iterations', None),
    'tokens': ('tokens', None),
    'seconds': ('training time (seconds)', None),
    'loss': ('loss (nats per token)', False),
    'train_loss': ('training loss (nats per token)', False),
    'val_loss': ('validation loss (nats per token)', False),
    'perplexity': ('perplexity (validation)', False),
    'bpb': ('bits per byte (validation)', False),
    'hellaswag': ('HellaSwag accuracy', True),
    'core': ('CORE', True),
    'lr': ('learning rate', None),
    'grad_norm': ('gradient norm', None),
    'ms': ('milliseconds per iteration', None),
    'tokens_per_second': ('tokens per second', None),
    'mfu': ('MFU (%)', None),
    'data': ('time spent waiting for data (%)', None),
    'memory_gb': ('memory (GB)', None),
}
COLORS = ('#2b5c8a', '#c2572b', '#3f7f4f', '#7a4a93', '#b8860b', '#4d4d4d', '#1f8a8a', '#a83e5b')
STYLE = {'font.size': 10, 'axes.edgecolor': '#888888', 'axes.labelcolor': '#222222',
         'xtick.color': '#444444', 'ytick.color': '#444444'}
SOME = 4000  # points of a line: more points than pixels only cost memory


def draw(runs, path, x='tokens', y='loss', title=None, lr=False):
    """The curves of `runs` (folders) as a PNG: each logged value pale, a running mean over it, evaluations as
    points. x: 'tokens', 'iter' or 'time'; y: a column of log.csv; lr: with the learning rate below. Raises
    ImportError without matplotlib, ValueError where there is nothing to draw."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    logs, column = [read_log(run) for run in runs], 'seconds' if x == 'time' else x
    unit, x_label = x_axis(max([a for log in logs for a in values(log, column)], default=1), x)
    curves = [curves_of(log, column, y, unit) for log in logs]
    if not any(line or marks for line, marks in curves):
        raise ValueError(f"no {y} in {', '.join(runs)}")

    with rc_context(STYLE):
        fig = Figure(figsize=(7.2, 4.9 if lr else 4.3), dpi=150, layout='constrained')
        heights = [5, 1] if lr else [1]
        axes = fig.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        if len(runs) == 1:
            draw_one(axes[0], *curves[0], y)
        else:
            draw_many(axes[0], curves, difference(runs), y)
        limit(axes[0], curves)
        axes[0].set_ylabel(label_of(y))
        axes[0].legend(frameon=False, fontsize=9)
        if title:
            axes[0].set_title(title, fontsize=11, loc='left')
        if lr:
            draw_lr(axes[1], [(a / unit, b) for a, b in points(logs[0], column, 'lr')])
        finish(axes, x_label, thousands=unit == 1 and x != 'time')
        fig.savefig(path + '.tmp', format='png')
    os.replace(path + '.tmp', path)


def label_of(column):
    return METRICS.get(column, (column,))[0]


def x_axis(top, x):
    """(what to divide x by, the label): minutes, millions, ..., as values up to `top` need."""
    if x == 'time':
        for seconds, word in ((3600, 'hours'), (60, 'minutes')):
            if top >= 3 * seconds:
                return seconds, f'{word} of training'
        return 1, 'seconds of training'
    for size, word in ((1e12, 'trillions'), (1e9, 'billions'), (1e6, 'millions')):
        if top >= size:
            return size, f'{label_of(x)} ({word})'
    return 1, label_of(x)


def curves_of(log, x, y, unit):
    """(points of a line, points to mark): those of y, and the validation loss beside the loss."""
    found = [(a / unit, b) for a, b in points(log, x, y)]
    if y == 'loss':
        return found, [(a / unit, b) for a, b in points(log, x, 'val_loss')]
    return ([], found) if is_evaluation(log, y) else (found, [])


def best_of(marks, y):
    """The best of the marked points, or None where nobody knows what is better."""
    higher_is_better = METRICS.get(y, (y, None))[1]
    if not marks or higher_is_better is None:
        return None
    return (max if higher_is_better else min)(marks, key=lambda point: point[1])


def draw_one(ax, line, marks, y):
    """The curve of a single run, its best evaluation with its value."""
    color = COLORS[1] if line else COLORS[0]
    if line:
        draw_line(ax, line, COLORS[0], 'training batches, smoothed' if y == 'loss' else label_of(y))
    if marks:
        draw_marks(ax, marks, color, '-', 'validation' if y == 'loss' else label_of(y))
    best = best_of(marks, y)
    if best:
        side = 'right' if best[0] > 0.8 * ax.get_xlim()[1] else 'center'
        box = dict(facecolor='white', edgecolor='none', alpha=0.75, pad=0.8)
        ax.annotate(f'{best[1]:.4f}', best, textcoords='offset points', xytext=(0, -13), ha=side,
                    fontsize=9, color=color, zorder=4, bbox=box)


def draw_many(ax, curves, names, y):
    """A color for each run; the legend tells the best evaluation."""
    for i, ((line, marks), name) in enumerate(zip(curves, names)):
        color, best = COLORS[i % len(COLORS)], best_of(marks, y)
        if best:
            name = f'{name}: {best[1]:.4f}'
        if line:
            draw_line(ax, line, color, name)
        if marks:
            draw_marks(ax, marks, color, '--' if line else '-', None if line else name)
    if y == 'loss' and any(marks for line, marks in curves):
        draw_marks(ax, [], '#666666', '--', 'validation (the numbers: its best)')


def draw_line(ax, line, color, label):
    some = slice(None, None, 1 + len(line) // SOME)
    xs, ys = zip(*line)
    ax.plot(xs[some], ys[some], color=color, alpha=0.25, linewidth=0.8, zorder=1)
    ax.plot(xs[some], smooth(ys)[some], color=color, linewidth=1.6, zorder=2, label=label)


def draw_marks(ax, marks, color, style, label):
    xs, ys = [a for a, _ in marks], [b for _, b in marks]
    size = 3.5 if len(marks) < 60 else 2
    ax.plot(xs, ys, color=color, linewidth=1.2, linestyle=style, marker='o', markersize=size, zorder=3,
            label=label)


def draw_lr(ax, line):
    from matplotlib.ticker import MaxNLocator
    line = line[::1 + len(line) // SOME] or [(0, 0)]
    ax.plot(*zip(*line), color='#777777', linewidth=1.4)
    ax.set_ylabel('lr')
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(2))
    ax.ticklabel_format(axis='y', style='sci', scilimits=(-2, 3))


def limit(ax, curves):
    """Show all of y but what only the first twentieth of a curve has: its fall would flatten all the rest."""
    shown = []
    for line, marks in curves:
        if line:
            ys = smooth([b for _, b in line])
            shown += [b for (a, _), b in zip(line, ys) if a >= 0.05 * line[-1][0] or len(line) <= 60]
        shown += [b for a, b in marks if a >= 0.05 * marks[-1][0] or len(marks) <= 3]
    low, high = min(shown), max(shown)
    margin = 0.12 * (high - low) or 0.1 * abs(high) or 1
    ax.set_ylim(low - 1.6 * margin, high + margin)


def finish(axes, x_label, thousands):
    """Grid, margins and the x axis, with thousands separators for large plain numbers."""
    for ax in axes:
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.spines[['top', 'right']].set_visible(False)
        ax.margins(x=0.01)
    axes[-1].set_xlabel(x_label)
    if thousands:
        axes[-1].xaxis.set_major_formatter('{x:,.0f}')


# -----------------------------------------------------------------------------
# report.md


def write(out_dir):
    """Write report.md and loss.png. Returns lines for the console: where they are, and what is amiss."""
    picture = os.path.join(out_dir, 'loss.png')
    told = f" and {picture}"
    try:
        draw([out_dir], picture, title=os.path.basename(os.path.abspath(out_dir)), lr=True)
    except ImportError:
        told = (" (no loss.png, as matplotlib is not installed: pip install matplotlib, then python plot.py "
                f"{out_dir} --report=True)")
    except Exception as e:  # the page matters more than the picture
        told = f" (no loss.png: {e})"
    log = read_log(out_dir)
    lines = page(out_dir, log, picture=told == f" and {picture}")
    path = os.path.join(out_dir, 'report.md')
    write_whole(path, '\n'.join(lines).encode('utf-8', 'replace'))
    return [f"report: {path}{told}", *(f"note: {remark}" for remark in remarks_on_validation(log))]


def page(out_dir, log, picture):
    """The lines of report.md; each section ends with an empty one."""
    run = read_json(os.path.join(out_dir, 'run.json'))
    seconds = run.get('seconds', last(log, 'seconds') or 0)
    yield from [f"# {os.path.basename(os.path.abspath(out_dir))}", '']
    yield from section('run.json or log.csv', summary, run, log, seconds)
    if picture:
        yield from ["![The loss](loss.png)", '']
    notes = remarks(log)
    if notes:
        yield from ["## Remarks", '', *(f"- {note}" for note in notes), '']
    yield from latest_samples(os.path.join(out_dir, 'samples.md'))
    yield from evaluations(log)
    yield from section('eval.json', eval_results, read_json(os.path.join(out_dir, 'eval.json')))
    yield from section('run.json', settings, run, log, seconds)
    yield from section('run.json', sessions, run.get('sessions', []))


def section(file, function, *args):
    """The lines of function(*args), or one that says that `file` is no help."""
    try:
        return list(function(*args))
    except Exception as e:  # a file may say anything
        return [f"(This part is missing, as {file} cannot be understood: {type(e).__name__}.)", '']


def last(log, name):
    """The last number in a column, or None."""
    return (values(log, name) or [None])[-1]


def summary(run, log, seconds):
    """How it ended, and the best validation loss."""
    made = int(max([last(log, 'iter') or 0] + [it + 1 for it, _ in points(log, 'iter', 'loss')]))
    made = run.get('iterations', made)
    tokens = made * run['tokens_per_iter'] if 'tokens_per_iter' in run else int(last(log, 'tokens') or 0)
    outcome = run.get('outcome') or NO_END
    of = f" of {run['max_iters']:,}" if run.get('max_iters') else ''
    yield (f"**{outcome[0].upper()}{outcome[1:]}** after {made:,}{of} iterations, {tokens:,} tokens, "
           f"{format_duration(seconds)} of training.")

    losses = points(log, 'iter', 'val_loss')
    if losses:
        it, best = min(losses, key=lambda point: point[1])
        bpb = dict(points(log, 'iter', 'bpb')).get(it)
        bits = f", {bpb:.4f} bits per byte" if bpb else ''
        if losses[-1][0] != it:
            end = f"; the last one was {losses[-1][1]:.4f}."
        elif it > 0:
            end = ", the last one."
        else:
            end = ", before any training; there was no later evaluation."
        yield (f"Best validation loss **{best:.4f}** (perplexity {math.exp(min(best, 700)):.2f}{bits}) at "
               f"iteration {it:,.0f}{end}")
    yield ''


def settings(run, log, seconds):
    """The plan, speed and time, machine, code and data."""
    yield from ["## Settings", '', "| | |", "|---|---|"]
    for line in run.get('plan') or []:
        yield f"| {line[:10].strip()} | {line[10:].replace('|', ' ')} |"
    speeds = values(log, 'tokens_per_second')
    if speeds:
        speed = f"{statistics.median(speeds):,.0f} tokens/s in the median"
        if values(log, 'mfu'):
            speed += f", MFU {statistics.median(values(log, 'mfu')):.1f}%"
        if last(log, 'memory_gb'):
            speed += f", {last(log, 'memory_gb'):.2f} GB of memory at most"
        yield f"| speed | {speed} |"
    time = f"{format_duration(seconds)} training"
    for name, word in (('eval', 'evaluating'), ('save', 'saving'), ('sample', 'sampling')):
        spent = last(log, f'{name}_seconds')
        if spent:
            time += f", {format_duration(spent)} {word}"
    yield f"| time | {time} |"
    if run.get('sessions'):
        s = run['sessions'][-1]
        yield (f"| machine | {s.get('machine')}, {s.get('system')}, {s.get('cpus')} CPUs, Python "
               f"{s.get('python')}, torch {s.get('torch')} |")
        changed = ', with changes' if s.get('changed_since') else ''
        yield f"| code | commit {(s.get('commit') or 'unknown')[:12]}{changed} |"
    for split, part in (run.get('dataset') or {}).get('splits', {}).items():
        sha256 = (part.get('sha256') or 'unknown')[:16]
        yield f"| {split}.bin | {part.get('tokens', 0):,} tokens, sha256 {sha256} |"
    yield ''


def sessions(all_sessions):
    """When the run was started and resumed, with the commands."""
    if not all_sessions:
        return
    yield from ["| started | from iteration | ended | how |", "|---|---|---|---|"]
    for s in all_sessions:
        outcome = s.get('outcome') or NO_END
        yield f"| {s.get('started')} | {s.get('from_iter', 0):,} | {s.get('ended', '')} | {outcome} |"
    commands = dict.fromkeys(s.get('command', '') for s in all_sessions)  # each one once
    yield from ['', "```sh", *commands, "```", '']


def evaluations(log):
    """The table of evaluations in the loop, thinned if it is long."""
    columns = [name for name in log if values(log, name) and is_evaluation(log, name)
               and name != 'perplexity' and not name.endswith('_seconds')]
    rows = [i for i in range(len(log.get('iter', []))) if any(log[name][i] is not None for name in columns)]
    if not rows:
        return
    yield from ["## Evaluations", '']
    if len(rows) > ROWS:
        yield from [f"{ROWS} of {len(rows):,}; all of them are in log.csv.", '']
        rows = [rows[round(k * (len(rows) - 1) / (ROWS - 1))] for k in range(ROWS)]
    names = [name for name in ('iter', 'tokens', *columns, 'seconds') if values(log, name)]
    heads = {'iter': 'iteration', 'seconds': 'training time'}
    yield table_row(heads.get(name) or label_of(name).split(' (')[0] for name in names)
    yield '|' + '---:|' * len(names)
    yield from (table_row(cell(name, log[name][i]) for name in names) for i in rows)
    yield ''


def table_row(cells):
    return f"| {' | '.join(cells)} |"


def cell(name, value):
    if value is None:
        return ''
    if name == 'seconds':
        return format_duration(value)
    return f"{value:,.0f}" if name in ('iter', 'tokens') else f"{value:,.4f}"


def eval_results(found):
    """What eval.py measured."""
    if not found.get('texts') and not found.get('tasks'):
        return
    yield from [f"## By eval.py, after {found.get('iter', 0):,} iterations", '']
    for name, r in found.get('texts', {}).items():
        bits = f", {r['bpb']:.4f} ± {r['bpb_error'] or 0:.4f} bits per byte" if r['bpb'] else ''
        yield (f"- {name}: loss {r['loss']:.4f} ± {r['loss_error'] or 0:.4f}, perplexity "
               f"{r['perplexity']:.2f}{bits} over {r['tokens']:,} tokens")
    if found.get('tasks'):
        yield from ['', "| task | shots | examples | accuracy | chance |", "|---|---:|---:|---:|---:|"]
    for name, r in found.get('tasks', {}).items():
        truncated = f" ({r['truncated']:,} truncated)" if r.get('truncated') else ''
        accuracy = f"{100 * r['accuracy']:.2f} ± {100 * r['error']:.2f} %"
        examples = f"{r['questions']:,}{truncated}"
        yield table_row([name, str(r['shots']), examples, accuracy, f"{100 * r['chance']:.1f} %"])
    if found.get('core') is not None:
        yield from ['', f"CORE {found['core']:.4f}"]
    yield ''


def latest_samples(path):
    """The last section of samples.md."""
    if os.path.exists(path):
        with open(path, encoding='utf-8', errors='replace') as f:
            sections = re.split(r'(?m)^## (?=after [\d,]+ iterations$)', f.read())
        if sections[-1].strip():
            yield f"## Samples, {sections[-1]}"
