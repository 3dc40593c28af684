"""
Tokenizers. Each one has
    n_vocab                 number of ids
    end_of_text             the id that stands before each document, or None
    stop_ids                ids that end a text when they are generated, or None
    encode(text)            the ids, an array; nothing in the text is special
    encode_prompt(text)     the same as a list, but <|endoftext|> is that token
    decode(ids)             the text
    special_ids()           {token: id} of special tokens, without Hugging Face's
    token_bytes()           bytes of text per id, (n_vocab,); 0 for special tokens
    state()                 a dict of plain types, from which make_tokenizer() makes it again
    split_at                where a text may be cut without changing its ids: 'anywhere', 'nowhere', or at
                            'words', between a letter and a space
"""

import re

import numpy as np

from configurator import fail
from support.tokenizer_state import KINDS, bytes_per_token

END_OF_TEXT = '<|endoftext|>'


class ByteTokenizer:
    """The UTF-8 bytes of the text; id 256 stands before each document."""
    n_vocab, end_of_text, stop_ids, split_at = 257, 256, [256], 'anywhere'

    def encode(self, text):
        return np.frombuffer(text.encode('utf-8', 'replace'), dtype=np.uint8)

    def encode_prompt(self, text):
        first, *others = [self.encode(part).tolist() for part in text.split(END_OF_TEXT)]
        for part in others:
            first += [self.end_of_text, *part]
        return first

    def decode(self, ids):
        parts = (bytes([i]) if i < 256 else END_OF_TEXT.encode() for i in ids)
        return b''.join(parts).decode('utf-8', 'replace')

    def special_ids(self):
        return {}

    def token_bytes(self):
        return bytes_per_token(self.state())

    def state(self):
        return {'kind': 'byte'}


class CharTokenizer:
    """One id per character that occurs in the text, in sorted order, as in nanoGPT's shakespeare_char. A
    vocabulary from elsewhere may have tokens of several characters, k-mers of DNA say: the longest that fits
    is taken."""
    end_of_text, stop_ids, split_at = None, None, 'anywhere'

    def __init__(self, chars):
        self.chars, self.n_vocab = list(chars), len(chars)
        single = [(ord(c), i) for i, c in enumerate(self.chars) if len(c) == 1]
        self.id_of = np.full(0x110000, -1, dtype=np.int32)  # by code point
        self.id_of[[code for code, _ in single]] = [i for _, i in single]
        self.longer = None
        if len(single) < self.n_vocab:
            self.longer = {token: i for i, token in enumerate(self.chars) if token}
            longest_first = sorted(self.longer, key=len, reverse=True)
            self.pattern = re.compile('|'.join(map(re.escape, longest_first)) + '|.', re.DOTALL)
            self.split_at = 'nowhere'

    def encode(self, text):
        if self.longer is not None:
            return np.array([self.id_of_token(token) for token in self.pattern.findall(text)], dtype=np.int32)
        ids = self.id_of[np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype=np.uint32)]
        if (ids < 0).any():
            unknown = text[int(np.argmax(ids < 0))]
            raise ValueError(f"character {unknown!r} is not in the vocabulary of {self.n_vocab} characters")
        return ids

    def id_of_token(self, token):
        if token not in self.longer:
            raise ValueError(f"no token of the vocabulary begins here ({token!r})")
        return self.longer[token]

    def encode_prompt(self, text):
        return self.encode(text).tolist()

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids)

    def special_ids(self):
        return {}

    def token_bytes(self):
        return bytes_per_token(self.state())

    def state(self):
        all_single = all(len(c) == 1 for c in self.chars)
        return {'kind': 'char', 'chars': ''.join(self.chars) if all_single else self.chars}


class IdsTokenizer:
    """For ids that are no text: notes, moves, genes. They are written as numbers."""
    end_of_text, stop_ids, split_at = None, None, 'nowhere'

    def __init__(self, n_vocab):
        self.n_vocab = n_vocab

    def encode(self, text):
        words = text.split()
        if not all(word.isdecimal() and int(word) < self.n_vocab for word in words):
            raise ValueError(f"texts of this dataset are numbers below {self.n_vocab}, such as '0 1 2' "
                             f"({text!r})")
        return np.array([int(word) for word in words], dtype=np.uint32)

    def encode_prompt(self, text):
        return self.encode(text).tolist()

    def decode(self, ids):
        return ''.join(f'{i} ' for i in ids)

    def special_ids(self):
        return {}

    def token_bytes(self):
        return np.zeros(self.n_vocab, dtype=np.int64)

    def state(self):
        return {'kind': 'ids', 'n_vocab': self.n_vocab}


def make_tokenizer(state):
    """The tokenizer that `state` describes: a state() of above, meta.json's, or {'kind': 'tiktoken', 'name':
    'gpt2'}."""
    try:
        if state.get('added'):
            from support.added_tokens import WithAddedTokens
            base = {key: value for key, value in state.items() if key != 'added'}
            return WithAddedTokens(make_tokenizer(base), state['added'])
        if state['kind'] == 'byte':
            return ByteTokenizer()
        if state['kind'] == 'char':
            return CharTokenizer(state['chars'])
        if state['kind'] == 'ids':
            return IdsTokenizer(state['n_vocab'])
        if state['kind'] == 'hf':
            from support.hf_tokenizer import HFTokenizer
            return HFTokenizer(state)
        if state['kind'] == 'tiktoken':
            from support.tiktoken_tokenizer import from_state
            return from_state(state)
    except Exception as e:  # the state may come from anywhere, and each package has errors of its own
        fail(f"the tokenizer {state.get('name', state['kind'])} cannot be made ({type(e).__name__}: "
             f"{str(e)[:120]}). run prepare.py for its dataset again, or take another checkpoint")
    fail(f"unknown kind of tokenizer ({state['kind']!r}). this flatgpt knows {', '.join(KINDS)}")


def empty_prompt(tokenizer):
    """The ids to start with when the prompt has none: what every document begins with, or a new line, or in a
    vocabulary without that a space or the first id."""
    if tokenizer.end_of_text is not None:
        return [tokenizer.end_of_text]
    for text in ('\n', ' '):
        try:
            return tokenizer.encode_prompt(text) or [0]
        except ValueError:
            pass
    return [0]
