"""Which dtype writes texts faster on this CPU: machines and sizes differ (dev/records/sample.md)."""

import copy
import time

import torch

LARGEST = 200e6  # parameters; above it a copy takes too much memory, and what is read per step decides
MARGIN = 1.2  # float32 has to be so much faster, else chance would choose


def fastest_dtype(model, n_rows):
    """'float32' or 'bfloat16': a few steps of `n_rows` texts are timed in both."""
    if model.get_num_params(non_embedding=False) > LARGEST:
        return 'bfloat16'
    try:
        exact, light = (seconds(model, dtype, n_rows) for dtype in ('float32', 'bfloat16'))
    except (RuntimeError, FloatingPointError):  # the texts themselves will meet it and say it
        return 'bfloat16'
    return 'float32' if MARGIN * exact < light else 'bfloat16'


def seconds(model, dtype, n_rows):
    """Of four steps, the shortest of four tries."""
    tokenizer = getattr(model, 'tokenizer', None)
    light = copy.deepcopy(model, {id(tokenizer): tokenizer}).to_inference('cpu', dtype, n_texts=n_rows)
    idx, times = torch.zeros(n_rows, 1, dtype=torch.long), []
    for _ in range(4):
        start = time.perf_counter()
        light.generate(idx, 4, temperature=0)
        times.append(time.perf_counter() - start)
    return min(times)
