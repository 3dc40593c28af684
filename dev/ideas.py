"""
Ideas for the recipe, one by one: the rows of dev/records/recipe.md, each a short run of a small network,
judged by text that is kept out of training and does not race.

    $ python dev/ideas.py --gutenberg=gutenberg_train.jsonl.gz --text=tinyshakespeare.txt --at_once=2
    $ python dev/ideas.py --part=400 --only='momentum 0.85' --only='a gate per head' --gutenberg=FILE
    $ python dev/ideas.py --part=400 --only='momentum 0.85' --flags='--smear --seed=2' --gutenberg=FILE
    $ python dev/ideas.py --show      # the rows and their options

Each row runs in a process of its own with one thread: two to three minutes in the part 400, five to six in
1000 (eighteen with more than 5,000 iterations), less than half a minute on Shakespeare. The table goes to
dev/records/ideas.md and is written again after each row. A new idea is an option and a few lines in
dev/ideas_network.py, and a row here.
"""

import os
import sys
from typing import Literal

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from configurator import configure, fail, out_of_range, parse_args

# -----------------------------------------------------------------------------
gutenberg: str = None  # gutenberg_train.jsonl.gz, for the parts 400 and 1000
text: str = None  # tinyshakespeare's file. None: prepare.py downloads it
part: Literal['all', '400', '1000', 'shakespeare'] = 'all'
only: str | list = None  # a row by its name, in each part that has it; may be given several times. None: all
flags = ''  # options for all of these rows, on top of their own: '--iterations=50 --smear'
at_once = 1  # rows that run at the same time; more of them take longer each
show = False  # True: print the rows and their options, run nothing
out = os.path.join(HERE, 'dev', 'records')  # where the table goes
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import dataclasses
import multiprocessing
import tempfile
import typing
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from common import flags_of, given_flags, machine, run_script, table
from ideas_network import Options, train
from support.did_you_mean import similar
from support.files import read_json

POLAR_EXPRESS = dict(polar_from=1e-3, polar_cushion=0.02407327424182761)  # the published coefficients

CONVOLUTION = dict(momentum=0.85, conv_mlp=True)
LOCAL = dict(CONVOLUTION, pairs=16384)  # --arch=local without its near layer, and its momentum
LOCAL_CHARS = dict(CONVOLUTION, pairs=4225)  # a row for each pair of Shakespeare's 65 characters
SMALL = dict(LOCAL_CHARS, n_embd=128, matrix_lr=0.04)
TWO_HEADS = dict(LOCAL, n_head=2)
TEN_MINUTES = dict(TWO_HEADS, n_layer=3, no_attention='0', iterations=5650)
SIMPLE = dict(TWO_HEADS, norm='layernorm', qk_norm=False)
# what all rows of a part have
PARTS = {'400': {}, '1000': dict(iterations=1000),
         'shakespeare': dict(n_layer=2, norm='layernorm', qk_norm=False, iterations=180, batch_size=24,
                             block_size=64, eval_windows=1200)}
