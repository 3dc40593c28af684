"""
Datasets: read a dataset folder, and compute the order of the samples.

A dataset is a folder data/<name>/ with token ids in train.bin and val.bin (little-endian, no header), and
meta.json, which describes the tokenizer, the dtype and the counts. Without this code, they are read by

    meta = json.load(open('data/NAME/meta.json'))
    ids = np.memmap('data/NAME/train.bin', dtype=meta['dtype'], mode='r')

A large split is stored in shards, train_000000.bin and so on, which are read as one long array. nanoGPT's
folders and .npy shards can be used unchanged. data/README.md describes all files.

Training sample i is a pure function of the seed and i. So the order has no state to save, and it does not
depend on a resume or the number of processes.
"""

import bisect
import functools
import glob
import hashlib
import io
import json
import math
import os
import pickle
import pickletools
import re
import shlex

import numpy as np

from configurator import InputError
from flatgpt.files import first_line
from flatgpt.tokenizer import GPT2_STATE, check_vocab_size, make_tokenizer, read_tokenizer_files, token_bytes


DATA_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'data')
MAKE_AGAIN = "Run its prepare.py command again with --overwrite."


class Dataset:
    """
    A dataset folder, data_dir/name. By default, data_dir is data/ next to train.py.

    block_size: if given, each split must have at least one sequence of this length
    seed: for the order in which conversations are packed
    document_mask: tokens attend only to tokens of the same document

    Attributes:
    splits: {'train': ..., 'val': ...}, each Tokens or Conversations; also .train and .val (None if missing)
    meta: see read_meta
    vocab_size: the vocabulary size of a model for this dataset
    tokenizer, tokenizer_state
    fingerprint: plain values that identify the data: name, numbers of tokens, checksums
    """

    def __init__(self, name, data_dir=None, block_size=None, seed=0, document_mask=False):
        self.name = name
        self.folder = folder_of(name, data_dir)
        self.meta = read_meta(self.folder)
        if not bin_files(self.folder, 'train'):
            command = f"python prepare.py {shlex.quote(name)}"
            raise InputError(f"no dataset in {self.folder}. Make it: {command}, or from your own text: "
                             f"{command} --input=FILE_OR_FOLDER.")
        if block_size and document_mask and self.meta['end_of_text'] is None:
            raise InputError(f"document_mask does not work with dataset {name}: no token separates its "
                             "documents. Train without --document_mask.")
        self.tokenizer_state = read_tokenizer_files(self.folder, self.meta)
        self.vocab_size = padded_vocab_size(self.meta['vocab_size'], self.tokenizer_state)
        kind = Tokens
        if 'chat' in self.meta:
            from flatgpt.conversations import Conversations
            kind = Conversations
        self.splits = {}
        self.fingerprint = {'name': name}
        bytes_per_id = token_bytes(self.tokenizer_state, self.meta['vocab_size'])
        for split in ('train', 'val'):
            if not bin_files(self.folder, split):
                continue
            tokens = kind(self.folder, split, self.meta, bytes_per_id, seed, document_mask)
            tokens.check()
            if block_size and tokens.tokens_per_epoch(block_size) < block_size:
                raise InputError(f"the {split} split of dataset {name} is too short for a sequence of "
                                 f"{block_size} tokens with targets: {tokens.n:,} tokens. Use a smaller "
                                 "--block_size, or more text.")
            self.splits[split] = tokens
            self.fingerprint[split] = tokens.fingerprint
        self.train = self.splits['train']
        self.val = self.splits.get('val')

    @functools.cached_property
    def tokenizer(self):
        """The tokenizer, made on first use: training on nanoGPT's folders does not need tiktoken."""
        return make_tokenizer(self.tokenizer_state)

    def n_eval_sequences(self, block_size):
        """Return the number of sequences that cover the validation split, or train if there is none."""
        split = self.val or self.train
        return len(split.eval_starts(block_size))


# -----------------------------------------------------------------------------
# the folder


