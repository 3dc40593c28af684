"""
Draw the curves of runs from their log.csv. Needs matplotlib, no GPU.

    $ python plot.py out-quickstart                                # curves.png
    $ python plot.py out-a out-b --x=seconds --y=val_bpb --to=bpb.png

A curve is named by the folder of its run. train.py calls write_report() at its end, which makes a run's
report.md and loss.png.
"""

import math
import os
import re
import shlex

from common import (
    first_line, format_count, format_duration, print0, read_json, read_rows, replacing, write_whole)
from configurator import configure, error

# -----------------------------------------------------------------------------
runs: list = []  # folders of runs; bare words
x = 'tokens'  # 'iter'; 'seconds' of training, without evaluating and saving; or any column of log.csv
y = 'loss'  # and the validation loss beside it; 'val_bpb' or any column of log.csv
to = 'curves.png'  # where the picture goes
# -----------------------------------------------------------------------------

LABELS = {
    'iter': 'iteration',
    'seconds': 'training time (s)',
    'loss': 'loss (nats per token); dashed: validation',
    'train_loss': 'training loss (nats per token)',
    'val_loss': 'validation loss (nats per token)',
    'val_bpb': 'bits per byte (validation)',
}
# columns of log.csv that train.py itself writes; others are results of benchmarks, or your own
OWN_COLUMNS = (
    'iter', 'tokens', 'tokens_total', 'seconds', 'progress', 'epoch', 'loss', 'loss_smooth', 'perplexity',
    'lr', 'grad_norm', 'ms', 'tokens_per_second', 'mfu', 'memory_gb', 'data', 'data_wait', 'train_loss',
    'val_loss', 'train_bpb', 'val_bpb', 'bpb', 'eval_seconds', 'save_seconds', 'sample_seconds')


# -----------------------------------------------------------------------------
# numbers


def read_log(out_dir):
    """The rows of log.csv, as dicts {column: number}; what is empty or not finite is left out."""
    _, rows = read_rows(os.path.join(out_dir, 'log.csv'))
    log = []
    for row in rows:
        numbers = {}
        for name, text in row.items():
            try:
                number = float(text)
            except ValueError:
                continue
            if math.isfinite(number):
                numbers[name] = number
        log.append(numbers)
    return log


def column(log, name):
    """The numbers in a column of read_log()."""
    return [row[name] for row in log if name in row]


