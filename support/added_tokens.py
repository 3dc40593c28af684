"""A byte or character tokenizer with special tokens at the end of its vocabulary."""

import re

import numpy as np

from support.chat_format import ASSISTANT_END


class WithAddedTokens:
    """See support/tokenizer.py for what a tokenizer has."""

    def __init__(self, base, added):
        self.base, self.added, self.split_at = base, list(added), base.split_at
        self.n_vocab = base.n_vocab + len(self.added)
        self.end_of_text = base.end_of_text
        # the end of an answer ends a text as well
        ends = [id for token, id in self.special_ids().items() if token == ASSISTANT_END]
        self.stop_ids = [*ends, *(base.stop_ids or ())] or None

    def special_ids(self):
        return {token: self.base.n_vocab + i for i, token in enumerate(self.added)}

    def encode(self, text):
        return self.base.encode(text)

    def encode_prompt(self, text):
        ids, special = [], self.special_ids()
        for part in re.split('(' + '|'.join(map(re.escape, self.added)) + ')', text):
            ids += [special[part]] if part in special else self.base.encode_prompt(part)
        return ids

    def decode(self, ids):
        parts, ordinary = [], []
        for id in ids:
            if id < self.base.n_vocab:
                ordinary.append(id)
                continue
            parts += [self.base.decode(ordinary), self.added[id - self.base.n_vocab]]
            ordinary = []
        return ''.join([*parts, self.base.decode(ordinary)])

    def token_bytes(self):
        return np.concatenate((self.base.token_bytes(), np.zeros(len(self.added), dtype=np.int64)))

    def state(self):
        return {**self.base.state(), 'added': self.added}