def folder_of(name, data_dir=None):
    """Return the folder of the dataset `name`. Raise InputError if the name is a path."""
    data_dir = data_dir or DATA_DIR
    if name != os.path.basename(name) or name in ('', '.', '..'):
        raise InputError(f"a dataset must be the name of a folder in {data_dir}, not a path: {name!r}. For a "
                         "folder elsewhere, add --data_dir=PATH.")
    return os.path.join(data_dir, name)


# a .npy file belongs to the validation split if its name has this word. 'medieval_000.npy' does not have it
VAL_WORD = re.compile(r'(?<![^\W\d_])val(id|idation)?(?![^\W\d_])')


def bin_files(folder, split):
    """
    Return the files with the token ids of a split, in order: one file, shards, or [] if there are none.

    If there are no .bin files, .npy files are used; VAL_WORD in their names tells the splits apart.
    """
    folder = glob.escape(folder)
    shard_name = split + '_' + '[0-9]' * 6 + '.bin'
    paths = glob.glob(f'{folder}/{split}.bin') or glob.glob(f'{folder}/{shard_name}')
    if not paths and not glob.glob(f'{folder}/train*.bin'):
        for path in glob.glob(f'{folder}/*.npy'):
            is_val = VAL_WORD.search(os.path.basename(path).lower()) is not None
            if is_val == (split == 'val'):
                paths.append(path)
    return sorted(paths)


def map_ids(path, dtype):
    """Return the token ids in a file as a memory-mapped array. A .npy file states its own dtype."""
    try:
        if path.endswith('.npy'):
            ids = np.load(path, mmap_mode='r')
        else:
            ids = np.memmap(path, dtype=dtype, mode='r')
        if ids.ndim != 1 or len(ids) == 0 or ids.dtype.kind not in 'ui':
            raise ValueError(f"shape {ids.shape}, dtype {ids.dtype}")
    except Exception as e:  # the file may contain anything
        raise InputError(f"{path} does not contain token ids: {first_line(e)}. {MAKE_AGAIN}") from e
    return np.asarray(ids)  # the same memory; slicing an np.memmap object is slower


def read_meta(folder):
    """
    Return the dict in meta.json, with defaults for missing keys. Only "vocab_size" is required.

    If there is no meta.json, nanoGPT's meta.pkl is read. If that is missing too, the tokens are GPT-2's, as
    in nanoGPT.
    """
    json_path = os.path.join(folder, 'meta.json')
    pkl_path = os.path.join(folder, 'meta.pkl')
    # prepare.py writes plan.json first and meta.json last
    if os.path.exists(os.path.join(folder, 'plan.json')) and not os.path.exists(json_path):
        raise InputError(f"the dataset in {folder} is not finished. Run the same prepare.py command again: "
                         "it resumes.")
    try:
        if os.path.exists(json_path):
            with open(json_path, encoding='utf-8-sig') as f:
                meta = json.load(f)
        elif os.path.exists(pkl_path):
            meta = read_meta_pkl(pkl_path)
        else:
            meta = {'tokenizer': GPT2_STATE, 'vocab_size': 50257, 'end_of_text': 50256}
        vocab_size = int(meta['vocab_size'])
        meta = {
            'tokenizer': {'kind': 'ids', 'n_vocab': vocab_size},  # if none is named, the ids are not text
            'end_of_text': None,
            'dtype': 'uint16' if vocab_size <= 65536 else 'uint32',
            **meta,
            'vocab_size': vocab_size,
            'splits': {split: dict(entry) for split, entry in meta.get('splits', {}).items()},
        }
        check_vocab_size(vocab_size)
        if meta['dtype'] not in ('uint16', 'uint32') or 'kind' not in meta['tokenizer']:
            raise ValueError(f"dtype {meta['dtype']!r}, tokenizer {meta['tokenizer']!r}")
    except Exception as e:  # the file may contain anything
        raise InputError(f"the meta file in {folder} is not valid ({type(e).__name__}: {first_line(e)}). "
                         f"{MAKE_AGAIN}") from e
    return meta


