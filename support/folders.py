"""Whether a run's folder can be written, and has room."""

import contextlib
import os
import shutil

from support.checkpoint import numbered


def existing_parent(out_dir):
    """out_dir, or the folder that it will be made in."""
    folder = os.path.abspath(out_dir)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder


def folder_problems(out_dir):
    """The problem with a folder that cannot be written into or made."""
    try:
        folder = existing_parent(out_dir)
        if not out_dir or not os.path.isdir(folder):
            return [f"out_dir is no folder and cannot become one ({out_dir!r}). name another with --out_dir"]
    except ValueError:  # a zero byte in the name
        return [f"out_dir is no folder and cannot become one ({out_dir!r}). name another with --out_dir"]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [f"out_dir cannot be written into ({out_dir!r}). name another folder with --out_dir"]
    return []


def space_problems(out_dir, size, keep):
    """The problem if the disk has no room for checkpoints of `size` bytes: those kept, the best, one being
    written."""
    there = 0
    for path in numbered(out_dir):  # what will be replaced
        # another run, which lock() will tell of, may be removing it
        with contextlib.suppress(FileNotFoundError):
            there += os.path.getsize(path)
    need = 1.05 * size * (keep + 2) + 2**20
    free = shutil.disk_usage(existing_parent(out_dir)).free + there
    if need <= free:
        return []
    remedy = "make room, or name another --out_dir"
    if keep > 1:
        remedy = "make room, name another --out_dir, or use a smaller --keep_checkpoints"
    return [f"too little space on the disk of {out_dir} ({free / 1e9:.3f} GB free; {keep} checkpoints, the "
            f"best and one being written take {need / 1e9:.3f}). {remedy}"]
