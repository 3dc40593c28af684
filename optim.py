"""
The optimizer: AdamW, or Muon for the matrices inside the blocks.

With Muon, AdamW updates the rest: embeddings, head, norms, biases. From top to bottom: the parameter groups,
the update, the Newton-Schulz iteration, how the processes share its work. This file works when it is copied
alone.
"""

import math

import torch
import torch.distributed as dist

MUON_LR = 0.02  # Keller Jordan's; not comparable with AdamW's learning rates


def kind_of(name, p):
    """Return what kind of parameter p is, by its name in a GPT."""
    if p.dim() < 2:
        return 'vector'
    if name.startswith('transformer.h.'):
        return 'matrix'
    return 'head' if name == 'lm_head.weight' else 'embedding'


def create_optimizer(model, *, learning_rate, weight_decay, betas, eps, matrix_optimizer='adamw',
                     matrix_lr=None, embedding_lr=None, head_lr=None, matrix_weight_decay=None,
                     momentum=0.95, dtype='float32'):
    """
    Return one optimizer for the trainable parameters of a GPT.

    A rate of None is learning_rate; for Muon, a matrix_lr of None is MUON_LR. group['lr_scale'] is the ratio
    of a group's rate to learning_rate: a schedule sets group['lr'] = lr * group['lr_scale']. Parameters with
    fewer than two dimensions have no weight decay. dtype: of Muon's matrix products; bfloat16 is precise
    enough.
    """
    muon = matrix_optimizer == 'muon'
    if muon and matrix_lr is None:
        matrix_lr = MUON_LR
    params = {'embedding': [], 'matrix': [], 'head': [], 'vector': []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            params[kind_of(name, p)].append((name, p))

    vectors = {'params': params['vector'], 'lr': None, 'weight_decay': 0.0}
    if matrix_lr is None and embedding_lr is None and head_lr is None and matrix_weight_decay is None:
        # nanoGPT's two groups, in its order: each program can continue the other's runs
        decayed = params['embedding'] + params['matrix'] + params['head']
        groups = [{'params': decayed, 'lr': None, 'weight_decay': weight_decay}, vectors]
    else:
        if matrix_weight_decay is None:
            matrix_weight_decay = weight_decay
        groups = [
            {'params': params['embedding'], 'lr': embedding_lr, 'weight_decay': weight_decay},
            {'params': params['matrix'], 'lr': matrix_lr, 'weight_decay': matrix_weight_decay, 'muon': muon},
            {'params': params['head'], 'lr': head_lr, 'weight_decay': weight_decay},
            vectors,
        ]
    groups = [group for group in groups if group['params']]
    for group in groups:
        if group['lr'] is None:
            group['lr'] = learning_rate
        group['lr_scale'] = group['lr'] / learning_rate if learning_rate else 0.0
        group['momentum'] = momentum
        group.setdefault('muon', False)
    if muon:
        return MuonAdamW(groups, learning_rate, betas, eps, getattr(torch, dtype))
    # fused: one kernel for all tensors; on a CPU, too, it saves the memory traffic of a dozen small steps
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)


class MuonAdamW(torch.optim.Optimizer):
    """
    Muon for the groups with muon=True (https://kellerjordan.github.io/posts/muon/): the momentum,
    orthogonalized, so that all directions of a matrix move at the same speed. torch's AdamW for the others.

    One optimizer for both: the schedule has one list of groups, a checkpoint one state, and a GradScaler
    skips both updates if a gradient is not finite.
    """

    def __init__(self, groups, lr, betas, eps, dtype=torch.float32):
        super().__init__(groups, {'lr': lr, 'betas': betas, 'eps': eps})
        self.dtype = dtype
        self.adamw = None
        others = [group for group in self.param_groups if not group['muon']]
        if others:
            self.adamw = torch.optim.AdamW(others, fused=True)  # lr, betas and eps are in the groups

    @torch.no_grad()
    def step(self):
        if self.adamw is not None:
            # each time, as load_state_dict() replaces groups and state
            self.adamw.param_groups = [group for group in self.param_groups if not group['muon']]
            self.adamw.state = self.state
            self.adamw.step()
        for group in self.param_groups:
            if group['muon']:
                for params in batches_of(group['params']):
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
            updates.append(grad.lerp(buffer, momentum))  # Nesterov momentum
        updates = orthogonalize(updates, params[0], self.dtype)
        rows, columns = params[0].shape[-2:]
        step_size = lr * math.sqrt(max(1, rows / columns))  # taller orthogonal matrices have smaller entries
        for p, update in zip(params, updates):
            weight = to_local(p)
            weight.mul_(1 - lr * weight_decay)
            weight.add_(update, alpha=-step_size)


