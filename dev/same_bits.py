"""
Check in a few minutes whether two versions of this project train alike.

    $ python dev/same_bits.py --old=CHECKOUT           # a folder, compared with the one that has this file
    $ python dev/same_bits.py --old=67db31c --only=llama,modern  # or a commit of this repository

Each case is a run of both versions' train.py with the same flags. gpt2 with AdamW in float32 in one process
must give the same bits in every weight; the others may differ by 1e-4, as sums may be reordered. Prints
a table; the exit status is 1 if a case differs by more.
"""

import os
import sys

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)
from configurator import InputError, configure

# -----------------------------------------------------------------------------
old = ''  # a checkout or a commit
new = REPO  # likewise
only = ''  # names of cases, such as 'gpt2,llama'. Empty: all
# -----------------------------------------------------------------------------
config, given = configure(globals())

import csv
import json
import random
import shutil
import subprocess
import tempfile

import numpy as np
import torch

ITERATIONS = 12
COMMON = ['--device=cpu', '--dtype=float32', '--compile=False', '--block_size=32', '--batch_size=4',
          '--gradient_accumulation_steps=2', '--n_layer=2', '--n_head=2', '--n_embd=32', '--warmup_iters=3',
          f'--lr_decay_iters={ITERATIONS}', f'--max_iters={ITERATIONS}', '--learning_rate=1e-2',
          '--eval_interval=3', '--eval_iters=2', '--log_interval=1']
MUON = ['--arch=modern', '--matrix_optimizer=muon']
CASES = {  # name: flags, number of processes, allowed difference of a weight or a loss
    'gpt2': ([], 1, 0.0),
    'bias, dropout': (['--bias=True', '--dropout=0.2'], 1, 0.0),
    'accumulation': (['--gradient_accumulation_steps=6', '--batch_size=2'], 1, 0.0),
    'no clipping': (['--grad_clip=0', '--lr_schedule=wsd'], 1, 0.0),
    'resumed': (['--dropout=0.1'], 1, 0.0),
    'llama': (['--arch=llama', '--n_kv_head=1', '--lr_schedule=linear'], 1, 1e-4),
    'documents': (['--arch=llama', '--document_mask=True'], 1, 1e-4),
    'modern': (MUON, 1, 1e-4),
    'recomputed': ([*MUON, '--activation_checkpointing=True'], 1, 1e-4),
    'conversations': (['--arch=modern', '--block_size=64', '--dropout=0.1', '--dataset=talks'], 1, 1e-4),
    'two processes': (['--dropout=0.1'], 2, 1e-4),
    'two, Muon': ([*MUON, '--dropout=0.1'], 2, 1e-4),
    'FSDP': ([*MUON, '--shard=0'], 2, 1e-4),
}


def main():
    with tempfile.TemporaryDirectory(prefix='same-bits-') as work:
        trees = {'old': checkout(old, os.path.join(work, 'old')),
                 'new': checkout(new, os.path.join(work, 'new'))}
        data_dir = os.path.join(work, 'data')
        make_documents(data_dir)
        make_conversations(trees['old'], data_dir)
        print(f"{'case':16} {'losses':>10} {'weights':>10}   largest difference")
        all_equal = True
        for name, (flags, processes, allowed) in CASES.items():
            if only and name not in only.split(','):
                continue
            folder = os.path.join(work, name.replace(' ', '-'))
            if name == 'resumed':
                runs = run_resumed(trees, folder, data_dir, flags)
            else:
                runs = run_both(trees, folder, data_dir, flags, processes)
            losses, weights = differences(runs['old'], runs['new'])
            difference = max(losses, weights)
            verdict = 'within the limit'
            if difference == 0:
                verdict = 'the same bits'
            if difference > allowed:
                verdict = 'DIFFERS'
                all_equal = False
            print(f'{name:16} {losses:10.2g} {weights:10.2g}   {verdict}', flush=True)
    sys.exit(not all_equal)


def checkout(version, folder):
    """Return the folder of a checkout; a commit is unpacked into `folder`."""
    if os.path.isdir(version):
        return os.path.abspath(version)
    archive = subprocess.run(['git', '-C', REPO, 'archive', version], stdout=subprocess.PIPE)
    if archive.returncode:
        raise InputError(f"neither a folder nor a commit: {version}. Name one: --old=CHECKOUT.")
    os.mkdir(folder)
    subprocess.run(['tar', '-x', '-C', folder], input=archive.stdout, check=True)
    return folder


