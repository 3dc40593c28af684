"""How many floating-point operations the training takes, and which share of the device's peak it makes."""

import math

import torch.nn as nn

from support.peak_flops import peak_flops_of


def flops_per_token(model):
    """Forward and backward: 6 per weight of a matrix product, 12 L C T for attention (PaLM, appendix B)."""
    config = model.config
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    return 6 * weights + 12 * config.n_layer * config.n_embd * config.block_size


def estimate_mfu(model, fwdbwd_per_iter, dt, peak_flops=None):
    """Model FLOPs utilization: the share of peak_flops (None: this device's bfloat16 peak) that
    fwdbwd_per_iter sequences of block_size tokens in dt seconds make. nan for a device whose peak is
    unknown."""
    if peak_flops is None:
        peak_flops = peak_flops_of(model.lm_head.weight.device)
    if peak_flops is None:
        return math.nan
    return model.flops_per_token() * model.config.block_size * fwdbwd_per_iter / dt / peak_flops
