"""The tokenizer that --tokenizer names or, if it names none, one that fits the size of the text."""

import base64
import os

from configurator import fail
from support.dataset_meta import bin_files, read_meta, read_tokenizer_state
from support.encode_text import after_letter, are_ids, cut_up
from support.hf_tokenizer import bytes_to_unicode, oniguruma
from support.huggingface import read_tokenizer
from support.tokenizer import END_OF_TEXT, PATTERN, make_tokenizer

# bytes of text from which on each is taken, and why; bytes per token were measured on English books
BY_SIZE = (
    (0, 'byte', "of a small text only bytes occur often enough to be learned"),
    (500_000, 'bpe:512', "enough to learn frequent syllables, about 2.2 bytes per token"),
    (3_000_000, 'bpe:2048', "enough to learn frequent words, about 3 bytes per token"),
    (30_000_000, 'bpe:8192', "enough to learn most words"),
    (300_000_000, 'gpt2', "enough for each of its 50,257 tokens to occur often"),
)
PACKED = {'gz': 3, 'zst': 3, 'parquet': 2, 'epub': 2}  # bytes of text in a byte of such a file, about
SAMPLE = 1 << 26  # characters to learn from


def choose_tokenizer(name, files, documents):
    """The tokenizer `name` (None: by size) for the documents(files), as read_text has them."""
    name = name or ('gpt2' if are_ids(files) else by_size(files))
    if name == 'char':  # a first pass over the text, to see which characters occur
        chars = set()
        for _, _, pieces in documents(files):
            chars.update(*pieces)
        return make_tokenizer({'kind': 'char', 'chars': ''.join(sorted(chars))})
    if name.startswith('bpe:'):
        n_vocab = int(name[4:]) if name[4:].isdecimal() else 0
        if not 257 <= n_vocab < 10**7:
            fail(f"no such size of a vocabulary ({name}). use 257 or more, as --tokenizer=bpe:8192")
        print(f"learning {n_vocab} tokens", flush=True)
        return learn_bpe(n_vocab, sample(documents, files))
    if name.startswith('hf:') or '/' in name or name.endswith(('.json', '.pt')):
        tokenizer = make_tokenizer(state_at(name.removeprefix('hf:')))
        text = next(sample(documents, files), '') if files and 'json' in tokenizer.state() else ''
        if lost := {*text} - {*tokenizer.decode(tokenizer.encode(text).tolist())}:
            print(f"note: this tokenizer loses characters of the text: {sorted(lost)}"[:150])
        return tokenizer
    return make_tokenizer({'kind': 'byte'} if name == 'byte' else {'kind': 'tiktoken', 'name': name})


def state_at(source):
    """The state of the tokenizer in a checkpoint, a dataset's folder, a .json file, or a Hugging Face folder
    or name."""
    if source.endswith('.pt'):
        from support.load import find, read  # only now: with torch
        return read(find(source, hub=False)).get('tokenizer') or fail(
            f"{source} does not tell its tokenizer, as nanoGPT's. name its dataset: --tokenizer=data/NAME")
    if os.path.exists(os.path.join(source, 'meta.json')) or bin_files(source, 'train'):
        return read_tokenizer_state(source, read_meta(source))
    return read_tokenizer(source)


def by_size(files):
    """The name of the tokenizer for that much text, told with the reason."""
    size = sum(file.size * PACKED.get(file.path.lower().rpartition('.')[2], 1) for file in files)
    _, name, why = [row for row in BY_SIZE if size >= row[0]][-1]
    print(f"tokenizer {name}, by the files' {size / 1e6:,.2f} MB, packed ones estimated: {why}. another: "
          "--tokenizer=char, byte, bpe:1024, gpt2, ...")
    return name


def learn_bpe(n_vocab, texts):
    """A byte-level BPE of n_vocab ids, <|endoftext|> the last of them, learned from `texts` by the tokenizers
    package. It is used through tiktoken, which is three times as fast."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(oniguruma(PATTERN)), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=n_vocab - 1, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    learned = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes([b]) for b in range(256)]
    tokens += [bytes(byte_of[letter] for letter in token) for token, _ in learned if len(token) > 1]
    ranks = b''.join(base64.b64encode(token) + b' %d\n' % rank for rank, token in enumerate(tokens))
    return make_tokenizer({'kind': 'tiktoken', 'name': f'bpe:{n_vocab}', 'pat_str': PATTERN,
                           'special_tokens': {END_OF_TEXT: len(tokens)}, 'ranks': ranks})


def sample(documents, files):
    """Texts to learn from: all if there is little, else the beginnings of about 64 files; of the Hub's
    files only the first."""
    step = len(files) if files[0].repo else -(-len(files) // 64)
    for file in files[::step]:
        left = SAMPLE // len(files[::step])
        for text in (text for _, _, pieces in documents([file]) for text in cut_up(pieces, after_letter)):
            for i in range(0, min(len(text), left), 65536):  # longer ones take much memory
                yield text[i:i + 65536]
            left -= len(text)
            if left <= 0:
                break
