"""
How fast it is on this machine, beside nanoGPT or another version of itself.

    $ python dev/bench.py --peer=PATH_TO_NANOGPT                # training steps of two small networks
    $ python dev/bench.py --ours=PATH_TO_ANOTHER_FLATGPT        # did a change cost speed?
    $ python dev/bench.py config/train_gpt2.py --batch_size=8   # of that configuration
    $ python dev/bench.py --sizes=124M --batch_sizes=8,16,32    # on a GPU: the best micro-batch
    $ python dev/bench.py --what=profile --sizes=124M           # where the time of a step is spent

Each contestant is a train.py as it is, in a process of its own, on the same made-up tokens; the times are
those that it prints. The processes take turns of a few seconds in which the others are stopped, so that a
slow minute of the machine is slow for all. An iteration that began before its turn is left out. Large
networks on a GPU do not fit beside each other: there each turn is a new process. On a CPU nanoGPT computes
in float32, ours in bfloat16 where the CPU has it.
"""

import os
import sys
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
what: Literal['train', 'profile', 'start', 'sample', 'data', 'prepare'] = 'train'  # start: to the first step
peer: str = None  # a checkout of nanoGPT to compare with
ours: str = None  # another checkout of flatgpt to compare with
sizes: str = None  # from SIZES. None: 'toy,baby', or the config file's; 'baby,baby8' for 'sample'
archs = 'gpt2,modern'  # of this flatgpt; --arch=llama, or a config file's, is that one alone
batch_sizes: str = None  # micro-batches to try, as '8,16,32'. None: the size's own
rounds = 10  # turns of each contestant
turn = 2.0  # seconds of each, at least
iters = 3  # whole iterations in each, at least
warm_up = 5  # iterations before
vocab_size: int = None  # None: the size's own, 50304 for a config file
tokens: int = None  # of 'sample': how many to write. None: the size's own
text: str = None  # of 'prepare': a .jsonl.gz of documents
traces = 'out-traces'  # of 'profile': the folder for traces, to be opened at https://ui.perfetto.dev
json_file: str = None  # where the numbers go. None: nowhere
# -----------------------------------------------------------------------------
knobs, given = configure(globals(), like=os.path.join(os.path.dirname(__file__), '..', 'train.py'))

import json
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

from common import (
    REPO, after_each_update, check_peer, flags_of, machine, make_tokens, median_and_range, table)
from support.devices import choose_compile, choose_device, choose_dtype
from support.peak_flops import peak_flops_of

SMALL = dict(vocab_size=65, learning_rate=1e-3)
LARGE = dict(vocab_size=50304, block_size=1024, batch_size=8)
SIZES = {  # beside the defaults of train.py; toy and baby are nanoGPT's for Shakespeare
    'toy': dict(SMALL, n_layer=4, n_head=4, n_embd=128, batch_size=12, block_size=64),
    'baby': dict(SMALL, n_layer=6, n_head=6, n_embd=384, batch_size=16, block_size=256),
    '124M': dict(LARGE, n_layer=12, n_head=12, n_embd=768, batch_size=1),  # seconds on a CPU
    '350M': dict(LARGE, n_layer=24, n_head=16, n_embd=1024),
    '774M': dict(LARGE, n_layer=36, n_head=20, n_embd=1280),
    '1.5B': dict(LARGE, n_layer=48, n_head=25, n_embd=1600),
    'config': dict(vocab_size=50304),  # the config file's, or the flags'
}
THEIRS = (  # knobs that nanoGPT has too
    'n_layer n_head n_embd block_size batch_size gradient_accumulation_steps dropout bias dtype '
    'learning_rate weight_decay beta1 beta2 grad_clip warmup_iters').split()
# knobs of a config file that would end the run or interrupt it
INTERRUPTS = re.compile('.*_interval|budget|max_tokens|max_epochs|tokens_per_param|max_minutes|stop_val_loss')
ITERATION = re.compile(r'iter \d+: loss .*?time ([\d.]+)ms')
NO_MEMORY = ("can't allocate memory", 'not enough memory', 'out of memory')


class OutOfMemory(Exception):
    pass


