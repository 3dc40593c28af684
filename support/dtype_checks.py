"""Which dtypes a device computes in."""

import torch

from configurator import fail
from support.devices import has_bfloat16


def check_dtype(dtype, device):
    """End with status 2 if matrix products in `dtype`, a word, cannot be made on `device`."""
    if dtype not in ('auto', 'float32', 'bfloat16', 'float16'):
        fail(f"no such dtype ({dtype}). use --dtype=auto, float32, bfloat16 or float16")
    # https://github.com/pytorch/pytorch/issues/195910
    if device.type == 'mps' and dtype not in ('auto', 'float32'):
        fail(f"dtype={dtype}, but on Apple GPUs only float32 is right in every torch from 2.9 on. use "
             "--dtype=float32")
    if device.type == 'cpu' and dtype == 'float16':
        fail("dtype=float16, but CPUs only emulate it. use --dtype=float32 or bfloat16")
    if device.type == 'cuda' and dtype == 'bfloat16' and not has_bfloat16(device):
        fail(f"dtype=bfloat16, but {torch.cuda.get_device_name(device)} lacks it. use --dtype=float16 or "
             "float32")
