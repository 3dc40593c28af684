"""
A text of one's own: what config/mybook.py makes of texts of several sizes, beside the quick start's network.

    $ python dev/own_text.py --text=gutenberg_train.jsonl.gz
    $ python dev/own_text.py --text=FILE --sizes=0.1 --contestants='config/mybook.py --dropout=0.3'

Bits per byte over the validation split, by eval.py with the checkpoint that sample.py would take; seconds of
training. The table goes to dev/records/own_text.md.
"""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import configure, fail

# -----------------------------------------------------------------------------
text: str = None  # a .jsonl.gz with the field 'text'
sizes = '0.1,0.3,1,5,20'  # millions of characters, from the beginning of the file
contestants = 'config/quickstart.py;config/mybook.py'  # configuration and flags of each, separated by ;
seeds = 1
first_seed = 1
at_once = 1  # runs side by side, which share the cores
work = '/tmp/flatgpt-own-text'  # texts, datasets and runs
out = os.path.join(HERE, 'dev', 'records', 'own_text.md')
# -----------------------------------------------------------------------------
knobs, given = configure(globals())
if text is None or not os.path.exists(text):
    fail(f"no such text ({text}). name a .jsonl.gz with the field 'text': --text=FILE")

import concurrent.futures
import gzip
import json

from common import given_flags, machine, run_script, table, write_record
from support.files import read_json

DATA = f'--data_dir={work}/data'


def make_dataset(size):
    """A dataset of the first size * 1e6 characters, with the tokenizer that prepare.py picks; its name."""
    name = f'text_{size}'
    if not os.path.exists(os.path.join(work, 'data', name, 'meta.json')):
        path, parts, missing = os.path.join(work, f'{name}.txt'), [], int(float(size) * 1e6)
        with gzip.open(text, 'rt', encoding='utf-8') as f:
            while missing > 0 and (line := f.readline()):
                parts.append(json.loads(line)['text'][:missing])
                missing -= len(parts[-1])
        with open(path, 'w', encoding='utf-8') as f:
            f.write('\n'.join(parts))
        run_script('prepare.py', name, f'--input={path}', DATA)
    return name


def run(i, size, seed, words):
    """The row of one run."""
    name, folder = f'text_{size}', os.path.join(work, f'out-{size}-{seed}-{i}')
    run_script('train.py', f'--dataset={name}', DATA, *words, f'--dataset={name}', f'--out_dir={folder}',
               f'--seed={seed}', '--device=cpu', '--sample_interval=0', '--overwrite')
    run_script('eval.py', f'--out_dir={folder}', DATA, '--device=cpu', '--sample_tokens=0')
    found = read_json(os.path.join(folder, 'eval.json'))['texts'][f'{name}/val']
    done = read_json(os.path.join(folder, 'run.json'))
    knobs = done['knobs']
    shape = f"{knobs['n_layer']} x {knobs['n_embd']}, {knobs['block_size']} tokens"
    row = (size, ' '.join(words), seed, shape, f"{knobs['dropout']:g}", f"{done['iterations']:,}",
           f"{done['seconds']:.0f}", f"{found['bpb']:.3f}")
    print(*row, flush=True)
    return row


os.makedirs(work, exist_ok=True)
names = [make_dataset(size) for size in sizes.split(',')]
os.environ['OMP_NUM_THREADS'] = str(max(1, os.cpu_count() // at_once))
with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
    jobs = [pool.submit(run, i, size, seed, words.split())
            for size in sizes.split(',') for seed in range(first_seed, first_seed + seeds)
            for i, words in enumerate(contestants.split(';'))]
    rows = [job.result() for job in jobs]
head = ('million characters', 'configuration', 'seed', 'layers (and a near one) x channels, context',
        'dropout', 'iterations', 'seconds', 'bits per byte')
lines = ['# A text of one\'s own', '', f'`python dev/own_text.py {given_flags(sys.argv[1:])}`; {machine()}.',
         '', f'The beginning of {os.path.basename(text)}, so many characters; the tokenizer is the one that',
         "prepare.py picks for the size. Bits per byte over the validation split with the run's ckpt.pt;",
         f'seconds of training, {at_once} at a time on the cores.', '', *table(head, *rows)]
write_record(out, lines)
