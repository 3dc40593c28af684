"""Command lines that the user can paste."""

import os
import shlex
import sys

from support import checkpoint
from support.checkpoint import LAUNCH


def command(run, args):
    """The line that starts train.py as it was started now, with `args` and the knobs that no checkpoint hands
    on."""
    n, local = run.dist.world_size, int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    launcher = 'python'
    if run.dist.is_distributed:
        launcher = f"torchrun --standalone --nproc_per_node={n}"
        if n != local:
            launcher = f"torchrun --nnodes={n // local} --nproc_per_node={local} ..."
    named = [arg.split('=')[0] for arg in args]
    again = [f'--{name}={run.given[name]}' for name in LAUNCH
             if name in run.given and f'--{name}' not in named]
    return f"{launcher} {shlex.join([sys.argv[0], *args, *again])}"


def replay(run, it):
    """The line that makes iteration `it` again, from the newest checkpoint, in a folder of its own."""
    out_dir = run.knobs['out_dir']
    path = checkpoint.newest(out_dir)
    begin = [f'--init_from=resume:{path}'] if path else sys.argv[1:]
    quiet = ['--log_interval=1', '--eval_interval=0', '--eval_iters=1', '--tasks_interval=0',
             '--sample_interval=0']
    return command(run, [*begin, f'--out_dir={out_dir}-replay', f'--max_iters={it + 1}',
                         f"--lr_decay_iters={run.knobs['lr_decay_iters']}", *quiet])


def resume(run, init_from='resume'):
    """The line that continues the run."""
    return command(run, [f'--init_from={init_from}', f"--out_dir={run.knobs['out_dir']}"])
