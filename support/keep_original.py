"""A checkpoint that the first save of a resumed run would replace."""

import os

from configurator import fail
from support.checkpoint import link


def keep_original(path, it, tell):
    """Give `path`, a ckpt.pt as nanoGPT leaves it, a name that no run touches."""
    kept = os.path.join(os.path.dirname(path), f'ckpt_original_{it:08d}.pt')
    try:
        link(path, kept)
    except OSError as e:
        fail(f"{path} cannot be kept as {kept} ({e.strerror}). make room, or continue it in another folder: "
             f"--init_from=resume:{path} --out_dir=ANOTHER")
    tell(f"note: {path} is kept as {kept}, as the first save takes its name")
