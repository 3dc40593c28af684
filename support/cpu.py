"""
What makes a network faster on a CPU: kernels in place of torch's own, which are slow for small networks;
weights for generating in the layouts that its libraries read fastest; and threads that wait well beside other
programs. Nothing here changes model.py: faster() and to_inference() replace parts of one model.
"""

import contextlib
import functools
import glob
import itertools
import math
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

# -----------------------------------------------------------------------------
# kernels: each is a drop-in for torch's, and steps aside on other devices


def faster(model):
    """Replace torch's norms and attention in `model`, a GPT; not those of yours."""
    for module in model.modules():
        if type(module) is nn.RMSNorm and module.eps and len(module.normalized_shape) == 1:
            module.__class__ = RMSNorm
        if getattr(module, 'scaled_dot_product_attention', None) is F.scaled_dot_product_attention:
            module.scaled_dot_product_attention = scaled_dot_product_attention


class RMSNorm(nn.RMSNorm):
    """torch's own is a chain of small steps on a CPU. This one has a backward pass of its own there: 2 to 5
    times as fast."""

    def forward(self, x):
        if x.device.type != 'cpu' or x.dtype == torch.float64 or torch.compiler.is_compiling():
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
        # without what points along y, which changes nothing
        return (torch.addcmul(grad, y, (grad * y).mean(dim=-1, keepdim=True), value=-1)
                * scale).to(grad.dtype), None


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **others):
    """F.scaled_dot_product_attention: query (B, H, T, D), key and value (B, K, S, D)."""
    dtype, T = query.dtype, query.size(2)
    short = is_causal and attn_mask is None and 'scale' not in others and T == key.size(2) <= 512
    if not short or query.device.type != 'cpu' or not dtype == key.dtype == torch.bfloat16:
        # the keys may be of a cache with another dtype: see to_inference
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(key.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **others)
    # the definition itself: on short sequences torch's fused kernel takes up to seven times as long
    # (dev/LOG.md)
    key, value = (kv.repeat_interleave(query.size(1) // kv.size(1), dim=1) for kv in (key, value))
    future = torch.full((T, T), -math.inf, dtype=dtype).triu(1)
    scores = torch.baddbmm(future, query.flatten(0, 1), key.flatten(0, 1).mT,
                           alpha=query.size(-1) ** -0.5)  # (B * H, T, T)
    return F.dropout(scores.softmax(dim=-1), dropout_p).view(*query.shape[:2], T, T) @ value


# -----------------------------------------------------------------------------
# weights for generating


def to_inference(model, device, dtype, compiling=False):
    """For generate() alone: the weights on `device` in `dtype`, a string. Returns model. compiling:
    torch.compile follows, which cannot take packed matrices."""
    for p in model.parameters():  # not the table of rotations
        p.data = p.data.to(device, getattr(torch, dtype))
    if device.type == 'cpu':
        faster(model)
        # bfloat16 takes attention up to eight times as long there (dev/LOG.md)
        model.cache_dtype = torch.float32
        if not compiling:
            with contextlib.suppress(RuntimeError, AttributeError):  # a CPU, or a torch, without the kernels
                faster_linears(model)
    return model.to(device)


def faster_linears(model):
    for linear in model.modules():
        if type(linear) is nn.Linear:  # one of yours has a forward of its own
            packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data, 1)
            del linear.weight  # a Parameter cannot be packed
            linear.weight, linear.__class__ = packed, PackedLinear


class PackedLinear(nn.Linear):
    """A Linear for inference, its weights in oneDNN's own layout: for few rows F.linear needs 1.3 to 2 times
    as long (dev/LOG.md). Neither function has a public name; torch.compile uses both."""

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, 'none', [], '')


# -----------------------------------------------------------------------------
# threads. OpenMP divides each operation among threads, and one that is done spins until the others are: it
# keeps its core busy. Alone that is the fastest way to wait. Beside other programs a thread spins on the core
# that the late one needs, and an iteration takes many times as long (dev/records/shared_cpu.md).

CROWDED, ALONE = 0.12, 0.06  # shares of waiting, see below
CALM = 4  # looks without company before threads spin again


@functools.cache  # one thread looks, whoever asks
def watch(device):
    """From now on waiting threads sleep while other programs use the cores, and spin while not; this changes
    no bit of a result. Returns a few words for the run plan."""
    n = torch.get_num_threads()
    if device.type != 'cpu' or n == 1:
        return '1 thread'
    maps = Path('/proc/self/maps').read_text() if sys.platform == 'linux' else ''
    if 'libgomp' not in maps:  # not GNU's OpenMP, as in torch's wheels for Linux
        return f'{n} threads'
    threading.Thread(target=look, args=(n,), daemon=True).start()
    return f'{n} threads (they spin only while no other program uses the cores)'


def look(n_threads):
    """Have threads sleep while this process has company."""
    shares = shares_of_waiting()
    while True:
        while next(shares) <= CROWDED:
            pass
        company_left = sleep_instead_of_spinning(n_threads)
        while max(itertools.islice(shares, CALM)) >= ALONE:
            pass
        company_left.set()


def shares_of_waiting():
    """Twice a second, the share of the time in which threads of this process that could run waited for a
    core."""
    ran = waited = 0
    while True:
        before, times = (ran, waited), []  # times: nanoseconds in which each thread (ran, waited), by Linux
        for path in glob.glob('/proc/self/task/*/schedstat'):
            with contextlib.suppress(OSError):  # the thread may have ended
                times.append([int(number) for number in Path(path).read_text().split()[:2]])
        ran, waited = map(sum, zip(*times))
        yield (waited - before[1]) / max(ran + waited - sum(before), 1)
        time.sleep(0.5)


def sleep_instead_of_spinning(n_threads):
    """Until the event that this returns is set. libgomp's threads spin 300,000 times before they sleep, but
    only 100 times while the process has more of them than there are cores (libgomp's wait.h: do_spin). So
    have more, which do nothing: each thread that begins a parallel operation gets a team of its own."""
    until = threading.Event()

    def have_a_team():
        torch.ones(2**17)  # large enough to be divided
        until.wait()  # the team ends with its thread
    cores = len(os.sched_getaffinity(0))
    for _ in range((cores - n_threads) // (n_threads - 1) + 1):
        threading.Thread(target=have_a_team, daemon=True).start()
    return until
