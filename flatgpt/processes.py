"""
The device and its arithmetic; DDP and FSDP; the first step of a run.

In a single process, the functions that communicate return at once.
"""

import contextlib
import gc
import os
import platform
import re
import shlex
import shutil
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed

from configurator import InputError, launched_by_torchrun, print0, process_ranks
from flatgpt.files import commit, first_line, uncommitted_diff

if torch.__version__ < '2.11.0a0':  # a TorchVersion, which compares numbers
    raise InputError(f"torch {torch.__version__} is too old. Install 2.11 or newer: "
                     "pip install --upgrade torch")

# -----------------------------------------------------------------------------
# the device


def choose_device(device, local_rank=0):
    """Return the device as 'cpu', 'mps', 'cuda' or 'cuda:N'. With torchrun, N is always the local rank."""
    if device == 'auto':
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator.type if accelerator is not None else 'cpu'
        if device not in ('cpu', 'cuda', 'mps'):
            print0(f"note: {device} is not tested, using the CPU. To try it, use --device={device}")
            device = 'cpu'
        if device == 'mps' and launched_by_torchrun():
            device = 'cpu'  # several processes cannot share it
        if device == 'cpu' and torch.version.cuda is None and shutil.which('nvidia-smi'):
            # the build for Windows on PyPI
            print0("note: torch is built without CUDA, using the CPU. To use the NVIDIA GPU: pip install "
                   "--force-reinstall torch --index-url https://download.pytorch.org/whl/cu130")
    if device in ('cpu:0', 'mps:0'):
        device = device.removesuffix(':0')  # there is only one
    if device == 'cuda' or (device.startswith('cuda') and launched_by_torchrun()):
        device = f'cuda:{local_rank}'
    try:
        torch.zeros(1, device=device)
        if device.startswith('cuda'):
            torch.cuda.set_device(device)  # for functions that use the current GPU
    except (RuntimeError, AssertionError) as e:  # AssertionError: torch is built without CUDA
        raise InputError(f"this device does not work: {device} ({first_line(e)}). Use --device=cpu, cuda, "
                         "cuda:1 or mps, torchrun with --nproc_per_node=GPUS, or another build of torch, "
                         "which docs/gpus.md names for old GPUs.")
    return device


def has_bfloat16(device):
    """Return whether the hardware computes in bfloat16. Elsewhere it is emulated, and slower than float32."""
    if device.startswith('cuda'):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device == 'cpu' and torch.backends.mkldnn.is_available():  # oneDNN, which uses these instructions
        capabilities = torch.cpu.get_capabilities()
        names = ['avx512_bf16', 'amx_bf16', 'bf16']  # the last one on ARM
        return any(capabilities.get(name, False) for name in names)
    return False


def choose_dtype(dtype, device):
    """Return the name of the dtype of matrix products. 'auto': bfloat16 if the hardware has it."""
    fallback = 'float16' if device.startswith('cuda') else 'float32'
    if dtype == 'auto':
        return 'bfloat16' if has_bfloat16(device) else fallback
    usable = {
        'float32': True,
        'bfloat16': device == 'cpu' or has_bfloat16(device),
        'float16': device.startswith('cuda'),
    }
    if device == 'mps':  # less memory, the same speed
        # before, attention sees later tokens: https://github.com/pytorch/pytorch/issues/195910
        usable['bfloat16'] = torch.__version__ >= '2.13'
    if dtype not in usable:
        raise InputError(f"dtype must be one of auto, {', '.join(usable)}: {dtype}.")
    if not usable[dtype]:
        print0(f"note: {device_name(device)} with torch {torch.__version__} does not support {dtype}, using "
               f"{fallback}")
        return fallback
    return dtype


