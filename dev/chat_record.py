"""
Does finetuning on conversations work? The made task of dev/chat_task.py: a small network of bytes is trained
on Python's standard library or on books, then finetuned for some minutes, in three ways, seed by seed;
questions that it has not seen are asked before and after.

    $ python dev/chat_record.py --at_once=2
    $ python dev/chat_record.py --books=gutenberg_train.jsonl.gz --flags=--matrix_lr=0.015

masked, packed      as train.py does it: only answers are learned, whole conversations share a window
unmasked, packed    questions are learned too: the mask is all ones
masked, padded      one conversation in each window, the rest of it padding that is not learned

A minute is as many iterations as fit into it at the pace of the fastest of five short runs. The table goes to
dev/records/chat.md.
"""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import configure, fail

# -----------------------------------------------------------------------------
books: str = None  # text to train on first, as for prepare.py --input. None: Python's standard library
seeds = 3
first_seed = 1
minutes = 5.0  # of finetuning
iters: int = None  # of finetuning, instead of minutes
book_iters = 4000  # iterations of training on that text; 0: finetune random weights
ways = 'masked_packed,unmasked_packed,masked_padded'
at_once = 1  # runs side by side, which share the cores; the pace is measured before
flags = ''  # more of train.py's, for finetuning: '--matrix_lr=0.02'
work = '/tmp/flatgpt-chat'  # datasets and runs; the run on the books is not made again
out = os.path.join(HERE, 'dev', 'records', 'chat.md')
# -----------------------------------------------------------------------------
knobs, given = configure(globals())
WAYS = 'masked_packed', 'unmasked_packed', 'masked_padded'
ways = ways.split(',')
if seeds < 1 or at_once < 1 or set(ways) - set(WAYS):
    fail(f"nothing to run (seeds={seeds}, at_once={at_once}, ways={','.join(ways)}). use 1 or more, and ways "
         f"from {', '.join(WAYS)}")

import concurrent.futures
import hashlib
import json
import shutil
import statistics

import numpy as np

from common import given_flags, machine, run_script, table, write_record
from support.curves import points, read_log
from support.files import read_json, write_json

# without norms on queries and keys: they bound the scores, and a lookup wants to look at one place alone
NET = ('--arch=local --norm=layernorm --qk_norm=False --n_layer=4 --n_head=2 --n_embd=128 --block_size=256 '
       '--batch_size=8 --gradient_accumulation_steps=1 --device=cpu')
RECIPE = ('--matrix_optimizer=muon --momentum=0.85 --matrix_lr=0.03 --embedding_lr=0.1 --learning_rate=0.01 '
          '--weight_decay=0 --beta1=0.8 --beta2=0.95 --adam_eps=1e-10 --grad_clip=0 --warmup_iters=0 '
          '--lr_schedule=wsd --decay_fraction=0.7')
QUIET = '--overwrite --eval_interval=0 --eval_iters=20 --log_interval=10 --keep_checkpoints=1'
KINDS = 'sum', 'reverse', 'sort', 'lookup'
DATA = f'--data_dir={work}/data'


def prepare(name, *more):
    if not os.path.exists(os.path.join(work, 'data', name, 'meta.json')):
        run_script('prepare.py', name, DATA, *more)


def dataset_of(way):
    return 'made' if way == 'masked_packed' else way


def change_dataset(way):
    """Make the dataset of conversations for another way than train.py's own."""
    source, folder = os.path.join(work, 'data', 'made'), os.path.join(work, 'data', dataset_of(way))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    meta = read_json(os.path.join(folder, 'meta.json'))
    for split, entry in meta['splits'].items():
        def path(end):
            return os.path.join(folder, f'{split}.{end}')
        if way == 'unmasked_packed':
            ones = np.full(os.path.getsize(path('mask')), 255, np.uint8)
            ones.tofile(path('mask'))
        else:
            pad(path, entry, meta['dtype'])
        content = b''.join(open(path(end), 'rb').read() for end in ('mask', 'starts'))
        entry['mask_sha256'] = hashlib.sha256(content).hexdigest()
    write_json(os.path.join(folder, 'meta.json'), meta)


def pad(path, entry, dtype, length=257):
    """Lengthen each conversation of a split, whose files are path(end), to fill a window of 256."""
    ids, starts = np.fromfile(path('bin'), dtype), np.fromfile(path('starts'), '<u8').astype(int)
    mask = np.unpackbits(np.fromfile(path('mask'), np.uint8), count=len(ids), bitorder='little')
    lengths = np.diff(np.append(starts, len(ids)))
    ends = np.cumsum(np.maximum(lengths, length))
    new_ids, new_mask = np.zeros(ends[-1], ids.dtype), np.zeros(ends[-1], np.uint8)
    new_starts = np.concatenate(([0], ends[:-1]))
    for start, n, at in zip(starts, lengths, new_starts):
        new_ids[at:at + n], new_mask[at:at + n] = ids[start:start + n], mask[start:start + n]
    new_ids.tofile(path('bin'))
    np.packbits(new_mask, bitorder='little').tofile(path('mask'))
    new_starts.astype('<u8').tofile(path('starts'))
    entry.update(tokens=len(new_ids), sha256=hashlib.sha256(new_ids.tobytes()).hexdigest())


