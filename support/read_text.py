"""
Documents from files: .txt, .md and any other text, .html and .epub (a document each), .jsonl (one per line),
all but .epub also as .gz or .zst, .parquet (one per row). Nothing that is read here is executed.

A document is an iterator over pieces of its text, so a long one is never in memory as a whole.
"""

import codecs
import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import tokenize
import zlib

try:
    from isal import igzip as gzip  # twice as fast as Python's own
except ImportError:
    import gzip

from configurator import fail

PIECE = 1 << 20  # characters read at a time
LONGEST_LINE = 1 << 27  # characters of a line of .jsonl: more would fill the memory
READABLE = r'\.(txt|md|jsonl|html?|xhtml)(\.gz|\.zst)?$|\.(parquet|epub)$|(^|[/\\])[^./\\]+\.(gz|zst)$'
NOT_READABLE = (r'\.(bz2|xz|zip|7z|rar|tar|tgz|pdf|docx?|odt|rtf|csv|xlsx?|mobi|azw3?|png|jpe?g|gif|webp|'
                r'mp[34])(\.gz|\.zst)?$|\.(parquet|epub)\.')
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


def kind_of(path):
    """'txt', 'jsonl', 'epub', ...: a file's ending in small letters; of a compressed one that before."""
    name = re.sub(r'\.(gz|zst)$', '', os.path.basename(path).lower())
    return os.path.splitext(name)[1][1:]


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
    endings = ('gz', 'zst', 'parquet')
    ending = next((kind for kind in endings if path.lower().endswith('.' + kind)), None)
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
def explain_errors(path, encoding=None):
    """Turn what can go wrong while reading the file `path` into one line."""
    try:
        yield
    except UnicodeError as e:
        if encoding not in (None, 'utf-8'):
            fail(f"{path} is not {encoding} ({getattr(e, 'reason', e)}). name another --encoding, or use "
                 "--encoding_errors=replace")
        from support.encodings import likely_encoding
        at = first_bad_byte(path)
        likely, file = likely_encoding(bytes_at(path, at)), shlex.quote(path)
        fail(f"{path} is not UTF-8 (byte {at}), it looks like {likely}. read it so with --encoding={likely}, "
             f"or convert it: iconv -f {likely} -t utf-8 {file} > new.txt; or use --encoding_errors=replace")
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
    """The offset of the first byte that is not UTF-8; None if there is none."""
    decoder, offset = codecs.getincrementaldecoder('utf-8')(), 0
    content, raw = open_bytes(path)
    with raw:
        while True:
            block = content.read(PIECE)
            kept = len(decoder.getstate()[0])  # the beginning of a character from the block before
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as e:
                return offset - kept + e.start
            if not block:
                return None
            offset += len(block)


def bytes_at(path, at):
    """Some of a file's bytes around the byte `at`."""
    content, raw = open_bytes(path)
    with raw:
        left = max(0, at - 100) & ~1  # even: in UTF-16 a character has two bytes
        while left:
            left -= len(content.read(min(left, PIECE)))
        return content.read(1 << 18)


def choose_encoding(path, encoding, content):
    """The encoding to read a file in, whose decompressed bytes `content` has. A mark at its start decides;
    'auto' is UTF-8 or, if the file is not, a guess that is told."""
    start = content.peek(4) if hasattr(content, 'peek') else b''
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return 'utf-32' if start[:4] == codecs.BOM_UTF32_LE else 'utf-16'
    if encoding != 'auto':
        return encoding
    at = first_bad_byte(path)
    if at is None:
        return 'utf-8'
    from support.encodings import likely_encoding
    likely = likely_encoding(bytes_at(path, at))
    print(f"note: {path} is not UTF-8, it is read as {likely}; another: --encoding=NAME")
    return likely


# -----------------------------------------------------------------------------
# documents


def documents(numbered_paths, text_key, encoding, errors, start=(0, 0)):
    """Yield (file number, document number, pieces of text, tell) for each document from `start`, a (file,
    document), on. tell() says how many bytes of the file have been read."""
    for i, path in numbered_paths:
        skip = start[1] if i == start[0] else 0
        for number, pieces, tell in documents_of(path, text_key, encoding, errors, skip):
            yield i, number, pieces, tell


