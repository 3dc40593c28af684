"""The numbers of a run's log.csv: its curves, and what in them a person should not overlook."""

import contextlib
import csv
import math
import os
import re
import statistics

from support.files import read_json

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
