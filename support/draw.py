"""Pictures of runs, with matplotlib: draw(['out-a', 'out-b'], 'curves.png', x='tokens', y='loss')."""

import os

from support.curves import difference, is_evaluation, points, read_log, smooth, values

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
