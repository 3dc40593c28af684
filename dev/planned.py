"""
What the plan for GPUs that are elsewhere says of memory, beside what real steps take; the table for dev/records/plan.md.

    $ python dev/planned.py [--quick] > dev/records/plan.md

Each line is two iterations of the real network and optimizer on a CPU, counted by torch's own MemTracker: forward, backward, clipping, update. The plan
(plan.Setup with device='cpu') makes none of them. Ends with status 1 if they are more than 10% apart.
"""

import os
import subprocess
import sys
from contextlib import nullcontext

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.join(HERE, 'dev'))

import torch

import optim
import plan
from model import GPT, GPTConfig
from parallel import Processes, memory_of
from races import machine

SMALL = dict(n_layer=4, n_head=4, n_embd=256, block_size=256, vocab_size=5000)
ARCHS = {'gpt2': dict(arch='gpt2', bias=True), 'gpt2, dropout': dict(arch='gpt2', bias=False, dropout=0.1),
         'llama': dict(arch='llama', n_kv_head=2), 'modern': dict(arch='modern', n_kv_head=2)}
DEEP = dict(n_layer=8, block_size=64, vocab_size=1000)


def setup(arch, dtype, optimizer, checkpointing, rows=0, config={}, **more):
    """A plan.Setup of a small network; `rows` tokens at a time make the loss."""
    found = plan.Setup(GPTConfig(**{**SMALL, **ARCHS[arch], **config}), dtype, **{**dict(batch_size=4, accumulation=1), **more}, activation_checkpointing=checkpointing,
                       chunked_loss=False, matrix_optimizer=optimizer, gpu_memory=memory_of(torch.device('cpu')) / 1e9, device='cpu')
    found.rows = rows
    return found


def tracked(setup, procs):
    """The most bytes that are alive in the second of two iterations."""
    from torch.distributed._tools.mem_tracker import MemTracker  # takes a second
    torch.manual_seed(0)
    model = GPT(setup.config)
    model.loss_rows = setup.rows
    for block in model.transformer.h:
        block.activation_checkpointing = setup.activation_checkpointing
    model = procs.place(model, setup.shard, setup.shard_size, setup.dtype)
    procs.no_room = not setup.whole
    wrapped = procs.wrap(model)
    optimizer = optim.create_optimizer(model, 1e-3, 0.1, (0.9, 0.95), 1e-8, setup.matrix_optimizer)
    guard = optim.Guard(optimizer, torch.amp.GradScaler('cpu', enabled=False), procs.device, 10)
    x = torch.randint(setup.config.vocab_size, (setup.batch_size, setup.config.block_size))
    tracker = MemTracker()
    tracker.track_external(model, optimizer, x)
    with tracker:
        for it in range(2):
            for micro in range(setup.accumulation):
                tracker.reset_mod_stats()
                procs.average_gradients(wrapped, micro == setup.accumulation - 1)
                with torch.autocast('cpu', torch.bfloat16) if setup.dtype == 'bfloat16' else nullcontext():
                    loss = wrapped(x, x)[1] / setup.accumulation
                loss.backward()
            guard.step(it, loss.detach(), procs.clip(model, 1.0))
            optimizer.zero_grad(set_to_none=True)
            loss = None
    return tracker.get_tracker_snapshot('peak')[torch.device('cpu')]['Total']


def rows(quick, n):
    """{name: Setup} for one process, or for n."""
    if n > 1:
        deep = {**DEEP, 'n_layer': 4 if quick else 8}
        both, few = dict(world_size=n, config=deep), dict(world_size=n, config=deep, shard='full')
        found = {'llama, bfloat16, DDP': setup('llama', 'bfloat16', 'adamw', False, **both),
                 'llama, bfloat16, full, checkpointing, 2 micro-batches, gradients shared': setup('llama', 'bfloat16', 'adamw', True, batch_size=1, accumulation=2,
                                                                                                  **few),
                 'llama, bfloat16, full, Muon': setup('llama', 'bfloat16', 'muon', True, batch_size=1, **few),
                 'llama, float32, full': setup('llama', 'float32', 'adamw', False, **few),
                 'llama, bfloat16, full, 2 micro-batches, gradients whole': setup('llama', 'bfloat16', 'adamw', False, batch_size=1, accumulation=2, **few),
                 'gpt2, float32, full, vocabulary 20,000': setup('gpt2', 'float32', 'adamw', False, batch_size=1, **{**few, 'config': {**deep, 'vocab_size': 20000}}),
                 'modern, bfloat16, full, Muon, 3 micro-batches': setup('modern', 'bfloat16', 'muon', False, batch_size=2, accumulation=3, **few)}
        next(value for name, value in found.items() if 'gradients shared' in name).whole = False
        return dict(list(found.items())[1:2]) if quick else found
    found = {f"{arch}, {dtype}, {optimizer}{', checkpointing' * checkpointing}": setup(arch, dtype, optimizer, checkpointing)
             for arch in ARCHS for dtype in ('float32', 'bfloat16') for optimizer in ('adamw', 'muon')[:1 if 'gpt2' in arch else 2] for checkpointing in (False, True)}
    found.update({'gpt2, float32, vocabulary 20,000': setup('gpt2', 'float32', 'adamw', False, batch_size=2, config=dict(vocab_size=20000)),
                  'gpt2, bfloat16, vocabulary 20,000, 100 tokens at a time': setup('gpt2', 'bfloat16', 'adamw', False, 100, batch_size=2,
                                                                                   config=dict(vocab_size=20000)),
                  'modern, float32, 3 micro-batches, 100 tokens at a time': setup('modern', 'float32', 'adamw', True, 100, batch_size=1, accumulation=3),
                  'llama, bfloat16, 1,024 positions': setup('llama', 'bfloat16', 'adamw', False, batch_size=1, config=dict(block_size=1024)),
                  'modern, float32, muon, 16 tokens': setup('modern', 'float32', 'muon', False, batch_size=1, config=dict(block_size=16)),
                  'llama, float32, adamw, 16 tokens': setup('llama', 'float32', 'adamw', True, batch_size=1, config={**DEEP, 'block_size': 16})})
    return dict(list(found.items())[::6]) if quick else found


def compare(quick, procs):
    """Print a line for each, and return whether all are near enough."""
    apart = []
    for name, setup in rows(quick, procs.world_size).items():
        taken, (when, parts) = tracked(setup, procs), setup.peak()
        apart.append(abs(sum(parts) / taken - 1))
        name += f', {procs.world_size} processes' * procs.many
        procs.print(f"| {name} | {taken / 1e6:.1f} | {sum(parts) / 1e6:.1f} | {sum(parts) / taken - 1:+.1%} | {plan.WHEN[when]} |")
    return max(apart) < 0.1


if __name__ == '__main__':
    quick, procs = '--quick' in sys.argv, Processes('cpu')
    if not procs.many:
        print('# The plan beside the step', '', f"`python dev/planned.py{' --quick' * quick}`; {machine()}.", '', __doc__.split('\n\n')[-1].strip().replace('\n', ' '), '',
              '| | MB taken | MB planned | apart | the most |', '|---|---|---|---|---|', sep='\n', flush=True)
    near = compare(quick, procs)
    if not procs.many:
        near &= not subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', __file__, *sys.argv[1:]]).returncode
    procs.close()
    sys.exit(not near)
