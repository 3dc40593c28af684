"""What a run's log.csv says: its curves, what in them a person should not overlook, pictures with matplotlib
(loss.png), and report.md, made from what is in the folder: run.json, log.csv, eval.json, samples.md."""

import collections
import contextlib
import csv
import itertools
import os
import re
import textwrap

import numpy as np

from support.console import format_duration
from support.files import read_json, replacing, write_whole

# of log.csv. docs/reading_logs.md explains them. A metric with another name gets a column of its own
COLUMNS = ('iter progress loss loss_smooth train_loss val_loss perplexity bpb hellaswag core lr grad_norm '
           'tokens tokens_total epoch ms tokens_per_second mfu data memory_gb seconds eval_seconds '
           'save_seconds sample_seconds').split()
# of them in the table of evaluations, besides columns of your own
EVALUATED = 'train_loss val_loss bpb hellaswag core'.split()
# column: (label, the best of several). Others go by their own name
METRICS = {
    'iter': ('iteration', None),
    'seconds': ('training time', None),
    'loss': ('loss of the batches (nats per token); dashed: validation', min),
    'train_loss': ('training loss', min),
    'val_loss': ('validation loss', min),
    'bpb': ('bits per byte', min),
    'hellaswag': ('HellaSwag accuracy', max),
    'core': ('CORE', max),
}
# knobs that do not tell what a run is: where and how often it writes, measures, and on what
ASIDE = set('out_dir data_dir overwrite always_save_checkpoint save_interval keep_checkpoints eval_interval '
            'tasks tasks_interval sample_interval sample_prompts sample_tokens log_interval wandb_log '
            'wandb_project wandb_run_name device backend ddp_timeout peak_flops max_minutes'.split())
NO_END = 'running, or killed'


# -----------------------------------------------------------------------------
# numbers


def read_log(out_dir):
    """log.csv as {column: array}, nan where a row has no number, or the log no such column."""
    with open(os.path.join(out_dir, 'log.csv'), newline='', encoding='utf-8', errors='replace') as f:
        rows = list(csv.DictReader(f))
    log = collections.defaultdict(lambda: np.full(len(rows), np.nan))
    for name in filter(None, rows[0] if rows else ()):
        with contextlib.suppress(ValueError):  # a column of words stays nan
            log[name] = np.array([float(row[name] or 'nan') for row in rows])
    return log


def values(log, name):
    """The numbers in a column."""
    return log[name][np.isfinite(log[name])]


def label_of(column):
    return METRICS.get(column, [column])[0]


def points(log, x, y):
    """The rows that have both, as an array of (x, y)."""
    both = np.stack((log[x], log[y]), axis=1)
    return both[np.isfinite(both).all(axis=1)]


def groups(runs):
    """{name: the folders} of runs that differ in the seed alone, named by the other knobs that were set and
    differ, by how they ended, and by edited code, or by a folder where these are none or many, or do not
    tell apart what was trained. Runs that nothing tells apart are each by themselves."""
    records = [read_json(os.path.join(run, 'run.json')) for run in runs]
    # one that was interrupted, or resumed with other knobs, is no seed of those that were not
    knobs = [{**record.get('knobs', {}), **record.get('code', {}), 'outcome': record.get('outcome') or NO_END,
              'trained': str([record.get('dataset', {}).get('splits'), record.get('changed')])}
             for record in records]
    given = {'outcome', 'trained'}.union(*([*record.get('given', ()), *record.get('code', ())]
                                           for record in records)) - ASIDE
    differ = [name for name in sorted(given) if any(k.get(name) != knobs[0].get(name) for k in knobs)]
    told = [str([k.get(name) for name in differ]) for k in knobs]
    differ, found = [name for name in differ if name not in ('seed', 'trained')], {}
    for run, k, text in zip(runs, knobs, told):
        name = ', '.join(f"{name} {k.get(name)}" for name in differ)
        # one that is there twice is by itself: it is no second seed
        found.setdefault((name, k['trained'], told.count(text) > 1 and run), []).append(run)
    named = {name: folders for (name, *_), folders in found.items()}
    return (named if 0 < len(differ) <= 3 and len(named) == len(found)
            else {folders[0]: folders for folders in found.values()})


