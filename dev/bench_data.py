"""How fast text becomes token ids, and ids become batches: dev/bench.py --what=prepare and --what=data."""

import gzip
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

from common import REPO, table
from dataset import Dataset, sample_starts
from dataset import Prefetch

CORES = os.cpu_count()


def cpu_seconds():
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def prepare(path, rounds=3, copies=3):
    """prepare.py as a whole (start of Python, reading, gzip, JSON, tokenizing, writing, checksums) beside
    tiktoken alone on text that is in memory. Returns the rows, dicts."""
    import tiktoken
    encode = tiktoken.get_encoding('gpt2').encode_ordinary
    with gzip.open(path, 'rt', encoding='utf-8') as f:
        texts = [json.loads(line)['text'] for line in f]
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f'{size:.1f} MB, which prepare.py reads {copies} times with {CORES} workers\n')
    rows = []
    for _ in range(rounds):
        t0 = time.process_time()
        for text in texts:
            encode(text)
        row = {'tiktoken, MB per CPU second': size / (time.process_time() - t0)}
        with tempfile.TemporaryDirectory() as folder:
            for i in range(copies):
                os.symlink(path, os.path.join(folder, f'{i}_{os.path.basename(path)}'))
            command = [sys.executable, os.path.join(REPO, 'prepare.py'), 'set', f'--input={folder}/*.*',
                       f'--data_dir={folder}/data', '--tokenizer=gpt2', f'--workers={CORES}']
            t0, cpu = time.perf_counter(), cpu_seconds()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            row['prepare.py, MB per CPU second'] = copies * size / (cpu_seconds() - cpu)
            row['prepare.py, MB/s'] = copies * size / (time.perf_counter() - t0)
        row['share'] = row['prepare.py, MB per CPU second'] / row['tiktoken, MB per CPU second']
        rows.append(row)
    print('\n'.join(table(rows[0], *([f'{number:.2f}' for number in row.values()] for row in rows))))
    return rows


def data(batch_size=64, block_size=1024, batches=300, sets=((10**8, 1), (10**8, 100), (10**9, 500))):
    """Time of making a batch out of datasets of (tokens, files). Returns the rows, dicts."""
    rows = []
    for n_tokens, files in sets:
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(os.path.join(folder, 'set'))
            ids = np.random.default_rng(1).integers(50257, size=n_tokens // files).astype('<u2')
            names = ['train.bin'] if files == 1 else [f'train_{i:06d}.bin' for i in range(files)]
            for name in names:
                ids.tofile(os.path.join(folder, 'set', name))
            tokens = Dataset('set', folder).train

            def batch(i):
                samples = range(i * batch_size, (i + 1) * batch_size)
                return tokens.windows(sample_starts(1, samples, tokens.n, block_size), block_size + 1)

            times = []
            for i in range(batches):
                t0 = time.perf_counter()
                batch(i)
                times.append(1000 * (time.perf_counter() - t0))
            share = waited(batch, batches // 3)
            rows.append(dict(tokens=n_tokens, files=files, milliseconds=times, waited=share))
    print(f'batches of {batch_size} x {block_size}, warm page cache\n')
    head = 'tokens', 'files', 'median, ms', '99% below, ms', 'waited with Prefetch, of 20 ms steps'
    cells = []
    for row in rows:
        median, most = np.percentile(row['milliseconds'], [50, 99])
        times = f'{median:.2f}', f'{most:.2f}'
        cells.append([f"{row['tokens']:,}", row['files'], *times, f"{row['waited']:.2%}"])
    print('\n'.join(table(head, *cells)))
    return rows


def waited(batch, steps):
    """The share of the time that a loop whose steps take 20 ms waits for its batches."""
    ahead = Prefetch(map(batch, itertools.count()))
    next(ahead)  # it cannot be made before it is asked for
    begin, waiting = time.perf_counter(), 0.0
    for _ in range(steps):
        time.sleep(0.02)
        t0 = time.perf_counter()
        next(ahead)
        waiting += time.perf_counter() - t0
    ahead.close()
    return waiting / (time.perf_counter() - begin)
