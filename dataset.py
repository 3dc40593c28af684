"""
What a dataset is: a folder data/<name>/ with the token ids train.bin and val.bin (little-endian, no header) and
meta.json, which tells the tokenizer, the dtype and the counts. A large split comes in shards, train_000000.bin and so on, one
long array to who reads it. nanoGPT's folders, with meta.pkl or without, are read too.

    meta.json: {"tokenizer": {"kind": "char", "chars": "..."} or {"kind": "byte"} or {"kind": "tiktoken", "name", "pat_str",
                "special_tokens"} (its merges beside it, in tokenizer.tiktoken) or {"kind": "hf", "name"} (tokenizer.json and
                tokenizer_config.json beside it), "vocab_size", "end_of_text": id or null, "dtype",
                "splits": {"train": {"tokens", "bytes", "documents", "sha256" or, of shards, "shards": [{"file", "tokens",
                "sha256"}, ...]}, ...}, "source", "command"}

Only numpy here: prepare.py uses this file too and, for most tokenizers, need not wait for torch.
"""

import base64
import bisect
import errno
import functools
import glob
import hashlib
import importlib.util
import itertools
import json
import os
import pickle
import queue
import re
import tempfile
import threading
import time

import numpy as np

from configurator import fail

END_OF_TEXT = '<|endoftext|>'
DATA_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data')
KNOWN = ('pystdlib', 'shakespeare_char', 'shakespeare', 'openwebtext', 'fineweb', 'fineweb_edu', 'tinystories')  # what prepare.py makes by name

# -----------------------------------------------------------------------------
# tokenizers. Each has n_vocab, end_of_text (an id or None), encode(text) -> ids, encode_prompt(text), which also knows
# <|endoftext|>, decode(ids) -> text, byte_lengths() -> bytes of text per id, state(), all of it in plain types, stop_ids, any
# of which ends a text (or None), and cut: where a text may be cut without changing its ids, 'anywhere', between 'words' (a letter and a space), or 'nowhere'


class ByteTokenizer:
    """The UTF-8 bytes of the text; id 256 stands before each document."""
    n_vocab, end_of_text, stop_ids, cut = 257, 256, [256], 'anywhere'

    def encode(self, text):
        return np.frombuffer(text.encode('utf-8', 'replace'), dtype=np.uint8)

    def encode_prompt(self, text):
        parts = [self.encode(part).tolist() for part in text.split(END_OF_TEXT)]
        return sum(([self.end_of_text] + part for part in parts[1:]), parts[0])

    def decode(self, ids):
        return b''.join(bytes([i]) if i < 256 else END_OF_TEXT.encode() for i in ids).decode('utf-8', 'replace')

    def byte_lengths(self):
        return np.array([1] * 256 + [0])

    def state(self):
        return {'kind': 'byte'}


class CharTokenizer:
    """One id per character that occurs in the text, in sorted order, as nanoGPT's shakespeare_char."""
    end_of_text, stop_ids, cut = None, None, 'anywhere'

    def __init__(self, chars):
        self.chars, self.n_vocab = list(chars), len(chars)
        self.table = np.full(0x110000, -1, dtype=np.int32)  # code point -> id
        self.table[[ord(c) for c in self.chars if len(c) == 1]] = [i for i, c in enumerate(self.chars) if len(c) == 1]

    def encode(self, text):
        ids = self.table[np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype=np.uint32)]
        if (ids < 0).any():
            unknown = text[int(np.argmax(ids < 0))]
            raise ValueError(f"character {unknown!r} is not in the vocabulary of {self.n_vocab} characters")
        return ids

    def encode_prompt(self, text):
        return self.encode(text).tolist()

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids)

    def byte_lengths(self):
        return np.array([len(c.encode('utf-8', 'surrogatepass')) for c in self.chars])

    def state(self):
        return {'kind': 'char', 'chars': ''.join(self.chars) if all(len(c) == 1 for c in self.chars) else self.chars}


