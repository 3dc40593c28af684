"""
Measure the speed on this machine, compared with nanoGPT or another version.

    $ python dev/bench.py --peer=NANOGPT                # training steps of two small networks
    $ python dev/bench.py --ours=CHECKOUT               # did a change cost speed?
    $ python dev/bench.py --sizes=124M --batch_size=32  # on a GPU
    $ python dev/bench.py --what=sample --peer=NANOGPT  # generated tokens per second
    $ python dev/bench.py --what=race_cpu --peer=NANOGPT --text=input.txt  # Shakespeare: loss over seconds
    $ python dev/bench.py --what=race --peer=NANOGPT    # on a GPU: 124M on the dataset gutenberg, 90 s each

NANOGPT and CHECKOUT are folders. With `train`, each contestant is an unchanged train.py in its own process,
on the same data; the times are those that it prints. The processes take turns of a few seconds while the
others are stopped, so that a slow minute of the machine affects all of them. A ratio is the median of the
ratios of the turns, with a bootstrap 95% interval. On a CPU nanoGPT computes in float32, ours in bfloat16 if
the CPU supports it: use --dtype=float32 to compare the same arithmetic.
"""

import os
import sys

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)
from configurator import check_choice, configure

# -----------------------------------------------------------------------------
what = 'train'  # 'sample', 'race', 'race_cpu'
peer: str = None  # a checkout of nanoGPT to compare with
ours: str = None  # for 'train' and 'sample': another checkout of this project to compare with
sizes: str = None  # names from SIZES, or from SAMPLED for 'sample'. None: the first two
archs = 'gpt2,modern'  # modern trains with Muon, the others with AdamW
batch_size: int = None  # sequences per micro-batch. None: that of the size
rounds = 8  # turns per contestant
turn = 2.0  # seconds per turn, at least
warm_up = 5  # iterations before the first turn
tokens = 250  # for 'sample': tokens per text
seconds = 90.0  # for 'race': training per contestant
max_iters: int = None  # for the races. None: what the seconds allow; for race_cpu, the config's
text: str = None  # for 'race_cpu': the file of tinyshakespeare. None: prepare.py downloads it
dataset = 'gutenberg'  # for 'race': GPT-2's tokens
data_dir: str = None  # the folder of that dataset. None: data/
out_dir = 'out-bench'  # for the curves of the races, as JSON and as a picture
device = 'auto'
dtype = 'auto'
compile: bool | str = 'auto'
# -----------------------------------------------------------------------------
config, given = configure(globals())

import glob
import importlib
import json
import pickle
import queue
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time

import numpy as np
import torch

from flatgpt.processes import choose_compile, choose_device, choose_dtype, environment, synchronize
from plot import draw

TOY = dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, vocab_size=65, learning_rate=1e-3)
BABY = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=16, vocab_size=65, learning_rate=1e-3)
GPT2 = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304, learning_rate=6e-4)
SIZES = {  # toy and baby are nanoGPT's for Shakespeare, on a CPU and a GPU
    'toy': TOY,
    'baby': BABY,
    '124M': dict(GPT2, batch_size=1),  # on a CPU, seconds per iteration. On a GPU: --batch_size=32
    '350M': dict(GPT2, n_layer=24, n_head=16, n_embd=1024, batch_size=1),
}
SAMPLED = {  # the network, and the number of texts in a batch
    'baby': (BABY, 1),
    'baby8': (BABY, 8),
    '124M': (GPT2, 1),
    '124M32': (GPT2, 32),
}
ITERATION = re.compile(r'iter (\d+): loss ([\d.]+|nan).*?time ([\d.]+)ms')
EVALUATION = re.compile(r'step (\d+): .*val loss ([\d.]+)')


# -----------------------------------------------------------------------------
# the contestants: {name: (command, the folder that it runs in)}


def flags_of(knobs):
    return [f'--{name}={value}' for name, value in knobs.items()]


def our_command(checkout, knobs, *config_files):
    command = [sys.executable, '-u', os.path.join(os.path.abspath(checkout), 'train.py'), *config_files]
    return [*command, *flags_of(knobs)], checkout


def nanogpt_command(work, knobs):
    """Return nanoGPT's command. It reads configurator.py and data/ from the working directory, which is
    `work`, so that nothing is written into its checkout."""
    link = os.path.join(work, 'configurator.py')
    if not os.path.exists(link):
        os.symlink(os.path.join(os.path.abspath(peer), 'configurator.py'), link)
    command = [sys.executable, '-u', os.path.join(os.path.abspath(peer), 'train.py'), *flags_of(knobs)]
    return command, work


