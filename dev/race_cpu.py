"""
Races on a CPU: the same text, the same machine, one contestant after the other, seed by seed; evaluation is not counted for anybody.

    $ bash runs/race_cpu.sh --peer=PATH_TO_NANOGPT --text=input.txt --gutenberg=FOLDER

1. Shakespeare by characters: nanoGPT's README line for a CPU against config/train_shakespeare_char_cpu.py. Seconds until the loss over
   100 batches of 12 windows of 64 characters, the same ones each time, is 1.88 or less; and our loss when nanoGPT's time is up.
2. Bytes of Gutenberg's books: five pairs of network and optimizer, the same minutes each; bits per byte. AdamW's rate is swept before, over a
   minute each, with a seed that does not race; Muon's rates come from the first race. A minute is as many iterations as go into it at a pace
   measured beforehand, in turns: from there on the machine may do other things, the results stay the same.

Results go to dev/records/: race_shakespeare.md, race_gutenberg.md, a .json and a picture of each (needs matplotlib).
"""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import configure, fail

# -----------------------------------------------------------------------------
peer: str = None  # a checkout of nanoGPT; None: our faithful mode with the same hyperparameters stands in
text: str = None  # tinyshakespeare's file; None: prepare.py downloads it
gutenberg: str = None  # the folder with gutenberg_train.jsonl.gz and gutenberg_val.jsonl.gz; None: without the second race
shakespeare = True  # False: without the first race
seeds = 3
minutes = 3.0  # of each contestant in the second race
long_minutes = 10.0  # of each contestant in the second race once more, with one seed; 0: without
parts: str = None  # a file that keeps the results of the second race as they come: started again with it, an ended race goes on
iters: int = None  # for a test: that many iterations everywhere
out = os.path.join(HERE, 'dev', 'records')  # where the results go
# -----------------------------------------------------------------------------
configure(globals())

import json
import shutil
import tempfile

import numpy as np
import torch

import checkpoint
import dataset
from races import at, draw, machine, pace, python, reached, spread

LINE = ('config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 '
        '--n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0').split()
work = tempfile.mkdtemp()
peer, text, gutenberg = (path and os.path.abspath(path) for path in (peer, text, gutenberg))
if peer and not os.path.exists(os.path.join(peer, 'train.py')):
    fail(f"no train.py in {peer}. name a checkout of nanoGPT with --peer, or leave it out")


