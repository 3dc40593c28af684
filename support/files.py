"""Files that are written whole or not at all, locks on folders, JSON."""

import errno
import json
import math
import os

from configurator import fail


def write_whole(path, content):
    """Write `content` (bytes) to `path`, whole or not at all: a temporary file, flushed to the disk, then
    renamed."""
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    with open(path + '.tmp', 'wb') as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + '.tmp', path)
    sync_folder(os.path.dirname(path) or '.')


def sync_folder(path):
    """Flush the names in a folder to the disk, where the system can do that."""
    if hasattr(os, 'O_DIRECTORY'):
        fd = os.open(path, os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)


def lock(folder, who):
    """Make this process the only one that writes into `folder`, as long as the returned file stays open; a
    second one exits with status 2. The system releases the lock however the process ends."""
    try:
        import fcntl
    except ImportError:
        print(f"note: this system has no file locks. take care that no second {who} writes into {folder}")
        return None
    file = open(os.path.join(folder, '.lock'), 'a')
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EAGAIN):
            fail(f"another {who} is writing into {folder}. wait until it ends, or name another folder")
        print(f"note: {folder} cannot be locked ({e.strerror}). take care that no second {who} uses it")
    return file


def write_json(path, value):
    """Write `value` as JSON, whole or not at all. JSON has no nan and no infinity: they become null."""
    write_whole(path, json.dumps(without_nan(value), indent=1, ensure_ascii=False).encode())


def without_nan(value):
    if isinstance(value, dict):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json(path):
    """The dict in a JSON file; {} if there is no such file, or none that can be read."""
    try:
        with open(path, encoding='utf-8') as f:
            value = json.load(f)
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError):
        return {}
