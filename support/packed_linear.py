"""bfloat16 inference on a CPU: weights in oneDNN's own layout."""

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
