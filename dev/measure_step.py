"""
The contestants of `python bench.py --what=train`, and how their knobs and their data are made.

Each contestant has step(mark): an iteration of training that returns its loss, and calls mark() where a part of it ends.
"""

import dataclasses
import json
import os
import sys
from contextlib import nullcontext, redirect_stdout
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from configurator import fail
from dataset import Dataset, Prefetch, bin_files, hash64, train_starts
from measure import load_peer
from model import GPT, GPTConfig
from optim import Guard, create_optimizer
from parallel import compile_model

ARCHITECTURE = [field.name for field in dataclasses.fields(GPTConfig) if field.name not in ('vocab_size', 'dropout')]


def settings(knobs, device, dtype, compiling, vocab_size):
    """The knobs of train.py as names, and what follows from them."""
    k = SimpleNamespace(**{**knobs, 'device': device, 'dtype': dtype, 'compiling': compiling})
    k.config = GPTConfig(vocab_size=vocab_size, dropout=k.dropout, **{name: getattr(k, name) for name in ARCHITECTURE})
    k.accumulation = k.total_batch_size // (k.batch_size * k.block_size) if k.total_batch_size else k.gradient_accumulation_steps
    if problems := k.config.problems():
        fail(*problems)
    return k


def made_up(folder, V, n=2**22):
    """A Dataset of n tokens: a walk over the vocabulary whose next step is one of four, so no loss can be below ln 4 = 1.386 for long."""
    os.makedirs(os.path.join(folder, str(V)), exist_ok=True)
    dtype = 'uint16' if V <= 2**16 else 'uint32'
    (np.random.default_rng(1).integers(4, size=n).cumsum() % V).astype(np.dtype(dtype).newbyteorder('<')).tofile(os.path.join(folder, str(V), 'train.bin'))
    with open(os.path.join(folder, str(V), 'meta.json'), 'w') as f:
        json.dump({'tokenizer': {'kind': 'byte'}, 'vocab_size': V, 'end_of_text': None, 'dtype': dtype, 'splits': {}}, f)
    return Dataset(str(V), folder)


def ours(k, data):
    """An iteration of our train.py with the knobs k. tests/test_bench.py holds its losses against train.py's own log."""
    torch.set_float32_matmul_precision(k.matmul_precision)
    model = make_model(k)
    device, gpu = k.device, k.device.type == 'cuda'
    autocast = nullcontext() if k.dtype == 'float32' else torch.autocast(device.type, dtype=getattr(torch, k.dtype))
    scaler = torch.amp.GradScaler(device.type, enabled=k.dtype == 'float16')
    optimizer = create_optimizer(model, k.learning_rate, k.weight_decay, (k.beta1, k.beta2), k.adam_eps, k.matrix_optimizer, k.matrix_lr, k.embedding_lr, k.head_lr,
                                 k.matrix_weight_decay, k.momentum)
    guard = Guard(optimizer, scaler, device, k.max_bad_steps)

    def read_batch(n):
        windows = data.train.windows(starts(k, data, n), k.block_size + 1)
        x, y = torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
        return (x.pin_memory(), y.pin_memory()) if gpu else (x, y)

    def to_device(x, y):
        return x.to(device, non_blocking=gpu), y.to(device, non_blocking=gpu)

    batches = Prefetch(read_batch, ahead=0 if device.type == 'cpu' else 2)
    x, y = to_device(*batches.next())
    it = 0

    def step(mark=lambda part: None):
        nonlocal x, y, it
        loss = torch.zeros((), device=device)
        for micro in range(k.accumulation):
            if k.dropout > 0:
                torch.manual_seed(int(hash64(k.seed, 3, it * k.accumulation + micro)[0]) >> 1)
            with autocast:
                micro_loss = model(x, y)[1] / k.accumulation
            mark('forward')
            x, y = to_device(*batches.next())
            mark('data')
            scaler.scale(micro_loss).backward()
            mark('backward')
            loss += micro_loss.detach()
        for group in optimizer.param_groups:
            group['lr'] = get_lr(k, it) * group['lr_scale']
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), k.grad_clip if k.grad_clip > 0 else float('inf'))
        guard.step(it, loss, grad_norm)
        optimizer.zero_grad(set_to_none=True)
        mark('optimizer')
        it += 1
        return loss

    if k.compiling:
        def first_step():
            with autocast:
                loss = model(x, y)[1]
            loss.backward()
            model.zero_grad(set_to_none=True)
        if note := compile_model(model, first_step, k.compile):
            print(note)
    return SimpleNamespace(step=step, model=model, optimizer=optimizer, guard=guard, close=batches.close, dtype=k.dtype)


def make_model(k):
    """The network as train.py makes it."""
    torch.manual_seed(k.seed)
    return GPT(k.config).to(k.device)


def nanogpt(k, data, folder):
    """An iteration of the train.py in a checkout of nanoGPT, with its own network and optimizer; but the places of its batches are not drawn,
    they are ours."""
    device, gpu = k.device, k.device.type == 'cuda'
    torch.set_float32_matmul_precision('high' if gpu else 'highest')  # what its allow_tf32 = True means
    model = load_peer(folder, make_model(k)).to(device)
    ptdtype = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}[k.dtype]
    ctx = torch.amp.autocast(device_type=device.type, dtype=ptdtype) if gpu else nullcontext()  # on a CPU it computes in float32, whatever dtype says
    scaler = torch.amp.GradScaler(device.type, enabled=gpu and k.dtype == 'float16')
    with redirect_stdout(None):
        optimizer = model.configure_optimizers(k.weight_decay, k.learning_rate, (k.beta1, k.beta2), device.type)
    path, n = bin_files(data.folder, 'train')[0], 0

    def get_batch():
        nonlocal n
        tokens = np.memmap(path, dtype=np.uint16, mode='r')  # anew for each batch, as there
        cut = lambda i: tokens[i:i + k.block_size] if i + k.block_size <= len(tokens) else np.take(tokens, range(i, i + k.block_size), mode='wrap')  # our data is a ring
        ix = starts(k, data, n)
        x = torch.stack([torch.from_numpy(cut(i).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(cut(i + 1).astype(np.int64)) for i in ix])
        n += 1
        return (x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)) if gpu else (x, y)

    call = torch.compile(model) if k.compiling else model
    x, y = get_batch()
    it = 0

    def step(mark=lambda part: None):
        nonlocal x, y, it
        for group in optimizer.param_groups:
            group['lr'] = get_lr(k, it)
        mean = torch.zeros((), device=device)
        for _ in range(k.accumulation):
            with ctx:
                loss = call(x, y)[1] / k.accumulation
            mark('forward')
            x, y = get_batch()
            mark('data')
            scaler.scale(loss).backward()
            mark('backward')
            mean += loss.detach()
        if k.grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), k.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        mark('optimizer')
        it += 1
        return mean
    return SimpleNamespace(step=step, model=model, optimizer=optimizer, close=lambda: None, dtype=k.dtype if gpu else 'float32')


def starts(k, data, n):
    """Where the samples of micro-batch n begin, in the order in which train.py takes them."""
    return train_starts(k.seed, range(n * k.batch_size, (n + 1) * k.batch_size), data.train.n, k.block_size)


def get_lr(k, it):
    """A warm-up, then its peak: the schedule costs no time."""
    return k.learning_rate * (it + 1) / (k.warmup_iters + 1) if it < k.warmup_iters else k.learning_rate
