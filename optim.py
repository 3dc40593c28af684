"""
Which parameter is trained by what. AdamW for everything, as in nanoGPT; or Muon for the matrices inside the blocks and AdamW
for the rest: embeddings, head, norms, biases.
"""

import math

import torch

from parallel import choose_dtype

MUON_LR = 0.02  # Keller Jordan's; its unit is another than AdamW's


def create_optimizer(model, learning_rate, weight_decay, betas, eps, matrix_optimizer='adamw', matrix_lr=None, embedding_lr=None, head_lr=None,
                     matrix_weight_decay=None, momentum=0.95):
    """One optimizer for all parameters of a GPT. Rates that are None are learning_rate (for Muon MUON_LR); weight decay is for what has
    two dimensions or more, not for norms and biases. group['lr_scale'] is a group's rate as a multiple of learning_rate."""
    muon = matrix_optimizer == 'muon'
    rates = {'embedding': embedding_lr, 'matrix': MUON_LR if muon and matrix_lr is None else matrix_lr, 'head': head_lr, 'vector': None}
    params = {role: [] for role in rates}
    for name, p in model.named_parameters():
        params['vector' if p.dim() < 2 else 'matrix' if name.startswith('transformer.h.') else 'head' if name == 'lm_head.weight' else 'embedding'].append(p)
    groups = []
    for role, rate in rates.items():
        rate, decay = learning_rate if rate is None else rate, 0.0 if role == 'vector' else weight_decay
        decay = matrix_weight_decay if role == 'matrix' and matrix_weight_decay is not None else decay
        options = {'lr': rate, 'lr_scale': rate / learning_rate if learning_rate else 0.0, 'weight_decay': decay, 'muon': muon and role == 'matrix'}
        if groups and role != 'vector' and options.items() <= groups[-1].items():  # alike: one group. So a GPT-2 has nanoGPT's two, in its order
            groups[-1]['params'] += params[role]
        elif params[role]:
            groups.append({'params': params[role], **options, 'momentum': momentum})
    # fused: one kernel for all tensors; on a CPU it also saves the memory traffic of a dozen small steps
    kind = MuonAdamW if muon else torch.optim.AdamW
    return kind(groups, lr=learning_rate, betas=betas, eps=eps, fused=model.lm_head.weight.device.type in ('cuda', 'cpu'))


