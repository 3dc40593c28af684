"""Runs train.py for three iterations and measures them (python plan.py --measure)."""

import contextlib
import gc
import io
import os
import runpy
import shutil
import sys
import tempfile
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from configurator import plain
from optim import to_local
from support import devices
from support.help import names_at_top
from support.console import format_duration

# what a trial does without; a run of its own, elsewhere
NOT_TRIED = dict(init_from='scratch', overwrite=True, budget=None, eval_only=False, eval_interval=0,
                 tasks_interval=0, sample_interval=0, save_interval=None, wandb_log=False, max_minutes=None)


class Enough(BaseException):
    """Ends train.py before it saves."""


class Trial:
    """What three updates took. It is called by torch after each of them."""

    def __init__(self, dist, n_iterations=3):
        self.dist, self.left = dist, n_iterations
        self.seconds, self.last = [], None

    def __call__(self, optimizer, args, kwargs):
        self.dist.synchronize()
        now = time.perf_counter()
        if self.last is None:  # the first one compiles, and makes the optimizer's state
            self.reset_peak()
        else:
            self.seconds.append(now - self.last)
        self.left -= 1
        if self.left == 0:
            self.weigh(optimizer)
            raise Enough
        self.last = now

    def reset_peak(self):
        if self.dist.device.type == 'cuda':
            torch.cuda.reset_peak_memory_stats(self.dist.device)

    def weigh(self, optimizer):
        """Bytes, in this process."""
        params = [p for group in optimizer.param_groups for p in group['params']]
        state = [value for values in optimizer.state.values() for value in values.values()]
        self.weights = size_of(params)
        self.gradients = size_of(p.grad for p in params)
        self.optimizer = size_of(state)
        peak = devices.peak_memory(self.dist.device)  # in GB
        self.peak = None if peak is None else 1e9 * peak


def size_of(tensors):
    return sum(t.numel() * t.element_size() for t in map(to_local, filter(torch.is_tensor, tensors)))


def run_trial(train_py, knobs, dist):
    """A Trial of train.py with these knobs, in a folder that is removed again."""
    # the same name in all processes; only the first one writes there
    name = f"flatgpt-trial-{os.environ.get('MASTER_PORT', os.getpid())}"
    out_dir = os.path.join(tempfile.gettempdir(), name)
    max_iters = max(4, knobs['max_iters'])
    knobs = {**knobs, **NOT_TRIED, 'max_iters': max_iters, 'out_dir': out_dir}
    names = plain(names_at_top(train_py))
    trial, argv, output = Trial(dist), sys.argv, io.StringIO()
    hook = register_optimizer_step_post_hook(trial)
    sys.argv = [train_py] + [f'--{name}={value}' for name, value in knobs.items() if name in names]
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(train_py, run_name='__main__')
    except Enough:
        pass
    finally:
        sys.argv = argv
        hook.remove()
        if dist.rank == 0:
            shutil.rmtree(out_dir, ignore_errors=True)
    gc.unfreeze()  # see compile_for_training
    gc.collect()  # DDP, which is a cycle, has to go before its process group
    trial.notes = [line for line in output.getvalue().splitlines() if line.startswith('note:')]
    return trial


def lines(trial, run, model, peak_flops):
    """What plan.py prints of a trial. model: the GPT, on the meta device; peak_flops: of the device, or
    None."""
    yield from trial.notes
    yield from memory_lines(trial)
    size, keep = run.checkpoint_bytes, run.knobs['keep_checkpoints']
    yield (f"disk      {gb(size)} a checkpoint, {gb(size * (keep + 2))} for the {keep} newest, the best and "
           "one being written")
    n = run.dist.world_size
    if n > 1 and run.knobs['shard'] == 1:  # a ring: https://arxiv.org/abs/1802.05799
        sent = 2 * (n - 1) / n * trial.gradients
        yield f"network   {gb(sent)} sent by each of {n} processes per iteration"
    seconds, max_iters = min(trial.seconds), run.knobs['max_iters']  # what else the machine does is not ours
    speed = f"{1000 * seconds:.2f} ms per iteration, {run.tokens_per_iter / seconds:,.0f} tokens/s"
    if peak_flops:
        sequences = run.knobs['batch_size'] * run.grad_accum_steps
        speed += f", mfu {100 * model.estimate_mfu(sequences, seconds, peak_flops):.1f}%"
    yield f"speed     {speed}"
    yield (f"time      {format_duration(max_iters * seconds)} for {max_iters:,} iterations = "
           f"{max_iters * seconds * n / 3600:.2f} hours of a device, without evaluating and saving")


def memory_lines(trial):
    on_gpu = trial.dist.device.type == 'cuda'
    if trial.peak is not None:
        owner = 'this GPU' if on_gpu else 'this machine'
        total = devices.memory_of(trial.dist.device)
        yield f"memory    {gb(trial.peak)} at the most in each process, of the {gb(total)} that {owner} has"
    yield f"            weights      {gb(trial.weights)}"
    yield f"            gradients    {gb(trial.gradients)}"
    yield f"            optimizer    {gb(trial.optimizer)}"
    if trial.peak is not None:
        rest = trial.peak - trial.weights - trial.gradients - trial.optimizer
        what = 'activations' if on_gpu else 'activations and torch itself'
        yield f"            the rest     {gb(rest)}, {what}"


def gb(size):
    return f"{size / 1e9:.3f} GB"


def bandwidth_line(dist):
    """How fast the processes add up float32 numbers, as nccl-tests counts it (bus bandwidth: 2 (n - 1) / n of
    the bytes pass each process). To be called by all of them."""
    found, n = [], torch.distributed.get_world_size()
    for mb in (0.25, 4, 25):  # 25 is what DDP sends at a time
        numbers = torch.zeros(int(mb * 2**18), device=dist.device)
        for attempt in ('connects', 'measured'):
            dist.synchronize()
            t0 = time.perf_counter()
            torch.distributed.all_reduce(numbers)
            dist.synchronize()
            seconds = time.perf_counter() - t0
        speed = 2 * (n - 1) / n * 4 * numbers.numel() / seconds / 1e9
        found.append(f"{speed:.3g} GB/s at {mb:g} MB")
    return f"bandwidth {', '.join(found)}, all-reduced between {n} processes"
