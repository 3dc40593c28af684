"""
Tokenizers: characters, bytes, those of tiktoken, a BPE learned from a text of one's own, Hugging Face's, and
ids that are plain numbers. Each of them has

    n_vocab              number of ids
    end_of_text          the id that stands before each document, or None
    stop_ids             ids that end a text when they are generated, a list
    special              {token: id} of the special tokens
    encode(text)         the ids, an array. Nothing in the text is special: <|endoftext|> is 13 characters
    encode_prompt(text)  the ids as a list, in which special tokens are themselves
    decode(ids)          the text
    count_lost(text, ids)
                         how many characters of the text its ids do not bring back
    token_bytes()        bytes of text per id, (n_vocab,) int64; 0 for special tokens
    state()              a dict of plain types, from which make_tokenizer() makes the same tokenizer

What cannot be read, made or encoded is a ValueError of one line.
"""

import base64
import collections
import hashlib
import json
import os
import re
import unicodedata

import numpy as np

from configurator import InputError
from files import check_not_lfs_pointer, first_line, read_json, write_whole


END_OF_TEXT = '<|endoftext|>'
ASSISTANT_END = '<|assistant_end|>'  # ends an answer, and so a generated text; see chat.py
GPT2_STATE = {'kind': 'tiktoken', 'name': 'gpt2'}  # for make_tokenizer(): it is only named
# the split pattern of GPT-4's tokenizer (tiktoken's cl100k_base), also that of a learned BPE
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
           r"\s*[\r\n]|\s+(?!\S)|\s")
# a text with a bit of everything: what two tokenizers make of it tells whether they are the same
SAMPLE_TEXT = ("Don't panic: 1234567 items, 3.14 and 50%!\n\n\tdef f(x_1):\n        return  x**2  "
               "# caf\u00e9 na\u00efve \u00dcber\n\u6771\u4eac \u043f\u0440\u0438\u0432\u0435\u0442 "
               "\U0001f600 'tis WE'LL they've   spaces \r\n end. ")


# -----------------------------------------------------------------------------
# tokenizers whose ids stand for bytes each


class PieceTokenizer:
    """What characters, bytes and tiktoken's BPEs have in common: each id stands for some bytes."""

    def __init__(self, state, pieces, special):
        """pieces: {id: bytes} of the ids of text; special: {token: id}."""
        self._state = state
        self.text_pieces = pieces
        self.special = special
        self.pieces = dict(pieces)
        for token, id in special.items():
            self.pieces[id] = token.encode()
        self.n_vocab = max(self.pieces) + 1
        # <|bos|> is nanochat's name for what stands before each document
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
        # an id may have no meaning: o200k_base leaves some out, and a vocabulary is padded
        content = b''.join(self.pieces.get(id, b'') for id in ids)
        return content.decode('utf-8', 'replace')

    def count_lost(self, text, ids):
        return 0

    def token_bytes(self):
        lengths = np.zeros(self.n_vocab, dtype=np.int64)
        for id, piece in self.text_pieces.items():
            lengths[id] = len(piece)
        return lengths

    def state(self):
        return dict(self._state)


class ByteTokenizer(PieceTokenizer):
    """The UTF-8 bytes of the text; id 256 stands before each document."""

    def __init__(self, state):
        pieces = {byte: bytes([byte]) for byte in range(256)}
        tokens = [END_OF_TEXT, *state.get('added', [])]
        special = {token: id for id, token in enumerate(tokens, start=256)}
        super().__init__(state, pieces, special)

    def encode(self, text):
        return np.frombuffer(text.encode('utf-8', 'replace'), dtype=np.uint8)


class CharTokenizer(PieceTokenizer):
    """One id per character that occurs in the text, in sorted order, as in nanoGPT's shakespeare_char."""

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
            raise InputError(self.describe_unknown(text, e.args[0]))

    def describe_unknown(self, text, char):
        """Return what is wrong with a character of `text` that has no id."""
        described = f"the character {char!r} (U+{ord(char):04X}) is not in the vocabulary"
        # an umlaut is one character, or a letter and a mark; the two look alike
        first = text.index(char)
        other_forms = [
            unicodedata.normalize('NFD', char),
            unicodedata.normalize('NFC', text[max(0, first - 1):first + 1]),  # it is the mark
            unicodedata.normalize('NFC', text[first:first + 2]),  # it is the letter
        ]
        for form in other_forms:
            if all(c in self.id_of for c in form):
                codes = ' '.join(f'U+{ord(c):04X}' for c in form)
                described += f"; but {form!r} ({codes}), which looks the same, is. Write that"
        return described


