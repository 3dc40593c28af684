"""Weights for inference: in its dtype, and for bfloat16 on a CPU in oneDNN's own layout."""

import torch
import torch.nn as nn


class PackedLinear(nn.Module):
    """A bfloat16 Linear for inference, its weights in oneDNN's own layout: for few rows F.linear needs 1.3 to
    1.5 times as long (dev/LOG.md). Neither function has a public name; torch.compile uses both."""

    def __init__(self, linear):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, 1)
        self.bias = linear.bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, 'none', [], '')


def pack_linears(model):
    """Replace every Linear of a bfloat16 model on the CPU by a PackedLinear, if this CPU can."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                try:
                    setattr(module, name, PackedLinear(child))
                except RuntimeError:  # a CPU without the instructions
                    return


def to_inference(model, device, dtype):
    """For generate() alone: the weights on `device` in `dtype`, a string. Returns model."""
    for p in model.parameters():  # not the table of rotations
        p.data = p.data.to(device, getattr(torch, dtype))
    if torch.device(device).type == 'cpu' and dtype == 'bfloat16':
        pack_linears(model)
    return model.to(device)
