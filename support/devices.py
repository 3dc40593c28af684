"""What this process computes on, and with which arithmetic."""

import importlib.util
import os
import sys
from contextlib import nullcontext

import torch

from configurator import fail
from support import cpu_kernels

if tuple(int(n) for n in torch.__version__.split('+')[0].split('.')[:2]) < (2, 9):
    fail(f"torch {torch.__version__} is too old. flatgpt needs 2.9 or newer: pip install --upgrade torch")


# not the ones with CUDA graphs: there a micro-batch would overwrite the loss of the one before
COMPILE_MODES = ('default', 'max-autotune-no-cudagraphs')


def choose_device(device, local_rank=0, is_distributed=False):
    """(torch.device, why) for 'auto', 'cpu', 'cuda', 'cuda:1', 'mps'. Under torchrun each process takes its
    own GPU."""
    if device == 'cpu':
        return torch.device('cpu'), 'as asked'
    mps = torch.backends.mps.is_available() and not is_distributed
    if device == 'auto' and not torch.cuda.is_available() and not mps:
        return torch.device('cpu'), 'no GPU was found'
    from support.gpus import choose_gpu
    return choose_gpu(device, local_rank, is_distributed)


def has_bfloat16(device):
    """Whether the hardware has it. Elsewhere it is emulated, slower than float32, although
    torch.cuda.is_bf16_supported() says True."""
    if device.type == 'cuda':
        return torch.cuda.get_device_capability(device)[0] >= 8
    if cpu_kernels.used_on(device):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == 'cpu'  # which stands for a GPU


def choose_dtype(dtype, device):
    """(name, why) of the dtype of matrix products."""
    if dtype not in ('auto', 'float32'):
        from support.dtype_checks import check_dtype
        check_dtype(dtype, device)
    if dtype != 'auto':
        return dtype, 'as asked'
    if has_bfloat16(device):
        return 'bfloat16', f"this {'GPU' if device.type == 'cuda' else 'CPU'} has it"
    if device.type == 'cuda':
        return 'float16', 'this GPU has no bfloat16'
    if device.type == 'cpu':
        return 'float32', 'this CPU has no bfloat16 instructions'
    return 'float32', f'the safe one on {device.type}'


def choose_compile(wish, device):
    """(True or False, why). 'auto' compiles on GPUs if Triton and a C compiler are there; a mode of
    torch.compile compiles, too."""
    if wish not in (True, False, 'auto', *COMPILE_MODES):
        fail(f"no such value of compile ({wish}). use --compile=auto, True, False or "
             f"{' or '.join(COMPILE_MODES)}")
    if wish != 'auto':
        return bool(wish), 'as asked'
    if device.type != 'cuda':
        return False, f'it seldom pays on {device.type}'
    from support.gpus import can_compile
    return can_compile()


def autocast(device, dtype):
    """A context in which matrix products are made in `dtype` (a word)."""
    return nullcontext() if dtype == 'float32' else torch.autocast(device.type, getattr(torch, dtype))


def name_of(device):
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    return f'cpu ({torch.backends.cpu.get_cpu_capability()})' if device.type == 'cpu' else device.type


def memory_of(device):
    """Bytes of memory that the device has; for a CPU, the machine."""
    if device.type != 'cpu':
        from support.gpus import memory_of_gpu
        return memory_of_gpu(device)
    if not hasattr(os, 'sysconf'):  # Windows does not tell
        return 2**34
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def peak_memory(device):
    """Gigabytes that this process has used at most, of a GPU's memory or of main memory. None where nobody
    counts."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device.type == 'mps':
        return torch.mps.driver_allocated_memory() / 1e9
    if importlib.util.find_spec('resource') is None:  # Windows
        return None
    import resource
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def choose_loss_chunk_size(device, tokens, vocab_size, memory):
    """How many tokens' logits to hold at a time in the loss; 0: all, unless they would take more than an
    eighth of the memory, in float32 and with their gradient."""
    chunk_size = max(1, 2 ** (26 if device.type == 'cpu' else 28) // vocab_size)
    return chunk_size if 10 * tokens * vocab_size > memory / 8 and tokens > chunk_size else 0