def judged_by(logs, y):
    """The column whose best value is told of each of {name: [log, ...]}: beside the loss that of the
    validation, if one has it."""
    validated = any(len(values(log, 'val_loss')) for of_one in logs.values() for log in of_one)
    return 'val_loss' if y == 'loss' and validated else y


def best_and_last(logs, y):
    """The best and the last value of a column, as texts: of several logs the mean and the spread."""
    found, best = [values(log, y) for log in logs], METRICS.get(y, (y, None))[1]
    for choose in (best, lambda column: column[-1]):
        chosen = [choose(column) for column in found if choose and len(column)]
        spread = f" ± {np.std(chosen, ddof=1):.4f}" if len(chosen) > 1 else ''
        yield f"{np.mean(chosen):.4f}{spread}" if chosen else ''


def comparison(logs, y):
    """Lines for the console about {name: [log, ...]}."""
    length, column = max(map(len, logs)), judged_by(logs, y)
    yield f"{'':{length}}  runs  {'best ' + column:>17}  {'last':>17}  {'tokens':>15}  {'time':>8}"
    for name, of_one in logs.items():
        best, last = best_and_last(of_one, column)
        tokens, seconds = (np.mean([max(values(log, column), default=0) for log in of_one])
                           for column in ('tokens', 'seconds'))
        yield (f"{name:{length}}  {len(of_one):4}  {best:>17}  {last:>17}  {tokens:15,.0f}  "
               f"{format_duration(seconds):>8}")


# -----------------------------------------------------------------------------
# pictures