def batches_of(params):
    """Yield lists of parameters of one shape that are updated together, as a small matrix alone does not fill
    the hardware. A list is limited to a CPU's cache, or a small part of a GPU's memory."""
    by_shape = {}
    for p in params:
        if p.grad is not None:
            by_shape.setdefault(p.shape, []).append(p)
    for shape, same_shape in by_shape.items():
        max_elements = 2**19 if same_shape[0].device.type == 'cpu' else 2**26  # in each process
        n = max(2, max_elements // shape.numel()) * n_processes()
        for i in range(0, len(same_shape), n):
            yield same_shape[i:i + n]


def zeropower_via_newtonschulz(G, steps=5):
    """Return the matrices G (..., rows, columns) with their singular values moved close to one.

    The Newton-Schulz iteration is a polynomial of the matrix, so it consists of matrix products. With these
    coefficients, five steps bring singular values above 0.0017 of the matrix's norm to between 0.68 and 1.2;
    smaller ones grow by a factor of up to 485.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = G.size(-2) > G.size(-1)
    X = G.reshape(-1, *G.shape[-2:])
    if tall:
        X = X.mT  # (n, rows, columns) with rows <= columns
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # no singular value above one
    if X.device.type == 'cpu' and X.dtype == torch.float32 and X.size(-1) >= 2 * X.size(-2):
        X = newtonschulz_polynomial(X @ X.mT, steps, a, b, c) @ X
    else:
        for _ in range(steps):
            A = X @ X.mT
            B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
            X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    if tall:
        X = X.mT
    return X.reshape(G.shape)


def newtonschulz_polynomial(A, steps, a, b, c):
    """
    Return the matrix by which the iteration multiplies X, from A = X X^T (n, rows, rows).

    A step multiplies X by P = a I + b A + c A A, and so A by P P. So the whole iteration can run on square
    matrices: if X is 4 times as wide as high, as in an MLP, it takes 50 instead of 90 rows^3 FLOPs; if X is
    square, 38 instead of 30. It needs float32. The eigenvalues of A are squares, but rounding can make small
    ones negative, and a step multiplies these by up to a^2: harmless for -1e-7, in bfloat16 they diverge.
    """
    product = None
    for step in range(steps):
        P = torch.baddbmm(A, A, A, beta=b, alpha=c)
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        product = P if product is None else P @ product
        if step < steps - 1:
            A = A @ (P @ P)
    return product


# -----------------------------------------------------------------------------
# Muon's work, divided among the processes


def n_processes():
    """Return the number of processes that train the model together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def to_local(tensor):
    """Return this process's rows of a tensor that FSDP has sharded, a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


def orthogonalize(updates, p, dtype):
    """Return the orthogonalized matrices of the list `updates`, each shaped like the parameter p.

    If FSDP has sharded p, the updates and the results are this process's rows of the matrices.
    """
    if not hasattr(p, 'to_local'):
        return orthogonalize_in_shares(updates, dtype)
    from torch.distributed.tensor import DTensor, distribute_tensor
    rows, *rest = p.shape  # FSDP shards the first dimension
    shape = torch.Size((rows, len(updates), *rest))
    stack = torch.stack(updates, dim=1).to(dtype)  # (our rows, n, columns)
    stack = DTensor.from_local(stack, p.device_mesh, p.placements,
                               shape=shape, stride=torch.empty(shape, device='meta').stride())
    matrices = stack.full_tensor().unbind(1)
    results = torch.stack(list(orthogonalize_in_shares(matrices, dtype)), dim=1)  # (rows, n, columns)
    # src_data_rank=None: each process takes its rows from its own tensor, so nothing is sent
    results = distribute_tensor(results, p.device_mesh, p.placements, src_data_rank=None)
    return results.to_local().unbind(1)


def orthogonalize_in_shares(matrices, dtype):
    """Return the orthogonalized `matrices`, (n, ..., rows, columns), of a list that is the same in all
    processes. Each process works on its share and sends the results to all."""
    n_own = math.ceil(len(matrices) / n_processes())
    if n_own == len(matrices):
        return zeropower_via_newtonschulz(torch.stack(matrices).to(dtype))
    first = dist.get_rank() * n_own
    own = list(matrices[first:first + n_own])
    while len(own) < n_own:  # the same number in each process
        own.append(torch.zeros_like(matrices[0]))
    own = zeropower_via_newtonschulz(torch.stack(own).to(dtype)).contiguous()  # (n_own, rows, columns)
    results = own.new_empty(n_processes() * n_own, *own.shape[1:])
    dist.all_gather_into_tensor(results, own)
    return results[:len(matrices)]
