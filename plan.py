"""
What a run will take, measured by three iterations on random tokens before it is started (train.py --dry_run), and what its first
and its last loss say about whether it works at all.
"""

import math
import time

import torch

import report
from optim import own


def measure(model, wrapped, optimizer, scaler, autocast, procs, batch_size, block_size, accumulation):
    """(bytes of weights, gradients, optimizer and activations, seconds per iteration), by iterations with the real model and
    optimizer. The weights are worth nothing afterwards."""
    device, size = procs.device, lambda tensors: sum(t.numel() * t.element_size() for t in map(own, tensors))
    tokens = torch.randint(model.config.vocab_size, (batch_size, block_size + 1), generator=torch.Generator().manual_seed(1)).to(device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    params = list(model.parameters())

    def micro(last):
        procs.average_gradients(wrapped, last)
        with autocast:
            loss = wrapped(x, y)[1] / accumulation
        scaler.scale(loss).backward()

    def timed(step, *args):
        procs.synchronize()
        t0 = time.perf_counter()
        step(*args)
        procs.synchronize()
        return time.perf_counter() - t0

    def update():
        scaler.unscale_(optimizer)
        procs.clip(model, 1.0)
        scaler.step(optimizer)
        scaler.update()

    def iteration():
        first = timed(micro, False) if accumulation > 1 else 0.0  # those between are like it: nothing is sent
        seconds = first * (accumulation - 1) + timed(micro, True) + timed(update)
        gradients = size(p.grad for p in params if p.grad is not None)
        optimizer.zero_grad(set_to_none=True)
        return seconds, gradients

    _, gradients = iteration()  # the first one is slower, and makes the optimizer's state
    moments = size(t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    seconds = min(iteration()[0] for _ in range(2))  # the faster one: what else the machine does is not ours
    activations = torch.cuda.max_memory_allocated(device) - before - gradients if device.type == 'cuda' else kept_for_backward(model, x, y, autocast)
    return size(params), gradients, moments, activations, seconds


def kept_for_backward(model, x, y, autocast):
    """Bytes that a forward pass keeps for the backward pass, the weights aside: what autograd saves, each piece of memory once."""
    weights = {own(p).untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no other one comes to the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        model(x, y) if hasattr(model, 'set_requires_gradient_sync') else model.forward(x, y)
    return sum(size for size, _ in kept.values())


def table(measured, procs, batch_size, block_size, accumulation, max_iters, checkpoint_bytes, keep_checkpoints, mfu):
    """The lines that --dry_run prints."""
    weights, gradients, moments, activations, seconds = measured
    gb = lambda n: f"{n / 1e9:.3f} GB"
    n = procs.world_size
    total = torch.cuda.get_device_properties(procs.device).total_memory if procs.device.type == 'cuda' else None
    tokens = batch_size * block_size * accumulation * n
    yield f"memory    {gb(weights + gradients + moments + activations)} in each process" + (f" of the {gb(total)} that this GPU has" if total else ' and what torch itself takes')
    yield f"            weights      {gb(weights)}"
    yield f"            gradients    {gb(gradients)}"
    yield f"            optimizer    {gb(moments)}"
    yield f"            activations  {gb(activations)}, of {batch_size} x {block_size} tokens at a time"
    yield f"disk      {gb(checkpoint_bytes)} a checkpoint, {gb(checkpoint_bytes * (keep_checkpoints + 2))} for the {keep_checkpoints} newest, the best and one being written"
    if n > 1:  # a ring: https://arxiv.org/abs/1802.05799
        yield f"network   {gb(2 * (n - 1) / n * gradients)} sent by each of {n} processes per iteration"
    yield f"speed     {1000 * seconds:.2f} ms per iteration, {tokens / seconds:,.0f} tokens/s" + (f", mfu {100 * mfu:.1f}%" if mfu else '')
    yield f"time      {report.duration(max_iters * seconds)} for {max_iters:,} iterations = {max_iters * seconds * n / 3600:.2f} hours of a device, without evaluating and saving"


def bandwidth(procs):
    """The line that --dry_run prints of the network: how fast the processes add up float32 numbers, as nccl-tests counts it (bus bandwidth:
    2 (n - 1) / n of the bytes pass each process). To be called by all of them."""
    found, n = [], procs.world_size
    for mb in (0.25, 4, 25) if n > 1 else ():  # 25 is what DDP sends at a time
        numbers = torch.zeros(int(mb * 2**18), device=procs.device)
        for again in (False, True):  # the first time connections are made
            procs.synchronize()
            t0 = time.perf_counter()
            procs.sum(numbers)
            procs.synchronize()
            seconds = time.perf_counter() - t0
        found.append(f"{2 * (n - 1) / n * 4 * numbers.numel() / seconds / 1e9:.3g} GB/s at {mb:g} MB")
    return f"bandwidth {', '.join(found)}, all-reduced between {n} processes" if found else None


def first_loss(loss, vocab_size, n_embd):
    """A note if the first loss of random weights is not what all tokens equally likely would give; else None."""
    want = math.log(vocab_size)
    if not math.isfinite(loss) or abs(loss - want) <= 0.5 + 2e-4 * n_embd:  # weights of 0.02 spread tied logits by 0.02 sqrt(C), which adds half of its square
        return None
    if loss < want:
        return (f"note: the first loss is {loss:.2f}, far below ln({vocab_size}) = {want:.2f}: random weights cannot know that much. does a position see the one it "
                "is to predict (the causal mask, the shift of the targets), or are the weights not random?")
    return (f"note: the first loss is {loss:.2f}, far above ln({vocab_size}) = {want:.2f}: the network is sure of what it cannot know. are the initial weights too "
            "large (init, a changed layer), is a norm missing, or is vocab_size far above the ids that occur?")


def learned_by_heart(losses):
    """What overfit_batch has shown, by the losses of its iterations."""
    if not losses:
        return "overfit_batch: no finite loss was logged. model or loop is broken"
    first, last = losses[0], min(losses[-5:])
    if last < 0.1 * first:
        return f"overfit_batch: the loss of one batch went from {first:.3f} to {last:.4f}. model and loop learn"
    return (f"overfit_batch: the loss of one batch went from {first:.3f} to {last:.3f} in {len(losses):,} logged iterations, not to nearly 0. "
            "give it more of them or a larger rate, and no dropout; if that does not help, model or loop is broken")