class MuonAdamW(torch.optim.AdamW):
    """AdamW, but the groups with muon=True get the update of Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/):
    the momentum, made orthogonal, so that every direction of a matrix moves at the same speed."""

    def __setstate__(self, state):  # AdamW's looks for its own moments in every group
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self):
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group['muon']]
        super().step()
        self.param_groups = groups
        found_inf = getattr(self, 'found_inf', None)  # 1.0: this update is to be skipped, by Guard or float16's gradient scaler
        for group in groups:
            if group['muon']:
                self.muon_step(group['params'], group['lr'], group['weight_decay'], group['momentum'], found_inf)

    def muon_step(self, params, lr, weight_decay, momentum, found_inf=None):
        by_shape = {}
        for p in params:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for (rows, columns), alike in by_shape.items():
            # several at once, as small matrices alone do not fill the hardware; not too many: what fits into a CPU's cache, a GPU's memory
            n = max(2, 2 ** (19 if alike[0].device.type == 'cpu' else 26) // (rows * columns)) * shares(alike[0])
            for params in (alike[i:i + n] for i in range(0, len(alike), n)):
                for p in params:
                    if not self.state[p]:
                        self.state[p]['momentum_buffer'] = torch.zeros_like(p)
                grads, buffers = [own(p.grad) for p in params], [own(self.state[p]['momentum_buffer']) for p in params]
                keep = 1 - lr * weight_decay
                # an orthogonal matrix that is taller than wide has smaller entries
                size = -lr * math.sqrt(max(1, rows / columns))
                if found_inf is not None:  # skipped without asking the host: the momentum is averaged with itself, the weights move by nothing
                    skip = found_inf > 0
                    grads = [torch.where(skip, buffer, grad) for grad, buffer in zip(grads, buffers)]
                    keep, size = torch.where(skip, 1.0, keep), torch.where(skip, 0.0, size)
                torch._foreach_lerp_(buffers, grads, 1 - momentum)
                updates = torch._foreach_lerp(grads, buffers, momentum)  # Nesterov's look ahead
                updates = orthogonal(torch.stack(updates)) if shares(params[0]) == 1 else orthogonal_together(updates, params[0])
                weights = [own(p) for p in params]
                torch._foreach_mul_(weights, keep)
                torch._foreach_add_(weights, [update.to(weights[0].dtype) * size for update in updates])


def own(tensor):
    """What this process has of a tensor that may be divided over the processes."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


def shares(p):
    """Over how many processes the parameter is divided."""
    return p.device_mesh.size(-1) if hasattr(p, 'to_local') else 1


def orthogonal_together(parts, p):
    """orthogonal() of matrices like `p`, of whose rows each process has its `parts`: each matrix is put together in one of the processes,
    which do as many of them each, and the parts come back. A process sends its parts, and then as much, in the dtype of the work."""
    import torch.distributed as dist
    group, n, dtype = p.device_mesh.get_group(p.device_mesh.ndim - 1), len(parts), working_dtype(p.device)
    (rows, columns), W, rank = p.shape, group.size(), group.rank()
    heights = ([len(part) for part in torch.arange(rows).chunk(W)] + [0] * W)[:W]  # as FSDP divides the rows
    owned = [len(range(owner, n, W)) for owner in range(W)]
    sends, takes = [k * heights[rank] * columns for k in owned], [owned[rank] * height * columns for height in heights]
    ordered = [i for owner in range(W) for i in range(owner, n, W)]
    sent = torch.cat([parts[i].to(dtype).flatten() for i in ordered])
    taken = sent.new_empty(sum(takes))
    dist.all_to_all_single(taken, sent, takes, sends, group=group)
    whole = torch.cat([part.view(owned[rank], height, columns) for part, height in zip(taken.split(takes), heights)], dim=1)  # (owned, rows, columns)
    whole = orthogonal(whole) if owned[rank] else whole
    dist.all_to_all_single(sent, torch.cat([part.flatten() for part in whole.split(heights, dim=1)]), sends, takes, group=group)
    back = dict(zip(ordered, sent.view(n, heights[rank], columns)))
    return [back[i] for i in range(n)]


class Guard:
    """Makes the updates and skips those whose loss or gradient is not finite. The device decides, so the host need not wait; it
    remembers what it skipped until report(). From max_bad_steps in a row on nothing is updated any more."""

    def __init__(self, optimizer, scaler, device, max_bad_steps, in_a_row=0):
        self.optimizer, self.scaler, self.limit = optimizer, scaler, max_bad_steps
        self.in_a_row = torch.tensor(float(in_a_row), device=device)
        self.seen = torch.zeros(4, device=device)  # how many since the last report; iteration, loss and norm of the first of them
        self.one_more = torch.tensor([1.0, 0, 0, 0], device=device)

    def step(self, it, loss, norm):
        """The update of iteration `it`, whose loss and gradient norm (0-dim tensors) are the same in all processes."""
        bad = ~torch.isfinite(loss + norm) | (self.in_a_row >= self.limit)
        if self.scaler.is_enabled():  # it skips by itself, and does so now and then while it looks for its scale
            if self.in_a_row < self.limit:
                self.scaler.step(self.optimizer)
            self.scaler.update()
            bad &= self.scaler.get_scale() < 1
        elif self.optimizer.defaults['fused']:
            self.optimizer.found_inf = bad.float()
            self.optimizer.step()
        elif not bad.item():
            self.optimizer.step()
        self.in_a_row = (self.in_a_row + 1) * bad
        first = torch.stack([bad.float(), torch.full_like(norm, it), loss, norm])
        self.seen = torch.where(bad & (self.seen[0] == 0), first, self.seen + self.one_more * bad)

    def report(self):
        """(how many were skipped since the last report, how many in a row until now, iteration, loss and norm of the first). Waits for the device."""
        (n, it, loss, norm), in_a_row = self.seen.tolist(), int(self.in_a_row)
        self.seen.zero_()
        return int(n), in_a_row, int(it), loss, norm


def orthogonal(G, steps=5):
    """The matrices G (n, rows, columns) with their singular values moved near one, by Newton and Schulz's iteration: a polynomial
    of the matrix alone, so it is all matrix products. These coefficients reach 0.7 to 1.2 in five steps; that is near enough."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(working_dtype(G.device))
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # no singular value above one
    for _ in range(steps):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if G.size(-2) > G.size(-1) else X


def working_dtype(device):
    """orthogonal()'s: its iteration forgives rounding, so bfloat16 where the hardware has it; elsewhere that is emulated, slowly."""
    return torch.bfloat16 if choose_dtype('auto', device)[0] == 'bfloat16' else torch.float32


def load_optimizer_state(optimizer, state):
    """Take over the moments of a checkpoint but keep the options of this run: load_state_dict would silently bring back
    the old weight_decay, betas and fused. (The learning rate is set at every step anyway.)"""
    # our groups in place of the old ones, before, not after: by `fused` torch decides on which device a step counter has to be. The
    # parameters are counted through all groups, and their order is always the same, however they are divided into groups
    groups = optimizer.state_dict()['param_groups']
    n = sum(len(group['params']) for group in state['param_groups'])
    assert n == sum(len(group['params']) for group in groups), f'it has {n} parameters'
    muon = {i for group in groups if group.get('muon') for i in group['params']}
    # a matrix that has changed its optimizer starts anew
    moments = {i: own for i, own in state['state'].items() if ('momentum_buffer' in own) == (i in muon)}
    params = [p for group in optimizer.param_groups for p in group['params']]
    for i, own in moments.items():  # the fused update trusts the shapes: with others it would write beyond the end of a tensor
        shapes = {'momentum_buffer': params[i].shape} if i in muon else {'step': (), 'exp_avg': params[i].shape, 'exp_avg_sq': params[i].shape}
        assert {name: torch.as_tensor(value).shape for name, value in own.items()} == shapes, f'the state of parameter {i} has another shape'
        assert all(torch.isfinite(torch.as_tensor(value)).all() for value in own.values()), f'the state of parameter {i} is not finite'
        if hasattr(params[i], 'to_local'):  # this process's part of them, nothing is sent
            from torch.distributed.tensor import distribute_tensor
            moments[i] = {name: value if name == 'step' else distribute_tensor(torch.as_tensor(value).to(params[i].device), params[i].device_mesh, params[i].placements, src_data_rank=None)
                          for name, value in own.items()}
    optimizer.load_state_dict({'state': moments, 'param_groups': groups})
    for moments in optimizer.state.values():  # on a CPU these still are the mapped file, which is about to be replaced
        moments.update({k: v.clone() for k, v in moments.items() if torch.is_tensor(v) and v.device.type == 'cpu'})