class NumberTokenizer(PieceTokenizer):
    """For ids that are no text: notes, moves, genes. They are written as numbers."""

    def __init__(self, state):
        super().__init__(state, {id: b'' for id in range(state['n_vocab'])}, {})

    def encode(self, text):
        ids = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.n_vocab:
                raise InputError(f"texts of this dataset are numbers below {self.n_vocab} ({word[:50]!r})")
            ids.append(int(word))
        return np.array(ids, dtype=np.uint32)

    def decode(self, ids):
        return ' '.join(str(id) for id in ids)


class TiktokenTokenizer(PieceTokenizer):
    """GPT-2's BPE and the other encodings of the tiktoken package, and a learned BPE."""

    def __init__(self, state):
        import tiktoken
        if is_only_named(state):
            named = tiktoken.get_encoding(state['name'])  # from tiktoken's cache or the network
            # tiktoken's own page says to take these from an encoding in order to extend it
            state = {**state, 'pat_str': named._pat_str, 'special_tokens': named._special_tokens,
                     'ranks': format_ranks(named._mergeable_ranks)}
        ranks = parse_ranks(state['ranks'])
        # tiktoken would not raise for these, but abort in the middle of a text
        has_all_bytes = all(bytes([byte]) in ranks for byte in range(256))
        if not has_all_bytes or len(set(ranks.values())) < len(ranks):
            raise InputError("a byte has no token, or two tokens have the same id")
        self.encoding = tiktoken.Encoding(state['name'], pat_str=state['pat_str'], mergeable_ranks=ranks,
                                          special_tokens=state['special_tokens'])
        super().__init__(state, {rank: token for token, rank in ranks.items()}, state['special_tokens'])

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


def parse_ranks(content):
    """{token, as bytes: id} of a file of tiktoken's: a line for each, the token in base64 and the id."""
    ranks = {}
    for line in content.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return ranks


def format_ranks(ranks):
    """The content of such a file, bytes."""
    return b''.join(base64.b64encode(token) + b' %d\n' % rank for token, rank in ranks.items())