# name in dev/records/recipe.md -> options. Shakespeare's rows have other iterations in their names
ROWS = {'400': {
    'the recipe so far: --arch=modern, momentum 0.95': {},
    'momentum 0.9': dict(momentum=0.9),
    'momentum 0.85': dict(momentum=0.85),
    'momentum 0.8': dict(momentum=0.8),
    'momenta 0.8 and 0.95, half each': dict(momentum=0.8, second_momentum=0.95),
    "AdamW's beta2 0.99": dict(beta2=0.99),
    'decay that follows the learning rate, 1.0': dict(decay=1.0),
    'embedding_lr 0.3': dict(embedding_lr=0.3),
    'matrix_lr 0.05': dict(matrix_lr=0.05),
    'momentum 0.9, matrix_lr 0.02': dict(momentum=0.9, matrix_lr=0.02),
    'Polar Express, 5 iterations (momentum 0.9)': dict(POLAR_EXPRESS, momentum=0.9),
    'Polar Express, 4 iterations': dict(POLAR_EXPRESS, muon_iterations=4),
    'its construction for singular values from 0.01, 3 iterations': dict(polar_from=0.01, muon_iterations=3),
    '4 windows per iteration, 800 iterations': dict(batch_size=4, iterations=800),
    'windows of 64 bytes, from 30% on 128, from 60% on 256': dict(grow='0.3:64,0.6:128'),
    'weights averaged over the last fifth (momentum 0.9)': dict(momentum=0.9, average=0.2),
    'queries times 1.2': dict(query_scale=1.2),
    'value embeddings in each layer': dict(value_embeddings=True),
    'a learned share of the embedding in each layer': dict(embedding_share=True),
    'a gate per head': dict(head_gate=True),
    'half of each key from the position before, every other layer': dict(shifted_keys=True),
    'a learned share of the embedding before (smear)': dict(smear=True),
    'convolution of 4 before the attention': dict(conv_attention=True),
    'embedding of pairs of bytes, 8,192 rows': dict(pairs=8192),
    'the same, and of three bytes, 16,384 rows': dict(pairs=8192, triples=16384),
    'momentum 0.9, gate, share of the embedding, smear':
        dict(momentum=0.9, head_gate=True, embedding_share=True, smear=True),
    'momentum 0.85, convolution of 4 before the MLP': CONVOLUTION,
    # the next ones change that one, not each other
    'the same, and before the attention, and a share of the embedding':
        dict(CONVOLUTION, conv_attention=True, embedding_share=True),
    'the same as the bold one, and a share of the embedding': dict(CONVOLUTION, embedding_share=True),
    'and a gate per head': dict(CONVOLUTION, head_gate=True),
    'with 3 layers of 224 channels': dict(CONVOLUTION, n_layer=3, n_embd=224),
    'with matrix_lr 0.045': dict(CONVOLUTION, matrix_lr=0.045),
    'with 3 iterations of that construction': dict(CONVOLUTION, polar_from=0.01, muon_iterations=3),
    'with pairs of bytes, 16,384 rows: --arch=local': LOCAL,
    'local with a gate per head': dict(LOCAL, head_gate=True),
    'local with a decay that follows the learning rate, 0.1': dict(LOCAL, decay=0.1),
    'local with windows of 128 bytes up to 60%': dict(LOCAL, grow='0.6:128'),
    'convolutions before attention and MLP, pairs, and three bytes (32,768 rows)':
        dict(LOCAL, conv_attention=True, triples=32768),
    'convolution, pairs (8,192), three bytes, embedding_lr of these 0.3':
        dict(CONVOLUTION, pairs=8192, triples=16384, hashed_lr=0.3),
    'convolution, pairs (8,192), three bytes, share of the embedding, queries times 1.2':
        dict(CONVOLUTION, pairs=8192, triples=16384, embedding_share=True, query_scale=1.2),
    'local with 2 heads': TWO_HEADS,
    'local with 2 heads, LayerNorm, no norms on queries and keys': SIMPLE,
    'local with NorMuon': dict(LOCAL, row_beta2=0.95),
    'local with a learning rate that falls for nine tenths of the run': dict(LOCAL, decay_fraction=0.9),
    'local, 4 windows up to 30%, 460 iterations': dict(LOCAL, half_batch=0.3, iterations=460),
    'local with 2 heads, NorMuon, such a rate, 4 windows up to 30%, 460 iterations':
        dict(TWO_HEADS, row_beta2=0.95, decay_fraction=0.9, half_batch=0.3, iterations=460),
    'local with Muon head by head': dict(LOCAL, head_muon=True),
    'local with one head of keys and values': dict(LOCAL, n_kv_head=1),
    'local with an MLP of 3 times the channels': dict(TWO_HEADS, mlp_width=576),
    'local with 4,096 rows of pairs': dict(TWO_HEADS, pairs=4096),
    'local with 2 layers, their MLP of 8 times the channels': dict(TWO_HEADS, n_layer=2, mlp_width=1536),
    'local without attention in the first layer': dict(TWO_HEADS, no_attention='0'),
    'local without attention in the first two': dict(TWO_HEADS, no_attention='0,1'),
    'local without attention in the first and third': dict(TWO_HEADS, no_attention='0,2'),
    'local with 3 layers, 530 iterations': dict(TWO_HEADS, n_layer=3, iterations=530),
}, '1000': {
    'the recipe so far': {},
    'momentum 0.85': dict(momentum=0.85),
    'and the convolution before the MLP': CONVOLUTION,
    'and pairs of bytes, 16,384 rows: local': LOCAL,
    '3 layers, 1,360 iterations': dict(TWO_HEADS, n_layer=3, iterations=1360),
    '2 layers, 2,000 iterations': dict(TWO_HEADS, n_layer=2, iterations=2000),
    'the first and third of 4 layers without attention, 1,360':
        dict(TWO_HEADS, no_attention='0,2', iterations=1360),
    'the first two of 4, 1,400': dict(TWO_HEADS, no_attention='0,1', iterations=1400),
    'the first three of 4, 1,600': dict(TWO_HEADS, no_attention='0,1,2', iterations=1600),
    'the first of 3, 1,650': dict(TWO_HEADS, n_layer=3, no_attention='0', iterations=1650),
    'the same, momentum 0.9': dict(TWO_HEADS, n_layer=3, no_attention='0', iterations=1650, momentum=0.9),
    'the first two of 3, 2,100': dict(TWO_HEADS, n_layer=3, no_attention='0,1', iterations=2100),
    'the same, momentum 0.9, 1,960':
        dict(TWO_HEADS, n_layer=3, no_attention='0,1', iterations=1960, momentum=0.9),
    'the same, momentum 0.85, convolution before the attention, 1,960':
        dict(TWO_HEADS, n_layer=3, no_attention='0,1', iterations=1960, conv_attention=True),
    'the first two of 3 layers of 256 channels, 1,300':
        dict(TWO_HEADS, n_layer=3, n_embd=256, no_attention='0,1', iterations=1300),
    'the first of 2 (--arch=local --n_layer=1), 2,700':
        dict(TWO_HEADS, n_layer=2, no_attention='0', iterations=2700),
    'the same, momentum 0.9, 2,640':
        dict(TWO_HEADS, n_layer=2, no_attention='0', iterations=2640, momentum=0.9),
    'the first of 3, 5,650': TEN_MINUTES,
    'the first of 2 layers of 256 channels, 5,530': dict(TEN_MINUTES, n_layer=2, n_embd=256, iterations=5530),
    'the first of 3, 5,650, matrix_lr 0.02': dict(TEN_MINUTES, matrix_lr=0.02),
    'the first of 3, 5,650, matrix_lr 0.014': dict(TEN_MINUTES, matrix_lr=0.014),
}, 'shakespeare': {
    '192 channels, momentum 0.95, the recipe so far': {},
    'momentum 0.85': dict(momentum=0.85),
    'and convolution': CONVOLUTION,
    'and pairs (local)': LOCAL_CHARS,
    'local, momentum 0.8': dict(LOCAL_CHARS, momentum=0.8),
    'local, 3 iterations of Muon': dict(LOCAL_CHARS, polar_from=0.01, muon_iterations=3),
    'local, matrix_lr 0.04': dict(LOCAL_CHARS, matrix_lr=0.04),
    'local, matrix_lr 0.04, 110 iterations': dict(LOCAL_CHARS, matrix_lr=0.04, iterations=110),
    'local, 128 channels': dict(LOCAL_CHARS, n_embd=128),
    'local, 128 channels, matrix_lr 0.04, 200 iterations': dict(SMALL, iterations=200),
    'local, 128 channels, matrix_lr 0.04, 150 iterations': dict(SMALL, iterations=150),
    'the same with 16 windows, 150 iterations': dict(SMALL, iterations=150, batch_size=16),
}}
# -----------------------------------------------------------------------------
# texts, rows, the table


