"""
Tokenizers: characters, bytes, tiktoken's, and a BPE learned from your text.

Those of Hugging Face are in huggingface.py; a tokenizer for ids that are not text writes numbers. Each has

    n_vocab              number of ids
    end_of_text          the id that starts each document, or None
    stop_ids             list of the ids that end a generated text
    special              {token: id} of the special tokens
    encode(text)         return the ids, an array. Special tokens in the text are encoded as text
    encode_prompt(text)  return the ids, a list. Special tokens in the text become their ids
    find_special(text)   return the special tokens that are written in the text, a list
    decode(ids)          return the text
    token_bytes()        return the bytes of text per id, (n_vocab,) int64; 0 for special tokens
    state()              return a dict of plain types, from which make_tokenizer() makes the same tokenizer

A state has a 'kind': a key of KINDS, or 'hf'. A file that cannot be read, or a text that cannot be encoded,
raises InputError.
"""

import base64
import contextlib
import hashlib
import importlib
import os
import re
import reprlib

import numpy as np

from configurator import InputError
from flatgpt.files import first_line, write_whole


END_OF_TEXT = '<|endoftext|>'
ASSISTANT_END = '<|assistant_end|>'  # ends an answer, see conversations.py
GPT2_STATE = {'kind': 'tiktoken', 'name': 'gpt2'}  # without its merges, which tiktoken knows
MAX_VOCAB = 2**20  # more than any tokenizer has. A damaged file may state billions, which take gigabytes
# the split pattern of GPT-4's tokenizer (tiktoken's cl100k_base); a learned BPE uses it as well
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
           r"\s*[\r\n]|\s+(?!\S)|\s")


def import_package(name):
    """Import and return an optional package."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise InputError(f"the package {name} is not installed. Run: pip install {name}") from e


def check_vocab_size(n):
    """Raise InputError if `n` is not a possible number of ids."""
    if not isinstance(n, int) or not 0 < n <= MAX_VOCAB:
        raise InputError(f"the size of the vocabulary is out of range: {n!r}. It must be from 1 to "
                         f"{MAX_VOCAB:,} (MAX_VOCAB in flatgpt/tokenizer.py).")


@contextlib.contextmanager
def package_errors(what, remedy):
    """Turn any error in the block into an InputError: "WHAT: the error. REMEDY".

    A panic of a package in Rust is a BaseException.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        raise InputError(f"{what}: {type(e).__name__}, {first_line(e)!r}. {remedy}") from e


# -----------------------------------------------------------------------------
# characters, bytes, numbers, tiktoken's


class Tokenizer:
    """Base class: each id stands for some bytes."""

    def __init__(self, state, text_pieces, special):
        """Set the attributes. text_pieces: {id: bytes} without special tokens. special: {token: id}."""
        self._state = state
        self.text_pieces = text_pieces
        self.special = special
        if '' in special:
            raise ValueError("a special token is empty")
        any_special = '|'.join(re.escape(token) for token in special)
        self.special_pattern = re.compile(any_special) if special else None
        self.pieces = dict(text_pieces)  # of all ids
        for token, id in special.items():
            self.pieces[id] = token.encode()
        self.n_vocab = max(self.pieces) + 1
        check_vocab_size(self.n_vocab)
        # <|bos|> is nanochat's name for the token before each document
        self.end_of_text = special.get(END_OF_TEXT, special.get('<|bos|>'))
        self.stop_ids = [special[token] for token in (ASSISTANT_END, END_OF_TEXT) if token in special]

    def find_special(self, text):
        return self.special_pattern.findall(text) if self.special else []

    def encode_prompt(self, text):
        ids = []
        for token in self.find_special(text):
            before, _, text = text.partition(token)
            ids.extend(self.encode(before).tolist())
            ids.append(self.special[token])
        ids.extend(self.encode(text).tolist())
        return ids

    def decode(self, ids):
        # an id may have no token: o200k_base skips some, and a vocabulary may be padded
        content = b''.join(self.pieces.get(id, b'') for id in ids)
        return content.decode('utf-8', 'replace')

    def token_bytes(self):
        lengths = np.zeros(self.n_vocab, dtype=np.int64)
        for id, piece in self.text_pieces.items():
            lengths[id] = len(piece)
        return lengths

    def state(self):
        return dict(self._state)


class ByteTokenizer(Tokenizer):
    """The UTF-8 bytes of the text; id 256 starts each document."""

    def __init__(self, state):
        pieces = {byte: bytes([byte]) for byte in range(256)}
        tokens = [END_OF_TEXT, *state.get('added', [])]
        special = {token: id for id, token in enumerate(tokens, start=256)}
        super().__init__(state, pieces, special)

    def encode(self, text):
        return np.frombuffer(text.encode('utf-8', 'replace'), dtype=np.uint8)


