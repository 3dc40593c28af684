"""
Documents from files: .txt, .md and any other text, .html and .epub (a document each), .jsonl (one per line),
all but .epub also as .gz or .zst, .parquet (one per row). Nothing that is read here is executed.

A document is an iterator over pieces of its text, so a long one is never in memory as a whole.
"""

import codecs
import collections
import contextlib
import glob
import html
import io
import json
import os
import posixpath
import re
import sysconfig
import tokenize
import urllib.parse
import xml.etree.ElementTree as ET
import zipfile

try:
    from isal import igzip as gzip  # twice as fast as Python's own
except ImportError:
    import gzip

from configurator import fail
from support.errors import first_line
from support.hub_datasets import File, local_paths

PIECE = 1 << 20  # characters read at a time
READABLE = r'\.(txt|md|jsonl|html?|xhtml)(\.gz|\.zst)?$|\.(parquet|epub)$|(^|[/\\])[^./\\]+\.(gz|zst)$'
NOT_READABLE = (r'\.(bz2|xz|zip|7z|rar|tar|tgz|pdf|docx?|odt|rtf|csv|xlsx?|mobi|azw3?|png|jpe?g|gif|webp|'
                r'mp[34])(\.gz|\.zst)?$|\.(parquet|epub)\.')
# what to do about other files, by their kind
OFFICE = "save it as plain text: soffice --convert-to txt:Text FILE"
REMEDIES = {
    'csv': "make .jsonl of it: python -c \"import csv, json; [print(json.dumps(row)) for row in "
           "csv.DictReader(open('FILE'))]\" > new.jsonl, then name its column with --text_key",
    'pdf': "extract its text: pdftotext FILE",
    'rtf': OFFICE, 'doc': OFFICE, 'docx': OFFICE, 'odt': OFFICE,
}


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
    """The files in a folder and the folders below, sorted, but for hidden ones."""
    for path, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name[0] != '.' and name not in leave_out)
        yield from (os.path.join(path, name) for name in sorted(files) if name[0] != '.')


def find_files(sources):
    """The files of `sources` in their order: each a path, a folder, a pattern, or several with commas."""
    paths, skipped = [], []
    for source in sources:
        whole = os.path.exists(os.path.expanduser(source)) or glob.glob(os.path.expanduser(source))
        for part in [source] if whole else source.split(','):
            found, others = find(os.path.expanduser(part.strip()))
            paths += found
            skipped += others
    if skipped:
        print(f"reading {len(paths):,} files, skipped {len(skipped)}: {kinds(skipped)}")
    return [stat(path) for path in dict.fromkeys(paths)]


def find(source):
    """(files to read, files of other kinds) of a path, folder or pattern, sorted by name."""
    if os.path.isdir(source):
        every = list(walk(source))
        paths = [path for path in every if re.search(READABLE, path, re.I)]
        paths = paths or [path for path in every if kind_of(path) == 'npy']
    else:
        every = [source] if os.path.exists(source) else sorted(glob.glob(source, recursive=True))
        every = [path for path in every if not os.path.isdir(path)]
        paths = [path for path in every if not re.search(NOT_READABLE, path, re.I)]
    if not paths:
        kind, there = kind_of(every[0]) if every else '', kinds(every) or 'nothing there'
        remedy = REMEDIES.get(kind, "convert it, or name your text with --input")
        fail(f"no .txt, .md, .jsonl, .html, .epub or .parquet in {source} ({there}). {remedy}; a pattern "
             "reads other kinds as plain text: --input='FOLDER/*.tex'")
    return paths, [path for path in every if path not in paths]


def kinds(paths):
    """'2 .jpg, 1 .pdf'"""
    found = collections.Counter(os.path.splitext(path)[1].lower() or 'without an ending' for path in paths)
    return ', '.join(f'{n} {kind}' for kind, n in found.most_common())


def name_of(path):
    """The name of a dataset made from a file or folder: book for texts/book.txt.gz."""
    name = os.path.basename(os.path.abspath(path)).lstrip('.-')
    if not os.path.isdir(path):
        name = os.path.splitext(re.sub(r'\.(gz|zst)$', '', name))[0]
    return name or 'text'


def find_pystdlib():
    """The .py files of this Python's standard library, without its tests and installed packages."""
    root = sysconfig.get_paths()['stdlib']
    leave_out = 'test tests idle_test site-packages dist-packages __pycache__'.split()
    return [stat(path) for path in walk(root, leave_out) if path.endswith('.py')]


# -----------------------------------------------------------------------------
# their bytes, and what can be wrong with them


