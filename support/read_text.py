"""
Documents from files: .txt and .md (a document each), .jsonl (one per line), .parquet (one per row), the
first three also as .gz or .zst. Nothing that is read here is executed.

A document is an iterator over pieces of its text, so a long one is never in memory as a whole.
"""

import codecs
import contextlib
import dataclasses
import glob
import io
import json
import os
import re
import sysconfig
import tokenize
import zlib

try:
    from isal import igzip as gzip  # twice as fast as Python's own
except ImportError:
    import gzip

from configurator import fail

PIECE = 1 << 20  # characters read at a time
READABLE = r'\.(txt|md|jsonl)(\.gz|\.zst)?$|\.parquet$'
NOT_READABLE = r'\.(bz2|xz|zip|tar|tgz|pdf|docx|html?)(\.gz|\.zst)?$|\.parquet\.'
# how files of a kind begin
MAGIC = {b'\x1f\x8b': 'gz', b'\x28\xb5\x2f\xfd': 'zst', b'PAR1': 'parquet', b'BZh': 'bz2',
         b'\xfd7zXZ': 'xz', b'PK\x03\x04': 'zip', b'%PDF': 'pdf'}


class Problem(Exception):
    """An error message for the user, raised where fail() cannot exit: in a thread or a worker process."""


@dataclasses.dataclass
class File:
    path: str  # on this machine, or in the Hub's repository
    size: int
    stamp: str  # changes when the content does: the time it was modified, or the Hub's checksum
    repo: str = None  # of the Hub
    revision: str = None


# -----------------------------------------------------------------------------
# which files


def walk(root, leave_out=()):
    for path, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - set(leave_out))
        yield from (os.path.join(path, file) for file in sorted(files))


def stat(path):
    found = os.stat(path)
    return File(path, found.st_size, str(found.st_mtime_ns))


def find_files(source):
    """The files of a path, folder or pattern, sorted by name."""
    if os.path.isdir(source):
        paths = [path for path in walk(source) if re.search(READABLE, path)]
    elif os.path.exists(source):
        paths = [source]
    else:
        paths = sorted(path for path in glob.glob(source, recursive=True) if os.path.isfile(path))
    if not paths and os.path.isdir(source):
        fail(f"no .txt, .md, .jsonl or .parquet file in {source}. name your text with --input")
    if not paths:
        fail(f"no such file, folder or pattern: {source}. name your text with --input")
    for path in paths:
        if re.search(NOT_READABLE, path):
            fail(f"this kind of file cannot be read ({path}). convert it to .txt, .md or .jsonl (plain, "
                 ".gz or .zst) or .parquet")
    return [stat(path) for path in paths]


def find_pystdlib():
    """The .py files of this Python's standard library, without its tests and installed packages."""
    root = sysconfig.get_paths()['stdlib']
    leave_out = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
    return [stat(path) for path in walk(root, leave_out) if path.endswith('.py')]


# -----------------------------------------------------------------------------
# bytes of compressed files, and what can be wrong with them


class Zst(io.RawIOBase):
    """The decompressed bytes of a .zst file. zstandard's own reader takes a file that was cut off for a
    whole one; this one raises EOFError."""

    def __init__(self, file):
        import zstandard
        self.file, self.decompressor = file, zstandard.ZstdDecompressor()
        self.frame = None  # the decompressor of the current frame
        self.packed = b''  # read, but not decompressed yet
        self.data = b''  # decompressed, but not asked for yet

    def readable(self):
        return True

    def readinto(self, out):
        while not self.data:
            # small reads: they may decompress to ten thousand times as much
            packed = self.packed or self.file.read(1 << 14)
            if not packed:
                if self.frame is not None:
                    raise EOFError('its end is missing')
                return 0
            if self.frame is None:
                self.frame = self.decompressor.decompressobj()
            self.data, self.packed = self.frame.decompress(packed), b''
            if self.frame.eof:  # a file may hold several frames, one after the other
                self.packed, self.frame = self.frame.unused_data, None
        n = min(len(out), len(self.data))
        out[:n] = self.data[:n]
        self.data = self.data[n:]
        return n


def open_bytes(path):
    """The decompressed content of a file, and the file itself, whose tell() says how far it was read."""
    raw = open(path, 'rb')
    start = raw.read(8)
    raw.seek(0)
    ending = next((kind for kind in ('gz', 'zst', 'parquet') if path.endswith('.' + kind)), None)
    check_kind(path, start, ending)
    if ending == 'gz':
        return gzip.open(raw, 'rb'), raw
    if ending == 'zst':
        try:
            return io.BufferedReader(Zst(raw), 1 << 18), raw
        except ImportError:
            fail(f"to read {path} a package is needed that is not installed (zstandard). "
                 "pip install zstandard")
    return raw, raw


def check_kind(path, start, ending):
    """Fail if the first bytes of a file, `start`, do not fit its ending (None: plain text)."""
    found = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    if found == ending or not start:
        return
    if found is None:
        what = f"is no .{ending}"
    else:
        what = f"is .{found}" + (f", not .{ending}" if ending else "")
    remedy = "rename it, or download it again"
    if found in ('bz2', 'xz', 'zip', 'pdf'):
        remedy = "unpack it first"
    fail(f"{path} {what} by its content (it begins with {start[:4]!r}). {remedy}")


