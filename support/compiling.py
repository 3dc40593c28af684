"""torch.compile, and what to do if it fails."""

import contextlib
import gc
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from configurator import fail
from support.errors import first_line


# of a training. Whole, the compiler adds up the gradients of embeddings in any order, and its own random
# numbers take longer than all that it saves
ON_CPU = dict(blocks=True, options={'fallback_random': True})


def compile_parts(model, blocks=False, **options):
    """Compile `model` in place (its parameters keep their names): all of it or, with `blocks` and where FSDP
    gathers weights before they compute, each block and, as one, head and loss."""
    if not blocks and not hasattr(model, 'set_requires_gradient_sync'):  # FSDP's
        return model.compile(**options)
    for block in model.transformer.h:
        block.compile(**options)
    model.loss = torch.compile(model.loss, **options)


def uncompile(model, why):
    for module in model.modules():
        module._compiled_call_impl = None
    model.loss = getattr(model.loss, '_torchdynamo_orig_callable', model.loss)
    return f'note: compile is off after all, {why}'


@contextlib.contextmanager
def varying_shapes():
    """A context for scoring texts of any length: eagerly, as each length would be compiled, and without
    cuDNN's attention, as in GPT.generate."""
    with (torch.compiler.set_stance('force_eager'),
          sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])):
        yield


def compile_model(model, step, wish, **options):
    """Compile `model` in place and prove it by step(), a first call. wish: what the knob was. Returns a note
    if it runs eagerly after all; unless that was left open ('auto') a failure is an error. None if all is
    well."""
    compile_parts(model, **options)
    try:
        step()
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # the compiler's failures have no common class
        reason = first_line(e)
        if wish != 'auto':
            fail(f"compile={wish}, but torch.compile failed ({type(e).__name__}: {reason}). install a C++ "
                 "compiler (apt install g++) and, for a GPU, Triton; or use --compile=False", everywhere=True)
        model.zero_grad(set_to_none=True)  # it may have failed half-way through backward
        return uncompile(model, f'torch.compile failed ({reason})')
    finally:  # the compiler leaves a million objects, which would be searched for garbage again and again
        gc.collect()
        gc.freeze()


def trial_step(model, ddp_model, batch, autocast):
    """Forward and backward on `batch`, whose gradients are dropped."""
    ddp_model.require_backward_grad_sync = False  # where it fails, DDP's other processes must not wait
    with autocast:
        loss = ddp_model(*batch, return_logits=False)[1]
    loss.backward()
    model.zero_grad()


def compile_for_training(model, ddp_model, batch, autocast, dist, run):
    """Compile the model of a training run, with first steps on `batch`: of the training and, but on a
    CPU, of the evaluation, which is another graph. Returns the ddp_model to train with."""
    batch = [tensor.contiguous().to(dist.device) for tensor in batch]

    def first_steps():
        if not run.knobs['eval_only']:
            trial_step(model, ddp_model, batch, autocast)
        if dist.device.type == 'cpu':
            return  # it evaluates without compiling
        model.eval()
        with torch.no_grad(), autocast:
            model(*batch, reduction='none', return_logits=False)
        model.train()

    t0 = time.perf_counter()
    note = compile_model(model, first_steps, run.asked['compile'],
                         **(ON_CPU if dist.device.type == 'cpu' else {}))
    if dist.all_reduce_max(note is not None) and not note:
        note = uncompile(model, 'it failed in another process')
    dist.print(note or f"compiled in {time.perf_counter() - t0:.0f} s")
    # anew: the failed step may have left DDP in the middle of something
    return dist.wrap(model) if note else ddp_model