def knobs_of(size):
    """Return the settings of train.py for a size, except those that name the data."""
    knobs = {**SIZES[size], 'gradient_accumulation_steps': 1, 'device': device, 'compile': compiling,
             'log_interval': 1, 'eval_iters': 1, 'decay_lr': False, 'max_iters': 10**6}
    if batch_size:
        knobs['batch_size'] = batch_size
    return knobs


def contestants_of(size, work):
    knobs = knobs_of(size)
    knobs['dataset'] = make_tokens(os.path.join(work, 'data'), knobs.pop('vocab_size'))
    contestants = {}
    if peer:
        theirs = {**knobs, 'out_dir': 'out-nanogpt', 'eval_interval': 10**9}
        contestants['nanoGPT'] = nanogpt_command(work, theirs)
    knobs.update(data_dir=os.path.join(work, 'data'), eval_interval=0, overwrite=True, dtype=dtype)
    for arch in archs.split(','):
        knobs['arch'] = arch
        knobs['matrix_optimizer'] = 'muon' if arch == 'modern' else 'adamw'
        if ours:
            knobs['out_dir'] = os.path.join(work, f'out-other-{arch}')
            contestants[f'other, {arch}'] = our_command(ours, knobs)
        knobs['out_dir'] = os.path.join(work, f'out-ours-{arch}')
        contestants[f'ours, {arch}'] = our_command(REPO, knobs)
    return contestants


def make_tokens(folder, vocab_size, n=2**21):
    """Write a dataset of synthetic tokens that nanoGPT and all versions of ours read, and return its name.

    The tokens are a random walk over the vocabulary with four equally likely steps: the lowest loss is ln 4.
    """
    name = f'made_up_{vocab_size}'
    path = os.path.join(folder, name)
    os.makedirs(path, exist_ok=True)
    steps = np.random.default_rng(1).integers(4, size=n)
    ids = (steps.cumsum() % vocab_size).astype('<u2')
    ids.tofile(os.path.join(path, 'train.bin'))
    ids[:n // 8].tofile(os.path.join(path, 'val.bin'))
    chars = [chr(ord('0') + i) for i in range(vocab_size)]
    meta = {'vocab_size': vocab_size, 'itos': dict(enumerate(chars)),
            'stoi': {char: i for i, char in enumerate(chars)}}
    with open(os.path.join(path, 'meta.pkl'), 'wb') as f:
        pickle.dump(meta, f)
    return name


# -----------------------------------------------------------------------------
# turns


class Contestant:
    """A train.py in a process that runs only during its turns."""

    def __init__(self, command, cwd):
        self.command = command
        self.errors = tempfile.TemporaryFile('w+')
        self.iterations = queue.Queue()
        self.process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=self.errors,
                                        text=True, start_new_session=True)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        """Put (time, seconds per iteration) of each printed iteration into the queue, and None at the end."""
        for line in self.process.stdout:
            match = ITERATION.match(line)
            if match:
                self.iterations.put((time.monotonic(), float(match[3]) / 1000))
        self.iterations.put(None)

    def next(self):
        item = self.iterations.get()
        if item is None:
            status = self.process.wait()
            self.errors.seek(0)
            sys.exit(f"{' '.join(self.command)}\nended with status {status}\n{self.errors.read()}")
        return item

    def run(self, seconds, lines):
        """Continue for at least that many seconds and iterations, then stop. Return the seconds of each."""
        since = time.monotonic()
        times = []
        self.send(signal.SIGCONT)
        previous = 0.0
        while len(times) < lines or time.monotonic() < since + seconds:
            when, took = self.next()
            if previous >= since:  # otherwise this iteration includes the time while it was stopped
                times.append(took)
            previous = when
        self.send(signal.SIGSTOP)
        return times

    def send(self, number):
        os.killpg(self.process.pid, number)

    def kill(self):
        if self.process.poll() is None:
            self.send(signal.SIGKILL)
        self.process.wait()


def take_turns(contestants):
    """Return {name: the median seconds per iteration of each turn}."""
    running = {}
    medians = {name: [] for name in contestants}
    try:
        for name, (command, cwd) in contestants.items():
            running[name] = Contestant(command, cwd)
            running[name].run(0, warm_up)
        for i in range(rounds):
            order = list(contestants)
            if i % 2:
                order.reverse()
            for name in order:
                medians[name].append(statistics.median(running[name].run(turn, 3)))
    finally:
        for contestant in running.values():
            contestant.kill()
    return medians


