"""Choosing a GPU."""

import importlib.util
import os
import shutil

import torch

from configurator import fail


def choose_gpu(device, local_rank, is_distributed):
    """(torch.device, why) for 'auto' where there is a GPU, and for what a person may have typed."""
    why = 'as asked'
    if device == 'auto':
        device, why = 'mps', 'an Apple GPU was found'
        if torch.cuda.is_available():
            device, why = 'cuda', 'a GPU was found'
    try:
        device = torch.device(device)
        # torch knows names of devices that it was not built for
        if device.type not in ('cpu', 'cuda', 'mps'):
            torch.zeros(1, device=device).item()
    except Exception:
        fail(f"no such device ({device}). use --device=auto, cpu, cuda, cuda:1 or mps")
    if device.type == 'cuda':
        # torch.cuda.set_device wants a number
        device = torch.device('cuda', local_rank if is_distributed else device.index or 0)
        check_cuda(device, is_distributed)
        torch.cuda.set_device(device)  # what asks for "the GPU" without a number gets this one
    if device.type == 'mps' and is_distributed:
        fail("device=mps under torchrun: processes cannot share an Apple GPU. use plain python, or "
             "--device=cpu")
    if device.type == 'mps' and not torch.backends.mps.is_available():
        fail("device=mps, but this is not a Mac with an Apple GPU. use --device=cpu")
    return device, why


def check_cuda(device, is_distributed):
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        fail("device=cuda, but torch finds no GPU. use --device=cpu, or install a torch built for your "
             "GPU's driver")
    if device.index >= count:
        remedy = f"--nproc_per_node={count}" if is_distributed else f"--device=cuda:{count - 1} or less"
        fail(f"device=cuda:{device.index}, but there are {count} GPU(s) here. use {remedy}", everywhere=True)


def can_compile():
    """(whether torch.compile can work here, why)"""
    if importlib.util.find_spec('triton') is None:
        return False, 'Triton is not installed'
    if not os.environ.get('CC') and not any(map(shutil.which, ('gcc', 'clang', 'cc'))):
        return False, 'no C compiler was found'
    return True, 'a GPU and Triton are there'


def memory_of_gpu(device):
    if device.type == 'mps':
        return torch.mps.recommended_max_memory()
    return torch.cuda.get_device_properties(device).total_memory