class TiktokenTokenizer:
    """GPT-2's BPE and the other tiktoken encodings."""
    cut = 'words'

    def __init__(self, encoding):
        self.encoding, self.n_vocab = encoding, encoding.n_vocab
        self.end_of_text = encoding._special_tokens.get(END_OF_TEXT)
        self.stop_ids = None if self.end_of_text is None else [self.end_of_text]

    def encode(self, text):
        # nothing is special in a corpus: text that merely contains <|endoftext|> is text
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_prompt(self, text):
        return self.encoding.encode(text, allowed_special={END_OF_TEXT}, disallowed_special=())

    def decode(self, ids):
        try:
            return self.encoding.decode(ids)
        except KeyError:  # o200k_base and others have gaps, ids without a meaning, which a model may still produce
            known = {*self.encoding._mergeable_ranks.values(), *self.encoding._special_tokens.values()}
            return self.encoding.decode([i for i in ids if i in known])

    def byte_lengths(self):
        lengths = np.zeros(self.n_vocab, dtype=np.int64)
        for token, rank in self.encoding._mergeable_ranks.items():
            lengths[rank] = len(token)
        return lengths

    def state(self):
        e = self.encoding
        return {'kind': 'tiktoken', 'name': e.name, 'pat_str': e._pat_str, 'special_tokens': dict(e._special_tokens),
                'ranks': b''.join(base64.b64encode(token) + b' %d\n' % rank for token, rank in e._mergeable_ranks.items())}


PROBE = ("Don't panic: 1234567 items, 3.14 and 50%!\n\n\tdef f(x_1):\n        return  x**2  # caf\u00e9 na\u00efve \u00dcber\n"
         "\u6771\u4eac \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f600 'tis WE'LL they've   spaces \r\n end. ")  # a bit of everything


class HFTokenizer:
    """A Hugging Face tokenizer.json, through the `tokenizers` package. Before a document stands its beginning-of-sequence token,
    or, where it has none, its end-of-sequence token."""

    def __init__(self, state):
        try:
            import tokenizers
        except ImportError:
            fail(f"the tokenizer {state['name']} needs a package that is not installed (tokenizers). pip install tokenizers")
        self._state = state
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(state['json'])
        except Exception as e:  # the package raises Exception itself
            fail(f"the tokenizer.json of {state['name']} cannot be read ({str(e)[:120]}). fetch or save it again")
        self.tokenizer.no_truncation(), self.tokenizer.no_padding()
        vocab = self.tokenizer.get_vocab()
        self.n_vocab = max(vocab.values(), default=0) + 1
        config = json.loads(state.get('config') or '{}')

        def id_of(token):
            token = token.get('content') if isinstance(token, dict) else token
            return vocab.get(token) if isinstance(token, str) else None

        bos, eos = (id_of(config.get(key)) if isinstance(config, dict) else None for key in ('bos_token', 'eos_token'))
        self.end_of_text = next((id for id in (bos, eos, id_of(END_OF_TEXT)) if id is not None), None)
        # what its authors ended a text with, and what stands before the next one in our datasets
        self.stop_ids = list(dict.fromkeys(id for id in (eos, self.end_of_text) if id is not None)) or None
        try:  # sentencepiece's vocabularies, for one, put a space before whatever they are given
            pieces = re.split(r'(?<=[^\W\d_])(?=[ \n\r\t])', PROBE)
            self.cut = 'words' if np.array_equal(np.concatenate([self.encode(piece) for piece in pieces]), self.encode(PROBE)) else 'nowhere'
        except ValueError:
            self.cut = 'nowhere'

    def encode(self, text):
        self.tokenizer.encode_special_tokens = True  # nothing is special in a corpus
        try:
            return np.array(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.uint32)
        except Exception as e:  # the package raises Exception itself
            raise ValueError(f"the tokenizer {self._state['name']} cannot encode the text ({e})")

    def encode_prompt(self, text):
        self.tokenizer.encode_special_tokens = False
        try:
            ids = self.tokenizer.encode(text).ids  # with what its authors put first: Llama's <s>
        except Exception as e:
            raise ValueError(f"the tokenizer {self._state['name']} cannot encode it ({e})")
        return ids[1:] if ids[:2] == [self.end_of_text] * 2 else ids

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def byte_lengths(self):
        lengths = np.zeros(self.n_vocab, dtype=np.int64)
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self._state['json']).get('decoder'))
        added = self.tokenizer.get_added_tokens_decoder()
        for token, id in self.tokenizer.get_vocab().items():
            # byte-level vocabularies write a character per byte, sentencepiece's a mark for a space and <0x0A> for odd bytes
            lengths[id] = (0 if id in added and added[id].special else len(token) if byte_level and id not in added else 1 if re.fullmatch('<0x[0-9A-F]{2}>', token) else
                           len(token.replace('\u2581', ' ').encode('utf-8', 'surrogatepass')))
        return lengths

    def state(self):
        return dict(self._state)