def median(numbers):
    return sorted(numbers)[len(numbers) // 2]


# -----------------------------------------------------------------------------
# the picture


def draw(logs, path, x='tokens', y='loss'):
    """The curves of {name: read_log()} as a PNG. ImportError without matplotlib, ValueError without a
    number."""
    from matplotlib.figure import Figure  # no pyplot: it would ask for a screen
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.2, 4.3), dpi=150, layout='constrained')
    axes = figure.subplots()
    in_view = []
    for i, (name, log) in enumerate(logs.items()):
        curves = {y: {'label': name}}
        if y == 'loss':  # the loss pale, below it its running mean
            curves = {'loss_smooth': {'label': name}, 'val_loss': {'linestyle': '--'}}
            curves['loss'] = {'alpha': 0.25} if column(log, 'loss_smooth') else {'label': name}
        for name_of_column, style in curves.items():
            rows = [row for row in log if x in row and name_of_column in row]
            if not rows:
                continue
            if len(rows) <= 40:
                style['marker'] = '.'
            heights = column(rows, name_of_column)
            axes.plot(column(rows, x), heights, color=f'C{i}', **style)
            # the fall of the first tenth would flatten all the rest
            in_view += heights[max(len(heights) > 3, len(heights) // 10):]
    if not in_view:
        raise ValueError(f"no numbers in the columns {x} and {y} of {', '.join(logs)}")
    margin = 0.05 * (max(in_view) - min(in_view)) or 0.1
    axes.set_ylim(min(in_view) - margin, max(in_view) + margin)
    axes.set_xlabel(LABELS.get(x, x))
    axes.set_ylabel(LABELS.get(y, y))
    axes.xaxis.set_major_formatter(EngFormatter(sep=''))
    axes.legend(framealpha=0.4)
    axes.grid(alpha=0.25)
    with replacing(path) as f:
        figure.savefig(f, format='png')


# -----------------------------------------------------------------------------
# report.md


def write_report(out_dir, samples=''):
    """Write report.md and, where matplotlib is there, loss.png, from a run's run.json and log.csv; samples:
    the last texts that it wrote. What cannot be written is a warning, and no reason for a run to fail."""
    try:
        log = read_log(out_dir) if os.path.exists(os.path.join(out_dir, 'log.csv')) else []
        picture = draw_loss(out_dir, log)
        report = report_text(out_dir, read_json(os.path.join(out_dir, 'run.json')), log, samples, picture)
        path = os.path.join(out_dir, 'report.md')
        write_whole(path, report.encode('utf-8', 'backslashreplace'))
        print0(f"report: {path}")
    except Exception as e:
        print0(f"warning: no report of {out_dir} could be written ({type(e).__name__}: {first_line(e)})")


def draw_loss(out_dir, log):
    """Make loss.png; returns whether it is there."""
    try:
        draw({os.path.basename(os.path.abspath(out_dir)): log}, os.path.join(out_dir, 'loss.png'))
    except ImportError:
        return False
    except Exception as e:  # the page matters more than the picture
        print0(f"warning: no loss.png ({type(e).__name__}: {first_line(e)})")
        return False
    return True


def report_text(out_dir, run, log, samples, with_picture):
    """run: what run.json holds. What it lacks is left out."""
    lines = [f"# {os.path.basename(os.path.abspath(out_dir))}", '']
    iterations = run.get('iterations')
    if iterations is None:  # it is running, or was killed
        iterations = max([int(row['iter']) + 1 for row in log if 'loss' in row], default=0)
    tokens = iterations * run.get('tokens_per_iter', 0)
    seconds = run.get('train_seconds') or max(column(log, 'seconds'), default=0)
    outcome = run.get('outcome') or 'running, or killed'
    lines += [f"**{outcome[:1].upper()}{outcome[1:]}**: {iterations:,} iterations, {format_count(tokens)} "
              f"tokens, {format_duration(seconds)} of training ({seconds / 3600:.2f} hours).", '']
    if with_picture:
        lines += ["![The loss](loss.png)", '']
    lines += ['| | |', '|---|---|']
    for name, text in facts_of(run, log):
        lines.append(f"| {name} | {text} |")
    lines.append('')
    losses = column(log, 'val_loss')
    if losses and losses[-1] > 1.02 * min(losses):
        lines += [f"The validation loss rose from {min(losses):.4f} to {losses[-1]:.4f}. If the training "
                  "loss fell meanwhile, the model overfits: more text, `--dropout` or a smaller model would "
                  "help. Else the run diverged: use a smaller learning rate or a longer warmup.", '']
    if samples:
        fence = max(['``', *re.findall('`+', samples)], key=len) + '`'  # longer than any in the text
        lines += ["## Samples", '', f"{fence}text", samples.rstrip('\n'), fence, '']
    resume = f"python train.py --init_from=resume --out_dir={shlex.quote(out_dir)}"
    if outcome == 'done':  # there is more to do only for a longer run
        resume += f" --max_iters={2 * iterations}"
    lines += ["## To go on", '', "```sh", f"python sample.py --out_dir={shlex.quote(out_dir)}", resume, "```",
              '']
    if run.get('command'):
        lines += ["It was started by", '', "```sh", f"python {run['command']}", "```", '']
    return '\n'.join(lines)


def facts_of(run, log):
    """(name, text) for the table of the report."""
    config = run.get('config', {})
    facts = []
    dataset = run.get('dataset', {})
    name = dataset.get('name') or config.get('dataset')
    if name:
        text = name
        for split in ('train', 'val'):
            if split in dataset:
                text += f", {split} {dataset[split]['tokens']:,} tokens"
        facts.append(('dataset', text))
    if run.get('tokenizer'):
        facts.append(('tokenizer', run['tokenizer']))
    if run.get('n_params'):
        shape = [str(config['arch'])] if 'arch' in config else []
        for key in ('n_layer', 'n_head', 'n_embd', 'block_size'):
            if key in config:
                shape.append(f"{key} {config[key]}")
        facts.append(('model', f"{', '.join(shape)}: {run['n_params']:,} parameters"))
    evaluated = [row for row in log if 'val_loss' in row]
    if evaluated:
        best = min(evaluated, key=lambda row: row['val_loss'])
        for title, row in (('best validation loss', best), ('last validation loss', evaluated[-1])):
            text = f"{row['val_loss']:.4f}"
            bpb = row.get('val_bpb', row.get('bpb'))
            if bpb is not None:
                text += f", {bpb:.4f} bits per byte"
            facts.append((title, f"{text}, after {row['iter']:,.0f} iterations"))
    if column(log, 'train_loss'):
        facts.append(('last training loss', f"{column(log, 'train_loss')[-1]:.4f}"))
    speeds = column(log, 'tokens_per_second')
    speed = run.get('tokens_per_second') or (median(speeds) if speeds else None)
    if speed:
        text = f"{speed:,.0f} tokens/s"
        if column(log, 'mfu'):
            text += f", MFU {100 * median(column(log, 'mfu')):.1f}%"
        facts.append(('speed', text))
    if column(log, 'memory_gb'):
        facts.append(('memory', f"{max(column(log, 'memory_gb')):.2f} GB at most"))
    if run.get('device'):
        facts.append(('device', f"{run['device']}, processes: {run.get('processes', 1)}"))
    names = dict.fromkeys(name for row in log for name in row)
    for name in names:
        if name not in OWN_COLUMNS:  # a benchmark
            facts.append((name, f"{column(log, name)[-1]:.4f}"))
    return facts


# -----------------------------------------------------------------------------
# the script


def print_runs(logs):
    """A line for each of {name: read_log()}."""
    for name, log in logs.items():
        text = f"{name}: {max(column(log, 'tokens'), default=0):,.0f} tokens"
        text += f" in {format_duration(max(column(log, 'seconds'), default=0))}"
        evaluated = [row for row in log if 'val_loss' in row]
        if evaluated:
            best = min(evaluated, key=lambda row: row['val_loss'])
            text += f", best validation loss {best['val_loss']:.4f} at iteration {best['iter']:,.0f}"
            text += f", last {evaluated[-1]['val_loss']:.4f}"
        print0(text)


if __name__ == '__main__':
    configure(globals(), positional='runs')
    if not runs:
        error("no runs to draw. name their folders: python plot.py out")
    logs = {}
    for run in runs:
        try:
            logs[run] = read_log(run)
        except (OSError, UnicodeError) as e:
            error(f"no log.csv can be read in {run} ({first_line(e)}). name the folder of a run of train.py")
    print_runs(logs)
    try:
        draw(logs, to, x, y)
    except ImportError:
        error("drawing needs a package that is not installed (matplotlib). pip install matplotlib")
    except ValueError as e:
        error(f"nothing to draw ({e}). --x and --y take a column of log.csv that has numbers")
    except OSError as e:
        error(f"{to} cannot be written ({e.strerror}). name another file with --to")
    print0(f"written: {to}")
