"""
Draw the curves of runs, compare runs, and write the report of a run.

    $ python plot.py out-quickstart                                # curves.png
    $ python plot.py out-a out-b --x=seconds --y=val_bpb --to=bpb.png

Is an edit better? Train with several seeds before and after it, and compare (docs/comparing.md):

    $ for s in 1 2 3; do python train.py config/quickstart.py --seed=$s --out_dir=out-a$s; done
    $ for s in 1 2 3; do python train.py config/quickstart.py --seed=$s --out_dir=out-b$s; done  # edited
    $ python plot.py --compare out-a1 out-a2 out-a3 --versus out-b1 out-b2 out-b3
    $ python plot.py --compare out-a1 out-b1 --noise=0.012 --to=compare.png  # one run each; a picture

Pictures need matplotlib. train.py calls write_report(), which writes report.md and loss.png into the folder
of the run.
"""

import math
import os
import sys
import textwrap

from configurator import InputError, configure, print0
from flatgpt.files import (
    format_count, format_duration, read_json, read_rows, run_flags, script_path, write_whole)

# -----------------------------------------------------------------------------
runs = ['out']  # folders of runs; words without --
x = 'tokens'  # 'iter'; 'seconds' of training, 'wall_seconds' with everything else; or any column of log.csv
y = 'loss'  # the validation loss is drawn with it, dashed; 'val_bpb' or any other column of log.csv
smooth = 0.9  # decay of the exponential moving average of the column loss; 0: no smoothing
to = 'curves.png'  # the picture; with --compare, it is drawn only if this is given
# is run B better than run A? --compare A B, or --compare A1 A2 --versus B1 B2 if there are several runs on
# each side, which differ in the seed
compare: list = None
versus: list = None
noise: float = None  # the standard deviation of final losses over seeds. None: that of the runs
# -----------------------------------------------------------------------------


def read_log(out_dir):
    """Return the rows of log.csv, dicts {column: number}, without empty and non-finite values."""
    log = []
    for row in read_rows(os.path.join(out_dir, 'log.csv'))[1]:
        numbers = {}
        for column, text in row.items():
            try:
                number = float(text)
            except ValueError:  # empty
                continue
            if math.isfinite(number):
                numbers[column] = number
        log.append(numbers)
    return log


def curve(log, x, y, smooth=0.0):
    """Return columns x and y of the rows that have both, two lists; y as an exponential moving average."""
    rows = [row for row in log if x in row and y in row]
    values = []
    mean = 0.0
    for i, row in enumerate(rows, start=1):
        mean = smooth * mean + (1 - smooth) * row[y]
        values.append(mean / (1 - smooth ** i))  # correct the bias to the initial 0, as in Adam
    return [row[x] for row in rows], values