class CharTokenizer(Tokenizer):
    """One id per character of the text, in sorted order, as in nanoGPT's shakespeare_char."""

    def __init__(self, state):
        chars = state['chars']
        self.id_of = {char: id for id, char in enumerate(chars)}
        pieces = {id: char.encode('utf-8', 'replace') for id, char in enumerate(chars)}
        special = {token: id for id, token in enumerate(state.get('added', []), start=len(chars))}
        super().__init__(state, pieces, special)

    def encode(self, text):
        try:
            return np.array([self.id_of[char] for char in text], dtype=np.int32)
        except KeyError as e:
            char = e.args[0]
            raise InputError(f"the character {char!r} (U+{ord(char):04X}) is not in the vocabulary. Use only "
                             "characters of the text that it was made from, accents in the same Unicode form "
                             "(NFC or NFD).") from None


class NumberTokenizer(Tokenizer):
    """Ids that are not text (notes, moves, genes), written as numbers: '7 3 39'."""

    def __init__(self, state):
        check_vocab_size(state['n_vocab'])
        super().__init__(state, {id: b'' for id in range(state['n_vocab'])}, {})

    def encode(self, text):
        ids = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.n_vocab:
                raise InputError(f"not a number below {self.n_vocab}: {word[:50]!r}. The ids of this dataset "
                                 "are not text; write them as numbers.")
            ids.append(int(word))
        return np.array(ids, dtype=np.uint32)

    def decode(self, ids):
        return ' '.join(str(id) for id in ids)


class TiktokenTokenizer(Tokenizer):
    """GPT-2's BPE, the other encodings of the tiktoken package, and a learned BPE."""

    def __init__(self, state):
        tiktoken = import_package('tiktoken')
        if is_only_named(state):
            encoding = tiktoken.get_encoding(state['name'])  # from tiktoken's cache or the network
            # tiktoken's README uses these attributes to extend an encoding
            state = {**state, 'pat_str': encoding._pat_str, 'special_tokens': encoding._special_tokens,
                     'ranks': format_ranks(encoding._mergeable_ranks)}
        ranks = {}  # {token in bytes: id}. A line of a tiktoken file has a token in base64 and its id
        for line in state['ranks'].splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        special = state.get('special_tokens', {})
        check_ranks(ranks, special)
        self.encoding = tiktoken.Encoding(state['name'], pat_str=state['pat_str'], mergeable_ranks=ranks,
                                          special_tokens=special)
        super().__init__(state, {rank: token for token, rank in ranks.items()}, special)

    def encode(self, text):
        text = without_surrogates(text)
        with package_errors("tiktoken cannot encode the text", "Make the tokenizer again."):
            try:
                return self.encoding.encode_to_numpy(text, disallowed_special=())
            except ValueError:
                # its regular expressions cannot match a run of a million spaces: encode each half of the text
                if len(text) < 1000:
                    raise
        middle = len(text) // 2
        return np.concatenate([self.encode(text[:middle]), self.encode(text[middle:])])


def is_only_named(state):
    """Return whether the state lacks the merges, so that tiktoken has to find or download them."""
    return state['kind'] == 'tiktoken' and 'ranks' not in state


def check_ranks(ranks, special):
    """
    Raise ValueError if the tiktoken package would panic or take gigabytes.

    ranks: {token: id}
    special: the same of the special tokens, whose ids may be between the others, as in p50k_base
    """
    n = max(ranks.values()) + 1
    check_vocab_size(n)
    between = {id for id in special.values() if id < n}
    if sorted([*ranks.values(), *between]) != list(range(n)):
        raise ValueError(f"the ids of the tokens are not 0 to {n - 1}, each once")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("a byte has no token")


def format_ranks(ranks):
    """Return the content of a tiktoken file, bytes."""
    return b''.join(base64.b64encode(token) + b' %d\n' % rank for token, rank in ranks.items())


def without_surrogates(text):
    """Replace surrogates, which JSON can contain and UTF-8 cannot: a pair by its character, a single one by
    U+FFFD."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


# -----------------------------------------------------------------------------
# a learned BPE


def learn_bpe(n_vocab, texts):
    """Learn a byte-level BPE from `texts`. It has `n_vocab` ids, or fewer if the texts are short; the last
    one is <|endoftext|>.

    The `tokenizers` package learns the merges. tiktoken uses them to encode, which is three times as fast.
    """
    check_vocab_size(n_vocab)  # the package aborts the process if memory runs out
    if n_vocab < 257:
        raise InputError(f"bpe:{n_vocab} has fewer ids than there are bytes. Use at least 257, as in "
                         "bpe:8192.")
    tokenizers = import_package('tokenizers')
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = pre_tokenizer_of(PATTERN)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=n_vocab - 1, show_progress=False,
                                             initial_alphabet=list(byte_of))
    learner.train_from_iterator(texts, trainer)

    # tiktoken's order: the bytes, then the merged tokens in the order in which they were learned
    vocab = learner.get_vocab()
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in sorted(vocab, key=vocab.get):
        if len(token) > 1:
            ranks[bytes(byte_of[letter] for letter in token)] = len(ranks)
    return make_tokenizer({'kind': 'tiktoken', 'name': f'bpe:{n_vocab}', 'pat_str': PATTERN,
                           'special_tokens': {END_OF_TEXT: len(ranks)}, 'ranks': format_ranks(ranks)})


def bytes_to_unicode():
    """Return {byte: character} as in OpenAI's encoder.py: GPT-2's vocabulary writes bytes as characters.

    A printable byte is written as itself; the others are numbered from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(printable))
    return letters


