"""The cross-entropy of a large vocabulary without ever holding all logits: a few tokens at a time."""

import dataclasses
import functools

import torch
from torch.nn import functional as F


def use_chunked_loss(model, chunk_size):
    """Let model.loss() hold the logits of chunk_size tokens at a time; 0: leave it as it is."""
    if chunk_size:
        model.loss = functools.partial(chunked_loss, model, chunk_size)


def chunked_loss(model, chunk_size, x, targets, reduction='mean', return_logits=False):
    """(None, loss) as GPT.loss defines it, for x (B, T, C), targets (B * T)."""
    x = x.flatten(0, 1)
    if reduction == 'mean':
        return None, ChunkedLoss.apply(x, model.lm_head.weight, targets, model.config.softcap, chunk_size)
    losses = torch.cat([F.cross_entropy(model.logits(part).float(), target, ignore_index=-1, reduction='none')
                        for part, target in zip(x.split(chunk_size), targets.split(chunk_size))])
    return None, losses


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of the logits x W^T (within softcap) for x (N, C), W (V, C), targets (N), chunk_size
    tokens at a time. The gradients of a chunk are computed while its logits are there.
    https://arxiv.org/abs/2410.10989"""

    @staticmethod
    def forward(ctx, x, weight, targets, softcap, chunk_size):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        dx, dw, total = torch.empty_like(x), torch.zeros_like(weight), 0.0
        w, targets = weight.to(dtype), targets.view(-1, 1)
        chunks = zip(x.split(chunk_size), targets.split(chunk_size), dx.split(chunk_size))
        for part, target, out in chunks:
            part, keep, target = part.to(dtype), target >= 0, target.clamp(min=0)
            logits = part @ w.mT
            if softcap:
                logits = softcap * torch.tanh(logits.float() / softcap)
            logp = F.log_softmax(logits.float(), dim=-1)  # (chunk_size, V)
            total = total - (logp.gather(1, target) * keep).sum()
            # the gradient of the logits: probabilities, less one for the target
            d = logp.exp_()
            if torch.compiler.is_compiling():  # it would not fuse a scatter with what is around
                d = d - (torch.arange(len(w), device=w.device) == target).float()
            else:
                d.scatter_add_(1, target, torch.full_like(d[:, :1], -1.0))
            if softcap:
                d = d * (1 - (logits / softcap).square())
            d = d.to(dtype)
            out.copy_(d @ w * keep)
            dw += d.mT @ (part * keep)
        n = (targets >= 0).sum().clamp(min=1)
        ctx.save_for_backward(dx, dw, n)
        return total / n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        dx, dw, n = ctx.saved_tensors
        # only now divided by n: float16 has no room for a share of a mean
        return dx.mul_(grad / n), dw.mul_(grad / n), None, None, None


def usable_on(model, dist):
    """Whether the loss above is the one that the model's own forward() defines, which may have been edited;
    says so if not. Tried on a tiny network of the same class; random numbers are left alone."""
    small = dataclasses.replace(model.config, n_layer=1, n_head=2, n_kv_head=2, n_embd=16, mlp_width=16,
                                vocab_size=11, block_size=8, dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        net = type(model)(small)
        torch.nn.init.normal_(net.lm_head.weight)
        idx, targets = torch.randint(11, (2, 8)), torch.randint(-1, 11, (2, 8))
        loss = net(idx, targets)[1]
        use_chunked_loss(net, 3)
        same = torch.allclose(net(idx, targets)[1], loss, rtol=1e-3, atol=1e-5)
    if not same:
        dist.print("note: the loss in model.py is not the one in support/chunked_loss.py, so all logits are "
                   "held in memory at once")
    return same
