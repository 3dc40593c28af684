"""
What a run does to the GPU, in a process of its own for dev/gpu_records.py: train.py as it is, or the parts of
it that are named below, watched from outside. Each prints what it found.

    $ python dev/gpu_watch.py machine
    $ python dev/gpu_watch.py attention --device=cuda
    $ python dev/gpu_watch.py waits train.py --max_iters=2000 --log_interval=1000 ...
"""

import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / 'dev')]

import torch
from torch.nn import functional as F

from common import after_each_update, machine

GPU = torch.cuda.is_available()


def show_machine(*_):
    """What there is: hardware, versions, programs."""
    print(machine())
    if shutil.which('nvidia-smi'):
        subprocess.run(['nvidia-smi'])
    for name in ('git', 'python', 'python3', 'gcc', 'g++', 'nvcc'):
        print(f'{name}: {shutil.which(name)}')
    for name in ('triton', 'numpy', 'tiktoken', 'matplotlib'):
        try:
            found = __import__(name).__version__
        except Exception as e:
            found = type(e).__name__
        print(f'{name}: {found}')
    print(f'Python {platform.python_version()}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs')


def attention(device):
    """Milliseconds of attention at a length that is new, and once more: cuDNN may plan each length anew."""
    device = torch.device(device.removeprefix('--device='))
    B, n_head = (8, 12) if device.type == 'cuda' else (1, 1)
    print('backends that SDPA may choose from, lengths of queries and keys: the first time, the second')
    for allowed in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        for new in (0, 1):
            for queries, keys in ((1024, 1024), (1001, 1001), (1002, 1002), (1, 777), (1, 778)):
                queries, keys = max(1, queries - 300 * new), keys - 300 * new
                q, k = (torch.randn(B, n_head, n, 64, device=device, dtype=torch.bfloat16)
                        for n in (queries, keys))
                times = []
                for _ in range(2):
                    t0 = time.perf_counter()
                    F.scaled_dot_product_attention(q, k, k, is_causal=queries > 1)
                    if device.type == 'cuda':
                        torch.cuda.synchronize()
                    times.append(1000 * (time.perf_counter() - t0))
                what = f'cudnn={allowed}, {queries} x {keys}'
                print(f'{what}: {times[0]:.2f} ms, {times[1]:.2f} ms', flush=True)


def waits(*words):
    """Run train.py; a wait for the GPU between its updates 5 and 25 is an error."""
    def check(n):
        if GPU:
            torch.cuda.set_sync_debug_mode('error' if 5 <= n < 25 else 'default')
        return n == 26
    said = 'none'
    try:
        after_each_update(check, *words)
    except RuntimeError as e:
        traceback.print_exc()
        where = traceback.extract_tb(e.__traceback__)[-1]
        said = f'{str(e).splitlines()[0][:100]} in {where.name}'
    if GPU:
        torch.cuda.set_sync_debug_mode('default')
    print(f'waits in 20 iterations: {said}', flush=True)


def growth(last, *words):
    """Run `last` updates of train.py; the memory that those after the first 200 have added."""
    marks = []

    def look(n):
        if n >= 200 and n % 100 == 0:  # the first ones are still filling the allocators
            pages = int(Path('/proc/self/statm').read_text().split()[1])
            on_gpu = torch.cuda.memory_allocated() if GPU else 0
            marks.append((pages * os.sysconf('SC_PAGE_SIZE'), on_gpu))
            print(f'update {n}: {marks[-1][0]:,} bytes of the process, {on_gpu:,} of the GPU', flush=True)
        return n == int(last)
    after_each_update(look, *words)
    grown = [(after - before) / 1e6 for before, after in zip(marks[0], marks[-1])]
    print(f'grown by {grown[0]:.1f} MB, on the GPU by {grown[1]:.3f} MB', flush=True)


def whole_logits(last, *words):
    """Run train.py with the logits of all tokens at once, however much of the memory they take."""
    from support import devices
    devices.choose_loss_chunk_size = lambda *args: 0
    after_each_update(lambda n: n == int(last), *words)


def texts(n, device, dtype):
    """Greedy texts of n tokens with the cache, without it, and by the compiled step."""
    from model import GPT, GPTConfig
    from support.compiling import compile_model
    n, device = int(n), torch.device(device)
    for arch in ('gpt2', 'llama', 'modern'):
        torch.manual_seed(1)
        shape = dict(n_layer=6, n_head=6, n_embd=384, block_size=256) if n > 50 else dict(
            n_layer=2, n_head=2, n_embd=32, block_size=32)
        net = GPT(GPTConfig(vocab_size=65, arch=arch, **shape)).to(device, getattr(torch, dtype)).eval()
        for p in net.parameters():
            if not p.count_nonzero():
                torch.nn.init.normal_(p, std=0.02)  # modern's zeros would make all logits equal
        idx = torch.arange(6, device=device).view(2, 3)
        want = net.generate(idx, n, temperature=0, use_cache=False)
        same = (want == net.generate(idx, n, temperature=0)).float().mean().item()
        print(f'{arch}, with the cache: {same:.1%} of the tokens are the same', flush=True)
        if device.type == 'cuda':
            note = compile_model(net, lambda: net.generate(idx, 4, temperature=0, static=True), 'auto',
                                 mode='reduce-overhead', dynamic=False)
            same = (want == net.generate(idx, n, temperature=0, static=True)).float().mean().item()
            print(f"{arch}, compiled: {same:.1%} of the tokens are the same {note or ''}", flush=True)
            torch._dynamo.reset()


WAYS = {'machine': show_machine, 'attention': attention, 'waits': waits, 'growth': growth,
        'whole_logits': whole_logits, 'texts': texts}
if __name__ == '__main__':
    WAYS[sys.argv[1]](*sys.argv[2:])