def compare(medians, name):
    """Return the time of `name` as a multiple of its rival's, with a 95% interval, as a string.

    The rival is the other checkout if there is one, otherwise nanoGPT.
    """
    rival = name.replace('ours', 'other') if ours else 'nanoGPT'
    if rival not in medians or rival == name:
        return ''
    ratios = np.array(medians[name]) / np.array(medians[rival])
    resampled = np.random.default_rng(1).choice(ratios, size=(10_000, len(ratios)))
    low, high = np.percentile(np.median(resampled, axis=1), [2.5, 97.5])
    return f'{np.median(ratios):.3f} ({low:.3f} to {high:.3f})'


def train():
    rows = []
    for size in (sizes or 'toy,baby').split(','):
        knobs = knobs_of(size)
        tokens_per_iter = knobs['batch_size'] * knobs['block_size']
        with tempfile.TemporaryDirectory() as work:
            medians = take_turns(contestants_of(size, work))
        for name, times in medians.items():
            seconds_per_iter = statistics.median(times)
            rows.append([size, f"{knobs['batch_size']} x {knobs['block_size']}", name,
                         f'{tokens_per_iter / seconds_per_iter:,.0f}', milliseconds(times),
                         compare(medians, name)])
    print_table(['size', 'micro-batch', 'contestant', 'tokens/s', 'ms per iteration (range)', RATIO], rows)


RATIO = f"time / time of {'the other checkout' if ours else 'nanoGPT'} (95% interval)"


def milliseconds(times):
    times = [1000 * t for t in times]
    return f'{statistics.median(times):,.2f} ({min(times):,.2f} to {max(times):,.2f})'


def print_table(head, rows):
    print('| ' + ' | '.join(head) + ' |')
    print('|' + '---|' * len(head))
    for row in rows:
        print('| ' + ' | '.join(str(cell) for cell in row) + ' |', flush=True)


# -----------------------------------------------------------------------------
# sampling, in turns in one process. The weights are random, which does not change the times


def sample():
    rows = []
    for size in (sizes or 'baby,baby8').split(','):
        network, B = SAMPLED[size]
        args = {name: network[name] for name in ['n_layer', 'n_head', 'n_embd', 'block_size', 'vocab_size']}
        contestants = samplers(args, B)
        times = {name: [] for name in contestants}
        idx = torch.zeros(B, 1, dtype=torch.long, device=device)
        for i in range(-1, rounds):  # the first one is for warming up
            order = list(contestants)
            if i % 2:
                order.reverse()
            for name in order:
                synchronize(device)
                t0 = time.perf_counter()
                contestants[name](idx)
                synchronize(device)
                if i >= 0:
                    times[name].append(time.perf_counter() - t0)
        for name, its_times in times.items():
            speeds = [B * tokens / t for t in its_times]
            rows.append([size, name, f'{statistics.median(speeds):,.0f}',
                         f'{min(speeds):,.0f} to {max(speeds):,.0f}', compare(times, name)])
    print_table(['size', 'contestant', 'tokens/s', 'range', RATIO], rows)


def samplers(args, B):
    """Return {name: a function that continues idx (B, 1)}."""
    all_threads = torch.get_num_threads()
    contestants = {}
    if peer:
        module = import_from(peer, 'model')
        theirs = module.GPT(module.GPTConfig(**args, dropout=0.0, bias=False)).eval().to(device)

        def nanogpt(idx):
            torch.set_num_threads(all_threads)
            # as in its sample.py: bfloat16 by autocast on a GPU, float32 on a CPU
            with torch.autocast('cuda', torch.bfloat16, enabled=device.startswith('cuda')):
                theirs.generate(idx, tokens, temperature=0.8, top_k=200)

        contestants['nanoGPT'] = nanogpt

    def add(name, folder, weight_dtype, compile=False):
        module = import_from(folder, 'model')
        model = module.GPT(module.GPTConfig(**args, bias=False)).eval().to(device)
        for p in model.parameters():
            p.data = p.data.to(getattr(torch, weight_dtype))
        few_threads = device == 'cpu' and model.get_num_params(non_embedding=False) < 50e6
        Sampler = import_from(folder, 'flatgpt.sampling').Sampler
        sampler = Sampler(model, B, 1 + tokens, temperature=0.8, top_k=200, compile=compile)

        def generate(idx):
            torch.set_num_threads(1 if few_threads else all_threads)  # as in sample.py
            with torch.inference_mode():
                sampler.generate(idx, tokens)

        contestants[name] = generate

    folders = {'ours': REPO}
    if ours:
        folders['other'] = ours
    for weight_dtype in dict.fromkeys(['float32', dtype_name]):
        for name, folder in folders.items():
            add(f'{name}, {weight_dtype}', folder, weight_dtype)
            if weight_dtype != 'float32' and device.startswith('cuda'):
                add(f'{name}, {weight_dtype}, compiled', folder, weight_dtype, compile=True)
    return contestants