KINDS = {'byte': {}, 'char': {'chars': (str, list)}, 'tiktoken': {'name': str}, 'hf': {'name': str}}  # what the state of each has at least


def check_tokenizer_state(state):
    """Raise AssertionError where `state`, which a file brought, is not of a kind that make_tokenizer knows."""
    assert isinstance(state, dict) and isinstance(state.get('kind'), str), 'no kind of tokenizer'
    assert state['kind'] in KINDS, f"unknown kind of tokenizer, {state['kind']!r}"
    for name, kind in KINDS[state['kind']].items():
        assert isinstance(state.get(name), kind), f"{name} of the tokenizer is {state.get(name)!r:.60}"


def byte_letters():
    """A printable character for each byte, as GPT-2's vocabulary writes them: those that are printable themselves, the others
    counted on from 256."""
    printable = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def make_tokenizer(state):
    """The tokenizer that `state` describes: a state() of above, or meta.json's, or {'kind': 'tiktoken', 'name': 'gpt2'}."""
    try:
        return known_tokenizer(state)
    except Exception as e:  # the state may come from anywhere, and each package has errors of its own
        fail(f"the tokenizer {state.get('name', state['kind'])} cannot be made ({type(e).__name__}: {str(e)[:120]}). run prepare.py for its dataset again, "
             "or take another checkpoint")


def known_tokenizer(state):
    if state['kind'] == 'byte':
        return ByteTokenizer()
    if state['kind'] == 'char':
        return CharTokenizer(state['chars'])
    if state['kind'] == 'hf':
        return HFTokenizer(state)
    if state['kind'] != 'tiktoken':
        fail(f"unknown kind of tokenizer ({state['kind']!r}). this flatgpt knows byte, char, tiktoken and hf")
    try:
        import tiktoken
    except ImportError:
        fail(f"the tokenizer {state['name']} needs a package that is not installed (tiktoken). pip install tiktoken")
    if 'ranks' not in state:
        return TiktokenTokenizer(get_encoding(tiktoken, state['name']))
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in state['ranks'].splitlines())}
    return TiktokenTokenizer(tiktoken.Encoding(state['name'], pat_str=state['pat_str'], mergeable_ranks=ranks,
                                               special_tokens=state['special_tokens']))


def empty_prompt(tokenizer):
    """The ids to begin with where a prompt has none: what every document begins with, or a new line."""
    return [tokenizer.end_of_text] if tokenizer.end_of_text is not None else tokenizer.encode_prompt('\n')


GPT2_URLS = ['https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/' + name for name in ('vocab.bpe', 'encoder.json')]


def tiktoken_cache(url):
    """The path where tiktoken keeps what it fetched from `url`."""
    folder = os.environ.get('TIKTOKEN_CACHE_DIR') or os.environ.get('DATA_GYM_CACHE_DIR') or os.path.join(tempfile.gettempdir(), 'data-gym-cache')
    return os.path.join(folder, hashlib.sha1(url.encode()).hexdigest())


