"""
What a dataset is: a folder data/<name>/ with token ids in train.bin and val.bin (little-endian, no header)
and meta.json, which tells the tokenizer, the dtype and the counts. A large split comes in shards,
train_000000.bin and so on, which are one long array to the reader. nanoGPT's folders are read as they are,
and so are .npy shards.

And which sample comes when: a pure function of the seed and the sample's number. So there is no state to
save, and the order depends neither on a resume nor on the number of processes.
"""

import bisect
import collections
import concurrent.futures
import functools
import glob
import hashlib
import json
import math
import os
import pickle
import shlex
import time

import numpy as np
import torch

from configurator import InputError
from files import first_line
from tokenizer import GPT2_STATE, KINDS, make_tokenizer, read_tokenizer_files, token_bytes


DATA_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data')


class Dataset:
    """The folder data_dir/name (data_dir None: data/ beside this file). Ends with one line and status 2 if it
    cannot be read.
        splits            {'train': ..., 'val': ...}, Tokens or Conversations; also .train and .val (or None)
        vocab_size        of a network for it
        tokenizer, tokenizer_state
        fingerprint       plain values that tell this data from other: name, tokens, checksums
    block_size: that of the windows which will be read, so that too little data is told here; seed: of how
    conversations are packed; document_mask: no document sees another one."""

    def __init__(self, name, data_dir=None, block_size=None, seed=0, document_mask=False):
        self.name = name
        self.folder = folder_of(name, data_dir)
        self.splits = {}
        self.fingerprint = {'name': name}
        try:
            self.meta = read_meta(self.folder)
            self.tokenizer_state = read_tokenizer_files(self.folder, self.meta)
            sizes = token_bytes(self.tokenizer_state, self.meta['vocab_size'])
            for split in ('train', 'val'):
                if bin_files(self.folder, split):
                    kind = Tokens
                    if 'chat' in self.meta:
                        from conversations import Conversations as kind
                    tokens = kind(self.folder, split, self.meta, sizes, seed, document_mask)
                    tokens.check()
                    if block_size and tokens.n_targets(block_size) < block_size:
                        raise InputError(f"{split} of dataset {name} has no window of {block_size} tokens with targets "
                              f"that count ({tokens.n:,} tokens). use another --block_size, or more text")
                    self.splits[split] = tokens
                    self.fingerprint[split] = tokens.fingerprint
        except (ValueError, OSError) as e:
            raise InputError(str(e))
        if 'train' not in self.splits:
            command = f"python prepare.py {shlex.quote(name)}"
            raise InputError(f"no dataset {name} ({self.folder}). make it: {command}, or from a text of your own: "
                  f"{command} --input=FILE_OR_FOLDER")
        if block_size and document_mask and self.meta['end_of_text'] is None:
            raise InputError(f"document_mask: no token separates the documents of dataset {name}. leave it out")
        self.train = self.splits['train']
        self.val = self.splits.get('val')
        self.vocab_size = padded_vocab_size(self.meta['vocab_size'], self.tokenizer_state)

    @functools.cached_property
    def tokenizer(self):
        """Only made when it is asked for: to train on nanoGPT's folders no tiktoken is needed."""
        try:
            return make_tokenizer(self.tokenizer_state)
        except ValueError as e:
            raise InputError(str(e))

    def n_eval_windows(self, block_size):
        """Windows that cover the validation split, or train where there is none."""
        split = self.val or self.train
        return math.ceil(split.n_targets(block_size) / block_size)


def padded_vocab_size(vocab_size, tokenizer_state):
    """BPE vocabularies are padded to a multiple of 64 as in nanoGPT (50257 -> 50304): faster. Characters and
    bytes are few enough as they are."""
    if tokenizer_state['kind'] in ('tiktoken', 'hf'):
        return math.ceil(vocab_size / 64) * 64
    return vocab_size


# -----------------------------------------------------------------------------
# a split