def open_bytes(path):
    """The decompressed content of a file."""
    if path.lower().endswith('.gz'):
        return gzip.open(path, 'rb')
    if path.lower().endswith('.zst'):
        import pyarrow  # unlike zstandard's own reader it notices when the end is missing
        return io.BufferedReader(pyarrow.CompressedInputStream(path, 'zstd'))
    return open(path, 'rb')


@contextlib.contextmanager
def explain_errors(path):
    """Turn what can go wrong while reading the file `path` into one line."""
    try:
        yield
    except ImportError:
        raise  # prepare.py names the package
    except UnicodeDecodeError as e:
        where, likely = e.object[max(0, e.start - 20):e.start + 20], likely_encoding(e.object, e.start)
        fail(f"{path} is not {e.encoding} ({where!r}). if it is text, it looks like {likely}: read it with "
             f"--encoding={likely}, or use --encoding_errors=replace")
    except Exception as e:  # each package has errors of its own
        fail(f"{path} cannot be read to its end ({type(e).__name__}: {first_line(e)}). rename it if that is "
             "not its kind, or download or compress it again")


# -----------------------------------------------------------------------------
# encodings

MARKS = {codecs.BOM_UTF8: 'utf-8-sig', codecs.BOM_UTF16_LE: 'utf-16', codecs.BOM_UTF16_BE: 'utf-16'}
WESTERN = ['cp1252', 'mac_roman', 'utf_16', 'utf_16_le', 'utf_16_be']  # of most texts


def marked(start):
    """The encoding that a byte order mark at the start of a file tells, else None."""
    return next((name for mark, name in MARKS.items() if start.startswith(mark)), None)


def likely_encoding(content, at=0):
    """A guess at the encoding of `content`, bytes that are not UTF-8, by those around position `at`."""
    try:
        from charset_normalizer import from_bytes  # tiktoken brings it along
    except ImportError:
        return 'cp1252'
    begin = max(0, at - 100) & ~1  # even: in UTF-16 a character has two bytes
    content = content[begin:begin + (1 << 16)]
    found = from_bytes(content, cp_isolation=WESTERN, threshold=0.1).best() or from_bytes(content).best()
    return found.encoding.replace('_', '-') if found else 'cp1252'


def choose_encoding(path, encoding, start):
    """The encoding to read a file in that begins with the bytes `start`. A mark decides, which is not part of
    the text; 'auto' is UTF-8 or, if the file is not, a guess that is told."""
    if marked(start) or encoding != 'auto':
        return marked(start) or encoding
    try:
        with io.TextIOWrapper(open_bytes(path), 'utf-8') as f:
            while f.read(PIECE):
                pass
        return 'utf-8'
    except UnicodeDecodeError as e:
        encoding = likely_encoding(e.object, e.start)
        print(f"note: {path} is not UTF-8, it is read as {encoding}; another: --encoding=NAME")
        return encoding


# -----------------------------------------------------------------------------
# documents


def documents(files, text_key, encoding, errors, download_to, start=(0, 0)):
    """Yield (file number, document number, pieces of text) for each document from `start`, a (file,
    document), on. Files of the Hub are downloaded into the folder `download_to` for a while."""
    for i, path in local_paths(files, start[0], download_to):
        kind, skip = kind_of(path), start[1] if i == start[0] else 0
        if kind in ('jsonl', 'parquet'):
            for number, row in rows(path, text_key, encoding, errors):
                if number >= skip:
                    yield i, number, slices(text_of(row, text_key, f'{path}:{number + 1}'))
        elif skip:
            pass  # it is one document
        elif kind in ('py', 'html', 'htm', 'xhtml', 'epub'):
            yield i, 0, slices(read_python(path) if kind == 'py' else read_page(path, kind))
        else:
            yield i, 0, read_pieces(path, encoding, errors)


def rows(path, column=None, encoding='utf-8', errors='strict', strict=True):
    """Yield (its number, what it says) for each line of a .jsonl file, or row of a .parquet file, of which
    only the column is read if there is one of that name. A line that is not JSON is an error, or if not
    `strict` what it says is its text."""
    with explain_errors(path):
        if kind_of(path) == 'parquet':
            import pyarrow.parquet
            with pyarrow.parquet.ParquetFile(path) as f:
                columns = [column] if column in f.schema_arrow.names else None
                batches = f.iter_batches(256, columns=columns, use_threads=False)
                yield from enumerate(row for batch in batches for row in batch.to_pylist())
            return
        with open_text(path, encoding, errors) as f:
            for number, line in enumerate(f):
                try:
                    if line.strip():
                        yield number, json.loads(line)
                except (ValueError, RecursionError) as e:
                    if strict:
                        fail(f"{path}:{number + 1} is not JSON ({e}). correct or remove that line")
                    yield number, line


