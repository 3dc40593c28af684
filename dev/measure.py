"""What the measurements share: a clock, memory, a device's peak, and nanoGPT's network from a checkout by its path."""

import contextlib
import ctypes
import importlib.util
import os
import statistics
import sys
import time

import torch


def synchronize(device):
    """Wait until the device has done what it was told."""
    if device.type in ('cuda', 'mps'):
        getattr(torch, device.type).synchronize()


def seconds(f, device):
    """How long f() takes, the device's work included."""
    synchronize(device)
    t0 = time.perf_counter()
    f()
    synchronize(device)
    return time.perf_counter() - t0


def median_and_range(values, digits=0):
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def process_memory(trim=False):
    """Bytes of main memory that this process has; None where nobody tells. trim: what was freed goes back to the system before."""
    with contextlib.suppress(OSError, AttributeError):
        if trim:
            ctypes.CDLL(None).malloc_trim(0)
        with open('/proc/self/statm') as f:
            return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def grows_by(f, device):
    """Bytes by which the memory in use grows at most while f() runs: a GPU's, or this process's. None where nobody tells."""
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated() - before
    before = process_memory(trim=True)
    try:
        with open('/proc/self/clear_refs', 'w') as file:
            file.write('5')  # the high-water mark begins anew: proc(5)
    except OSError:
        return f() and None
    f()
    with open('/proc/self/status') as file:
        return max(0, 1024 * next(int(line.split()[1]) for line in file if line.startswith('VmHWM')) - before)


def matmul_peak(device, dtype):
    """FLOP/s of the product of two large square matrices, the best of several: what this device does at most, whatever its data sheet says."""
    n, times = (2048, 1) if device.type == 'cpu' else (8192, 10)
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * n**3 * times / min(seconds(lambda: [a @ b for _ in range(times)], device) for _ in range(6))


def out_of_memory(error):
    """Whether an exception is one of too little memory: torch.OutOfMemoryError on a GPU, something else on a CPU or out of a compiled step."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in ("can't allocate memory", 'not enough memory', 'out of memory'))


def load_peer(folder, net):
    """nanoGPT's network of the same shape and with the same weights as `net`, from a checkout of it."""
    spec = importlib.util.spec_from_file_location('peer_model', os.path.join(folder, 'model.py'))
    sys.modules['peer_model'] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(None):
        theirs = module.GPT(module.GPTConfig(**net.config.model_args()))
    theirs.load_state_dict(net.state_dict())
    return theirs


def write_trace(step, folder, name, device, n=5):
    """A trace of n steps as a file, and the operators that took most time by themselves."""
    os.makedirs(folder, exist_ok=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (device.type == 'cuda')) as trace:
        seconds(lambda: [step() for _ in range(n)], device)
    trace.export_chrome_trace(path := os.path.join(folder, f'{name}.json'))
    for kind in ['cpu'] + ['device'] * (device.type == 'cuda'):
        time_of = lambda event: getattr(event, f'self_{kind}_time_total') / 1000 / n
        events = sorted(trace.key_averages(), key=time_of, reverse=True)
        total = sum(map(time_of, events)) or 1e-9
        print(f"\n{path}: {'the GPU' if kind == 'device' else 'the CPU'}, {total:.2f} ms per step\n\n| operator | calls per step | ms per step | share |\n|---|---|---|---|")
        print('\n'.join(f"| {event.key[:80]} | {event.count / n:g} | {time_of(event):.3f} | {time_of(event) / total:.1%} |" for event in events[:15]))
