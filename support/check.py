"""
Does train.py still keep its promises after an edit? Takes about a minute on a laptop:

    $ python -m support.check [config files and flags, as for train.py]

Runs train.py as it is a few times, with a tiny network, on made-up text and a CPU, and says of each promise
whether it holds: two processes that together give the losses of one, a resume with the
same bits, the same text with and without a cache of keys and
values. Ends with status 1 if one does not.
"""

import os
import random
import subprocess
import sys
import tempfile

import numpy as np
import torch

from model import GPT, KVCache
from support import load
from support.files import write_json
from support.report import read_log

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
N = 8  # iterations
TINY = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=32', '--batch_size=2', '--dropout=0.1',
        '--token_noise=0.1', '--gradient_accumulation_steps=4', f'--lr_decay_iters={N}', '--warmup_iters=2',
        '--learning_rate=1e-2', '--eval_interval=4', '--eval_iters=2',
        '--log_interval=1', '--device=cpu', '--dtype=float32', '--compile=False', '--dataset=check']


def make_text(folder):
    """A dataset of a few thousand ids, each likely after the one before."""
    os.makedirs(folder)
    steps = random.Random(1).choices((1, 2, 5), k=20_000)
    ids = np.cumsum(steps) % 60
    ids[:18_000].astype('<u2').tofile(os.path.join(folder, 'train.bin'))
    ids[18_000:].astype('<u2').tofile(os.path.join(folder, 'val.bin'))
    write_json(os.path.join(folder, 'meta.json'), {'vocab_size': 60})


def train(flags, place, name, *more, processes=1):
    """The folder of a run of train.py."""
    launcher = [] if processes == 1 else ['-m', 'torch.distributed.run', '--standalone',
                                          f'--nproc_per_node={processes}']
    out = os.path.join(place, name)
    done = subprocess.run([sys.executable, *launcher, os.path.join(REPO, 'train.py'), *flags, *TINY,
                           f'--data_dir={place}', f'--out_dir={out}', *more],
                          env={**os.environ, 'OMP_NUM_THREADS': '1'}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"BROKEN train.py ends with status {done.returncode}: {done.stderr}")
    return out


def resume_differs(flags, place):
    """What a resume does otherwise than a run that goes through, or None."""
    train(flags, place, 'halves', '--max_iters=4')
    halves = train(flags, place, 'halves', '--init_from=resume', f'--max_iters={N}')
    a, b = (load.read(os.path.join(out, 'ckpt.pt'))['model'] for out in (os.path.join(place, 'one'), halves))
    other = [name for name in a if not torch.equal(a[name], b[name])]
    if other:
        return (f"{len(other)} of {len(a)} tensors differ, {other[0]} first. is a batch, a mask or noise "
                "drawn from a random state that no checkpoint holds, is something missing in state()?")


def processes_differ(flags, place):
    """What two processes do otherwise than one, or None."""
    two = train(flags, place, 'two', f'--max_iters={N}', processes=2)
    apart = np.nanmax(np.abs(read_log(os.path.join(place, 'one'))['loss'] - read_log(two)['loss']))
    if not apart < 1e-3:
        return (f"losses differ by {apart:.2g}. is the loss divided by the micro-batches of all processes, "
                "are batch and dropout drawn by the number of the micro-batch?")


def cache_differs(flags, place):
    """Where logits with the cache are others than those of the whole context, or None."""
    model, _ = load.model_and_tokenizer(GPT, os.path.join(place, 'one'))
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:  # as after long training: attention looks far and near
                p.normal_(std=0.3)
        idx = torch.randint(60, (2, 32))
        whole, cache = model(idx, full_logits=True)[0], KVCache(model, 2, 32)
        for at in range(32):
            logits = model(idx[:, at:at + 1], full_logits=True, cache=cache.advance(1))[0]
            apart = (logits[:, 0] - whole[:, at]).abs().max().item()
            if apart > 1e-3:
                return (f"logits of position {at} differ by {apart:.2g}. is a mask or a position computed "
                        "for the whole context alone? GPT.attention_mask is asked by both")


def main():
    flags, broken = sys.argv[1:], False
    with tempfile.TemporaryDirectory(prefix='check-') as place:
        make_text(os.path.join(place, 'check'))
        train(flags, place, 'one', f'--max_iters={N}')
        for promise, differs in (
                ('a resume gives the same bits', resume_differs),
                ('two processes give the losses of one', processes_differ),
                ('a sample with the cache is one without', cache_differs)):
            found = differs(flags, place)
            broken = broken or bool(found)
            print(f"BROKEN {promise}: {found}" if found else f"ok     {promise}", flush=True)
    sys.exit(int(broken))


if __name__ == '__main__':
    main()
