"""
How a run's folder is written. A checkpoint is one file of plain types: nanoGPT's six keys (model, optimizer,
model_args, iter_num, best_val_loss, config) and what an exact resume and an offline sample.py need besides.

At every instant the folder holds a whole one: each is written under another name, flushed to the disk,
checked, renamed.

    out_dir/ckpt_00000500.pt   the state after 500 iterations; the newest few stay
    out_dir/ckpt.pt            a link to the newest, or with always_save_checkpoint=False to the best
    out_dir/ckpt_best.pt       a link to the one with the lowest validation loss
"""

import contextlib
import math
import os
import re
import shlex
import shutil
import sys
import time
import zipfile
from concurrent import futures

import torch

from configurator import fail, warn
from support import files
from support.errors import CHECKPOINT_WRITER, first_line

NUMBERED = re.compile(r'ckpt_(\d{8,})\.pt')
# never taken from a checkpoint: paths, which may be a stranger's, and what belongs to this start
LAUNCH = ('out_dir data_dir wandb_log device compile backend ddp_timeout peak_flops max_minutes '
          'sample_prompts').split()
VERSION = 1  # of the keys in a checkpoint
LINKS = ('ckpt.pt', 'ckpt_best.pt')
# what a new run removes
RUN_FILES = [*LINKS, *'log.csv run.json report.md loss.png samples.md eval.json'.split()]


class Damaged(Exception):
    """A file that is no whole checkpoint, and why."""


class NotSaved(OSError):
    """A checkpoint that could not be written, and why; the older ones are as they were."""