def text_of(row, text_key, where):
    """The text in a row; `where` is its file and number, for messages."""
    text = row.get(text_key, 0) if isinstance(row, dict) else 0
    if not isinstance(text, str | None):
        fail(f"{where} has no text under the key {text_key!r} ({row!r:.200}). name the right one with "
             "--text_key")
    # JSON can hold half of a surrogate pair, which is not a character: it becomes U+FFFD
    return (text or '').encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def open_text(path, encoding, errors):
    content = open_bytes(path)
    return io.TextIOWrapper(content, choose_encoding(path, encoding, content.peek(4)), errors)


def read_python(path):
    try:
        with tokenize.open(path) as f:  # follows the encoding that the file declares
            return f.read()
    except (SyntaxError, UnicodeDecodeError):
        return ''  # the library has files that are wrong on purpose


def read_pieces(path, encoding, errors):
    with explain_errors(path), open_text(path, encoding, errors) as f:
        while piece := f.read(PIECE):
            if '\0' in piece:
                raise ValueError('it holds NUL characters: it is no text')
            yield piece


def slices(text):
    return (text[i:i + PIECE] for i in range(0, len(text), PIECE))


# -----------------------------------------------------------------------------
# .html pages and .epub books; nothing is unpacked to disk

SKIP = 'script|style|head|template|svg|math|noscript|textarea|select|nav'
# each tag of a kind becomes that
BREAKS = {'\n\n': 'p|div|h[1-6]|blockquote|pre|ul|ol|dl|table|section|article|hr|figure|header|footer|main|'
                  'body',
          '\n': 'br|li|tr|dt|dd|figcaption', '\t': 'td|th'}


def read_page(path, kind):
    """The text of a page or a book, its chapters in their order."""
    with explain_errors(path):
        if kind == 'epub':
            with zipfile.ZipFile(path) as book:
                texts = [text_of_html(content) for content in chapters(book)]
            return '\n'.join(text for text in texts if text)
        with open_bytes(path) as f:
            return text_of_html(f.read())


def chapters(book):
    """The bytes of each page of a book, in reading order."""
    package = ET.fromstring(book.read('META-INF/container.xml')).find('.//{*}rootfile').get('full-path')
    tree = ET.fromstring(book.read(package))
    items = {item.get('id'): item for item in tree.iterfind('.//{*}manifest/{*}item')}
    order = [entry.get('idref') for entry in tree.iterfind('.//{*}spine/{*}itemref')]
    for item in (items[id] for id in dict.fromkeys(order)):  # each once
        # others are pictures, or the table of contents
        if 'html' in item.get('media-type') and 'nav' not in item.get('properties', ''):
            name = posixpath.join(posixpath.dirname(package), urllib.parse.unquote(item.get('href')))
            yield book.read(posixpath.normpath(name))


def text_of_html(content):
    """The text of a page's bytes, a paragraph per <p>."""
    parts = re.split(r'(?is)(<pre\b.*?</pre\s*>)', decode_page(content))
    parts[::2] = (re.sub(r'[ \t\r\n\f]+', ' ', part) for part in parts[::2])  # as a browser shows it
    text = re.sub(r'(?s)<!--.*?-->|<!\[CDATA\[|\]\]>', '', ''.join(parts))
    text = re.sub(rf'(?is)<({SKIP})\b(?:[^>]*[^>/])?>.*?</\1\s*>', '', text)
    for space, tags in BREAKS.items():
        text = re.sub(rf'(?i)</?({tags})\b[^>]*>', space, text)
    text = html.unescape(re.sub('</?[a-zA-Z!?][^>]*>', '', text)).replace('\xad', '')
    if '\0' in text:
        raise ValueError('it holds NUL characters: it is no text, or protected against copying')
    text = '\n'.join(line.strip(' \t') for line in text.split('\n'))
    text = re.sub(r'\n{3,}', '\n\n', text).strip('\n')
    return text + '\n' if text else ''


def decode_page(content):
    """A page's bytes as a string, by its mark, its own word, as UTF-8, or by a guess."""
    said = re.search(rb'(?:charset|encoding)\s*=\s*["\']?\s*([\w.:-]+)', content[:4096])
    for encoding in (marked(content), 'utf-8', said and said[1].decode('ascii', 'replace')):
        with contextlib.suppress(UnicodeDecodeError, LookupError, TypeError):  # TypeError: it says nothing
            return content.decode(encoding)
    return content.decode(likely_encoding(content[:1 << 16]), 'replace')
