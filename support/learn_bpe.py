"""A tokenizer of one's own: a byte-level BPE, learned from the text."""

import base64

from configurator import fail
from support.encode_text import after_letter, cut_up
from support.hf_export_tokenizer import oniguruma
from support.hf_tokenizer import bytes_to_unicode
from support.tokenizer import END_OF_TEXT, make_tokenizer

SAMPLE = 1 << 26  # characters to learn from
# GPT-4's, which tiktoken calls cl100k_base
PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
           r"\s*[\r\n]|\s+(?!\S)|\s")


def learn_bpe(n_vocab, texts):
    """A tokenizer of n_vocab ids, <|endoftext|> the last of them, learned from `texts` by the tokenizers
    package. It is used through tiktoken, which is three times as fast."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        fail("to learn a tokenizer a package is needed that is not installed (tokenizers). "
             "pip install tokenizers")
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(oniguruma(PATTERN)), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=n_vocab - 1, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    learned = {id: bytes(byte_of[letter] for letter in token) for token, id in learner.get_vocab().items()}
    tokens = [bytes([b]) for b in range(256)]
    tokens += [learned[id] for id in sorted(learned) if len(learned[id]) > 1]
    if len(tokens) < n_vocab - 1:
        print(f"note: the text is enough for {len(tokens) + 1:,} ids, not for {n_vocab:,}")
    ranks = b''.join(base64.b64encode(token) + b' %d\n' % rank for rank, token in enumerate(tokens))
    return make_tokenizer({'kind': 'tiktoken', 'name': f'bpe:{n_vocab}', 'pat_str': PATTERN,
                           'special_tokens': {END_OF_TEXT: len(tokens)}, 'ranks': ranks})


def sample(documents, files):
    """Texts to learn from: all if there is little, else the beginnings of about 64 files; of the Hub's
    files only the first. documents(files) are those of read_text."""
    if any(file.repo for file in files):
        files = files[:1]
    else:
        files = files[::-(-len(files) // 64)]
    for file in files:
        left = SAMPLE // len(files)
        for text in texts_of(documents([file])):
            for i in range(0, min(len(text), left), 65536):  # longer ones take much memory
                yield text[i:i + 65536]
            left -= len(text)
            if left <= 0:
                break


def texts_of(documents):
    for _, _, pieces, _ in documents:
        yield from cut_up(pieces, after_letter)
