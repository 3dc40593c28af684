"""
Draw a run's log.csv as a picture of its loss (needs matplotlib).

    $ python dev/loss_curve.py out-quickstart docs/quickstart.png 'title'
"""

import csv
import sys

import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt

out_dir, picture, title = sys.argv[1:4]
with open(f'{out_dir}/log.csv', newline='') as f:
    rows = list(csv.DictReader(f))
train = [(int(r['tokens']) / 1e6, float(r['loss'])) for r in rows if r['loss']]
per_iter = train[-1][0] / len(train) if len(train) < 2 else (train[1][0] - train[0][0]) / (int(rows[1]['iter']) - int(rows[0]['iter']))
val = [(int(r['iter']) * per_iter, float(r['val_loss'])) for r in rows if r['val_loss']]

fig, ax = plt.subplots(figsize=(7, 4), dpi=130)
ax.plot(*zip(*train), color='#9db8d9', linewidth=1.2, label='training batches')
ax.plot(*zip(*val), color='#c23b22', marker='o', markersize=4, linewidth=1.5, label='validation')
ax.annotate(f'{val[-1][1]:.2f}', val[-1], textcoords='offset points', xytext=(-4, 10), ha='right', color='#c23b22')
ax.set_xlabel('tokens (millions)')
ax.set_ylabel('loss (nats per token)')
ax.set_title(title, fontsize=11)
ax.grid(alpha=0.25)
ax.spines[['top', 'right']].set_visible(False)
ax.legend(frameon=False)
fig.tight_layout()
fig.savefig(picture)