def choose_compile(compile, device):
    """Return whether to call torch.compile. 'auto': on GPUs; on a CPU it rarely pays."""
    if compile not in (True, False, 'auto'):
        raise InputError(f"compile must be one of auto, True, False: {compile}.")
    if compile != 'auto':
        return compile
    if not device.startswith('cuda'):
        return False
    try:
        torch.compile(lambda: None)  # compiles nothing yet, but raises if this Python is not supported
    except Exception as e:
        print0(f"note: torch.compile does not work, so nothing is compiled ({first_line(e)})")
        return False
    return True


def autocast(device, dtype):
    """Return a context in which matrix products are computed in `dtype`, a name."""
    if dtype == 'float32':
        return contextlib.nullcontext()
    return torch.autocast(device.partition(':')[0], getattr(torch, dtype))


def to_device(array, device):
    """Return a numpy array as a tensor on the device. A copy to a GPU is asynchronous."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.startswith('cuda'):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def synchronize(device):
    """Wait until the device has finished its work."""
    if device != 'cpu':
        torch.accelerator.synchronize()


class Stopwatch:
    """Seconds of training, without evaluations, saves and samples. It runs from the first start() on."""

    def __init__(self, device, seconds=0.0):
        self.device = device
        self.seconds = seconds  # up to the last stop
        self.started = None  # None: it is stopped

    def start(self):
        if self.started is None:
            self.started = time.perf_counter()

    def stop(self):
        """Wait for the device, then stop. Return the seconds so far."""
        if self.started is not None:
            synchronize(self.device)
            self.seconds += time.perf_counter() - self.started
            self.started = None
        return self.seconds


def device_name(device):
    """Return the name of the hardware, such as 'NVIDIA H100 80GB HBM3'."""
    if device.startswith('cuda'):
        return torch.cuda.get_device_name(device)
    if device == 'cpu':
        return f'cpu ({torch.backends.cpu.get_cpu_capability()})'
    return device


def peak_memory(device):
    """Return the maximum memory of this process so far, in GB; None if the platform does not report it."""
    if device.startswith('cuda'):
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device == 'mps':
        return torch.mps.driver_allocated_memory() / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 1e9 if sys.platform == 'darwin' else used / 1e6  # bytes there, KiB elsewhere


def loss_chunk_size(device, n_tokens, vocab_size, compiled):
    """Return the number of tokens whose logits the loss should hold at a time; 0: all of them.

    All logits at once are a tenth faster, so they are split only if they would take a third of the memory.
    The compiled loss keeps 4 bytes per logit; the plain one logits, probabilities and gradient, 10 bytes.
    """
    if device.startswith('cuda'):
        memory = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, 'sysconf'):
        memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
        memory //= int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    else:  # Windows
        memory = 2**34
    bytes_per_logit = 4 if compiled else 10
    if bytes_per_logit * n_tokens * vocab_size < memory / 3:
        return 0
    logits_at_once = 2**26 if device == 'cpu' else 2**28
    return min(n_tokens, max(1, logits_at_once // vocab_size))


# Dense bfloat16 matrix products in FLOP/s (float16 for GPUs without bfloat16), from the data sheets. The
# first row whose words are all in the device's name is used; also for float32 runs.
PEAK_FLOPS = {
    'b300': 2.25e15,
    'b200': 2.25e15,
    'h200 nvl': 835e12,
    'h200': 989e12,
    'h100 pcie': 756e12,
    'h100 nvl': 835e12,
    'h100': 989e12,
    'h800': 989e12,
    'gh200': 989e12,
    'a100': 312e12,
    'a800': 312e12,
    'a40': 149.7e12,
    'a10': 125e12,
    'l40s': 362e12,
    'l4': 121e12,
    'v100': 125e12,
    't4': 65e12,
    'rtx 5090': 209.5e12,
    'rtx 4090': 165.2e12,
    'rtx 3090': 71.2e12,
    'rtx a6000': 154.8e12,
    'mi300x': 1307e12,
}


def peak_flops_of(device):
    """Return the peak FLOP/s of a GPU, or None if it is not in the table."""
    if not device.startswith('cuda'):
        return None
    # 'NVIDIA H100 80GB HBM3' -> nvidia, h100, 80gb, hbm3
    words = set(re.split('[^a-z0-9]+', torch.cuda.get_device_name(device).lower()))
    if words & {'laptop', 'ti', 'super', 'd', 'max', 'mig'}:  # variants with other peaks: "4090 D"
        return None
    for key, peak in PEAK_FLOPS.items():
        if words.issuperset(key.split()):
            return peak
    return None


def environment(device):
    """Return what a result depends on besides the settings, a dict: versions, machine, code."""
    is_first = process_ranks()[0] == 0  # the others need not ask git
    return {
        'command': shlex.join(sys.argv),
        'python': platform.python_version(),
        'torch': str(torch.__version__),
        'cuda': torch.version.cuda,
        'cudnn': torch.backends.cudnn.version(),  # 91900 is 9.19.0
        'machine': platform.node(),
        'system': platform.platform(),
        'device': device_name(device),
        'threads': torch.get_num_threads(),
        'processes': process_ranks()[2],
        'commit': commit() if is_first else None,
        'diff': uncommitted_diff() if is_first else None,
    }


# -----------------------------------------------------------------------------
# the processes


def init_processes(backend, device, timeout_seconds):
    """Connect the processes that torchrun has started. backend: 'auto', 'nccl' or 'gloo'.

    gloo is used in addition to nccl: values on the CPU are sent without waiting for a GPU. nccl, nanoGPT's
    default, is replaced by gloo on CPUs.
    """
    if backend not in ('auto', 'nccl', 'gloo'):
        raise InputError(f"backend must be one of auto, nccl (GPUs), gloo (CPUs): {backend}.")
    if backend != 'gloo' and device.startswith('cuda') and torch.distributed.is_nccl_available():
        backend = 'cpu:gloo,cuda:nccl'
    else:
        backend = 'gloo'
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, world_size = next(torch.distributed.rendezvous('env://', timeout=timeout))
    if os.environ.get('LOCAL_WORLD_SIZE') == os.environ['WORLD_SIZE']:
        # The store outlives a restart by torchrun, after which a process may read the address of one that has
        # ended: give each attempt its own names. Several machines count their restarts separately
        attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
        store = torch.distributed.PrefixStore(f'attempt{attempt}', store)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size,
                                         timeout=timeout)


def is_connected():
    """Return whether init_processes() was called. Some builds of torch have no torch.distributed."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def all_reduce_any(flag):
    """Return whether `flag` is true in any process. It is sent over gloo, without waiting for a GPU."""
    if not is_connected():
        return bool(flag)
    number = torch.tensor(int(bool(flag)))
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
    return number.item() > 0


