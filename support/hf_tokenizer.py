"""A Hugging Face tokenizer.json, read by the `tokenizers` package, and the alphabet that such files use."""

import json
import re

import numpy as np

END_OF_TEXT = '<|endoftext|>'
# a text with a bit of everything, to see what a tokenizer makes of it
PROBE = ("Don't panic: 1234567 items, 3.14 and 50%!\n\n\tdef f(x_1):\n        return  x**2  # caf\u00e9 "
         "na\u00efve \u00dcber\n\u6771\u4eac \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f600 'tis WE'LL "
         "they've   spaces \r\n end. ")
# names that tokenizers give to what begins and ends a text
BEGIN = r'<\|?(begin_?of_?text|bos|sos|start|s|BOS|SOS)\|?>|\[(BOS|SOS)\]'
UNKNOWN = ('<unk>', '<UNK>', '[UNK]')
END = r'<\|?(end_?of_?text|eos|eot|end|/s|EOS|EOT)\|?>|</s>|\[(EOS|EOT)\]'


def text_of_token(token):
    """A token as Hugging Face's files have it: a string, or a dict with the string and more; else None."""
    token = token.get('content') if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


class HFTokenizer:
    """See support/tokenizer.py for what a tokenizer has. Before each document stands its
    beginning-of-sequence token or, if it has none, its end-of-sequence token."""

    def __init__(self, state):
        import tokenizers
        self._state = state
        self.tokenizer = tokenizers.Tokenizer.from_str(state['json'])
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocab = self.tokenizer.get_vocab()
        pieces_are_bytes = isinstance(self.tokenizer.pre_tokenizer, tokenizers.pre_tokenizers.ByteLevel)
        if pieces_are_bytes and not self.tokenizer.decoder:
            # SimpleLLaMA's authors set both only once they had loaded the file
            self.tokenizer.decoder = tokenizers.decoders.ByteLevel()
            self.tokenizer.model.unk_token = next((name for name in UNKNOWN if name in self.vocab), None)
            self._state = {**state, 'json': self.tokenizer.to_str()}
        self.n_vocab = max(self.vocab.values(), default=0) + 1
        self.added = self.tokenizer.get_added_tokens_decoder()
        self.config = json.loads(state.get('config') or '{}')
        eos = self.id_of(self.config.get('eos_token'))
        found = [self.id_of(self.config.get('bos_token')), eos, self.id_of(END_OF_TEXT)]
        self.end_of_text = next((id for id in found if id is not None), None)
        # what its authors ended a text with, and what stands before the next one in our datasets
        self.stop_ids = [id for id in dict.fromkeys((eos, self.end_of_text)) if id is not None] or None
        self.split_at = 'words' if self.splits_at_words() else 'nowhere'

    def id_of(self, token):
        """The id of a special token as tokenizer_config.json names it; None if there is none, or if it is
        part of the text, as the character that our exports name."""
        id = self.vocab.get(text_of_token(token))
        return None if id in self.added and not self.added[id].special else id

    def splits_at_words(self):
        """Whether the ids of a text's pieces are the ids of the text. sentencepiece's, for one, put a space
        before whatever they are given."""
        pieces = re.split(r'(?<=[^\W\d_])(?=[ \n\r\t])', PROBE)
        try:
            return np.array_equal(np.concatenate([*map(self.encode, pieces)]), self.encode(PROBE))
        except ValueError:
            return False

    def encode(self, text):
        return np.array(self.ids(text, corpus=True), dtype=np.uint32)

    def encode_prompt(self, text):
        ids = self.ids(text, corpus=False)  # with what its authors put first: Llama's <s>
        return ids[1:] if ids[:2] == [self.end_of_text] * 2 else ids

    def ids(self, text, corpus):
        if self.tokenizer.encode_special_tokens != corpus:  # nothing is special in a corpus
            self.tokenizer.encode_special_tokens = corpus
        try:
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=not corpus)[0].ids
        except Exception as e:  # the package raises Exception itself
            raise ValueError(f"the tokenizer {self._state['name']} cannot encode the text ({e})")

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def token_bytes(self):
        lengths = np.zeros(self.n_vocab, dtype=np.int64)
        byte_level = 'ByteLevel' in str(self.tokenizer.decoder)
        for token, id in self.vocab.items():
            added = self.added.get(id)
            if byte_level and not added:  # these vocabularies write a character per byte
                lengths[id] = len(token)
            elif not added or not added.special:
                # sentencepiece writes a mark for a space, and odd bytes in their own way
                text = re.sub('^<0x[0-9A-F]{2}>$', ' ', token.replace('\u2581', ' '))
                lengths[id] = len(text.encode('utf-8', 'surrogatepass'))
        return lengths

    def state(self):
        return dict(self._state)


def guess_special(added):
    """What a tokenizer_config.json would say of the added tokens of a tokenizer.json: {'bos_token': ...}."""
    names = [text_of_token(token) or '' for token in added]
    found = {}
    for key, pattern in (('bos_token', BEGIN), ('eos_token', END)):
        found |= {key: name for name in reversed(names) if re.fullmatch(pattern, name)}
    return found


def bytes_to_unicode():
    """A printable character for each byte, as GPT-2's vocabulary writes them (the name is that of OpenAI's
    encoder.py): bytes that are printable stand for themselves, the others are counted on from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return dict(zip(printable + others, map(chr, [*printable, *range(256, 256 + len(others))])))


def oniguruma(pattern):
    """A regular expression of tiktoken's for the package `tokenizers`, in whose dialect {1,3}+ repeats (it is
    not possessive) and $ is the end of a line."""
    return re.sub(r'(\{\d+(?:,\d*)?\})\+', r'\1', pattern).replace('$', r'\z')
