"""
Which parameter is trained by what: AdamW for everything, as in nanoGPT; or Muon for the matrices inside the
blocks and AdamW for the rest: embeddings, head, norms, biases. From top to bottom: the groups, the update,
the matrix iteration, its division among processes, the state of a checkpoint. This file works alone.
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


def create_optimizer(model, *, learning_rate, weight_decay, betas, eps, matrix_optimizer='adamw',
                     matrix_lr=None, embedding_lr=None, head_lr=None, matrix_weight_decay=None,
                     momentum=0.95, dtype='float32', replicas=1):
    """
    One optimizer for the parameters of a GPT that learn (requires_grad). Learning rates that are None are
    learning_rate (MUON_LR for Muon); weight decay is for what has two dimensions or more. group['lr_scale']
    is a group's share of learning_rate. For Muon: dtype of its matrix products, bfloat16 is enough where the
    hardware has it; replicas, the number of processes that hold this model and divide the work (DDP).
    """
    muon = matrix_optimizer == 'muon'
    if muon and matrix_lr is None:
        matrix_lr = MUON_LR
    if matrix_weight_decay is None:
        matrix_weight_decay = weight_decay
    learning_rates = {'embedding': embedding_lr, 'matrix': matrix_lr, 'head': head_lr, 'vector': None}
    decays = {'embedding': weight_decay, 'matrix': matrix_weight_decay, 'head': weight_decay, 'vector': 0.0}

    params = {role: [] for role in learning_rates}
    for name, p in model.named_parameters():
        if p.requires_grad:
            params[role_of(name, p)].append((name, p))
    groups = []
    options_before = None
    for role, lr in learning_rates.items():
        if lr is None:
            lr = learning_rate
        options = {'lr': lr, 'lr_scale': lr / learning_rate if learning_rate else 0.0,
                   'weight_decay': decays[role], 'muon': muon and role == 'matrix', 'momentum': momentum}
        # with the same options as the group before: one group. So a GPT-2 has nanoGPT's two, in its order
        if options == options_before and role != 'vector':
            groups[-1]['params'] += params[role]
        elif params[role]:
            groups.append({'params': params[role], **options})
            options_before = options
    if muon:
        return MuonAdamW(groups, learning_rate, betas, eps, getattr(torch, dtype), replicas)
    # fused: one kernel for all tensors; on a CPU, too, it saves the memory traffic of a dozen small steps
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)


class MuonAdamW(torch.optim.Optimizer):
    """
    Muon for the groups with muon=True (https://kellerjordan.github.io/posts/muon/): the momentum,
    orthogonalized, so that every direction of a matrix moves at the same speed. For the others torch's AdamW,
    an optimizer inside this one that works on the same groups and the same state. Where a gradient is not
    finite, a GradScaler skips the whole step(); a fused AdamW alone would be told to skip its own.
    """

    def __init__(self, groups, lr, betas, eps, dtype=torch.float32, replicas=1):
        super().__init__(groups, {'lr': lr, 'betas': betas, 'eps': eps})
        self.dtype = dtype
        self.replicas = replicas
        self.adamw = None
        others = [group for group in self.param_groups if not group['muon']]
        if others:
            self.adamw = torch.optim.AdamW(others, fused=True)

    @torch.no_grad()
    def step(self):
        if self.adamw is not None:
            # as they are now: load_state_dict() makes new ones
            self.adamw.param_groups = [group for group in self.param_groups if not group['muon']]
            self.adamw.state = self.state
            self.adamw.step()
        for group in self.param_groups:
            if group['muon']:
                for params in batches_of(group['params'], self.replicas):
                    self.muon_step(params, group['lr'], group['weight_decay'], group['momentum'])

    def muon_step(self, params, lr, weight_decay, momentum):
        """Update matrices of one shape."""
        updates = []
        for p in params:
            if 'momentum_buffer' not in self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
            grad = to_local(p.grad)
            buffer = to_local(self.state[p]['momentum_buffer'])
            buffer.lerp_(grad, 1 - momentum)
            updates.append(grad.lerp(buffer, momentum))  # Nesterov's look ahead
        updates = orthogonalize(updates, params[0], self.dtype, self.replicas)
        rows, columns = params[0].shape
        step_size = lr * math.sqrt(max(1, rows / columns))  # taller orthogonal matrices have smaller entries
        for p, update in zip(params, updates):
            weight = to_local(p)
            weight.mul_(1 - lr * weight_decay)
            weight.add_(update, alpha=-step_size)


def batches_of(params, replicas):
    """Lists of parameters of one shape that are updated together: small matrices alone do not fill the
    hardware. Not too many: what fits into a CPU's cache, or is little of a GPU's memory."""
    by_shape = {}
    for p in params:
        if p.grad is not None:
            by_shape.setdefault(p.shape, []).append(p)
    for shape, alike in by_shape.items():
        elements = 2 ** 19 if alike[0].device.type == 'cpu' else 2 ** 26
        n = max(2, elements // shape.numel()) * n_sharers(alike[0], replicas)
        for i in range(0, len(alike), n):
            yield alike[i:i + n]


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
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X.mT if tall else X


# -----------------------------------------------------------------------------
# Muon's work, divided among the processes that train one model. Of n matrices, number i is worked on by
# process i % world_size (its owner), as number i // world_size of its own


def n_sharers(p, replicas):
    """How many processes share Muon's work on a parameter: those that have its shards or, with DDP, all."""
    return p.device_mesh.size(-1) if hasattr(p, 'to_local') else replicas


def to_local(tensor):
    """This process's part of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


def orthogonalize(parts, p, dtype, replicas):
    """parts: what this process has of n matrices shaped like the parameter p: all of each or, for FSDP's
    DTensor, its rows. Returns the same parts of the orthogonalized matrices."""
    if n_sharers(p, replicas) == 1:
        return zeropower_via_newtonschulz(torch.stack(parts).to(dtype))
    if hasattr(p, 'to_local'):
        return orthogonalize_shards(parts, p, dtype)
    return orthogonalize_replicas(parts, dtype)


def orthogonalize_replicas(matrices, dtype):
    """All processes have the same matrices; each works on its own ones and sends what becomes of them."""
    world_size = dist.get_world_size()
    rank = dist.get_rank()
    n_own = math.ceil(len(matrices) / world_size)
    own = matrices[rank::world_size]
    while len(own) < n_own:  # as many in each process
        own.append(matrices[0])
    own = zeropower_via_newtonschulz(torch.stack(own).to(dtype)).contiguous()  # (n_own, rows, columns)
    gathered = own.new_empty(world_size * n_own, *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own)
    return [gathered[i % world_size * n_own + i // world_size] for i in range(len(matrices))]


def orthogonalize_shards(parts, p, dtype):
    """Each matrix is put together by its owner, and its rows are sent back. So each process sends its parts
    once, and receives them once, in the dtype of the work."""
    group = p.device_mesh.get_group(p.device_mesh.ndim - 1)
    world_size = group.size()
    rank = group.rank()
    rows, columns = p.shape
    heights = [len(chunk) for chunk in torch.arange(rows).chunk(world_size)]  # as FSDP divides the rows
    while len(heights) < world_size:
        heights.append(0)
    owned = [list(range(owner, len(parts), world_size)) for owner in range(world_size)]
    n_own = len(owned[rank])
    send_sizes = [len(matrices) * heights[rank] * columns for matrices in owned]
    receive_sizes = [n_own * height * columns for height in heights]

    # to each owner our rows of its matrices. Row by row: those of all processes, one behind the other, are
    # then the whole matrices
    outgoing = []
    for matrices in owned:
        if matrices:
            stack = torch.stack([parts[i] for i in matrices], dim=1)  # (our rows, its matrices, columns)
            outgoing.append(stack.to(dtype).flatten())
    sent = torch.cat(outgoing)
    received = sent.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    whole = received.view(rows, n_own, columns).transpose(0, 1).contiguous()  # (n_own, rows, columns)
    if n_own:
        whole = zeropower_via_newtonschulz(whole)

    # and back
    dist.all_to_all_single(sent, whole.transpose(0, 1).flatten(), send_sizes, receive_sizes, group=group)
    updates = [None] * len(parts)
    for matrices, flat in zip(owned, sent.split(send_sizes)):
        stack = flat.view(heights[rank], len(matrices), columns)
        for place, i in enumerate(matrices):
            updates[i] = stack[:, place]
    return updates


# -----------------------------------------------------------------------------
# the state of a checkpoint


@torch.no_grad()
def load_moments(optimizer, state):
    """
    Copy the moments of `state`, an optimizer's state_dict() with whole tensors, to the same parameters here;
    into each process its shard of what FSDP divides. Learning rates, betas, weight decay and the division
    into groups stay this optimizer's (load_state_dict would bring back the old ones). Return the number of
    parameters that start without moments: those that were frozen, or had another optimizer (AdamW instead of
    Muon). ValueError if the state does not fit.
    """
    saved_names, saved_ids = names_and_entries(state['param_groups'])
    names, params = names_and_entries(optimizer.param_groups)
    if not saved_names or not names:  # nanoGPT's has no names: by order, however they are divided into groups
        if len(saved_ids) != len(params):
            raise ValueError(f"the optimizer's state has {len(saved_ids)} parameters, this model "
                             f"{len(params)}. train the same ones as then, or start a new run from the "
                             "weights")
        saved_names = names = range(len(params))
    id_of = dict(zip(saved_names, saved_ids))
    names = iter(names)
    n_without = 0
    for group in optimizer.param_groups:
        needed = None
        if group.get('muon'):
            needed = 'momentum_buffer'
        elif isinstance(optimizer, (torch.optim.AdamW, MuonAdamW)):
            needed = 'exp_avg'
        for p, name in zip(group['params'], names):
            moments = state['state'].get(id_of.get(name), {})
            if moments and (needed is None or needed in moments):
                optimizer.state[p] = {key: moment_of(p, key, value) for key, value in moments.items()}
            else:
                n_without += 1
    return n_without


def names_and_entries(groups):
    """The names of the parameters of all groups, and in the same order their entries in 'params'."""
    names = []
    entries = []
    for group in groups:
        names += group.get('param_names', [])
        entries += group['params']
    return names, entries


def moment_of(p, name, value):
    """A copy of `value` for the parameter p, on its device. Always a copy: `value` may be a mapped file,
    which is about to be replaced."""
    value = torch.as_tensor(value)
    if value.dim() == 0:  # counts the steps; for a fused update on the device as well
        return value.to(p.device, torch.float32, copy=True)
    # the fused update trusts the shapes: with others it would write beyond the end of a tensor
    if value.shape != p.shape:
        raise ValueError(f"the optimizer's {name} has the shape {tuple(value.shape)}, its parameter "
                         f"{tuple(p.shape)}. start a new run from the weights")
    value = value.to(p.device, p.dtype, copy=True)
    if hasattr(p, 'to_local'):
        # whoever sharded p has imported this module. src_data_rank=None: nothing is sent
        return torch.distributed.tensor.distribute_tensor(value, p.device_mesh, p.placements,
                                                          src_data_rank=None)
    return value