def all_reduce_sum(tensor):
    """Sum `tensor` over the processes, in place, and return it."""
    if is_connected():
        torch.distributed.all_reduce(tensor)
    return tensor


def mean_over_processes(tensor):
    """Return the mean of `tensor` over the processes, a new tensor."""
    return all_reduce_sum(tensor.clone()) / process_ranks()[2]


def broadcast(value):
    """Return the first process's `value`, any plain object, in all processes."""
    if not is_connected():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0, device=torch.device('cpu'))
    return values[0]


def check_same(values):
    """Raise InputError if the dict of plain values `values` differs between processes."""
    if not is_connected():
        return
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, values)
    for rank, theirs in enumerate(everyone):
        for name in everyone[0] | theirs:
            if theirs.get(name) != everyone[0].get(name):
                raise InputError(f"{name} differs between processes: {theirs.get(name)} in {rank}, "
                                 f"{everyone[0].get(name)} in 0. Start all of them with the same command, "
                                 "config files and data.")


def all_finite(tensors):
    """Return whether all values of the tensors are finite, in all processes. Waits for the device once."""
    finite = []
    for tensor in tensors:
        if hasattr(tensor, 'to_local'):  # FSDP's DTensor
            tensor = tensor.to_local()
        finite.append(torch.isfinite(tensor.detach()).all())
    return not all_reduce_any(not torch.stack(finite).all().item())


