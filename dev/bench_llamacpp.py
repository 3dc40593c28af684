"""
How fast we write beside llama.cpp, with the same weights in the nearest dtype on the same cores.

    $ python dev/bench_llamacpp.py --env=.venv-handover       # the environment that dev/handover.py makes
    $ python dev/bench_llamacpp.py --env=... --sizes=124M --dtypes=bf16

Weights are random, as their values change no time. Each token is the likeliest one. The contestants take
turns, llama.cpp in a process of its own that waits while ours writes; keys and values have its default dtype
there, float16. The table goes to dev/records/sample_llamacpp.md.
"""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import configure, fail

# -----------------------------------------------------------------------------
env = '.venv-handover'  # an environment with llama-cpp-python
sizes = 'baby,baby8,124M,124M8,350M'
dtypes = 'f32,bf16,q8_0'
threads: int = None  # None: as many as cores
rounds = 5
work = '/tmp/flatgpt-llamacpp'  # the .gguf files
out = os.path.join(HERE, 'dev', 'records', 'sample_llamacpp.md')
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import statistics
import subprocess
import time

import torch

from common import given_flags, machine, median_and_range, table, write_record
from model import GPT, GPTConfig
from support import gguf_file
from support.packed_linear import OneRowLinear, PackedLinear

GPT2 = dict(vocab_size=50304, mlp='gelu_tanh', bias=True)
SIZES = {  # name: (texts at once, tokens, the network)
    'baby': (1, 250, dict(block_size=256, vocab_size=256, n_layer=6, n_head=6, n_embd=384, mlp='gelu_tanh')),
    '124M': (1, 100, GPT2),
    '350M': (1, 50, dict(GPT2, n_layer=24, n_head=16, n_embd=1024)),
}
SIZES['baby8'], SIZES['124M8'] = (8, *SIZES['baby'][1:]), (8, *SIZES['124M'][1:])
OURS = {'f32': 'float32', 'bf16': 'bfloat16', 'q8_0': 'bfloat16'}  # we have no weights of one byte
threads = threads or os.cpu_count()
python = os.path.join(env, 'bin', 'python')
if not os.path.exists(python):
    fail(f"no environment with llama.cpp in {env}. dev/handover.py makes one; name it with --env=FOLDER")

# runs in that environment: writes n tokens for each of B texts whenever a line comes in, and says the seconds
IN_LLAMACPP = '''
import sys, time
import llama_cpp as L
import numpy as np
path, B, n, threads = sys.argv[1], *map(int, sys.argv[2:])
L.llama_backend_init()
silent = L.llama_log_callback(lambda *_: None)
L.llama_log_set(silent, None)
model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
params = L.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = B * n, max(B, 32), max(B, 32), B
params.n_threads = params.n_threads_batch = threads
context = L.llama_init_from_model(model, params)
V = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
batch = L.llama_batch_init(B, 0, 1)
print('ready', flush=True)
for line in sys.stdin:
    L.llama_memory_clear(L.llama_get_memory(context), True)
    t0, tokens = time.perf_counter(), [0] * B
    for position in range(n):
        batch.n_tokens = B
        for i in range(B):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(tokens[i]), position, 1
            batch.seq_id[i][0], batch.logits[i] = i, True
        assert L.llama_decode(context, batch) == 0
        logits = np.ctypeslib.as_array(L.llama_get_logits(context), (B, V))
        tokens = logits.argmax(axis=1)
    print(time.perf_counter() - t0, flush=True)
'''


class LlamaCpp:

    def __init__(self, path, B, n):
        command = [python, '-c', IN_LLAMACPP, path, str(B), str(n), str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline() != 'ready\n':
            fail(f"llama.cpp could not open {path}. delete it, and run this again")

    def __call__(self):
        self.process.stdin.write('go\n')
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def ours(net, dtype, B, n):
    """Two functions: the first writes n tokens for B texts, the second does the matrices' part of that work;
    both return the seconds."""
    widths = [module.in_features for module in net.modules() if isinstance(module, torch.nn.Linear)]
    net.to_inference('cpu', dtype, n_texts=B)
    linears = [module for module in net.modules() if isinstance(module, (PackedLinear, OneRowLinear))]
    inputs = [torch.randn(B, 1, width, dtype=getattr(torch, dtype)) for width in widths]

    @torch.inference_mode()
    def write():
        t0 = time.perf_counter()
        net.generate(torch.zeros(B, 1, dtype=torch.long), n, temperature=0)
        return time.perf_counter() - t0

    @torch.inference_mode()
    def multiply():
        t0 = time.perf_counter()
        for _ in range(n):
            for linear, x in zip(linears, inputs, strict=True):
                linear(x)
        return time.perf_counter() - t0
    return write, multiply


def make(size, dtype):
    """(B, n, our network, the file with its weights)"""
    B, n, args = SIZES[size]
    torch.manual_seed(1)
    net = GPT(GPTConfig(**args)).eval()
    kind = {'kind': 'byte'} if args['vocab_size'] == 256 else {'kind': 'tiktoken', 'name': 'gpt2'}
    path = os.path.join(work, f"{size.removesuffix('8')}-{dtype}.gguf")
    if not os.path.exists(path):
        gguf_file.write(path, net.state_dict(), net.config, kind, dtype, size)
    return B, n, net, path


def main():
    os.makedirs(work, exist_ok=True)
    torch.set_num_threads(threads)
    rows = [('size', 'texts', 'dtype there, here', 'llama.cpp, tokens/s', 'ours, tokens/s', 'ratio',
             'ms per step there', 'here', 'of which matrices')]
    for size in sizes.split(','):
        for dtype in dtypes.split(','):
            B, n, net, path = make(size, dtype)
            theirs, (write, multiply) = LlamaCpp(path, B, n), ours(net, OURS[dtype], B, n)
            times = {theirs: [], write: [], multiply: []}
            for _ in range(rounds + 1):  # the first is for warming up
                for who in times:
                    times[who].append(who())
            theirs.close()
            speeds = {who: [B * n / seconds for seconds in found[1:]] for who, found in times.items()}
            ratio = statistics.median(a / b for a, b in zip(speeds[write], speeds[theirs]))
            steps = [f'{1000 * statistics.median(times[who][1:]) / n:.2f}' for who in times]
            rows.append((size.removesuffix('8'), B, f'{dtype}, {OURS[dtype]}',
                         *(median_and_range(speeds[who]) for who in (theirs, write)), f'{ratio:.2f}',
                         *steps))
            print(*rows[-1], flush=True)
    lines = ['# Sampling beside llama.cpp', '',
             f'`python dev/bench_llamacpp.py {given_flags(sys.argv[1:])}`; {machine()}; {threads} threads.',
             '', 'GPT-2s with random weights, the likeliest token each time; median of the rounds and range.',
             'baby: 6 layers of 384 channels, bytes, 250 tokens; 124M: 100 tokens; 350M: 24 layers of 1,024',
             'channels, 50 tokens. A step is one token of each text; matrices: the products with',
             'weights alone, one after the other.', '', *table(*rows)]
    write_record(out, lines)


if __name__ == '__main__':
    main()
