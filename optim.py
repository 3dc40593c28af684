"""
Which parameter is trained by what: AdamW for everything, as in nanoGPT; or Muon for the matrices inside the
blocks and AdamW for the rest: embeddings, head, norms, biases. train.py takes any other torch optimizer as
well. From top to bottom: the groups, the update, the matrix iteration, its division among processes.
"""

import math

import torch
import torch.distributed as dist

MUON_LR = 0.02  # Keller Jordan's; in a unit of its own, not AdamW's


def role_of(name, p):
    """What kind of parameter it is, by its name in a GPT."""
    if p.dim() < 2:
        return 'vector'
    if name.startswith('transformer.h.'):
        return 'matrix'
    return 'head' if name == 'lm_head.weight' else 'embedding'


def create_optimizer(model, learning_rate, weight_decay, betas, eps, matrix_optimizer='adamw', matrix_lr=None,
                     embedding_lr=None, head_lr=None, matrix_weight_decay=None, momentum=0.95,
                     dtype='float32'):
    """One optimizer for the parameters of a GPT that learn (requires_grad). Learning rates that are None are
    learning_rate (MUON_LR for Muon); weight decay is for what has two dimensions or more. group['lr_scale']
    is a group's share of learning_rate. dtype: of Muon's matrix products; bfloat16 is enough, where the
    hardware has it."""
    muon = matrix_optimizer == 'muon'
    if muon and matrix_lr is None:
        matrix_lr = MUON_LR
    if matrix_weight_decay is None:
        matrix_weight_decay = weight_decay
    kinds = {'embedding': (embedding_lr, weight_decay), 'matrix': (matrix_lr, matrix_weight_decay),
             'head': (head_lr, weight_decay), 'vector': (None, 0.0)}
    groups, before = [], None
    for role, (lr, decay) in kinds.items():
        lr = learning_rate if lr is None else lr
        options = dict(lr=lr, lr_scale=lr / learning_rate if learning_rate else 0.0, weight_decay=decay,
                       muon=muon and role == 'matrix', momentum=momentum)
        params = [p for name, p in model.named_parameters() if role_of(name, p) == role and p.requires_grad]
        # the same options as the group before: one group. So a GPT-2 has nanoGPT's two, in its order
        if options == before and role != 'vector':
            groups[-1]['params'] += params
        elif params:
            groups.append({'params': params, **options})
            before = options
    # fused: one kernel for all tensors; on a CPU, too, it saves the memory traffic of a dozen small steps
    optimizer = (MuonAdamW if muon else torch.optim.AdamW)(groups, learning_rate, betas, eps, fused=True)
    if muon:
        optimizer.dtype = getattr(torch, dtype)
    return optimizer


class MuonAdamW(torch.optim.AdamW):
    """AdamW, but the groups with muon=True get Muon's update (https://kellerjordan.github.io/posts/muon/):
    the momentum, orthogonalized, so that every direction of a matrix moves at the same speed."""
    dtype = torch.float32  # of the products that orthogonalize; bfloat16 is enough

    def __setstate__(self, state):  # AdamW's expects its own moments in every group
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self):
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group['muon']]
        super().step()
        self.param_groups = groups
        for group in groups:
            if group['muon']:
                for params in batches_of(group['params']):
                    self.muon_step(params, group['lr'], group['weight_decay'], group['momentum'])

    def muon_step(self, params, lr, weight_decay, momentum):
        """Update matrices of one shape."""
        for p in params:
            if not self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
        weights = [to_local(p) for p in params]
        grads = [to_local(p.grad) for p in params]
        buffers = [to_local(self.state[p]['momentum_buffer']) for p in params]
        rows, columns = params[0].shape
        keep = 1 - lr * weight_decay
        step_size = -lr * math.sqrt(max(1, rows / columns))  # taller orthogonal matrices have smaller entries
        # 1.0: skip this update, says the guard or the GradScaler
        found_inf = getattr(self, 'found_inf', None)
        # without asking the host: average the momentum with itself, move by nothing
        if found_inf is not None:
            skip = found_inf > 0
            grads = [torch.where(skip, buffer, grad) for grad, buffer in zip(grads, buffers)]
            keep, step_size = torch.where(skip, 1.0, keep), torch.where(skip, 0.0, step_size)
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum)  # Nesterov's look ahead
        updates = orthogonalize(updates, params[0], self.dtype)
        torch._foreach_mul_(weights, keep)
        torch._foreach_add_(weights, [update.to(weights[0].dtype) * step_size for update in updates])


def batches_of(params):
    """Lists of parameters of one shape that are updated together: small matrices alone do not fill the
    hardware. Not too many: what fits into a CPU's cache or is little of a GPU's memory."""
    by_shape = {}
    for p in params:
        if p.grad is not None:
            by_shape.setdefault(p.shape, []).append(p)
    for shape, alike in by_shape.items():
        elements = 2 ** (19 if alike[0].device.type == 'cpu' else 26)
        n = max(2, elements // shape.numel()) * n_sharers(alike[0])
        yield from (alike[i:i + n] for i in range(0, len(alike), n))


def zeropower_via_newtonschulz(G, steps=5):
    """The matrices G (n, rows, columns) with their singular values moved near one by a Newton-Schulz
    iteration: a polynomial of the matrix, so it is all matrix products. These coefficients bring those above
    0.0017 of the matrix's norm to 0.68 to 1.2 in five steps, and raise smaller ones 485 times at most."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = G.size(-2) > G.size(-1)
    X = G.mT if tall else G
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # no singular value above one
    for _ in range(steps):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


# -----------------------------------------------------------------------------
# Muon's work, divided among the processes that train one model


def n_sharers(p):
    """How many processes share Muon's work on a parameter: those that have its shards or, with DDP, all."""
    return p.device_mesh.size(-1) if hasattr(p, 'to_local') else getattr(p, 'n_replicas', 1)


def to_local(tensor):
    """This process's part of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


def orthogonalize(parts, p, dtype):
    """parts: what this process has of n matrices shaped like the parameter p: all of it or, for FSDP's
    DTensor, its rows. Each process works on some of the matrices. Returns what it keeps of the results."""
    if n_sharers(p) == 1:
        return zeropower_via_newtonschulz(torch.stack(parts).to(dtype))
    if hasattr(p, 'to_local'):
        return orthogonalize_shards(parts, p, dtype)
    return orthogonalize_replicas(parts, dtype)


def orthogonalize_replicas(matrices, dtype):
    """All processes have the same matrices; each takes every world_size-th and sends what becomes of it."""
    n, world_size = len(matrices), dist.get_world_size()
    own = matrices[dist.get_rank()::world_size]
    own += matrices[:1] * (-(-n // world_size) - len(own))  # as many in each process
    own = zeropower_via_newtonschulz(torch.stack(own).to(dtype)).contiguous()
    everyones = own.new_empty(world_size, *own.shape)
    dist.all_gather_into_tensor(everyones.view(-1, *own.shape[1:]), own)
    return [everyones[i % world_size, i // world_size] for i in range(n)]


def orthogonalize_shards(parts, p, dtype):
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
        whole = zeropower_via_newtonschulz(whole)
    dist.all_to_all_single(sent, whole.transpose(0, 1).flatten(), sends, receives, group=group)
    return slots
