"""
Races on a CPU: our recipes against nanoGPT's and GPT-2's, on the same text and machine, seed by seed. The
seconds are those of training, without evaluating and saving.

    $ bash runs/race_cpu.sh --peer=PATH_TO_NANOGPT --text=input.txt --gutenberg=FOLDER
    $ python dev/race.py --draw_only      # the pictures again, from dev/records/race_*.json

1. Shakespeare by characters: nanoGPT's README line for a CPU against config/train_shakespeare_char_cpu.py.
   Seconds until the loss over all of val.bin, in windows of 64 characters, is 1.88 or less; and our loss when
   nanoGPT's time is up.
2. Bytes of Gutenberg's books: pairs of network and optimizer, the same minutes each; bits per byte.
   AdamW's learning rate is swept before, with a seed that does not race; Muon's come from the first race. A
   minute is as many iterations as fit into it at a pace measured beforehand, in turns.

Results go to dev/records/: a table, the curves as JSON, and pictures (which need matplotlib).
dev/gpu_records.py has what a GPU is asked.
"""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
peer: str = None  # a checkout of nanoGPT. None: our faithful mode with its hyperparameters
text: str = None  # tinyshakespeare's file. None: prepare.py downloads it
gutenberg: str = None  # a folder with gutenberg_{train,val}.jsonl.gz. None: no second race
shakespeare = True  # False: no first race
seeds = 3
first_seed = 1
minutes = 3.0  # of each contestant in the second race
long_minutes = 10.0  # the second race once more, so long, with one seed; 0: no such race
smoke = False  # True: tiny networks and three iterations on a CPU, to see that all of it works
draw_only = False  # True: run nothing, draw the pictures from the curves in `out`
out = os.path.join(HERE, 'dev', 'records')  # where the results go
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import json
import shutil
import tempfile

import numpy as np
import torch

from common import check_peer, draw_curves, given_flags, machine, run_script, table, write_record
from model import load
from support.checkpoint import numbered
from support.evaluate import windows
from support.report import points, read_log
from support.files import read_json, write_json

LINE = ('config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 '
        '--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 '
        '--lr_decay_iters=2000 --dropout=0.0').split()  # nanoGPT's README
TINY = ('--device=cpu --n_layer=1 --n_head=1 --n_embd=64 --block_size=32 --max_iters=3 --lr_decay_iters=3 '
        '--warmup_iters=0 --batch_size=2 --eval_iters=1').split() if smoke else []
HURRY = '--n_embd=128 --matrix_lr=0.04 --max_iters=130'
# chosen on a tenth of the training text that did not race: dev/records/recipe.md
LOCAL = '--n_layer=1 --n_head=2 --momentum=0.85'
LARGER = '--n_layer=2 --matrix_lr=0.02'  # for ten minutes, on top of LOCAL
SHAKESPEARE, GUTENBERG = 'Shakespeare by characters', "Bytes of Gutenberg's books"

# A curve is [(iteration, seconds of training, loss)]
# -----------------------------------------------------------------------------
# one run


def prepare(name, *flags):
    run_script('prepare.py', name, f'--data_dir={work}', *flags, fork=smoke)


def train(name, seed, *flags):
    """Run train.py; returns its folder."""
    folder = os.path.join(work, f'{name}-{seed}')
    own = [f'--seed={seed}', f'--out_dir={folder}', f'--data_dir={work}', '--wandb_log=False', '--overwrite']
    run_script('train.py', *flags, *own, *TINY, fork=smoke)
    return folder


def pace(folder):
    """Seconds per iteration by log.csv, without its first row: the median."""
    return float(np.median([ms for _, ms in points(read_log(folder), 'iter', 'ms')[1:]])) / 1000