class Tokens:
    """The token ids of one split: n of them, in one file or in shards.
    token_bytes: bytes of text per token id, (vocab_size,), 0 for special tokens; all 0 where it is unknown"""
    masked = False  # whether some targets do not count

    def __init__(self, folder, split, meta, token_bytes, seed=0, document_mask=False):
        self.dtype = np.dtype(meta['dtype']).newbyteorder('<')
        self.vocab_size = meta['vocab_size']
        self.end_of_text = meta['end_of_text']
        self.seed = seed
        self.document_mask = document_mask
        self.entry = meta['splits'].get(split, {})  # what meta.json says of it
        self.token_bytes = token_bytes
        if self.entry.get('token_bytes'):
            # where the tokenizer drops characters, each token counts for its share of the text as it was
            self.token_bytes = token_bytes * (self.entry['bytes'] / self.entry['token_bytes'])
        self.paths = bin_files(folder, split)
        self.begins = []  # the number of the first id of each shard
        self.n = 0
        for path in self.paths:
            self.begins.append(self.n)
            self.n += len(map_ids(path, self.dtype))
        if self.n != self.entry.get('tokens', self.n):
            raise InputError(f"{folder} has {self.n} tokens in {split}, not the {self.entry['tokens']} that "
                             "it was made with. run prepare.py for it again with --overwrite")
        # each is mapped once; a process may have about a thousand open files
        self.shard = functools.lru_cache(maxsize=256)(lambda i: map_ids(self.paths[i], self.dtype))
        self.fingerprint = {'tokens': self.n, 'sha256': checksum(self.entry)}

    def read(self, starts, length):
        """The `length` ids from each of `starts` on, (len(starts), length) int64; behind the last one follows
        the first. ValueError for ids that the vocabulary does not have."""
        ids = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(ids, starts):
            at = int(start)
            filled = 0
            while filled < length:
                i = bisect.bisect_right(self.begins, at) - 1
                offset = at - self.begins[i]
                part = self.shard(i)[offset:offset + length - filled]
                assert len(part), f'{self.paths[i]} became shorter while it was read'
                row[filled:filled + len(part)] = part
                filled += len(part)
                at = (at + len(part)) % self.n
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(wrong):
            raise InputError(f"{self.paths[0]} has the token id {wrong[0]}, but its vocabulary has "
                             f"{self.vocab_size} ids. it was made with another tokenizer or dtype than its "
                             "meta file says (no file: GPT-2's, uint16): run prepare.py for it again with "
                             "--overwrite")
        return ids

    def batch(self, seed, numbers, block_size):
        """The training samples `numbers`: x, y, each (len(numbers), block_size) int64, and the number of each
        id's document where attention stays inside one, else None."""
        starts = sample_starts(seed, numbers, self.n, block_size)
        return self.with_targets(self.read(starts, block_size + 1))

    def eval_batch(self, starts, block_size):
        """The same for the windows that begin at `starts`, an array; y is -1 behind the end of the split."""
        x, y, doc_ids = self.with_targets(self.read(starts, block_size + 1))
        places = starts[:, None] + np.arange(1, block_size + 1)  # of the targets, (len(starts), block_size)
        return x, np.where(places < self.n, y, -1), doc_ids

    def with_targets(self, ids):
        x = ids[:, :-1]
        y = ids[:, 1:]  # the target is the next token
        doc_ids = (x == self.end_of_text).cumsum(axis=1) if self.document_mask else None
        return x, y, doc_ids

    def n_targets(self, block_size):
        """The positions of an epoch, over which windows() goes."""
        return self.n - 1

    def summary(self, block_size):
        shards = f" in {len(self.paths)} shards" if len(self.paths) > 1 else ''
        return f"{self.n:,} tokens{shards}"

    def check(self):
        """ValueError for what is wrong with the first ids or with 64 places, and so with all batches."""
        path = self.paths[0]
        first = self.shard(0)[:65536]
        if int.from_bytes(first.tobytes()[:4], 'little') in (20240520, 20240801):
            raise InputError(f"{path} begins with llm.c's header of 1,024 bytes, which is no text. cut it "
                             f"off: tail -c +1025 {path} > ids.bin && mv ids.bin {path}")
        if len(first) >= 64 and not first[1::2].any() and len(np.unique(first)) > 4:
            width = 2 * first.itemsize if first[2::4].any() else 8
            raise InputError(f"{path} was written as int{8 * width} and is read as {first.dtype}, so every "
                             f"second id is 0. write it again: ids = np.fromfile('{path}', 'i{width}'); "
                             f"ids.astype('{first.dtype}').tofile('{path}')")
        places = np.linspace(0, self.n - 1, 64).astype(np.int64)
        self.read(places, min(self.n, 1024))


def windows(n_targets, block_size, most=None):
    """Where windows begin that lie side by side over a text of n_targets targets (its ids from the second one
    on): at most so many of them, evenly spread."""
    n = max(1, math.ceil(n_targets / block_size))
    count = min(n, most or n)
    return np.arange(count) * n // count * block_size


# -----------------------------------------------------------------------------
# which sample comes when

# the second argument of hash64() and hash_seed(), which keeps streams of numbers apart
OFFSETS = 1
ORDER = 2
DROPOUT = 3
SAMPLES = 4

ALL_BITS = 2**64 - 1


def hash64(*numbers):
    """Mix whole numbers, or uint64 arrays of them, into 64 random-looking bits each (splitmix64's
    finalizer)."""
    x = 0
    for number in numbers:
        x = (x + number + 0x9e3779b97f4a7c15) & ALL_BITS
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9 & ALL_BITS
        x = (x ^ (x >> 27)) * 0x94d049bb133111eb & ALL_BITS
        x = x ^ (x >> 31)
    return x


