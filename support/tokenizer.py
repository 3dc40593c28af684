"""
Tokenizers. Each one has
    n_vocab                 number of ids
    end_of_text             the id that stands before each document, or None
    stop_ids                ids that end a text when they are generated, or None
    encode(text)            the ids, an array; nothing in the text is special
    encode_prompt(text)     the same as a list, but special tokens, such as <|endoftext|>, are themselves
    decode(ids)             the text
    special                 {token: id} of special tokens, without Hugging Face's
    token_bytes()           bytes of text per id, (n_vocab,); 0 for special tokens
    state()                 a dict of plain types, from which make_tokenizer() makes it again
    split_at                where a text may be cut without changing its ids: 'anywhere', 'nowhere', or at
                            'words', between a letter and a space
"""

import base64
import contextlib
import hashlib
import itertools
import os
import re

import numpy as np

from configurator import fail
from support.errors import first_line
from support.files import write_whole
from support.hf_tokenizer import END_OF_TEXT, PROBE, HFTokenizer

ASSISTANT_END = '<|assistant_end|>'  # ends an answer, and so a text
SEPARATORS = (END_OF_TEXT, '<|bos|>')  # what stands before each document; the second: nanochat's
# the pattern of GPT-4's tokenizer, which tiktoken calls cl100k_base; those that prepare.py learns have it too
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
           r"\s*[\r\n]|\s+(?!\S)|\s")


class Pieces:
    """What the tokenizers below have in common: each id stands for some bytes."""
    split_at = 'anywhere'

    def __init__(self, state, pieces, special):
        """pieces: {id: its bytes}, of text. special: {token: id}."""
        self._state, self.text_pieces, self.special = state, pieces, special
        self.pieces = {**pieces, **{id: token.encode() for token, id in special.items()}}
        self.n_vocab = max(self.pieces) + 1
        self.end_of_text = next((special[token] for token in SEPARATORS if token in special), None)
        self.stop_ids = [special[token] for token in (ASSISTANT_END, END_OF_TEXT) if token in special] or None

    def encode_prompt(self, text):
        parts = re.split(f"({'|'.join(map(re.escape, self.special))})", text) if self.special else [text]
        ids = []
        for part in parts:
            ids += [self.special[part]] if part in self.special else self.encode(part).tolist()
        return ids

    def decode(self, ids):
        # o200k_base and others have ids without a meaning, which a model may still produce
        return b''.join(self.pieces.get(i, b'') for i in ids).decode('utf-8', 'replace')

    def token_bytes(self):
        return np.array([len(self.text_pieces.get(i, b'')) for i in range(self.n_vocab)])

    def state(self):
        return dict(self._state)


class ByteTokenizer(Pieces):
    """The UTF-8 bytes of the text; id 256 stands before each document."""

    def __init__(self, state):
        special = [END_OF_TEXT, *state.get('added', [])]
        super().__init__(state, {b: bytes([b]) for b in range(256)}, dict(zip(special, itertools.count(256))))

    def encode(self, text):
        return np.frombuffer(text.encode('utf-8', 'replace'), dtype=np.uint8)


class CharTokenizer(Pieces):
    """One id per character that occurs in the text, in sorted order, as in nanoGPT's shakespeare_char."""

    def __init__(self, state):
        self.chars = state['chars']
        pieces = {i: c.encode('utf-8', 'surrogatepass') for i, c in enumerate(self.chars)}
        super().__init__(state, pieces, dict(zip(state.get('added', []), itertools.count(len(pieces)))))
        self.id_of = np.full(0x110000, -1, dtype=np.int32)  # by code point
        self.id_of[[*map(ord, self.chars)]] = np.arange(len(self.chars))

    def encode(self, text):
        ids = self.id_of[np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype=np.uint32)]
        if (ids < 0).any():
            unknown = text[np.argmax(ids < 0)]
            raise ValueError(f"character {unknown!r} is not in the vocabulary")
        return ids


class IdsTokenizer(Pieces):
    """For ids that are no text: notes, moves, genes. They are written as numbers."""
    split_at = 'nowhere'

    def __init__(self, state):
        super().__init__(state, dict.fromkeys(range(state['n_vocab']), b''), {})

    def encode(self, text):
        words = text.split()
        if not all(word.isdecimal() and int(word) < self.n_vocab for word in words):
            raise ValueError(f"texts of this dataset are numbers below {self.n_vocab} ({text!r})")
        return np.array(words, dtype=np.uint32)

    def decode(self, ids):
        return ' '.join(map(str, ids))


class TiktokenTokenizer(Pieces):
    """GPT-2's BPE and the other encodings of the tiktoken package, and those that prepare.py learns."""
    split_at = 'words'

    def __init__(self, encoding):
        self.encoding = encoding
        pieces = {rank: token for token, rank in encoding._mergeable_ranks.items()}
        super().__init__({}, pieces, encoding._special_tokens)

    def encode(self, text):
        # nothing is special in a corpus: text that merely contains <|endoftext|> is text
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def state(self):
        ranks = b''.join(base64.b64encode(token) + b' %d\n' % rank
                         for rank, token in self.text_pieces.items())
        return {'kind': 'tiktoken', 'name': self.encoding.name, 'pat_str': self.encoding._pat_str,
                'special_tokens': self.special, 'ranks': ranks}


# -----------------------------------------------------------------------------
# from a state

KINDS = {'byte': ByteTokenizer, 'char': CharTokenizer, 'ids': IdsTokenizer, 'hf': HFTokenizer,
         'tiktoken': TiktokenTokenizer}


