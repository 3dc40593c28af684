"""Where it runs: which device, with which arithmetic, in one process or in many. Scripts ask here and stay the same."""

import gc
import importlib.util
import os
import shutil
from datetime import timedelta

import torch

from configurator import fail

if tuple(int(n) for n in torch.__version__.split('+')[0].split('.')[:2]) < (2, 9):
    fail(f"torch {torch.__version__} is too old. flatgpt needs 2.9 or newer: pip install --upgrade torch")


class Processes:
    """This process among the others that `torchrun` started, or alone. rank, local_rank (on this machine), world_size,
    is_main (the one that prints and writes), device."""

    def __init__(self, device='auto', backend='auto', timeout=600):
        self.rank, self.local_rank, self.world_size = 0, 0, 1
        self.many = 'RANK' in os.environ  # one process under torchrun counts as many: it is how people try it
        if self.many:
            try:
                self.rank, self.local_rank, self.world_size = (int(os.environ[k]) for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'))
            except (KeyError, ValueError):
                fail("RANK is set, but not LOCAL_RANK and WORLD_SIZE. launch with torchrun, or unset RANK")
        self.is_main = self.rank == 0
        self.device, self.why_device = choose_device(device, self.local_rank, self.many)
        if backend not in ('auto', 'nccl', 'gloo', 'mpi', 'ucc', 'xccl'):
            fail(f"no such backend ({backend}). use --backend=auto, nccl (GPUs) or gloo (CPUs)")
        if self.device.type != 'cuda' and backend == 'nccl':
            backend = 'auto'  # nanoGPT's default, which its users spell out; it means GPUs and there are none here
        if self.many:
            import torch.distributed as dist
            # gloo beside nccl: what the hosts tell each other (any()) travels over CPU memory and waits for no GPU
            auto = 'cpu:gloo,cuda:nccl' if self.device.type == 'cuda' and dist.is_nccl_available() else 'gloo'  # Windows has no nccl
            dist.init_process_group(auto if backend in ('auto', 'nccl') else backend, timeout=timedelta(seconds=max(1, timeout)))
            self.dist = dist

    def print(self, *words):
        if self.is_main:
            print(*words, flush=True)

    def divide(self, steps, total_batch_size, batch_size, block_size):
        """(how many of an iteration's micro-batches are this process's, or a problem to report): `steps` micro-batches over all
        processes, or as many as make total_batch_size tokens."""
        n = self.world_size
        if total_batch_size:
            tokens = batch_size * block_size * n
            if total_batch_size % tokens == 0:
                return total_batch_size // tokens, None
            low = total_batch_size // tokens * tokens
            return None, (f"total_batch_size={total_batch_size} is not a multiple of batch_size x block_size x processes = {batch_size} x "
                          f"{block_size} x {n} = {tokens}. nearest: {low or tokens} or {low + tokens}")
        if steps % n == 0:
            return steps // n, None
        low = steps // n * n
        return None, (f"gradient_accumulation_steps={steps} counts over all processes and is not a multiple of their number {n}. "
                      f"nearest: {low or n} or {low + n}")

    def wrap(self, model):
        """`model` with gradients averaged over the processes in backward, when model.require_backward_grad_sync."""
        if not self.many:
            return model
        from torch.nn.parallel import DistributedDataParallel
        # not to be sent around before every forward pass: the only buffer is a table, the same everywhere
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ['rope'])
        return DistributedDataParallel(model, device_ids=[self.device.index] if self.device.type == 'cuda' else None)

    def sum(self, tensor):
        """`tensor`, summed over the processes, in place."""
        if self.many:
            self.dist.all_reduce(tensor)
        return tensor

    def any(self, number):
        """The largest `number` (an int) that a process has: what all of them then act on."""
        if not self.many:
            return number
        number = torch.tensor(number)
        self.dist.all_reduce(number, op=self.dist.ReduceOp.MAX)
        return number.item()

    def synchronize(self):
        """Wait until the device has done what it was told, so that a clock read next tells the truth."""
        if self.device.type in ('cuda', 'mps'):
            getattr(torch, self.device.type).synchronize()

    def close(self):
        if self.many:
            gc.collect()  # DDP, if nobody refers to it any more, is a cycle
            self.dist.barrier()  # nobody leaves while another still talks
            self.dist.destroy_process_group()