def without_surrogates(text):
    """`text` with U+FFFD for each half of a surrogate pair, as JSON may hold one: no UTF-8 has it."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


# -----------------------------------------------------------------------------
# Hugging Face's


class HFTokenizer:
    """A tokenizer.json, read by the `tokenizers` package. Before each document stands its
    beginning-of-sequence token or, if it has none, its end-of-sequence token. A tokenizer_config.json tells
    which these are; without one, their names do."""

    def __init__(self, state):
        import tokenizers
        self._state = state
        self.tokenizer = tokenizers.Tokenizer.from_str(state['json'])
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocab = self.tokenizer.get_vocab()
        unknown = [token for token in ('<unk>', '<UNK>', '[UNK]') if token in self.vocab]
        self.unknown_ids = [self.vocab[token] for token in unknown]
        is_byte_level = isinstance(self.tokenizer.pre_tokenizer, tokenizers.pre_tokenizers.ByteLevel)
        if is_byte_level and not self.tokenizer.decoder:
            # a file of Tokenizer.save(), whose authors set these two once they have loaded it (SimpleLLaMA)
            self.tokenizer.decoder = tokenizers.decoders.ByteLevel()
            if unknown:
                self.tokenizer.model.unk_token = unknown[0]
            self._state = {**state, 'json': self.tokenizer.to_str()}
        self.n_vocab = max(self.vocab.values(), default=0) + 1
        self.added = self.tokenizer.get_added_tokens_decoder()  # {id: AddedToken}
        self.special = {token.content: id for id, token in self.added.items() if token.special}

        if state.get('config'):
            self.config = json.loads(state['config'])  # tokenizer_config.json
        else:
            self.config = guess_config(self.special)
        eos = self.id_in_config('eos_token')
        self.end_of_text = self.id_in_config('bos_token')
        if self.end_of_text is None:
            self.end_of_text = eos if eos is not None else self.special.get(END_OF_TEXT)
        # what its authors end a text with, and what stands before the next one in our datasets
        ends = [eos, self.end_of_text, *state.get('stop_ids', [])]
        self.stop_ids = [id for id in dict.fromkeys(ends) if id is not None]

    def id_in_config(self, name):
        """The id of the special token that the config names, such as 'bos_token'; None without one."""
        token = self.config.get(name)
        if isinstance(token, dict):
            token = token['content']
        return self.special.get(token)

    def encode(self, text):
        return np.array(self.encode_with(text, is_prompt=False).ids, dtype=np.uint32)

    def encode_prompt(self, text):
        encoding = self.encode_with(text, is_prompt=True)
        # keep what its template puts first, such as Llama's <s>; what it puts last, such as </s>, would end
        # the text. Tokens of the template belong to no sequence
        ids = encoding.ids
        while len(ids) > 1 and encoding.sequence_ids[len(ids) - 1] is None:
            ids.pop()
        if ids[:2] == [self.end_of_text] * 2:  # the text begins with it already
            return ids[1:]
        return ids

    def encode_with(self, text, is_prompt):
        self.tokenizer.encode_special_tokens = not is_prompt  # as text
        try:
            text = without_surrogates(text)
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=is_prompt)[0]
        except Exception as e:  # the package raises Exception itself
            name = self._state.get('name', 'tokenizer.json')
            raise InputError(f"the tokenizer {name} cannot encode the text ({first_line(e)})")

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def count_lost(self, text, ids):
        known = ids[~np.isin(ids, self.unknown_ids)]
        lost = collections.Counter(text) - collections.Counter(self.decode(known.tolist()))
        return lost.total()

    def token_bytes(self):
        lengths = np.zeros(self.n_vocab, dtype=np.int64)
        is_byte_level = 'ByteLevel' in str(self.tokenizer.decoder)  # it writes a character for each byte
        for token, id in self.vocab.items():
            if token in self.special:
                continue
            if is_byte_level and id not in self.added:
                lengths[id] = len(token)
            elif re.fullmatch('<0x[0-9A-F]{2}>', token):  # sentencepiece's byte that is no character
                lengths[id] = 1
            else:  # with sentencepiece's mark for a space
                lengths[id] = len(token.replace('\u2581', ' ').encode('utf-8', 'surrogatepass'))
        return lengths

    def state(self):
        return dict(self._state)


def hugging_face_state(path):
    """Return the state of a Hugging Face tokenizer. path: a tokenizer.json (of any name), or the folder that
    has one. Its folder may also have a tokenizer_config.json and, of its model, a generation_config.json,
    whose eos_token_id end a text, too, and a config.json, which has the size of the embedding."""
    path = os.path.abspath(path)
    file = os.path.join(path, 'tokenizer.json') if os.path.isdir(path) else path
    if not os.path.exists(file) or file.endswith(('.model', 'vocab.json')):
        raise InputError(f"no tokenizer.json ({path}). name one or a folder that has one. of sentencepiece's "
                         "tokenizer.model, or vocab.json with merges.txt, docs/huggingface.md makes one")
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
    if n_rows and remove_special_tokens(content, n_rows):
        state['json'] = json.dumps(content, ensure_ascii=False)
    return state


def remove_special_tokens(content, n_rows):
    """Remove the special tokens with ids from n_rows on from a tokenizer.json, a dict. Return how many."""
    removed = []
    for token in content.get('added_tokens', []):
        if token['special'] and token['id'] >= n_rows:
            removed.append(token)
    for token in removed:
        content['added_tokens'].remove(token)
        vocab = content['model']['vocab']
        if isinstance(vocab, dict):  # Unigram's is a list without them
            vocab.pop(token['content'], None)
    return len(removed)


def read_utf8(path):
    """The text of a file, without a byte order mark."""
    try:
        check_not_lfs_pointer(path)
        with open(path, encoding='utf-8-sig') as f:
            return f.read()
    except (OSError, UnicodeError) as e:
        raise InputError(f"{path} cannot be read ({first_line(e)}). download or save it again")


def guess_config(tokens):
    """What a tokenizer_config.json would say of special tokens with these names, a dict."""
    found = {}
    for token in tokens:
        word = token.lower().strip('<|>[]')
        if word in ('s', 'bos', 'sos', 'start', 'begin_of_text', 'beginoftext'):
            found.setdefault('bos_token', token)
        if word in ('/s', 'eos', 'eot', 'end', 'end_of_text', 'endoftext'):
            found.setdefault('eos_token', token)
    return found


def bytes_to_unicode():
    """{byte: character}: how GPT-2's vocabulary writes bytes (the name is that of OpenAI's encoder.py).
    Printable ones stand for themselves, the others are counted on from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(printable))
    return letters


def pre_tokenizer_of(pattern):
    """What splits a text by a regular expression of tiktoken's, and then into bytes, for the `tokenizers`
    package. In its dialect {1,3}+ repeats (it is not possessive) and $ is the end of a line."""
    from tokenizers import Regex, pre_tokenizers
    pattern = re.sub(r'(\{\d+(?:,\d*)?\})\+', r'\1', pattern).replace('$', r'\z')
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


# -----------------------------------------------------------------------------
# making one

KINDS = {'byte': ByteTokenizer, 'char': CharTokenizer, 'ids': NumberTokenizer, 'tiktoken': TiktokenTokenizer,
         'hf': HFTokenizer}


