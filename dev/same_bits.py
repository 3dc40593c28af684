"""
Whether two trees of this project train to the same bits, on small made-up data, in less than three minutes:

    $ python dev/same_bits.py --old=CHECKOUT_OR_COMMIT
    $ python dev/same_bits.py --old=bcd6dc1 --new=HEAD --only=llama --updates   # whatever it evaluates

A tree is a folder or a commit of this repository; the new one is by default the one this script is in.
Compared: the lines `iter N: loss` and `step N:` without their times, and a hash of all tensors, weights and
optimizer, in the last checkpoint. Prints a table; ends with status 1 if anything differs.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ['OMP_NUM_THREADS'] = '1'  # before torch is imported
import numpy as np
import torch

from common import run_script

HERE = Path(__file__).resolve().parent.parent
N, HALF = 12, 6  # iterations; evaluated every 3
COMMON = ['--device=cpu', '--dtype=float32', '--compile=False', '--block_size=32', '--batch_size=4',
          '--gradient_accumulation_steps=2', '--n_layer=2', '--n_head=2', '--n_embd=32', '--warmup_iters=3',
          f'--lr_decay_iters={N}', '--learning_rate=1e-2', '--eval_interval=3', '--eval_iters=2']
MUON = '--matrix_optimizer=muon'
CASES = {
    'gpt2': ['--arch=gpt2'],
    'llama': ['--arch=llama', '--n_kv_head=1', '--lr_schedule=wsd'],
    'modern': ['--arch=modern', MUON],
    'local': ['--arch=local', MUON, '--matrix_weight_decay=0.3'],
    'dropout': ['--dropout=0.2'],
    'accumulation': ['--arch=modern', MUON, '--gradient_accumulation_steps=6', '--batch_size=2'],
    'bfloat16': ['--arch=modern', MUON, '--dtype=bfloat16'],
    'document_mask': ['--arch=llama', '--document_mask'],
    'two_processes': ['--arch=modern', MUON, '--dropout=0.1'],
    'fsdp': ['--arch=modern', MUON, '--shard=0'],
    'conversations': ['--arch=modern', '--block_size=64', '--dropout=0.1', '--dataset=talks'],
    'resumed': ['--arch=modern', MUON, '--dropout=0.1']}
PROCESSES = {'two_processes': 2, 'fsdp': 2}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--old', required=True, help='a checkout or a commit')
    parser.add_argument('--new', default=HERE, help='by default the tree that this script is in')
    parser.add_argument('--only', choices=CASES)
    parser.add_argument('--updates', action='store_true', help='not the lines of evaluations')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix='same-bits-') as scratch:
        scratch = Path(scratch)
        trees = {name: tree_of(getattr(args, name), scratch / f'tree_{name}') for name in ('old', 'new')}
        same = [compare(case, trees, scratch) for case in ([args.only] if args.only else CASES)]
    print('Everything is the same.' if all(same) else 'NOT the same.')
    sys.exit(not all(same))


def tree_of(place, folder):
    """The folder that a checkout is in; a commit is unpacked first."""
    if os.path.isdir(place):
        return Path(place).resolve()
    folder.mkdir()
    archive = subprocess.run(['git', '-C', HERE, 'archive', place], stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(['tar', '-x', '-C', folder], input=archive, check=True)
    return folder


def compare(case, trees, scratch):
    """Run a case in both trees, and print a row for it; whether all is the same."""
    flags, where = CASES[case], {name: scratch / case / name for name in trees}
    for name, tree in trees.items():
        make_data(tree, where[name], conversations=case == 'conversations')
    if case != 'resumed':
        found = [train(tree, where[name], PROCESSES.get(case, 1), *flags, f'--max_iters={N}')
                 for name, tree in trees.items()]
        return row(case, *found)
    for name, tree in trees.items():
        train(tree, where[name], 1, *flags, f'--max_iters={HALF}')
    shutil.copytree(where['old'], where['old'].with_name('both'))
    rest = [*flags, f'--max_iters={N}', '--init_from=resume']
    found = [train(trees[tree], scratch / case / folder, 1, *rest)
             for tree, folder in (('old', 'old'), ('new', 'new'), ('new', 'both'))]
    return all([row('resumed', *found[:2]), row("the new tree resumes the old one's", found[0], found[2])])


def train(tree, folder, processes, *flags):
    """What a tree's train.py leaves: its lines and a hash of the last checkpoint; or how it failed, None."""
    place = [f'--data_dir={folder}/data', '--dataset=bytes', f'--out_dir={folder}/out']
    how = {'fork': True} if processes == 1 else {
        'launcher': ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']}
    try:
        output = run_script('train.py', *COMMON, *place, *flags, cwd=tree, **how)
    except SystemExit as e:
        return [str(e)], None
    lines = re.findall(r'^(iter \d+: loss [^,\n]*|step \d+: [^\n]*)', output, re.M)
    lines = [line for line in lines if not ('--updates' in sys.argv and line.startswith('step'))]
    ckpt = torch.load(max(folder.glob('out/ckpt_0*.pt')), map_location='cpu', weights_only=True)
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors([ckpt['model'], ckpt['optimizer']]), key=lambda item: item[0]):
        digest.update(f'{name} {tensor.dtype} {tuple(tensor.shape)}'.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return lines, digest.hexdigest()[:12]


def tensors(tree, path=''):
    """Every tensor in nested dicts and lists, with its path."""
    if isinstance(tree, torch.Tensor):
        return [(path, tree)]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for name, value in items for found in tensors(value, f'{path}.{name}')]


def row(what, old, new):
    """Print a line for a case, and what differs first; whether both are the same."""
    same = old == new and None not in old  # None: it failed
    print(f"{what:36} {str(old[1]):13} {str(new[1]):13} {'same' if same else 'DIFFERS'}", flush=True)
    for a, b in itertools.zip_longest(old[0], new[0]):
        if a != b or None in old:
            print(f'    old: {a}\n    new: {b}')
            break
    return same


def make_data(tree, folder, conversations=False):
    """A dataset of bytes with documents, the same for all trees; conversations by their own prepare.py."""
    draw = random.Random(1)
    words = [''.join(draw.choices('abcdefghij', k=draw.randint(2, 6))) for _ in range(300)]
    if conversations:
        folder.mkdir(parents=True)
        talks = [{'messages': [{'role': role, 'content': ' '.join(draw.choices(words, k=draw.randint(1, 12)))}
                               for role in ('user', 'assistant') * draw.randint(1, 2)]} for _ in range(300)]
        (folder / 'talks.jsonl').write_text(''.join(json.dumps(talk) + '\n' for talk in talks))
        run_script('prepare.py', 'talks', '--chat', f'--input={folder}/talks.jsonl', '--tokenizer=byte',
                   f'--data_dir={folder}/data', '--workers=1', cwd=tree, fork=True)
        return
    data = folder / 'data' / 'bytes'
    data.mkdir(parents=True)
    splits = {}
    for split, n_documents in (('train', 400), ('val', 60)):
        ids = []
        for _ in range(n_documents):
            ids += [256, *' '.join(draw.choices(words, k=draw.randint(2, 30))).encode()]
        np.array(ids, dtype='<u2').tofile(data / f'{split}.bin')
        splits[split] = {'tokens': len(ids)}
    (data / 'meta.json').write_text(json.dumps({
        'tokenizer': {'kind': 'byte'}, 'vocab_size': 257, 'end_of_text': 256,
        'splits': splits, 'dtype': 'uint16'}))


if __name__ == '__main__':
    main()
