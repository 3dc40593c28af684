"""
How fast it is on this machine, beside something else: a table, and the same as JSON.

    $ python bench.py --what=sample --peer=PATH_TO_NANOGPT
    $ python bench.py --what=sample --sizes=baby --rounds=9

The contestants take turns in one process, round after round, so that a slow minute of the machine hits them all; what is
told is the median and the range. Weights are random: their values change no time.
"""

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
what = 'sample'  # the only one so far
peer: str = None  # a checkout of nanoGPT, whose own generate() is the one to compare with. None: our own without the cache
sizes = 'baby,baby8,124M,modern'  # the rows of SIZES to run
tokens: int = None  # to generate. None: as the row says
rounds = 5
seed = 1337
device = 'auto'  # 'cpu', 'cuda', ...; auto: the GPU if there is one
dtype = 'auto'  # of our weights; the peer's are float32 on a CPU, and in autocast on a GPU, as in its sample.py
compile: bool | str = 'auto'  # the step of one token; auto: on GPUs
json_file: str = None  # where the numbers go. None: nowhere
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import contextlib
import copy
import ctypes
import importlib.util
import json
import os
import statistics
import sys
import time

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'dev'))
from model import GPT, GPTConfig
from parallel import choose_compile, choose_device, choose_dtype, compile_model
from races import machine

SIZES = {  # name: (texts at once, tokens, the network)
    'baby': (1, 250, dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False)),  # nanoGPT's for Shakespeare
    'baby8': (8, 250, dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False)),
    'llama': (1, 250, dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, n_kv_head=2, arch='llama')),
    'modern': (1, 250, dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, arch='modern')),
    '124M': (1, 1000, dict(vocab_size=50304)),
    '1.5B': (1, 1000, dict(vocab_size=50304, n_layer=48, n_head=25, n_embd=1600)),  # for a GPU
}
SLICES = 8  # without a cache 1,000 tokens take minutes: a few tokens are made at that many lengths, evenly spread

problems = out_of_range(knobs, above_zero='tokens rounds', words={'what': 'sample'})
names = sizes.split(',')
problems += [f"no such size ({name}). use {', '.join(SIZES)}" for name in names if name not in SIZES]
if peer is not None and not os.path.isfile(os.path.join(peer, 'model.py')):
    problems.append(f"no model.py in the peer's folder ({peer}). name a checkout of nanoGPT with --peer=PATH")
if problems:
    fail(*problems)
device, _ = choose_device(device)
dtype, _ = choose_dtype(dtype, device)
compiling, _ = choose_compile(compile, device)
gpu = device.type == 'cuda'


def seconds(f):
    """How long f() takes, the GPU's work included."""
    if gpu:
        torch.cuda.synchronize()
    t = time.perf_counter()
    f()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - t


