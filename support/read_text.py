"""
Documents from files: .txt, .md and any other text, .html and .epub (a document each), .jsonl (one per line),
all but .epub also as .gz or .zst, .parquet (one per row). Nothing that is read here is executed.

A document is an iterator over pieces of its text, so a long one is never in memory as a whole.
"""

import codecs
import collections
import contextlib
import glob
import html.parser
import io
import json
import os
import posixpath
import re
import shlex
import sysconfig
import tokenize
import urllib.parse
import xml.etree.ElementTree as ET
import zipfile
import zlib

try:
    from isal import igzip as gzip  # twice as fast as Python's own
except ImportError:
    import gzip

from configurator import fail
from support.errors import first_line
from support.hub_datasets import File, local_paths

PIECE = 1 << 20  # characters read at a time
LONGEST_LINE = 1 << 27  # characters of a line of .jsonl: more would fill the memory
LARGEST_PAGE = 1 << 28  # bytes; a few kilobytes of .epub could unpack to any amount
READABLE = r'\.(txt|md|jsonl|html?|xhtml)(\.gz|\.zst)?$|\.(parquet|epub)$|(^|[/\\])[^./\\]+\.(gz|zst)$'
NOT_READABLE = (r'\.(bz2|xz|zip|7z|rar|tar|tgz|pdf|docx?|odt|rtf|csv|xlsx?|mobi|azw3?|png|jpe?g|gif|webp|'
                r'mp[34])(\.gz|\.zst)?$|\.(parquet|epub)\.')
# what to do about other files, by their kind
REMEDIES = {
    'csv': "make .jsonl of it: python -c \"import csv, json; [print(json.dumps(row)) for row in "
           "csv.DictReader(open('FILE'))]\" > new.jsonl, then name its column with --text_key",
    'docx': "save it as plain text: soffice --convert-to txt:Text FILE, or on a Mac textutil -convert txt FILE",
    'pdf': "extract its text: pdftotext FILE",
    'zip': "unpack it first",
}
REMEDIES |= dict.fromkeys(('rtf', 'doc', 'odt'), REMEDIES['docx'])
REMEDIES |= dict.fromkeys(('bz2', 'xz', 'tar', 'tgz', '7z'), REMEDIES['zip'])
# how files of a kind begin
MAGIC = {b'\x1f\x8b': 'gz', b'\x28\xb5\x2f\xfd': 'zst', b'PAR1': 'parquet', b'BZh': 'bz2',
         b'\xfd7zXZ': 'xz', b'PK\x03\x04': 'zip', b'%PDF': 'pdf'}


# -----------------------------------------------------------------------------
# which files


def kind_of(path):
    """'txt', 'jsonl', 'epub', ...: a file's ending in small letters; of a compressed one that before."""
    name = re.sub(r'\.(gz|zst)$', '', os.path.basename(path).lower())
    return os.path.splitext(name)[1][1:]


def stat(path):
    found = os.stat(path)
    return File(path, found.st_size, str(found.st_mtime_ns))


def walk(root, leave_out=()):
    for path, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - set(leave_out))
        yield from (os.path.join(path, file) for file in sorted(files))


def find_files(sources):
    """The files of `sources` in their order: each a path, a folder, a pattern, or several with commas."""
    paths, skipped = [], []
    for source in split_sources(sources):
        found, others = find(source)
        paths += found
        skipped += others
    if skipped:
        print(f"reading {len(paths):,} files, skipped {len(skipped)}: {kinds(skipped)}")
    return [stat(path) for path in dict.fromkeys(paths)]


def split_sources(sources):
    for source in [sources] if isinstance(sources, str) else sources:
        whole = os.path.exists(os.path.expanduser(source)) or glob.glob(os.path.expanduser(source))
        parts = [source] if whole else source.split(',')
        yield from (os.path.expanduser(part.strip()) for part in parts if part.strip())


def find(source):
    """(files to read, files of other kinds) of a path, folder or pattern, sorted by name."""
    if os.path.isdir(source):
        every = [path for path in walk(source) if not is_hidden(path, source)]
        paths = [path for path in every if re.search(READABLE, path, re.I)]
        paths = paths or [path for path in every if kind_of(path) == 'npy']
    else:
        every = [source] if os.path.exists(source) else sorted(glob.glob(source, recursive=True))
        every = [path for path in every if not os.path.isdir(path)]
        paths = [path for path in every if not re.search(NOT_READABLE, path, re.I)]
    if not every:
        fail(f"no such file, folder or pattern, or nothing in it: {source}. name your .txt, .md, .jsonl, ... "
             "with --input")
    if not paths:
        remedy = REMEDIES.get(kind_of(every[0]), "convert it to .txt").replace('FILE', os.path.basename(every[0]))
        fail(f"no .txt, .md, .jsonl, .html, .epub or .parquet file in {source} ({kinds(every)}). {remedy}; a "
             f"pattern reads other kinds as plain text: --input='{os.path.join(os.path.dirname(every[0]), '*.tex')}'")
    return paths, sorted(set(every) - set(paths))