class Contestant:
    """A train.py in a process that runs only in its turns."""

    def __init__(self, command, cwd):
        self.iterations, self.errors = queue.Queue(), tempfile.TemporaryFile('w+')
        self.command, self.started = command, time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=self.errors, text=True, start_new_session=True)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        """Put (when, seconds) of each iteration that is printed into the queue; None at the end."""
        for line in self.process.stdout:
            if found := ITERATION.match(line):
                self.iterations.put((time.monotonic(), float(found[1]) / 1000))
        self.iterations.put(None)

    def next(self):
        """(when, seconds) of the next iteration."""
        found = self.iterations.get()
        if found is None:
            status = self.process.wait()
            self.errors.seek(0)
            words = self.errors.read().strip() or 'it printed no error'
            # the kernel kills what takes too much of main memory
            if status == -signal.SIGKILL or any(sign in words for sign in NO_MEMORY):
                raise OutOfMemory
            last = words.splitlines()[-1]
            fail(f"train.py ended with status {status} ({last}). the command: {' '.join(self.command)}")
        return found

    def run(self, seconds, iterations):
        """Run for so many seconds and iterations, and stop. Returns the seconds of each iteration."""
        since, times = time.monotonic(), []
        self.send(signal.SIGCONT)
        while len(times) < iterations or time.monotonic() < since + seconds:
            when, took = self.next()
            if when - took >= since:  # else the time in which it was stopped is part of it
                times.append(took)
        self.send(signal.SIGSTOP)
        return times

    def send(self, signal_number):
        try:
            os.killpg(self.process.pid, signal_number)
        except ProcessLookupError:  # it has ended; next() tells why
            pass

    def kill(self):
        self.send(signal.SIGKILL)
        self.process.wait()
        self.errors.close()


def take_turns(commands, alone):
    """{name: the seconds of the iterations, for each round; None if memory was too small} of {name:
    (command, folder)}. alone: a process per turn."""
    running, times = {}, {name: [] for name in commands}
    try:
        for n in range(rounds):
            for name in sorted(commands, reverse=n % 2):
                if times[name] is None:
                    continue
                try:
                    if name not in running:
                        running[name] = Contestant(*commands[name])
                        running[name].run(0, warm_up)
                    times[name].append(running[name].run(turn, iters))
                except OutOfMemory:
                    times[name] = None
                if alone or times[name] is None:
                    running.pop(name).kill()
    finally:
        for contestant in running.values():
            contestant.kill()
    return times


# -----------------------------------------------------------------------------
# who takes part


def settings(name, batch):
    """The knobs of a size and those given, as a dict; with the micro-batch `batch` unless it is 0."""
    k = {'gradient_accumulation_steps': 1, **SIZES[name]}
    for key, value in given.items():
        if key == 'vocab_size' or (key in train_knobs and not INTERRUPTS.fullmatch(key)):
            k[key] = value
    if batch:
        k['batch_size'] = batch
    shape = {**knobs, **k}
    per_micro = shape['batch_size'] * shape['block_size']
    if total := k.pop('total_batch_size', None):
        if total % per_micro:
            fail(f"total_batch_size={total} is not a multiple of batch_size x block_size ({per_micro})")
        k['gradient_accumulation_steps'] = total // per_micro
    return k


def commands_of(k, work):
    """{name of the contestant: (command, the folder it runs in)} with the settings k."""
    data_dir = os.path.join(work, 'data')
    name = make_tokens(data_dir, k['vocab_size'])
    k = {key: value for key, value in k.items() if key != 'vocab_size'}
    # no evaluation and no checkpoint, whatever a config file says: the process is killed before
    fixed = dict(device=device, compile=compiling, dataset=name, init_from='scratch', wandb_log=False,
                 decay_lr=False, max_iters=10**6, eval_iters=1, log_interval=1)
    commands = {}

    def add(who, folder, cwd, **flags):
        script = os.path.join(os.path.abspath(folder), 'train.py')
        flags = flags_of({**flags, **fixed, 'out_dir': os.path.join(work, f'out{len(commands)}')})
        commands[who] = [sys.executable, '-u', script, *flags], cwd

    if peer:  # it reads configurator.py and data/ where it is started: nothing is written into the checkout
        link = os.path.join(work, 'configurator.py')
        os.symlink(os.path.join(os.path.abspath(peer), 'configurator.py'), link)
        theirs = {key: value for key, value in k.items() if key in THEIRS and value != 'auto'}
        add('nanoGPT', peer, work, **theirs, eval_interval=10**9)
    own = {**k, 'eval_interval': 0, 'data_dir': data_dir, 'overwrite': True}
    asked = [given['arch']] if 'arch' in given else archs.split(',')
    for where, folder in {'other': ours, 'ours': REPO}.items():
        for arch in asked if folder else ():
            add(f'{where}, {arch}', folder, folder, **{**own, 'arch': arch})
    return commands


