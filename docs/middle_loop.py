"""
The second of three scripts that train a GPT: docs/minimal_loop.py, this one, train.py.

It adds what a longer run needs: settings, a dataset with a held-out part, a schedule of the learning rate,
gradient accumulation, several processes, and a checkpoint from which a stopped run continues exactly. It
leaves to train.py what makes a run fast and safe: a GPU with bfloat16 and torch.compile, Muon, DDP and FSDP,
batches without repetition, checks of settings and files, logs, samples.

    $ python docs/middle_loop.py                                      # learns to write the text of model.py
    $ torchrun --standalone --nproc_per_node=2 docs/middle_loop.py    # the same losses
    $ python docs/middle_loop.py --dataset=shakespeare_char           # made by prepare.py
    $ python docs/middle_loop.py --init_from=resume                   # continue; repeat the other flags
    $ python sample.py out-middle --start='class '
"""
import sys
from pathlib import Path

repo = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(repo))
from configurator import InputError, configure

# -----------------------------------------------------------------------------
out_dir = 'out-middle'
init_from = 'scratch'  # 'resume': continue the run in out_dir
data_dir = str(repo / 'data')
dataset = ''  # the folder data_dir/<dataset>; '': the text of model.py
batch_size = 8  # sequences per micro-batch
block_size = 64  # context length, in tokens
gradient_accumulation_steps = 2  # micro-batches per iteration, over all processes
n_layer = 2
n_head = 4
n_embd = 128
dropout = 0.0
learning_rate = 3e-3
weight_decay = 0.1
grad_clip = 1.0
max_iters = 400
warmup_iters = 20
eval_interval = 100  # iterations between evaluations, each with a checkpoint
eval_iters = 20  # batches of each split
seed = 1337
# -----------------------------------------------------------------------------
config, given = configure(globals())  # sets the names above to the values of flags: --max_iters=200

import json
import math
import os

import numpy as np
import torch
import torch.distributed as dist

from model import GPT, GPTConfig

# torchrun starts this script nproc_per_node times, with a different RANK each time
ddp_rank = int(os.environ.get('RANK', 0))
ddp_world_size = int(os.environ.get('WORLD_SIZE', 1))
if gradient_accumulation_steps % ddp_world_size:
    raise InputError(f"{gradient_accumulation_steps} micro-batches cannot be divided among {ddp_world_size} "
                     "processes. Change gradient_accumulation_steps.")
micro_steps = gradient_accumulation_steps // ddp_world_size  # micro-batches of this process
if ddp_world_size > 1:
    dist.init_process_group('gloo')

# -----------------------------------------------------------------------------
# data: each split is one long array of token ids
if dataset:
    folder = Path(data_dir) / dataset
    meta = json.loads((folder / 'meta.json').read_text())
    vocab_size = meta['vocab_size']
    tokenizer = None  # sample.py uses the dataset's
    train_ids = np.memmap(folder / 'train.bin', dtype=meta['dtype'], mode='r')  # a file, not read into memory
    val_ids = np.memmap(folder / 'val.bin', dtype=meta['dtype'], mode='r')
else:
    vocab_size = 257  # the bytes, and <|endoftext|>
    tokenizer = {'kind': 'byte'}
    ids = np.frombuffer((repo / 'model.py').read_bytes(), dtype=np.uint8)
    n_train = int(0.9 * len(ids))
    train_ids = ids[:n_train]
    val_ids = ids[n_train:]


def get_batch(ids, index):
    """
    Return the micro-batch `index`: x and y, each (batch_size, block_size).

    It is a function of the seed and the index. So a resumed run reads the same batches as one that was not
    stopped, and any number of processes read the same ones as a single process.
    """
    rng = np.random.default_rng([seed, index])
    starts = rng.integers(len(ids) - block_size, size=batch_size)
    chunks = np.stack([ids[start:start + block_size + 1] for start in starts])  # (B, T + 1)
    chunks = torch.from_numpy(chunks.astype(np.int64))
    return chunks[:, :-1], chunks[:, 1:]


# -----------------------------------------------------------------------------
# model and optimizer: from random numbers, the same ones in each process, or from the checkpoint
torch.manual_seed(seed)
model = GPT(GPTConfig(vocab_size=vocab_size, block_size=block_size, n_layer=n_layer, n_head=n_head,
                      n_embd=n_embd, dropout=dropout, bias=False))
optimizer = model.configure_optimizers(weight_decay, learning_rate, betas=(0.9, 0.95))
ckpt_path = os.path.join(out_dir, 'ckpt.pt')
start_iter = 0
if init_from == 'resume':
    ckpt = torch.load(ckpt_path, weights_only=True)
    model.load_state_dict(ckpt['model'])
    optimizer.load_state_dict(ckpt['optimizer'])
    start_iter = ckpt['iter_num']


def get_lr(it):
    """Return the learning rate: a linear warm-up, then a cosine from learning_rate down to a tenth of it."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    progress = (it - warmup_iters) / (max_iters - warmup_iters)
    return learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


@torch.no_grad()
def estimate_loss(ids):
    """Return the mean loss over eval_iters batches, the same ones each time."""
    model.eval()
    total = 0.0
    for index in range(eval_iters):
        x, y = get_batch(ids, index)
        _, loss = model(x, y)
        total += loss.item()
    model.train()
    return total / eval_iters


def save(it):
    """Write what a resume and sample.py need. A crash leaves the old file or the new one, never a part."""
    os.makedirs(out_dir, exist_ok=True)
    ckpt = {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'iter_num': it,
            'model_args': model.config.model_args(), 'config': config, 'tokenizer': tokenizer}
    torch.save(ckpt, ckpt_path + '.tmp')
    os.replace(ckpt_path + '.tmp', ckpt_path)


# -----------------------------------------------------------------------------
# the loop: max_iters updates. The last pass makes no update; it evaluates and saves the final weights
for it in range(start_iter, max_iters + 1):
    if ddp_rank == 0 and (it % eval_interval == 0 or it == max_iters):
        print(f"step {it}: train loss {estimate_loss(train_ids):.4f}, val loss {estimate_loss(val_ids):.4f}")
        save(it)
    if it == max_iters:
        break

    # the gradient of the mean over all micro-batches: a sum over those of this process, then over processes
    loss_sum = torch.zeros(())
    for micro_step in range(micro_steps):
        index = it * gradient_accumulation_steps + ddp_rank * micro_steps + micro_step
        torch.manual_seed(seed + index)  # so that dropout, too, is a function of the index
        x, y = get_batch(train_ids, index)
        _, loss = model(x, y)
        loss = loss / gradient_accumulation_steps
        loss.backward()  # adds to the gradients
        loss_sum += loss.detach()
    if ddp_world_size > 1:  # torch's DDP does the same while the backward pass is still running
        for tensor in [loss_sum, *[p.grad for p in model.parameters()]]:
            dist.all_reduce(tensor)  # replaces it by its sum over all processes

    # the update
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    for group in optimizer.param_groups:
        group['lr'] = get_lr(it)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if ddp_rank == 0 and it % 10 == 0:
        print(f"iter {it}: loss {loss_sum.item():.4f}, lr {get_lr(it):.2e}")

if ddp_world_size > 1:
    dist.destroy_process_group()
