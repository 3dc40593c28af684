"""
What a run takes, by arithmetic: memory, disk, network, time. dev/records/plan.md has the memory beside that
of real steps.
"""

import csv
import os
import shutil
import subprocess
import sys

import torch

from model import GPT
from support.console import format_duration
from support.devices import choose_loss_chunk_size

MARGIN = 2e9, 0.05  # bytes for CUDA, NCCL and libraries, and the share lost to fragmentation: assumed
MFU = 0.4  # share of the peak FLOP/s, assumed
# a trial is a short run of its own
TRIAL = dict(init_from='scratch', overwrite=True, budget=None, max_iters=4, lr_schedule='constant',
             warmup_iters=0, eval_only=False, eval_interval=0, eval_iters=1, tasks_interval=0,
             sample_interval=0, log_interval=1, wandb_log=False)


def gb(n):
    return f"{n / 1e9:,.2f} GB"


def kept(config, dtype, on_gpu):
    """Bytes per token that the forward pass keeps for the backward pass: (an attention, an MLP)."""
    C, W, T = config.n_embd, config.mlp_width, config.block_size
    K = C // config.n_head * config.n_kv_head  # channels of all keys, or values
    low = dtype != 'float32'
    width = 2 if low else 4  # bytes of what is multiplied; from layer to layer goes float32
    mask = (1 if on_gpu else width) * C if config.dropout else 0
    # a norm keeps what it reads; on a CPU one without gains what it gives, which the next product keeps, too
    norm = 0 if config.norm == 'rmsnorm_plain' and not low and not on_gpu else 4 * C
    # autocast makes a copy of the same input for each product that reads it
    copies = 3 if low and not config.fused_qkv else 1
    attention = norm + copies * width * C + width * (C + 2 * K) + width * C + mask  # norm, inputs, q k v, y
    if config.qk_norm and on_gpu:
        attention += 4 * (C + K)
    if not on_gpu and (config.dropout or (low and T <= 512)):  # probabilities; there is no fused kernel
        attention += (3 if config.dropout else 1) * width * T * config.n_head
        attention += 2 * width * (C if config.fused_qkv else C - K) if low else 0  # keys for each head
    copies = 2 if low and config.mlp == 'swiglu' else 1
    mlp = norm + copies * width * C + (4 if config.mlp == 'swiglu' else 2) * width * W + mask
    if config.near:  # short convolutions
        mlp += 4 * C if low else 8 * C
    return attention, mlp


def peak(run, n_blocks, memory):
    """(when, {part: bytes}): the moment of an iteration that takes the most, in one process."""
    c, k, n = run.config, run.knobs, run.knobs['shard'] or run.dist.world_size  # n processes share one copy
    on_gpu, low = run.dist.device.type != 'cpu', k['dtype'] != 'float32'
    C, V, tokens = c.n_embd, c.vocab_size, k['batch_size'] * c.block_size
    width, saving, layers = 2 if low else 4, k['activation_checkpointing'], c.n_layer + c.near_layers
    everything, others, block = 4 * run.n_params, 4 * (run.n_params - n_blocks), n_blocks / layers

    # what stays throughout
    held = {'weights': everything / n, 'optimizer': (run.checkpoint_bytes - everything) / n}
    attention, mlp = kept(c, k['dtype'], on_gpu)
    layer = tokens * (attention + mlp)
    all_layers = tokens * (c.n_layer * attention + layers * mlp)
    if saving:
        all_layers = tokens * layers * C * (2 if low and on_gpu else 4)  # the input of each
    around = tokens * C * (4 + width + (4 if c.embd_norm else 0))  # first and last norm
    if low and n == 1:  # autocast's copies of the weights
        around += 2 * (C * V + (0 if saving else n_blocks))
    working = tokens * (2 * width * c.mlp_width + 8 * C)  # gradients inside a layer

    # the logits, what the softmax gives, and their gradients
    loss = tokens * V * (16 if c.softcap else 12)
    if size := min(tokens, choose_loss_chunk_size(run.dist.device, tokens, V, memory)):
        each = 8 + width + (4 if c.softcap else 0)
        each += 6 if tokens >= 2 * size else 0  # what is left of the chunk before
        loss = size * V * each + 4 * C * (V + tokens)

    # gradients: those kept between micro-batches. DDP's are buckets, which stay
    several, gathered, whole = run.grad_accum_steps > 1, 0, 0
    between = everything if several or (run.dist.world_size > 1 and k['shard'] == 1) else 0
    if n > 1:  # whole weights while they are needed, whole gradients until they are sent
        if everything > memory / 8:  # else whole ones are kept: has_room_for_gradients in parallel.py
            between /= n
        gathered, whole = others + 2 * width * block, others + 4 * block
    at_end = max(everything / n, between)
    moments = {
        'at the loss': (between, gathered, around + all_layers + loss),
        'in the backward pass of the last layer': (
            between + (whole if n > 1 else 0), gathered,
            around + all_layers + working + (max(0, layer - 4 * block) if saving else 0)),
        'in the backward pass of the first layer': (
            at_end + (others * (2 if c.tie else 1) if n > 1 else 0), others if n > 1 else 0,
            around + layer + working),
        'in the update': (everything / n, 0, 4 * n_blocks / n if k['matrix_optimizer'] == 'muon' else 0)}
    when = max(moments, key=lambda name: sum(moments[name]))
    return when, held | dict(zip(('gradients', 'gathered', 'activations'), moments[when]))


