"""
Documents from files: .txt, .md and any other text, .html and .epub (a document each), .jsonl (one per line),
all but .epub also as .gz or .zst, .parquet (one per row). Nothing that is read here is executed.

A document is an iterator over pieces of its text, so a long one is never in memory as a whole.
"""

import codecs
import contextlib
import glob
import gzip
import html
import io
import json
import os
import posixpath
import re
import sysconfig
import urllib.parse
import xml.etree.ElementTree as ET
import zipfile

from configurator import fail
from support.errors import first_line
from support.hub_datasets import File, local_paths

PIECE = 1 << 20  # characters read at a time
READABLE = r'\.(txt|md|jsonl|html?|xhtml)(\.gz|\.zst)?$|\.(parquet|epub|npy)$|(^|[/\\])[^./\\]+\.(gz|zst)$'
NOT_READABLE = (r'\.(bz2|xz|zip|7z|rar|tar|tgz|pdf|docx?|odt|rtf|csv|xlsx?|mobi|azw3?|png|jpe?g|gif|webp|'
                r'mp[34])(\.gz|\.zst)?$|\.(parquet|epub)\.')


# -----------------------------------------------------------------------------
# which files


def kind_of(path):
    """'txt', 'jsonl', 'epub', ...: a file's ending in small letters; of a compressed one that before."""
    return os.path.splitext(re.sub(r'\.(gz|zst)$', '', os.path.basename(path).lower()))[1][1:]


def stat(path):
    found = os.stat(path)
    return File(path, found.st_size, str(found.st_mtime_ns))


def walk(root, leave_out=()):
    """The files in a folder and the folders below, sorted, but for hidden ones."""
    for path, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name[0] != '.' and name not in leave_out)
        yield from (os.path.join(path, name) for name in sorted(files) if name[0] != '.')


def find_files(sources):
    """The files of `sources` in their order: each a path, a folder or a pattern."""
    paths, skipped = [], []
    for source in sources:
        pattern = os.path.expanduser(source)
        named = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [*filter(os.path.isfile, named)]
        inside = [path for folder in named for path in walk(folder)]
        chosen = [path for path in found if not re.search(NOT_READABLE, path, re.I)]
        chosen += [path for path in inside if re.search(READABLE, path, re.I)]
        others = {*found, *inside} - {*chosen}
        if not chosen:
            fail(f"no .txt, .md, .jsonl, .html, .epub or .parquet in {source} ({kinds(others) or 'nothing'} "
                 "there). save your text as one of them and name it with --input; a pattern reads other "
                 "kinds as plain text: --input='FOLDER/*.tex'")
        paths += chosen
        skipped += others
    if skipped:
        print(f"reading {len(paths):,} files, skipped {len(skipped)}: {kinds(skipped)}")
    return [stat(path) for path in dict.fromkeys(paths)]


def kinds(paths):
    """'.jpg, .pdf'"""
    return ', '.join(sorted({os.path.splitext(path)[1].lower() or 'without an ending' for path in paths}))


def name_of(path):
    """The name of a dataset made from a file or folder: book for texts/book.txt.gz."""
    name = os.path.basename(os.path.abspath(path)).lstrip('.-')
    return name if os.path.isdir(path) else re.sub(r'\.\w+(\.gz|\.zst)?$', '', name)


def find_pystdlib():
    """The .py files of this Python's standard library, without its tests and installed packages."""
    leave_out = 'test tests idle_test site-packages dist-packages __pycache__'.split()
    return [stat(path) for path in walk(sysconfig.get_paths()['stdlib'], leave_out) if path.endswith('.py')]


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
        where = e.object[max(0, e.start - 20):e.start + 20]
        fail(f"{path} is not {e.encoding} ({where!r}). if it is text, convert it to UTF-8, or name the "
             "--encoding, which is that of all files, or use --encoding_errors=replace")
    except Exception as e:  # each package has errors of its own
        fail(f"{path} cannot be read to its end ({type(e).__name__}: {first_line(e)}). rename it if that is "
             "not its kind, or download or compress it again")


# -----------------------------------------------------------------------------
# encodings

MARKS = {codecs.BOM_UTF8: 'utf-8-sig', codecs.BOM_UTF16_LE: 'utf-16', codecs.BOM_UTF16_BE: 'utf-16'}
# what most Western texts have beyond ASCII, \xa0 is a space
WESTERN = '‘’“”–—…àáâãäåçèéêëìíîïñóôõöøùúûüýÿßæœÆÉÀÄÅÖÜÇÈÊ€£§°©«»„¿¡½¼·•†\xa0'


def marked(start):
    """The encoding that a byte order mark at the start of a file tells, else None."""
    return next((name for mark, name in MARKS.items() if start.startswith(mark)), None)


def open_text(path, encoding, errors):
    """A file as text. A mark decides its encoding, which is not part of the text."""
    content = open_bytes(path)
    found = marked(content.peek(4)) or (likely_encoding_of(path) if encoding == 'auto' else encoding)
    return io.TextIOWrapper(content, found, errors)


