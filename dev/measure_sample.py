"""
How fast generate() writes, beside nanoGPT's own and beside ours without the cache: `python bench.py --what=sample`.

The contestants take turns in one process, round after round, so that a slow minute of the machine hits them all; what is told is the median
and the range. Weights are random: their values change no time.
"""

import contextlib
import copy
import os
import statistics
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from measure import load_peer, median_and_range, process_memory, seconds
from model import GPT, GPTConfig
from parallel import choose_compile, compile_model

SIZES = {  # name: (texts at once, tokens, the network)
    'baby': (1, 250, dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False)),  # nanoGPT's for Shakespeare
    'baby8': (8, 250, dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False)),
    'llama': (1, 250, dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, n_kv_head=2, arch='llama')),
    'modern': (1, 250, dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, arch='modern')),
    '124M': (1, 1000, dict(vocab_size=50304)),
    '1.5B': (1, 1000, dict(vocab_size=50304, n_layer=48, n_head=25, n_embd=1600)),  # for a GPU
}
SLICES = 8  # without a cache 1,000 tokens take minutes: a few tokens are made at that many lengths, evenly spread


def bandwidth(n, device):
    """Bytes per second of memory: copied on a GPU; read on a CPU, n bytes again and again, as its caches may hold a small model."""
    if device.type == 'cuda':
        x = torch.ones(2**28, device=device)  # 1 GiB
        return 2 * x.nbytes / min(seconds(x.clone, device) for _ in range(5))
    x = torch.ones(int(n) // 4)
    return x.nbytes / min(seconds(x.sum, device) for _ in range(20))


def bytes_per_step(net, B, n, itemsize):
    """What the step of one token must read: each matrix once, and on the average half of what the cache holds in the end."""
    config = net.config
    weights = sum(m.weight.numel() for m in net.modules() if isinstance(m, torch.nn.Linear))
    lengths = [n] if n <= config.block_size else [config.block_size, config.block_size // 2]
    cache = 2 * config.n_layer * B * config.n_kv_head * (config.n_embd // config.n_head) * sum(lengths) / 2
    return itemsize * (weights + cache)


def per_token(generate, B, n, slices=None, device=torch.device('cpu')):
    """Seconds per step of generate(idx, number): all n tokens, or two at each of so many lengths from 1 to n."""
    lengths = [1] if slices is None else [max(1, round((i + 0.5) / slices * n)) for i in range(slices)]
    number = n if slices is None else 2
    prompts = [torch.zeros(B, length, dtype=torch.long, device=device) for length in lengths]
    return sum(seconds(lambda: generate(idx, number), device) for idx in prompts) / (number * len(prompts))


def sample(names, device, dtype, compile='auto', peer=None, tokens=None, rounds=5, seed=1337):
    """Tokens per second of generate() at each size of SIZES named. `peer`: a checkout of nanoGPT. `tokens`: None for the size's own.
    Returns the rows, dicts."""
    rows, gpu, (compiling, _) = [], device.type == 'cuda', choose_compile(compile, device)
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
        theirs = load_peer(peer, net).eval().to(device) if peer and config.arch == 'gpt2' else None
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
                times[way].append(per_token(generate, B, n, slices, device))
        idx = torch.randint(config.vocab_size, (B, 3), device=device)
        greedy = {'ours, no cache': net.generate(idx, 60, temperature=0, use_cache=False), 'ours, float32': net.generate(idx, 60, temperature=0)}
        greedy['nanoGPT'] = theirs.generate(idx, 60, top_k=1) if theirs else None
        first = list(times.values())[0]
        for way, seconds_each in times.items():
            itemsize = 4 if way in ('nanoGPT', 'ours, no cache', 'ours, float32') else 2
            needs = bytes_per_step(net, B, n, itemsize)
            speed, share = bandwidth(needs, device), ''
            if way not in ('nanoGPT', 'ours, no cache'):
                share = f'{needs / speed / statistics.median(seconds_each):.0%} of {speed / 1e9:.1f} GB/s'
            ratios = [a / b for a, b in zip(first, seconds_each)]  # round by round
            same = torch.equal(greedy[way], greedy['ours, no cache']) if way in greedy else None
            rows.append(dict(size=name, contestant=way, batch=B, tokens=n, seconds_per_step=seconds_each, ratio=statistics.median(ratios), bytes_per_step=needs, bandwidth=speed, same_text=same))
            print(f"| {name} | {way} | {median_and_range([B / t for t in seconds_each])} | {median_and_range(ratios, 1)} | "
                  f"{statistics.median(seconds_each) * 1e3:.2f} | {share} | {'' if same is None else 'the same' if same else 'ANOTHER'} |", flush=True)
        rows.append(dict(size=name, **measure_cache(net, B, device)))
    print('\n'.join([''] + [f"{row['size']}: the cache has {row['cache_bytes'] / 1e6:,.1f} MB as computed; {'the GPU' if gpu else 'the process'} grew by "
                            f"{row['grew'] / 1e6:,.1f} MB while it was filled, and by {row['grew_later'] / 1e6:,.1f} MB when it began anew" for row in rows if 'cache_bytes' in row]))
    if not gpu:
        print('on a GPU: not measured (none is here)')
    return rows


def measure_cache(net, B, device):
    """The cache's bytes as computed, and how the memory really grew: in the first window of a text, and behind its edge."""
    config, marks = net.config, []
    memory = torch.cuda.memory_allocated if device.type == 'cuda' else process_memory
    before = (process_memory(trim=True) if memory is process_memory else memory()) or 0  # what was freed goes back to the system, to be seen when it is taken again
    net.generate(torch.zeros(B, 1, dtype=torch.long, device=device), config.block_size + 20, temperature=0, on_token=lambda ids: marks.append(memory() or 0))
    computed = 2 * config.n_layer * B * config.n_kv_head * config.block_size * (config.n_embd // config.n_head) * 4  # float32
    return dict(cache_bytes=computed, grew=marks[config.block_size - 2] - before, grew_later=marks[-1] - marks[config.block_size])
