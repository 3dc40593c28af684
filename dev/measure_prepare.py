"""
How fast prepare.py tokenises, as a share of what tiktoken's encode_ordinary alone reaches on the same text on one core; and the
memory it takes.

    $ python dev/measure_prepare.py gutenberg_train.jsonl.gz [repetitions]
"""

import gzip
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import tiktoken

path, repetitions = os.path.abspath(sys.argv[1]), int((sys.argv[2:] or [3])[0])
repo = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with gzip.open(path, 'rt', encoding='utf-8') as f:
    texts = [json.loads(line)['text'] for line in f]
size = sum(len(text.encode()) for text in texts)
encoding = tiktoken.get_encoding('gpt2')
encoding.encode_ordinary('warm up')
ratios = []
print(f"{size / 1e6:.1f} MB in {len(texts)} documents\n\n| encode_ordinary alone, MB/s | prepare.py as a whole, MB/s | share | peak memory of prepare.py, MB |\n|---|---|---|---|")
for _ in range(repetitions):
    t0 = time.perf_counter()
    for text in texts:
        encoding.encode_ordinary(text)
    alone = time.perf_counter() - t0
    with tempfile.TemporaryDirectory() as folder:
        code = f"import runpy, sys; sys.path.insert(0, {repo!r}); sys.argv = ['prepare.py', 'g', '--input={path}', '--tokenizer=gpt2', '--data_dir={folder}']\n" \
               f"runpy.run_path({os.path.join(repo, 'prepare.py')!r}, run_name='__main__'); print([l for l in open('/proc/self/status') if 'VmHWM' in l][0].split()[1])"
        before, t0 = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        out = subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True).stdout
        whole = time.perf_counter() - t0  # from the start of Python to the last rename: gzip, JSON, disk and checksums too
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = max(1.0, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / whole)
    ratios.append(alone / (whole * cores))
    print(f"| {size / alone / 1e6:.2f} | {size / whole / 1e6:.2f} on {cores:.2f} cores | {ratios[-1]:.1%} | {int(out.split()[-1]) / 1024:.0f} |", flush=True)
print(f"\nmedian share per core used: {statistics.median(ratios):.1%}")
