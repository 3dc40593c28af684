"""Weights for inference: in its dtype, and on a CPU in the layouts that its libraries read fastest."""

import torch
import torch.nn as nn

from support.devices import has_bfloat16


class PackedLinear(nn.Module):
    """A bfloat16 Linear for inference, its weights in oneDNN's own layout: for few rows F.linear needs 1.3 to
    1.5 times as long (dev/LOG.md). Neither function has a public name; torch.compile uses both."""

    def __init__(self, linear):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, 1)
        self.bias = linear.bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, 'none', [], '')


class Int8Linear(nn.Module):
    """A Linear for inference whose weights have one byte each, with a scale for each row; what comes in is
    rounded to bytes as well, with a scale for each call. oneDNN's, as torch.compile uses it."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.data.float()
        self.scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
        rows = (weight / self.scales[:, None]).round().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(rows, None)
        self.zeros = torch.zeros(len(rows), dtype=torch.long)
        self.bias = None if linear.bias is None else linear.bias.data.float()
        self.weight = weight.new_empty(0)  # to be asked for its device

    def forward(self, x):
        scale = max(x.abs().amax().item(), 1e-12) / 127
        # unsigned: for signed ones it takes a thousand times as long
        rounded = (x.float() / scale).round().add_(128).to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(rounded, scale, 128, self.packed, self.scales, self.zeros,
                                                  self.bias, 1.0, 0, x.dtype, 'none', [], '')


def replace_linears(model, kind):
    """Replace every Linear of a model by one of another kind, if this CPU can."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                try:
                    setattr(module, name, kind(child))
                except RuntimeError:  # a CPU without the instructions
                    return


def to_inference(model, device, dtype):
    """For generate() alone: the weights on `device` in `dtype`, a string. Returns model. 'int8', on a CPU, is
    that of the matrices; all else computes in bfloat16 or, where the CPU has none, float32."""
    device = torch.device(device)
    if dtype == 'int8':
        replace_linears(model, Int8Linear)
        dtype = 'bfloat16' if has_bfloat16(device) else 'float32'
    for p in model.parameters():  # not the table of rotations
        p.data = p.data.to(device, getattr(torch, dtype))
    if device.type == 'cpu' and dtype == 'bfloat16' and torch.backends.mkldnn.is_available():
        replace_linears(model, PackedLinear)
    return model.to(device)
