"""
What training on many GPUs costs, on paper: bytes sent, the batch behind which they hide, data, checkpoints, failures. The tables of
dev/records/scaling.md.

    $ python dev/scaling.py
    $ python dev/scaling.py --measure    # and what reading ten trillion tokens costs on this machine (sparse files in /tmp)
"""

import json
import math
import resource
import sys
import tempfile
import time
from pathlib import Path

NODE = 8  # GPUs
FLOPS = 0.4 * 989e12  # of an H100 (dense bfloat16, NVIDIA's data sheet) at an MFU of 40%
NVLINK = 450e9  # bytes/s out of a GPU, and as many into it (same sheet: 900 GB/s, both ways together)
HBM = 80e9
MODELS = {'124M': 124e6, '1.5B': 1.5e9, '7B': 7e9, '70B': 70e9}
GPUS = (8, 64, 512, 1024)
# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)
FAILURES = 419 / 54 / 16384  # per GPU and day


# N parameters on G GPUs in nodes of 8. Rings: each GPU sends (n - 1) / n of what is gathered or scattered among n.
# Bytes that a GPU sends in an iteration of k micro-batches, by any link; in hybrid those over NVLink and those between nodes

def ddp(N, G, k=1):
    return 2 * (G - 1) / G * 4 * N  # float32 gradients, once however many micro-batches there are


def full(N, G, k=1, width=2):
    # 16-bit weights gathered for forward and for backward of each micro-batch (the embeddings, in float32, once for both), float32 gradients scattered once
    return (G - 1) / G * (k * 2 * width * N + 4 * N)


def hybrid(N, G, k=1):
    return full(N, NODE, k), ddp(N / NODE, max(1, G / NODE), k)  # sharded inside a node, each shard's gradients added up over the nodes


def memory(N, shards):
    """Bytes per GPU of float32 weights, gradients and AdamW's two moments; activations come on top, and two layers' 16-bit weights where they are gathered."""
    return 16 * N / shards


def gb(n):
    return f"{n / 1e9:.2f}" if n < 10e9 else f"{n / 1e9:,.0f}"


def table(head, rows):
    print('| ' + ' | '.join(head) + ' |\n' + '|---' * len(head) + '|')
    for row in rows:
        print('| ' + ' | '.join(str(cell) for cell in row) + ' |')
    print()


def sent():
    print("## Bytes sent\n\nGB that each GPU sends per iteration of one micro-batch, over any link. In brackets: 16 bytes per parameter over the GPUs that share them are more than an "
          "H100's 80 GB.\nHybrid: inside the node + between the nodes.\n")
    rows = []
    for name, N in MODELS.items():
        for G in GPUS:
            fits = lambda text, shards: text if memory(N, shards) < HBM else f"({text})"
            inside, between = hybrid(N, G)
            rows.append((name, G, fits(gb(ddp(N, G)), 1), fits(gb(full(N, G)), G), fits(f"{gb(inside)} + {gb(between)}", NODE)))
    table(('model', 'GPUs', 'DDP', 'FSDP full', 'hybrid'), rows)


def batch():
    """N drops out: bytes and FLOPs both grow with it. Forward makes 2 N FLOPs per token, backward 4 N. A ring through all GPUs leaves each node once, so of the 64 N bytes
    that its GPUs send, 8 N leave it; those of hybrid's eight rings of N / 8 parameters are as many."""
    print("## Tokens per GPU and micro-batch from which on sending hides behind computing\n\nDDP and hybrid's second half: gradients (8 bytes per parameter out of each node) behind the backward "
          "pass of the last micro-batch. FSDP: weights and gradients\n(2 + 4 bytes per parameter) behind that of the last micro-batch; the others want two thirds of it (2 bytes behind the forward pass). The size of the model drops out. "
          "Links: out of a whole node, shared by its 8 GPUs.\n")
    rows = [('NVLink, 450 GB/s per GPU, one node', *(f"{FLOPS * bytes / 4 / NVLINK:,.0f}" for bytes in (8, 6)))]
    for gbit in (100, 200, 400, 800, 1600, 3200, 6400):
        per_gpu = {800: ', or 100 per GPU', 1600: ', or 200 per GPU', 3200: ', or 400 per GPU', 6400: ', or 800 per GPU'}.get(gbit, '')
        rows.append((f"{gbit} Gbit/s per node{per_gpu}", *(f"{FLOPS * bytes / 4 / (gbit / 8 * 1e9):,.0f}" for bytes in (8, 6))))
    table(('link', 'DDP, hybrid', 'FSDP full'), rows)


