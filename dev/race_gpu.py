"""
Races on a GPU, faithful GPT-2 against the modern recipe; evaluation is not counted for anybody.

    $ bash runs/race_gpu.sh --text=input.txt --gutenberg=FOLDER

1. Baby GPT on Shakespeare by characters: config/train_shakespeare_char.py against config/train_shakespeare_char_modern.py. Seconds until
   the validation loss is 1.4697 or less (nanoGPT's best), and the best loss.
2. 124M with GPT-2's tokens on Gutenberg's books: complete schedules of 65,536-token steps, at most four epochs and about `minutes` each.

Results go to dev/records/: race_gpu.md, race_gpu.json, and a picture of each race (needs matplotlib).
"""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import configure

# -----------------------------------------------------------------------------
text: str = None  # tinyshakespeare's file; None: prepare.py downloads it
gutenberg: str = None  # the folder with gutenberg_train.jsonl.gz; None: without the second race
shakespeare = True  # False: without the first race
seeds = 3
first_seed = 1
minutes = 8.0  # of each contestant in the second race
smoke = False  # True: tiny networks and three iterations, to see on a CPU that all of it works
out = os.path.join(HERE, 'dev', 'records')  # where the results go
# -----------------------------------------------------------------------------
configure(globals())

import json
import math
import shutil
import tempfile

from races import draw, machine, pace, python, reached, read_log, spread

work = tempfile.mkdtemp()
text, gutenberg = (path and os.path.abspath(path) for path in (text, gutenberg))
os.makedirs(out, exist_ok=True)
TINY = ['--device=cpu', '--n_layer=1', '--n_head=1', '--n_embd=64', '--block_size=32', '--max_iters=3', '--lr_decay_iters=3', '--warmup_iters=0', '--batch_size=2',
        '--total_batch_size=64', '--eval_iters=1', '--eval_interval=1'] if smoke else []


def train(name, seed, *flags):
    """Run train.py; the curve [(iteration, seconds of training, validation loss)] of its log.csv."""
    folder = os.path.join(work, f'{name}-{seed}')
    python('train.py', *flags, f'--seed={seed}', f'--out_dir={folder}', f'--data_dir={work}', '--keep_checkpoints=1', '--wandb_log=False', '--log_interval=1', *TINY)
    curve, seconds = [], 0.0
    for row in read_log(folder):  # the loss at iteration `it` is that of the weights before its update: the seconds of the row before
        if row['val_loss']:
            curve.append((int(row['iter']), seconds, float(row['val_loss'])))
        seconds = float(row['seconds'] or seconds)
    steady = 0.0 if smoke else pace(folder)
    shutil.rmtree(folder)
    return curve, steady


results = {}
lines = ['# Races on a GPU', '', f"`bash runs/race_gpu.sh --seeds={seeds} --first_seed={first_seed} --minutes={minutes:g}{' --smoke' * smoke}`; {machine()}. Mean (smallest to largest) over the "
         f"seeds; all curves are in race_gpu.json."]
if smoke:
    lines += ['', '**A smoke test with tiny networks: the numbers mean nothing.**']

if shakespeare:
    python('prepare.py', 'shakespeare_char', f'--data_dir={work}', *([f'--input={text}'] if text else []))
    curves = {'faithful': [], 'modern': []}
    for seed in range(first_seed, first_seed + seeds):
        for name, config in (('faithful', 'config/train_shakespeare_char.py'), ('modern', 'config/train_shakespeare_char_modern.py')):
            curves[name].append(train(name, seed, config, '--eval_interval=50', '--eval_iters=0')[0])
            print(f"shakespeare, seed {seed}, {name}: {min(value for _, _, value in curves[name][-1]):.4f}", flush=True)
    lines += ['', '## Baby GPT, Shakespeare by characters', '', 'Validation loss over all of val.bin.', '', '| | seconds in all | seconds to 1.4697 | best loss |', '|---|---|---|---|']
    for name, runs in curves.items():
        lines.append(f"| {name} | {spread([c[-1][1] for c in runs], 1)} | {spread([reached(c, 1.4697) for c in runs], 1)} | {spread([min(v for _, _, v in c) for c in runs], 4)} |")
    lines += ['', '![The race on Shakespeare](race_gpu_shakespeare.png)']
    draw(curves, os.path.join(out, 'race_gpu_shakespeare.png'), 'Baby GPT on Shakespeare by characters', 'validation loss (nats per character)', 1.4697)
    results['shakespeare'] = curves

