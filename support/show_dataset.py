"""A look into a dataset's folder: what it holds, and whether that is what its meta.json says."""

import hashlib
import itertools
import os

import numpy as np

from configurator import fail
from support.console import exit_on_broken_pipe
from support.dataset_meta import bin_files, read_meta, read_tokenizer_state
from support.missing_dataset import missing
from support.tokenizer import END_OF_TEXT, make_tokenizer
from support.write_dataset import read_ids


def show_dataset(folder):
    """Print what a dataset is, and check it; True if nothing is wrong."""
    exit_on_broken_pipe()
    if not bin_files(folder, 'train'):
        fail(missing(os.path.basename(folder), os.path.dirname(folder)))
    meta = read_meta(folder)
    state = read_tokenizer_state(folder, meta)
    tokenizer = make_tokenizer(state)
    print(f"{folder}: {meta['vocab_size']:,} ids ({state.get('name', state['kind'])}, {meta['dtype']}), "
          f"from {meta.get('source', 'an unknown source')}")
    if 'command' in meta:
        print(f"made by: {meta['command']}")
    fine = True
    for split in ('train', 'val'):
        if bin_files(folder, split) or split in meta['splits']:
            fine &= show_split(folder, split, meta, tokenizer)
    return fine


class Counts:
    """What is in the files of a split."""

    def __init__(self, paths, dtype, end_of_text, token_bytes):
        self.tokens, self.checksums = [], []  # of each file
        self.bytes = self.largest = self.documents = 0
        for path in paths:
            digest, n = hashlib.sha256(), 0
            for ids in read_ids([path], dtype):
                digest.update(ids)
                n += len(ids)
                self.largest = max(self.largest, int(ids.max()))
                self.bytes += int(token_bytes[ids[ids < len(token_bytes)]].sum())
                if end_of_text is not None:
                    self.documents += int((ids == end_of_text).sum())
            self.tokens.append(n)
            self.checksums.append(digest.hexdigest())


def show_split(folder, split, meta, tokenizer):
    """Print and check a split; True if nothing is wrong."""
    paths, entry = bin_files(folder, split), meta['splits'].get(split, {})
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    expected = entry.get('shards')
    if expected is None:
        expected = [{'file': os.path.basename(path), **entry} for path in paths]
    found = Counts(paths, dtype, meta.get('end_of_text'), tokenizer.token_bytes())
    n = sum(found.tokens)
    print(f"{split}: {n:,} tokens, {found.bytes:,} bytes of text, {found.bytes / max(1, n):.2f} bytes per "
          f"token, {entry.get('documents', found.documents):,} documents, "
          f"{len(paths)} {'file' if len(paths) == 1 else 'files'}")

    names = [os.path.basename(path) for path in paths] == [part['file'] for part in expected]
    lengths = agree([part.get('tokens') for part in expected], found.tokens)
    checksums = agree([part.get('sha256') for part in expected], found.checksums)
    whole = all(os.path.getsize(path) % dtype.itemsize == 0 for path in paths)
    known = any(part.get('sha256') for part in expected)
    vocab_size = meta['vocab_size']
    checks = [
        check("the files and their lengths", names and lengths and whole and entry.get('tokens', n) == n),
        check(f"largest id {found.largest:,}, vocabulary {vocab_size:,}", found.largest < vocab_size),
        check("checksums" if known else "no checksums to compare with", checksums),
    ]
    if 'bytes' in entry:
        checks.append(check("bytes of text", entry['bytes'] == found.bytes))
    if found.documents and 'documents' in entry:
        checks.append(check(f"{END_OF_TEXT} before each document", found.documents == entry['documents']))
    show_beginnings(paths, dtype, meta['end_of_text'] if found.documents else None, tokenizer)
    return all(checks)


def agree(expected, found):
    """Whether two lists agree where something is expected (not None)."""
    return all(a in (None, b) for a, b in zip(expected, found))


def check(what, holds):
    print(f"  {'ok   ' if holds else 'WRONG'} {what}")
    return bool(holds)


def show_beginnings(paths, dtype, end_of_text, tokenizer):
    """Print how the first three documents begin."""
    first = list(itertools.islice(read_ids(paths, dtype), 1)) or [np.zeros(0, dtype)]
    ids = first[0][:2000]
    starts = []
    if end_of_text is not None:
        starts = np.flatnonzero(ids == end_of_text)[:4].tolist()
    starts = starts or [0]
    ends = [*starts[1:], len(ids)]
    for start, end in list(zip(starts, ends))[:3]:
        text = tokenizer.decode(ids[start:end][:80].tolist())
        print(f"  | {''.join(c if c.isprintable() else ' ' for c in text)[:150]}")