class PlainUnpickler(pickle.Unpickler):
    """An unpickler for dicts, lists, strings and numbers only, so that a file cannot execute code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module!r}.{name!r} is not a plain type; convert it with int() or "
                                     "str()")


def check_pickle(data):
    """Raise UnpicklingError if reading `data` could crash Python, or take much more memory than its size."""
    n_tuples = 0
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name.startswith('TUPLE'):
            n_tuples += 1
        if n_tuples > 20:  # if they are nested, Python's hash() of the outermost recurses without a limit
            raise pickle.UnpicklingError("more than 20 tuples; convert them to lists")
        # a place in the table of objects, which is allocated up to there
        if opcode.name.endswith('PUT') and argument > len(data):
            raise pickle.UnpicklingError("not written by Python's pickle")


def read_meta_pkl(path):
    """Return the content of nanoGPT's meta.pkl in the form of meta.json."""
    with open(path, 'rb') as f:
        data = f.read()
    check_pickle(data)
    content = PlainUnpickler(io.BytesIO(data)).load()
    meta = {'vocab_size': content['vocab_size']}
    itos = content.get('itos') or {}
    chars = ''.join(itos[id] for id in range(len(itos)))  # fewer than vocab_size if that is padded
    if chars and len(chars) == len(itos):
        meta['tokenizer'] = {'kind': 'char', 'chars': chars}
    return meta


def padded_vocab_size(vocab_size, tokenizer_state):
    """Return the vocabulary size of a model. For a BPE it is padded to a multiple of 64, which is faster, as
    in nanoGPT (50257 -> 50304)."""
    if tokenizer_state['kind'] in ('tiktoken', 'hf'):
        return math.ceil(vocab_size / 64) * 64
    return vocab_size


# -----------------------------------------------------------------------------
# a split


