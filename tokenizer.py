"""
Tokenizers: characters, bytes, tiktoken's, a BPE learned from your own text, Hugging Face's; and ids that are
plain numbers. A tokenizer has

    n_vocab              number of ids
    end_of_text          the id that stands before each document, or None
    stop_ids             list of the ids that end a generated text
    special              {token: id} of the special tokens
    encode(text)         return the ids, an array. Nothing in the text is special, not even <|endoftext|>
    encode_prompt(text)  return the ids, a list. Special tokens in the text become their ids
    decode(ids)          return the text
    token_bytes()        return the bytes of text per id, (n_vocab,) int64; 0 for special tokens
    state()              return a dict of plain types, from which make_tokenizer() makes the same tokenizer

A state has a 'kind', a key of KINDS. Whatever cannot be read, made or encoded raises InputError.
"""

import base64
import hashlib
import importlib
import json
import os
import re
import unicodedata

import numpy as np

from configurator import InputError
from files import check_not_lfs_pointer, first_line, read_json, write_whole


END_OF_TEXT = '<|endoftext|>'
ASSISTANT_END = '<|assistant_end|>'  # ends an answer, see conversations.py
GPT2_STATE = {'kind': 'tiktoken', 'name': 'gpt2'}  # without its merges, which tiktoken knows
# the split pattern of GPT-4's tokenizer (tiktoken's cl100k_base); a learned BPE uses it as well
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
           r"\s*[\r\n]|\s+(?!\S)|\s")
# the roles of special tokens in a tokenizer.json that has no tokenizer_config.json
SPECIAL_NAMES = {
    'bos_token': ['<|bos|>', '<s>', '<bos>', '<SOS>'],  # SimpleLLaMA's bpe_8k.json has <SOS> and <EOS>
    'eos_token': ['<|endoftext|>', '</s>', '<eos>', '<EOS>'],
}


def import_package(name):
    """Return a package that not every user needs."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise InputError(f"the package {name} is not installed. Run: pip install {name}") from e


# -----------------------------------------------------------------------------
# characters, bytes, numbers, tiktoken's


class Tokenizer:
    """The methods that all kinds share: each id stands for some bytes."""

    def __init__(self, state, text_pieces, special):
        """text_pieces: {id: bytes} of all ids but the special ones; special: {token: id}."""
        self._state = state
        self.text_pieces = text_pieces
        self.special = special
        self.pieces = dict(text_pieces)  # of all ids
        for token, id in special.items():
            self.pieces[id] = token.encode()
        self.n_vocab = max(self.pieces) + 1
        # <|bos|> is nanochat's name for the token before each document
        self.end_of_text = special.get(END_OF_TEXT, special.get('<|bos|>'))
        self.stop_ids = [special[token] for token in (ASSISTANT_END, END_OF_TEXT) if token in special]

    def encode_prompt(self, text):
        if not self.special:
            return self.encode(text).tolist()
        any_special = '|'.join(re.escape(token) for token in self.special)
        ids = []
        for part in re.split(f'({any_special})', text):
            if part in self.special:
                ids.append(self.special[part])
            else:
                ids.extend(self.encode(part).tolist())
        return ids

    def decode(self, ids):
        # an id may have no meaning: o200k_base skips some, and a vocabulary is padded
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
    """The UTF-8 bytes of the text; id 256 stands before each document."""

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
        pieces = {id: char.encode('utf-8', 'surrogatepass') for id, char in enumerate(chars)}
        special = {token: id for id, token in enumerate(state.get('added', []), start=len(chars))}
        super().__init__(state, pieces, special)

    def encode(self, text):
        try:
            return np.array([self.id_of[char] for char in text], dtype=np.int32)
        except KeyError as e:
            char = e.args[0]
            remedy = "Use only characters of the text that it was made from."
            for form in ['NFC', 'NFD']:  # an umlaut is one character, or a letter and a mark
                other = unicodedata.normalize(form, text)
                if other != text and all(char in self.id_of for char in other):
                    remedy = f"Write it in Unicode's form {form}: {ascii(other)}"
            raise InputError(f"the character {char!r} (U+{ord(char):04X}) is not in the vocabulary. "
                             f"{remedy}") from None


class NumberTokenizer(Tokenizer):
    """Ids that are no text (notes, moves, genes), written as numbers: '7 3 39'."""

    def __init__(self, state):
        super().__init__(state, {id: b'' for id in range(state['n_vocab'])}, {})

    def encode(self, text):
        words = text.split()
        for word in words:
            if not word.isdecimal() or int(word) >= self.n_vocab:
                raise InputError(f"not a number below {self.n_vocab}: {word[:50]!r}. The ids of this dataset "
                                 "are no text; write them as numbers.")
        return np.array([int(word) for word in words], dtype=np.uint32)

    def decode(self, ids):
        return ' '.join(str(id) for id in ids)


class TiktokenTokenizer(Tokenizer):
    """GPT-2's BPE, the other encodings of the tiktoken package, and a learned BPE."""

    def __init__(self, state):
        tiktoken = import_package('tiktoken')
        if is_only_named(state):
            encoding = tiktoken.get_encoding(state['name'])  # from tiktoken's cache or the network
            # tiktoken's README reads these attributes to extend an encoding
            state = {**state, 'pat_str': encoding._pat_str, 'special_tokens': encoding._special_tokens,
                     'ranks': format_ranks(encoding._mergeable_ranks)}
        ranks = parse_ranks(state['ranks'])
        special = state.get('special_tokens', {})
        # tiktoken does not check these and would abort in the middle of a text
        has_all_bytes = all(bytes([byte]) in ranks for byte in range(256))
        if not has_all_bytes or len(set(ranks.values())) < len(ranks):
            raise InputError(f"the merges of tokenizer {state['name']} are damaged: a byte has no token, or "
                             "two tokens have the same id. Prepare the dataset again.")
        self.encoding = tiktoken.Encoding(state['name'], pat_str=state['pat_str'], mergeable_ranks=ranks,
                                          special_tokens=special)
        super().__init__(state, {rank: token for token, rank in ranks.items()}, special)

    def encode(self, text):
        text = without_surrogates(text)
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            # a run of a million spaces is too long for its regular expressions: halve the text
            if len(text) < 1000:
                raise
            middle = len(text) // 2
            return np.concatenate([self.encode(text[:middle]), self.encode(text[middle:])])


