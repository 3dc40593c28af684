"""What a run's log.csv says: its curves, what in them a person should not overlook, pictures with matplotlib
(loss.png), and report.md, made from what is in the folder: run.json, log.csv, eval.json, samples.md."""

import collections
import csv
import os

import numpy as np

from support.console import format_duration
from support.files import read_json, replacing, write_whole

# columns of an iteration, made with its update; all others but `iter` belong to an evaluation if they have
# numbers only where there was one
OF_ITERATIONS = ('progress', 'loss', 'loss_smooth', 'lr', 'grad_norm', 'tokens', 'tokens_total', 'epoch',
                 'ms', 'tokens_per_second', 'mfu', 'data', 'memory_gb', 'seconds')
# column: (label, the best of several). Others go by their own name
METRICS = {
    'iter': ('iteration', None),
    'seconds': ('training time', None),
    'loss': ('loss (nats per token); dashed: validation', min),
    'train_loss': ('training loss', min),
    'val_loss': ('validation loss', min),
    'bpb': ('bits per byte', min),
    'hellaswag': ('HellaSwag accuracy', max),
    'core': ('CORE', max),
}
NO_END = 'running, or killed'


# -----------------------------------------------------------------------------
# numbers


def read_log(out_dir):
    """log.csv as {column: array}, nan where a row has no number, or the log no such column."""
    with open(os.path.join(out_dir, 'log.csv'), newline='', encoding='utf-8', errors='replace') as f:
        rows = list(csv.DictReader(f))
    log = collections.defaultdict(lambda: np.full(len(rows), np.nan))
    for name in filter(None, rows[0] if rows else ()):
        log[name] = np.array([float(row[name] or 'nan') for row in rows])
    return log


def values(log, name):
    """The numbers in a column."""
    return log[name][np.isfinite(log[name])]


def label_of(column):
    return METRICS.get(column, (column, None))[0]


def is_evaluation(log, name):
    """Whether a column is measured now and then, instead of at each logged iteration."""
    between = np.isnan(log['train_loss']) & np.isnan(log['eval_seconds'])
    return name != 'iter' and name not in OF_ITERATIONS and np.isnan(log[name][between]).all()


def points(log, x, y):
    """The rows that have both, as an array of (x, y)."""
    both = np.stack((log[x], log[y]), axis=1)
    return both[np.isfinite(both).all(axis=1)]


