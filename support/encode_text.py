"""
Documents become token ids: text is cut into portions of about a million characters, which threads
encode. Where a portion ends depends on the text alone, not on who encodes it or whether a run
was interrupted, so the same bytes come out.
"""

import collections
import concurrent.futures
import hashlib
import itertools
import os
import re

import numpy as np

from configurator import fail
from support.read_text import explain_errors, kind_of

PORTION = 1 << 20  # characters
LONGEST = 1 << 24  # characters without a place to cut at, after which they are cut anyway
IDS = 1 << 22  # of an .npy file, at a time


# -----------------------------------------------------------------------------
# where a text is cut


def after_letter(text, end):
    """The last place up to `end` where every tokenizer's pattern splits anyway: between a letter and a
    space. So the ids of the pieces are the ids of the whole. (No pattern of tiktoken's joins a letter to
    a following space, or looks back.)"""
    found = re.match(r'.*[^\W\d_](?=[ \n\r\t])', text[:end + 1], re.DOTALL)
    return found.end() if found else 0


def after_line(text, end):
    """For tokenizers whose ids may depend on distant text (Llama 2's puts a space before whatever it is
    given). They get a document as a whole, unless it is longer than a long book: they need 150 bytes of
    memory per character."""
    return text.rfind('\n', 0, end) + 1 or end


# by a tokenizer's split_at
CUTS = {'anywhere': lambda text, end: end, 'words': after_letter, 'nowhere': after_line}


def cut_up(pieces, find_cut):
    """The same text in pieces that end where find_cut(text, end) says. Each depends only on the text from
    where it begins."""
    rest, window = '', PORTION
    for piece in pieces:
        rest += piece
        while len(rest) > window:
            end = find_cut(rest, window)
            if not end and window < LONGEST:
                window *= 2
                continue
            end = end or window
            yield rest[:end]
            rest, window = rest[end:], PORTION
    if rest:
        yield rest


def portions(documents, split_at, split_of, start):
    """Yield lists of (split, whether a document begins, text), each with the place behind it (file,
    document, characters), from which another run can continue. split_of(number of the document in its file,
    its first piece): 'train' or 'val'."""
    portion, size = [], 0
    for i, number, pieces in documents:
        first = next(pieces, '')
        split = split_of(number, first)
        done = start[2] if (i, number) == tuple(start[:2]) else 0  # characters, by an earlier run
        for text in cut_up(skip_characters(itertools.chain([first], pieces), done), CUTS[split_at]):
            portion.append((split, done == 0, text))
            done, size = done + len(text), size + len(text)
            if size >= PORTION:
                yield portion, (i, number, done)
                portion, size = [], 0
    if portion:
        yield portion, (i, number, done)


def split_by_hash(text, val_fraction):
    """'train' or 'val', by a hash of how a document begins: it stays there when other documents are
    added."""
    digest = hashlib.blake2b(text[:1 << 16].encode('utf-8', 'replace'), digest_size=8).digest()
    return 'val' if int.from_bytes(digest, 'big') < val_fraction * 2**64 else 'train'


def skip_characters(pieces, n):
    for piece in pieces:
        if n < len(piece):
            yield piece[n:]
        n = max(0, n - len(piece))


# -----------------------------------------------------------------------------
# who encodes it


class Encoder:
    """A tokenizer, and what follows from it: the dtype of the ids, `begin`, the id that stands before each
    document (None: no such id), and the bytes of text per id."""

    def __init__(self, tokenizer, mark_documents=True):
        self.tokenizer = tokenizer
        self.dtype = np.dtype('<u2' if tokenizer.n_vocab <= 1 << 16 else '<u4')
        self.begin = tokenizer.end_of_text if mark_documents else None
        self.token_bytes = tokenizer.token_bytes()

    def encode(self, portion):
        """A portion as [(split, ids), ...], in its order."""
        encoded = []
        for split, begins, text in portion:
            if begins and self.begin is not None:
                encoded.append((split, np.array([self.begin])))
            try:
                encoded.append((split, self.tokenizer.encode(text)))
            except ValueError as e:  # a vocabulary that lacks a character
                fail(f"{e}. use --tokenizer=byte, or another that has every character")
        return encoded


def encode_in_order(portions, workers, encoder):
    """Yield encoder.encode(portion) and the place for each of portions(), in their order, encoded by that
    many threads: tiktoken and tokenizers release Python's lock. Only a few portions are in memory at a
    time."""
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        jobs = ((pool.submit(encoder.encode, portion), place) for portion, place in portions)
        waiting = collections.deque(itertools.islice(jobs, 2 * workers))
        while waiting:
            future, place = waiting.popleft()
            waiting.extend(itertools.islice(jobs, 1))
            yield future.result(), place
    finally:
        pool.shutdown(cancel_futures=True)


# -----------------------------------------------------------------------------
# token ids in .npy files, as build-nanogpt and others write them: they are copied, not encoded


def are_ids(files):
    return all(kind_of(file.path) == 'npy' for file in files)


def read_npy(files, encoder, start):
    """What encode_in_order() yields, from files of ids: those with val in their name are the validation
    split."""
    for i, file in itertools.islice(enumerate(files), start[0], None):
        with explain_errors(file.path):
            ids, n = np.load(file.path, mmap_mode='r'), encoder.tokenizer.n_vocab
            if ids.ndim != 1 or ids.dtype.kind not in 'ui' or not 0 <= ids.min() <= ids.max() < n:
                raise ValueError(f"it is no row of token ids below {n}, the size of the vocabulary")
        split = 'val' if 'val' in os.path.basename(file.path).lower() else 'train'
        for at in range(0, len(ids), IDS):
            if (i, 0, at) >= tuple(start):
                yield [(split, ids[at:at + IDS])], (i, 0, at + IDS)