def lines(run, memory, peak_flops):
    """(what plan.py prints, whether it fits). memory: bytes of the device; peak_flops: of it, or None"""
    with torch.device('meta'):
        model = GPT(run.config)
    n_blocks = sum(p.numel() for p in model.transformer.h.parameters())
    k, n, on_gpu = run.knobs, run.dist.world_size, run.dist.device.type != 'cpu'
    when, parts = peak(run, n_blocks, memory)
    if on_gpu:
        parts['margin'] = MARGIN[0] + MARGIN[1] * sum(parts.values())
    total, size, keep = sum(parts.values()), run.checkpoint_bytes, k['keep_checkpoints']
    found = [f"memory    {gb(total)}{'' if on_gpu else ' and what torch itself takes,'} of the "
             f"{memory / 1e9:,.5g} GB of {'each GPU' if on_gpu else 'this machine'}, so it "
             f"{'fits' if total <= memory else 'does not fit'}. it takes the most {when}:"]
    found += [f"            {name:12} {gb(size)}" for name, size in parts.items() if size]
    if total > memory:
        found.append("remedy    a smaller --batch_size with more --gradient_accumulation_steps, "
                     "--activation_checkpointing, --shard=0 among more processes, a smaller --block_size")
    found.append(f"disk      {gb(size)} a checkpoint, {gb(size * (keep + 2))} for the {keep} newest, the "
                 "best and one being written")
    if n > 1:
        found.append(f"network   {gb(traffic(run, n_blocks))} sent by each of {n} processes per iteration")
    if not peak_flops:
        found.append("time      only a trial can tell: add --measure; or say --peak_flops=989e12")
        return found, total <= memory
    flops = model.flops_per_token() * run.tokens_per_iter * (4 / 3 if k['activation_checkpointing'] else 1)
    hours = k['max_iters'] * flops / (MFU * peak_flops * n) / 3600
    found.append(f"time      {hours:,.1f} hours for {k['max_iters']:,} iterations = {hours * n:,.0f} hours "
                 f"of a GPU, at {MFU:.0%} of its peak, which is assumed")
    return found, total <= memory


def traffic(run, n_blocks):
    """Bytes that a process sends per iteration, in rings: https://arxiv.org/abs/1802.05799"""
    k, n = run.knobs, run.dist.world_size
    sent = 2 * 4 * run.n_params  # gradients, to be added and handed around
    if k['shard'] != 1:  # weights, those of the blocks again for the backward pass; gradients to their owner
        width = 4 if k['dtype'] == 'float32' else 2
        sent = run.grad_accum_steps * (2 * width * n_blocks + 4 * (run.n_params - n_blocks)) + sent / 2
    return sent * (n - 1) / n


def trial(train_py, given, run):
    """The lines of a trial: train.py for a few iterations, in a folder that is removed again. Each process
    that torchrun started starts one; the first one tells."""
    folder, is_first = run.knobs['out_dir'].rstrip(os.sep) + '-trial', os.environ.get('RANK', '0') == '0'
    flags = {**given, **TRIAL, 'out_dir': folder}
    try:
        done = subprocess.run([sys.executable, train_py, *(f'--{name}={flags[name]}' for name in flags)],
                              capture_output=True, text=True)
        if done.returncode or not is_first:
            print(done.stderr, end='', file=sys.stderr)
            sys.exit(done.returncode)
        with open(os.path.join(folder, 'log.csv'), newline='') as f:
            rows = [row for row in csv.DictReader(f) if row['ms']]
    finally:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
    ms = min(float(row['ms']) for row in rows)  # what else the machine does is not ours
    taken, max_iters = 1e9 * float(rows[-1]['memory_gb'] or 'nan'), run.knobs['max_iters']
    return [line for line in done.stdout.splitlines() if line.startswith('note:')] + [
        f"measured  {gb(taken)} at the most in each process, on a CPU with torch itself",
        f"speed     {ms:.2f} ms per iteration, {1000 * run.tokens_per_iter / ms:,.0f} tokens/s",
        f"time      {format_duration(max_iters * ms / 1000)} for {max_iters:,} iterations, without "
        "evaluating and saving"]
