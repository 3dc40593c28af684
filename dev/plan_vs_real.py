"""
What plan.py estimates of memory, beside what train.py takes; the table for dev/records/plan.md.

    $ python dev/plan_vs_real.py > dev/records/plan.md

Each line is two iterations of train.py itself on a CPU, counted by torch's own MemTracker. The estimate is
that of plan.py for the same flags, and makes no iteration. Ends with status 1 if they are more than 5% apart.
"""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import numpy as np
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim.optimizer import register_optimizer_step_post_hook

SMALL = ('--n_layer=4 --n_head=4 --n_embd=256 --block_size=256 --batch_size=4 '
         '--gradient_accumulation_steps=1 --device=cpu --compile=False --eval_interval=0 --dataset=noise')
ARCHS = {'gpt2': '--arch=gpt2 --bias', 'gpt2, dropout': '--arch=gpt2 --dropout=0.1',
         'llama': '--arch=llama --n_kv_head=2', 'modern': '--arch=modern --n_kv_head=2',
         'local': '--arch=local'}
DEEP = '--n_layer=8 --block_size=64 --gradient_accumulation_steps=2'
SHARED = DEEP + ' --shard=0'
# flags, size of the vocabulary, GB that the machine is said to have: few of them, and the loss is made in
# chunks, and FSDP keeps no whole gradients
SPECIAL = {
    'gpt2, float32, vocabulary 20,000': ('--arch=gpt2 --bias --batch_size=2', 20000, None),
    'gpt2, bfloat16, loss in chunks': ('--arch=gpt2 --bias --dtype=bfloat16 --batch_size=16', 20000, 1),
    'modern, float32, 3 micro-batches, loss in chunks': (
        '--arch=modern --n_kv_head=2 --activation_checkpointing --batch_size=16 '
        '--gradient_accumulation_steps=3',
        20000, 1),
    'llama, bfloat16, 1,024 positions': (
        '--arch=llama --n_kv_head=2 --dtype=bfloat16 --batch_size=1 --block_size=1024', 5000, None),
    'modern, float32, muon, 16 tokens': (
        '--arch=modern --n_kv_head=2 --matrix_optimizer=muon --batch_size=1 --block_size=16', 5000, None),
    'llama, bfloat16, documents': ('--arch=llama --n_kv_head=2 --dtype=bfloat16 --document_mask', 5000, None),
    'llama, float32, adamw, 16 tokens': (
        f'--arch=llama --n_kv_head=2 --activation_checkpointing {DEEP} --batch_size=1 --block_size=16 '
        '--gradient_accumulation_steps=1', 1000, None)}
TWO_PROCESSES = {
    'llama, bfloat16, DDP': (f'--arch=llama --n_kv_head=2 --dtype=bfloat16 {DEEP}', 1000, None),
    'llama, bfloat16, FSDP, checkpointing, 2 micro-batches, gradients sharded': (
        f'--arch=llama --n_kv_head=2 --dtype=bfloat16 {SHARED} --activation_checkpointing --batch_size=1 '
        '--gradient_accumulation_steps=4', 1000, 0.1),
    'llama, bfloat16, FSDP, checkpointing, Muon': (
        f'--arch=llama --n_kv_head=2 --dtype=bfloat16 {SHARED} --activation_checkpointing --batch_size=1 '
        '--matrix_optimizer=muon', 1000, None),
    'llama, float32, FSDP': (f'--arch=llama --n_kv_head=2 {SHARED}', 1000, None),
    'llama, bfloat16, FSDP, 2 micro-batches, gradients whole': (
        f'--arch=llama --n_kv_head=2 --dtype=bfloat16 {SHARED} --batch_size=1 '
        '--gradient_accumulation_steps=4',
        1000, None),
    'gpt2, float32, FSDP, vocabulary 20,000': (f'--arch=gpt2 --bias {SHARED} --batch_size=1', 20000, None),
    'modern, bfloat16, FSDP, Muon, 3 micro-batches': (
        f'--arch=modern --n_kv_head=2 --dtype=bfloat16 {SHARED} --matrix_optimizer=muon --batch_size=2 '
        '--gradient_accumulation_steps=6', 1000, None)}


def table():
    """{name: (flags, vocab_size, gigabytes, processes)}"""
    found = {}
    for arch, flags in ARCHS.items():
        for dtype in ('float32', 'bfloat16'):
            for optimizer in ('adamw',) if 'gpt2' in arch else ('adamw', 'muon'):
                row = f'{flags} --dtype={dtype} --matrix_optimizer={optimizer}'
                name = f'{arch}, {dtype}, {optimizer}'
                found[name] = row, 5000, None, 1
                found[f'{name}, checkpointing'] = f'{row} --activation_checkpointing', 5000, None, 1
    found.update({name: (*row, 1) for name, row in SPECIAL.items()})
    found.update({f'{name}, 2 processes': (*row, 2) for name, row in TWO_PROCESSES.items()})
    return found