def import_from(folder, name):
    """Import the module `name` of a checkout, and what it imports there."""
    loaded = dict(sys.modules)
    for path in [*glob.glob('**/*.py', root_dir=REPO), *glob.glob('*.py', root_dir=folder)]:
        sys.modules.pop(path.removesuffix('.py').replace('/', '.'), None)
    sys.path.insert(0, os.path.abspath(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
        sys.modules.update(loaded)


# -----------------------------------------------------------------------------
# races: validation loss over seconds of training


def run_race(title, contestants, line=None):
    """Run the contestants one after the other. Print a table; write curves and a picture to out_dir."""
    os.makedirs(out_dir, exist_ok=True)
    curves = {}
    for name, (command, cwd) in contestants.items():
        curves[name] = curve_of(command, cwd)
        print(f'{name}: {curves[name]}', flush=True)
    with open(os.path.join(out_dir, f'{what}.json'), 'w') as f:
        json.dump({'title': title, 'line': line, 'curves': curves, **environment(device)}, f, indent=1)
    points = {}
    for name, curve in curves.items():
        points[name] = ([seconds for _, seconds, _ in curve], [loss for _, _, loss in curve])
    draw(points, os.path.join(out_dir, f'{what}.png'), 'seconds of training', 'validation loss')
    rows = []
    for name, curve in curves.items():
        iteration, last, loss = curve[-1]
        reached = ''
        if line:
            times = [seconds for _, seconds, loss in curve if loss <= line]
            reached = f'{times[0]:.1f}' if times else 'never'
        lowest = min(loss for _, _, loss in curve)
        rows.append([name, f'{iteration:,}', f'{last:.1f}', f'{loss:.4f}', f'{lowest:.4f}', reached])
    print(f'\n{title}')
    print_table(['contestant', 'iterations', 'seconds', 'validation loss', 'lowest',
                 f'seconds to {line}' if line else ''], rows)


def curve_of(command, cwd):
    """Return [(iteration, seconds of training, validation loss)] of a train.py that prints each iteration."""
    output = run(command, cwd)
    times = iteration_times(output)
    losses = {}
    for output_line in output.splitlines():
        match = EVALUATION.match(output_line)
        if match:
            losses[int(match[1])] = float(match[2])
    # in nanoGPT, an iteration with an evaluation includes its time, and the first one that of the compiler
    typical = statistics.median(times.values())
    curve = []
    seconds_so_far = 0.0
    for iteration in range(max(losses) + 1):
        if iteration in losses:
            curve.append((iteration, round(seconds_so_far, 3), losses[iteration]))
        seconds_so_far += typical if iteration in losses else times[iteration]
    return curve


def iteration_times(output):
    """Return {iteration: seconds} from the output of a train.py."""
    times = {}
    for output_line in output.splitlines():
        match = ITERATION.match(output_line)
        if match:
            times[int(match[1])] = float(match[3]) / 1000
    return times


def run(command, cwd):
    """Return the output of a script."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\nended with status {result.returncode}\n{result.stderr[-3000:]}")
    return result.stdout


def race_cpu():
    """Shakespeare by characters: our config for a CPU, and the command for a CPU in nanoGPT's README."""
    with tempfile.TemporaryDirectory() as work:
        flags = [f'--input={os.path.abspath(text)}'] if text else []
        data = os.path.join(work, 'data')
        run([sys.executable, 'prepare.py', 'shakespeare_char', f'--data_dir={data}', *flags], REPO)
        contestants = {}
        if peer:
            knobs = {**TOY, 'dataset': 'shakespeare_char', 'gradient_accumulation_steps': 1, 'device': 'cpu',
                     'compile': False, 'max_iters': 2000, 'lr_decay_iters': 2000, 'min_lr': 1e-4,
                     'beta2': 0.99, 'warmup_iters': 100, 'eval_interval': 200, 'eval_iters': 200,
                     'log_interval': 1, 'always_save_checkpoint': False, 'out_dir': 'out-nanogpt'}
            if max_iters:
                knobs.update(max_iters=max_iters, eval_interval=max_iters)
            del knobs['vocab_size']  # no setting of nanoGPT; it is in meta.pkl
            contestants['nanoGPT'] = nanogpt_command(work, knobs)
        knobs = {'device': 'cpu', 'data_dir': data, 'eval_iters': 0, 'log_interval': 1, 'save_interval': 0}
        hurry = {**knobs, 'max_iters': 180, 'eval_interval': 20, 'out_dir': os.path.join(work, 'out-hurry')}
        knobs.update(eval_interval=100, out_dir=os.path.join(work, 'out-cpu'))
        if max_iters:
            knobs['max_iters'] = max_iters
            hurry['max_iters'] = max_iters
        file = 'config/train_shakespeare_char_cpu.py'
        contestants['modern with Muon'] = our_command(REPO, knobs, file)
        contestants['modern with Muon, in a hurry'] = our_command(REPO, hurry, file)
        run_race('Shakespeare by characters', contestants, line=1.88)


def race():
    """124M on the same tokens, each with a schedule over as many iterations as the seconds allow."""
    with tempfile.TemporaryDirectory() as work:
        data = os.path.abspath(data_dir or os.path.join(REPO, 'data'))
        os.symlink(data, os.path.join(work, 'data'))
        common = {'dataset': dataset, 'device': device, 'compile': compiling, 'block_size': 1024,
                  'batch_size': 64, 'gradient_accumulation_steps': 1, 'eval_interval': 50, 'log_interval': 1}
        if device == 'cpu':  # to test this function
            common.update(n_layer=1, n_head=2, n_embd=64, block_size=64, batch_size=4)
        adamw = {**common, 'learning_rate': 6e-4, 'min_lr': 6e-5, 'warmup_iters': 50}
        # nanoGPT draws its sequences: 13 batches are about as many tokens as all of val, which ours reads
        theirs = {**adamw, 'batch_size': common['batch_size'] // 2, 'gradient_accumulation_steps': 2,
                  'eval_iters': 13, 'always_save_checkpoint': False, 'out_dir': 'out-nanogpt'}
        ours_only = {'data_dir': data, 'eval_iters': 0, 'save_interval': 0, 'overwrite': True, 'dtype': dtype}
        gpt2 = {**adamw, **ours_only, 'out_dir': os.path.join(work, 'out-gpt2')}
        modern = {**common, **ours_only, 'out_dir': os.path.join(work, 'out-modern')}
        commands = {}  # functions of the settings for the length
        if peer:
            commands['nanoGPT'] = lambda length: nanogpt_command(work, {**theirs, **length})
        commands['ours, gpt2'] = lambda length: our_command(REPO, {**gpt2, **length})
        commands['ours, modern with Muon'] = lambda length: our_command(
            REPO, {**modern, **length}, 'config/arch_modern.py')
        contestants = {}
        for name, command_for in commands.items():
            n = max_iters
            if n is None:  # from the speed of a short run, which also fills the compiler's cache
                short = {'max_iters': 30, 'lr_decay_iters': 30, 'eval_interval': 10**6, 'eval_iters': 1}
                pace = statistics.median(list(iteration_times(run(*command_for(short))).values())[5:])
                n = max(1, int(seconds / pace) // 50) * 50
            contestants[name] = command_for({'max_iters': n, 'lr_decay_iters': n})
            print(f'{name}: {n} iterations', flush=True)
        run_race(f'124M on {dataset}, 65,536 tokens per iteration', contestants)


PARTS = {'train': train, 'sample': sample, 'race': race, 'race_cpu': race_cpu}
check_choice(config, 'what', list(PARTS))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no contestant is left running
device = choose_device(device)
compiling = choose_compile(compile, device)
dtype_name = choose_dtype(dtype, device)
here = environment(device)
print(f"commit {here['commit']}, torch {here['torch']}, {here['device']}, {os.cpu_count()} CPUs, "
      f"{dtype_name}, compile {compiling}, {time.strftime('%Y-%m-%d')}\n", flush=True)
PARTS[what]()