def is_hidden(path, root):
    return any(part.startswith('.') for part in os.path.relpath(path, root).split(os.sep))


def kinds(paths):
    """'2 .jpg, 1 .pdf'"""
    found = collections.Counter(os.path.splitext(path)[1].lower() or 'without an ending' for path in paths)
    return ', '.join(f'{n} {kind}' for kind, n in found.most_common(8))


def name_of(path):
    """The name of a dataset made from a file or folder: book for texts/book.txt.gz."""
    return os.path.basename(os.path.abspath(path)).lstrip('.').partition('.')[0] or 'text'


def find_pystdlib():
    """The .py files of this Python's standard library, without its tests and installed packages."""
    root = sysconfig.get_paths()['stdlib']
    leave_out = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
    return [stat(path) for path in walk(root, leave_out) if path.endswith('.py')]


# -----------------------------------------------------------------------------
# their bytes, and what can be wrong with them


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
    ending = next((kind for kind in ('gz', 'zst', 'parquet') if path.lower().endswith('.' + kind)), None)
    check_kind(path, raw.read(8), ending)
    raw.seek(0)
    if ending == 'gz':
        return gzip.open(raw, 'rb'), raw
    if ending == 'zst':
        with explain_errors(path):
            return io.BufferedReader(Zst(raw), 1 << 18), raw
    return raw, raw


def check_kind(path, start, ending):
    """Fail if the first bytes of a file, `start`, do not fit its ending (None: plain text)."""
    found = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    if found != ending and start:
        what = f"is .{found}, not .{ending or 'txt'}" if found else f"is no .{ending}"
        remedy = "unpack it first" if found in ('bz2', 'xz', 'zip', 'pdf') else "rename it, or download it again"
        fail(f"{path} {what} by its content (it begins with {start[:4]!r}). {remedy}")


@contextlib.contextmanager
def explain_errors(path, encoding='utf-8'):
    """Turn what can go wrong while reading the file `path` into one line."""
    try:
        yield
    except UnicodeError as e:
        if encoding != 'utf-8':
            fail(f"{path} is not {encoding} ({getattr(e, 'reason', e)}). name another --encoding, or use "
                 "--encoding_errors=replace")
        at, around = first_not_utf8(path)
        likely, file = likely_encoding(around), shlex.quote(path)
        fail(f"{path} is not UTF-8 (byte {at}), it looks like {likely}. read it so with --encoding={likely}, "
             f"or convert it: iconv -f {likely} -t utf-8 {file} > new.txt; or use --encoding_errors=replace")
    except ImportError as e:
        fail(f"to read {path} a package is needed that is not installed ({e.name}). pip install {e.name}")
    except Exception as e:
        # the last ones are of packages that may not be installed
        if not isinstance(e, (EOFError, OSError, zlib.error)) and type(e).__name__ not in (
                'IsalError', 'ZstdError', 'ArrowInvalid', 'ArrowException', 'ArrowNotImplementedError'):
            raise
        what = first_line(e)
        fail(f"{path} cannot be read to its end ({what}). download or compress it again")


# -----------------------------------------------------------------------------
# encodings

MARKS = ((codecs.BOM_UTF8, 'utf-8-sig'), (codecs.BOM_UTF32_LE, 'utf-32'), (codecs.BOM_UTF32_BE, 'utf-32'),
         (codecs.BOM_UTF16_LE, 'utf-16'), (codecs.BOM_UTF16_BE, 'utf-16'))
# tried first, as most texts are in one of them
WESTERN = ['cp1252', 'mac_roman', 'utf_16', 'utf_16_le', 'utf_16_be']
OTHERS = ['cp1250', 'cp1251', 'koi8_r', 'cp866', 'cp1253', 'cp1254', 'cp1255', 'cp1256', 'shift_jis',
          'euc_jp', 'gb18030', 'big5', 'euc_kr']


def marked(start):
    """The encoding that a byte order mark at the start of a file tells, else None."""
    return next((name for mark, name in MARKS if start.startswith(mark)), None)


def likely_encoding(content):
    """The encoding of `content`, bytes that are not UTF-8: a guess."""
    try:
        from charset_normalizer import from_bytes  # tiktoken brings it along
    except ImportError:
        return marked(content) or 'cp1252'
    found = from_bytes(content, cp_isolation=WESTERN, threshold=0.1).best()
    found = found or from_bytes(content, cp_isolation=OTHERS).best()
    return found.encoding.replace('_', '-') if found else 'cp1252'


