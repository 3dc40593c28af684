"""
How fast it is on this machine, beside nanoGPT or another version of itself.

    $ python dev/bench.py --peer=PATH_TO_NANOGPT                # training steps of two small networks
    $ python dev/bench.py --ours=PATH_TO_ANOTHER_FLATGPT        # did a change cost speed?
    $ python dev/bench.py --what=start --ours=PATH              # --help, and the first iteration
    $ python dev/bench.py config/train_gpt2.py --batch_size=8   # of that configuration
    $ python dev/bench.py --sizes=124M --batch_sizes=8,16,32    # on a GPU: the best micro-batch
    $ python dev/bench.py --what=profile --sizes=124M           # where the time of a step is spent
    $ python dev/bench.py --what=sample --peer=PATH_TO_NANOGPT  # tokens per second of generate()

Each contestant is a train.py as it is, in a process of its own, on the same made-up tokens; the times are
those that it prints. The processes take turns of a few seconds in which the others are stopped, so that a
slow minute of the machine is slow for all. An iteration that began before its turn is left out. Large
networks on a GPU do not fit beside each other: there each turn is a new process. On a CPU nanoGPT computes
in float32, ours in bfloat16 where the CPU has it. A ratio is that of two medians over the rounds, beside the
same network of the other contestant; its 95% interval is by drawing rounds anew (bootstrap).
"""

import os
import sys
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from configurator import configure, fail, out_of_range, plain

# -----------------------------------------------------------------------------
what: Literal['train', 'start', 'profile', 'sample'] = 'train'
peer: str = None  # a checkout of nanoGPT to compare with
ours: str = None  # another checkout of flatgpt to compare with
sizes: str = None  # from SIZES. None: 'toy,baby', or the config file's; 'baby,baby8' for 'sample'
archs = 'gpt2,modern'  # of this flatgpt; --arch=llama, or a config file's, is that one alone
batch_sizes: str = None  # micro-batches to try, as '8,16,32'. None: the size's own
rounds = 10  # turns of each contestant
turn = 2.0  # seconds of each, at least
iters = 3  # whole iterations in each, at least
warm_up = 5  # iterations before
tokens: int = None  # of 'sample': how many to write. None: the size's own
traces = 'out-traces'  # of 'profile': the folder for traces, to be opened at https://ui.perfetto.dev
json_file: str = None  # where the numbers go. None: nowhere
# -----------------------------------------------------------------------------
knobs, given = configure(globals(), like=os.path.join(os.path.dirname(__file__), '..', 'train.py'))

import copy
import importlib.util
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
from model import GPT, GPTConfig
from support.compiling import compile_model
from support.cpu import to_inference
from support.devices import choose_compile, choose_device, choose_dtype
from support.devices import peak_flops_of

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
BABY = dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False)
SAMPLED = {  # name: (texts at once, tokens, the network)
    'baby': (1, 250, BABY), 'baby8': (8, 250, BABY),
    'modern': (1, 250, dict(BABY, arch='modern')),
    '124M': (1, 1000, dict(vocab_size=50304)),
    '1.5B': (1, 1000, dict(vocab_size=50304, n_layer=48, n_head=25, n_embd=1600)),  # for a GPU
}
THEIRS = (  # knobs that nanoGPT has too
    'n_layer n_head n_embd block_size batch_size gradient_accumulation_steps dropout bias dtype '
    'learning_rate weight_decay beta1 beta2 grad_clip warmup_iters').split()
# knobs of a config file that would end the run or interrupt it
INTERRUPTS = re.compile('.*_interval|budget|max_minutes|stop_val_loss|tasks')
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


def compare(times):
    """{name: (ratio of its median to its rival's, low, high, the ratio of each round)} of {name: a number for
    each round, or None}. The rival of 'ours, ARCH' is 'other, ARCH' or else nanoGPT, which is all others'."""
    found = {}
    for name, b in times.items():
        rivals = [f"other{name.removeprefix('ours')}", 'nanoGPT'] if name.startswith('ours') else ['nanoGPT']
        a = next((times[rival] for rival in rivals if times.get(rival) and rival != name), None)
        if a and b:
            a, b = np.array(a), np.array(b)
            drawn = np.random.default_rng(1).integers(len(a), size=(10_000, len(a)))
            ratios = np.median(b[drawn], axis=1) / np.median(a[drawn], axis=1)
            interval = np.percentile(ratios, [2.5, 97.5]).tolist()
            found[name] = float(np.median(b) / np.median(a)), *interval, (b / a).tolist()
    return found


def ratio_cell(compared):
    return '{:.3f} ({:.3f} to {:.3f})'.format(*compared[:3]) if compared else ''


# -----------------------------------------------------------------------------
# who takes part


