"""What init_from means: where a run starts."""

import os

from configurator import fail
from support.checkpoint import NUMBERED, newest


def find_start(k, dist):
    """(the checkpoint to start from or None, whether its run is continued, whether in another folder). The
    main process chooses, as a folder may look different to another for a moment; all of them read."""
    choice = (None, False, False)
    if dist.is_main:
        choice = choose(k['init_from'], k['out_dir'], k['overwrite'], k['eval_only'], dist.print)
    path, resuming, branching = dist.broadcast_object(choice)
    if path is None:
        return None, False, False
    from support import load
    if resuming and not os.path.isfile(path):
        fail(f"{path} is not there for this process: another run is writing into that folder, or its disk is "
             "not shared by all machines. wait until it ends, or name a folder that all of them "
             "see", everywhere=True)
    ckpt = load.read(path, verify=not resuming)
    it = ckpt['iter_num']
    number = NUMBERED.fullmatch(os.path.basename(path))
    # it would be in the way of the next ones
    if resuming and not branching and number and int(number[1]) != it:
        fail(f"{path} holds iteration {it}. rename it to ckpt_{it:08d}.pt, or take it out of the folder")
    if resuming and 'optimizer' not in ckpt:
        fail(f"{path} holds weights only, no run to continue. start a new one from them: --init_from={path} "
             "--out_dir=ANOTHER")
    return ckpt, resuming, branching


def choose(init_from, out_dir, overwrite, eval_only, tell):
    """(path or None, resuming, branching)"""
    word, _, source = init_from.partition(':')
    here = newest(out_dir)
    if word in ('resume', 'auto') and source and not (word == 'auto' and here):
        return choose_branch(source, out_dir, overwrite, eval_only, tell), True, True
    if word in ('resume', 'auto') and here:
        from support import load
        return load.newest_whole(out_dir, tell), True, False
    if init_from == 'resume':
        from support.missing_run import runs
        fail(f"no checkpoint in {out_dir} to resume from{runs()}. name the run's folder with --out_dir, or "
             "use --init_from=auto or scratch")
    path = None if init_from in ('scratch', 'auto') else choose_weights(init_from, out_dir, overwrite)
    if here and not overwrite and not eval_only:
        fail(f"{out_dir} already holds a run. continue it: --init_from=resume; keep it: --out_dir=ANOTHER; "
             "delete it: --overwrite")
    return path, False, False


def choose_branch(source, out_dir, overwrite, eval_only, tell):
    """The checkpoint of another run, to be continued in a folder of its own."""
    if newest(out_dir) and not (overwrite or eval_only):
        fail(f"{out_dir} already holds a run, and resume:{source} would start one. continue it: "
             "--init_from=auto; keep it: --out_dir=ANOTHER; delete it: --overwrite")
    if not os.path.isfile(source) and not newest(source):
        from support.missing_run import runs
        fail(f"no checkpoint at {source}{runs()}. name a file such as out/ckpt_00001000.pt, or a run's "
             "folder for its newest one")
    from support import load
    path = load.newest_whole(source, tell) if os.path.isdir(source) else source
    if os.path.realpath(os.path.dirname(path)) == os.path.realpath(out_dir) and not eval_only:
        fail(f"resume:{source} names a checkpoint in out_dir itself. continue in another folder: "
             "--out_dir=ANOTHER")
    return path


def choose_weights(source, out_dir, overwrite):
    """The checkpoint, or Hugging Face folder or name, whose weights start a new run."""
    from support import load
    from support.hub_datasets import is_hub_name
    if not os.path.exists(source) and not is_hub_name(source):
        fail(f"init_from is neither a file nor a known word ({source}). use scratch, resume, auto, "
             "resume:PATH, the path of a checkpoint, or a Hugging Face folder or name (gpt2, OWNER/NAME)")
    path = load.find(source)
    if overwrite and os.path.realpath(os.path.dirname(path)) == os.path.realpath(out_dir):
        fail(f"--overwrite would delete the checkpoint to start from ({path}). name another --out_dir")
    return path