def make_tokenizer(state):
    """The tokenizer that `state` describes: a state() of above, meta.json's, or {'kind': 'tiktoken', 'name':
    'gpt2'}."""
    kind, name = state['kind'], state.get('name', state['kind'])
    try:
        if kind != 'tiktoken':
            return KINDS[kind](state)
        if 'ranks' not in state:
            return TiktokenTokenizer(get_encoding(name))
        import tiktoken
        pairs = [line.split() for line in state['ranks'].splitlines()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        return TiktokenTokenizer(tiktoken.Encoding(
            name, pat_str=state['pat_str'], mergeable_ranks=ranks, special_tokens=state['special_tokens']))
    except ImportError as e:
        fail(f"the tokenizer {name} needs a package that is not installed ({e.name}). pip install {e.name}")
    except Exception as e:  # the state may come from anywhere, and each package has errors of its own
        fail(f"the tokenizer {name} cannot be made ({type(e).__name__}: {first_line(e)}). run prepare.py for "
             "its dataset again, or save its tokenizer.json again")


def get_encoding(name):
    """tiktoken's own encoding `name`, from its cache or the network."""
    import tiktoken
    if name not in tiktoken.list_encoding_names():
        names = ', '.join(sorted(tiktoken.list_encoding_names()))
        fail(f"no such tokenizer ({name}). use char, byte or one of tiktoken's: {names}")
    try:
        return tiktoken.get_encoding(name)
    # errors of the requests package are OSErrors; a page in its place: ValueError
    except (OSError, ValueError) as e:
        fail(f"tokenizer {name} is not in tiktoken's cache and cannot be downloaded ({type(e).__name__}). "
             f"with a network: TIKTOKEN_CACHE_DIR=FOLDER python -c \"import tiktoken; tiktoken.get_encoding"
             f"('{name}')\", and bring FOLDER here; or have prepare.py use --tokenizer=byte")


# -----------------------------------------------------------------------------
# questions about a state


def check_tokenizer_state(state):
    """Raise an exception of some kind if `state`, which a file brought, is not one that make_tokenizer()
    knows."""
    assert state['kind'] in KINDS, f"unknown kind of tokenizer, {state['kind']!r}"


def token_bytes(state, vocab_size):
    """Bytes of text per token id, (vocab_size,), 0 for special tokens; all 0 if the ids are no text, or the
    tokenizer's files are not at hand."""
    if state['kind'] in ('ids', 'tiktoken') and 'ranks' not in state:
        return np.zeros(vocab_size)
    found = make_tokenizer(state).token_bytes()[:vocab_size]
    return np.pad(found, (0, vocab_size - len(found)))


def same_tokenizer(a, b):
    """Whether two states give the same ids. One that is unknown (None) or only named is taken at its word."""
    if a is None or b is None or a == b:
        return True
    if a['kind'] == b['kind'] == 'tiktoken':
        return a['name'] == b['name'] and not ('ranks' in a and 'ranks' in b)
    if 'hf' not in (a['kind'], b['kind']):
        return False
    # GPT-2's vocabulary, say, once from tiktoken and once as tokenizer.json: compare what they make of a text
    text = a.get('chars') or b.get('chars') or PROBE
    try:
        return np.array_equal(make_tokenizer(a).encode(text), make_tokenizer(b).encode(text))
    except ValueError:  # a character that one of them lacks
        return False


def empty_prompt(tokenizer):
    """The ids to start with when the prompt has none: what every document begins with, or a new line, or in a
    vocabulary without that a space or the first id."""
    if tokenizer.end_of_text is not None:
        return [tokenizer.end_of_text]
    for text in ('\n', ' '):
        with contextlib.suppress(ValueError):
            return tokenizer.encode_prompt(text) or [0]
    return [0]


# -----------------------------------------------------------------------------
# a tokenizer's own files in the folder of a dataset: what is too long for meta.json

# by their key in the tokenizer's state
TOKENIZER_FILES = {'ranks': 'tokenizer.tiktoken', 'json': 'tokenizer.json', 'config': 'tokenizer_config.json'}


def read_files(folder, meta):
    """The tokenizer's state that a meta.json tells, with its files from `folder`. ValueError or OSError for
    one that is damaged or missing."""
    state = dict(meta['tokenizer'])
    for key, file in TOKENIZER_FILES.items():
        if state.pop(f'{key}_file', None):
            with open(os.path.join(folder, file), 'rb') as f:
                content = f.read()
            state[key] = content if key == 'ranks' else content.decode()
            sha256 = hashlib.sha256(content).hexdigest()
            if meta.get('checksums', {}).get(file, sha256) != sha256:
                raise ValueError(f"the checksum of {file} is not the one in meta.json")
    return state


def write_tokenizer(folder, tokenizer, dtype):
    """What meta.json says of a tokenizer whose ids are stored as `dtype`; what is too long for it is written
    to files in `folder`."""
    state, checksums = tokenizer.state(), {}
    for key, file in TOKENIZER_FILES.items():
        if content := state.pop(key, None):
            content = content if isinstance(content, bytes) else content.encode()
            write_whole(os.path.join(folder, file), content)
            state[f'{key}_file'] = file
            checksums[file] = hashlib.sha256(content).hexdigest()
    return {'tokenizer': state, 'vocab_size': tokenizer.n_vocab, 'end_of_text': tokenizer.end_of_text,
            'dtype': dtype.name, 'checksums': checksums}