def first_not_utf8(path):
    """(the offset of the first byte of a file that is not UTF-8, some bytes around it); None if all is."""
    decoder, offset = codecs.getincrementaldecoder('utf-8')(), 0
    content, raw = open_bytes(path)
    with raw:
        while True:
            block = content.read(PIECE)
            kept = len(decoder.getstate()[0])  # the beginning of a character from the block before
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as e:
                at = e.start - kept
                begin = max(0, at - 100) & ~1  # even: in UTF-16 a character has two bytes
                return offset + at, block[begin:begin + (1 << 16)]
            if not block:
                return None
            offset += len(block)


def choose_encoding(path, encoding, content):
    """The encoding to read a file in, whose decompressed bytes `content` has. A mark at its start decides;
    'auto' is UTF-8 or, if the file is not, a guess that is told."""
    mark = marked(content.peek(4))
    if mark in ('utf-16', 'utf-32'):
        return mark
    if encoding != 'auto':
        return encoding
    found = first_not_utf8(path)
    if found is None:
        return 'utf-8'
    likely = likely_encoding(found[1])
    print(f"note: {path} is not UTF-8, it is read as {likely}; another: --encoding=NAME")
    return likely


# -----------------------------------------------------------------------------
# documents


def documents(files, text_key, encoding, errors, download_to, start=(0, 0)):
    """Yield (file number, document number, pieces of text, tell) for each document from `start`, a (file,
    document), on. tell() says how many bytes of the file have been read. Files of the Hub are downloaded into
    the folder `download_to` for a while."""
    for i, path in local_paths(files, start[0], download_to):
        skip = start[1] if i == start[0] else 0
        for number, pieces, tell in documents_of(path, text_key, encoding, errors, skip):
            yield i, number, pieces, tell


def documents_of(path, text_key, encoding, errors, skip):
    """The same for one file, without its number; the first `skip` documents are left out."""
    kind = kind_of(path)
    if kind == 'parquet':
        yield from read_parquet(path, text_key, skip)
    elif kind == 'jsonl':
        with open_text(path, encoding, errors) as (f, tell):
            for number, line in enumerate(read_lines(f, path)):
                if number >= skip and line.strip():
                    yield number, slices(text_of(line, text_key, f'{path}:{number + 1}')), tell
    elif skip:
        pass
    elif kind == 'py':
        yield 0, read_python(path), lambda: 0
    elif kind in ('html', 'htm', 'xhtml', 'epub'):
        yield 0, slices(read_page(path, kind)), lambda: 0
    else:
        with open_text(path, encoding, errors) as (f, tell):
            yield 0, read_pieces(f, path), tell


@contextlib.contextmanager
def open_text(path, encoding='utf-8', errors='strict'):
    """A file of text, and a function that tells how far it was read. Errors while it is read become one
    line."""
    content, raw = open_bytes(path)
    with explain_errors(path), raw:
        encoding = choose_encoding(path, encoding, content)
        # utf-8-sig: a file from Windows may begin with a byte order mark, which is not part of the text
        codec = 'utf-8-sig' if encoding == 'utf-8' else encoding
        with explain_errors(path, encoding), io.TextIOWrapper(content, codec, errors) as f:
            f.encoding_named = encoding
            yield f, raw.tell


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


def read_pieces(f, path):
    # here too: the caller's `with` does not cover what a generator does later
    with explain_errors(path, f.encoding_named):
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
    text = row.get(text_key) if isinstance(row, dict) else row
    if not isinstance(text, str) or row is text:
        fail(f"{where} has no text under the key {text_key!r} ({type(text).__name__}). name the right one with "
             "--text_key")
    # JSON can hold half of a surrogate pair, which is not a character: it becomes U+FFFD
    if not text.isascii() and ('\\ud' in line or '\\uD' in line):
        text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    return text


@contextlib.contextmanager
def open_parquet(path):
    """The ParquetFile at `path`. Errors, also while it is read, become one line."""
    with explain_errors(path):
        import pyarrow.parquet
        open_bytes(path)[1].close()  # fails if it is something else
        with pyarrow.parquet.ParquetFile(path) as f:
            yield f


def read_parquet(path, text_key, skip):
    with open_parquet(path) as f:
        columns = {field.name: str(field.type) for field in f.schema_arrow}
        if not re.search('string|null', columns.get(text_key, '')) or f.schema_arrow.names.count(text_key) > 1:
            has = ', '.join(f'{name}: {kind}' for name, kind in columns.items())[:200]
            fail(f"{path} has no column {text_key!r} of text, or several (it has {has}). name the right one "
                 "with --text_key")
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


# -----------------------------------------------------------------------------
# .html pages and .epub books; nothing is unpacked to disk

