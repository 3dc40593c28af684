"""What a dataset folder says of itself: meta.json, or nanoGPT's meta.pkl, or nothing."""

import glob
import hashlib
import json
import os
import pickle
import shlex

import numpy as np

from configurator import fail
from support.files import write_whole
from support.tokenizer import check_tokenizer_state, read_files

DATA_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'data')
# what prepare.py makes by name
KNOWN = 'pystdlib shakespeare_char shakespeare openwebtext fineweb fineweb_edu tinystories'.split()


# what a folder without any meta has, as in nanoGPT
GPT2 = {'tokenizer': {'kind': 'tiktoken', 'name': 'gpt2'}, 'vocab_size': 50257, 'end_of_text': 50256}


# -----------------------------------------------------------------------------
# where it is


def folder_of(name, data_dir):
    """The folder of the dataset `name`; ends with status 2 if that is no name."""
    data_dir = data_dir or DATA_DIR
    if name != os.path.basename(name) or name in ('', '.', '..') or '\0' in name:
        fail(f"dataset is a folder's name ({name!r}). give it alone; --data_dir=PATH replaces {data_dir}")
    return os.path.join(data_dir, name)


def bin_files(folder, split):
    """The files with a split's token ids, in order: one, or shards (train_000000.bin, ...), or none."""
    if os.path.exists(whole := os.path.join(folder, split + '.bin')):
        return [whole]
    return sorted(glob.glob(os.path.join(glob.escape(folder), f"{split}_{'[0-9]' * 6}.bin")))


def read_ids(paths, dtype, start=0):
    """Yield the token ids in the files from number `start` on, some at a time."""
    for path in paths:
        n = os.path.getsize(path) // dtype.itemsize
        with open(path, 'rb') as f:
            f.seek(min(start, n) * dtype.itemsize)
            while len(ids := np.fromfile(f, dtype, 1 << 19)):
                yield ids
        start = max(0, start - n)


def missing(folder):
    """What to say when there is no train.bin in a dataset's folder."""
    data_dir, name = os.path.split(folder)
    if os.path.isdir(os.path.join(folder, 'unfinished')):
        return f"{folder} is not finished. run its prepare.py again: it continues where it stopped"
    make = f"python prepare.py {shlex.quote(name)}" + ("" if name in KNOWN else " --input=FILE_OR_FOLDER")
    found = glob.glob(os.path.join(glob.escape(data_dir), '*', 'train*.bin'))
    have = ', '.join(sorted({os.path.basename(os.path.dirname(path)) for path in found}))
    return (f"no dataset {name} in {data_dir} (there is: {have or 'none yet'}). name another folder with "
            f"--data_dir, or make it from text: {make}; for a first run on a laptop: bash runs/quickstart.sh")


def damaged(path, size, width, tokens):
    """What to say of a file of `size` bytes (-1: there is none), `width` for each id, that should have
    `tokens` of them (None: unknown)."""
    has = "is missing" if size < 0 else f"has {size:,} bytes"
    wanted = f"a multiple of {width}" if tokens is None else f"the {tokens * width:,} that it was made with"
    return f"{path} {has}, not {wanted}. run prepare.py for this dataset again"


# -----------------------------------------------------------------------------
# what it says


def read_meta(folder):
    """The dict in meta.json. Without it the same from nanoGPT's meta.pkl, or, as nanoGPT assumes, GPT-2
    tokens."""
    path = os.path.join(folder, 'meta.json')
    try:
        if not os.path.exists(path):
            path = os.path.join(folder, 'meta.pkl')
            return complete(from_meta_pkl(path) if os.path.exists(path) else GPT2)
        with open(path, encoding='utf-8') as f:
            meta = json.load(f)
        if not meta.get('unfinished'):
            return complete(meta)
    except Exception as e:  # a file may say anything
        fail(f"{path} is damaged ({type(e).__name__}: {e}). run prepare.py for this dataset again")
    fail(f"{folder} is not finished. run its command again: {meta.get('command', 'python prepare.py ...')}")


def complete(meta):
    """One that a person wrote may say as little as {"vocab_size": 1000, "dtype": "uint32"}; then the ids are
    no text. Raises an exception of some kind if it says what cannot be."""
    size = meta['vocab_size']
    assert type(size) is int and 0 < size <= 2**32, f'vocab_size is {size!r:.60}'
    meta = {'tokenizer': {'kind': 'ids', 'n_vocab': size}, 'end_of_text': None,
            'dtype': 'uint16' if size <= 65536 else 'uint32', 'splits': {}, **meta}
    state = meta['tokenizer']
    check_tokenizer_state(state)
    n_chars = len(state.get('chars', [])) + len(state.get('added', []))
    fits = n_chars == size or n_chars < size and not meta['splits']  # nanoGPT's may be padded
    assert 'chars' not in state or fits, f'vocab_size is {size}, there are {n_chars} characters'
    assert meta['dtype'] in ('uint16', 'uint32'), f"dtype is {meta['dtype']!r:.60}"
    for split in meta['splits'].values():
        for entry in (split, *split.get('shards', [])):
            assert entry['tokens'] > 0, 'the number of tokens'
    return meta


class PlainUnpickler(pickle.Unpickler):
    """Dicts, lists, strings and numbers need no class; a pickle that asks for one wants to run code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it wants to run {module}.{name}, and may hold plain numbers and texts")


def from_meta_pkl(path):
    """The same of nanoGPT's meta.pkl, read without running anything in it. An exception of some kind if it is
    no plain vocabulary."""
    with open(path, 'rb') as f:
        old = PlainUnpickler(f).load()
    size, itos = int(old['vocab_size']), old.get('itos')
    chars = [itos[i] for i in range(len(itos or ''))]  # fewer than vocab_size, if that is padded
    if {len(c) for c in chars} != {1}:
        return {'vocab_size': size}  # all that nanoGPT's train.py asks for
    return {'tokenizer': {'kind': 'char', 'chars': ''.join(chars)}, 'vocab_size': size}


def write_meta_pkl(path, chars):
    """The same file, for programs that read nanoGPT's folders."""
    stoi = {c: i for i, c in enumerate(chars)}
    write_whole(path, pickle.dumps({'vocab_size': len(chars), 'itos': dict(enumerate(chars)), 'stoi': stoi}))


def read_tokenizer_state(folder, meta):
    """meta's tokenizer together with its files: all that a checkpoint has to know to be sampled without the
    dataset."""
    try:
        return read_files(folder, meta)
    except (OSError, ValueError) as e:
        fail(f"the tokenizer of {folder} is damaged ({e}). run prepare.py for this dataset again")


def checksum(entry):
    """16 digits of the sha256 in a split's entry of meta.json; of several shards, of their checksums."""
    sums = [str(part.get('sha256', 'unknown')) for part in entry.get('shards', [entry])]
    if len(sums) == 1:
        return sums[0][:16]
    return hashlib.sha256(' '.join(sums).encode()).hexdigest()[:16] + ' of all'


def sha256_of(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()
