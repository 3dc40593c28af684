"""The same bits from the same numbers."""

import os

import torch


def make_deterministic(device):
    """The same bits for the same numbers, however many processes: torchrun gives each one thread, python
    gives all."""
    torch.set_num_threads(1)
    if device.type == 'cuda':
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