def val_loss(model, val, n=1200, T=64):
    """Mean loss over the first n windows of T tokens."""
    model.eval()
    with torch.no_grad():
        windows = torch.from_numpy(np.stack([val[i * T:(i + 1) * T + 1] for i in range(n)]).astype(np.int64))
        losses = [model(w[:, :-1], w[:, 1:])[1].item() for w in windows.split(n // 10)]
    model.train()
    return sum(losses) / len(losses)


def ours(name, seed, val, flags, every, n=1200, T=64):
    """Train with train.py; [(iteration, seconds of training, validation loss)] from its checkpoints, evaluated afterwards."""
    folder = os.path.join(work, f'{name}-{seed}')
    python('train.py', *flags, f'--seed={seed}', f'--out_dir={folder}', f'--data_dir={work}', '--eval_interval=0', '--eval_iters=1', '--eval_only=False',
           '--always_save_checkpoint=True', f'--save_interval={every}', '--keep_checkpoints=100', *([f'--max_iters={iters}', f'--lr_decay_iters={iters}', '--warmup_iters=0'] if iters else []))
    curve = []
    for path in checkpoint.numbered(folder):
        state = checkpoint.read(path)
        curve.append((state['iter_num'], state['seconds'], val_loss(checkpoint.build(state), val, n, T)))
    shutil.rmtree(folder)
    return curve


# what runs in nanoGPT's own train.py: its estimate_loss is replaced by ours, which stops the clock meanwhile
IN_NANOGPT = '''
import json as _json, numpy as _np, time as _time
_val, _curve, _paused, _begin = _np.memmap('data/shakespeare_char/val.bin', dtype=_np.uint16, mode='r'), [], 0.0, _time.perf_counter()
@torch.no_grad()
def estimate_loss():
    global _paused
    t = _time.perf_counter()
    model.eval()
    windows = torch.from_numpy(_np.stack([_val[i * 64:i * 64 + 65] for i in range(1200)]).astype(_np.int64))
    _curve.append((iter_num, t - _begin - _paused, sum(model(w[:, :-1].contiguous(), w[:, 1:].contiguous())[1].item() for w in windows.split(120)) / 10))
    model.train()
    _paused += _time.perf_counter() - t
    return {'train': 0.0, 'val': float('inf')}  # never the best, so that it saves nothing
'''


def nanogpt(seed):
    if not peer:  # from scratch the same network, hyperparameters and initial weights
        return ours('faithful', seed, val_shakespeare, [*LINE, '--dtype=float32'], every=50)
    with open(os.path.join(peer, 'train.py')) as f:
        source = f.read()
    assert source.count('# training loop\n') == source.count('torch.manual_seed(1337 + seed_offset)') == 1, 'not the nanoGPT that this was written for'
    source = source.replace('torch.manual_seed(1337 + seed_offset)', f'torch.manual_seed({seed})')
    source = source.replace('# training loop\n', IN_NANOGPT) + f"\nestimate_loss()\njson_out = open({os.path.join(work, 'nanogpt.json')!r}, 'w')\n_json.dump(_curve, json_out)\n"
    script = os.path.join(peer, 'train_race.py')
    with open(script, 'w') as f:
        f.write(source)
    try:
        # its loop makes one update more than max_iters, and evaluates before it
        python('train_race.py', *LINE, '--eval_interval=50', f"--out_dir={work}/peer", *([f'--max_iters={iters}'] if iters else []), cwd=peer)
    finally:
        os.remove(script)
    with open(os.path.join(work, 'nanogpt.json')) as f:
        return [tuple(point) for point in json.load(f)]


os.makedirs(out, exist_ok=True)


def record(name, title, lines, curves):
    """Write a race's table and all its curves."""
    top = [f'# {title}', '', f"`bash runs/race_cpu.sh {' '.join(arg.split('=')[0] + '=...' if os.path.sep in arg else arg for arg in sys.argv[1:])}`; {machine()}.",
           f"Mean (smallest to largest) over {seeds} seeds; all curves are in race_{name}.json."]
    with open(os.path.join(out, f'race_{name}.md'), 'w') as f:
        f.write('\n'.join(top + lines) + '\n')
    with open(os.path.join(out, f'race_{name}.json'), 'w') as f:
        json.dump({who: [[(it, round(s, 2), round(float(v), 4)) for it, s, v in c] for c in runs] for who, runs in curves.items()}, f)
    print('\n'.join(top + lines), flush=True)


if shakespeare:
    python('prepare.py', 'shakespeare_char', f'--data_dir={work}', *([f'--input={text}'] if text else []))
    val_shakespeare = np.fromfile(os.path.join(work, 'shakespeare_char', 'val.bin'), dtype=np.uint16)
    if peer:  # the same text through its own script, as it also reads the meta.pkl that this writes
        shutil.copyfile(text or os.path.join(work, 'shakespeare_char', 'input.txt'), os.path.join(peer, 'data', 'shakespeare_char', 'input.txt'))
        python('data/shakespeare_char/prepare.py', cwd=peer)
    opponent = 'nanoGPT' if peer else "faithful mode, nanoGPT's line"
    recipe = ['config/train_shakespeare_char_cpu.py', '--device=cpu']
    contestants = {opponent: nanogpt, 'ours, all the time': lambda seed: ours('long', seed, val_shakespeare, recipe, 50),
                   'ours, in a hurry': lambda seed: ours('short', seed, val_shakespeare, [*recipe, '--max_iters=180'], 20)}
    curves = {name: [] for name in contestants}
    for seed in range(1, seeds + 1):
        for name, run in contestants.items():
            curves[name].append(run(seed))
            print(f"shakespeare, seed {seed}, {name}: {curves[name][-1][-1]}", flush=True)
    times = [curve[-1][1] for curve in curves[opponent]]
    lines = ['', 'Loss over 100 fixed batches of 12 windows of 64 characters of val.bin, in float32. Seconds of training, evaluation and saving not counted. '
             'Ours runs in bfloat16 where the CPU has it, nanoGPT in float32, as its line says.', '',
              "| | seconds in all | seconds to 1.88 | loss when the opponent's time is up |", '|---|---|---|---|']
    for name, runs in curves.items():
        lines.append(f"| {name} | {spread([c[-1][1] for c in runs], 1)} | {spread([reached(c, 1.88) for c in runs], 1)} | {spread([at(c, t) for c, t in zip(runs, times)])} |")
    first, quick = [[reached(c, 1.88) for c in curves[name]] for name in (opponent, 'ours, in a hurry')]
    if None not in first + quick:
        lines += ['', f"Ratios of the seconds to 1.88, seed by seed: {', '.join(f'{b / a:.3f}' for a, b in zip(first, quick))} of the opponent's."]
    lines += ['', '![The race on Shakespeare](race_shakespeare.png)']
    draw(curves, os.path.join(out, 'race_shakespeare.png'), 'Shakespeare by characters on two CPU cores', 'validation loss (nats per character)', 1.88)
    record('shakespeare', "Shakespeare by characters, nanoGPT's README line for a CPU", lines, curves)

if gutenberg:
    for split in ('train', 'val'):
        python('prepare.py', f'gutenberg_{split}', f'--input={gutenberg}/gutenberg_{split}.jsonl.gz', '--tokenizer=byte', '--val_fraction=0', f'--data_dir={work}')
    os.replace(f'{work}/gutenberg_val/train.bin', f'{work}/gutenberg_train/val.bin')
    meta = json.load(open(f'{work}/gutenberg_train/meta.json'))
    meta['splits']['val'] = json.load(open(f'{work}/gutenberg_val/meta.json'))['splits']['train']
    json.dump(meta, open(f'{work}/gutenberg_train/meta.json', 'w'))
    val_gutenberg = np.fromfile(f'{work}/gutenberg_train/val.bin', dtype=np.uint16)
    T = 256
    common = ['--dataset=gutenberg_train', '--device=cpu', '--compile=False', '--log_interval=50', '--n_layer=4', '--n_head=4', '--n_embd=192', f'--block_size={T}',
              '--batch_size=8', '--gradient_accumulation_steps=1', '--lr_schedule=linear', '--min_lr=0']
    adamw = ['--beta2=0.99', '--warmup_iters=50']
    muon = ['--matrix_optimizer=muon', '--matrix_lr=0.03', '--embedding_lr=0.1', '--learning_rate=0.01', '--weight_decay=0', '--beta1=0.8', '--beta2=0.95', '--adam_eps=1e-10',
            '--grad_clip=0', '--warmup_iters=0', '--lr_schedule=wsd', '--decay_fraction=0.7']
    contestants = {'gpt2 + AdamW': ['--arch=gpt2', *adamw], 'llama + AdamW': ['--arch=llama', *adamw], 'llama + Muon': ['--arch=llama', *muon],
                   'modern + AdamW': ['--arch=modern', *adamw, '--embedding_lr=0.1', '--adam_eps=1e-10'], 'modern + Muon': ['--arch=modern', *muon]}

    def once(key, make):
        """make(), or what it gave when the race was started before."""
        known = lambda: json.load(open(parts)) if parts and os.path.exists(parts) else {}
        if key in known():
            return known()[key]
        made = make()
        if parts:  # another race may have added to it meanwhile
            dataset.write_whole(parts, json.dumps({**known(), key: made}).encode())
        return made

    def measure_paces():
        paces = {name: [] for name in contestants}
        for _ in range(1 if iters else 3):
            for name, flags in contestants.items():
                python('train.py', *common, *flags, f'--out_dir={work}/pace', f'--data_dir={work}', '--max_iters=120', '--warmup_iters=5', '--eval_interval=0', '--eval_iters=1', '--overwrite')
                paces[name].append(pace(f'{work}/pace'))
        return {name: float(np.median(seen)) for name, seen in paces.items()}

    paces = once('seconds per iteration', measure_paces)
    print('the pace is measured', {name: round(1000 * s, 1) for name, s in paces.items()}, 'ms per iteration', flush=True)

    def race(name, seed, minutes, flags=[]):
        return once(f"{name}, {minutes:g} minutes, seed {seed} {' '.join(flags)}", lambda: run_one(name, seed, minutes, flags))

    def run_one(name, seed, minutes, flags):
        budget = iters or int(minutes * 60 / paces[name])
        curve = ours('gutenberg', seed, val_gutenberg, [*common, *contestants[name], *flags, f'--max_iters={budget}'], -(-budget // 6), n=400, T=T)
        print(f"gutenberg, {minutes:g} minutes, seed {seed}, {name} {' '.join(flags)}: {curve[-1][2] / np.log(2):.4f}", flush=True)
        return [(it, it * paces[name], value / np.log(2)) for it, _, value in curve]

    swept = {}
    for name in [name for name in contestants if 'AdamW' in name]:
        swept[name] = {rate: race(name, 1000, minutes / 3, [f'--learning_rate={rate}'])[-1][2] for rate in ('1.5e-3', '3e-3', '6e-3')}
        contestants[name].append(f'--learning_rate={min(swept[name], key=swept[name].get)}')
    lines = ['', f"4 layers, 192 channels, windows of {T} bytes, 8 of them per iteration; a complete schedule. Bits per byte over the first 400 windows of the "
             "validation file, in float32. The minutes are as many iterations as go into them at the pace measured before, in turns (median of three).", '',
             f"AdamW: `{' '.join(adamw)}`, linear to zero; in modern, whose embedding is fifty times as large, with `--embedding_lr=0.1 --adam_eps=1e-10` too. Its rate was swept "
             f"over {minutes / 3:g} minute{'s' * (minutes != 3)}, with a seed that does not race: " +
             '; '.join(f"{name} {', '.join(f'{rate} {value:.3f}' for rate, value in found.items())}" for name, found in swept.items()) + ". The best one raced. "
             f"Muon: `{' '.join(muon)}`, chosen in the race on Shakespeare, not here."]
    every_curve = {}
    for budget, those in ((minutes, range(1, seeds + 1)), (long_minutes, [1])):
        if not budget:
            continue
        curves = {name: [] for name in contestants}
        for seed in those:
            for name in contestants:
                curves[name].append(race(name, seed, budget))
        lines += ['', f"{budget:g} minutes, {len(those)} seed{'s' * (len(those) > 1)}:", '', '| | ms per iteration | iterations | bits per byte |', '|---|---|---|---|']
        lines += [f"| {name} | {1000 * paces[name]:.1f} | {runs[0][-1][0]:,} | {spread([c[-1][2] for c in runs])} |" for name, runs in curves.items()]
        picture = 'race_gutenberg.png' if budget == minutes else 'race_gutenberg_long.png'
        lines += ['', f"![The race on Gutenberg's books, {budget:g} minutes]({picture})"]
        draw(curves, os.path.join(out, picture), f"Bytes of Gutenberg's books on two CPU cores, {budget:g} minutes", 'bits per byte, validation')
        every_curve.update({f'{name}, {budget:g} minutes': runs for name, runs in curves.items()})
        record('gutenberg', "Bytes of Gutenberg's books", lines, every_curve)

shutil.rmtree(work)