def choose_device(device, local_rank=0, many=False):
    """(torch.device, why) for 'auto', 'cpu', 'cuda', 'cuda:1', 'mps', ...; under torchrun each process takes a GPU of its own."""
    why = 'as asked'
    if device == 'auto':
        device, why = (('cuda', 'a GPU was found') if torch.cuda.is_available() else
                       ('mps', 'an Apple GPU was found') if torch.backends.mps.is_available() and not many else ('cpu', 'no GPU was found'))
    try:
        device = torch.device(device)
    except RuntimeError:
        fail(f"no such device ({device}). use --device=auto, cpu, cuda, cuda:1 or mps")
    if device.type == 'cuda':
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = torch.device('cuda', local_rank if many else device.index or 0)  # torch.cuda.set_device wants a number
        if count == 0:
            fail("device=cuda, but torch finds no GPU. use --device=cpu, or install a torch built for your GPU's driver")
        if device.index >= count:
            fail(f"device=cuda:{device.index}, but this machine has {count} GPU{'s' * (count > 1)}. " +
                 (f"use --nproc_per_node={count}" if many else f"use --device=cuda:{count - 1} or less"), everywhere=True)
        torch.cuda.set_device(device)  # what asks for "the GPU" without a number shall mean this one
    if device.type == 'mps' and many:
        fail("device=mps under torchrun: processes cannot share an Apple GPU. use plain python, or --device=cpu")
    if device.type == 'mps' and not torch.backends.mps.is_available():
        fail("device=mps, but this is not a Mac with an Apple GPU. use --device=cpu")
    return device, why


def choose_dtype(dtype, device):
    """(name, why) of the dtype of matrix products. bfloat16 only where the hardware has it: elsewhere it is emulated, slower
    than float32, and torch.cuda.is_bf16_supported() says True all the same."""
    if dtype not in ('auto', 'float32', 'bfloat16', 'float16'):
        fail(f"no such dtype ({dtype}). use --dtype=auto, float32, bfloat16 or float16")
    if device.type == 'cuda':
        has_bf16 = torch.cuda.get_device_capability(device)[0] >= 8
        if dtype == 'bfloat16' and not has_bf16:
            fail(f"dtype=bfloat16, but {torch.cuda.get_device_name(device)} lacks it. use --dtype=float16 or float32")
        auto = ('bfloat16', 'this GPU has it') if has_bf16 else ('float16', 'this GPU has no bfloat16')
    elif device.type == 'cpu':
        if dtype == 'float16':
            fail("dtype=float16, but CPUs only emulate it. use --dtype=float32 or bfloat16")
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        auto = ('bfloat16', 'this CPU has it') if has_bf16 else ('float32', 'this CPU has no bfloat16 instructions')
    else:
        if device.type == 'mps' and dtype != 'auto' and dtype != 'float32':
            fail(f"dtype={dtype}, but on Apple GPUs only float32 is right in every torch from 2.9 on. use --dtype=float32")  # pytorch issue 195910
        auto = ('float32', f'the safe one on {device.type}')
    return auto if dtype == 'auto' else (dtype, 'as asked')


def choose_compile(wish, device):
    """(True or False, why). 'auto' compiles on GPUs if Triton and a C compiler are there."""
    if wish not in (True, False, 'auto'):
        fail(f"no such value of compile ({wish}). use --compile=auto, True or False")
    if wish != 'auto':
        return wish, 'as asked'
    if device.type != 'cuda':
        return False, f'it seldom pays on {device.type}'
    if importlib.util.find_spec('triton') is None:
        return False, 'Triton is not installed'
    if not (os.environ.get('CC') or shutil.which('gcc') or shutil.which('clang') or shutil.which('cc')):
        return False, 'no C compiler was found'
    return True, 'a GPU and Triton are there'


def compile_model(model, step, wish, **options):
    """Compile `model` in place (it keeps its name, and its parameters theirs) and prove it by step(), a first call. Returns a note,
    or None if all is well: with wish 'auto' a failure means that the model runs eagerly, with True it is an error."""
    model.compile(**options)
    try:
        step()
    except Exception as e:  # the compiler's failures have no common class
        if isinstance(e, torch.OutOfMemoryError):
            raise
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
        if wish is True:
            fail(f"compile=True, but torch.compile failed ({type(e).__name__}: {reason}). install a C++ compiler "
                 "(apt install g++) and, for a GPU, Triton; or use --compile=False", everywhere=True)
        model._compiled_call_impl = None
        model.zero_grad(set_to_none=True)  # it may have failed half-way through backward
        return f"note: compile is off after all, torch.compile failed ({reason})"
