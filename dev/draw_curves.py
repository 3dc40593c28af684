"""The curves of several contestants and seeds in one picture."""

import numpy as np


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