def get_encoding(tiktoken, name):
    """tiktoken's own encoding `name`, from its cache or the network; where neither has it, say which file to put where."""
    if name not in tiktoken.list_encoding_names():
        fail(f"no such tokenizer ({name}). char, byte or one of tiktoken's: {', '.join(sorted(tiktoken.list_encoding_names()))}")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as e:  # every error of the requests package is an OSError; a page in place of the file is a ValueError
        url = getattr(getattr(e, 'request', None), 'url', None)
        urls = GPT2_URLS if name == 'gpt2' else [url] if url else []
        where = ' and '.join(f"{url} as {tiktoken_cache(url)}" for url in urls) or 'its files'
        fail(f"tokenizer {name} is neither in tiktoken's cache nor can it be fetched ({type(e).__name__}). on a machine with a "
             f"network, download {where} (TIKTOKEN_CACHE_DIR names another folder), or use --tokenizer=byte")


# -----------------------------------------------------------------------------
# writing into a folder


def write_whole(path, content):
    """Write the bytes `content` to `path`, whole or not at all."""
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    with open(path + '.tmp', 'wb') as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + '.tmp', path)
    sync_folder(os.path.dirname(path) or '.')


def sync_folder(path):
    """Let the names in a folder reach the disk, where the system can do that."""
    if hasattr(os, 'O_DIRECTORY'):
        fd = os.open(path, os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)


def lock(folder, who):
    """Let this process be the only one that writes into `folder`, as long as the file that is returned stays open; another one ends
    with status 2. The system frees it whatever becomes of the process."""
    try:
        import fcntl
    except ImportError:
        print(f"note: this system has no file locks; take care that no second {who} writes into {folder}")
        return None
    file = open(os.path.join(folder, '.lock'), 'a')
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EAGAIN):
            fail(f"another {who} is writing into {folder}. wait for its end, or name another folder")
        print(f"note: {folder} cannot be locked ({e.strerror}); take care that no second {who} writes into it")
    return file


# -----------------------------------------------------------------------------
# reading a folder