if gutenberg:
    python('prepare.py', 'gutenberg', f'--input={gutenberg}/gutenberg_train.jsonl.gz', f"--tokenizer={'byte' if smoke else 'gpt2'}", '--val_fraction=0.02', f'--data_dir={work}')
    tokens = json.load(open(f'{work}/gutenberg/meta.json'))['splits']['train']['tokens']
    common = ['--dataset=gutenberg', '--batch_size=32', '--total_batch_size=65536', '--eval_tokens=1000000', '--dtype=auto']
    # the rates of config/arch_modern.py belong to eight times as many tokens per iteration: times sqrt(1/8). GPT-2's 6e-4 is left as it is
    scaled = ['--matrix_lr=0.009', '--embedding_lr=0.25', '--head_lr=0.0014', '--learning_rate=0.0014', '--n_layer=12', '--n_embd=768']
    contestants = {'faithful': ['config/train_gpt2.py', '--warmup_iters=100'], 'modern': ['config/train_gpt2.py', 'config/arch_modern.py', *scaled]}
    curves, rates, iterations = {name: [] for name in contestants}, {name: [] for name in contestants}, {}
    for seed in range(first_seed, first_seed + seeds):
        for name, flags in contestants.items():
            if name not in iterations:  # a short run tells the pace
                steady = train('pace', 0, *flags, *common, '--max_iters=60', '--lr_decay_iters=60', '--warmup_iters=5', '--eval_interval=0')[1]
                iterations[name] = 3 if smoke else min(int(minutes * 60 / steady), math.floor(4 * tokens / 65536))
            n = iterations[name]
            curve, steady = train(name, seed, *flags, *common, f'--max_iters={n}', f'--lr_decay_iters={n}', f'--eval_interval={max(1, n // 10)}')
            curves[name].append(curve)
            rates[name].append(65536 / steady if steady else 0.0)
            print(f"124M, seed {seed}, {name}: {curve[-1]}", flush=True)
    lines += ['', "## 124M, GPT-2's tokens of Gutenberg's books", '', '| | iterations of 65,536 tokens | tokens/s | seconds | validation loss |', '|---|---|---|---|---|']
    for name, runs in curves.items():
        lines.append(f"| {name} | {iterations[name]:,} | {spread(rates[name], 0)} | {spread([c[-1][1] for c in runs], 0)} | {spread([c[-1][2] for c in runs])} |")
    lines += ['', '![The race at 124M, by time](race_gpu_124m.png) ![The same by tokens](race_gpu_124m_tokens.png)']
    draw(curves, os.path.join(out, 'race_gpu_124m.png'), "124M on Gutenberg's books", 'validation loss (nats per token)')
    by_tokens = {name: [[(it, it * 65536 / 1e6, value) for it, _, value in c] for c in runs] for name, runs in curves.items()}
    draw(by_tokens, os.path.join(out, 'race_gpu_124m_tokens.png'), "124M on Gutenberg's books", 'validation loss (nats per token)', xlabel='tokens (millions)')
    results['gutenberg'] = curves

with open(os.path.join(out, 'race_gpu.md'), 'w') as f:
    f.write('\n'.join(lines) + '\n')
with open(os.path.join(out, 'race_gpu.json'), 'w') as f:
    json.dump(results, f)
shutil.rmtree(work)
print('\n'.join(lines))
