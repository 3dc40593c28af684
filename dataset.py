"""
What a dataset is: a folder data/<name>/ with the token ids train.bin and val.bin (little-endian, no header)
and meta.json, which tells the tokenizer, the dtype and the counts; see data/README.md. A large split comes in
shards, train_000000.bin and so on, which are one long array to the reader. nanoGPT's folders are read too.

And which sample comes when: a pure function of the seed and the sample's number. So there is no state to
save, and the order depends neither on a resume nor on the number of processes.

Only numpy up to the Loader: prepare.py uses this file as well and seldom needs torch.
"""

import bisect
import collections
import concurrent.futures
import functools
import hashlib
import itertools
import os
import threading
import time

import numpy as np

from configurator import fail
from support.dataset_meta import (bin_files, checksum, damaged, folder_of, missing, read_meta,
                                  read_tokenizer_state)
from support.errors import DataLost
from support.tokenizer import make_tokenizer


class Dataset:
    """The folder data_dir/name: tokenizer_state, vocab_size, the splits train and val (None if there is
    none). document_mask: no document sees another one. vocab_size: the network's, if it may be less than the
    tokenizer's. For conversations see support/conversations.py."""

    def __init__(self, name, data_dir=None, document_mask=False, vocab_size=None):
        self.name, self.folder = name, folder_of(name, data_dir)
        if not bin_files(self.folder, 'train'):
            fail(missing(self.folder))
        self.meta = read_meta(self.folder)
        self.tokenizer_state = read_tokenizer_state(self.folder, self.meta)
        # BPE vocabularies are padded as in nanoGPT (50257 -> 50304); characters and bytes are few enough as
        # they are
        pad = 64 if self.tokenizer_state['kind'] in ('tiktoken', 'hf') else 1
        self.vocab_size = -(-self.meta['vocab_size'] // pad) * pad
        names = [split for split in ('train', 'val') if bin_files(self.folder, split)]
        try:
            self.splits = {split: Tokens(self.folder, split, self.meta, document_mask, vocab_size)
                           for split in names}
        except DataLost as e:
            fail(str(e), everywhere=True)

    @property
    def train(self):
        return self.splits['train']

    @property
    def val(self):
        return self.splits.get('val')

    def tokenizer(self):
        return make_tokenizer(self.tokenizer_state)


class Tokens:
    """The token ids of one split: n of them, read window by window. The files are read, not mapped:
    a mapped file counts as our memory, and kills the process if it is cut short."""

    open_files = 128  # shards kept open at once; a process may have about a thousand files
    sample_flag = ''  # with which sample.py shows what was learned

    def __init__(self, folder, split, meta, document_mask=False, vocab_size=None):
        self.dtype, self.vocab_size = np.dtype(meta['dtype']).newbyteorder('<'), meta['vocab_size']
        self.document_mask, self.end_of_text = document_mask, meta['end_of_text']
        entry = meta['splits'].get(split, {})
        shards = entry.get('shards', [])
        files = [(os.path.join(folder, os.path.basename(s['file'])), s['tokens']) for s in shards]
        files = files or [(path, entry.get('tokens')) for path in bin_files(folder, split)]
        self.path = os.path.join(folder, split + ('.bin' if len(files) == 1 else '_*.bin'))
        self.paths = [path for path, _ in files]
        self.ends = list(itertools.accumulate(self.count_ids(path, tokens) for path, tokens in files))
        self.n = self.size = self.ends[-1]  # size: what a person counts
        self.fingerprint = f"{self.n:,} tokens, sha256 {checksum(entry)}"
        self.open = functools.lru_cache(self.open_files)(lambda i: open(self.paths[i], 'rb', buffering=0))
        self.lock = threading.Lock()  # a file has one position, and the Loader reads beside the evaluation
        # a wrong vocabulary should show before the model is built; each batch is checked as well
        ids = self.windows(np.arange(0, self.n, max(1, self.n // 64))[:64], min(self.n, 65536))
        self.sampled = hashlib.sha256(ids.astype(self.dtype)).hexdigest()[:16]  # tells data that was altered
        self.vocab_size = min(self.vocab_size, vocab_size or self.vocab_size)

    def count_ids(self, path, tokens):
        """The number of ids in a file that should have `tokens` of them (None: unknown)."""
        width = self.dtype.itemsize
        size = os.path.getsize(path) if os.path.exists(path) else -1
        if size <= 0 or size % width or tokens not in (None, size // width):
            fail(damaged(path, size, width, tokens))
        return size // width

    # what training and evaluation ask of a split

    def batch(self, seed, numbers, block_size):
        """The training samples `numbers` as arrays (len(numbers), block_size) of int64: x, y, and where
        attention stays inside a document the number of each id's document."""
        starts = sample_starts(seed, numbers, self.n, block_size)
        return self.with_targets(self.windows(starts, block_size + 1))

    def eval_batch(self, starts, block_size):
        """The same for windows that begin at `starts`; y is -1 behind the end of the text."""
        x, y, *doc_ids = self.with_targets(self.windows(starts, block_size + 1))
        return x, np.where(starts[:, None] + np.arange(1, block_size + 1) < self.n, y, -1), *doc_ids

    def with_targets(self, ids):
        x, y = ids[:, :-1], ids[:, 1:]  # the target is the next token
        return (x, y, (x == self.end_of_text).cumsum(axis=1)) if self.document_mask else (x, y)

    def count_targets(self, seed, numbers, block_size):
        """How many targets of the training samples `numbers` count."""
        return len(numbers) * block_size

    def n_targets(self, block_size):
        """The positions of an epoch, over which evaluate.windows() may go."""
        return self.n - 1

    def summary(self, block_size):
        return f"{self.n:,} tokens"

    def problem(self, block_size):
        """Why no window of block_size can be read, a line; else None."""
        if self.document_mask and self.end_of_text is None:
            return f"document_mask: no token separates the documents of {self.path}. leave it out"
        if self.n <= block_size:  # each id needs a target
            return (f"{self.path} has {self.n:,} tokens, too few for one window. use "
                    f"--block_size={max(1, self.n - 1)} or less, or more text")

    # the files

    def windows(self, starts, length):
        """The `length` ids from each of `starts` on, (len(starts), length) int64; after the last id comes the
        first."""
        out = np.empty((len(starts), length), dtype=self.dtype)
        for row, start in zip(out, starts):
            self.read(row, int(start))
        if out.size and out.max() >= self.vocab_size:
            raise DataLost(f"{self.path} holds the token id {out.max()}, but its vocabulary has only "
                           f"{self.vocab_size} ids. it was made with another tokenizer than its meta file "
                           "says: run prepare.py for this dataset again")
        return out.astype(np.int64)

    def read(self, row, start):
        """Fill the array `row` with the ids from `start` on, across files, and across the end."""
        i = bisect.bisect_right(self.ends, start)
        while len(row):
            first = self.ends[i - 1] if i else 0
            part = row[:self.ends[i] - start]
            try:
                n = self.read_file(part.view(np.uint8), i, (start - first) * self.dtype.itemsize)
            except OSError as e:
                raise DataLost(f"{self.paths[i]} cannot be read ({e.strerror}). make it readable, or run "
                               "prepare.py for this dataset again") from e
            if n != part.nbytes:
                raise DataLost(f"{self.paths[i]} became shorter while it was read. restore it")
            row, start, i = row[len(part):], (start + len(part)) % self.n, (i + 1) % len(self.ends)

    def read_file(self, part, i, position):
        """Fill `part` with the bytes of file i from `position` on; returns how many there were."""
        with self.lock:
            file = self.open(i)
            file.seek(position)
            n = more = file.readinto(part)
            while more and n < part.nbytes:  # network file systems may return less than asked for
                more = file.readinto(part[n:])
                n += more
        return n


# -----------------------------------------------------------------------------
# which sample comes when

# the second argument of hash64 keeps streams of numbers apart
OFFSETS, ORDER, DROPOUT, SAMPLES, NOISE = 1, 2, 3, 4, 5


def hash64(*numbers):
    """Mix whole numbers, or arrays of them, into an array of 64 random-looking bits each (splitmix64's
    finalizer)."""
    x = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        x = x + np.asarray(number, dtype=np.uint64) + np.uint64(0x9e3779b97f4a7c15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xbf58476d1ce4e5b9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94d049bb133111eb)
        x = x ^ (x >> np.uint64(31))
    return x


def hash_seed(*numbers):
    """hash64 as one int, for torch.manual_seed()."""
    return int(hash64(*numbers)[0]) >> 1


def permute(numbers, n, key):
    """Where the permutation of range(n) chosen by `key` sends `numbers` (both uint64 arrays). It is computed,
    not stored, so it costs the same for ten billion blocks: a Feistel network on the next power of two,
    repeated until the result is below n."""
    bits = max(2, int(n - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)

    def once(x, key):
        low, high = x & low_mask, x >> low_bits
        for i in range(4):  # each half is changed by a hash of the other: invertible, whatever the hash
            high = high ^ (hash64(key, 2 * i, low) & high_mask)
            low = low ^ (hash64(key, 2 * i + 1, high) & low_mask)
        return (high << low_bits) | low

    x = once(numbers, key)
    while (outside := x >= n).any():
        x[outside] = once(x[outside], key[outside])
    return x


CHUNK = 4096  # samples at once: faster than singly


@functools.lru_cache(maxsize=4)
def chunk_of_starts(seed, chunk, n_tokens, block_size):
    numbers = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=np.uint64)
    n_blocks = np.uint64(n_tokens // block_size)
    epochs, blocks = numbers // n_blocks, numbers % n_blocks
    offsets = hash64(seed, OFFSETS, epochs) % np.uint64(block_size)
    blocks = permute(blocks, n_blocks, hash64(seed, ORDER, epochs))
    return (offsets + blocks * np.uint64(block_size)) % np.uint64(n_tokens)


def sample_starts(seed, numbers, n_tokens, block_size):
    """Where the training samples `numbers` (ints) start. An epoch takes the data as a ring, cut into blocks
    from a fresh offset on, in a fresh order: each token is the target at most once per epoch."""
    return [int(chunk_of_starts(seed, i // CHUNK, n_tokens, block_size)[i % CHUNK]) for i in numbers]


# -----------------------------------------------------------------------------
# the way to the device


class Prefetch:
    """next() of it is that of an iterator, of whose items a thread makes some ahead."""

    def __init__(self, items):
        self.items, self.pool = items, concurrent.futures.ThreadPoolExecutor(1)
        self.jobs = collections.deque(self.pool.submit(next, items) for _ in range(2))

    def __next__(self):
        self.jobs.append(self.pool.submit(next, self.items))
        return self.jobs.popleft().result()

    def close(self):
        """Let the thread end; what it has made is dropped."""
        self.pool.shutdown(cancel_futures=True)


class Loader:
    """Iterates over the micro-batches get_batch(it, micro_step) from start_iter on, tuples of tensors such as
    x and y (batch_size, block_size), on the device. On a GPU they are read ahead by a thread and copied from
    pinned memory, beside the computation; on a CPU a thread would only take a core."""

    def __init__(self, get_batch, start_iter, grad_accum_steps, device):
        self.device, self.on_gpu = device, device.type == 'cuda'
        self.waited = 0.0  # seconds in next()

        def make(n):
            batch = (tensor.contiguous() for tensor in get_batch(*divmod(n, grad_accum_steps)))
            return [tensor.pin_memory() if self.on_gpu else tensor for tensor in batch]

        self.batches = map(make, itertools.count(start_iter * grad_accum_steps))
        if device.type != 'cpu':
            self.batches = Prefetch(self.batches)

    def __iter__(self):
        return self

    def __next__(self):
        t0 = time.perf_counter()
        batch = next(self.batches)
        self.waited += time.perf_counter() - t0
        # elsewhere it has to wait: on MPS the source could be gone before it is read
        return [tensor.to(self.device, non_blocking=self.on_gpu) for tensor in batch]

    def close(self):
        if hasattr(self.batches, 'close'):
            self.batches.close()
