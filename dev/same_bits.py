"""
Whether two trees of this project train to the same bits. The old one is a checkout of commit b754a18, from
before its files were divided anew. Prints dev/records/same_bits.md; ends with status 1 if anything differs.

    $ python dev/same_bits.py --old=CHECKOUT > dev/records/same_bits.md
"""

import argparse
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE / 'tests'))
from conftest import make_dataset

parser = argparse.ArgumentParser()
parser.add_argument('--old', type=Path, required=True, help='a checkout of b754a18')
parser.add_argument('--new', type=Path, default=HERE, help='by default the one this script is in')
args = parser.parse_args()
TREES = {'old': args.old.resolve(), 'new': args.new.resolve()}

N = 20  # iterations
BASE = ['--device=cpu', '--compile=False', '--dataset=tiny', '--block_size=32', '--batch_size=2',
        '--gradient_accumulation_steps=4', '--n_layer=2', '--n_head=2', '--n_embd=32', '--dropout=0.1',
        '--eval_interval=5', '--eval_iters=3', '--learning_rate=1e-2', '--warmup_iters=4']
NETWORKS = {'gpt2, AdamW': ['--arch=gpt2'],
            'modern, Muon': ['--arch=modern', '--matrix_optimizer=muon'],
            'llama, AdamW, wsd': ['--arch=llama', '--n_kv_head=1', '--lr_schedule=wsd']}
SHARD = {'old': '--shard=full', 'new': '--shard=0'}  # the same under its old and new name
WAYS = {  # processes, flags
    'float32': (1, ['--dtype=float32']),
    'bfloat16': (1, ['--dtype=bfloat16']),
    'two processes': (2, ['--dtype=float32']),
    'sharded over two': (2, ['--dtype=float32', SHARD['new']]),
    'deterministic': (1, ['--dtype=float32', '--deterministic']),
    'deterministic, two processes': (2, ['--dtype=float32', '--deterministic'])}
ROWS = [  # network, way, whether it is stopped halfway and resumed
    *((network, way, False) for network in ('gpt2, AdamW', 'modern, Muon') for way in WAYS),
    ('llama, AdamW, wsd', 'float32', False),
    *((network, 'float32', True) for network in NETWORKS),
    ('gpt2, AdamW', 'bfloat16', True),
    ('modern, Muon', 'two processes', True),
    ('modern, Muon', 'sharded over two', True),
    ('modern, Muon', 'deterministic, two processes', True)]
TIMES = 'seconds|^ms$|per_second|mfu|^data$|memory'  # columns of log.csv
SCRATCH = Path(tempfile.mkdtemp(prefix='same-bits-'))
os.environ['OMP_NUM_THREADS'] = '1'


def train(tree, out, processes, *flags):
    """What train.py of a tree prints."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    flags = [SHARD[tree] if flag == SHARD['new'] else flag for flag in flags]
    place = [f'--data_dir={SCRATCH}/data', f'--out_dir={out}', f'--lr_decay_iters={N}']
    command = [*launcher, TREES[tree] / 'train.py', *BASE, *place, *flags]
    done = subprocess.run(command, cwd=TREES[tree], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def bits(out):
    """A hash of the weights and the optimizer's tensors in the newest checkpoint."""
    ckpt = torch.load(sorted(out.glob('ckpt_0*.pt'))[-1], map_location='cpu', weights_only=True)
    tensors = dict(ckpt['model'])
    for i, moments in ckpt['optimizer']['state'].items():
        tensors.update({f'{i} {name}': value for name, value in moments.items()})
    digest = hashlib.sha256(f"{ckpt['iter_num']} {ckpt['best_val_loss']}".encode())
    for name in sorted(tensors):
        content = tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digest.update(f'{name} {tensors[name].dtype}'.encode() + content)
    return digest.hexdigest()[:16]


def lines(console):
    """The lines `iter` and `step`, without times."""
    times = r', time [\d.]+ms|, mfu [\d.]+%|, [\d,]+ tok/s|, data [\d.]+%|, eta \w+'
    return re.findall(r'^(?:iter|step) .*', re.sub(times, '', console), re.M)


def rows(out):
    """The rows of log.csv, without times."""
    with open(out / 'log.csv', newline='') as f:
        table = list(csv.DictReader(f))
    return [{name: value for name, value in row.items() if not re.search(TIMES, name)} for row in table]


def found(out, console):
    return {'bits': bits(out), 'console': lines(console), 'log.csv': rows(out)}


def compare(what, old, new):
    """Print a row of the table; whether everything is the same."""
    differs = [name for name in old if old[name] != new[name]]
    print(f"| {what} | `{old['bits']}` | `{new['bits']}` | {', '.join(differs) or 'nothing'} |", flush=True)
    return not differs


def compare_row(network, way, halfway):
    """Run both trees. One that is stopped halfway is resumed by its own tree, the old one by the new, too."""
    processes, flags = WAYS[way]
    flags, what, out = NETWORKS[network] + flags, f'{network}, {way}', Path(tempfile.mkdtemp(dir=SCRATCH))
    whole, half = [*flags, f'--max_iters={N}'], [*flags, f'--max_iters={N // 2}']
    if not halfway:
        ends = [found(out / tree, train(tree, out / tree, processes, *whole)) for tree in TREES]
        return compare(what, *ends)
    begun = {tree: train(tree, out / tree, processes, *half) for tree in TREES}
    shutil.copytree(out / 'old', out / 'both')
    ends = []
    for folder, first, second in (('old', 'old', 'old'), ('new', 'new', 'new'), ('both', 'old', 'new')):
        console = train(second, out / folder, processes, *whole, '--init_from=resume')
        ends.append(found(out / folder, begun[first] + console))
    same = compare(f'{what}, resumed halfway', ends[0], ends[1])
    return compare(f'{what}, begun by the old, resumed by the new', ends[0], ends[2]) and same


def main():
    make_dataset(SCRATCH / 'data')
    commit = subprocess.check_output(['git', '-C', TREES['old'], 'rev-parse', '--short', 'HEAD'], text=True)
    cpu = re.search('model name.*: (.*)', Path('/proc/cpuinfo').read_text())[1]
    print(f"""# The same bits before and after

`python dev/same_bits.py --old=CHECKOUT`; {commit.strip()} and the commit that adds this record;
torch {torch.__version__}; {os.cpu_count()} CPUs, {cpu}; {time.strftime('%Y-%m-%d')}.

{N} iterations of a tiny network with dropout 0.1 and four micro-batches per iteration. Compared: a hash of
all weights and all tensors of the optimizer, the lines `iter` and `step` of the console and the columns of
log.csv, without the times in them.

| run | bits, old | bits, new | what differs |
|---|---|---|---|""")
    same = [compare_row(*row) for row in ROWS]
    print('', 'Everything is the same.' if all(same) else 'NOT the same.', sep='\n')
    shutil.rmtree(SCRATCH)
    sys.exit(not all(same))


main()
