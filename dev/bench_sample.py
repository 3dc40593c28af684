"""
How fast generate() writes, beside nanoGPT's and ours without the cache: dev/bench.py --what=sample.

The contestants take turns in one process. Weights are random: their values change no time.
"""

import contextlib
import copy
import importlib.util
import os
import statistics
import sys
import time

import torch

from common import median_and_range, table
from configurator import fail
from model import GPT, GPTConfig
from support.compiling import compile_model
from support.devices import choose_compile

BABY = dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False)
SIZES = {  # name: (texts at once, tokens, the network)
    'baby': (1, 250, BABY),  # nanoGPT's for Shakespeare
    'baby8': (8, 250, BABY),
    'llama': (1, 250, dict(BABY, n_kv_head=2, arch='llama')),
    'modern': (1, 250, dict(BABY, arch='modern')),
    '124M': (1, 1000, dict(vocab_size=50304)),
    '1.5B': (1, 1000, dict(vocab_size=50304, n_layer=48, n_head=25, n_embd=1600)),  # for a GPU
}
SLICES = 8  # without a cache 1,000 tokens take minutes: two are made at that many lengths, evenly spread


def seconds(f, device):
    """How long f() takes, the device's work included."""
    wait = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    wait()
    t0 = time.perf_counter()
    f()
    wait()
    return time.perf_counter() - t0


def bandwidth(n, device):
    """Bytes per second of memory: copied on a GPU; on a CPU n bytes read again and again, as its caches may
    hold a small model."""
    if device.type == 'cuda':
        x = torch.ones(2**28, device=device)  # 1 GiB
        return 2 * x.nbytes / min(seconds(x.clone, device) for _ in range(5))
    x = torch.ones(int(n) // 4)
    return x.nbytes / min(seconds(x.sum, device) for _ in range(20))


def bytes_per_step(net, B, n, itemsize):
    """What the step of one token must read: each matrix once, and on average half of the cache."""
    config = net.config
    weights = sum(m.weight.numel() for m in net.modules() if isinstance(m, torch.nn.Linear))
    mean_length = n / 2
    if n > config.block_size:
        mean_length = 0.75 * config.block_size  # a full window continues from its half
    cache = 2 * config.n_layer * B * config.n_kv_head * (config.n_embd // config.n_head) * mean_length
    return itemsize * (weights + cache)


def per_token(generate, B, n, slices, device):
    """Seconds per step of generate(idx, number): of all n tokens, or of two at each of so many lengths."""
    lengths = [round((i + 0.5) / slices * n) for i in range(slices)] if slices else [1]
    number, total = 2 if slices else n, 0.0
    for length in lengths:
        idx = torch.zeros(B, max(1, length), dtype=torch.long, device=device)
        total += seconds(lambda: generate(idx, number), device)
    return total / (number * len(lengths))


def load_peer(folder, net):
    """nanoGPT's network, from a checkout, with the shape and the weights of `net`."""
    spec = importlib.util.spec_from_file_location('peer_model', os.path.join(folder, 'model.py'))
    sys.modules['peer_model'] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(None):
        theirs = module.GPT(module.GPTConfig(**net.config.model_args()))
    theirs.load_state_dict(net.state_dict())
    return theirs


def contestants(net, B, n, dtype, device, compile, peer):
    """{name: (generate, slices, bytes of a weight, or None without a cache)}."""
    # as in nanoGPT's sample.py
    cast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == 'cuda')
    generator = torch.Generator(device).manual_seed(1)
    slices = SLICES if n > 300 else None
    first = torch.zeros(B, 1, dtype=torch.long, device=device)
    ways = {}
    if peer and net.config.arch == 'gpt2':
        theirs = load_peer(peer, net).eval().to(device)

        def nanogpt(idx, number):
            with cast, torch.no_grad():
                theirs.generate(idx, number, temperature=0.8, top_k=200)
        ways['nanoGPT'] = nanogpt, slices, None

    def no_cache(idx, number):
        with cast:
            net.generate(idx, number, 0.8, 200, use_cache=False, generator=generator)
    if not (ways and slices):  # it takes as long as nanoGPT
        ways['ours, no cache'] = no_cache, slices, None

    def cached(idx, number):
        net.generate(idx, number, 0.8, 200, generator=generator)
    ways['ours, float32'] = cached, None, 4
    compiling, static = choose_compile(compile, device)[0], False
    small = copy.deepcopy(net).to_inference(device, dtype, n_texts=B, compiling=compiling)
    if compiling:
        note = compile_model(small, lambda: small.generate(first, 4, static=True), compile,
                             mode='reduce-overhead', dynamic=False)
        static = note is None

    def lighter(idx, number):
        small.generate(idx, number, 0.8, 200, generator=generator, static=static)
    if dtype != 'float32' or static:
        name = f'ours, {dtype}, compiled' if static else f'ours, {dtype}'
        ways[name] = lighter, None, next(small.parameters()).element_size()
    return ways


def sample(names, device, dtype, compile='auto', peer=None, tokens=None, rounds=5):
    """Tokens per second of generate() at each size named. peer: a checkout of nanoGPT. Returns the rows."""
    if unknown := [name for name in names if name not in SIZES]:
        fail(f"no such size ({', '.join(unknown)}). use {', '.join(SIZES)}")
    rows = []
    for name in names:
        B, n, args = SIZES[name]
        n = tokens or n
        torch.manual_seed(1)
        net = GPT(GPTConfig(**args)).eval().to(device)
        ways = contestants(net, B, n, dtype, device, compile, peer)
        times = {way: [] for way in ways}
        for generate, _, _ in ways.values():  # warm-up
            generate(torch.zeros(B, 1, dtype=torch.long, device=device), 8)
        for _ in range(rounds):
            for way, (generate, slices, _) in ways.items():
                times[way].append(per_token(generate, B, n, slices, device))
        first = next(iter(times.values()))
        for way, (_, _, itemsize) in ways.items():
            row = dict(size=name, contestant=way, batch=B, tokens=n, seconds_per_step=times[way], share=None)
            row['ratio'] = statistics.median(a / b for a, b in zip(first, times[way]))
            if itemsize:
                needs = bytes_per_step(net, B, n, itemsize)
                row['share'] = needs / bandwidth(needs, device) / statistics.median(times[way])
            rows.append(row)
    print('\n'.join(table(('size', 'contestant', 'tokens/s', 'times the first', "of the memory's bandwidth"),
                          *map(cells_of, rows))))
    return rows


def cells_of(row):
    speeds = [row['batch'] / seconds for seconds in row['seconds_per_step']]
    share = f"{row['share']:.0%}" if row['share'] else ''
    return [row['size'], row['contestant'], median_and_range(speeds), f"{row['ratio']:.1f}", share]
