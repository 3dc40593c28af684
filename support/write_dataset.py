"""
A dataset as it is made: token ids grow in the folder's unfinished/, with progress.json, which says how
far they have come; a run that is killed at any point can be continued. The finished files take their
places at the end.
"""

import contextlib
import glob
import hashlib
import itertools
import os
import re
import shutil
import time

import numpy as np

from configurator import fail
from support.dataset_meta import read_ids, sha256_of
from support.encode_text import Encoder, are_ids
from support.files import lock, read_json, sync_folder, write_json
from support.tokenizer import make_tokenizer, read_files, write_tokenizer

SAVE_EVERY = 30  # seconds: how much has to be made again after a kill


# -----------------------------------------------------------------------------
# token ids into files


class Split:
    """The files of one split in the folder unfinished/, each of shard_tokens ids, the last one of what
    remains."""

    def __init__(self, folder, name, encoder, shard_tokens, tokens=0):
        """The first `tokens` ids in the files of an earlier run are kept; EOFError if there are fewer."""
        self.folder, self.name, self.encoder, self.shard_tokens = folder, name, encoder, shard_tokens
        self.tokens = tokens
        for i in itertools.count():
            kept = max(0, min(shard_tokens, tokens - i * shard_tokens)) * encoder.dtype.itemsize
            there = os.path.exists(self.path(i))
            if kept > (os.path.getsize(self.path(i)) if there else 0):
                raise EOFError
            if not there:
                break
            os.truncate(self.path(i), kept)

    def path(self, i):
        return os.path.join(self.folder, f'{self.name}_{i:06d}.bin')

    def paths(self):
        return [self.path(i) for i in range(-(-self.tokens // self.shard_tokens))]

    def write(self, ids):
        """Append an array of ids."""
        while len(ids):
            i, done = divmod(self.tokens, self.shard_tokens)
            part, ids = ids[:self.shard_tokens - done], ids[self.shard_tokens - done:]
            with open(self.path(i), 'ab') as f:
                f.write(part.tobytes())
            self.tokens += len(part)

    def entry(self):
        """What meta.json says of the split: its files are read again for that."""
        n_bytes, documents, shards = 0, 0, []
        for path in self.paths():
            n = 0
            for ids in read_ids([path], self.encoder.dtype):
                n += len(ids)
                n_bytes += int(self.encoder.token_bytes[ids].sum())
                documents += int((ids == self.encoder.begin).sum())
            shards.append({'file': os.path.basename(path), 'tokens': n, 'sha256': sha256_of(path)})
        last = {'shards': shards} if len(shards) > 1 else {'sha256': shards[0]['sha256']}
        return {'tokens': self.tokens, 'bytes': n_bytes, 'documents': documents or None, **last}


class Draft:
    """The dataset in the folder unfinished/: its splits, and how far the files have been read."""

    def __init__(self, folder, settings, files, mark_documents=True):
        """`settings` and `files` decide whether what an earlier run left can be continued. mark_documents:
        whether the tokenizer's end_of_text stands before each."""
        self.folder, self.settings, self.files = folder, settings, files
        self.mark_documents = mark_documents
        self.place = 0, 0, 0  # file, document, characters: what comes before is in the splits
        self.saved_at = time.time()

    def start(self, tokenizer):
        """Start from nothing."""
        os.makedirs(self.folder, exist_ok=True)
        self.open(tokenizer, {'train': 0, 'val': 0})
        self.meta = write_tokenizer(self.folder, tokenizer, self.encoder.dtype)

    def open(self, tokenizer, tokens):
        self.encoder = Encoder(tokenizer, self.mark_documents)
        self.splits = {name: self.split(name, n) for name, n in tokens.items()}

    def resume(self):
        """Continue what an earlier run saved. Returns False if it was of other settings or files, or if
        not all of it reached the disk."""
        saved = read_json(os.path.join(self.folder, 'progress.json'))
        try:
            if saved['made_with'] != self.settings or saved['read'] != self.read_so_far(saved['place']):
                raise ValueError
            self.meta = saved['meta']
            self.open(make_tokenizer(read_files(self.folder, self.meta)), saved['splits'])
            self.place = saved['place']
        except Exception:  # a file may say anything
            if saved:
                print(f"note: {self.folder} is damaged, or of other settings or files; starting anew")
            return False
        print(f"continuing after {self.tokens():,} tokens of an earlier run")
        return True

    def split(self, name, tokens):
        return Split(self.folder, name, self.encoder, self.settings['shard_tokens'], tokens)

    def tokens(self):
        return sum(split.tokens for split in self.splits.values())

    def read_so_far(self, place):
        """A checksum of the names, sizes and dates of the files up to `place`: with others a run cannot
        continue."""
        return hashlib.sha256(repr(self.files[:place[0] + 1]).encode()).hexdigest()

    def add(self, encoded, place, max_tokens):
        """Append [(split, ids), ...], read up to `place`: the end of all files once train has max_tokens
        (None: as many as there are)."""
        train, val = self.splits.values()
        left, parts = (max_tokens or 2**62) - train.tokens, {'train': [], 'val': []}
        for name, ids in encoded:
            if name == 'train':
                if not left and (val.tokens or parts['val']):
                    break  # else on to the first text of val
                ids = ids[:left]
                left -= len(ids)
            parts[name].append(ids)
        for name, ids in parts.items():
            if ids:
                self.splits[name].write(np.concatenate(ids, dtype=self.encoder.dtype, casting='unsafe'))
        self.place = place if left else (len(self.files), 0, 0)
        if time.time() > self.saved_at + SAVE_EVERY:
            self.save()
            print(f"{self.tokens():,} tokens, file {place[0] + 1:,} of {len(self.files):,}", flush=True)

    def save(self):
        for split in self.splits.values():
            for path in split.paths():
                with open(path, 'ab') as f:
                    os.fsync(f.fileno())
        sync_folder(self.folder)
        progress = {
            'made_with': self.settings, 'read': self.read_so_far(self.place), 'place': self.place,
            'meta': self.meta, 'splits': {name: split.tokens for name, split in self.splits.items()},
        }
        write_json(os.path.join(self.folder, 'progress.json'), progress)
        self.saved_at = time.time()

    def finish(self, val_fraction):
        """All documents are in. Where they are few, their hashes may give val far more than its share, or
        less: then it gets the end of all. Exits if there is too little text for that. Returns what meta.json
        says of the tokenizer and the splits."""
        train, val = self.splits['train'], self.splits['val']
        share = val_fraction * self.tokens()
        fits = are_ids(self.files) and val.tokens or share / 2 <= val.tokens <= 2 * share
        if not (train.tokens and fits):
            print(f"note: val is the end of all texts, as it had {val.tokens:,} tokens of about {share:,.0f}")
            self.move_end(val, train, val.tokens)
            self.move_end(train, val, int(share))
        if train.tokens < 2 or (val.tokens < 2 and val_fraction > 0):
            shutil.rmtree(self.folder)
            fail(f"too little text ({train.tokens} tokens to train on, {val.tokens} to validate). use more")
        self.save()
        return {**self.meta,
                'splits': {name: split.entry() for name, split in self.splits.items() if split.tokens}}

    def move_end(self, source, target, n):
        """Move the last n ids of a split to the other one: first they are written there and that is saved,
        only then they are removed here."""
        for ids in read_ids(source.paths(), self.encoder.dtype, source.tokens - n):
            target.write(ids)
        source.tokens -= n
        self.save()
        self.split(source.name, source.tokens)  # as a run that was interrupted here would do


# -----------------------------------------------------------------------------
# the folder: one writer at a time, and files that take their places together


@contextlib.contextmanager
def only_writer(folder):
    """Only this process writes into `folder` meanwhile. At the end what cannot be continued is removed, and
    so is the folder if there is nothing in it."""
    unfinished = os.path.join(folder, 'unfinished')
    os.makedirs(folder, exist_ok=True)
    with lock(folder, 'prepare.py'):
        try:
            yield
        finally:
            if not os.path.exists(os.path.join(unfinished, 'progress.json')):
                shutil.rmtree(unfinished, ignore_errors=True)
            if os.listdir(folder) == ['.lock']:
                shutil.rmtree(folder)


def move_into_place(folder, unfinished, meta):
    """Move the files of `unfinished` to their places in `folder`. meta.json says that a folder is
    complete, so meanwhile it says the opposite: after a kill at any point the next run does the rest."""
    path = os.path.join(folder, 'meta.json')
    write_json(path, {**meta, 'unfinished': True})
    ids = {part.get('file', split + '.bin') for split, entry in meta['splits'].items()
           for part in entry.get('shards', [entry])}
    for source in glob.glob(os.path.join(glob.escape(unfinished), '*.*')):
        name = os.path.basename(source)
        whole = name.replace('_000000', '')  # train.bin or val.bin, if it is the only one
        if name != 'progress.json':
            os.replace(source, os.path.join(folder, whole if whole in ids else name))
    for file in os.listdir(folder):  # of the dataset that was here before
        if re.fullmatch(r'(train|val)(_\d{6})?\.bin', file) and file not in ids:
            os.remove(os.path.join(folder, file))
    shutil.rmtree(unfinished, ignore_errors=True)
    write_json(path, meta)
