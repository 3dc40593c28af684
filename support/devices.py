"""What this process computes on, and with which arithmetic."""

import functools
import os
import re
import sys
from contextlib import nullcontext, suppress

import torch
from torch.utils.checkpoint import checkpoint

from configurator import fail

if torch.__version__ < '2.9.0a0':
    fail(f"torch {torch.__version__} is too old. flatgpt needs 2.9 or newer: pip install --upgrade torch")


def choose_device(device, local_rank=0, is_distributed=False):
    """(torch.device, why) for 'auto', 'cpu', 'cuda', 'cuda:1', 'mps'. Under torchrun each process takes its
    own GPU."""
    why = 'as asked'
    if device == 'auto':
        device, why = 'cpu', 'no GPU was found'
        if torch.backends.mps.is_available() and not is_distributed:
            device, why = 'mps', 'an Apple GPU was found'
        if torch.cuda.is_available():
            device, why = 'cuda', 'a GPU was found'
    if not re.fullmatch(r'cpu|mps|cuda(:\d+)?', device):
        fail(f"no such device ({device}). use --device=auto, cpu, cuda, cuda:1 or mps")
    device = torch.device(device)
    if device.type == 'cuda':
        # torch.cuda.set_device wants a number
        device = torch.device('cuda', local_rank if is_distributed else device.index or 0)
        count = torch.cuda.device_count()
        if device.index >= count:
            fail(f"device={device}, but torch finds {count} GPU(s) here. use --device=auto, torchrun with "
                 f"--nproc_per_node={count}, or a torch built for the GPU's driver", everywhere=count > 0)
        torch.cuda.set_device(device)  # what asks for "the GPU" without a number gets this one
    if device.type == 'mps' and (is_distributed or not torch.backends.mps.is_available()):
        fail("device=mps is for one process on a Mac with an Apple GPU. not torchrun; or use --device=cpu")
    return device, why


def has_bfloat16(device):
    """Whether the hardware has it. Elsewhere it is emulated, slower than float32, although
    torch.cuda.is_bf16_supported() says True."""
    if device.type == 'cuda':
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device.type == 'cpu':
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == 'meta'


def choose_dtype(dtype, device):
    """(name, why) of the dtype of matrix products."""
    usable = ['float32']  # on Apple GPUs no more: https://github.com/pytorch/pytorch/issues/195910
    if device.type in ('cuda', 'meta'):  # meta: plan.py, for GPUs that are not here, Ampere or newer
        usable.append('float16')  # CPUs only emulate it
    if device.type == 'cpu' or has_bfloat16(device):
        usable.append('bfloat16')
    if dtype not in ('auto', *usable):
        fail(f"no such dtype ({dtype}) on {name_of(device)}. use --dtype=auto or {' or '.join(usable)}")
    if dtype != 'auto':
        return dtype, 'as asked'
    kind = 'CPU' if device.type == 'cpu' else 'GPU'
    if has_bfloat16(device):
        return 'bfloat16', f'this {kind} has it'
    return 'float16' if device.type == 'cuda' else 'float32', f'this {kind} has no fast bfloat16'


def choose_compile(wish, device):
    """(True or False, why). 'auto' tries it on GPUs: see compile_model."""
    if wish not in (True, False, 'auto'):
        fail(f"no such value of compile ({wish}). use --compile=auto, True or False")
    if wish != 'auto':
        return bool(wish), 'as asked'
    if device.type != 'cuda':
        return False, f'it seldom pays on {device.type}'
    return True, 'a GPU is there'


def autocast(device, dtype):
    """A context in which matrix products are made in `dtype` (a word)."""
    return nullcontext() if dtype == 'float32' else torch.autocast(device.type, getattr(torch, dtype))


def name_of(device):
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    return f'cpu ({torch.backends.cpu.get_cpu_capability()})' if device.type == 'cpu' else device.type


def memory_of(device):
    """Bytes of memory that the device has; for a CPU a process's share of the machine's."""
    if device.type == 'mps':
        return torch.mps.recommended_max_memory()
    if device.type == 'cuda':
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, 'sysconf'):  # Windows does not tell
        return 2**34
    return (os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
            // int(os.environ.get('LOCAL_WORLD_SIZE', 1)))


def peak_memory(device):
    """Gigabytes that this process has used at most, of a GPU's memory or of main memory. None where nobody
    counts."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device.type == 'mps':
        return torch.mps.driver_allocated_memory() / 1e9
    with suppress(ImportError):  # on Windows
        import resource
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, on macOS bytes
        return used / (1e9 if sys.platform == 'darwin' else 1e9 / 1024)


def choose_loss_chunk_size(device, tokens, vocab_size, memory):
    """How many tokens' logits to hold at a time in the loss; 0: all, unless they would take more than a
    quarter of the memory, in float32 and with their gradient."""
    chunk_size = 2 ** (26 if device.type == 'cpu' else 28) // vocab_size
    return chunk_size if 10 * tokens * vocab_size > memory / 4 and tokens > chunk_size else 0


def use_chunked_loss(model, tokens, device):
    """Let model.loss() hold the logits of some tokens at a time, if those of all would take much memory."""
    if chunk_size := choose_loss_chunk_size(device, tokens, model.config.vocab_size, memory_of(device)):
        model.loss = functools.partial(chunked_loss, model, chunk_size)


def chunked_loss(model, chunk_size, x, targets, reduction='mean', return_logits=False):
    """(None, loss) for x (B, T, C), targets (B * T): what the class's own loss(), as you may have edited it,
    gives for each of chunk_size tokens, and their mean over targets that are not -1. Logits are computed once
    more in backward: a third more arithmetic in the head."""
    loss = functools.partial(type(model).loss, model, reduction='none', return_logits=False)
    parts = zip(x.view(1, -1, x.size(-1)).split(chunk_size, dim=1), targets.split(chunk_size))
    losses = torch.cat([checkpoint(loss, *part, use_reentrant=False)[1] for part in parts])
    if reduction == 'mean':
        losses = torch.where(targets >= 0, losses, 0.0).sum() / (targets >= 0).sum()
    return None, losses


def peak_flops_of(device):
    """FLOP/s of a device by the table below; None for one that it does not have."""
    if device.type != 'cuda':
        return None
    # 'NVIDIA H100 80GB HBM3' -> nvidia, h100, 80gb, hbm3
    words = set(re.split('[^a-z0-9]+', torch.cuda.get_device_name(device).lower()))
    # "RTX 4080 SUPER", "4090 D", Max-Q: other peaks
    if words.intersection('laptop ti super d max mig'.split()):
        return None
    return next((peak for key, peak in PEAK_FLOPS.items() if set(key.split()) <= words), None)


# Dense bfloat16 matrix products (float16 where there is no bfloat16), by the makers' data sheets. The first
# row whose words are all in the device's name counts. A float32 run is measured against the same number.
PEAK_FLOPS = {
    'b300': 2.25e15, 'b200': 2.25e15, 'h200 nvl': 835e12, 'h200': 989e12, 'h100 pcie': 756e12,
    'h100 nvl': 835e12, 'h100': 989e12, 'h800': 989e12, 'gh200': 989e12, 'a100': 312e12, 'a800': 312e12,
    'a40': 149.7e12, 'a10': 125e12, 'l40s': 362e12, 'l4': 121e12, 'v100': 125e12, 't4': 65e12,
    'rtx 5090': 209.5e12, 'rtx 4090': 165.2e12, 'rtx 3090': 71.2e12, 'rtx a6000': 154.8e12,
    'mi300x': 1307e12,
}
