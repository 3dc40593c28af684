"""torch.compile, and what to do if it fails."""

import time

import torch

from configurator import fail


def compiled_parts(model):
    """What is compiled: all of it, or, where FSDP gathers blocks before they compute, each of these."""
    return model.transformer.h if hasattr(model, 'set_requires_gradient_sync') else [model]


def uncompile(model, why):
    for part in compiled_parts(model):
        part._compiled_call_impl = None
    return f'note: compile is off after all, {why}'


def compile_model(model, step, must, **options):
    """Compile `model` in place (its parameters keep their names) and prove it by step(), a first call.
    Returns a note if it runs eagerly after all; with `must` a failure is an error. None if all is well."""
    for part in compiled_parts(model):
        part.compile(**options)
    try:
        step()
    except Exception as e:  # the compiler's failures have no common class
        if isinstance(e, torch.OutOfMemoryError):
            raise
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
        if must:
            fail(f"compile=True, but torch.compile failed ({type(e).__name__}: {reason}). install a C++ "
                 "compiler (apt install g++) and, for a GPU, Triton; or use --compile=False", everywhere=True)
        model.zero_grad(set_to_none=True)  # it may have failed half-way through backward
        return uncompile(model, f'torch.compile failed ({reason})')


def compile_for_training(model, ddp_model, batch, autocast, dist, run):
    """Compile the model of a training run, with a first step on `batch`; returns the ddp_model to train
    with."""
    def first_step():
        # if it fails in one process, the others must not wait for it; but FSDP would keep what it does not
        # reduce
        dist.set_grad_sync(ddp_model, dist.sharded)
        x, y = (tokens.contiguous().to(dist.device) for tokens in batch)
        with autocast:
            loss = ddp_model(x, y)[1]
        loss.backward()
        model.zero_grad(set_to_none=True)

    t0 = time.perf_counter()
    note = compile_model(model, first_step, must=run.asked['compile'] is True)
    if dist.all_reduce_max(note is not None) and not note:
        note = uncompile(model, 'it failed in another process')
    dist.print(note or f"compiled in {time.perf_counter() - t0:.0f} s")
    # anew: the failed step may have left DDP in the middle of something
    return dist.wrap(model, run.knobs['deterministic']) if note else ddp_model