def draw(logs, path, x='tokens', y='loss', title=None):
    """The curves of {name: [log, ...]} as a PNG, a color for each name, a few values also as points. x:
    'tokens', 'iter' or 'time'; y: a column of log.csv. Raises ImportError without matplotlib, ValueError
    where there is nothing to draw."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    fig = Figure(figsize=(7.2, 4.3), dpi=150, layout='constrained')
    ax, x, in_view = fig.subplots(), 'seconds' if x == 'time' else x, []
    for i, (name, of_one) in enumerate(logs.items()):
        best, _ = best_and_last(of_one, judged_by(logs, y))
        label = name + (f", best {judged_by(logs, y)} {best}" if best else '')
        for log in of_one:
            in_view += draw_run(ax, log, x, y, label, color=f'C{i}')
            label = None
    if not in_view:
        raise ValueError(f"no {y} in {', '.join(logs)}")
    ax.dataLim.intervaly = min(in_view), max(in_view)  # what the view fits; the rest leaves it
    ax.set(title=title, xlabel=label_of(x), ylabel=label_of(y))
    ax.locator_params('x', integer=True)  # a duration is told in whole seconds
    ax.xaxis.set_major_formatter((lambda s, _: format_duration(s)) if x == 'seconds'
                                 else EngFormatter(sep=''))
    ax.legend(framealpha=0.4)  # it may lie over curves
    ax.grid(alpha=0.25)
    with replacing(path) as f:
        fig.savefig(f, format='png')


def draw_run(ax, log, x, y, label, color):
    """The curve of y; the loss pale, below its mean over the latest iterations, and dashed that of the
    validation. Returns the values that are to be in view: not those of the first tenth, as a fall there would
    flatten all the rest."""
    in_view, curves = [], [(y, dict(label=label))]
    if y == 'loss':
        curves = [(y, dict(alpha=0.25)), ('loss_smooth', dict(label=label)), ('val_loss', dict(ls='--'))]
    for name, style in curves:
        curve = points(log, x, name)
        ax.plot(*curve.T, color=color, marker='' if len(curve) > 40 else '.', **style)  # a few: as points
        in_view += list(curve[max(len(curve) > 3, len(curve) // 10):, 1])
    return in_view


# -----------------------------------------------------------------------------
# report.md


def write(out_dir):
    """Write report.md and loss.png. Returns lines for the console: where they are, and what is amiss."""
    picture, path, record, samples, evaluated = (
        os.path.join(out_dir, file) for file in 'loss.png report.md run.json samples.md eval.json'.split())
    name = os.path.basename(os.path.abspath(out_dir))
    log, run = read_log(out_dir), read_json(record)
    told, shown = f" and {picture}", "![The loss](loss.png)\n"
    try:
        draw({name: [log]}, picture, title=name)
    except Exception as e:  # the page matters more than the picture
        told, shown = f" (no loss.png: {e}. python plot.py {out_dir} --report=True tries again)", ''
    losses, notes = values(log, 'val_loss'), []
    if len(losses) and losses[-1] > 1.02 * losses.min():  # nobody should overlook it
        notes = [f"The validation loss rose from {losses.min():.4f} to {losses[-1]:.4f}. If the loss "
                 "of the batches fell meanwhile, the model overfits: more text, `--dropout` or a smaller "
                 "model would help. Else the run diverged: use a smaller learning rate or a longer warmup.\n"]
    lines = [f"# {name}\n", *summary(run, log), '', shown, *notes,
             *samples_side_by_side(samples), *eval_results(read_json(evaluated)), *settings(run),
             *evaluations(log)]  # they may be many
    write_whole(path, '\n'.join(lines).encode('utf-8', 'replace'))
    return [f"report: {path}{told}", *(f"note: {note.strip()}" for note in notes)]


def summary(run, log):
    """How it ended, and the best validation loss."""
    # the row of a last evaluation has no loss
    made = run.get('iterations', int(max(log['iter'] + np.isfinite(log['loss']), default=0)))
    tokens = made * run.get('tokens_per_iter', 0)
    seconds = run.get('seconds', max(values(log, 'seconds'), default=0))
    outcome = run.get('outcome') or NO_END
    yield (f"**{outcome[0].upper()}{outcome[1:]}**: {made:,} of {run.get('max_iters', made):,} "
           f"iterations, {tokens:,} tokens, {format_duration(seconds)} of training.")
    losses = points(log, 'iter', 'val_loss')
    if len(losses):
        it, best = losses[losses[:, 1].argmin()]
        yield f"Best validation loss **{best:.4f}** at iteration {it:,.0f}, the last {losses[-1, 1]:.4f}."


def samples_side_by_side(path):
    """The first text of the first, the middle and the last section of samples.md, as columns: how the model
    learned to write."""
    if not os.path.exists(path):
        return
    with open(path, encoding='utf-8', errors='replace') as f:
        found = re.findall(r'(?ms)^## (after [^\n]*)$.*?^`+text\n(.*?)\n`+$', f.read())
    columns = []
    for head, text in [found[i] for i in sorted({0, len(found) // 2, len(found) - 1}) if found]:
        lines = [textwrap.wrap(line, 34) or [''] for line in text.expandtabs(4).splitlines()]
        columns.append([head, *itertools.chain(*lines)])
    if columns:
        yield "## Samples\n\n```text"
        for row in itertools.zip_longest(*columns, fillvalue=''):
            yield '  '.join(f"{part:34}" for part in row).rstrip()
        yield "```\n"


def evaluations(log):
    """The table of evaluations in the loop."""
    rows = np.flatnonzero(np.isfinite(log['train_loss']) | np.isfinite(log['eval_seconds']))
    if not len(rows):
        return
    yield "## Evaluations\n"
    yield "As train.py measured them, while it trained; eval.py reads all of a text.\n"
    columns = [name for name in log
               if np.isfinite(log[name][rows]).any() and (name in EVALUATED or name not in COLUMNS)]
    names = ['iter', 'tokens', *columns, 'seconds']
    yield f"| {' | '.join(map(label_of, names))} |\n|{'---:|' * len(names)}"
    for i in rows:
        made = [f"{log[name][i]:,.0f}" for name in ('iter', 'tokens')]
        measured = ['' if np.isnan(log[name][i]) else f"{log[name][i]:,.4f}" for name in columns]
        yield f"| {' | '.join([*made, *measured, format_duration(log['seconds'][i])])} |"
    yield ''


def eval_results(found):
    """What eval.py measured: the numbers of eval.json."""
    if results := {**found.get('texts', {}), **found.get('tasks', {})}:
        yield f"## By eval.py, after {found['iter']:,} iterations\n"
    for name, result in results.items():
        numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
        yield f"- {name}: {', '.join(f'{key} {round(value, 4):,}' for key, value in numbers.items())}"
    if 'core' in found:
        yield f"- CORE: {found['core']:.4f}"
    yield ''


def settings(run):
    """The plan, and each start with its command."""
    yield from ["## Settings\n", "```text", *run.get('plan', []), "```\n\n```sh"]
    for s in run.get('sessions', []):
        yield f"# {s['started']}, from iteration {s['from_iter']:,}: {s['outcome'] or NO_END}"
        yield s['command']
    yield "```\n"
