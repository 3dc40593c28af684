"""
How fast text becomes ids, and ids become batches: `python bench.py --what=prepare --text=gutenberg_train.jsonl.gz` and `--what=data`.

prepare(): prepare.py as a whole (start of Python, reading, gzip, JSON, tokenising, disk, checksums) as a share of what tiktoken's
encode_ordinary, or its faster encode_to_numpy, alone reach on the same text in as many processes as there are cores; and the memory
that it takes. data(): a batch of 64 x 1024, from one file and from shards.
"""

import contextlib
import gzip
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def cpu_seconds():
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def encode_all(texts, function, ready):
    import tiktoken
    encode = getattr(tiktoken.get_encoding('gpt2'), function)
    how = {'disallowed_special': ()} if function == 'encode_to_numpy' else {}
    encode('warm up')
    ready.wait()
    t0, cpu = time.perf_counter(), time.process_time()
    for text in texts:
        encode(text, **how)
    ready.wait()
    results.put((time.perf_counter() - t0, time.process_time() - cpu))


def alone(texts, function):
    """Seconds, and CPU seconds, in which as many processes as there are cores encode all texts once each."""
    global results
    context = multiprocessing.get_context('fork')
    ready, results = context.Barrier(CORES), context.Queue()
    workers = [context.Process(target=encode_all, args=(texts, function, ready)) for _ in range(CORES)]
    for worker in workers:
        worker.start()
    found = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    return max(seconds for seconds, _ in found), sum(cpu for _, cpu in found)


def tree_memory(pid):
    """Bytes that a process and those it started occupy; pages that they share count once."""
    total, processes = 0, [pid]
    with contextlib.suppress(OSError), open(f'/proc/{pid}/task/{pid}/children') as f:
        processes += map(int, f.read().split())
    for process in processes:
        try:
            with open(f'/proc/{process}/smaps_rollup') as f:
                total += 1024 * next(int(line.split()[1]) for line in f if line.startswith('Pss:'))
        except (OSError, StopIteration):
            pass
    return total


def whole(paths, workers, *flags):
    """Seconds, CPU seconds and peak memory of prepare.py, from the start of Python to the last rename."""
    with tempfile.TemporaryDirectory() as folder:
        for i, path in enumerate(paths):
            os.symlink(os.path.abspath(path), os.path.join(folder, f'{i}_{os.path.basename(path)}'))
        t0, cpu, peak = time.perf_counter(), cpu_seconds(), 0
        process = subprocess.Popen([sys.executable, os.path.join(REPO, 'prepare.py'), 'set', f'--input={folder}/*.*', f'--workers={workers}',
                                    f'--data_dir={folder}/data', *flags], stdout=subprocess.DEVNULL)
        while process.poll() is None:
            peak = max(peak, tree_memory(process.pid))
            time.sleep(0.5)
        assert process.returncode == 0
        return time.perf_counter() - t0, cpu_seconds() - cpu, peak


def prepare(path, repetitions=3, copies=3):
    with gzip.open(path, 'rt', encoding='utf-8') as f:
        texts = [json.loads(line)['text'] for line in f]
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{size:.1f} MB in {len(texts)} documents, which prepare.py reads {copies} times; MB per second, and per CPU second\n\n"
          f"| encode_ordinary, {CORES} processes | | encode_to_numpy, {CORES} processes | | prepare.py, {CORES} workers | | its peak memory, MB |\n|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for _ in range(repetitions):
        row = []
        for function in ('encode_ordinary', 'encode_to_numpy'):
            seconds, cpu = alone(texts, function)
            row += [CORES * size / seconds, CORES * size / cpu]
        seconds, cpu, peak = whole([path] * copies, CORES, '--tokenizer=gpt2')
        rows.append([*row, copies * size / seconds, copies * size / cpu, peak / 1e6])
        print('| ' + ' | '.join(f'{number:.1f}' for number in rows[-1]) + ' |', flush=True)
    columns = [f'{name} {unit}' for name in ('encode_ordinary', 'encode_to_numpy', 'prepare.py') for unit in ('MB/s', 'MB per CPU second')] + ['peak memory, MB']
    shares = [statistics.median(row[i] / row[j] for row in rows) for i, j in ((4, 0), (5, 1), (4, 2), (5, 3))]
    print("\nmedian share of encode_ordinary: {:.1%} by the clock, {:.1%} by CPU seconds; of encode_to_numpy: {:.1%} and {:.1%}".format(*shares))
    return [dict(zip(columns, row)) for row in rows]


def data(batch_size=64, block_size=1024, batches=300, sets=((100_000_000, 1), (100_000_000, 100), (1_000_000_000, 500))):
    """A batch of that size, read from sets of (tokens, files). Returns the rows, dicts."""
    from dataset import Dataset, Prefetch, train_starts
    rows = []
    print(f"batches of {batch_size} x {block_size}, warm page cache\n\n| tokens | files | batches/s | median, ms | 99% below, ms | waited with Prefetch, of 20 ms steps |")
    print('|---|---|---|---|---|---|')
    with tempfile.TemporaryDirectory() as folder:
        for n_tokens, shards in sets:
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
            row = dict(tokens=n_tokens, files=shards, milliseconds=times, waited=ahead.waited / (time.perf_counter() - t0))
            ahead.close()
            rows.append(row)
            median, most = statistics.median(times), sorted(times)[int(0.99 * len(times))]
            print(f"| {n_tokens:,} | {shards} | {1000 / median:,.0f} | {median:.2f} | {most:.2f} | {row['waited']:.2%} |", flush=True)
    return rows