def settings(name, batch):
    """The knobs of a size and those given, as a dict; with the micro-batch `batch` unless it is 0."""
    k = {**knobs, 'gradient_accumulation_steps': 1, **SIZES[name]}
    for key, value in given.items():
        if key in train_knobs and not INTERRUPTS.fullmatch(key):
            k[key] = value
    if batch:
        k['batch_size'] = batch
    per_micro = k['batch_size'] * k['block_size']
    if k['total_batch_size']:
        k['gradient_accumulation_steps'], rest = divmod(k.pop('total_batch_size'), per_micro)
        if rest:
            fail(f"total_batch_size is not a multiple of batch_size x block_size ({per_micro})")
    k['tokens'] = per_micro * k['gradient_accumulation_steps']
    # the weights of the matrices of GPT-2, which is nearly all
    k['parameters'] = 12 * k['n_layer'] * k['n_embd']**2 + k['vocab_size'] * k['n_embd']
    return k


def commands_of(k, work):
    """{name of the contestant: (command, the folder it runs in)} with the settings k."""
    data_dir = os.path.join(work, 'data')
    name = make_tokens(data_dir, k['vocab_size'])
    k = {key: value for key, value in k.items() if key in train_knobs and value != train_knobs[key]}
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


def each_setting():
    """Yield (size, settings) of all sizes and micro-batches that are asked for."""
    from_config = any(arg.endswith('.py') for arg in sys.argv[1:])
    names = 'config' if from_config else 'toy,baby'
    for name in (sizes or names).split(','):
        for batch in (batch_sizes or '0').split(','):
            yield name, settings(name, int(batch))


# -----------------------------------------------------------------------------
# what can be measured: each prints a table and returns its rows, for the JSON


def train():
    """Times of training steps."""
    rows, cells = [], []
    for name, k in each_setting():
        with tempfile.TemporaryDirectory() as work:
            # on a GPU several large networks do not fit beside each other
            alone = device.type == 'cuda' and k['parameters'] > 3e8
            times = take_turns(commands_of(k, work), alone)
        medians = {who: found and list(map(statistics.median, found)) for who, found in times.items()}
        compared = compare(medians)
        for who, found in times.items():
            row = {'size': name, 'contestant': who, 'batch_size': k['batch_size'], 'seconds': found}
            cell = [name, f"{k['batch_size']} x {k['block_size']}", who]
            if found is None:
                cell += ['out of memory', '', '', '']
            else:
                # forward and backward: PaLM, arXiv 2204.02311, appendix B, as nanoGPT counts them
                flops = 6 * k['parameters'] + 12 * k['n_layer'] * k['n_embd'] * k['block_size']
                speed = k['tokens'] / statistics.median(medians[who])
                sheet = k['peak_flops'] or peak_flops_of(device)
                share = flops * speed / sheet if sheet else None
                row |= dict(tokens_per_second=speed, of_data_sheet=share, ratio=compared.get(who))
                cell += [f'{speed:,.0f}', median_and_range([1000 * s for s in medians[who]], 2),
                         f'{share:.1%}' if sheet else '', ratio_cell(row['ratio'])]
            rows.append(row)
            cells.append(cell)
    print('\n'.join(table(('size', 'micro-batch', 'contestant', 'tokens/s', 'ms per iteration',
                           'of the data sheet', 'time, ratio (95% interval)'), *cells)))
    return rows


def start():
    """Seconds from the command until torch is imported, --help is printed, the first step is logged."""
    scripts = {'ours, --help': os.path.join(REPO, 'train.py')}
    if ours:
        scripts['other, --help'] = os.path.join(os.path.abspath(ours), 'train.py')
    commands = {name: [sys.executable, script, '--help'] for name, script in scripts.items()}
    commands['import torch'] = [sys.executable, '-c', 'import torch']
    seconds = {}
    with tempfile.TemporaryDirectory() as work:
        steps = commands_of(settings('baby', 0), work)
        for n in range(rounds):
            for name in sorted(commands, reverse=n % 2):
                t0 = time.monotonic()
                subprocess.run(commands[name], check=True, stdout=subprocess.DEVNULL)
                seconds.setdefault(name, []).append(time.monotonic() - t0)
            for name in sorted(steps, reverse=n % 2):
                contestant = Contestant(*steps[name])
                when, _ = contestant.next()
                contestant.kill()
                seconds.setdefault(f'{name}, the first step', []).append(when - contestant.started)
    compared = compare(seconds)
    cells = [(name, median_and_range(found, 2), ratio_cell(compared.get(name)))
             for name, found in seconds.items()]
    print('\n'.join(table(('from the command to', 'seconds', 'ratio (95% interval)'), *cells)))
    return {'seconds': seconds, 'ratios': compared}