def median_and_range(values, digits=0):
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def memory():
    """Bytes that this process has, or, on a GPU, that its tensors have."""
    if gpu:
        return torch.cuda.memory_allocated()
    with open('/proc/self/statm') as f:
        return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def bandwidth(n):
    """Bytes per second of memory: copied on a GPU; read on a CPU, n bytes again and again, as its caches may hold a small model."""
    if gpu:
        x = torch.ones(2**28, device=device)  # 1 GiB
        return 2 * x.nbytes / min(seconds(x.clone) for _ in range(5))
    x = torch.ones(int(n) // 4)
    return x.nbytes / min(seconds(x.sum) for _ in range(20))


def bytes_per_step(net, B, n, itemsize):
    """What the step of one token must read: each matrix once, and on the average half of what the cache holds in the end."""
    config = net.config
    weights = sum(m.weight.numel() for m in net.modules() if isinstance(m, torch.nn.Linear))
    lengths = [n] if n <= config.block_size else [config.block_size, config.block_size // 2]
    cache = 2 * config.n_layer * B * config.n_kv_head * (config.n_embd // config.n_head) * sum(lengths) / 2
    return itemsize * (weights + cache)


def load_peer(net):
    """The peer's network with our weights."""
    spec = importlib.util.spec_from_file_location('peer_model', os.path.join(peer, 'model.py'))
    sys.modules['peer_model'] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(None):
        theirs = module.GPT(module.GPTConfig(**net.config.model_args()))
    theirs.load_state_dict(net.state_dict())
    return theirs.eval().to(device)


def per_token(generate, B, n, slices=None):
    """Seconds per step of generate(idx, number): all n tokens, or two at each of so many lengths from 1 to n."""
    lengths = [1] if slices is None else [max(1, round((i + 0.5) / slices * n)) for i in range(slices)]
    number = n if slices is None else 2
    prompts = [torch.zeros(B, length, dtype=torch.long, device=device) for length in lengths]
    return sum(seconds(lambda: generate(idx, number)) for idx in prompts) / (number * len(prompts))


def bench_sample():
    """Tokens per second of generate() at each size. Returns the rows, dicts."""
    rows = []
    print('| size | contestant | tokens/s | times the first | ms per step | share of the bandwidth | greedy text of 60 tokens |')
    print('|---|---|---|---|---|---|---|')
    for name in names:
        B, n, args = SIZES[name]
        n = tokens or n
        torch.manual_seed(seed)
        config = GPTConfig(**args)
        net = GPT(config).eval().to(device)
        for p in net.parameters():
            if not p.count_nonzero():
                torch.nn.init.normal_(p, std=0.02)  # modern's zeros would make all logits equal
        small = copy.deepcopy(net).to_inference(device, dtype)
        static = compiling and compile_model(small, lambda: small.generate(torch.zeros(B, 1, dtype=torch.long, device=device), 4, static=True), compile,
                                             mode='reduce-overhead', dynamic=False) is None
        generator = torch.Generator(device).manual_seed(seed)
        theirs = load_peer(net) if peer and config.arch == 'gpt2' else None
        cast = torch.autocast(device.type, dtype=torch.bfloat16) if gpu else contextlib.nullcontext()  # as in nanoGPT's sample.py
        slices = SLICES if n > 300 else None

        def plain(idx, number):
            with cast:
                net.generate(idx, number, 0.8, 200, use_cache=False, generator=generator)

        def nanogpt(idx, number):
            with cast, torch.no_grad():
                theirs.generate(idx, number, temperature=0.8, top_k=200)

        def cached(idx, number):
            net.generate(idx, number, 0.8, 200, generator=generator)

        def lighter(idx, number):
            small.generate(idx, number, 0.8, 200, generator=generator, static=static)

        ways = {'nanoGPT': (nanogpt, slices)} if theirs else {}
        if not (theirs and slices):  # it takes as long as nanoGPT
            ways['ours, no cache'] = (plain, slices)
        ways['ours, float32'] = (cached, None)
        if dtype != 'float32' or static:
            ways[f'ours, {dtype}' + ', compiled' * static] = (lighter, None)
        for way, (generate, _) in ways.items():
            generate(torch.zeros(B, 1, dtype=torch.long, device=device), 8)  # warm-up
        times = {way: [] for way in ways}
        for _ in range(rounds):
            for way, (generate, slices) in ways.items():
                times[way].append(per_token(generate, B, n, slices))
        idx = torch.randint(config.vocab_size, (B, 3), device=device)
        greedy = {'ours, no cache': net.generate(idx, 60, temperature=0, use_cache=False), 'ours, float32': net.generate(idx, 60, temperature=0)}
        greedy['nanoGPT'] = theirs.generate(idx, 60, top_k=1) if theirs else None
        first = list(times.values())[0]
        for way, seconds_each in times.items():
            itemsize = 4 if way in ('nanoGPT', 'ours, no cache', 'ours, float32') else 2
            needs = bytes_per_step(net, B, n, itemsize)
            speed, share = bandwidth(needs), ''
            if way not in ('nanoGPT', 'ours, no cache'):
                share = f'{needs / speed / statistics.median(seconds_each):.0%} of {speed / 1e9:.1f} GB/s'
            ratios = [a / b for a, b in zip(first, seconds_each)]  # round by round
            same = torch.equal(greedy[way], greedy['ours, no cache']) if way in greedy else None
            rows.append(dict(size=name, contestant=way, batch=B, tokens=n, seconds_per_step=seconds_each, ratio=statistics.median(ratios), bytes_per_step=needs, bandwidth=speed, same_text=same))
            print(f"| {name} | {way} | {median_and_range([B / t for t in seconds_each])} | {median_and_range(ratios, 1)} | "
                  f"{statistics.median(seconds_each) * 1e3:.2f} | {share} | {'' if same is None else 'the same' if same else 'ANOTHER'} |", flush=True)
        rows.append(dict(size=name, **measure_cache(net, B)))
    print('\n'.join([''] + [f"{row['size']}: the cache has {row['cache_bytes'] / 1e6:,.1f} MB as computed; {'the GPU' if gpu else 'the process'} grew by "
                            f"{row['grew'] / 1e6:,.1f} MB while it was filled, and by {row['grew_later'] / 1e6:,.1f} MB when it began anew" for row in rows if 'cache_bytes' in row]))
    if not gpu:
        print('on a GPU: not measured (none is here)')
    return rows


def measure_cache(net, B):
    """The cache's bytes as computed, and how the memory really grew: in the first window of a text, and behind its edge."""
    config, marks = net.config, []
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system, to be seen when it is taken again
    before = memory()
    net.generate(torch.zeros(B, 1, dtype=torch.long, device=device), config.block_size + 20, temperature=0, on_token=lambda ids: marks.append(memory()))
    computed = 2 * config.n_layer * B * config.n_kv_head * config.block_size * (config.n_embd // config.n_head) * 4  # float32
    return dict(cache_bytes=computed, grew=marks[config.block_size - 2] - before, grew_later=marks[-1] - marks[config.block_size])


print(machine())
result = {'command': ' '.join(['python', 'bench.py', *sys.argv[1:]]), 'machine': machine(), 'knobs': knobs, what: {'sample': bench_sample}[what]()}
if json_file:
    with open(json_file, 'w') as f:
        json.dump(result, f, indent=1)
        f.write('\n')