def clip_grad_norm(model, max_norm):
    """Clip the gradient to `max_norm`; 0: do not clip. Return its norm before clipping, a 0-dim tensor."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    if hasattr(norm, 'full_tensor'):
        norm = norm.full_tensor()
    return norm


def full_state_dict(state):
    """
    Return the dict `state` with each tensor unsharded and on the CPU; in processes other than the first, with
    None instead of tensors. Tied tensors stay tied. All processes call it, to gather what FSDP has sharded.
    """
    gathered = {}  # by the id of the tensor

    def gather(value):
        if isinstance(value, dict):
            return {name: gather(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [gather(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in gathered:
            full = value.full_tensor() if hasattr(value, 'full_tensor') else value
            is_first = process_ranks()[0] == 0
            gathered[id(value)] = full.detach().cpu() if is_first else None
        return gathered[id(value)]

    return gather(state)


def shard_model(model, shard, dtype, device):
    """
    Apply FSDP (https://arxiv.org/abs/2304.11277) in place to a model on the CPU: weights, gradients and
    optimizer state are sharded among groups of `shard` processes with neighbouring ranks; the weights of a
    block are gathered in `dtype` before its forward and backward pass. With fewer than all processes, there
    are several such groups (hybrid).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    if dtype == 'float16':
        raise InputError("dtype=float16 does not work with shard, as its gradients cannot be scaled. Use "
                         "--dtype=bfloat16.")
    world_size = torch.distributed.get_world_size()
    device_type = device.partition(':')[0]
    mesh = init_device_mesh(device_type, (world_size // shard, shard), mesh_dim_names=('replicate', 'shard'))
    if shard == world_size:
        mesh = mesh['shard']
    # on a CPU, LayerNorm needs its gains in float32
    exact = dtype == 'float32' or (device == 'cpu' and model.config.norm == 'layernorm')
    policy = MixedPrecisionPolicy(None if exact else getattr(torch, dtype), torch.float32,
                                  cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # embeddings and head stay in float32, so that the residual stream is as exact as in one process
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


# -----------------------------------------------------------------------------
# the first step


def warm_up(model, batch_size, block_size, with_doc_ids, ctx, device, optional):
    """
    Run forward and backward on zeros and drop the gradients, so that compiling is not part of the timings,
    and running out of memory shows at once.

    optional: if the compiler fails in any process, return False, and all processes run eagerly from now on;
    otherwise return True. Not covered: a single process fails in backward or, with FSDP, in forward. The
    others then wait for it in a collective until their timeout ends the run.
    """
    x = torch.zeros(batch_size, block_size, dtype=torch.long, device=device)
    y = torch.zeros_like(x)
    doc_ids = torch.zeros_like(x) if with_doc_ids else None

    def forward():
        with ctx:
            return model(x, y, doc_ids, return_logits=False)[1]

    def backward():
        loss.backward()

    failed = False
    for step in (forward, backward):
        reason = None
        try:
            loss = step()  # of forward(); backward() reads it
        except torch.OutOfMemoryError as e:
            e.add_note("Halve --batch_size and double --gradient_accumulation_steps: the effective batch is "
                       "unchanged. --activation_checkpointing=True saves memory as well.")
            raise
        except Exception as e:  # the compiler's failures have no common class
            if not optional:
                raise
            reason = first_line(innermost(e))
        # agree before backward, in which DDP's processes wait for each other's gradients
        failed = optional and all_reduce_any(reason)
        if failed:
            break
    model.zero_grad(set_to_none=True)
    gc.collect()
    if failed:
        print0(f"note: torch.compile failed, so the model is not compiled ({reason or 'in another process'})")
        torch.compiler.set_stance('force_eager')
        return False
    gc.freeze()  # the compiler leaves a million objects, which garbage collection would search again
    return True


def innermost(exception):
    """Return the exception with which the chain of `exception` began: for torch.compile, the cause."""
    while exception.__cause__ or exception.__context__:
        exception = exception.__cause__ or exception.__context__
    return exception
