"""The text of .html pages and of .epub books. Nothing in them is executed, nothing is unpacked to disk."""

import html.parser
import posixpath
import re
import urllib.parse
import xml.etree.ElementTree as ET
import zipfile

from configurator import fail
from support.encodings import likely_encoding, marked

LARGEST = 1 << 28  # bytes of a page; a few kilobytes of .epub could unpack to any amount
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


def text_of_html(content):
    """The text of a page, a string."""
    parser = PageText()
    parser.feed(content)
    parser.close()
    lines = [line.strip(' \t') for line in ''.join(parser.parts).replace('\xad', '').split('\n')]
    text = re.sub(r'\n{3,}', '\n\n', '\n'.join(lines)).strip('\n')
    return text + '\n' if text else ''


def decode_page(content):
    """The text of a page's bytes, by its mark, its own word, as UTF-8, or by a guess."""
    said = re.search(rb'(?:charset|encoding)\s*=\s*["\']?\s*([\w.:-]+)', content[:4096])
    for encoding in (marked(content), 'utf-8', said and said[1].decode('ascii', 'replace')):
        try:
            return content.decode(encoding)
        except (UnicodeDecodeError, LookupError, TypeError):  # TypeError: it says nothing
            pass
    return content.decode(likely_encoding(content), 'replace')


def read_html(file, path):
    """The text of a .html file that is open as `file`."""
    content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        fail(f"{path} is too long for a page (over {LARGEST / 1e6:,.0f} MB). convert it to .txt")
    return text_of_html(decode_page(content))


def read_epub(path):
    """The text of a book, its chapters in their order."""
    try:
        with zipfile.ZipFile(path) as book:
            texts = [text_of_html(decode_page(content)) for content in chapters(book)]
    except ValueError as e:
        fail(f"{path} cannot be read ({e}). convert it to .txt, with Calibre for instance")
    except (zipfile.BadZipFile, KeyError, ET.ParseError, NotImplementedError, RuntimeError, EOFError,
            zipfile.zlib.error) as e:
        fail(f"{path} is no .epub, or damaged ({' '.join(str(e).split())[:100]}). download it again, or "
             "convert it to .txt")
    return '\n'.join(text for text in texts if text)


def chapters(book):
    """The bytes of each page of a book, in reading order. ValueError if there is nothing to read."""
    names = set(book.namelist())
    root = ET.fromstring(unpack(book, 'META-INF/container.xml')).find('.//{*}rootfile')
    if root is None or not root.get('full-path'):
        raise ValueError('it names no contents')
    package = root.get('full-path')
    tree = ET.fromstring(unpack(book, package))
    items = {item.get('id'): item for item in tree.iterfind('.//{*}manifest/{*}item')}
    locked = set()
    if 'META-INF/encryption.xml' in names:  # embedded fonts may be, in books that can be read
        listed = ET.fromstring(unpack(book, 'META-INF/encryption.xml')).iterfind('.//{*}CipherReference')
        locked = {urllib.parse.unquote(item.get('URI', '')) for item in listed}
    found = 0
    for entry in tree.iterfind('.//{*}spine/{*}itemref'):
        item = items.get(entry.get('idref'))
        if item is None or 'html' not in (item.get('media-type') or ''):
            continue
        if 'nav' in (item.get('properties') or '').split():  # the table of contents
            continue
        href = urllib.parse.unquote(item.get('href', '').partition('#')[0])
        name = posixpath.normpath(posixpath.join(posixpath.dirname(package), href))
        if name in locked:
            raise ValueError('it is protected against copying')
        if name in names:
            found += 1
            yield unpack(book, name)
    if not found:
        raise ValueError('it has no pages of text')


def unpack(book, name):
    if book.getinfo(name).file_size > LARGEST:
        raise ValueError(f"{name} in it is over {LARGEST / 1e6:,.0f} MB")
    return book.read(name)
