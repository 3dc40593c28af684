"""Passes whose shapes change from one to the next: generating, and scoring texts of any length."""

import contextlib

import torch


@contextlib.contextmanager
def varying_shapes():
    """Inside, attention is not cuDNN's, which makes a plan for each new shape, half a second each
    (https://github.com/modelscope/FunASR/issues/3704; not measured by us)."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