def hash_seed(*numbers):
    """A seed for torch.manual_seed() that follows from whole numbers."""
    return hash64(*numbers) >> 1


def permute(numbers, n, keys):
    """Where the permutations of range(n) chosen by `keys` send `numbers` (both uint64 arrays). They are
    computed, not stored, so it costs the same for ten billion blocks: a Feistel network on the next power of
    two, repeated until the result is below n."""
    bits = max(2, (n - 1).bit_length())
    low_bits = bits // 2
    low_mask = 2**low_bits - 1
    high_mask = 2**(bits - low_bits) - 1

    def once(x, keys):
        low = x & low_mask
        high = x >> low_bits
        for i in range(4):  # each half is changed by a hash of the other: invertible, whatever the hash
            high = high ^ (hash64(keys, 2 * i, low) & high_mask)
            low = low ^ (hash64(keys, 2 * i + 1, high) & low_mask)
        return (high << low_bits) | low

    x = once(numbers, keys)
    outside = x >= n
    while outside.any():
        x[outside] = once(x[outside], keys[outside])
        outside = x >= n
    return x


def shuffled(seed, numbers, n):
    """The epochs of the samples `numbers` (a uint64 array), and their places in range(n), of which an epoch
    takes all, in a fresh order."""
    epochs = numbers // n
    return epochs, permute(numbers % n, n, hash64(seed, ORDER, epochs))


CHUNK = 4096  # samples at once: faster than singly


