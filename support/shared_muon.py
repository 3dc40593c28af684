"""Muon's matrix iteration, divided among the processes that train one model."""

import torch
import torch.distributed as dist


def orthogonalize_together(parts, p, orthogonalize, dtype):
    """
    parts: what this process has of n matrices shaped like the parameter p: all of it or, for FSDP's DTensor,
    its rows. Each process calls orthogonalize(stack of whole matrices in dtype) for some of them. Returns
    what it keeps of the results.
    """
    if hasattr(p, 'to_local'):
        return orthogonalize_shards(parts, p, orthogonalize, dtype)
    return orthogonalize_replicas(parts, orthogonalize, dtype)


def orthogonalize_replicas(matrices, orthogonalize, dtype):
    """All processes have the same matrices; each takes every world_size-th and sends what becomes of it."""
    n, world_size = len(matrices), dist.get_world_size()
    own = matrices[dist.get_rank()::world_size]
    own += matrices[:1] * (-(-n // world_size) - len(own))  # as many in each process
    own = orthogonalize(torch.stack(own).to(dtype)).contiguous()
    everyones = own.new_empty(world_size, *own.shape)
    dist.all_gather_into_tensor(everyones.view(-1, *own.shape[1:]), own)
    return [everyones[i % world_size, i // world_size] for i in range(n)]


def orthogonalize_shards(parts, p, orthogonalize, dtype):
    """Each matrix is put together in one process, and its rows are sent back. So each process sends its parts
    once, and receives them once, in the dtype of the work."""
    group = p.device_mesh.get_group(p.device_mesh.ndim - 1)
    (rows, columns), n, world_size, rank = p.shape, len(parts), group.size(), group.rank()
    heights = [len(part) for part in torch.arange(rows).chunk(world_size)]  # as FSDP divides the rows
    heights += [0] * (world_size - len(heights))
    owned = [len(range(owner, n, world_size)) for owner in range(world_size)]  # matrices of each process
    sends = [k * heights[rank] * columns for k in owned]
    receives = [owned[rank] * height * columns for height in heights]
    sent = torch.empty(sum(sends), dtype=dtype, device=parts[0].device)
    # what goes to each owner, row by row: put together, the rows of all processes are whole matrices
    stacks = [stack.view(heights[rank], k, columns) for stack, k in zip(sent.split(sends), owned)]
    slots = [stacks[i % world_size][:, i // world_size] for i in range(n)]
    for slot, part in zip(slots, parts):
        slot.copy_(part)
    received = sent.new_empty(sum(receives))
    dist.all_to_all_single(received, sent, receives, sends, group=group)
    whole = received.view(rows, owned[rank], columns).transpose(0, 1).contiguous()
    if owned[rank]:
        whole = orthogonalize(whole)
    dist.all_to_all_single(sent, whole.transpose(0, 1).flatten(), sends, receives, group=group)
    return slots