def smooth(curve):
    """A running mean over a thirtieth of the curve to either side."""
    near = np.ones(2 * (len(curve) // 30) + 1)
    return np.convolve(curve, near, 'same') / np.convolve(np.ones(len(curve)), near, 'same')


def remark(log):
    """What a person should not overlook: whether the run diverged or overfits. A dataset without
    validation is judged by its training loss."""
    word = 'validation' if len(values(log, 'val_loss')) else 'training'
    train = points(log, 'iter', 'train_loss')
    evaluations = points(log, 'iter', 'val_loss') if word == 'validation' else train
    if not len(evaluations):
        return None
    at = evaluations[:, 1].argmin()
    (it, best), (end, latest) = evaluations[at], evaluations[-1]
    text = f"The {word} loss rose from {best:.4f} at iteration {it:,.0f} to {latest:.4f} at {end:,.0f}"
    train = dict(train)
    if it in train and end in train and train[end] >= train[it]:
        # it does not even know the text that it was trained on
        if latest > 1.05 * best:
            return f"{text}: the run diverged. Use a smaller learning rate or a longer warmup."
    elif latest > 1.01 * best and at < len(evaluations) - 2:
        return (f"{text}: the model overfits. The best weights are in ckpt_best.pt; more text, `--dropout` "
                "or a smaller model would help.")


def best_and_last(log, y):
    """The best and the last value of a column, as texts; of the loss, the validation's."""
    found = values(log, 'val_loss' if y == 'loss' and len(values(log, 'val_loss')) else y)
    if not len(found):
        return '', ''
    best = METRICS.get(y, (y, None))[1]
    return f"{best(found):.4f}" if best else '', f"{found[-1]:.4f}"


def comparison(logs, y):
    """Lines for the console about {name: log}."""
    length = max(map(len, logs))
    yield f"{'':{length}}  {'best ' + y:>13}  {'last':>8}  {'tokens':>15}  {'time':>8}"
    for name, log in logs.items():
        best, last = best_and_last(log, y)
        tokens, seconds = (max(values(log, column), default=0) for column in ('tokens', 'seconds'))
        yield f"{name:{length}}  {best:>13}  {last:>8}  {tokens:15,.0f}  {format_duration(seconds):>8}"


# -----------------------------------------------------------------------------
# pictures


def draw(logs, path, x='tokens', y='loss', title=None):
    """The curves of {name: log} as a PNG: each logged value pale, a running mean over it, evaluations
    as points. x: 'tokens', 'iter' or 'time'; y: a column of log.csv. Raises ImportError without matplotlib,
    ValueError where there is nothing to draw."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    fig = Figure(figsize=(7.2, 4.3), dpi=150, layout='constrained')
    ax, x, shown = fig.subplots(), 'seconds' if x == 'time' else x, []
    for i, (name, log) in enumerate(logs.items()):
        best, _ = best_and_last(log, y)
        shown += draw_run(ax, log, x, y, name + (f", {best} at best" if best else ''), f'C{i}')
    if not shown:
        raise ValueError(f"no {y} in {', '.join(logs)}")
    margin = 0.12 * (max(shown) - min(shown)) or 1
    ax.set(title=title, xlabel=label_of(x), ylabel=label_of(y))
    ax.set_ylim(min(shown) - margin, max(shown) + margin)
    as_time = x == 'seconds'
    ax.xaxis.set_major_formatter((lambda s, _: format_duration(s)) if as_time else EngFormatter(sep=''))
    ax.legend(frameon=False, fontsize=9)
    ax.grid(alpha=0.25)
    with replacing(path) as f:
        fig.savefig(f, format='png')


def draw_run(ax, log, x, y, label, color):
    """A line, and points for evaluations. Returns the values that must be in sight: not those of the
    beginning, whose fall would flatten all the rest."""
    shown = []
    if y == 'loss':
        marks = points(log, x, 'val_loss')
        ax.plot(*marks.T, 'o--', color=color, markersize=3)
        shown += late(marks[:, 1])
    xs, ys = points(log, x, y).T
    if is_evaluation(log, y):
        ax.plot(xs, ys, 'o-', color=color, markersize=3, label=label)
    else:
        ax.plot(xs, ys, color=color, alpha=0.25)
        ys = smooth(ys)
        ax.plot(xs, ys, color=color, label=label)
    return shown + late(ys)


def late(curve):
    """All of it but the first tenth, at least one value of more than three."""
    return curve[max(len(curve) > 3, len(curve) // 10):].tolist()


# -----------------------------------------------------------------------------
# report.md


def write(out_dir):
    """Write report.md and loss.png. Returns lines for the console: where they are, and what is amiss."""
    picture, path = os.path.join(out_dir, 'loss.png'), os.path.join(out_dir, 'report.md')
    name = os.path.basename(os.path.abspath(out_dir))
    log, run = read_log(out_dir), read_json(os.path.join(out_dir, 'run.json'))
    told, shown = f" and {picture}", "![The loss](loss.png)\n"
    try:
        draw({name: log}, picture, title=name)
    except Exception as e:  # the page matters more than the picture
        told, shown = f" (no loss.png: {e}. then python plot.py {out_dir} --report=True)", ''
    lines = [f"# {name}\n", *summary(run, log), '', shown]
    if note := remark(log):
        lines += [note, '']
    lines += [*latest_samples(os.path.join(out_dir, 'samples.md')),
              *evaluations(log),
              *eval_results(read_json(os.path.join(out_dir, 'eval.json'))), *settings(run, log)]
    write_whole(path, '\n'.join(lines).encode('utf-8', 'replace'))
    return [f"report: {path}{told}", *([f"note: {note}"] if note else [])]


def summary(run, log):
    """How it ended, and the best validation loss."""
    made = run.get('iterations', int(max(log['iter'] + np.isfinite(log['loss']), default=0)))
    tokens = made * run.get('tokens_per_iter', 0)
    seconds = run.get('seconds', max(values(log, 'seconds'), default=0))
    outcome = run.get('outcome') or NO_END
    yield (f"**{outcome[0].upper()}{outcome[1:]}** after {made:,} of {run.get('max_iters', made):,} "
           f"iterations, {tokens:,} tokens, {format_duration(seconds)} of training.")
    losses = points(log, 'iter', 'val_loss')
    if len(losses):
        it, best = losses[losses[:, 1].argmin()]
        yield (f"Best validation loss **{best:.4f}** at iteration {it:,.0f}; the last one was "
               f"{losses[-1, 1]:.4f}.")


def latest_samples(path):
    """The last section of samples.md."""
    if os.path.exists(path):
        with open(path, encoding='utf-8', errors='replace') as f:
            _, head, section = f.read().rpartition('\n## after ')
        yield f"## Samples, after {section}" if head else ''


def evaluations(log):
    """The evaluations in the loop."""
    yield "## Evaluations\n"
    yield "Over windows spread evenly over each text (`eval_iters`); eval.py reads all of it.\n"
    for name in list(log):
        if is_evaluation(log, name) and name != 'perplexity' and not name.endswith('_seconds'):
            best, last = best_and_last(log, name)
            if last:
                yield f"- {label_of(name)}: {last} at the end" + (f", {best} at best" if best else '')
    yield ''


def eval_results(found):
    """What eval.py measured: the numbers of eval.json."""
    results = {**found.get('texts', {}), **found.get('tasks', {})}
    if results:
        yield f"## By eval.py, after {found['iter']:,} iterations\n"
    for name, result in results.items():
        numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
        yield f"- {name}: {', '.join(f'{key} {round(value, 4):,}' for key, value in numbers.items())}"
    if 'core' in found:
        yield f"- CORE: {found['core']:.4f}"
    yield ''


def settings(run, log):
    """The plan, speed and time, and each start with its command."""
    yield from ["## Settings\n", "```text", *run.get('plan', [])]
    if len(values(log, 'memory_gb')):
        yield (f"speed     {np.median(values(log, 'tokens_per_second')):,.0f} tokens/s in the median, "
               f"{values(log, 'memory_gb')[-1]:.2f} GB of memory at most")
    training, evaluating, saving, sampling = (
        format_duration(max(values(log, name), default=0))
        for name in ('seconds', 'eval_seconds', 'save_seconds', 'sample_seconds'))
    yield (f"time      {training} training, {evaluating} evaluating, {saving} saving, {sampling} sampling\n"
           "```\n\n```sh")
    for s in run.get('sessions', []):
        yield f"# {s['started']}, from iteration {s['from_iter']:,}: {s['outcome'] or NO_END}"
        yield s['command']
    yield "```"
