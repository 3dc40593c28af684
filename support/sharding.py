"""FSDP: weights, gradients and optimizer state sharded over processes. https://arxiv.org/abs/2304.11277"""

import torch

from support.devices import memory_of


def shard_problems(shard, world_size, deterministic, device, dtype='auto'):
    """Problems with the knob `shard`, a number of processes that share one copy of the model (0: all)."""
    if shard == 1:
        return []
    problems = []
    if world_size == 1:
        problems.append(f"shard={shard} with one process: there is nobody to share with. launch with "
                        "torchrun --nproc_per_node=N, or leave it out")
    elif shard and world_size % shard:
        sizes = [str(size) for size in range(2, min(world_size, 1024) + 1) if world_size % size == 0]
        problems.append(f"shard={shard} does not divide {world_size} processes into equal groups. use "
                        f"--shard={', '.join(['0 (all)', *sizes])}")
    if deterministic:
        problems.append("deterministic=True with shard: FSDP's sums have no fixed order. leave one of them "
                        "out")
    if device.type == 'mps':
        problems.append("shard on mps. use --shard=1")
    if dtype == 'float16':
        problems.append("dtype=float16 with shard: the gradient scaler is not known to work there. use "
                        "--dtype=bfloat16 or float32")
    return problems


def fits_beside_model(gradients, memory):
    """Whether whole gradients of so many bytes may be kept between micro-batches."""
    return gradients <= memory / 8


def has_room_for_gradients(model, dist):
    """The same for this model on all processes."""
    gradients = 4 * sum(p.numel() for p in model.parameters())
    return not dist.all_reduce_max(not fits_beside_model(gradients, memory_of(dist.device)))


def make_mesh(device, shard, world_size):
    """The processes as FSDP sees them. With fewer sharers than processes, neighbours in rank share, as the
    GPUs of one machine (hybrid)."""
    from torch.distributed.device_mesh import init_device_mesh
    if shard == world_size:
        return init_device_mesh(device.type, (world_size,))
    return init_device_mesh(device.type, (world_size // shard, shard), mesh_dim_names=('replicate', 'shard'))


def fully_shard_model(model, mesh, dtype, device):
    """`model`, whole on the CPU, in place: before it computes, each block is gathered in `dtype`, and freed
    afterwards."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    # on a CPU LayerNorm wants its gains in float32
    exact = dtype == 'float32' or (device.type == 'cpu' and model.config.norm == 'layernorm')
    low = None if exact else getattr(torch, dtype)
    policy = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # embeddings and head stay in float32: what goes from block to block is as exact as in one process
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(model, 'generate')
    return model
