"""
Does train.py still keep its promises after an edit? Takes about a minute on a laptop:

    $ python -m support.check [config files and flags, as for train.py; sizes and schedule are its own]

Runs train.py as it is a few times, with a tiny network, on made-up text and a CPU, and says of each promise
whether it holds: a resume with the same bits, processes that draw different batches and together give the
losses of one, a learning rate that follows its schedule, the same text with and without a cache of keys and
values. Ends with status 1 if one does not.
"""

import dataclasses
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

from model import GPT, KVCache
from support import cpu, load
from support.report import read_log

REPO = Path(__file__).resolve().parents[1]
TINY = ('--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=2 --dropout=0.1 --token_noise=0.1 '
        '--gradient_accumulation_steps=4 --max_iters=8 --lr_decay_iters=8 --warmup_iters=2 '
        '--learning_rate=1e-2 --min_lr=0 --lr_schedule=cosine --eval_interval=4 --eval_iters=2 '
        '--grad_clip=0.1 --log_interval=1 --device=cpu --dtype=float32 --compile=False --dataset=check '
        '--init_from=scratch --shard=1 --decay_lr=True --save_interval=4 --keep_checkpoints=0 '
        '--always_save_checkpoint=True').split()


def make_text(folder):
    """A dataset of a few thousand ids."""
    folder.mkdir()
    for name, size in (('train', 18_000), ('val', 2_000)):
        np.random.default_rng(1).integers(60, size=size, dtype='uint16').tofile(folder / f'{name}.bin')
    (folder / 'meta.json').write_text('{"vocab_size": 60}')


def train(flags, place, name, *more, processes=1):
    """The folder of a run of train.py; what goes wrong there is seen on the console."""
    launcher = f'-m torch.distributed.run --standalone --nproc_per_node={processes}' if processes > 1 else ''
    subprocess.run([sys.executable, *launcher.split(), REPO / 'train.py', *flags, *TINY,
                    f'--data_dir={place}', f'--out_dir={place / name}', *more],
                   env={**os.environ, 'OMP_NUM_THREADS': '1'}, stdout=subprocess.DEVNULL, check=True)
    return place / name


def resume_differs(flags, place):
    """What a resume does otherwise than a run that goes through, or None."""
    resumed = train(flags, place, 'resumed', f"--init_from=resume:{place / 'one' / 'ckpt_00000004.pt'}")
    a, b = ({keystr(path): x for path, x in tree_leaves_with_path(load.read(str(out / 'ckpt.pt')))
             if torch.is_tensor(x)} for out in (place / 'one', resumed))
    if other := [name for name in a if name not in b or not torch.equal(a[name], b[name])]:
        return (f"{len(other)} of {len(a)} tensors differ, {other[0]} first. is a batch, a mask or "
                "noise drawn from a random state that no checkpoint holds, is something missing in state()?")


def processes_differ(flags, place):
    """What two processes do otherwise than one, or None."""
    two = train(flags, place, 'two', processes=2)
    apart = np.nanmax(np.abs(read_log(place / 'one')['loss'] - read_log(two)['loss']))
    if not apart < 1e-3:
        return (f"losses differ by {apart:.2g}. is the loss divided by the micro-batches of all processes, "
                "are batch and dropout drawn by the number of the micro-batch, is noise "
                "on gradients the same in all processes?")


def rate_differs(flags, place):
    """Where the learning rate leaves the schedule, or None: a warmup of two iterations and a cosine to 0 at
    the eighth."""
    for it, rate in enumerate(read_log(place / 'one')['lr'][:8]):
        want = 1e-2 * ((it + 1) / 3 if it < 2 else 0.5 * (1 + math.cos(math.pi * (it - 2) / 6)))
        if abs(rate - want) > 1e-6:
            return f"{rate:.3g} at iteration {it}, a warmup of 2 and a cosine give {want:.3g}: is that meant?"


def cache_differs(flags, place):
    """Where logits with the cache are others than those of the whole context, or None."""
    one, _ = load.model_and_tokenizer(GPT, str(place / 'one'))
    model = GPT(dataclasses.replace(one.config, block_size=1024)).eval()  # windows may be long
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:  # as after long training: attention looks far and near
                p.normal_(std=0.3)
        idx = torch.randint(60, (2, 1024))
        whole = model(idx, full_logits=True)[0]
        cpu.to_inference(model, idx.device, 'float32')  # as sample.py does
        cache = KVCache(model, 2, 1024)
        steps = [model(one, full_logits=True, cache=cache.advance(1))[0] for one in idx.split(1, dim=1)]
    apart = (torch.cat(steps, dim=1) - whole).abs().max()
    if apart > 1e-3:
        return (f"logits differ by {apart:.2g}. is a mask or a position computed for the whole context "
                "alone (GPT.attention_mask is asked by both), is a module used twice with one layer_idx, is "
                "noise drawn in eval mode?")


PROMISES = {'a resume gives the same bits': resume_differs,
            'two processes draw different batches and give the losses of one': processes_differ,
            'the learning rate follows its schedule': rate_differs,
            'a sample with the cache is one without': cache_differs}


def main():
    flags, broken = sys.argv[1:], False
    if '--help' in flags or '-h' in flags:
        return print('python -m support.check [config files and flags, as for train.py]: docs/hacking.md')
    with tempfile.TemporaryDirectory(prefix='check-') as folder:
        place = Path(folder)
        make_text(place / 'check')
        try:
            train(flags, place, 'one')
        except subprocess.CalledProcessError as e:  # train.py has said why
            sys.exit(e.returncode)
        for promise, differs in PROMISES.items():
            try:
                found = differs(flags, place)
            except subprocess.CalledProcessError:
                found = 'train.py ends, see above'
            broken |= bool(found)
            print(f"BROKEN {promise}: {found}" if found else f"ok     {promise}", flush=True)
    sys.exit(broken)


if __name__ == '__main__':
    main()