def pre_tokenizer_of(pattern):
    """Return a pre-tokenizer of the `tokenizers` package that splits a text by a pattern of tiktoken.

    Two parts of the pattern mean something else in that package and are replaced: {1,3}+ is not possessive,
    but repeats {1,3}; and $ also matches before each newline.
    """
    from tokenizers import Regex, pre_tokenizers
    pattern = re.sub(r'(\{\d+(?:,\d*)?\})\+', r'\1', pattern).replace('$', r'\z')
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


# -----------------------------------------------------------------------------
# functions of a state

KINDS = {'byte': ByteTokenizer, 'char': CharTokenizer, 'ids': NumberTokenizer, 'tiktoken': TiktokenTokenizer}


def make_tokenizer(state):
    """Return the tokenizer that has this state()."""
    # a state comes from a file, and each package has its own errors
    with package_errors(f"the tokenizer {reprlib.repr(state)[:60]} cannot be made",
                        "Use char, byte, bpe:8192, a tokenizer.json, or an encoding of tiktoken's, such as "
                        "gpt2, which is downloaded once (docs/data.md)."):
        if state['kind'] == 'hf':
            from flatgpt.huggingface import HFTokenizer  # here, as most datasets do not need it
            return HFTokenizer(state)
        return KINDS[state['kind']](state)


def token_bytes(state, vocab_size):
    """Return the bytes of text per id, (vocab_size,) int64; 0 for special tokens.

    All are 0 if they are unknown: the ids are not text, or the state lacks tiktoken's merges.
    """
    lengths = np.zeros(vocab_size, dtype=np.int64)
    if not is_only_named(state):
        known = make_tokenizer(state).token_bytes()[:vocab_size]
        lengths[:len(known)] = known
    return lengths


def same_tokenizer(a, b):
    """Return whether two states have the same vocabulary.

    None is an unknown state and matches any. Special tokens may be missing in one of the two.
    """
    if a is None or b is None or a == b:
        return True
    if is_only_named(a) or is_only_named(b):
        return a.get('name') == b.get('name')
    one = make_tokenizer(a)
    other = make_tokenizer(b)
    if one.text_pieces != other.text_pieces:
        return False
    names = {id: token for token, id in one.special.items()}
    return all(names.get(id, token) == token for token, id in other.special.items())


# -----------------------------------------------------------------------------
# a dataset's tokenizer: meta.json contains the state, and these files the values that are too long for it

# {key of the state: name of the file}
TOKENIZER_FILES = {'ranks': 'tokenizer.tiktoken', 'json': 'tokenizer.json', 'config': 'tokenizer_config.json'}


def write_tokenizer_files(folder, tokenizer, dtype):
    """Write a tokenizer's files into `folder`. Return its entries of meta.json.

    dtype: numpy's, in which the ids are stored.
    """
    state = tokenizer.state()
    checksums = {}
    for key, file in TOKENIZER_FILES.items():
        if key in state:
            content = state.pop(key)
            if isinstance(content, str):
                content = content.encode()
            write_whole(os.path.join(folder, file), content)
            state[f'{key}_file'] = file
            checksums[file] = hashlib.sha256(content).hexdigest()
    return {'tokenizer': state, 'vocab_size': tokenizer.n_vocab, 'end_of_text': tokenizer.end_of_text,
            'dtype': np.dtype(dtype).name, 'checksums': checksums}


def read_tokenizer_files(folder, meta):
    """Return the state of the tokenizer in a meta.json, with the contents of its files in `folder`.

    A checkpoint stores this state, so that it can be sampled without the dataset.
    """
    state = dict(meta['tokenizer'])
    for key, file in TOKENIZER_FILES.items():
        if f'{key}_file' not in state:
            continue
        del state[f'{key}_file']
        path = os.path.join(folder, file)
        content = b''
        if os.path.exists(path):
            with open(path, 'rb') as f:
                content = f.read()
        sha256 = hashlib.sha256(content).hexdigest()
        if not content or sha256 != meta.get('checksums', {}).get(file, sha256):
            raise InputError(f"{path} is missing or has changed since meta.json was written. Run prepare.py "
                             "again with --overwrite.")
        state[key] = content if key == 'ranks' else content.decode()
    return state
