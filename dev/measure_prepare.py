"""
How fast text becomes ids, and ids become batches.

    $ python dev/measure_prepare.py gutenberg_train.jsonl.gz [repetitions]

prepare(): prepare.py as a whole (start of Python, reading, gzip, JSON, tokenising, disk, checksums) as a share of what tiktoken's
encode_ordinary, or its faster encode_to_numpy, alone reach on the same text in as many processes as there are cores; and the memory
that it takes. data(): a batch of 64 x 1024, from one file and from shards.
"""

import gzip
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def encode_all(texts, function, ready):
    import tiktoken
    encode = getattr(tiktoken.get_encoding('gpt2'), function)
    how = {'disallowed_special': ()} if function == 'encode_to_numpy' else {}
    encode('warm up')
    ready.wait()
    for text in texts:
        encode(text, **how)


def alone(texts, function, processes):
    """Seconds in which `processes` processes each encode all texts."""
    context = multiprocessing.get_context('fork')
    ready = context.Barrier(processes + 1)
    workers = [context.Process(target=encode_all, args=(texts, function, ready)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    ready.wait()
    t0 = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - t0


def tree_memory(pid):
    """Bytes that a process and those it started occupy; pages that they share count once."""
    total = 0
    for process in [pid, *map(int, subprocess.run(['pgrep', '-P', str(pid)], capture_output=True, text=True).stdout.split())]:
        try:
            with open(f'/proc/{process}/smaps_rollup') as f:
                total += 1024 * next(int(line.split()[1]) for line in f if line.startswith('Pss:'))
        except (OSError, StopIteration):
            pass
    return total


def whole(paths, workers, *flags):
    """Seconds and peak memory of prepare.py, from the start of Python to the last rename."""
    with tempfile.TemporaryDirectory() as folder:
        for i, path in enumerate(paths):
            os.symlink(os.path.abspath(path), os.path.join(folder, f'{i}_{os.path.basename(path)}'))
        t0, peak = time.perf_counter(), 0
        process = subprocess.Popen([sys.executable, os.path.join(REPO, 'prepare.py'), 'set', f'--input={folder}/*.*', f'--workers={workers}',
                                    f'--data_dir={folder}/data', *flags], stdout=subprocess.DEVNULL)
        while process.poll() is None:
            peak = max(peak, tree_memory(process.pid))
            time.sleep(0.1)
        assert process.returncode == 0
        return time.perf_counter() - t0, peak


def prepare(path, repetitions=3, copies=3):
    with gzip.open(path, 'rt', encoding='utf-8') as f:
        texts = [json.loads(line)['text'] for line in f]
    size = sum(len(text.encode()) for text in texts)
    print(f"{size / 1e6:.1f} MB in {len(texts)} documents; prepare.py reads them {copies} times; all in MB/s\n\n"
          f"| encode_ordinary, 1 core | {CORES} cores | encode_to_numpy, 1 core | {CORES} cores | prepare.py --workers={CORES} | --workers=1 | peak memory, MB |\n"
          "|---|---|---|---|---|---|---|")
    rows = []
    for _ in range(repetitions):
        seconds, peak = whole([path] * copies, CORES, '--tokenizer=gpt2')
        row = [n * size / alone(texts, function, n) / 1e6 for function in ('encode_ordinary', 'encode_to_numpy') for n in (1, CORES)]
        rows.append((*row, copies * size / seconds / 1e6, size / whole([path], 1, '--tokenizer=gpt2')[0] / 1e6, peak / 1e6))
        print('| ' + ' | '.join(f'{number:.1f}' for number in rows[-1]) + ' |', flush=True)
    ordinary, ordinary_all, numpy, numpy_all, ours, ours_one, _ = map(statistics.median, zip(*rows))
    print(f"\nof the medians: {ours / ordinary_all:.1%} of encode_ordinary on all {CORES} cores ({ours / (CORES * ordinary):.1%} of {CORES} times one), "
          f"{ours / numpy_all:.1%} of encode_to_numpy on all ({ours / (CORES * numpy):.1%} of {CORES} times one); "
          f"one worker: {ours_one / ordinary:.1%} and {ours_one / numpy:.1%} of one core")


def data(batch_size=64, block_size=1024, batches=300):
    from dataset import Dataset, Prefetch, train_starts
    print(f"\nbatches of {batch_size} x {block_size}, warm page cache\n\n| tokens | files | median, ms | 99% below, ms | waited with Prefetch, of 20 ms steps |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for n_tokens, shards in ((100_000_000, 1), (100_000_000, 100), (1_000_000_000, 500)):
            name = f'{n_tokens}_{shards}'
            os.makedirs(os.path.join(folder, name))
            ids = np.random.default_rng(1).integers(50257, size=n_tokens // shards).astype('<u2')
            names = ['train.bin'] if shards == 1 else [f'train_{i:06d}.bin' for i in range(shards)]
            for file in names:
                ids.tofile(os.path.join(folder, name, file))
            tokens = Dataset(name, folder).train

            def batch(i):
                return tokens.windows(train_starts(1, range(i * batch_size, (i + 1) * batch_size), tokens.n, block_size), block_size + 1)
            times = []
            for i in range(batches):
                t0 = time.perf_counter()
                batch(i)
                times.append(1000 * (time.perf_counter() - t0))
            ahead, t0 = Prefetch(batch), time.perf_counter()
            ahead.next()
            ahead.waited = 0.0  # the first one cannot be made before it is asked for
            for i in range(100):
                time.sleep(0.02)  # as a device that works
                ahead.next()
            print(f"| {n_tokens:,} | {shards} | {statistics.median(times):.2f} | {sorted(times)[int(0.99 * len(times))]:.2f} | {ahead.waited / (time.perf_counter() - t0):.2%} |", flush=True)
            ahead.close()


if __name__ == '__main__':
    prepare(os.path.abspath(sys.argv[1]), int((sys.argv[2:] or [3])[0]))
    data()