def is_only_named(state):
    """Return whether the merges are not in the state: tiktoken has to know them, perhaps from the network."""
    return state['kind'] == 'tiktoken' and 'ranks' not in state


def parse_ranks(content):
    """Return {token in bytes: id} of a tiktoken file: a line for each, the token in base64 and the id."""
    ranks = {}
    for line in content.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return ranks


def format_ranks(ranks):
    """Return the content of such a file, bytes."""
    return b''.join(base64.b64encode(token) + b' %d\n' % rank for token, rank in ranks.items())


def without_surrogates(text):
    """Return `text` with U+FFFD for each half of a surrogate pair: JSON can hold one, UTF-8 cannot."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


# -----------------------------------------------------------------------------
# a learned BPE


def learn_bpe(n_vocab, texts):
    """Learn a byte-level BPE of `n_vocab` ids, the last of which is <|endoftext|>, from `texts`.

    The `tokenizers` package learns it, and tiktoken uses it, which is three times as fast.
    """
    if not 257 <= n_vocab <= 1_000_000:
        raise InputError(f"the size of the vocabulary is out of range: bpe:{n_vocab}. Use 257 to 1000000, as "
                         "in bpe:8192.")
    tokenizers = import_package('tokenizers')
    import_package('tiktoken')
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = pre_tokenizer_of(PATTERN)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=n_vocab - 1, show_progress=False,
                                             initial_alphabet=list(byte_of))
    learner.train_from_iterator(texts, trainer)

    # tiktoken's order: the bytes, then the merged tokens, the earliest first
    vocab = learner.get_vocab()
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in sorted(vocab, key=vocab.get):
        if len(token) > 1:
            ranks[bytes(byte_of[letter] for letter in token)] = len(ranks)
    return make_tokenizer({'kind': 'tiktoken', 'name': f'bpe:{n_vocab}', 'pat_str': PATTERN,
                           'special_tokens': {END_OF_TEXT: len(ranks)}, 'ranks': format_ranks(ranks)})


def bytes_to_unicode():
    """Return {byte: character}, as GPT-2's vocabulary writes bytes (the name is from OpenAI's encoder.py).

    Printable bytes stand for themselves, the others are numbered from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(printable))
    return letters


def pre_tokenizer_of(pattern):
    """Return what splits a text by a regular expression of tiktoken's in the `tokenizers` package.

    In that package's dialect {1,3}+ repeats (it is not possessive) and $ is the end of a line.
    """
    from tokenizers import Regex, pre_tokenizers
    pattern = re.sub(r'(\{\d+(?:,\d*)?\})\+', r'\1', pattern).replace('$', r'\z')
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


# -----------------------------------------------------------------------------
# Hugging Face's