def dataset_of(part):
    return 'shakespeare_char' if part == 'shakespeare' else 'gutenberg_bytes'


def prepare(part, folder):
    """Make a part's dataset."""
    if part == 'shakespeare':
        source = [f'--input={os.path.abspath(text)}'] if text else []
    elif gutenberg is None:
        fail("no text for the parts 400 and 1000. name gutenberg_train.jsonl.gz with --gutenberg=FILE, or "
             "use --part=shakespeare")
    else:
        source = [f'--input={os.path.abspath(gutenberg)}', '--tokenizer=byte', '--val_fraction=0.1']
    run_script('prepare.py', dataset_of(part), f'--data_dir={folder}', *source)


def run_row(part, options, folder):
    """What train() returns. Of Shakespeare the last tenth of train.bin is what chooses: the records are about
    val.bin."""
    folder = os.path.join(folder, dataset_of(part))
    vocab_size = read_json(os.path.join(folder, 'meta.json'))['vocab_size']
    train_tokens, val_tokens = (np.memmap(os.path.join(folder, f'{split}.bin'), '<u2', 'r')
                                for split in ('train', 'val'))
    if part == 'shakespeare':
        cut = len(train_tokens) * 9 // 10
        train_tokens, val_tokens = train_tokens[:cut], train_tokens[cut:]
    return train(options, train_tokens, val_tokens, vocab_size)