def numbered(out_dir):
    """The paths of out_dir's numbered checkpoints, oldest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    names = sorted(filter(NUMBERED.fullmatch, names), key=lambda name: (len(name), name))
    return [os.path.join(out_dir, name) for name in names]


def candidates(out_dir):
    """The paths of out_dir's checkpoints in the order in which a resume tries them. nanoGPT leaves a ckpt.pt
    and no numbered ones."""
    return numbered(out_dir)[::-1] + list(filter(
        os.path.exists, (os.path.join(out_dir, name) for name in LINKS)))


def newest(out_dir):
    """The path of the checkpoint to resume from, or None."""
    return next(iter(candidates(out_dir)), None)


# -----------------------------------------------------------------------------
# one file


def write_checkpoint(out_dir, state, links, keep):
    """Write `state` as the checkpoint of its iter_num, whole or not at all; keep the newest `keep`
    (0: all of them); let `links` (of 'ckpt.pt', 'ckpt_best.pt') name it. Raises NotSaved if the disk does
    not take it, OSError if it is in place, but not all links are."""
    path = os.path.join(out_dir, f"ckpt_{state['iter_num']:08d}.pt")
    try:
        with files.replacing(path) as f:
            torch.save(state, f)  # not to a path: then torch hides the system's error
            f.flush()
            verify_records(f.name)  # what cannot be read back must not replace what can
        files.sync_folder(out_dir)  # its name has to reach the disk before older files go
    except (OSError, RuntimeError, Damaged) as e:
        if isinstance(e, RuntimeError) and e.__context__:  # torch hides the system's error behind its own
            e = e.__context__
        raise NotSaved(f"{path} could not be written ({getattr(e, 'strerror', None) or e})") from e
    # nothing below makes the new one worse. Older ones go before a link, which may be a copy and want
    # their room
    for file in numbered(out_dir)[:-keep] if keep else ():
        with contextlib.suppress(OSError):  # the next save tries again
            os.remove(file)
    for name in links:
        link(path, os.path.join(out_dir, name))


def verify_records(path):
    """Raise Damaged unless the file's records have the checksums they were written with: torch.load does not
    look."""
    try:
        with zipfile.ZipFile(path) as records:
            wrong = records.testzip()
    except Exception as e:  # a damaged table of contents may lead zipfile anywhere
        raise Damaged(f"is damaged ({first_line(e)})") from e
    if wrong is not None:
        raise Damaged(f"is damaged (the checksum of {wrong} is wrong)")


def link(path, name):
    """Let `name` be another name of the file `path`, or a copy where the file system has no hard links."""
    if os.path.exists(name) and os.path.samefile(path, name):
        return
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(name + '.tmp')
        os.link(path, name + '.tmp')
        os.replace(name + '.tmp', name)
    except OSError:
        with files.replacing(name) as copy, open(path, 'rb') as f:
            shutil.copyfileobj(f, copy)


# -----------------------------------------------------------------------------
# the folder


def lock(out_dir):
    """Make out_dir, and this process the only run that writes into it, as long as the returned file is
    kept."""
    try:
        os.makedirs(out_dir, exist_ok=True)
        return files.lock(out_dir, 'run')
    except (OSError, ValueError) as e:
        cannot_write(out_dir, e)


def clear(out_dir, start, overwrite):
    """Remove what an earlier run left in the locked out_dir: for a new run (start is None) all of it, to
    continue at `start` what is in the way."""
    if start is None and not overwrite and newest(out_dir):
        fail(f"another run has written into {out_dir} in the meantime. start again")
    try:
        for name in os.listdir(out_dir):
            path, number = os.path.join(out_dir, name), NUMBERED.fullmatch(name)
            if (re.fullmatch(r'(ckpt.*\.pt|log\.csv)\.tmp', name)
                    or start is None and (number or name in RUN_FILES)):
                os.remove(path)
            elif number and int(number[1]) > start:  # it is damaged, or the resume would be from there
                os.replace(path, path + '.damaged')
    except (OSError, ValueError) as e:
        cannot_write(out_dir, e)


def cannot_write(out_dir, e):
    fail(f"out_dir cannot be written into ({out_dir!r}: {e}). name another --out_dir", everywhere=True)


class Saver:
    """Decides when to save, what the best validation loss is, and which names a checkpoint gets."""

    def __init__(self, state, run, clock, guard, stop, dist):
        self.state, self.run, self.knobs, self.out_dir = state, run, run.knobs, run.knobs['out_dir']
        self.clock, self.guard, self.stop, self.dist = clock, guard, stop, dist
        self.writes = not run.knobs['eval_only']
        self.is_async = dist.device.type == 'cuda'  # there it is written by a thread, beside the training
        self.job = futures.Future()  # the checkpoint that was begun last, with whether it could be written
        self.job.set_result(True)
        self.best_val_loss = self.best_on_disk = run.ckpt['best_val_loss'] if run.compares else math.inf
        self.whole = True  # whether the newest checkpoint could be written
        if dist.is_main and self.writes:
            self.lock = run.lock or lock(self.out_dir)
            clear(self.out_dir, run.start_iter if run.continues else None, run.knobs['overwrite'])
            path = run.ckpt['path'] if run.continues else ''
            if path and not NUMBERED.fullmatch(os.path.basename(path)):  # as nanoGPT leaves it
                kept = os.path.join(self.out_dir, f'ckpt_original_{run.start_iter:08d}.pt')
                link(path, kept)
                dist.print(f"note: {path} is kept as {kept}, as the first save takes its name")

    def due(self, it, request):
        interval = self.knobs['save_interval']
        return self.writes and (request is not None or interval and it % interval == 0)

    def save(self, it, metrics, last):
        """Save if it is time for it. To be called by all processes."""
        with self.clock.spending('save'):
            self.finish()
        request, always = self.stop.poll(), self.knobs['always_save_checkpoint']
        asked = request is not None or last
        wanted = asked or self.due(it, request)
        # not before the first update, which is not saved. False for nan
        improved = it > 0 and metrics.get('val_loss', math.inf) < self.best_val_loss
        if self.knobs['save_interval'] is None or not always:
            wanted = wanted or always or improved  # each evaluation leaves one, or each better one
        elif not wanted:
            improved = False  # save_interval spaces the checkpoints, and the best is one of them
        if improved:
            self.best_val_loss = metrics['val_loss']
        # not the file that was just read (that of a branch lies elsewhere), not random weights
        is_new = it > self.run.start_iter or improved or self.run.start == 'branch'
        if not (is_new and wanted and self.writes) or self.stop.gave_up:
            return
        # the last update was skipped: nobody knows what the weights are worth
        doubtful = int(self.guard.in_a_row) > 0 and not improved
        if doubtful and not asked:  # it would take the place of a good one
            return
        self.guard.check_weights()
        if self.stop.gave_up:
            return
        with self.clock.spending('save'):
            self.write(it, improved, doubtful)
            if asked or not self.is_async:  # else it is looked at the next time
                self.finish()
        if self.whole and request == 'save':
            self.dist.print(f"saved in {self.out_dir} after {it:,} iterations, as asked")

    def write(self, it, improved, doubtful):
        state = self.state(it, self.best_val_loss)
        self.stop.saved()
        if self.dist.is_main:
            ckpt_pt = os.path.join(self.out_dir, 'ckpt.pt')
            is_newest = self.knobs['always_save_checkpoint'] or self.run.data.val is None
            links = ['ckpt.pt'] if is_newest or improved or not os.path.exists(ckpt_pt) else []
            links += ['ckpt_best.pt'] if improved else []
            keep = 0 if doubtful else self.knobs['keep_checkpoints']
            pool = futures.ThreadPoolExecutor(1, CHECKPOINT_WRITER)
            self.job = pool.submit(self.try_to_write, state, links, keep)
            pool.shutdown(wait=False)  # its thread ends with this job

    def try_to_write(self, state, links, keep):
        """Whether the checkpoint could be written; if not, a warning says why."""
        t0 = time.monotonic()
        try:
            write_checkpoint(self.out_dir, state, links, keep)
        except NotSaved as e:
            self.stop.saved(again_in=60)
            warn(f"{e}. the run continues, and tries again in a minute or at the next save; the older "
                 "checkpoints are as they were")
            return False
        except OSError as e:
            warn("the checkpoint is saved, but ckpt.pt or ckpt_best.pt is still an older one "
                 f"({e.strerror}). the run continues")
        if self.is_async:  # else it is part of an iteration's time
            self.stop.save_seconds = max(self.stop.save_seconds, time.monotonic() - t0)
        return True

    def finish(self):
        """Wait for the checkpoint that is being written; one that failed has no best loss."""
        # the others ask again and again, as a large one may take longer than ddp_timeout
        while self.dist.all_reduce_max(len(futures.wait([self.job], timeout=1).not_done)):
            pass
        self.whole = not self.dist.all_reduce_max(not self.job.result())
        if self.whole:
            self.best_on_disk = self.best_val_loss
        self.best_val_loss = self.best_on_disk


# -----------------------------------------------------------------------------
# command lines that the user can paste


def command_line(run, args):
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


def replay_line(run, it):
    """The line that makes iteration `it` again, from the newest checkpoint, in a folder of its own."""
    path = newest(run.knobs['out_dir'])
    begin = [f'--init_from=resume:{path}'] if path else sys.argv[1:]
    return command_line(run, [*begin, f"--out_dir={run.knobs['out_dir']}-replay", f'--max_iters={it + 1}',
                              f"--lr_decay_iters={run.knobs['lr_decay_iters']}", '--log_interval=1'])


def resume_line(run):
    """The line that continues the run."""
    return command_line(run, ['--init_from=resume', f"--out_dir={run.knobs['out_dir']}"])
