"""Weights for inference: in its dtype, and on a CPU in the layouts that its libraries read fastest."""

import torch
import torch.nn as nn
from torch.nn import functional as F


class PackedLinear(nn.Module):
    """A Linear for inference, its weights in oneDNN's own layout: for few rows F.linear needs 1.3 to 2 times
    as long (dev/LOG.md). Neither function has a public name; torch.compile uses both."""

    def __init__(self, linear):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, 1)
        self.bias = linear.bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, 'none', [], '')


class OneRowLinear(nn.Module):
    """A Linear for inference, in bfloat16 for one text at a time: for a single row torch's own product needs
    0.5 to 0.8 of the time of oneDNN's, packed or not (dev/LOG.md); for the rows of a prompt it is slow."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        before = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = before and x.numel() > x.size(-1)
        try:
            return F.linear(x, self.weight, self.bias)
        finally:
            torch.backends.mkldnn.enabled = before


def replace_linears(model, kind):
    """Replace every Linear of a model by one of another kind, if this CPU can."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                try:
                    setattr(module, name, kind(child))
                except RuntimeError:  # a CPU without the instructions
                    return


def to_inference(model, device, dtype, n_texts=None, compiling=False):
    """For generate() alone: the weights on `device` in `dtype`, a string. Returns model. n_texts: how many at
    once, if that is known. compiling: torch.compile follows, which cannot take packed matrices."""
    device = torch.device(device)
    for p in model.parameters():  # not the table of rotations
        p.data = p.data.to(device, getattr(torch, dtype))
    plain = compiling or device.type != 'cpu' or dtype == 'float16'
    if not plain and torch.backends.mkldnn.is_available():
        replace_linears(model, OneRowLinear if n_texts == 1 and dtype == 'bfloat16' else PackedLinear)
    return model.to(device)