def read_flags():
    """The options in `flags`."""
    fields = dataclasses.fields(Options)
    kinds = {field.name: list(typing.get_args(field.type) or (field.type,)) for field in fields}
    given, problems = parse_args(flags.split(), dataclasses.asdict(Options()), kinds, None)
    if problems:
        fail(*[problem.replace('--help lists', 'dev/ideas_network.py lists') for problem in problems])
    return given


def asked_rows():
    """[(part, name, Options)]; exits if a name is no row's."""
    names = [only] if isinstance(only, str) else only
    rows = [(p, name) for p in ROWS if part in ('all', p) for name in ROWS[p]]
    known, problems = [name for _, name in rows], []
    for name in names or []:
        if name not in known:
            close = similar(name, known)
            remedy = f"did you mean '{close}'?" if close else '--show lists all of them'
            problems.append(f"no such row ({name}). {remedy}")
    if problems:
        fail(*problems)
    more = read_flags()
    return [(p, name, Options(**{**PARTS[p], **ROWS[p][name], **more}))
            for p, name in rows if not names or name in names]


def write_table(results):
    """Of the rows that are done: [(part, name, Options, bits, bits without averages, ms, optimizer's ms)]."""
    lines = ['# Ideas, one by one', '', f'`python dev/ideas.py {given_flags(sys.argv[1:])}`; {machine()}.',
             '', 'Bits per byte, of Shakespeare per character, on text that was kept out of training, by the '
             'last weights; one thread per row. ms: per iteration, and what Muon and AdamW take of it.']
    for p in dict.fromkeys(p for p, *_ in results):
        rows = [('', 'iterations', 'bits', 'ms', "the optimizer's")]
        for _, name, options, bits, without, ms, optimizer_ms in (row for row in results if row[0] == p):
            bits = f'{bits:.3f}' if without is None else f'{bits:.3f}, without {without:.3f}'
            rows.append((name, f'{options.iterations:,}', bits, f'{ms:.0f}', f'{optimizer_ms:.0f}'))
        lines += ['', f'## Part {p}', '', *table(*rows)]
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, 'ideas.md'), 'w') as f:
        f.write('\n'.join(lines) + '\n')


def run(rows):
    parts, _, options = zip(*rows)
    with tempfile.TemporaryDirectory() as folder:
        for p in {dataset_of(p): p for p in parts}.values():
            prepare(p, folder)
        results = []
        os.environ['OMP_NUM_THREADS'] = '1'  # of each row's process
        spawn = multiprocessing.get_context('spawn')
        with ProcessPoolExecutor(at_once, spawn, max_tasks_per_child=1) as pool:
            for row, found in zip(rows, pool.map(run_row, parts, options, [folder] * len(rows))):
                results.append((*row, *found))
                bits, _, ms, _ = found
                print(f'{row[0]}: {row[1]}: {bits:.4f} bits, {ms:.1f} ms per iteration', flush=True)
                write_table(results)


if __name__ == '__main__':
    if problems := out_of_range(knobs, above_zero='at_once'):
        fail(*problems)
    rows = asked_rows()
    if show:
        for p, name, _ in rows:
            print(f'{p}: {name}:', *flags_of({**PARTS[p], **ROWS[p][name]}))
    else:
        run(rows)
