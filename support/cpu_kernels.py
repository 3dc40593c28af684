"""
Kernels that are there for one kind of hardware: the CPU, where torch's own are slow for small networks. Each
(the other one is in rms_norm.py) is a drop-in for torch's, and steps aside for everything else.
"""

import contextlib
import math

import torch
from torch.nn import functional as F

enabled = True


@contextlib.contextmanager
def disabled():
    """Use torch's own kernels in this block, as a GPU would (plan.py estimates its memory so)."""
    global enabled
    before, enabled = enabled, False
    try:
        yield
    finally:
        enabled = before


def used_on(device):
    return enabled and device.type == 'cpu'


def in_bfloat16_on_gpu(device):
    """Whether this is the autocast to bfloat16 of a GPU, or of a CPU that stands for one."""
    kind = device.type
    low = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    return low and not used_on(device)


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                                 scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention: query (B, H, T, D), key and value (B, K, S, D)."""
    if query.dtype != key.dtype:  # the cache has another one (KVCache)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(key.dtype)
        y = F.scaled_dot_product_attention(query.to(key.dtype), key, value, attn_mask, dropout_p, is_causal,
                                           scale=scale, enable_gqa=enable_gqa)
        return y.to(query.dtype)
    T, S = query.size(2), key.size(2)
    short = is_causal and attn_mask is None and scale is None and T == S <= 512
    if not (used_on(query.device) and short and query.dtype == torch.bfloat16):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                              scale=scale, enable_gqa=enable_gqa)
    # the definition itself: on short sequences torch's fused kernel takes up to seven times as long
    # (dev/LOG.md)
    heads_per_key = query.size(1) // key.size(1)
    key = key.repeat_interleave(heads_per_key, dim=1)
    value = value.repeat_interleave(heads_per_key, dim=1)
    future = torch.full((T, T), -math.inf, dtype=query.dtype).triu(1)
    scale = query.size(-1) ** -0.5
    scores = torch.baddbmm(future, query.flatten(0, 1), key.flatten(0, 1).mT, alpha=scale)  # (B * H, T, T)
    return F.dropout(scores.softmax(dim=-1), dropout_p).view(*query.shape[:2], T, T) @ value