def draw(curves, path, x_label, y_label, dashed=None, colors=None):
    """Draw curves, {name: (x values, y values)}, into a PNG file.

    dashed: one more curve for each name, drawn dashed in the same color. colors: {name: color} for a
    comparison, in which the ends are marked, and the x axis is logarithmic. Raise InputError if matplotlib is
    not installed, or if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot, which needs a display
    except ImportError as e:
        raise InputError("the package matplotlib is not installed. Run: pip install matplotlib") from e
    figure = Figure(figsize=(7.2, 4.3), dpi=150, layout='constrained')
    axes = figure.subplots()
    for name, (xs, ys) in curves.items():
        line, = axes.plot(xs, ys, marker='.', markersize=3, label=name, color=colors and colors[name])
        if colors:
            axes.plot(xs[-1:], ys[-1:], marker='o', color=line.get_color())
            axes.set_xscale('log')
        if dashed:
            axes.plot(*dashed[name], '--', color=line.get_color(), marker='.', markersize=3)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend()
    axes.grid(alpha=0.25)
    try:
        figure.savefig(path, format='png')
    except OSError as e:
        raise InputError(f"{path} cannot be written: {e.strerror}. Choose another file.") from e


def draw_logs(logs, path, x='tokens', y='loss', smooth=0.9):
    """Draw column y over column x of {name: read_log()}."""
    curves = {}
    dashed = {}
    for name, log in logs.items():
        curves[name] = curve(log, x, y, smooth if y == 'loss' else 0.0)
        if not curves[name][0]:
            raise InputError(f"{name} has no values in the columns {x} and {y} of its log.csv. Name folders "
                             "of runs, and columns with --x and --y.")
        if y == 'loss':
            dashed[name] = curve(log, x, 'val_loss')
    draw(curves, path, x, y, dashed)


def draw_comparison(result, path, x):
    """Draw the validation losses over column x of the two sides of compare_runs(), each in one color."""
    curves = {}
    colors = {}
    for side, color in (('A', 'C0'), ('B', 'C1')):
        for run in result['runs'][side]:
            name = f"{side}: {run['folder']}"
            rows = [row for row in run['log'] if row.get(x, 0) > 0]  # the axis is logarithmic
            curves[name] = curve(rows, x, result['metric'])
            colors[name] = color
    draw(curves, path, x, result['metric'], colors=colors)


def write_report(out_dir, samples='', picture=True):
    """Write report.md and, if `picture`, loss.png, from a run's run.json and log.csv.

    samples: the latest texts. If a file cannot be written, or matplotlib is missing, print a note.
    """
    run = read_json(os.path.join(out_dir, 'run.json'))
    if not run:
        return  # run.json could not be written; train.py has printed a warning
    name = os.path.basename(os.path.abspath(out_dir))
    log = read_log(out_dir)
    if picture:
        try:
            draw_logs({name: log}, os.path.join(out_dir, 'loss.png'))
        except InputError as e:
            print0(f"note: loss.png was not drawn: {e}")
    text = f'# {name}\n\n' + report_text(out_dir, run, log, samples)
    try:
        write_whole(os.path.join(out_dir, 'report.md'), text.encode('utf-8', 'backslashreplace'))
    except OSError as e:
        print0(f"warning: report.md could not be written ({e.strerror})")


def report_text(out_dir, run, log, samples):
    """Return the report in Markdown without its title. run: the contents of run.json."""
    config = run['config']  # without the settings that an edit of train.py has removed
    sizes = ['arch', 'n_layer', 'n_head', 'n_embd', 'block_size']
    model = ', '.join(f'{name} {config[name]}' for name in sizes if name in config)
    latest = {}  # {column: its last value}; a row has only some of the columns
    for row in log:
        latest.update(row)
    lines = [
        f"{run['outcome'] or 'in progress'}: {run['iterations']:,} iterations, {format_count(run['tokens'])} "
        f"tokens, {format_duration(run['train_seconds'])} of training",
        "",
        f"- {model}: {run['n_params']:,} parameters",
        f"- dataset {run['dataset']['name']}, {run['dataset']['train']['tokens']:,} tokens; tokenizer "
        f"{run['tokenizer']}",
        f"- {run['device']}, processes: {run['processes']}",
    ]
    if 'tokens_per_second' in run:
        lines.append(f"- {run['tokens_per_second']:,.0f} tokens/s")
    if 'mfu' in latest:
        lines.append(f"- MFU {latest['mfu']:.1%}")
    if 'memory_gb' in latest:
        lines.append(f"- memory {latest['memory_gb']:.2f} GB")
    for task in config.get('tasks', '').split(','):
        task = task.strip()
        if task in latest:
            lines.append(f"- {task}: {latest[task]:.4f}")
    evaluations = [row for row in log if 'val_loss' in row]
    if evaluations:
        best = min(evaluations, key=lambda row: row['val_loss'])
        last = evaluations[-1]
        for name, row in (('best', best), ('last', last)):
            bpb_text = f", {row['val_bpb']:.4f} bits per byte" if 'val_bpb' in row else ''
            lines.append(f"- {name} validation loss {row['val_loss']:.4f}{bpb_text}, after "
                         f"{row['iter']:,.0f} iterations")
        if last['val_loss'] > 1.02 * best['val_loss']:
            lines += ["", "The validation loss rose. If the training loss fell meanwhile, the model "
                      "overfits: use more text, `--dropout` or a smaller model. Otherwise training became "
                      "unstable: use a lower learning rate or a longer warm-up."]
    if os.path.exists(os.path.join(out_dir, 'loss.png')):
        lines += ["", "![loss](loss.png)"]
    lines += ["", "Started by:", "", f"    python {run['starts'][0]['command']}"]
    if os.path.exists(os.path.join(out_dir, 'ckpt.pt')):
        flags = run_flags(out_dir, config.get('data_dir'))
        lines += ["", "Resumed and sampled by:", "", f"    python {script_path()} --init_from=resume {flags}",
                  f"    python {script_path('sample.py')} {flags}"]
    if samples:  # indented, so that Markdown shows them as they are
        lines += ["", "Latest samples:", "", textwrap.indent(samples, '    ')]
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    config, given = configure(globals(), positional='runs')
    if compare or versus:
        from flatgpt.compare import compare_runs, report
        if versus is None and compare and len(compare) == 2:
            compare, versus = compare[:1], compare[1:]
        if not (compare and versus):
            raise InputError("--compare needs the folders of two runs, or of several on each side: --compare "
                             "A1 A2 --versus B1 B2.")
        logs_a = {run: read_log(run) for run in compare}
        logs_b = {run: read_log(run) for run in versus}
        result = compare_runs(logs_a, logs_b, noise)
        print0(report(result))
        if 'to' not in given:
            sys.exit()
        draw_comparison(result, to, x if 'x' in given else 'compute')
    else:
        draw_logs({run: read_log(run) for run in runs}, to, x, y, smooth)
    print0(f"written: {to}")
