"""
Files that are written completely or not at all; log.csv; texts for messages.
"""

import contextlib
import csv
import io
import json
import os
import shlex
import subprocess
import sys
import time

from configurator import InputError, print0

# -----------------------------------------------------------------------------
# files that are written completely or not at all


@contextlib.contextmanager
def replacing(path):
    """Open a binary file that replaces `path` when the block ends, flushed to the disk.

    If the block fails, the file is removed. So `path` is complete at every instant.
    """
    temporary = path + '.tmp'
    if os.path.lexists(temporary):
        os.remove(temporary)  # it may be a link to another file
    try:
        with open(temporary, 'xb') as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        rename(temporary, path)
    except BaseException:
        if os.path.lexists(temporary):
            os.remove(temporary)
        raise
    if os.name == 'posix':  # flush the new name as well
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        with contextlib.suppress(OSError):  # not on each network mount
            os.fsync(folder)
        os.close(folder)


def rename(source, target):
    """Rename a file to `target`, which is replaced. Windows refuses it while another program, such as a virus
    scanner, has one of them open: try again for a second."""
    for _ in range(10):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            time.sleep(0.1)
    os.replace(source, target)


def write_whole(path, content):
    """Write `content` (bytes) to `path`, completely or not at all."""
    with replacing(path) as f:
        f.write(content)


def write_json(path, value):
    """Write a dict as JSON, completely or not at all; nan and infinity, which JSON lacks, become null.

    If the disk is full, print a warning. Return whether the file was written.
    """
    plain = json.loads(json.dumps(value), parse_constant=lambda name: None)  # called for NaN and Infinity
    try:
        write_whole(path, json.dumps(plain, indent=1).encode())
    except OSError as e:
        print0(f"warning: {path} could not be written ({e.strerror})")
        return False
    return True


def read_json(path):
    """Return the dict in a JSON file; {} if the file is missing or not valid."""
    try:
        with open(path, encoding='utf-8-sig') as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def check_not_lfs_pointer(path):
    """Raise InputError if a file is what git leaves in its place when git-lfs is not installed."""
    with open(path, 'rb') as f:
        is_pointer = f.read(100).startswith(b'version https://git-lfs')
    if is_pointer:
        raise InputError(f"{path} is a pointer of git-lfs, not the file itself. Download it: git lfs pull.")


def lock_folder(folder):
    """Make a folder and lock it against other processes for as long as the returned file is open."""
    try:
        os.makedirs(folder, exist_ok=True)
        lock = open(os.path.join(folder, '.lock'), 'a')
    except OSError as e:
        raise InputError(f"cannot write into the folder {folder!r}: {e.strerror}. Choose another one.")
    try:
        try:
            import fcntl
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows
            import msvcrt
            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        raise InputError(f"another process is writing into {folder}. Wait until it ends, or choose another "
                         "folder.")
    except OSError as e:
        print0(f"note: {folder} cannot be locked ({e.strerror}). Make sure that no other process uses it.")
    return lock


# -----------------------------------------------------------------------------
# log.csv


def read_rows(path):
    """Return the columns of a .csv file and its rows, dicts of texts; ([], []) if it does not exist.

    A row that was cut short is skipped.
    """
    if not os.path.exists(path):
        return [], []
    with open(path, newline='', encoding='utf-8-sig') as f:  # spreadsheets write a byte order mark
        reader = csv.DictReader(f)
        rows = [row for row in reader if None not in row and None not in row.values()]
        return reader.fieldnames or [], rows


def write_rows(path, columns, rows):
    """Write a .csv file, completely or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


def append_row(path, row):
    """Append a row, {column: number}, to a .csv file, which is rewritten if there are new columns.

    If the disk is full, print a warning.
    """
    try:
        columns = []
        if os.path.exists(path):
            with open(path, newline='', encoding='utf-8-sig') as f:
                columns = next(csv.reader(f), [])
        if not set(row).issubset(columns):
            columns, rows = read_rows(path)
            write_rows(path, list(dict.fromkeys([*columns, *row])), [*rows, row])
            return
        size = os.path.getsize(path)
        try:
            with open(path, 'a', newline='', encoding='utf-8') as f:
                csv.DictWriter(f, columns, lineterminator='\n').writerow(row)
        except OSError:
            os.truncate(path, size)  # otherwise the next row would be appended to a half one
            raise
    except OSError as e:
        print0(f"warning: {path} could not be written ({e.strerror}), training continues")


# -----------------------------------------------------------------------------
# text for messages and records


def first_line(exception):
    """Return the first line of an exception's message."""
    lines = str(exception).strip().splitlines()
    return lines[0][:300] if lines else type(exception).__name__


def script_path(name=None):
    """Return the path of the script that runs, or of the script `name` next to it, quoted for a shell."""
    path = sys.argv[0]
    if name is not None:
        path = os.path.join(os.path.dirname(path), name)
    return shlex.quote(path)


def run_flags(out_dir, data_dir):
    """Return the flags, quoted for a shell, that name a run and the folder of its data, if one was given."""
    flags = f'--out_dir={shlex.quote(out_dir)}'
    if data_dir is not None:
        flags += f' --data_dir={shlex.quote(data_dir)}'
    return flags


def git(*arguments):
    """Return what `git ARGUMENTS` prints in the repository of this code, bytes; empty if it fails."""
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        return subprocess.run(['git', *arguments], cwd=folder, capture_output=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):  # git is not installed, or a disk does not answer
        return b''


def commit():
    """Return the commit of this code, with '-dirty' if a file has changed since; None outside of git."""
    output = git('describe', '--always', '--dirty', '--abbrev=40', '--exclude=*')
    return output.decode('utf-8', 'replace').strip() or None


def uncommitted_diff(limit=65536):
    """
    Return how this code differs from its commit, for `git apply`: '' if it does not, None outside of git.

    The names of files that git does not track come first, without their content. Longer texts are cut.
    """
    if commit() is None:
        return None
    # :/ is the whole repository; --directory names a folder instead of the files in it
    untracked = git('ls-files', '--others', '--exclude-standard', '--directory', '--no-empty-directory',
                    '--full-name', ':/')
    text = b''
    for name in untracked.splitlines():
        text += b'# untracked, not in this diff: ' + name + b'\n'
    text += git('diff', 'HEAD', '--no-color', '--no-ext-diff')
    note = ''
    if len(text) > limit:
        note = f'\n# cut: these are the first {limit:,} of {len(text):,} bytes\n'
    return text[:limit].decode('utf-8', 'replace') + note


def format_duration(seconds):
    """Return '45s', '12m05s', '3h20m'."""
    seconds = round(seconds)
    if seconds < 60:
        return f'{seconds}s'
    if seconds < 3600:
        return f'{seconds // 60}m{seconds % 60:02}s'
    return f'{seconds // 3600}h{seconds % 3600 // 60:02}m'


def format_count(n):
    """Return '950', '33.1K', '25.0M', '45.0B'."""
    for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'K')):
        if n >= size:
            return f'{n / size:.1f}{letter}'
    return str(n)
