"""Muon for the matrices inside the blocks, and AdamW for the rest: one optimizer."""

import math

import torch

from optim import to_local
from support import cpu_kernels


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
        if n_sharers(params[0]) == 1:
            updates = zeropower_via_newtonschulz(torch.stack(updates).to(self.dtype))
        else:
            from support.shared_muon import orthogonalize_together
            updates = orthogonalize_together(updates, params[0], zeropower_via_newtonschulz, self.dtype)
        weights = [to_local(p) for p in params]
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
        elements = 2 ** (19 if cpu_kernels.used_on(alike[0].device) else 26)
        n = max(2, elements // shape.numel()) * n_sharers(alike[0])
        yield from (alike[i:i + n] for i in range(0, len(alike), n))


def zeropower_via_newtonschulz(G, steps=5):
    """The matrices G (n, rows, columns) with their singular values moved near one by a Newton-Schulz
    iteration: a polynomial of the matrix, so it is all matrix products. These coefficients reach 0.7 to 1.2
    in five steps, which is near enough."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.mT if G.size(-2) > G.size(-1) else G
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # no singular value above one
    for _ in range(steps):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if G.size(-2) > G.size(-1) else X


def n_sharers(p):
    """How many processes share Muon's work on a parameter: those that have its shards or, with DDP, all."""
    return p.device_mesh.size(-1) if hasattr(p, 'to_local') else getattr(p, 'n_replicas', 1)