def documents_of(path, text_key, encoding, errors, skip):
    """The same for one file, without its number; the first `skip` documents are left out."""
    kind = kind_of(path)
    if kind == 'py':
        if not skip:
            yield 0, read_python(path), lambda: 0
    elif kind == 'parquet':
        yield from read_parquet(path, text_key, skip)
    elif kind in ('html', 'htm', 'xhtml', 'epub'):
        if not skip:
            yield 0, slices(read_page(path, kind)), lambda: 0
    else:
        content, raw = open_bytes(path)
        with explain_errors(path):
            encoding = choose_encoding(path, encoding, content)
        # utf-8-sig: a file from Windows may begin with a byte order mark, which is not part of the text
        codec = 'utf-8-sig' if encoding == 'utf-8' else encoding
        with explain_errors(path, encoding), raw, io.TextIOWrapper(content, codec, errors) as f:
            if kind == 'jsonl':
                for number, line in enumerate(read_lines(f, path)):
                    if number >= skip and line.strip():
                        yield number, slices(text_of(line, text_key, f'{path}:{number + 1}')), raw.tell
            elif not skip:
                yield 0, read_pieces(f, path, encoding), raw.tell


def read_page(path, kind):
    from support import pages
    if kind == 'epub':
        return pages.read_epub(path)
    content, raw = open_bytes(path)
    with explain_errors(path), raw:
        return pages.read_html(content, path)


def read_lines(f, path):
    while line := f.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            fail(f"{path} has a line of over {LONGEST_LINE:,} characters. put one document on a line, or "
                 "name it .txt if it is no JSON")
        yield line


def read_python(path):
    try:
        with tokenize.open(path) as f:  # follows the encoding that the file declares
            yield f.read()
    except (SyntaxError, UnicodeDecodeError):
        pass  # the library has files that are wrong on purpose


def read_pieces(f, path, encoding):
    # here too: the caller's `with` does not cover what a generator does later
    with explain_errors(path, encoding):
        while piece := f.read(PIECE):
            if '\0' in piece:
                fail(f"{path} is not text (it holds a NUL character). name text files only with --input")
            yield piece


def slices(text):
    return (text[i:i + PIECE] for i in range(0, len(text), PIECE))


def object_of(line, where):
    """What a line of JSON says; `where` is its file and number, for messages."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as e:
        fail(f"{where} is not JSON ({e}). correct or remove that line")


def text_of(line, text_key, where):
    """The text in a line of JSON; `where` is its file and number, for messages."""
    row = object_of(line, where)
    try:
        text = row[text_key]
    except (KeyError, TypeError, IndexError):
        fail(f"{where} has no text under the key {text_key!r}. name the right one with --text_key")
    if not isinstance(text, str):
        fail(f"{where} has {type(text).__name__} under {text_key!r}, not text. name the right key with "
             "--text_key")
    # JSON can hold half of a surrogate pair, which is not a character: it becomes U+FFFD
    if not text.isascii() and ('\\ud' in line or '\\uD' in line):
        text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    return text


@contextlib.contextmanager
def open_parquet(path):
    """The ParquetFile at `path`. Errors, also while it is read, become one line."""
    try:
        import pyarrow.parquet
    except ImportError:
        fail(f"to read {path} a package is needed that is not installed (pyarrow). pip install pyarrow")
    open_bytes(path)[1].close()  # fails if it is something else
    with explain_errors(path), pyarrow.parquet.ParquetFile(path) as f:
        yield f


def read_parquet(path, text_key, skip):
    with open_parquet(path) as f:
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
    if schema.names.count(column) > 1:
        fail(f"{path} has more than one column {column!r}. rename one of them")
    if column not in schema.names:
        has = ', '.join(schema.names)[:200]
        fail(f"{path} has no column {column!r} (it has {has}). name the right one with --text_key")
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)):
        fail(f"{path} has {kind} in the column {column!r}, not text. name the right one with --text_key")