# -----------------------------------------------------------------------------


def make_dataset(data_dir, vocab_size):
    """Numbers without a meaning, in data_dir/noise."""
    folder = Path(data_dir) / 'noise'
    folder.mkdir(parents=True, exist_ok=True)
    (np.arange(20000) % vocab_size).astype('<u2').tofile(folder / 'train.bin')
    chars = ''.join(chr(0x4e00 + i) for i in range(vocab_size))
    meta = {'tokenizer': {'kind': 'char', 'chars': chars}, 'vocab_size': vocab_size, 'end_of_text': 0,
            'dtype': 'uint16', 'splits': {}}
    (folder / 'meta.json').write_text(json.dumps(meta))


def run_script(name, flags):
    """The globals of a script, run in this process."""
    with mock.patch.object(sys, 'argv', [name, *flags]), contextlib.redirect_stdout(io.StringIO()):
        return runpy.run_path(str(REPO / name), run_name='__main__')


def estimated(flags, n=1):
    """(stage, {part: bytes}) by plan.py, for n processes of a CPU."""
    with mock.patch.dict(os.environ, WORLD_SIZE=str(n)):
        return run_script('plan.py', flags)['setup'].peak


class Tracker(MemTracker):
    """MemTracker, for training: the original refuses to see a module twice."""

    def _pre_fw_hook(self, module, inputs):
        self.memory_tracking.pop(module, None)
        super()._pre_fw_hook(module, inputs)


class Enough(BaseException):
    """Ends train.py."""


def real(flags):
    """The most bytes that are alive in two iterations of train.py."""
    tracker, updates = Tracker(), []

    def after_update(*args):
        updates.append(1)
        if len(updates) == 2:
            raise Enough

    hook = register_optimizer_step_post_hook(after_update)
    try:
        with tracker:
            run_script('train.py', flags)
    except Enough:
        return tracker.get_tracker_snapshot('peak')[torch.device('cpu')]['Total']
    finally:
        hook.remove()


@contextlib.contextmanager
def machine_of(gigabytes):
    """A machine that has so much memory, for those who ask. None: the one here."""
    ask = os.sysconf
    pages = lambda name: int(gigabytes * 1e9) // ask('SC_PAGE_SIZE') if name == 'SC_PHYS_PAGES' else ask(name)
    with mock.patch.object(os, 'sysconf', pages) if gigabytes else contextlib.nullcontext():
        yield


def compare(name, flags, vocab_size, gigabytes, n):
    """Print a line; return how far they are apart."""
    from support.memory import WHEN
    with tempfile.TemporaryDirectory() as folder:
        make_dataset(folder, vocab_size)
        flags = f'{SMALL} --data_dir={folder} --out_dir={folder}/out {flags}'.split()
        with machine_of(gigabytes):
            when, parts = estimated(flags, n)
        launcher = [sys.executable]
        if n > 1:
            launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}']
        child = [*launcher, __file__, '--real', str(gigabytes or 0), *flags]
        taken = int(subprocess.run(child, stdout=subprocess.PIPE, check=True, text=True).stdout.split()[-1])
    apart = sum(parts.values()) / taken - 1
    print(f"| {name} | {taken / 1e6:.1f} | {sum(parts.values()) / 1e6:.1f} | {apart:+.1%} | {WHEN[when]} "
          "|", flush=True)
    return abs(apart)


if __name__ == '__main__' and sys.argv[1:2] == ['--real']:
    with machine_of(float(sys.argv[2])):
        taken = real(sys.argv[3:])
    if os.environ.get('RANK', '0') == '0':
        print(taken)
elif __name__ == '__main__':
    from support.devices import name_of
    machine = f'torch {torch.__version__}, {os.cpu_count()} CPUs, {name_of(torch.device("cpu"))}'
    print('# The estimate beside the step', '', f'`python dev/plan_vs_real.py`; {machine}.', '',
          __doc__.split('\n\n')[-1].strip().replace('\n', ' '), '',
          '| | MB taken | MB estimated | apart | the most |', '|---|---|---|---|---|', sep='\n', flush=True)
    wanted = sys.argv[1:]  # names, or parts of them; all
    rows = {name: row for name, row in table().items() if not wanted or any(word in name for word in wanted)}
    apart = [compare(name, *row) for name, row in rows.items()]
    sys.exit(max(apart) > 0.05)