def train(name, dataset, seed, *more):
    folder = os.path.join(work, name)
    run_script('train.py', f'--dataset={dataset}', DATA, f'--out_dir={folder}', f'--seed={seed}',
               *NET.split(), *RECIPE.split(), *QUIET.split(), *more)
    return folder


def finetune(name, way, seed, n, *more):
    start = [f'--init_from={work}/books-{book_iters}'] if book_iters else []
    return train(name, dataset_of(way), seed, *start, f'--max_iters={n}',
                 *flags.split(), *more)


def ask(folder):
    """Percent of right answers: {kind: ..., 'all': ...}."""
    run_script('eval.py', f'--out_dir={folder}', DATA, '--split=none', '--device=cpu', '--sample_tokens=0',
               f'--tasks={work}/questions.jsonl')
    with open(os.path.join(folder, 'eval.json')) as f:
        tasks = json.load(f)['tasks']
    percent = {name.split(', ')[-1]: 100 * entry['accuracy'] for name, entry in tasks.items()}
    percent['all'] = percent.pop('questions.jsonl')
    return percent


def pace():
    """Seconds per iteration of finetuning in the fastest of five short runs."""
    medians = []
    for _ in range(5):
        folder = finetune('pace', 'masked_packed', 1, 60, '--log_interval=1')
        medians.append(np.median([ms for _, ms in points(read_log(folder), 'iter', 'ms')[1:]]) / 1000)
    return min(medians)


def main():
    os.makedirs(work, exist_ok=True)
    run_script('dev/chat_task.py', f'--to={work}')
    text = [f'--input={books}', '--tokenizer=byte'] if books else []
    prepare('books' if books else 'pystdlib', *text)
    prepare('made', '--chat', f'--input={work}/train.jsonl', '--tokenizer=byte')
    if book_iters and not os.path.exists(f'{work}/books-{book_iters}/report.md'):
        train(f'books-{book_iters}', 'books' if books else 'pystdlib', 1, f'--max_iters={book_iters}')
    for way in set(ways) - {'masked_packed'}:
        change_dataset(way)
    seconds = None if iters else pace()
    n = iters or int(60 * minutes / seconds)
    rows = [('', 'seed', *KINDS, 'all')]

    def row(name, seed, percent):
        rows.append((name, seed, *(f'{percent[kind]:.1f}' for kind in (*KINDS, 'all'))))
        print(*rows[-1], flush=True)

    still = [f'--{name}=1e-9' for name in ('learning_rate', 'matrix_lr', 'embedding_lr')]
    row('before', 1, ask(finetune('before', 'masked_packed', 1, 1, *still)))  # a checkpoint with the roles
    os.environ['OMP_NUM_THREADS'] = str(max(1, os.cpu_count() // at_once))

    def run(seed, way):
        return seed, way, ask(finetune(f'{way}-{seed}', way, seed, n))
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        jobs = [pool.submit(run, seed, way) for seed in range(first_seed, first_seed + seeds)
                for way in ways]
        for job in concurrent.futures.as_completed(jobs):
            seed, way, percent = job.result()
            row(way.replace('_', ', '), seed, percent)
    for way in ways:
        own = [cells for cells in rows if cells[0] == way.replace('_', ', ')]
        means = (statistics.mean(float(cells[i]) for cells in own) for i in range(2, 7))
        rows.append((own[0][0], 'mean', *(f'{mean:.1f}' for mean in means)))
    minutes_of = f', {minutes:g} minutes at the {1000 * seconds:.0f} ms of one run alone' if seconds else ''
    lines = ['# A made task: does finetuning on conversations work?', '',
             f'`python dev/chat_record.py {given_flags(sys.argv[1:])}`; {machine()}.', '',
             'dev/chat_task.py writes 20,000 conversations of four kinds and 1,000 questions that are in '
             'none of them.', f'Network: `{NET}`, bytes. Recipe: `{RECIPE}`.',
             f"Trained on {'books' if books else 'the source of the standard library'} for {book_iters:,} "
             f'iterations, then finetuned for {n:,}{minutes_of}.',
             'Percent of 1,000 answers that are right, greedily, 250 of each kind.', '', *table(*rows)]
    write_record(out, lines)


if __name__ == '__main__':
    main()
