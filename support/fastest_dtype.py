"""Which dtype writes texts faster on this CPU: it differs between machines and sizes (dev/records/sample.md)."""

import copy
import time

import torch

STEPS = 4
SLOW = 1.0  # seconds for a measurement, above which it is not worth its time


def fastest_dtype(model, n_rows):
    """'float32' or 'bfloat16': a few steps of `n_rows` texts are timed in both."""
    idx = torch.zeros(n_rows, 1, dtype=torch.long)
    times = {}
    for dtype in ('bfloat16', 'float32'):
        light = copy.deepcopy(model).to_inference(torch.device('cpu'), dtype)
        times[dtype] = min(seconds(light, idx) for _ in range(4))
        if times[dtype] > SLOW:
            return 'bfloat16'  # a large model: what it reads per step is most of its time
    return min(times, key=times.get)


def seconds(model, idx):
    start = time.perf_counter()
    model.generate(idx, STEPS, temperature=0)
    return time.perf_counter() - start