@contextlib.contextmanager
def explain_errors(path):
    """Turn what can go wrong while reading the file `path` into one line."""
    try:
        yield
    except UnicodeDecodeError:
        fail(f"{path} is not UTF-8 (byte {first_bad_byte(path)}). convert it (iconv -f latin1 -t utf-8), "
             "or use --encoding_errors=replace")
    except (EOFError, OSError, zlib.error) as e:
        fail(f"{path} cannot be read to its end ({e}). download or compress it again")
    except Exception as e:
        # of packages that may not be installed
        names = 'IsalError', 'ZstdError', 'ArrowInvalid', 'ArrowException', 'ArrowNotImplementedError'
        if type(e).__name__ not in names:
            raise
        what = ' '.join(str(e).split())[:120]
        fail(f"{path} cannot be read to its end ({what}). download or compress it again")


def first_bad_byte(path):
    """The offset of the first byte that is not UTF-8."""
    decoder, offset = codecs.getincrementaldecoder('utf-8')(), 0
    content, _ = open_bytes(path)
    while True:
        block = content.read(PIECE)
        kept = len(decoder.getstate()[0])  # the beginning of a character from the block before
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as e:
            return offset - kept + e.start
        offset += len(block)


# -----------------------------------------------------------------------------
# documents


def documents(numbered_paths, text_key, errors, start=(0, 0)):
    """Yield (file number, document number, pieces of text, tell) for each document from `start`, a (file,
    document), on. tell() says how many bytes of the file have been read."""
    for i, path in numbered_paths:
        skip = start[1] if i == start[0] else 0
        for number, pieces, tell in documents_of(path, text_key, errors, skip):
            yield i, number, pieces, tell


def documents_of(path, text_key, errors, skip):
    """The same for one file, without its number; the first `skip` documents are left out."""
    if path.endswith('.py'):
        if not skip:
            yield 0, read_python(path), lambda: 0
    elif path.endswith('.parquet'):
        yield from read_parquet(path, text_key, skip)
    else:
        content, raw = open_bytes(path)
        # utf-8-sig: a file from Windows may begin with a byte order mark, which is not part of the text
        with explain_errors(path), raw, io.TextIOWrapper(content, encoding='utf-8-sig', errors=errors) as f:
            if re.search(r'\.jsonl(\.gz|\.zst)?$', path):
                for number, line in enumerate(f):
                    if number >= skip and line.strip():
                        yield number, slices(text_of(line, text_key, f'{path}:{number + 1}')), raw.tell
            elif not skip:
                yield 0, read_pieces(f, path), raw.tell


def read_python(path):
    try:
        with tokenize.open(path) as f:  # follows the encoding that the file declares
            yield f.read()
    except (SyntaxError, UnicodeDecodeError):
        pass  # the library has files that are wrong on purpose


def read_pieces(f, path):
    with explain_errors(path):  # here too: the caller's `with` does not cover what a generator does later
        while piece := f.read(PIECE):
            if '\0' in piece:
                fail(f"{path} is not text (it holds a NUL character). name text files only with --input")
            yield piece


def slices(text):
    return (text[i:i + PIECE] for i in range(0, len(text), PIECE))


def text_of(line, text_key, where):
    """The text in a line of JSON; `where` is its file and number, for messages."""
    try:
        text = json.loads(line)[text_key]
    except (ValueError, RecursionError) as e:
        fail(f"{where} is not JSON ({e}). correct or remove that line")
    except (KeyError, TypeError, IndexError):
        fail(f"{where} has no text under the key {text_key!r}. name the right one with --text_key")
    if not isinstance(text, str):
        fail(f"{where} has {type(text).__name__} under {text_key!r}, not text. name the right key with "
             "--text_key")
    # JSON can hold half of a surrogate pair, which is not a character: it becomes U+FFFD
    if not text.isascii() and ('\\ud' in line or '\\uD' in line):
        text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    return text


def read_parquet(path, text_key, skip):
    try:
        import pyarrow.parquet
    except ImportError:
        fail(f"to read {path} a package is needed that is not installed (pyarrow). pip install pyarrow")
    open_bytes(path)[1].close()  # fails if it is something else
    with explain_errors(path), pyarrow.parquet.ParquetFile(path) as f:
        check_column(f.schema_arrow, path, text_key)
        rows, size = f.metadata.num_rows, os.path.getsize(path)
        sizes = [f.metadata.row_group(group).num_rows for group in range(f.num_row_groups)]
        first = number = 0
        while first < len(sizes) and number + sizes[first] <= skip:  # these row groups need not be read
            number += sizes[first]
            first += 1
        groups = list(range(first, len(sizes)))
        for batch in f.iter_batches(256, row_groups=groups, columns=[text_key], use_threads=False):
            for text in batch.column(0).to_pylist():
                if number >= skip and text:
                    yield number, slices(text), lambda: size * number // rows
                number += 1


def check_column(schema, path, column):
    """Fail if a parquet file has no such column of text."""
    from pyarrow import types
    if column not in schema.names:
        has = ', '.join(schema.names)[:200]
        fail(f"{path} has no column {column!r} (it has {has}). name the right one with --text_key")
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)):
        fail(f"{path} has {kind} in the column {column!r}, not text. name the right one with --text_key")
