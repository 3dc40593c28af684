"""Muon's matrix iteration for parameters whose rows are sharded over processes by FSDP."""

import torch
import torch.distributed as dist


def orthogonalize_shards(parts, p, orthogonalize):
    """
    parts: this process's rows of n matrices shaped like the DTensor p. Each matrix is put together in one
    process, which calls orthogonalize(stack of its matrices), and the rows are sent back. So the processes
    share the work, and each sends its parts once, and receives them once, in the dtype of the work.
    """
    group = p.device_mesh.get_group(p.device_mesh.ndim - 1)
    (rows, columns), n, world_size, rank = p.shape, len(parts), group.size(), group.rank()
    dtype = working_dtype(orthogonalize, parts[0].device)
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


def working_dtype(orthogonalize, device):
    """The dtype that the iteration works in, so that no more is sent."""
    return orthogonalize(torch.zeros(1, 1, 1, device=device)).dtype