class Tokens:
    """
    The token ids of a split, in one file or in shards.

    n: number of tokens
    token_bytes: bytes of text per token id, (vocab_size,); 0 for special tokens, all 0 if unknown
    entry: what meta.json contains about this split; {} if nothing
    fingerprint: {'tokens': n, 'sha256': of the checksums in meta.json, 'sample': of ids that were read now}
    """
    masked = False  # whether targets are masked, as in conversations

    def __init__(self, folder, split, meta, token_bytes=0, seed=0, document_mask=False):
        self.folder = folder
        self.dtype = np.dtype(meta['dtype']).newbyteorder('<')
        self.vocab_size = meta['vocab_size']
        self.end_of_text = meta['end_of_text']
        self.seed = seed
        self.document_mask = document_mask
        self.entry = meta['splits'].get(split, {})
        self.token_bytes = token_bytes
        if self.entry.get('token_bytes'):
            # entry['bytes'] is the size of the text, entry['token_bytes'] that of all its tokens, which is
            # smaller if the tokenizer drops characters. Scale, so that bits per byte are per byte of the text
            self.token_bytes = token_bytes * (self.entry['bytes'] / self.entry['token_bytes'])
        self.paths = bin_files(folder, split)
        self.shard_starts = []  # the position of the first token of each shard
        self.n = 0
        for path in self.paths:
            self.shard_starts.append(self.n)
            self.n += len(map_ids(path, self.dtype))
        shards = self.entry.get('shards', [self.entry])  # without shards, the entry describes the only file
        checksums = [str(shard.get('sha256', 'unknown')) for shard in shards]
        self.first_sha256 = checksums[0]  # of the first file, according to meta.json
        sha256 = checksums[0][:16]
        if len(checksums) > 1:  # the checksum of all checksums
            sha256 = hashlib.sha256(' '.join(checksums).encode()).hexdigest()[:16] + ' of all'
        sample = hashlib.sha256(self.sample().astype('<u4').tobytes()).hexdigest()[:16]
        self.fingerprint = {'tokens': self.n, 'sha256': sha256, 'sample': sample}

    def sample(self):
        """Return the first and the last 512 ids, and those at 64 positions in between, (66, 512)."""
        length = min(self.n, 512)
        starts = np.arange(66) * (self.n - length) // 65
        return self.copy_ids(starts, length)

    def is_described(self):
        """Return whether the data is that which meta.json describes, as far as a quick look can tell."""
        if self.n != self.entry.get('tokens', self.n):
            return False
        if 'sample' in self.entry:
            return self.fingerprint['sample'] == self.entry['sample']
        # An older meta.json. A copy has arbitrary times, so they only decide whether the file is read
        path = self.paths[0]
        meta_path = os.path.join(self.folder, 'meta.json')
        if self.first_sha256 == 'unknown' or os.path.getmtime(path) <= os.path.getmtime(meta_path):
            return True
        with open(path, 'rb') as f:
            return hashlib.file_digest(f, 'sha256').hexdigest() == self.first_sha256

    def check(self):
        """Raise InputError if the data is not that which meta.json describes, or the first ids or those of
        the sample are not valid."""
        if not self.is_described():
            raise InputError(f"{self.paths[0]} ({self.n:,} tokens in all) is not the data that "
                             f"{os.path.join(self.folder, 'meta.json')} describes. If another program wrote "
                             "the data, delete meta.json, which is that of an older dataset. Otherwise, run "
                             "its prepare.py command again with --overwrite.")
        first = self.shard(0)[:65536]
        if len(first) >= 64 and not first[1::2].any() and len(np.unique(first)) > 4:
            # 0 is a valid id, so without this check a model would be trained on wrong data
            raise InputError(f"every second token id in {self.paths[0]} is 0: it was written as a wider type "
                             f"than {first.dtype}, such as int32 or int64. Convert it, for example: "
                             f"np.fromfile(PATH, np.int32).astype(np.{first.dtype}).tofile(PATH).")
        self.check_ids(self.sample())

    @functools.lru_cache(maxsize=256)  # a process may have about 1,000 open files
    def shard(self, i):
        """Return the ids of shard i, memory-mapped."""
        return map_ids(self.paths[i], self.dtype)

    def read(self, starts, length):
        """
        Return `length` ids from each position in `starts`, (len(starts), length) int64.

        Reads wrap around at the end of the data. Raise InputError if an id is not in the vocabulary.
        """
        rows = self.copy_ids(starts, length)
        self.check_ids(rows)
        return rows

    def copy_ids(self, starts, length):
        """Do the same as read(), without the check of the ids."""
        rows = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(rows, starts):
            n_read = 0
            while n_read < length:  # one shard at a time
                position = (start + n_read) % self.n
                i = bisect.bisect_right(self.shard_starts, position) - 1
                offset = position - self.shard_starts[i]
                ids = self.shard(i)[offset:offset + length - n_read]
                assert len(ids), f"{self.paths[i]} became shorter while it was read"
                row[n_read:n_read + len(ids)] = ids
                n_read += len(ids)
        return rows

    def check_ids(self, ids):
        """Raise InputError if one of `ids`, an array, is not in the vocabulary."""
        for id in (ids.min(), ids.max()):
            if not 0 <= id < self.vocab_size:
                raise InputError(f"the token id {id} in {self.folder} is not in its vocabulary of "
                                 f"{self.vocab_size} ids: the tokenizer or dtype is not the one in the meta "
                                 f"file (without one: GPT-2's, uint16). {MAKE_AGAIN}")

    def read_sequences(self, starts, block_size):
        """
        Return x, y and doc_ids, each (len(starts), block_size) int64.

        doc_ids: the index of each token's document within its sequence; None without document_mask
        """
        ids = self.read(starts, block_size + 1)
        x = ids[:, :-1]
        y = ids[:, 1:]  # the target is the next token
        doc_ids = None
        if self.document_mask:
            doc_ids = (x == self.end_of_text).cumsum(axis=1)  # <|endoftext|> begins a document
        return x, y, doc_ids

    def batch(self, seed, indices, block_size):
        """Return the training samples `indices`: x, y and document ids, as in read_sequences."""
        starts = sample_starts(seed, indices, self.n, block_size)
        return self.read_sequences(starts, block_size)

    def eval_batch(self, starts, block_size):
        """Return the sequences at `starts`, from eval_starts(). y is -1 after the end of the split, where
        reads wrap around."""
        x, y, doc_ids = self.read_sequences(starts, block_size)
        target_positions = starts[:, None] + np.arange(1, block_size + 1)  # (len(starts), block_size)
        return x, np.where(target_positions < self.n, y, -1), doc_ids

    def eval_starts(self, block_size, n_sequences=None):
        """Return the start positions of an evaluation's sequences, an array. Consecutive sequences cover the
        split; if n_sequences is given, at most that many of them are used, evenly spread."""
        n_all = max(1, math.ceil(self.tokens_per_epoch(block_size) / block_size))
        n = min(n_all, n_sequences or n_all)
        chosen = np.arange(n) * n_all // n  # n of range(n_all), evenly spread
        return chosen * block_size

    def tokens_per_epoch(self, block_size):
        """Return the number of targets in an epoch, including masked ones."""
        return self.n - 1

    def summary(self, block_size):
        shards = f" in {len(self.paths)} shards" if len(self.paths) > 1 else ''
        return f"{self.n:,} tokens{shards}"


