"""
What a run takes, by arithmetic: memory, disk, time. dev/records/plan.md has the memory beside that of real
steps.
"""

import os
import shutil
import subprocess
import sys

import numpy as np
import torch

from model import GPT
from support.console import format_duration
from support.devices import choose_loss_chunk_size
from support.report import read_log

MARGIN = 2e9, 0.05  # bytes for CUDA, NCCL and libraries, and the share lost to fragmentation: assumed
MFU = 0.4  # share of the peak FLOP/s, assumed
# a trial is a short run of its own
TRIAL = ('--init_from=scratch --overwrite --budget=None --max_iters=4 --lr_schedule=constant '
         '--warmup_iters=0 --eval_only=False --eval_interval=0 --eval_iters=1 --tasks= '
         '--sample_interval=0 --log_interval=1 --wandb_log=False')


def gb(n):
    return f"{n / 1e9:,.2f} GB"


def kept(config, dtype, on_gpu):
    """Bytes per token that the forward pass keeps for the backward pass: (an attention, an MLP)."""
    C, T = config.n_embd, config.block_size
    K = C // config.n_head * config.n_kv_head  # channels of all keys, or values
    low, swiglu = dtype != 'float32', config.mlp == 'swiglu'
    width = 2 if low else 4  # bytes of what is multiplied; from layer to layer goes float32
    # what each norm reads, and dropout's mask; autocast copies an input for each product that reads it
    norm = 4 * C + (C if config.dropout else 0)
    attention = norm + width * ((5 if low and not config.fused_qkv else 3) * C + 2 * K)  # norm, q k v, y
    if config.qk_norm and on_gpu:
        attention += 4 * (C + K)
    if not on_gpu and (config.dropout or (low and T <= 512)):  # probabilities; there is no fused kernel
        attention += (3 if config.dropout else 1) * width * T * config.n_head
    return attention, norm + width * (
        (2 if low and swiglu else 1) * C + (4 if swiglu else 2) * config.mlp_width)


def peak(run, memory):
    """{part: bytes} of one process when an iteration takes the most. memory: bytes of the device"""
    c, k, n = run.config, run.k, run.k.shard or run.dist.world_size  # n processes share one copy
    on_gpu, low, saving = run.dist.device.type != 'cpu', k.dtype != 'float32', k.activation_checkpointing
    C, V, tokens, layers = c.n_embd, c.vocab_size, k.batch_size * c.block_size, c.n_layer + c.near_layers
    width, weights, blocks = 2 if low else 4, 4 * run.n_params, 4 * run.n_block_params
    others, block = weights - blocks, blocks / layers  # embeddings and head; one block

    # activations: of all layers, around them, and autocast's copies of the weights
    attention, mlp = kept(c, k.dtype, on_gpu)
    kept_in_all = tokens * (c.n_layer * attention + layers * mlp)
    working = tokens * (2 * width * c.mlp_width + 8 * C)  # gradients inside a layer
    if saving:  # of each layer its input, and one that is computed again
        kept_in_all = tokens * layers * C * (2 if low and on_gpu else 4)
        working += tokens * (attention + mlp)
    around = tokens * C * (4 + width)
    if low and n == 1:
        around += 2 * C * V + (0 if saving else blocks / 2)
    # the logits, what the softmax gives, and their gradients
    each = 16 if c.softcap else 12
    loss = tokens * V * each
    if size := choose_loss_chunk_size(run.dist.device, tokens, V, memory):
        loss = size * V * each + width * C * (V + tokens)  # and the gradients of head and x so far
    activations = around + kept_in_all + max(loss, working)

    # gradients: those kept between micro-batches. DDP's are buckets, which stay
    gradients, gathered = 0, 0
    if run.grad_accum_steps > 1 or (run.dist.world_size > 1 and k.shard == 1):
        gradients = weights
    if n > 1:  # whole weights while they are needed, whole gradients until they are sent
        gathered = others + width * block / 2
        gradients = others + block + gradients / n
    return {'weights': weights / n, 'optimizer': run.optimizer_bytes / n, 'gradients': gradients,
            'gathered': gathered, 'activations': max(activations, weights / n - gradients)}  # they take turns


def lines(run, memory, peak_flops):
    """(what plan.py prints, whether it fits). memory: bytes of the device; peak_flops: of it, or None"""
    k, n, on_gpu = run.k, run.dist.world_size, run.dist.device.type != 'cpu'
    parts = peak(run, memory)
    if on_gpu:
        parts['margin'] = MARGIN[0] + MARGIN[1] * sum(parts.values())
    total, size = sum(parts.values()), run.checkpoint_bytes
    fits = total <= memory
    where = 'each GPU' if on_gpu else 'each process on this machine, beside torch itself'
    found = [f"memory    {gb(total)} of the {memory / 1e9:,.5g} GB of {where}, "
             f"so it {'fits' if fits else 'does not fit'}:"]
    found += [f"            {name:12} {gb(part)}" for name, part in parts.items() if part]
    if not fits:
        found.append("remedy    a smaller --batch_size with more --gradient_accumulation_steps, "
                     "--activation_checkpointing, --shard=0 among more processes, a smaller --block_size")
    kept = (f"{gb(size * (k.keep_checkpoints + 2))} for the {k.keep_checkpoints} newest, the best and one "
            "being written") if k.keep_checkpoints else "and all of them stay"
    with torch.device('meta'):
        flops = GPT(run.config).flops_per_token() * run.tokens_per_iter
    left = max(0, k.max_iters - run.start_iter)
    found += [f"disk      {gb(size)} a checkpoint, {kept}",
              f"compute   {left:,} iterations of {flops:.4g} FLOPs = {left * flops:.4g} FLOPs"]
    if not peak_flops:
        return found + ["time      only a trial can tell: add --measure; or say --peak_flops, "
                        "of one GPU (312e12: A100, 989e12: H100)"], fits
    hours = left * flops / (MFU * peak_flops * n) / 3600
    return found + [f"time      {hours:,.1f} hours = {hours * n:,.1f} hours "
                    f"of a GPU, at {MFU:.0%} of its peak, which is assumed"], fits


def trial(train_py, given, run):
    """The lines of a trial: train.py for a few iterations, in a folder that is removed again. Each process
    that torchrun started starts one; the first one tells."""
    # a folder that nobody else has, for all of torchrun's processes the same
    folder = f"{run.k.out_dir.rstrip(os.sep)}.trial-{os.environ.get('MASTER_PORT', os.getpid())}"
    is_first = os.environ.get('RANK', '0') == '0'
    flags = [f'--{name}={given[name]}' for name in given] + TRIAL.split() + [f'--out_dir={folder}']
    try:
        done = subprocess.run([sys.executable, train_py, *flags], stdout=subprocess.DEVNULL)
        if done.returncode or not is_first:
            sys.exit(done.returncode)
        log = read_log(folder)
    finally:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
    ms = np.nanmin(log['ms'])  # what else the machine does is not ours
    return [f"measured  {gb(1e9 * np.nanmax(log['memory_gb']))} at the most in each process, on a CPU with "
            "torch itself",
            f"time      {format_duration(run.k.max_iters * ms / 1000)} for {run.k.max_iters:,} iterations "
            f"of {ms:.2f} ms, without evaluating and saving"]