@functools.lru_cache(maxsize=4)
def chunk_of_starts(seed, chunk, n_tokens, block_size):
    """Where the samples from chunk * CHUNK on start, (CHUNK,) uint64."""
    numbers = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=np.uint64)
    epochs, blocks = shuffled(seed, numbers, n_tokens // block_size)
    offsets = hash64(seed, OFFSETS, epochs) % block_size
    return (offsets + blocks * block_size) % n_tokens


def sample_starts(seed, numbers, n_tokens, block_size):
    """Where the training samples `numbers` start, a list. An epoch takes the data as a ring, cut into blocks
    from a fresh offset on, in a fresh order: each token is the target at most once per epoch."""
    starts = []
    for number in numbers:
        chunk, place = divmod(number, CHUNK)
        starts.append(int(chunk_of_starts(seed, chunk, n_tokens, block_size)[place]))
    return starts


# -----------------------------------------------------------------------------
# the way to the device


class Loader:
    """next() is the next micro-batch: what get_batch(it, micro_step) returns, from start_iter on, its arrays
    as tensors on the device. A thread reads them: for a GPU two ahead, and they are copied from pinned memory
    without waiting; for a CPU the one that is asked for. `waited`: seconds in next()."""

    def __init__(self, get_batch, start_iter, grad_accum_steps, device):
        self.get_batch = get_batch
        self.grad_accum_steps = grad_accum_steps
        self.device = device
        self.is_cuda = device.startswith('cuda')
        self.number = start_iter * grad_accum_steps  # of the next micro-batch to read
        self.waited = 0.0
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.jobs = collections.deque()

    def __next__(self):
        t0 = time.perf_counter()
        n_ahead = 2 if self.is_cuda else 0
        while len(self.jobs) <= n_ahead:
            it, micro_step = divmod(self.number, self.grad_accum_steps)
            self.jobs.append(self.thread.submit(self.get_batch, it, micro_step))
            self.number += 1
        batch = self.jobs.popleft().result()
        self.waited += time.perf_counter() - t0
        on_device = []
        for item in batch:
            if isinstance(item, np.ndarray):
                item = torch.from_numpy(np.ascontiguousarray(item))
                if self.is_cuda:
                    item = item.pin_memory()
                item = item.to(self.device, non_blocking=self.is_cuda)
            on_device.append(item)
        return on_device

    def close(self):
        """Let the thread end; what it has read is dropped."""
        self.thread.shutdown(cancel_futures=True)


# -----------------------------------------------------------------------------
# the folder


def folder_of(name, data_dir=None):
    """The folder of the dataset `name`; ends with status 2 if that is no name."""
    data_dir = data_dir or DATA_DIR
    if name != os.path.basename(name) or name in ('', '.', '..'):
        raise InputError(f"dataset is a folder's name ({name!r}). give it alone; --data_dir=PATH replaces {data_dir}")
    return os.path.join(data_dir, name)


def bin_files(folder, split):
    """The files with a split's token ids, in order: one, or shards, or none. Of .npy shards those that have
    val in their names are the validation split."""
    inside = glob.escape(folder)
    found = glob.glob(f'{inside}/{split}.bin') or glob.glob(f'{inside}/{split}_{"[0-9]" * 6}.bin')
    if not found and not glob.glob(f'{inside}/train*.bin'):
        for path in glob.glob(f'{inside}/*.npy'):
            is_val = 'val' in os.path.basename(path).lower()
            if is_val == (split == 'val'):
                found.append(path)
    return sorted(found)


def map_ids(path, dtype):
    """The token ids in a file, an array on the disk. dtype: of a .bin; a .npy tells its own."""
    try:
        if path.endswith('.npy'):
            ids = np.load(path, mmap_mode='r')
        else:
            ids = np.memmap(path, dtype=dtype, mode='r')
        if ids.ndim != 1 or ids.dtype.kind not in 'ui':
            raise InputError(f"shape {ids.shape}, {ids.dtype}")
    except (ValueError, EOFError) as e:
        raise InputError(f"{path} is no row of token ids ({first_line(e)}). save it again, or run prepare.py "
                         "for it again with --overwrite")
    return np.asarray(ids)


# -----------------------------------------------------------------------------
# what the folder says of itself


def read_meta(folder):
    """The dict in meta.json, where {"vocab_size": 1000} is enough: then the ids are no text. Without it the
    same from nanoGPT's meta.pkl, or, as nanoGPT assumes, GPT-2's tokens. ValueError if it is damaged, or the
    dataset is not finished."""
    work = os.path.join(folder, 'unfinished')  # of prepare.py, where meta.json is the last to be written
    is_moving = os.path.exists(os.path.join(work, 'meta.json'))
    if is_moving or os.path.isdir(work) and not bin_files(folder, 'train'):
        raise InputError(f"{folder} is not finished. run its prepare.py again: it continues where it stopped")
    json_path = os.path.join(folder, 'meta.json')
    pkl_path = os.path.join(folder, 'meta.pkl')
    meta = {'tokenizer': GPT2_STATE, 'vocab_size': 50257, 'end_of_text': 50256}
    try:
        if os.path.exists(json_path):
            with open(json_path, encoding='utf-8-sig') as f:
                meta = json.load(f)
        elif os.path.exists(pkl_path):
            meta = from_meta_pkl(pkl_path)
        vocab_size = int(meta['vocab_size'])
        dtype = 'uint16' if vocab_size <= 65536 else 'uint32'
        defaults = {'tokenizer': {'kind': 'ids', 'n_vocab': vocab_size}, 'end_of_text': None, 'splits': {},
                    'dtype': dtype}
        meta = {**defaults, **meta, 'vocab_size': vocab_size}
        kind = meta['tokenizer']['kind']
        if not 0 < vocab_size <= 2**32 or meta['dtype'] not in ('uint16', 'uint32') or kind not in KINDS:
            raise InputError(f"vocab_size {vocab_size}, dtype {meta['dtype']}, kind of tokenizer {kind}")
        meta['splits'] = {split: dict(entry) for split, entry in meta['splits'].items()}
        return meta
    except Exception as e:  # a file may hold anything
        raise InputError(f"the meta file in {folder} cannot be read ({type(e).__name__}: {first_line(e)}). "
                         "run prepare.py for it again with --overwrite")


def checksum(entry):
    """16 digits of the sha256 in a split's entry of meta.json; of shards, of all of theirs."""
    sums = [str(part.get('sha256', 'unknown')) for part in entry.get('shards', [entry])]
    if len(sums) == 1:
        return sums[0][:16]
    return hashlib.sha256(' '.join(sums).encode()).hexdigest()[:16] + ' of all'


class PlainUnpickler(pickle.Unpickler):
    """Execute nothing: dicts, lists, strings and numbers need no class. A defaultdict may have plain values.
    numpy's classes are refused, as numpy.dtype can be made to read any address of the memory."""

    def find_class(self, module, name):
        plain = {'defaultdict': collections.defaultdict, 'int': int, 'str': str}
        if name not in plain:
            raise pickle.UnpicklingError(f"meta.pkl contains {module}.{name}. write it again with plain "
                                         "values: int(...) and str(...) in place of numpy's")
        return plain[name]


def from_meta_pkl(path):
    """nanoGPT's meta.pkl as a meta.json. Some exception if it is no plain vocabulary."""
    with open(path, 'rb') as f:
        old = PlainUnpickler(f).load()
    meta = {'vocab_size': old['vocab_size']}  # all that nanoGPT's train.py asks for
    itos = old.get('itos') or {}
    chars = ''.join(itos[id] for id in range(len(itos)))  # fewer than vocab_size, if that is padded
    if chars and len(chars) == len(itos):
        meta['tokenizer'] = {'kind': 'char', 'chars': chars}
    return meta