def parameters_of(k):
    """As in GPT-2: the weights of the matrices, which is nearly all."""
    shape = {**knobs, **k}
    return 12 * shape['n_layer'] * shape['n_embd']**2 + shape['vocab_size'] * shape['n_embd']


def memory_of_training(k):
    """Bytes, roughly: 16 per parameter, logits in two dtypes and their gradient, and activations."""
    shape = {**knobs, **k}
    tokens = shape['batch_size'] * shape['block_size']
    of_a_token = 10 * shape['vocab_size'] + 40 * shape['n_layer'] * shape['n_embd']
    return 16 * parameters_of(k) + tokens * of_a_token


def flops_per_token(k):
    """Of a forward and a backward pass: PaLM, arXiv 2204.02311, appendix B, as nanoGPT counts them."""
    shape = {**knobs, **k}
    return 6 * parameters_of(k) + 12 * shape['n_layer'] * shape['n_embd'] * shape['block_size']


def each_setting():
    """Yield (size, settings) of all sizes and micro-batches that are asked for."""
    from_config = any(arg.endswith('.py') for arg in sys.argv[1:])
    names = 'config' if from_config else 'toy,baby'
    for name in (sizes or names).split(','):
        for batch in (batch_sizes or '0').split(','):
            yield name, settings(name, int(batch))


# -----------------------------------------------------------------------------
# what can be measured


def train():
    """Times of training steps. Returns the rows, a dict for each."""
    rows = []
    for name, k in each_setting():
        with tempfile.TemporaryDirectory() as work:
            commands = commands_of(k, work)
            alone = False
            if device.type == 'cuda':
                memory = torch.cuda.get_device_properties(device).total_memory
                alone = memory_of_training(k) * len(commands) > 0.8 * memory
            times = take_turns(commands, alone)
        first = next(iter(times.values()))
        for who, seconds in times.items():
            rows.append(row_of(name, who, k, seconds, first))
    print('\n'.join(table(HEAD, *map(cells_of, rows))))
    return rows


def row_of(name, who, k, times, first):
    """What is kept of a contestant with the settings k. times, first (the first contestant's): the seconds of
    the iterations, for each round."""
    shape = {**knobs, **k}
    row = {'size': name, 'contestant': who, 'parameters': parameters_of(k), 'seconds': times}
    row.update({key: shape[key] for key in ('batch_size', 'block_size', 'gradient_accumulation_steps')})
    if times is None:
        return row
    medians = [statistics.median(of_round) for of_round in times]
    row['seconds_per_iteration'] = statistics.median(medians)
    n = shape['batch_size'] * shape['block_size'] * shape['gradient_accumulation_steps']
    row['tokens_per_second'] = n / row['seconds_per_iteration']
    sheet = knobs['peak_flops'] or peak_flops_of(device)
    row['of_data_sheet'] = flops_per_token(k) * row['tokens_per_second'] / sheet if sheet else None
    if first and first is not times:
        firsts = [statistics.median(of_round) for of_round in first]
        row['ratios'] = [b / a for a, b in zip(firsts, medians)]
        row['ratio'], row['ratio_interval'] = ratio_of_medians(firsts, medians)
    return row


def ratio_of_medians(a, b, n=10_000):
    """median(b) / median(a) and its 95% interval [low, high], by drawing pairs anew n times (bootstrap)."""
    a, b = np.array(a), np.array(b)
    drawn = np.random.default_rng(1).integers(len(a), size=(n, len(a)))
    ratios = np.median(b[drawn], axis=1) / np.median(a[drawn], axis=1)
    return float(np.median(b) / np.median(a)), np.percentile(ratios, [2.5, 97.5]).tolist()


HEAD = ('size', 'micro-batch', 'contestant', 'tokens/s', 'ms per iteration', 'of the data sheet',
        "time / the first one's, of each round", 'of the medians (95% interval)')


def cells_of(row):
    micro = f"{row['batch_size']} x {row['block_size']}"
    if row['gradient_accumulation_steps'] > 1:
        micro += f" x {row['gradient_accumulation_steps']}"
    cells = [row['size'], micro, row['contestant']]
    if row['seconds'] is None:
        return [*cells, 'out of memory', '', '', '', '']
    of_rounds = [1000 * statistics.median(times) for times in row['seconds']]
    share = row['of_data_sheet']
    share = f'{share:.1%}' if share else ''
    cells += [f"{row['tokens_per_second']:,.0f}", median_and_range(of_rounds, 2), share]
    if 'ratio' not in row:
        return [*cells, '', '']
    low, high = row['ratio_interval']
    return [*cells, median_and_range(row['ratios'], 3), f"{row['ratio']:.3f} ({low:.3f} to {high:.3f})"]