def likely_encoding(content, at):
    """A guess at the encoding of `content`, bytes that are not all UTF-8, by those around position `at`."""
    text = content.decode('utf-8', 'replace')
    if sum(c > '\x7f' for c in text) > 2 * text.count('\ufffd'):  # most of what is not ASCII is right
        return 'utf-8'
    from charset_normalizer import from_bytes  # tiktoken brings it along
    content = content[max(0, at - 100) & ~1:][:1 << 16]  # from even on: a character of UTF-16 has two bytes
    # its own guess would take a seventh of English books in cp1252 for mac_roman
    for name in 'cp1252', 'mac_roman':
        beyond = re.sub('[\1-\x7f]', '', content.decode(name, 'replace'))
        if sum(map(WESTERN.count, beyond)) > 0.9 * len(beyond):
            return name
    return getattr(from_bytes(content).best(), 'encoding', 'cp1252')


def likely_encoding_of(path):
    """UTF-8 or, if the file is not, a guess that is told."""
    try:
        with open_text(path, 'utf-8', 'strict') as f:
            while f.read(PIECE):
                pass
        return 'utf-8'
    except UnicodeDecodeError as e:
        encoding = likely_encoding(e.object, e.start)
        if encoding != 'utf-8':
            print(f"note: {path} is not UTF-8, it is read as {encoding}. if that is wrong, convert it to "
                  "UTF-8, or where all files have another name it: --encoding=NAME")
        return encoding


# -----------------------------------------------------------------------------
# documents


def documents(files, text_key, encoding, errors, download_to, start=(0, 0)):
    """Yield (file number, document number, pieces of text) for each document from `start`, a (file,
    document), on. Files of the Hub are downloaded into the folder `download_to` for a while."""
    for i, path in local_paths(files, start[0], download_to):
        kind = kind_of(path)
        if kind in ('jsonl', 'parquet'):
            for number, row in rows(path, text_key, encoding, errors):
                if (i, number) >= tuple(start[:2]):
                    yield i, number, slices(text_of(row, text_key, f'{path}:{number + 1}'))
        elif kind in 'html htm xhtml epub'.split():
            yield i, 0, slices(read_page(path, encoding, errors))
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
        with open_text(path, 'utf-8' if encoding == 'auto' else encoding, errors) as f:
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
             "--text_key; conversations are prepared by themselves, with --chat")
    # JSON can hold half of a surrogate pair, which is not a character: it becomes U+FFFD
    return (text or '').encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


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
# the rest of a tag; a value in quotes may hold >. Possessive, *+: no quote is tried twice
REST = r'''(?:=\s*"[^"]*"|=\s*'[^']*'|[^>])*+>'''
# each tag of a kind becomes that
BREAKS = {'\n\n': 'p|div|h[1-6]|blockquote|pre|ul|ol|dl|table|section|article|hr|figure|header|footer|main|'
                  'body',
          '\n': 'br|li|tr|dt|dd|figcaption', '\t': 'td|th'}


def read_page(path, encoding, errors):
    """The text of a page or a book, its chapters in their order."""
    if kind_of(path) != 'epub':
        return text_of_html(''.join(read_pieces(path, encoding, errors)))
    with explain_errors(path), zipfile.ZipFile(path) as book:
        texts = [text_of_html(page.decode(marked(page) or 'utf-8', errors)) for page in chapters(book)]
    return '\n'.join(text for text in texts if text)


def chapters(book):
    """The bytes of each page of a book, in reading order."""
    package = ET.fromstring(book.read('META-INF/container.xml')).find('.//{*}rootfile').get('full-path')
    tree = ET.fromstring(book.read(package))
    hrefs = {item.get('id'): item.get('href') for item in tree.iterfind('.//{*}manifest/{*}item')}
    order = [hrefs[entry.get('idref')] for entry in tree.iterfind('.//{*}spine/{*}itemref')]
    for href in dict.fromkeys(order):  # each once
        yield book.read(posixpath.normpath(posixpath.join(
            posixpath.dirname(package), urllib.parse.unquote(href))))


def text_of_html(content):
    """The text of a page, a paragraph per <p>."""
    parts = re.split(r'(?is)(<pre\b.*?</pre\s*>)', content)
    parts[::2] = (re.sub(r'[ \t\r\n\f]+', ' ', part) for part in parts[::2])  # as a browser shows it
    parts[1::2] = (part.expandtabs(4).replace(' ', '\0') for part in parts[1::2])  # where spaces stay
    text = re.sub(r'(?s)<!--.*?-->|<!\[CDATA\[|\]\]>', '', ''.join(parts))
    text = re.sub(rf'(?is)<({SKIP})\b{REST}(?<!/>).*?</\1\s*>', '', text)
    for space, tags in BREAKS.items():
        text = re.sub(rf'(?i)</?({tags})\b{REST}', space, text)
    text = html.unescape(re.sub(rf'</?[a-zA-Z!?]{REST}', '', text)).replace('\xad', '')
    text = '\n'.join(line.strip(' \t') for line in text.split('\n')).replace('\0', ' ')
    text = re.sub(r'\n{3,}', '\n\n', text).strip('\n')
    return text + '\n' if text else ''