class HFTokenizer(Tokenizer):
    """A tokenizer.json, read by the `tokenizers` package.

    Before each document stands its beginning-of-sequence token or, if it has none, its end-of-sequence token.
    tokenizer_config.json names the two; without that file, SPECIAL_NAMES does.
    """

    def __init__(self, state):
        tokenizers = import_package('tokenizers')
        self.tokenizer = tokenizers.Tokenizer.from_str(state['json'])
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocab = self.tokenizer.get_vocab()
        pre_tokenizer = self.tokenizer.pre_tokenizer
        if isinstance(pre_tokenizer, tokenizers.pre_tokenizers.ByteLevel) and not self.tokenizer.decoder:
            # SimpleLLaMA's bpe_8k.json: its authors set these two after loading it
            self.tokenizer.decoder = tokenizers.decoders.ByteLevel()
            if '<UNK>' in vocab:
                self.tokenizer.model.unk_token = '<UNK>'
            state = {**state, 'json': self.tokenizer.to_str()}
        added = self.tokenizer.get_added_tokens_decoder()  # {id: AddedToken}
        special = {token.content: id for id, token in added.items() if token.special}
        super().__init__(state, self.text_pieces_of(vocab, added, special), special)

        self.config = {}  # of tokenizer_config.json
        if state.get('config'):
            self.config = json.loads(state['config'])
        else:
            for role, names in SPECIAL_NAMES.items():
                found = [name for name in names if name in special]
                if found:
                    self.config[role] = found[0]
        bos = self.id_in_config('bos_token')
        eos = self.id_in_config('eos_token')
        if bos is not None:
            self.end_of_text = bos
        elif eos is not None:
            self.end_of_text = eos
        # a text ends with its authors' tokens, and where the next document of our datasets would begin
        ends = [eos, self.end_of_text, *state.get('stop_ids', [])]
        self.stop_ids = [id for id in dict.fromkeys(ends) if id is not None]

    def text_pieces_of(self, vocab, added, special):
        """Return {id: bytes} of all tokens in `vocab`, {token: id}, but the special ones."""
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        is_byte_level = 'ByteLevel' in str(self.tokenizer.decoder)  # tokens have a character for each byte
        pieces = {}
        for token, id in vocab.items():
            if token in special:
                continue
            if is_byte_level and id not in added and all(letter in byte_of for letter in token):
                pieces[id] = bytes(byte_of[letter] for letter in token)
            elif re.fullmatch('<0x[0-9A-F]{2}>', token):  # sentencepiece's byte that is no character
                pieces[id] = bytes.fromhex(token[3:5])
            else:  # with sentencepiece's mark for a space
                pieces[id] = token.replace('\u2581', ' ').encode('utf-8', 'surrogatepass')
        return pieces

    def id_in_config(self, name):
        """Return the id of the special token that the config names, such as 'bos_token', or None."""
        token = self.config.get(name)
        if isinstance(token, dict):
            token = token['content']
        return self.special.get(token)

    def encode(self, text):
        return np.array(self.encode_with(text, is_prompt=False).ids, dtype=np.uint32)

    def encode_prompt(self, text):
        encoding = self.encode_with(text, is_prompt=True)
        # Keep what its template puts first, such as Llama's <s>, and drop what it puts last, such as </s>,
        # which would end the text. Tokens of the template belong to no sequence
        ids = encoding.ids
        while len(ids) > 1 and encoding.sequence_ids[len(ids) - 1] is None:
            ids.pop()
        if ids[:2] == [self.end_of_text] * 2:  # the text itself begins with it
            return ids[1:]
        return ids

    def encode_with(self, text, is_prompt):
        self.tokenizer.encode_special_tokens = not is_prompt  # True: as text
        try:
            text = without_surrogates(text)
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=is_prompt)[0]
        except Exception as e:  # the package raises Exception itself
            name = self._state.get('name', 'tokenizer.json')
            raise InputError(f"the tokenizer {name} cannot encode the text: {first_line(e)}") from e

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def hugging_face_state(path):
    """Return the state of a Hugging Face tokenizer.

    path: a tokenizer.json (of any name), or the folder that has one. These files of the folder are read as
    well: tokenizer_config.json; generation_config.json, whose eos_token_id end a text; config.json, which has
    the size of the model's embedding.
    """
    path = os.path.abspath(path)
    file = os.path.join(path, 'tokenizer.json') if os.path.isdir(path) else path
    if not os.path.exists(file):
        raise InputError(f"no tokenizer.json: {path}. docs/huggingface.md shows how to make one from "
                         "sentencepiece's tokenizer.model, or from vocab.json and merges.txt.")
    state = {'kind': 'hf', 'name': os.path.basename(path), 'json': read_utf8(file)}
    folder = os.path.dirname(file)
    config_file = os.path.join(folder, 'tokenizer_config.json')
    if os.path.exists(config_file):
        state['config'] = read_utf8(config_file)
    stop_ids = read_json(os.path.join(folder, 'generation_config.json')).get('eos_token_id')
    if stop_ids is not None:
        state['stop_ids'] = stop_ids if isinstance(stop_ids, list) else [stop_ids]

    # a special token that was added after training, often [PAD], may have no row in the model's embedding
    n_rows = read_json(os.path.join(folder, 'config.json')).get('vocab_size')
    content = read_json(file)
    if n_rows:
        for token in list(content.get('added_tokens', [])):
            if token['special'] and token['id'] >= n_rows:
                content['added_tokens'].remove(token)
                vocab = content['model']['vocab']
                if isinstance(vocab, dict):  # Unigram's is a list without them
                    vocab.pop(token['content'], None)
        state['json'] = json.dumps(content, ensure_ascii=False)
    return state