def start(tree, out, data_dir, flags, processes=1):
    """Start a train.py, and return the process."""
    command = [sys.executable, 'train.py']
    if processes > 1:
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone',
                   f'--nproc_per_node={processes}', 'train.py']
    command += [f'--data_dir={data_dir}', '--dataset=bytes', f'--out_dir={out}', *COMMON, *flags]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    return subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def wait(process):
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(process.args)}\nended with status {process.returncode}\n{output[-3000:]}")


def run_both(trees, folder, data_dir, flags, processes):
    """Run both versions. Return {'old': out_dir, 'new': out_dir}."""
    runs = {name: os.path.join(folder, name) for name in trees}
    started = [start(trees[name], runs[name], data_dir, flags, processes) for name in trees]
    for process in started:
        wait(process)
    return runs


def run_resumed(trees, folder, data_dir, flags):
    """Run the first half with the old version, and resume it with both."""
    half = os.path.join(folder, 'half')
    wait(start(trees['old'], half, data_dir, [*flags, f'--max_iters={ITERATIONS // 2}']))
    for name in trees:
        shutil.copytree(half, os.path.join(folder, name), symlinks=True)
    return run_both(trees, folder, data_dir, [*flags, '--init_from=resume'], 1)


def differences(a, b):
    """Return the largest differences of two runs: of the losses in log.csv, of the weights in ckpt.pt."""
    losses = [losses_of(folder) for folder in (a, b)]
    weights = [torch.load(os.path.join(folder, 'ckpt.pt'), map_location='cpu', weights_only=True)['model']
               for folder in (a, b)]
    if losses[0].keys() != losses[1].keys() or weights[0].keys() != weights[1].keys():
        return float('inf'), float('inf')
    loss_difference = max(abs(losses[0][key] - losses[1][key]) for key in losses[0])
    weight_difference = max((weights[0][key] - weights[1][key]).abs().max().item() for key in weights[0])
    return loss_difference, weight_difference


def losses_of(folder):
    """Return {(iteration, column): loss} of log.csv, to seven digits."""
    losses = {}
    with open(os.path.join(folder, 'log.csv'), newline='') as f:
        for row in csv.DictReader(f):
            for column in ('loss', 'train_loss', 'val_loss'):
                if row.get(column):
                    losses[int(row['iter']), column] = float(f'{float(row[column]):.7g}')
    return losses


def random_words():
    draw = random.Random(1)
    return draw, [''.join(draw.choices('abcdefghij', k=draw.randint(2, 6))) for _ in range(300)]


def make_documents(data_dir):
    """Write the dataset `bytes`: documents of a few words."""
    draw, words = random_words()
    folder = os.path.join(data_dir, 'bytes')
    os.makedirs(folder)
    splits = {}
    for split, n_documents in (('train', 400), ('val', 60)):
        ids = []
        for _ in range(n_documents):
            text = ' '.join(draw.choices(words, k=draw.randint(2, 30)))
            ids += [256, *text.encode()]
        np.array(ids, dtype='<u2').tofile(os.path.join(folder, f'{split}.bin'))
        splits[split] = {'tokens': len(ids)}
    with open(os.path.join(folder, 'meta.json'), 'w') as f:
        json.dump({'tokenizer': {'kind': 'byte'}, 'vocab_size': 257, 'end_of_text': 256, 'dtype': 'uint16',
                   'splits': splits}, f)


def make_conversations(tree, data_dir):
    """Write the dataset `talks` with the old version's prepare.py."""
    draw, words = random_words()
    path = os.path.join(data_dir, 'talks.jsonl')
    with open(path, 'w') as f:
        for _ in range(300):
            messages = []
            for role in ['user', 'assistant'] * draw.randint(1, 2):
                text = ' '.join(draw.choices(words, k=draw.randint(1, 12)))
                messages.append({'role': role, 'content': text})
            f.write(json.dumps({'messages': messages}) + '\n')
    command = [sys.executable, 'prepare.py', 'talks', '--chat=True', f'--input={path}', '--tokenizer=byte',
               f'--data_dir={data_dir}']
    wait(subprocess.Popen(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))


if not old:
    raise InputError("nothing to compare with. Name a checkout or a commit: --old=67db31c.")
main()