SKIP = {'script', 'style', 'head', 'template', 'svg', 'math', 'noscript', 'textarea', 'select', 'nav'}
# around these stands an empty line, around the others of LINES a new line
PARAGRAPHS = {'p', 'div', 'h1', 'h2', 'h3', 'h4', 'h5', 'h6', 'blockquote', 'pre', 'ul', 'ol', 'dl', 'table',
              'section', 'article', 'hr', 'figure', 'header', 'footer', 'main', 'body'}
LINES = {'br', 'li', 'tr', 'dt', 'dd', 'figcaption'}


class PageText(html.parser.HTMLParser):
    """Collects the text of a page, a paragraph per <p>."""

    def __init__(self):
        super().__init__()
        self.parts, self.skipping, self.preformatted = [], [], 0

    def handle_starttag(self, tag, attrs):
        if tag in SKIP:
            self.skipping.append(tag)
        self.preformatted += tag == 'pre'
        self.break_at(tag)

    def handle_startendtag(self, tag, attrs):  # <br/>; a <script/> has no end
        self.break_at(tag)

    def handle_endtag(self, tag):
        if tag in self.skipping:  # also what was not closed inside
            del self.skipping[self.skipping.index(tag):]
        self.preformatted -= tag == 'pre' and self.preformatted > 0
        if tag == 'body':
            self.skipping.clear()
        self.break_at(tag)

    def handle_data(self, data):
        if self.skipping:
            return
        if not self.preformatted:  # as a browser shows it
            data = re.sub(r'[ \t\r\n\f]+', ' ', data)
        self.parts.append(data)

    def break_at(self, tag):
        if tag in PARAGRAPHS:
            self.parts.append('\n\n')
        elif tag in LINES:
            self.parts.append('\n')
        elif tag in ('td', 'th'):
            self.parts.append('\t')


def read_page(path, kind):
    """The text of a page or a book, its chapters in their order."""
    if kind != 'epub':
        content, raw = open_bytes(path)
        with explain_errors(path), raw:
            return text_of_html(content.read(LARGEST_PAGE))
    try:
        with zipfile.ZipFile(path) as book:
            texts = [text_of_html(content) for content in chapters(book)]
        if not texts:
            raise ValueError('it has no pages of text')
    except (zipfile.BadZipFile, KeyError, ValueError, AttributeError, ET.ParseError, NotImplementedError,
            RuntimeError, EOFError, zlib.error) as e:
        fail(f"{path} is no .epub that can be read ({first_line(e)}). download it again, or "
             "convert it to .txt, with Calibre for instance")
    return '\n'.join(text for text in texts if text)


def text_of_html(content):
    """The text of a page's bytes."""
    parser = PageText()
    parser.feed(decode_page(content))
    parser.close()
    lines = [line.strip(' \t') for line in ''.join(parser.parts).replace('\xad', '').split('\n')]
    text = re.sub(r'\n{3,}', '\n\n', '\n'.join(lines)).strip('\n')
    return text + '\n' if text else ''


def decode_page(content):
    """A page's bytes as a string, by its mark, its own word, as UTF-8, or by a guess."""
    said = re.search(rb'(?:charset|encoding)\s*=\s*["\']?\s*([\w.:-]+)', content[:4096])
    for encoding in (marked(content), 'utf-8', said and said[1].decode('ascii', 'replace')):
        with contextlib.suppress(UnicodeDecodeError, LookupError, TypeError):  # TypeError: it says nothing
            return content.decode(encoding)
    return content.decode(likely_encoding(content[:1 << 16]), 'replace')


def chapters(book):
    """The bytes of each page of a book, in reading order."""
    def tree(name):
        return ET.fromstring(unpack(book, name))

    package = tree('META-INF/container.xml').find('.//{*}rootfile').get('full-path')
    items = {item.get('id'): item for item in tree(package).iterfind('.//{*}manifest/{*}item')}
    locked = set()
    if 'META-INF/encryption.xml' in book.namelist():  # embedded fonts may be, in books that can be read
        listed = tree('META-INF/encryption.xml').iterfind('.//{*}CipherReference')
        locked = {urllib.parse.unquote(item.get('URI', '')) for item in listed}
    for entry in tree(package).iterfind('.//{*}spine/{*}itemref'):
        item = items.get(entry.get('idref'), {})
        if 'html' not in item.get('media-type', '') or 'nav' in item.get('properties', '').split():
            continue  # no page, or the table of contents
        href = urllib.parse.unquote(item.get('href', '').partition('#')[0])
        name = posixpath.normpath(posixpath.join(posixpath.dirname(package), href))
        if name in locked:
            raise ValueError('it is protected against copying')
        if name in book.namelist():
            yield unpack(book, name)


def unpack(book, name):
    if book.getinfo(name).file_size > LARGEST_PAGE:
        raise ValueError(f"{name} in it is over {LARGEST_PAGE / 1e6:,.0f} MB")
    return book.read(name)
