"""What stands just before a token, without attention: an embedding of pairs of tokens, short convolutions."""

import torch
import torch.nn as nn
from torch.nn import functional as F

SEEN = 3  # positions before its own that a convolution sees


class Near:
    """Gives a forward pass what stood before each position. positions (T), or (B, T) where several texts
    share a window; cache: a KVCache that holds what came before."""

    def __init__(self, positions, cache=None):
        self.positions, self.cache = positions, cache

    def before(self, x, n, layer=None):
        """[x (B, T, ...) of one position before, of two, ... of n]: zeros where a text begins. layer: the
        module that asks; None: x is ids."""
        T = x.size(1)
        if self.cache is None:
            longer = F.pad(x, (0, 0) * (x.dim() - 2) + (n, 0))
        else:
            # the layer's number is asked for only here: else each layer would be compiled for itself
            name = 'ids' if layer is None else layer.layer_idx
            longer = torch.cat((self.cache.before(name, x), x), dim=1)
        before = [longer[:, n - k:n - k + T] for k in range(1, n + 1)]
        if self.positions.dim() == 1:
            return before
        at = self.positions.view(*self.positions.shape, *[1] * (x.dim() - 2))
        return [y.masked_fill(at < k, 0) for k, y in enumerate(before, 1)]


class BigramEmbedding(nn.Embedding):
    """A row for a token and the one before it. With fewer rows than pairs, some share one, as in fastText
    (https://arxiv.org/abs/1607.04606)."""

    def forward(self, idx, near):
        before, = near.before(idx + 1, 1)  # 0: nothing
        return super().forward((idx * 1_000_003 + before) % self.num_embeddings)


class ShortConv(nn.Module):
    """x plus, channel by channel, a learned share of x at each of the three positions before: a depthwise
    convolution, at first without effect (https://arxiv.org/abs/2512.17351)."""

    def __init__(self, ndim, layer_idx):
        super().__init__()
        self.shares = nn.ParameterList(torch.zeros(ndim) for _ in range(SEEN))  # of one position before, ...
        self.layer_idx = layer_idx

    def forward(self, x, near):
        y = x
        for share, before in zip(self.shares, near.before(x, SEEN, self)):
            y = torch.addcmul(y, before, share.to(x.dtype))
        return y


def ends(config, B, weight):
    """What a KVCache keeps of B texts between two passes: the last id, and what convolutions read last."""
    zeros = lambda *shape, **dtype: torch.zeros(B, *shape, device=weight.device, **dtype)
    layers = range(-config.near_layers, config.n_layer)
    seen = {i: zeros(SEEN, config.n_embd, dtype=weight.dtype) for i in layers}
    return {'ids': zeros(1, dtype=torch.long), **seen}