def val_loss(model, val, most, T):
    """Mean loss in float32 over windows of T tokens that are evenly spread, at most so many."""
    T = min(T, model.config.block_size)
    starts = windows((len(val) - 1) // T * T, T, most)
    ids = torch.from_numpy(np.stack([val[i:i + T + 1] for i in starts]).astype(np.int64))
    with torch.no_grad():
        total = sum(model(part[:, :-1], part[:, 1:])[1].item() * len(part) for part in ids.split(120))
    return total / len(ids)


def curve_of_checkpoints(name, seed, val, flags, every, most=None, T=64):
    """Train, and evaluate the checkpoints afterwards."""
    folder = train(name, seed, '--eval_interval=0', '--eval_iters=1', '--always_save_checkpoint=True',
                   '--keep_checkpoints=100', f'--save_interval={every}', *flags)
    curve = []
    for path in numbered(folder):
        state = torch.load(path, map_location='cpu', weights_only=True)
        model, _ = load(path)
        curve.append((state['iter_num'], state['seconds'], val_loss(model, val, most, T)))
    shutil.rmtree(folder)
    return curve


# for nanoGPT's own train.py: its estimate_loss becomes val_loss, and stops the clock meanwhile
IN_NANOGPT = '''
import json as _json, numpy as _np, time as _time
_val = _np.memmap('data/shakespeare_char/val.bin', dtype=_np.uint16, mode='r')
_curve, _paused, _begin = [], 0.0, _time.perf_counter()
@torch.no_grad()
def estimate_loss():
    global _paused
    t = _time.perf_counter()
    model.eval()
    n = (len(_val) - 1) // 64
    windows = torch.from_numpy(_np.stack([_val[i * 64:i * 64 + 65] for i in range(n)]).astype(_np.int64))
    losses = [model(w[:, :-1].contiguous(), w[:, 1:].contiguous())[1].item() * len(w)
              for w in windows.split(120)]
    _curve.append((iter_num, t - _begin - _paused, sum(losses) / n))
    model.train()
    _paused += _time.perf_counter() - t
    return {'train': 0.0, 'val': float('inf')}  # never the best, so that it saves nothing
'''


def nanogpt(seed):
    """The curve of nanoGPT's README line, by its own train.py with another seed."""
    with open(os.path.join(peer, 'train.py')) as f:
        source = f.read()
    loop, draw = '# training loop\n', 'torch.manual_seed(1337 + seed_offset)'
    if source.count(loop) != 1 or source.count(draw) != 1:
        fail(f"{peer} is not the nanoGPT that this was written for. use commit 3adf61e")
    result = os.path.join(work, 'nanogpt.json')
    source = source.replace(draw, f'torch.manual_seed({seed})').replace(loop, IN_NANOGPT)
    source += f"\nestimate_loss()\nwith open({result!r}, 'w') as _file:\n    _json.dump(_curve, _file)\n"
    script = os.path.join(peer, 'train_race.py')
    with open(script, 'w') as f:
        f.write(source)
    try:  # its loop makes one update more than max_iters, and evaluates before it
        flags = [*LINE, '--eval_interval=50', f'--out_dir={work}/peer']
        if smoke:
            flags.append('--max_iters=3')
        run_script('train_race.py', *flags, cwd=peer)
    finally:
        os.remove(script)
    with open(result) as f:
        return [tuple(point) for point in json.load(f)]


# -----------------------------------------------------------------------------
# words and pictures


def reached(curve, loss):
    """Seconds at the first evaluation that shows `loss` or less, None if there is none."""
    return next((seconds for _, seconds, value in curve if value <= loss), None)


def at(curve, seconds):
    """The last loss before `seconds` were over, None if there was none."""
    return ([value for _, s, value in curve if s <= seconds] or [None])[-1]


def spread(values, digits=3):
    """Mean (smallest to largest)."""
    there = [value for value in values if value is not None]
    if not there:
        return 'never'
    if len(there) < len(values):
        return f'{len(there)} of {len(values)} did'
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def draw_shakespeare(curves):
    draw_curves(curves, os.path.join(out, 'race_shakespeare.png'), f'{SHAKESPEARE} on two CPU cores',
                'validation loss (nats per character)', 1.88)


def draw_gutenberg(curves):
    """`curves` by names such as 'llama + Muon, 3 minutes'; a picture for each number of minutes."""
    for i, budget in enumerate(dict.fromkeys(name.split(', ')[1] for name in curves)):
        some = {name: runs for name, runs in curves.items() if name.endswith(f', {budget}')}
        picture = 'race_gutenberg_long.png' if i else 'race_gutenberg.png'
        draw_curves(some, os.path.join(out, picture), f'{GUTENBERG} on two CPU cores',
                    'bits per byte, validation')


PICTURES = {'race_shakespeare': draw_shakespeare, 'race_gutenberg': draw_gutenberg}


def record(name, title, lines, curves):
    """Write a race's table, its curves and its pictures."""
    last = first_seed + seeds - 1
    top = [f'# {title}', '', f"`bash runs/race_cpu.sh {given_flags(sys.argv[1:])}`; {machine()}.",
           f'Mean (smallest to largest) over seeds {first_seed} to {last}; all curves are in {name}.json.',
           'Seconds of training: evaluating and saving are not counted.']
    if smoke:
        top += ['', '**A smoke test with tiny networks: the numbers mean nothing.**']
    with open(os.path.join(out, f'{name}.json'), 'w') as f:
        json.dump(curves, f)
    PICTURES[name](curves)
    write_record(os.path.join(out, f'{name}.md'), top + lines)


def rounded(curves):
    return {who: [[(it, round(s, 2), round(float(value), 4)) for it, s, value in curve] for curve in runs]
            for who, runs in curves.items()}


# -----------------------------------------------------------------------------
# the races


def race_shakespeare():
    prepare('shakespeare_char', *([f'--input={text}'] if text else []))
    folder = os.path.join(work, 'shakespeare_char')
    val = np.fromfile(os.path.join(folder, 'val.bin'), dtype=np.uint16)
    recipe = ['config/train_shakespeare_char_cpu.py', '--device=cpu']
    # contestant: flags, iterations between points of its curve
    contestants = {"faithful mode, nanoGPT's line": ([*LINE, '--dtype=float32'], 50),
                   'ours all the time': (recipe, 50), 'ours in a hurry': ([*recipe, *HURRY.split()], 10)}
    if peer:  # the same text through its own script, as it also reads the meta.pkl that this writes
        shutil.copyfile(text or os.path.join(folder, 'input.txt'),
                        os.path.join(peer, 'data', 'shakespeare_char', 'input.txt'))
        run_script('data/shakespeare_char/prepare.py', cwd=peer)
        contestants = {'nanoGPT': None, **dict(list(contestants.items())[1:])}
    opponent = next(iter(contestants))
    curves = {name: [] for name in contestants}
    for seed in range(first_seed, first_seed + seeds):
        for name, how in contestants.items():
            curves[name].append(curve_of_checkpoints('race', seed, val, *how) if how else nanogpt(seed))
            print(f'shakespeare, seed {seed}, {name}: {curves[name][-1][-1]}', flush=True)
    rows = [['', 'seconds in all', 'seconds to 1.88']]
    for name, runs in curves.items():
        to = [reached(curve, 1.88) for curve in runs]
        rows.append([name, spread([curve[-1][1] for curve in runs], 1), spread(to, 1)])
    ends = [curve[-1][1] for curve in curves[opponent]]
    rows[0].append("loss when the opponent's time is up")
    for row, runs in zip(rows[1:], curves.values()):
        row.append(spread([at(curve, end) for curve, end in zip(runs, ends)]))
    lines = ['', 'Loss over all of val.bin in windows of 64 characters, in float32. Ours '
             'trains in bfloat16 where the CPU has it, nanoGPT in float32, as its line says.', '',
             *table(*rows), '', '![The race on Shakespeare](race_shakespeare.png)']
    record('race_shakespeare', f"{SHAKESPEARE}, nanoGPT's README line for a CPU", lines, rounded(curves))


COMMON = ('--dataset=gutenberg_train --device=cpu --compile=False --log_interval=50 --n_layer=4 --n_head=4 '
          '--n_embd=192 --block_size=256 --batch_size=8 --gradient_accumulation_steps=1 --lr_schedule=linear '
          '--min_lr=0').split()
ADAMW = '--beta2=0.99 --warmup_iters=50'
MUON = ('--matrix_optimizer=muon --matrix_lr=0.03 --embedding_lr=0.1 --learning_rate=0.01 --weight_decay=0 '
        '--beta1=0.8 --beta2=0.95 --adam_eps=1e-10 --grad_clip=0 --warmup_iters=0 --lr_schedule=wsd '
        '--decay_fraction=0.7')


def prepare_gutenberg_bytes():
    """The dataset gutenberg_train, whose validation text is the file for it."""
    for split in ('train', 'val'):
        prepare(f'gutenberg_{split}', f'--input={gutenberg}/gutenberg_{split}.jsonl.gz', '--tokenizer=byte',
                '--val_fraction=0')
    folders = [os.path.join(work, f'gutenberg_{split}') for split in ('train', 'val')]
    train, val = (read_json(os.path.join(folder, 'meta.json')) for folder in folders)
    os.replace(os.path.join(folders[1], 'train.bin'), os.path.join(folders[0], 'val.bin'))
    train['splits']['val'] = val['splits']['train']
    write_json(os.path.join(folders[0], 'meta.json'), train)


def measure_paces(contestants):
    """Seconds per iteration of each in the fastest of five short runs, in turns: others may use the machine,
    which makes one contestant's run twice as slow as the next one's."""
    paces = {name: [] for name in contestants}
    for _ in range(1 if smoke else 5):
        for name, flags in contestants.items():
            short = '--log_interval=1 --max_iters=60 --warmup_iters=5 --eval_interval=0 --eval_iters=1'
            paces[name].append(pace(train('pace', 0, *COMMON, *flags, *short.split())))
    return {name: min(seen) for name, seen in paces.items()}


def race_gutenberg():
    prepare_gutenberg_bytes()
    val = np.fromfile(os.path.join(work, 'gutenberg_train', 'val.bin'), dtype=np.uint16)
    adamw, muon = ADAMW.split(), MUON.split()
    contestants = {
        'gpt2 + AdamW': ['--arch=gpt2', *adamw], 'llama + AdamW': ['--arch=llama', *adamw],
        'llama + Muon': ['--arch=llama', *muon],
        'modern + AdamW': ['--arch=modern', *adamw, '--embedding_lr=0.1', '--adam_eps=1e-10'],
        'modern + Muon': ['--arch=modern', *muon],
        'local + Muon': ['--arch=local', *muon, *LOCAL.split()],
        'larger local + Muon': ['--arch=local', *muon, *LOCAL.split(), *LARGER.split()],
    }
    pace_of = measure_paces(contestants)
    print('ms per iteration:', {name: round(1000 * s, 1) for name, s in pace_of.items()}, flush=True)

    def race(name, seed, minutes, *flags):
        n = max(6, int(minutes * 60 / pace_of[name]))
        flags = [*COMMON, *contestants[name], *flags, f'--max_iters={n}']
        curve = curve_of_checkpoints('gutenberg', seed, val, flags, -(-n // 6), most=400, T=256)
        print(f'gutenberg, {minutes:g} minutes, seed {seed}, {name}: {curve[-1]}', flush=True)
        return [(it, it * pace_of[name], value / np.log(2)) for it, _, value in curve]

    swept = []
    for name in [name for name in contestants if 'AdamW' in name]:
        found = {lr: race(name, 1000, minutes / 3, f'--learning_rate={lr}')[-1][2]
                 for lr in ('1.5e-3', '3e-3', '6e-3')}
        contestants[name].append(f'--learning_rate={min(found, key=found.get)}')
        swept.append(f"{name} {', '.join(f'{lr} {value:.3f}' for lr, value in found.items())}")
    lines = ['', '4 layers (local: a near one and one with attention, or two), 192 channels, 8 windows of '
             '256 bytes per iteration; a complete schedule. Bits per byte over 400 windows that are evenly '
             'spread over the validation file, in float32.']
    if swept:
        lines += ['', f'AdamW: `{ADAMW}`, linear to zero; in modern with `--embedding_lr=0.1 '
                  '--adam_eps=1e-10` too. Learning rates, swept over a third of the time: '
                  f"{'; '.join(swept)}. The best one raced."]
    lines += ['', f'Muon: `{MUON}`, chosen in the race on Shakespeare; local `{LOCAL}`, larger `{LARGER}`.']
    every = {}
    for budget, n in ((minutes, seeds), (long_minutes, 1)):
        if not budget:
            continue
        rows = [('', 'ms per iteration', 'iterations', 'bits per byte')]
        for name in contestants:
            runs = [race(name, seed, budget) for seed in range(first_seed, first_seed + n)]
            bits = spread([curve[-1][2] for curve in runs])
            rows.append((name, f'{1000 * pace_of[name]:.1f}', f'{runs[0][-1][0]:,}', bits))
            every[f'{name}, {budget:g} minutes'] = runs
        picture = 'race_gutenberg.png' if budget == minutes else 'race_gutenberg_long.png'
        lines += ['', f'{budget:g} minutes, seeds: {n}', '', *table(*rows), '',
                  f"![The race on Gutenberg's books, {budget:g} minutes]({picture})"]
        record('race_gutenberg', GUTENBERG, lines, rounded(every))


if __name__ == '__main__':
    problems = out_of_range(knobs, above_zero='seeds minutes')
    if problems := problems + check_peer(peer):
        fail(*problems)
    os.makedirs(out, exist_ok=True)
    if draw_only:
        for name, picture in PICTURES.items():
            path = os.path.join(out, f'{name}.json')
            if os.path.exists(path):
                with open(path) as f:
                    picture(json.load(f))
        sys.exit()
    if smoke:
        minutes, long_minutes = 1e-9, 0
    peer, text, gutenberg = (path and os.path.abspath(path) for path in (peer, text, gutenberg))
    with tempfile.TemporaryDirectory() as work:
        if shakespeare:
            race_shakespeare()
        if gutenberg:
            race_gutenberg()
