"""
Draw the curves of runs from their log.csv. Needs matplotlib, no GPU.

    $ python plot.py out-quickstart                                # curves.png
    $ python plot.py out-a out-b --x=seconds --y=val_bpb --to=bpb.png

A curve is named by the folder of its run as it was given. train.py calls write_report() at its end, which
makes a run's report.md and loss.png.
"""

import contextlib
import math
import os

from configurator import InputError, configure, print0

from files import (
    first_line, format_count, format_duration, read_json, read_rows, replacing, run_flags, write_whole)

# -----------------------------------------------------------------------------
runs: list = []  # folders of runs; bare words
x = 'tokens'  # 'iter'; 'seconds' of training, without evaluating and saving; or any column of log.csv
y = 'loss'  # and the validation loss beside it, dashed; 'val_bpb' or any column of log.csv
to = 'curves.png'  # where the picture goes
# -----------------------------------------------------------------------------


def read_log(out_dir):
    """The rows of log.csv, as dicts {column: number}; what is empty or not finite is left out."""
    log = []
    for row in read_rows(os.path.join(out_dir, 'log.csv'))[1]:
        numbers = {}
        for name, text in row.items():
            with contextlib.suppress(ValueError):  # empty, or a text
                numbers[name] = float(text)
        log.append({name: number for name, number in numbers.items() if math.isfinite(number)})
    return log


def draw(logs, path, x='tokens', y='loss'):
    """The curves of {name: read_log()} as a PNG. ImportError without matplotlib, ValueError without a
    number."""
    from matplotlib.figure import Figure  # no pyplot: it would ask for a screen

    figure = Figure(figsize=(7.2, 4.3), dpi=150, layout='constrained')
    axes = figure.subplots()
    curves = {y: '-'}
    if y == 'loss':
        curves['val_loss'] = '--'
    for i, (name, log) in enumerate(logs.items()):
        for column, style in curves.items():
            rows = [row for row in log if x in row and column in row]
            if column == y and not rows:
                raise InputError(f"{name} has no numbers in the columns {x} and {y} of its log.csv")
            axes.plot([row[x] for row in rows], [row[column] for row in rows], style, color=f'C{i}',
                      marker='.', markersize=3, label=name if column == y else None)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend()
    axes.grid(alpha=0.25)
    with replacing(path) as f:
        figure.savefig(f, format='png')


def write_report(out_dir, samples=''):
    """Write report.md and, where matplotlib is there, loss.png, from a run's run.json and log.csv; samples:
    the last texts that it wrote. What cannot be written is a warning, and no reason for a run to fail."""
    try:
        log = read_log(out_dir)
        try:
            draw({os.path.basename(os.path.abspath(out_dir)): log}, os.path.join(out_dir, 'loss.png'))
        except Exception as e:  # the page matters more than the picture
            print0(f"note: no loss.png ({first_line(e)})")
        text = report_text(out_dir, read_json(os.path.join(out_dir, 'run.json')), log, samples)
        path = os.path.join(out_dir, 'report.md')
        write_whole(path, text.encode('utf-8', 'backslashreplace'))
        print0(f"report: {path}")
    except Exception as e:
        print0(f"warning: no report of {out_dir} could be written ({type(e).__name__}: {first_line(e)})")


def report_text(out_dir, run, log, samples):
    """run: what run.json holds."""
    config = run['config']
    dataset = run['dataset']
    tokens = run['iterations'] * run['tokens_per_iter']
    lines = [
        f"# {os.path.basename(os.path.abspath(out_dir))}",
        "",
        f"{run['outcome']}: {run['iterations']:,} iterations, {format_count(tokens)} tokens, "
        f"{format_duration(run['train_seconds'])} of training",
        "",
        f"- dataset: {dataset['name']}, {dataset['train']['tokens']:,} tokens; tokenizer: {run['tokenizer']}",
        f"- model: {config['arch']}, n_layer {config['n_layer']}, n_head {config['n_head']}, "
        f"n_embd {config['n_embd']}, block_size {config['block_size']}: {run['n_params']:,} parameters",
        f"- device: {run['device']}, processes: {run['processes']}",
    ]
    if run.get('tokens_per_second'):
        lines.append(f"- speed: {run['tokens_per_second']:,.0f} tokens/s")
    mfu = [row['mfu'] for row in log if 'mfu' in row]
    if mfu:
        lines.append(f"- MFU: {100 * sorted(mfu)[len(mfu) // 2]:.1f}%, the median")
    memory = [row['memory_gb'] for row in log if 'memory_gb' in row]
    if memory:
        lines.append(f"- memory: {max(memory):.2f} GB at most")
    for name in config['tasks'].split(','):
        task = name.strip()
        scores = [row[task] for row in log if task in row]
        if scores:
            lines.append(f"- {task}: {scores[-1]:.4f}")
    evaluated = [row for row in log if 'val_loss' in row]
    if evaluated:
        best = min(evaluated, key=lambda row: row['val_loss'])
        last = evaluated[-1]
        for name, row in (('best', best), ('last', last)):
            bpb = f", {row['val_bpb']:.4f} bits per byte" if 'val_bpb' in row else ''
            lines.append(f"- {name} validation loss: {row['val_loss']:.4f}{bpb}, at {row['iter']:,.0f}")
        if last['val_loss'] > 1.02 * best['val_loss']:
            lines += ["", "The validation loss rose. If the training loss fell meanwhile, the model "
                      "overfits: more text, `--dropout` or a smaller model would help. Else it diverged: "
                      "use a smaller learning rate or a longer warmup."]
    if os.path.exists(os.path.join(out_dir, 'loss.png')):
        lines += ["", "![The loss](loss.png)"]
    flags = run_flags(out_dir, config['data_dir'])
    lines += ["", "To go on, or for longer with a larger `--max_iters`:", "",
              f"    python train.py --init_from=resume {flags}",
              f"    python sample.py {flags}",
              "", "It was started by", "", f"    python {run['starts'][0]['command']}"]
    if samples:  # indented, as Markdown shows such lines as they are
        lines += ["", "The last samples:", ""]
        lines += ['    ' + line for line in samples.split('\n')]
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    configure(globals(), positional='runs')
    if not runs:
        raise InputError("no runs to draw. name their folders: python plot.py out")
    try:
        draw({run: read_log(run) for run in runs}, to, x, y)
    except ImportError:
        raise InputError("drawing needs a package that is not installed (matplotlib). pip install matplotlib")
    except (OSError, ValueError) as e:
        raise InputError(f"nothing is drawn ({first_line(e)}). name folders of runs; --x and --y take a column of "
              "log.csv, --to a file")
    print0(f"written: {to}")
