"""The lines about memory, main memory, disk, network and time that plan.py prints without a trial."""

import torch

from model import GPT
from support.console import format_duration
from support.memory import MARGIN, WHEN
from support.remedy import PER_MACHINE, remedy

MFU = 0.4  # share of the peak FLOP/s, assumed


def gb(n):
    return f"{n / 1e9:,.2f} GB"


def lines(setup, run, peak_flops, elsewhere):
    """What plan.py prints. setup: a memory.Setup, peak_flops: of the device, or None if it is not known."""
    yield from memory_lines(setup)
    if elsewhere:
        yield host_line(setup, run.checkpoint_bytes)
    yield disk_line(run.checkpoint_bytes, run.knobs['keep_checkpoints'])
    if setup.world_size > 1:
        yield network_line(setup)
    yield time_line(setup, run.knobs['max_iters'], peak_flops)


def memory_lines(setup):
    when, parts = setup.peak
    on_gpu = setup.device.type != 'cpu'
    owner = 'each GPU' if on_gpu else 'this machine'
    taken = gb(setup.total()) + ('' if on_gpu else ' and what torch itself takes,')
    verdict = 'fits' if setup.fits() else 'does not fit'
    yield (f"memory    {taken} of the {setup.memory / 1e9:,.5g} GB of {owner}, so it {verdict}. it takes the "
           f"most {WHEN[when]}:")
    held = 'in float32'
    if setup.n_shards > 1:
        held += f", 1/{setup.n_shards} of them"
    moments = 'one moment of the matrices inside the blocks, two of the rest,'
    if setup.matrix_optimizer != 'muon':
        moments = 'two moments'
    yield f"            weights      {gb(parts['weights'])}, {held}"
    yield f"            gradients    {gb(parts['gradients'])}, {gradients_held(setup, when, held)}"
    yield f"            optimizer    {gb(parts['optimizer'])}, {moments} {held}"
    if setup.n_shards > 1:
        yield (f"            gathered     {gb(parts['gathered'])}, whole weights while they are needed: "
               f"layers in {setup.dtype}, embeddings and head in float32")
    yield f"            activations  {gb(parts['activations'])}, {activations_held(setup)}"
    if on_gpu:
        margin = setup.total() - sum(parts.values())
        yield (f"            margin       {gb(margin)}, assumed: {gb(MARGIN[0])} for CUDA, NCCL and "
               f"libraries, {MARGIN[1]:.0%} for fragmentation")
    if not setup.fits():
        yield f"remedy    {remedy(setup)}"


def gradients_held(setup, when, held):
    if setup.n_shards == 1 or when == 'update':
        return held
    keeps = setup.keeps_whole_gradients and setup.grad_accum_steps > 1
    where = 'between micro-batches' if keeps else 'until they are sent'
    return f"{held}, and whole ones {where}"


def activations_held(setup):
    line = f"of {setup.batch_size} x {setup.config.block_size:,} tokens at a time"
    if setup.config.n_layer > 3:
        two, three = (few['loss', 0]['activations'] for few in setup.two_and_three)
        line += f"; kept in each layer: {gb(three - two)}"
        if setup.activation_checkpointing:
            line += ', its input'
        elif setup.dtype != 'float32' and setup.n_shards == 1:
            line += f", its weights in {setup.dtype} among them"
    if setup.loss_chunk_size:
        line += f"; logits of {setup.loss_chunk_size:,} tokens at a time"
    return line


def host_line(setup, checkpoint_bytes):
    n = min(setup.world_size, PER_MACHINE)
    need = n * 4 * sum(setup.n_params)
    processes = f"{n} processes build" if n > 1 else '1 process builds'
    return (f"host      {gb(need)} of main memory in each machine, as at the start {processes} all of the "
            f"network in float32; {gb(checkpoint_bytes)} in the first one to save it")


def disk_line(checkpoint_bytes, keep_checkpoints):
    return (f"disk      {gb(checkpoint_bytes)} a checkpoint, {gb(checkpoint_bytes * (keep_checkpoints + 2))} "
            f"for the {keep_checkpoints} newest, the best and one being written")


def network_line(setup):
    sent = ', '.join(f'{gb(size)} {what}' for what, size in traffic(setup).items())
    return f"network   {sent}, sent by each of {setup.world_size} processes per iteration"


def time_line(setup, max_iters, peak_flops):
    if not peak_flops and setup.device.type == 'cpu':
        return "time      only a trial can tell: add --measure"
    if not peak_flops:
        return (f"time      cannot be told without the GPU's peak FLOP/s, of which {MFU:.0%} would be "
                "assumed. for an H100: --peak_flops=989e12")
    with torch.device('meta'):
        flops = GPT(setup.config).flops_per_token()
    flops *= setup.config.block_size * setup.batch_size * setup.grad_accum_steps
    if setup.activation_checkpointing:
        flops *= 4 / 3  # the forward pass once more
    seconds = max_iters * flops / (MFU * peak_flops)
    took = f"{seconds / 86400:,.1f} days" if seconds > 86400 else format_duration(seconds)
    return (f"time      {took} for {max_iters:,} iterations = {seconds * setup.world_size / 3600:,.4g} hours "
            f"of a GPU, at {MFU:.0%} of its peak, which is assumed")


def traffic(setup):
    """{what: bytes that a process sends per iteration}, in rings: https://arxiv.org/abs/1802.05799"""
    world_size, n = setup.world_size, setup.n_shards
    in_blocks, others = setup.n_params
    gradients = 4 * (in_blocks + others)
    width = 4 if setup.dtype == 'float32' else 2
    matrices = sum(shape.numel() for shape in setup.shapes[0] if len(shape) > 1)
    muon = setup.matrix_optimizer == 'muon'
    if setup.shard == 1:
        ring = (world_size - 1) / world_size
        found = {'of gradients': 2 * ring * gradients}
        if muon:  # from the process that makes them orthogonal
            found['for Muon'] = ring * width * matrices
        return found
    ring = (n - 1) / n  # of what is shared, the part that passes each process
    # the blocks once more for the backward pass
    weights = setup.grad_accum_steps * ring * (2 * width * in_blocks + 4 * others)
    times = 1 if setup.keeps_whole_gradients else setup.grad_accum_steps
    between_copies = 2 * (1 - n / world_size) * gradients / n
    found = {'of weights': weights, 'of gradients': times * (ring * gradients + between_copies)}
    if muon:  # to the process that makes them orthogonal, and back
        found['for Muon'] = 2 * ring * width * matrices / n
    return found