def ten_trillion():
    print("## 1,024 GPUs and 10 trillion tokens\n")
    rows, G, block = [], 1024, 2048
    for name, N in MODELS.items():
        speed = FLOPS * G / (6 * N)
        rows.append((name, f"{speed / 1e6:,.2f}", f"{10e12 / speed / 86400:,.1f}", f"{2 * speed / 1e6:,.1f}", f"{speed / block:,.0f}", gb(12 * N), f"{12 * N / 2e9:,.0f}", f"{12 * N / 2e9 / (G / NODE):,.1f}"))
    table(('model', 'million tokens/s', 'days', 'MB/s read in all (uint16)', 'reads/s of 2,048 tokens', 'checkpoint, GB', 's to write it by one host at 2 GB/s', 'by all 128'), rows)


def failures():
    print("## Failures\n\n419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783): "
          f"{1e4 * FAILURES:.2f} per 10,000 GPU-days. Lost = writing, and with each failure half an interval\nand five minutes of starting again. Best interval: sqrt(2 x write time x MTBF) (Young 1974; Daly 2006).\n")
    rows = []
    for G in (8, 64, 512, 1024, 16384):
        mtbf = 86400 / (FAILURES * G)
        for write in (1, 42, 420):  # seconds during which nobody trains
            best, restart = math.sqrt(2 * write * mtbf), 300
            lost = lambda interval: 24 * (write / interval + (interval / 2 + restart) / mtbf)
            rows.append((f"{G:,}", f"{mtbf / 3600:,.1f} h" if mtbf < 2e6 else f"{mtbf / 86400:,.0f} days", write, f"{best / 60:,.0f} min", *(f"{60 * lost(t):.1f}" if lost(t) < 16 else 'most' for t in (best, 600, 3600, 6 * 3600))))
    table(('GPUs', 'time between failures', 's to write', 'best interval', 'minutes lost per day at it', 'at 10 min', 'at 1 h', 'at 6 h'), rows)


def measure(tokens=10**13, shard=5 * 10**8, block=2048, samples=2000):
    """Opening and reading a dataset of ten trillion tokens: holes, so no disk is asked, and what is left is the work of Python and the file system."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from dataset import Dataset, chunk_of_starts, train_starts
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / 'large'
        data.mkdir()
        shards = [{'file': f'train_{i:06d}.bin', 'tokens': shard} for i in range(tokens // shard)]
        for part in shards:
            with open(data / part['file'], 'wb') as f:
                f.truncate(2 * shard)
        meta = {'tokenizer': {'kind': 'byte'}, 'vocab_size': 257, 'end_of_text': 256, 'dtype': 'uint16', 'splits': {'train': {'tokens': tokens, 'shards': shards}}}
        (data / 'meta.json').write_text(json.dumps(meta))
        t0 = time.process_time()
        train = Dataset('large', folder).train
        opened = time.process_time() - t0
        times = []
        for chunk in range(20):
            t0 = time.process_time()
            chunk_of_starts(1337, 1000 + chunk, tokens, block)
            times.append(time.process_time() - t0)
        starts = train_starts(1337, range(samples), tokens, block)
        t0 = time.process_time()
        for start in starts:
            train.windows([start], block + 1)
        read = (time.process_time() - t0) / samples
    print(f"measured, seconds of one core: {len(shards):,} shards of {shard:,} tokens: {opened:.2f} s to open the dataset (a stat of each file, by every process), {1e3 * min(times):.2f} ms for the order of "
          f"4,096 samples, {1e6 * read:.0f} us to read one ({block} tokens; nearly each one opens another file), {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == '__main__':
    sent()
    batch()
    ten_trillion()
    failures()
    if '--measure' in sys.argv:
        measure()
