"""Which files --input means, and which of them are text."""

import collections
import glob
import os
import re
import sysconfig

from configurator import fail
from support.read_text import NOT_READABLE, READABLE, File, kind_of

REMEDY = ("convert it to .txt, .md or .jsonl (plain, .gz or .zst), .html, .epub or .parquet")
# what to do about other files, by their kind
REMEDIES = {
    'csv': "make .jsonl of it: python -c \"import csv, json; [print(json.dumps(row)) for row in "
           "csv.DictReader(open('FILE'))]\" > new.jsonl, then name its column with --text_key",
    'rtf': "save it as plain text: soffice --convert-to txt:Text FILE, or on a Mac textutil -convert txt "
           "FILE",
    'pdf': "extract its text: pdftotext FILE",
    'zip': "unpack it first", 'bz2': "unpack it first", 'xz': "unpack it first", 'tar': "unpack it first",
}
REMEDIES |= {'tgz': REMEDIES['tar'], 'docx': REMEDIES['rtf'], 'doc': REMEDIES['rtf'],
             'odt': REMEDIES['rtf'], '7z': REMEDIES['zip']}


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
        print(f"reading {count(len(paths), 'file')}, skipped {len(skipped)}: {kinds(skipped)}")
    return [stat(path) for path in dict.fromkeys(paths)]


def split_sources(sources):
    for source in [sources] if isinstance(sources, str) else sources:
        source = os.path.expanduser(source)
        if ',' not in source or os.path.exists(source) or glob.glob(source, recursive=True):
            yield source
        else:
            yield from (os.path.expanduser(part.strip()) for part in source.split(',') if part.strip())


def find(source):
    """(files to read, files of other kinds) of a path, folder or pattern, sorted by name."""
    if os.path.isdir(source):
        every = [path for path in walk(source) if not is_hidden(path, source)]
        paths = [path for path in every if re.search(READABLE, path, re.I)]
        paths = paths or [path for path in every if kind_of(path) == 'npy']
    elif os.path.exists(source):
        every = paths = [source]
    else:
        every = sorted(path for path in glob.glob(source, recursive=True) if os.path.isfile(path))
        paths = [path for path in every if not re.search(NOT_READABLE, path, re.I)]
    if not every and os.path.isdir(source):
        fail(f"no .txt, .md, .jsonl, ... in {source}, which is empty. name your text with --input")
    if not every:
        fail(f"no such file, folder or pattern: {source}. name your text with --input")
    if not paths:
        fail(f"no .txt, .md, .jsonl, .html, .epub or .parquet file in {source} ({kinds(every)}). "
             + remedy_of(every[0]) + "; a pattern reads every other kind as plain text: "
             f"--input='{source if glob.has_magic(source) else os.path.join(source, '**', '*.tex')}'")
    if every == [source] and re.search(NOT_READABLE, source, re.I):
        fail(f"this kind of file cannot be read ({source}). {remedy_of(source)}")
    return paths, sorted(set(every) - set(paths))


def is_hidden(path, root):
    return any(part.startswith('.') for part in os.path.relpath(path, root).split(os.sep))


def remedy_of(path):
    return REMEDIES.get(kind_of(path), REMEDY).replace('FILE', os.path.basename(path))


def kinds(paths):
    """'2 .jpg, 1 .pdf'"""
    found = collections.Counter(os.path.splitext(path)[1].lower() or 'without an ending' for path in paths)
    return ', '.join(f'{n} {kind}' for kind, n in found.most_common(8))


def name_of(path):
    """The name of a dataset made from a file or folder: book for texts/book.txt.gz."""
    return os.path.basename(os.path.abspath(path)).lstrip('.').partition('.')[0] or 'text'


def count(n, word):
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def find_pystdlib():
    """The .py files of this Python's standard library, without its tests and installed packages."""
    root = sysconfig.get_paths()['stdlib']
    leave_out = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}
    return [stat(path) for path in walk(root, leave_out) if path.endswith('.py')]