def make_tokenizer(state):
    """The tokenizer of a state(), or of an encoding of tiktoken's that is only named, such as GPT2_STATE."""
    try:
        return KINDS[state['kind']](state)
    except ImportError as e:
        raise InputError(f"the tokenizer {str(state)[:60]} needs a package that is not installed: {e.name}. "
                         f"Install it: pip install {e.name}")
    except Exception as e:  # a state comes from a file, and each package has errors of its own
        remedy = "make its dataset or save its tokenizer.json again"
        if state and is_only_named(state):
            remedy = ("use char, byte, bpe:8192, a tokenizer.json, or one of tiktoken's, as gpt2 and "
                      "o200k_base, which are downloaded once. without network here, bring FOLDER from a "
                      "machine that has it: TIKTOKEN_CACHE_DIR=FOLDER python -c \"import tiktoken; "
                      f"tiktoken.get_encoding('{state.get('name')}')\"")
        raise InputError(f"the tokenizer {str(state)[:60]} cannot be made ({type(e).__name__}: "
                         f"{first_line(e)}). {remedy}")


def is_only_named(state):
    """Whether it takes tiktoken, and perhaps the network, to know the merges of a state."""
    return state.get('kind') == 'tiktoken' and 'ranks' not in state


def learn_bpe(n_vocab, texts):
    """A byte-level BPE of n_vocab ids, the last of which is <|endoftext|>, learned from `texts` by the
    `tokenizers` package. It is used through tiktoken, which is three times as fast."""
    if not 257 <= n_vocab <= 1_000_000:
        raise InputError(f"the size of the vocabulary is out of range: bpe:{n_vocab}. Use 257 to 1000000, as "
                         "in bpe:8192")
    from tokenizers import Tokenizer, models, trainers
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizer_of(PATTERN)
    trainer = trainers.BpeTrainer(vocab_size=n_vocab - 1, show_progress=False, initial_alphabet=list(byte_of))
    learner.train_from_iterator(texts, trainer)

    # in tiktoken's files the bytes come first, in their order; then what was merged, the earliest first
    vocab = learner.get_vocab()
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in sorted(vocab, key=vocab.get):
        if len(token) > 1:
            ranks[bytes(byte_of[letter] for letter in token)] = len(ranks)
    return make_tokenizer({'kind': 'tiktoken', 'name': f'bpe:{n_vocab}', 'pat_str': PATTERN,
                           'special_tokens': {END_OF_TEXT: len(ranks)}, 'ranks': format_ranks(ranks)})


# -----------------------------------------------------------------------------
# questions


def token_bytes(state, vocab_size):
    """Bytes of text per token id, (vocab_size,) int64; 0 for special tokens. All 0 where it is unknown: the
    ids are no text, or the state only names an encoding of tiktoken's, which may need the network."""
    lengths = np.zeros(vocab_size, dtype=np.int64)
    if state.get('kind') != 'ids' and not is_only_named(state):
        known = make_tokenizer(state).token_bytes()[:vocab_size]
        lengths[:len(known)] = known
    return lengths


def same_tokenizer(a, b):
    """Whether two states give the same ids. One that is unknown (None) or only named is taken at its word."""
    if a is None or b is None or a == b:
        return True
    if 'hf' not in (a['kind'], b['kind']):
        return a.get('name') == b.get('name') and (is_only_named(a) or is_only_named(b))
    # GPT-2's vocabulary, say, once from tiktoken and once as tokenizer.json
    text = a.get('chars') or b.get('chars') or SAMPLE_TEXT
    try:
        return np.array_equal(make_tokenizer(a).encode(text), make_tokenizer(b).encode(text))
    except ValueError:  # a character that one of them lacks
        return False


# -----------------------------------------------------------------------------
# files: what is too long for a dataset's meta.json

# by their key in a tokenizer's state
TOKENIZER_FILES = {'ranks': 'tokenizer.tiktoken', 'json': 'tokenizer.json', 'config': 'tokenizer_config.json'}


def write_tokenizer_files(folder, tokenizer, dtype):
    """What meta.json says of a tokenizer whose ids are stored as `dtype` (numpy's); the rest is written to
    files in `folder`."""
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
    """The state of the tokenizer that a meta.json describes, with its files from `folder`: all that a
    checkpoint needs to be sampled without the dataset. ValueError if one is damaged or missing."""
    state = dict(meta['tokenizer'])
    for key, file in TOKENIZER_FILES.items():
        if not state.pop(f'{key}_file', None):
            continue
        path = os.path.join(folder, file)
        try:
            with open(path, 'rb') as f:
                content = f.read()
            checksum = hashlib.sha256(content).hexdigest()
            if meta.get('checksums', {}).get(file, checksum) != checksum:
                raise InputError("its checksum is not the one in meta.json")
            state[key] = content if key == 'ranks' else content.decode('utf-8-sig')
        except (OSError, ValueError) as e:
            raise InputError(f"{path} cannot be read ({first_line(e)}). run prepare.py for this dataset "
                             "again with --overwrite")
    return state
