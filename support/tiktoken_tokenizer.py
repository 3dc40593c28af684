"""GPT-2's BPE and the other encodings of the tiktoken package, and those that prepare.py learns."""

import base64
import hashlib
import importlib.util
import os
import tempfile

import numpy as np

from configurator import fail
from support.chat_format import ASSISTANT_END
from support.tokenizer import END_OF_TEXT

GPT2_FILES = 'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/'
SEPARATORS = (END_OF_TEXT, '<|bos|>')  # what stands before each document; the second: nanochat's
GPT2_URLS = [GPT2_FILES + name for name in ('vocab.bpe', 'encoder.json')]


class TiktokenTokenizer:
    split_at = 'words'

    def __init__(self, encoding):
        self.encoding, self.n_vocab = encoding, encoding.n_vocab
        special = encoding._special_tokens
        self.separator = next((text for text in SEPARATORS if text in special), END_OF_TEXT)
        self.end_of_text = special.get(self.separator)
        ends = [encoding._special_tokens.get(token) for token in (ASSISTANT_END, END_OF_TEXT)]
        self.stop_ids = [id for id in ends if id is not None] or None

    def encode(self, text):
        # nothing is special in a corpus: text that merely contains <|endoftext|> is text
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_prompt(self, text):
        return self.encoding.encode(text, allowed_special={self.separator}, disallowed_special=())

    def decode(self, ids):
        try:
            return self.encoding.decode(ids)
        except KeyError:  # o200k_base and others have ids without a meaning, which a model may still produce
            known = {*self.encoding._mergeable_ranks.values(), *self.encoding._special_tokens.values()}
            return self.encoding.decode([i for i in ids if i in known])

    def special_ids(self):
        return dict(self.encoding._special_tokens)

    def token_bytes(self):
        lengths = np.zeros(self.n_vocab, dtype=np.int64)
        for token, rank in self.encoding._mergeable_ranks.items():
            lengths[rank] = len(token)
        return lengths

    def state(self):
        e = self.encoding
        ranks = (base64.b64encode(token) + b' %d\n' % rank for token, rank in e._mergeable_ranks.items())
        return {'kind': 'tiktoken', 'name': e.name, 'pat_str': e._pat_str,
                'special_tokens': dict(e._special_tokens), 'ranks': b''.join(ranks)}


def from_state(state):
    """The tokenizer of a state: with its merges ('ranks'), or only with the name of one of tiktoken's own."""
    try:
        import tiktoken
    except ImportError:
        fail(f"the tokenizer {state['name']} needs a package that is not installed (tiktoken). pip install "
             "tiktoken")
    if 'ranks' not in state:
        return TiktokenTokenizer(get_encoding(tiktoken, state['name']))
    ranks = read_ranks(state['ranks'], state['special_tokens'])
    return TiktokenTokenizer(tiktoken.Encoding(state['name'], pat_str=state['pat_str'], mergeable_ranks=ranks,
                                               special_tokens=state['special_tokens']))


def read_ranks(content, special_tokens):
    """{token: id} of a tokenizer.tiktoken. ValueError for one that tiktoken would panic about, or take."""
    ranks = {}
    content = content.encode() if isinstance(content, str) else content
    for number, line in enumerate(content.splitlines(), 1):
        token, _, rank = line.partition(b' ')
        try:
            token, rank = base64.b64decode(token, validate=True), int(rank)
        except ValueError:
            raise ValueError(f"line {number} of its file is damaged")
        if token in ranks or rank < 0:
            raise ValueError(f"line {number} of its file repeats a token")
        ranks[token] = rank
    ids = {*ranks.values(), *special_tokens.values()}
    if len(ids) < len(ranks) + len(special_tokens):
        raise ValueError("an id has two tokens in its file")
    if any(bytes([b]) not in ranks for b in range(256)):
        raise ValueError("its file lacks some of the 256 bytes")
    return ranks


def cache_path(url):
    """Where tiktoken keeps what it downloaded from `url`."""
    folder = os.environ.get('TIKTOKEN_CACHE_DIR') or os.environ.get('DATA_GYM_CACHE_DIR')
    folder = folder or os.path.join(tempfile.gettempdir(), 'data-gym-cache')
    return os.path.join(folder, hashlib.sha1(url.encode()).hexdigest())


def full_state_if_cached(state):
    """The state of GPT-2's tokenizer with its merges, if tiktoken is installed and has them in its cache;
    else `state`."""
    if importlib.util.find_spec('tiktoken') and all(os.path.exists(cache_path(url)) for url in GPT2_URLS):
        return from_state(state).state()
    return state


def get_encoding(tiktoken, name):
    """tiktoken's own encoding `name`, from its cache or the network. If neither has it, say which file to put
    where."""
    if name not in tiktoken.list_encoding_names():
        names = ', '.join(sorted(tiktoken.list_encoding_names()))
        fail(f"no such tokenizer ({name}). use char, byte or one of tiktoken's: {names}")
    try:
        return tiktoken.get_encoding(name)
    # errors of the requests package are OSErrors; a page in its place: ValueError
    except (OSError, ValueError) as e:
        url = getattr(getattr(e, 'request', None), 'url', None)
        urls = GPT2_URLS if name == 'gpt2' else [url] if url else []
        where = ' and '.join(f"{url} as {cache_path(url)}" for url in urls) or 'its files'
        fail(f"the tokenizer {name} is not in tiktoken's cache and cannot be downloaded "
             f"({type(e).__name__}). on a machine with a network, download {where} (TIKTOKEN_CACHE_DIR names "
             "another folder), or use --tokenizer=byte")