# -----------------------------------------------------------------------------
# the order of the samples

# one of these follows the seed in a call of hash64(), so that each purpose gets other random numbers
OFFSETS = 1  # the start of the first block of an epoch
ORDER = 2  # the order of blocks in an epoch, and of conversations
MICRO_BATCH = 3  # dropout, and whatever else is drawn for a micro-batch
SAMPLES = 4  # texts that are generated during training
UPDATE = 5  # what an optimizer, or an edit of the gradients, draws

ALL_BITS = 2**64 - 1


def hash64(*numbers):
    """Hash integers, or uint64 arrays of them, to 64 random-looking bits (splitmix64's finalizer)."""
    x = 0
    for number in numbers:
        x = (x + number + 0x9e3779b97f4a7c15) & ALL_BITS
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9 & ALL_BITS
        x = (x ^ (x >> 27)) * 0x94d049bb133111eb & ALL_BITS
        x = x ^ (x >> 31)
    return x


def hash_seed(*numbers):
    """Return a seed for torch.manual_seed() that is a function of integers. It fits in an int64."""
    return hash64(*numbers) >> 1


def feistel(x, bits, keys):
    """Apply a permutation of range(2**bits) to each element of x. Each half of the bits is XORed with a hash
    of the other half, which is invertible for any hash."""
    low_bits = bits // 2
    low_mask = 2**low_bits - 1
    high_mask = 2**(bits - low_bits) - 1
    low = x & low_mask
    high = x >> low_bits
    for i in range(4):
        high = high ^ (hash64(keys, 2 * i, low) & high_mask)
        low = low ^ (hash64(keys, 2 * i + 1, high) & low_mask)
    return (high << low_bits) | low


def permute(x, n, keys):
    """
    Apply a pseudorandom permutation of range(n) to each element of x, a uint64 array.

    It is a Feistel network with cycle walking: the network permutes range(2**bits), and is applied again
    while the result is not below n. No table is stored.
    keys: array of the same shape as x; an element's key selects its permutation
    """
    bits = max(2, (n - 1).bit_length())
    x = feistel(x, bits, keys)
    outside = x >= n
    while outside.any():
        x[outside] = feistel(x[outside], bits, keys[outside])
        outside = x >= n
    return x


def shuffled(seed, indices, n):
    """Return two arrays for the samples `indices` (uint64): their epochs, and the elements of range(n) that
    they use. An epoch contains each element once; each epoch has a different order."""
    epochs = indices // n
    return epochs, permute(indices % n, n, hash64(seed, ORDER, epochs))


CHUNK = 4096  # number of starts computed at once: numpy is slow on small arrays


@functools.lru_cache(maxsize=4)
def chunk_of_starts(seed, chunk, n_tokens, block_size):
    """Return the start positions of CHUNK samples, from sample chunk * CHUNK, (CHUNK,) uint64."""
    indices = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=np.uint64)
    epochs, blocks = shuffled(seed, indices, n_tokens // block_size)
    offsets = hash64(seed, OFFSETS, epochs) % block_size
    return (offsets + blocks * block_size) % n_tokens


def sample_starts(seed, indices, n_tokens, block_size):
    """
    Return the start positions of the training samples `indices`, a list.

    In each epoch, the data is treated as a ring, which is cut into blocks from a random offset. The blocks
    are read in random order. So each token is a target at most once per epoch.
    """
    starts = []
    for index in indices:
        chunk, i = divmod(index, CHUNK)
        starts.append(int(chunk_of_starts(seed, chunk, n_tokens, block_size)[i]))
    return starts
