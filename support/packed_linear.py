"""Weights for inference: in its dtype, and on a CPU in the layouts that its libraries read fastest."""

import torch
import torch.nn as nn

from support.devices import has_bfloat16


class PackedLinear(nn.Module):
    """A Linear for inference, its weights in oneDNN's own layout: for few rows F.linear needs 1.3 to 2 times
    as long (dev/LOG.md). Neither function has a public name; torch.compile uses both."""

    def __init__(self, linear):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, 1)
        self.bias = linear.bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, 'none', [], '')


class Int8Linear(nn.Module):
    """A Linear for inference on a CPU whose weights have one byte each, with a scale for each row; what comes
    in is rounded to bytes as well, with a scale for each position. oneDNN's, as torch.compile uses it."""

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
        floats = x.float()
        scale = floats.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
        # unsigned, around 128: for signed bytes it has no fast kernel
        rounded = (floats / scale).round().add_(128).to(torch.uint8)
        y = torch.ops.onednn.qlinear_pointwise(rounded, 1.0, 128, self.packed, self.scales, self.zeros,
                                               None, 1.0, 0, torch.float32, 'none', [], '') * scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def int8_problem():
    """Why this CPU or this torch cannot multiply bytes, None if it can. Without VNNI sums overflow."""
    try:
        if not torch.cpu._is_vnni_supported():
            return 'this CPU lacks VNNI'
        Int8Linear(nn.Linear(8, 8))(torch.ones(1, 8))
    except (AttributeError, RuntimeError) as e:  # NotImplementedError is one of the latter
        return str(e).strip().split('\n')[0]


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
    """For generate() alone: the weights on `device` in `dtype`, a string. Returns model. 'int8' (CPUs): of
    the matrices alone; all else is in bfloat16 or, where the CPU has none, float32."""
    device = torch.device(device)
    if dtype == 'int8':
        replace_linears(model, Int8Linear)
        dtype = 'bfloat16' if has_bfloat16(device) else 'float32'
    for p in model.parameters():  # not the table of rotations
        p.data = p.data.to(device, getattr(torch, dtype))
    if device.type == 'cpu' and dtype != 'float16' and torch.backends.mkldnn.is_available():
        replace_linears(model, PackedLinear)
    return model.to(device)
