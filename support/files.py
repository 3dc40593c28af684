"""Files that are written whole or not at all, locks on folders, JSON."""

import contextlib
import errno
import json
import os
import shutil

from configurator import fail, say


def write_whole(path, content):
    """Write `content` (bytes) to `path`, whole or not at all."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    with replacing(path) as f:
        f.write(content)
    sync_folder(folder)


@contextlib.contextmanager
def replacing(path):
    """A file, open, that takes the place of `path` once this block has written it, flushed to the disk, and
    is removed if the block fails."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path + '.tmp')  # which may be a link to anywhere
    try:
        with open(path + '.tmp', 'xb') as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + '.tmp', path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(path + '.tmp')
        raise


def sync_folder(path):
    """Flush the names in a folder to the disk, where the system can do that: network mounts may answer
    EINVAL or EBADF, which PostgreSQL and SQLite ignore as well."""
    if hasattr(os, 'O_DIRECTORY'):
        fd = os.open(path, os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EBADF):
                raise
        finally:
            os.close(fd)


def lock(folder, who):
    """Make this process the only one that writes into `folder`, as long as the returned file stays open; a
    second one exits with status 2. The system releases the lock however the process ends."""
    file = open(os.path.join(folder, '.lock'), 'a')
    try:
        import fcntl
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as e:  # some systems have no such locks
        if isinstance(e, OSError) and e.errno in (errno.EACCES, errno.EAGAIN):
            fail(f"another {who} is writing into {folder}. wait until it ends, or name another folder")
        say(f"note: {folder} cannot be locked ({e}). take care that no second {who} uses it", 'stdout')
    return file


def write_json(path, value):
    """Write `value` as JSON, whole or not at all. JSON has no nan and no infinity: they become null."""
    value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    # half a surrogate pair: as JSON writes it
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False).encode('utf-8', 'backslashreplace'))


def read_json(path):
    """The dict in a JSON file; {} if there is no such file, or none that can be read."""
    try:
        with open(path, encoding='utf-8') as f:
            value = json.load(f)
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def space_problems(out_dir, size, keep, replaced):
    """The problem if the disk has no room for checkpoints of `size` bytes: those kept, the best, one being
    written. replaced: the files whose place they take."""
    folder = os.path.abspath(out_dir)
    while not os.path.exists(folder):  # it will be made
        folder = os.path.dirname(folder)
    need = 1.05 * size * (keep + 2) + 2**20
    free = shutil.disk_usage(folder).free
    if need <= free + sum(map(os.path.getsize, replaced)):
        return []
    return [f"too little space on the disk of {out_dir} ({free / 1e6:,.1f} MB free; {keep} checkpoints, the "
            f"best, one being written and a reserve take {need / 1e6:,.1f}). make room, by deleting older "
            "checkpoints say, or name another --out_dir; --keep_checkpoints=1 keeps fewest"]