def read_utf8(path):
    """Return the text of a file, without a byte order mark."""
    try:
        check_not_lfs_pointer(path)
        with open(path, encoding='utf-8-sig') as f:
            return f.read()
    except (OSError, UnicodeError) as e:
        raise InputError(f"{path} cannot be read: {first_line(e)}. Download or save it again.") from e


# -----------------------------------------------------------------------------
# any of them, from its state

KINDS = {'byte': ByteTokenizer, 'char': CharTokenizer, 'ids': NumberTokenizer, 'tiktoken': TiktokenTokenizer,
         'hf': HFTokenizer}


def make_tokenizer(state):
    """Return the tokenizer of a state()."""
    try:
        return KINDS[state['kind']](state)
    except InputError:
        raise
    except Exception as e:  # a state comes from a file, and each package has its own errors
        raise InputError(f"the tokenizer {str(state)[:60]} cannot be made: {type(e).__name__}, "
                         f"{first_line(e)}. Use char, byte, bpe:8192, a tokenizer.json, or an encoding of "
                         "tiktoken's, such as gpt2, which is downloaded once (docs/data.md).") from e


def token_bytes(state, vocab_size):
    """Return the bytes of text per id, (vocab_size,) int64; 0 for special tokens.

    All are 0 if unknown: the ids are no text, or tiktoken has to know the merges, perhaps from the network.
    """
    lengths = np.zeros(vocab_size, dtype=np.int64)
    if state['kind'] != 'ids' and not is_only_named(state):
        known = make_tokenizer(state).token_bytes()[:vocab_size]
        lengths[:len(known)] = known
    return lengths


def same_tokenizer(a, b):
    """Return whether two states have the same vocabulary.

    A state that is None is unknown, and matches any. Special tokens may be missing in one of them.
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
# the files of a dataset with what is too long for its meta.json

# by their keys in a state
TOKENIZER_FILES = {'ranks': 'tokenizer.tiktoken', 'json': 'tokenizer.json', 'config': 'tokenizer_config.json'}


def write_tokenizer_files(folder, tokenizer, dtype):
    """Write a tokenizer's files into `folder`. Return what meta.json says of it.

    dtype: numpy's, in which the ids are stored.
    """
    state = tokenizer.state()
    checksums = {}
    for key, file in TOKENIZER_FILES.items():
        content = state.pop(key, None)
        if content:
            if isinstance(content, str):
                content = content.encode()
            write_whole(os.path.join(folder, file), content)
            state[f'{key}_file'] = file
            checksums[file] = hashlib.sha256(content).hexdigest()
    return {'tokenizer': state, 'vocab_size': tokenizer.n_vocab, 'end_of_text': tokenizer.end_of_text,
            'dtype': np.dtype(dtype).name, 'checksums': checksums}


def read_tokenizer_files(folder, meta):
    """Return the state of the tokenizer in a meta.json, with the contents of its files in `folder`.

    The state is all that a checkpoint needs to be sampled without the dataset.
    """
    state = dict(meta['tokenizer'])
    for key, file in TOKENIZER_FILES.items():
        if not state.pop(f'{key}_file', None):
            continue
        path = os.path.join(folder, file)
        try:
            with open(path, 'rb') as f:
                content = f.read()
            state[key] = content if key == 'ranks' else content.decode('utf-8-sig')
        except (OSError, UnicodeError) as e:
            raise InputError(f"{path} cannot be read: {first_line(e)}. Run prepare.py again with "
                             "--overwrite.") from e
        checksum = hashlib.sha256(content).hexdigest()
        if meta.get('checksums', {}).get(file, checksum) != checksum:
            raise InputError(f"{path} has changed since meta.json was written. Run prepare.py again with "
                             "--overwrite.")
    return state