def profile():
    """Run our train.py under torch.profiler: a trace of five steps, and the operators that take most time."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == 'cuda':
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    os.makedirs(traces, exist_ok=True)

    def write(trace):
        trace.export_chrome_trace(path)
        operators = trace.key_averages().table(sort_by=f'self_{device.type}_time_total', row_limit=15)
        print(f'\n{path}, 5 steps\n{operators}')

    for name, k in each_setting():
        with tempfile.TemporaryDirectory() as work:
            for who, (command, _) in commands_of(k, work).items():
                if not who.startswith('ours'):
                    continue
                path = f"{traces}/{name}-{who.removeprefix('ours, ')}-batch{k['batch_size']}.json"
                steps = torch.profiler.schedule(wait=warm_up, warmup=1, active=5, repeat=1)
                with torch.profiler.profile(activities=kinds, schedule=steps, on_trace_ready=write) as trace:
                    def step(n):
                        trace.step()
                        return n == warm_up + 6
                    after_each_update(step, *command[2:])
    return traces


def sample():
    """Tokens per second of generate(), in turns in one process; the values of the weights change no time."""
    rows, dtype = [], choose_dtype(knobs['dtype'], device)[0]
    wait = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    for name in (sizes or 'baby,baby8').split(','):
        B, n, args = SAMPLED[name]
        n = tokens or n
        torch.manual_seed(1)
        ways = samplers(GPT(GPTConfig(**args)).eval().to(device), B, dtype)
        times = {way: [] for way in ways}
        for i in range(-1, rounds):  # the first one warms up
            for way, (generate, whole) in ways.items():
                # without a cache 1,000 tokens take minutes: two are made at each of eight lengths
                lengths = [1] if whole or n <= 300 else [(2 * j + 1) * n // 16 for j in range(8)]
                number = 2 if len(lengths) > 1 else n if i >= 0 else 8
                t0 = time.perf_counter()
                for length in lengths:
                    generate(torch.zeros(B, length, dtype=torch.long, device=device), number)
                wait()
                if i >= 0:
                    times[way].append((time.perf_counter() - t0) / (number * len(lengths)))
        first = statistics.median(next(iter(times.values())))
        rows += [{'size': name, 'contestant': way, 'batch': B, 'tokens': n, 'seconds_per_step': found,
                  'ratio': first / statistics.median(found)} for way, found in times.items()]
    cells = [(row['size'], row['contestant'],
              median_and_range([row['batch'] / s for s in row['seconds_per_step']]),
              f"{row['ratio']:.1f}") for row in rows]
    print('\n'.join(table(('size', 'contestant', 'tokens/s', 'times the first'), *cells)))
    return rows


def samplers(net, B, dtype):
    """{name: (generate(idx, number), whether it is fast enough for whole texts)}."""
    generator, ways = torch.Generator(device).manual_seed(1), {}
    # as in nanoGPT's sample.py
    cast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda')
    if peer and net.config.arch == 'gpt2':
        spec = importlib.util.spec_from_file_location('peer_model', os.path.join(peer, 'model.py'))
        sys.modules['peer_model'] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        theirs = module.GPT(module.GPTConfig(**net.config.model_args())).eval().to(device)

        def nanogpt(idx, number):
            with cast, torch.no_grad():
                theirs.generate(idx, number, temperature=0.8, top_k=200)
        ways['nanoGPT'] = nanogpt, False

    def no_cache(idx, number):
        with cast:
            net.generate(idx, number, 0.8, 200, use_cache=False, generator=generator)
    ways['ours, no cache'] = no_cache, False
    small = to_inference(copy.deepcopy(net), device, dtype, compiling)
    static = compiling and compile_model(
        small, lambda: small.generate(torch.zeros(B, 1, dtype=torch.long, device=device), 4, static=True),
        knobs['compile'], mode='reduce-overhead', dynamic=False) is None

    def cached(idx, number):
        small.generate(idx, number, 0.8, 200, generator=generator, static=static)
    ways[f"ours, {dtype}{', compiled' if static else ''}"] = cached, True
    return ways


PARTS = {f.__name__: f for f in (train, start, profile, sample)}


def problems():
    """The mistakes in what was asked, a line each."""
    found = out_of_range(knobs, above_zero='tokens rounds turn iters warm_up')
    there = SAMPLED if what == 'sample' else SIZES
    found += [f"no such size ({name}). use {', '.join(there)}"
              for name in (sizes or '').split(',') if name and name not in there]
    return found + check_peer(peer) + check_peer(ours, 'ours', 'flatgpt')


if __name__ == '__main__':
    if found := problems():
        fail(*found)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no contestant is left running
    from support.help import names_at_top
    train_knobs = plain(names_at_top(os.path.join(REPO, 'train.py')))
    device, _ = choose_device(knobs['device'])
    compiling, _ = choose_compile(knobs['compile'], device)
    print(f"{machine()}; compile {compiling}\n", flush=True)
    result = {'command': ' '.join(['python', *sys.argv]), 'machine': machine(), 'knobs': given}
    result[what] = PARTS[what]()
    if json_file:
        with open(json_file, 'w') as f:
            json.dump(result, f, indent=1)
            f.write('\n')
