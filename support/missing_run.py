"""What to say when there is no checkpoint where one was looked for."""

import glob
import os


def runs():
    """The folders here that hold checkpoints, the newest first; '' or 'there is: ...'."""
    found = {}
    for path in glob.glob(os.path.join('*', 'ckpt*.pt')):
        if os.path.exists(path):  # a link's target may be gone
            folder = os.path.dirname(path)
            found[folder] = max(found.get(folder, 0), os.path.getmtime(path))
    names = sorted(found, key=found.get, reverse=True)
    more = f' and {len(names) - 8} more' if len(names) > 8 else ''
    return f" (there is: {', '.join(names[:8])}{more})" if names else ' (no folder here has one)'