def start():
    """Seconds from the command until torch is imported, --help is printed, the first step is logged."""
    help = [sys.executable, os.path.join(REPO, 'train.py'), '--help']
    commands = {'import torch': [sys.executable, '-c', 'import torch'], 'train.py --help': help}
    seconds = {}
    with tempfile.TemporaryDirectory() as work:
        steps = commands_of(settings('baby', 0), work)
        for _ in range(rounds):
            for name, command in commands.items():
                t0 = time.monotonic()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                seconds.setdefault(name, []).append(time.monotonic() - t0)
            for name, (command, cwd) in steps.items():
                contestant = Contestant(command, cwd)
                when, _ = contestant.next()
                contestant.kill()
                until = f'the first step of {name}'
                seconds.setdefault(until, []).append(when - contestant.started)
    rows = [(name, median_and_range(found, 2)) for name, found in seconds.items()]
    print('\n'.join(table(('from the command to', 'seconds'), *rows)))
    return seconds


def profile():
    """Run our train.py under torch.profiler: a trace of five steps, and the operators that take most time."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == 'cuda':
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    order = f'self_{device.type}_time_total'
    os.makedirs(traces, exist_ok=True)

    def write(trace):
        trace.export_chrome_trace(path)
        print(f'\n{path}, 5 steps\n' + trace.key_averages().table(sort_by=order, row_limit=15))

    for name, k in each_setting():
        with tempfile.TemporaryDirectory() as work:
            for who, (command, _) in commands_of(k, work).items():
                if not who.startswith('ours'):
                    continue
                batch = {**knobs, **k}['batch_size']
                path = os.path.join(traces, f"{name}-{who.removeprefix('ours, ')}-batch{batch}.json")
                steps = torch.profiler.schedule(wait=warm_up, warmup=1, active=5, repeat=1)
                with torch.profiler.profile(activities=kinds, schedule=steps, on_trace_ready=write) as trace:
                    def step(n):
                        trace.step()
                        return n == warm_up + 6
                    after_each_update(step, *command[2:])
    return traces


def sample():
    from bench_sample import sample
    names = (sizes or 'baby,baby8').split(',')
    dtype, _ = choose_dtype(knobs['dtype'], device)
    return sample(names, device, dtype, knobs['compile'], peer, tokens, rounds)


def data():
    from bench_data import data
    return data()


def prepare():
    from bench_data import prepare
    return prepare(os.path.abspath(text), rounds)


PARTS = {f.__name__: f for f in (train, profile, start, sample, data, prepare)}


def problems():
    """The mistakes in what was asked, a line each."""
    found = out_of_range(knobs, above_zero='tokens rounds turn iters warm_up vocab_size')
    if what != 'sample':
        found += [f"no such size ({name}). use {', '.join(SIZES)}"
                  for name in (sizes or '').split(',') if name and name not in SIZES]
    found += [f"no such micro-batch ({n}). use numbers above 0, as in --batch_sizes=8,16"
              for n in (batch_sizes or '1').split(',') if not (n.isdecimal() and int(n))]
    if ours is not None and not os.path.isfile(os.path.join(ours, 'train.py')):
        found.append(f"no train.py in the other checkout ({ours}). name one of flatgpt with --ours=PATH")
    if what == 'prepare' and not (text and os.path.isfile(text)):
        found.append(f"what=prepare wants a .jsonl.gz of documents ({text}). name it with --text=PATH")
    return found + check_peer(peer)


if __name__ == '__main__':
    if found := problems():
        fail(*found)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no contestant is left running
    from support.help import knobs_of
    train_knobs, _ = knobs_of(os.path.join(REPO, 'train.py'))
    device, _ = choose_device(knobs['device'])
    compiling, _ = choose_compile(knobs['compile'], device)
    print(f"{machine()}; compile {compiling}\n", flush=True)
    result = {'command': ' '.join(['python', *sys.argv]), 'machine': machine(), 'knobs': given}
    result[what] = PARTS[what]()
    if json_file:
        with open(json_file, 'w') as f:
            json.dump(result, f, indent=1)
            f.write('\n')