class Dataset:
    """The folder data_dir/name: its tokenizer's state, vocab_size, and its splits as Tokens; val is None where there is none."""

    def __init__(self, name, data_dir=None):
        data_dir = data_dir or DATA_DIR
        self.name, self.folder = name, os.path.join(data_dir, name)
        if name != os.path.basename(name) or name in ('', '.', '..'):
            fail(f"dataset is a folder's name ({name!r}). give its name alone, and --data_dir=PATH if it is not in {data_dir}")
        if not bin_files(self.folder, 'train'):
            fail(missing(name, data_dir))
        self.meta = read_meta(self.folder)
        self.tokenizer_state = read_tokenizer_state(self.folder, self.meta)
        # BPE vocabularies are padded as in nanoGPT (50257 -> 50304); characters and bytes are small enough as they are
        pad = 64 if self.tokenizer_state['kind'] in ('tiktoken', 'hf') else 1
        self.vocab_size = -(-self.meta['vocab_size'] // pad) * pad
        self.train = Tokens(self.folder, 'train', self.meta)
        self.val = Tokens(self.folder, 'val', self.meta) if bin_files(self.folder, 'val') else None

    def tokenizer(self):
        return make_tokenizer(self.tokenizer_state)


def same_tokenizer(a, b):
    """Whether two tokenizer states give the same ids; one that is not known (None) or only named is taken at its word."""
    if a is None or b is None or a == b:
        return True
    if a['kind'] == b['kind'] == 'tiktoken' and not ('ranks' in a and 'ranks' in b):
        return a.get('name') == b.get('name')
    if a['kind'] == b['kind'] != 'hf':
        return False
    # GPT-2's vocabulary, say, once from tiktoken and once as tokenizer.json: let both encode the same
    chars = next((state['chars'] for state in (a, b) if state['kind'] == 'char'), None)
    try:
        if a['kind'] == b['kind'] and json.loads(a['json']) == json.loads(b['json']):
            return True
        a, b = make_tokenizer(a), make_tokenizer(b)
        texts = [PROBE] if chars is None else chars
        return all(np.array_equal(a.encode(text), b.encode(text)) for text in texts)
    except ValueError:  # a character that one of them lacks
        return False


def bin_files(folder, split):
    """The files with a split's token ids, in order: one, or shards, or none."""
    whole = os.path.join(folder, split + '.bin')
    return [whole] if os.path.exists(whole) else sorted(glob.glob(os.path.join(glob.escape(folder), split + '_' + '[0-9]' * 6 + '.bin')))


def missing(name, data_dir):
    """What to say when there is no data_dir/name/train.bin."""
    folder = os.path.join(data_dir, name)
    if os.path.isdir(os.path.join(folder, 'unfinished')):
        return f"{folder} is not finished. run the prepare.py that makes it again: it goes on where it was"
    if glob.glob(os.path.join(glob.escape(folder), 'part_*_of_*')):
        return f"{folder} has parts that are not put together. python prepare.py {name} --join"
    if bin_files(folder, 'val'):
        return f"no train.bin in {folder}. run prepare.py for it again"
    make = f"python prepare.py {name}" if name in KNOWN else f"python prepare.py {name} --input=FILE_OR_FOLDER"
    have = sorted(d for d in (os.listdir(data_dir) if os.path.isdir(data_dir) else [])
                  if bin_files(os.path.join(data_dir, d), 'train'))
    there = f"there is: {', '.join(have)}" if have else "there is none yet"
    return (f"no dataset {name} in {data_dir} ({there}). make it from text with: {make}; for a first run on a laptop: "
            "bash runs/quickstart.sh")


def read_meta(folder):
    """meta.json; or the same made of nanoGPT's meta.pkl; or, with neither, what nanoGPT assumes: GPT-2 tokens, uint16."""
    path = os.path.join(folder, 'meta.json')
    if os.path.exists(path):
        try:
            with open(path, encoding='utf-8') as f:
                meta = json.load(f)
            if meta.get('unfinished'):
                fail(f"{folder} is not finished. run its command again: {meta.get('command', 'python prepare.py ...')}")
            check_tokenizer_state(meta['tokenizer'])
            size, chars = meta['vocab_size'], meta['tokenizer'].get('chars')
            assert type(size) is int and 0 < size <= 2**32, f'vocab_size is {size!r:.60}'
            assert chars is None or len(chars) == size, f'vocab_size is {size}, and there are {len(chars)} characters'
            assert meta['dtype'] in ('uint16', 'uint32'), f"dtype is {meta['dtype']!r:.60}"
            assert all(type(split['tokens']) is int and split['tokens'] > 0 for split in meta['splits'].values()), 'the number of tokens'
            assert all(type(shard['tokens']) is int and shard['tokens'] > 0 and isinstance(shard['file'], str)
                       for split in meta['splits'].values() for shard in split.get('shards', [])), 'the shards'
            return meta
        except Exception as e:  # a file may say anything
            fail(f"{path} is damaged ({type(e).__name__}: {e}). run prepare.py for it again")
    path = os.path.join(folder, 'meta.pkl')
    if not os.path.exists(path):
        return {'tokenizer': {'kind': 'tiktoken', 'name': 'gpt2'}, 'vocab_size': 50257, 'end_of_text': 50256,
                'dtype': 'uint16', 'splits': {}}
    try:
        with open(path, 'rb') as f:
            old = PlainUnpickler(f).load()
        size, itos = int(old['vocab_size']), old['itos']
        chars = [itos[i] for i in range(size)]
        assert chars and all(isinstance(c, str) for c in chars)
    except Exception as e:  # whatever a strange pickle may raise
        fail(f"{path} is not nanoGPT's plain vocabulary ({type(e).__name__}: {e}). run prepare.py for this dataset again")
    return {'tokenizer': {'kind': 'char', 'chars': chars}, 'vocab_size': size, 'end_of_text': None, 'dtype': 'uint16', 'splits': {}}


class PlainUnpickler(pickle.Unpickler):
    """Dicts, lists, strings and numbers need no class; a pickle that asks for one wants to run code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it wants to run {module}.{name}")


def read_tokenizer_state(folder, meta):
    """meta's tokenizer with its merges, which lie in a file of their own: all that a checkpoint must know to be sampled."""
    state = dict(meta['tokenizer'])
    if state == {'kind': 'tiktoken', 'name': 'gpt2'} and importlib.util.find_spec('tiktoken') and all(map(os.path.exists, map(tiktoken_cache, GPT2_URLS))):
        state = make_tokenizer(state).state()  # nanoGPT's folders only assume it: if it is at hand, the checkpoint shall have it
    for key in ('ranks', 'json', 'config'):
        if f'{key}_file' in state:
            path = os.path.join(folder, os.path.basename(str(state.pop(f'{key}_file'))))
            try:
                with open(path, 'rb') as f:
                    state[key] = f.read() if key == 'ranks' else f.read().decode()
            except (OSError, UnicodeDecodeError) as e:
                fail(f"the tokenizer's file cannot be read ({path}: {e}). run prepare.py for this dataset again")
    return state


TOKENIZER_FILES = {'ranks': 'tokenizer.tiktoken', 'json': 'tokenizer.json', 'config': 'tokenizer_config.json'}


OPEN_FILES = 128  # shards kept open at once: a process may have about a thousand files


class Tokens:
    """The token ids of one split, read window by window, from one file or from shards. The files are not mapped: a mapped file counts
    as our memory while it is read, and kills the process if it is cut short; a read does neither and costs two microseconds more."""

    def __init__(self, folder, split, meta):
        self.dtype, self.vocab_size = np.dtype(meta['dtype']).newbyteorder('<'), meta['vocab_size']
        entry, width = meta['splits'].get(split, {}), self.dtype.itemsize
        shards = [(os.path.join(folder, os.path.basename(shard['file'])), shard['tokens']) for shard in entry.get('shards', [])]
        shards = shards or [(path, entry.get('tokens')) for path in bin_files(folder, split)]
        self.path = os.path.join(folder, split + '.bin') if len(shards) == 1 else os.path.join(folder, split + '_*.bin')
        self.paths, self.ends = [path for path, _ in shards], []  # where each file ends, in ids from the first one's beginning
        for path, tokens in shards:
            size = os.path.getsize(path) if os.path.exists(path) else -1
            wrong = ("is missing" if size < 0 else "is empty" if size == 0 else f"has {size:,} bytes, not a multiple of {width}" if size % width else
                     f"has {size:,} bytes, not the {tokens * width:,} that it was made with" if tokens not in (None, size // width) else None)
            if wrong:
                fail(f"{path} {wrong}. run prepare.py for this dataset again")
            self.ends.append((self.ends or [0])[-1] + size // width)
        self.n = self.ends[-1]
        sums = [str(part.get('sha256', 'unknown')) for part in entry.get('shards', [entry])]
        self.fingerprint = f"{self.n:,} tokens, sha256 {sums[0][:16] if len(sums) == 1 else hashlib.sha256(' '.join(sums).encode()).hexdigest()[:16] + ' of all'}"
        self.open = functools.lru_cache(OPEN_FILES)(self.open_shard)
        self.one_at_a_time = threading.Lock()  # a file has one place where it is read, and Prefetch reads beside the evaluation
        # a wrong vocabulary should show before the model is built; each batch is looked at as well
        self.windows(np.arange(0, self.n, max(1, self.n // 64))[:64], min(self.n, 65536))

    def open_shard(self, i):
        try:
            return open(self.paths[i], 'rb', buffering=0)
        except OSError as e:
            fail(f"{self.paths[i]} cannot be read ({e.strerror}). make it readable, or run prepare.py for this dataset again", everywhere=True)

    def windows(self, starts, length):
        """The `length` ids from each of `starts` on, (len(starts), length) as int64; behind the last one comes the first."""
        out = np.empty((len(starts), length), dtype=self.dtype)
        for row, start in zip(out, starts):
            ahead = min(length, self.n - int(start))
            self.read(row[:ahead], int(start))
            if ahead < length:
                self.read(row[ahead:], 0)
        if out.size and out.max() >= self.vocab_size:
            fail(f"{self.path} holds the token id {out.max()}, but its vocabulary has only {self.vocab_size} ids. it was made with "
                 "another tokenizer than its meta file says: run prepare.py for this dataset again", everywhere=True)
        return out.astype(np.int64)

    def read(self, row, start):
        shard = bisect.bisect_right(self.ends, start)
        while len(row):
            part, first = row[:self.ends[shard] - start], self.ends[shard - 1] if shard else 0
            with self.one_at_a_time:
                file = self.open(shard)
                file.seek((start - first) * self.dtype.itemsize)
                n = file.readinto(part.view(np.uint8))
                while 0 < n < part.nbytes and (more := file.readinto(part.view(np.uint8)[n:])):  # file systems over a network may give less than asked
                    n += more
            if n != part.nbytes:
                fail(f"{self.paths[shard]} became shorter while it was read. restore it, then go on with --init_from=resume", everywhere=True)
            row, start, shard = row[len(part):], start + len(part), shard + 1

    def n_windows(self, block_size):
        """How many windows of block_size ids and the one that follows lie side by side from the start on, overlapping by that one."""
        return (self.n - 1) // block_size

    def too_short(self, block_size):
        """A problem to report if not even one such window fits, else None."""
        if self.n_windows(block_size) < 1:
            return f"{self.path} has {self.n:,} tokens, too few for one window. use --block_size={max(1, self.n - 1)} or less, or more text"


# -----------------------------------------------------------------------------
# the order of the samples: a pure function of (seed, number), so it needs no state, does not depend on the number of
# processes, and is the same after a resume


def hash64(*numbers):
    """Mix whole numbers (ints or arrays of them) into an array of 64 well-stirred bits each (splitmix64's finalizer)."""
    x = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        x = x + np.asarray(number, dtype=np.uint64) + np.uint64(0x9e3779b97f4a7c15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xbf58476d1ce4e5b9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94d049bb133111eb)
        x = x ^ (x >> np.uint64(31))
    return x


def permute(numbers, n, key):
    """Where a permutation of range(n) that `key` chooses sends `numbers` (both uint64 arrays). It is computed, not stored,
    so ten billion blocks cost what a thousand cost: a Feistel network on the next power of two, walked until it is below n."""
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


# the second argument of hash64 below keeps the streams of random numbers apart: 1 offsets, 2 orders, 3 dropout (in train.py)
CHUNK = 4096  # samples per call: computing many at once costs a quarter of a microsecond each


@functools.lru_cache(maxsize=4)
def chunk_of_starts(seed, chunk, n_tokens, block_size):
    numbers = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=np.uint64)
    n_blocks = np.uint64(n_tokens // block_size)
    epochs, blocks = numbers // n_blocks, numbers % n_blocks
    offsets = hash64(seed, 1, epochs) % np.uint64(block_size)
    return (offsets + permute(blocks, n_blocks, hash64(seed, 2, epochs)) * np.uint64(block_size)) % np.uint64(n_tokens)


def train_starts(seed, numbers, n_tokens, block_size):
    """Where the training samples `numbers` (an iterable of ints) start. An epoch is the data as a ring, cut into blocks from
    a fresh offset on and taken in a fresh order: each token is the target at most once in an epoch."""
    return [int(chunk_of_starts(seed, i // CHUNK, n_tokens, block_size)[i % CHUNK]) for i in numbers]


class Prefetch:
    """What make(first), make(first + 1), ... return, in this order, made ahead by a thread while the device works. `waited` counts the
    seconds that next() took: time in which nobody worked."""

    def __init__(self, make, first=0, ahead=2):
        """`ahead`: how many are made before they are asked for; 0: none, and without a thread, which takes a core from those that compute on a CPU."""
        self.ready, self.waited, self.closed = queue.Queue(ahead), 0.0, False
        self.at_once = map(make, itertools.count(first)) if ahead == 0 else None
        if ahead:
            threading.Thread(target=self.work, args=(make, first), daemon=True).start()

    def work(self, make, number):
        problem = None
        while not self.closed and problem is None:
            made = None
            try:
                made = make(number)
            except BaseException as e:  # an exit, too, belongs to who waits for the batch
                problem = e
            self.ready.put((made, problem))
            number += 1

    def next(self):
        t0 = time.perf_counter()
        made, problem = (next(self.at_once), None) if self.at_once else self.ready.get()
        self.waited += time.perf_counter() - t0
        if problem is not None:
            raise problem
        return made

    def close(self):
        """Let the thread end; what it has made is dropped."""
        self.closed = True
        while not self.ready.empty():
            self.ready.get()
