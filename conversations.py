"""
Conversations: the forms in which people have them, how they become token ids with a loss mask, and how one is
held at a terminal. A conversation is a list of messages {'role': 'user', 'content': text}, whose roles are
'user', 'assistant' and, for the first one, 'system'. An answer with 'weight': 0 is not learned.

Every tokenizer gets nanochat's roles as special tokens
(https://github.com/karpathy/nanochat/blob/master/nanochat/tokenizer.py):

    <bos> <|user_start|> question <|user_end|> <|assistant_start|> answer <|assistant_end|> <|user_start|> ...

where <bos> is the token that stands before each document, or <|bos|> if there is none. There is no role for
the system: what it says stands before the first question.
"""

import bisect
import functools
import hashlib
import json
import math
import os
import re

import numpy as np

from configurator import InputError
from dataset import ORDER, Tokens, hash64, shuffled
from tokenizer import ASSISTANT_END, make_tokenizer, without_surrogates


ASSISTANT_START = '<|assistant_start|>'
ROLE_TOKENS = ('<|user_start|>', '<|user_end|>', ASSISTANT_START, ASSISTANT_END)
BOS = '<|bos|>'  # only where the tokenizer has no token of that kind
# the same as a chat template, for transformers; {bos} is filled in
TEMPLATE = (
    "{{%- if messages[0]['role'] == 'system' -%}}"
    "{{%- set system = messages[0]['content'] + '\\n\\n' -%}}{{%- set turns = messages[1:] -%}}"
    "{{%- else -%}}{{%- set system = '' -%}}{{%- set turns = messages -%}}{{%- endif -%}}"
    "{{{{- '{bos}' -}}}}"
    "{{%- for message in turns -%}}"
    "{{%- if message['role'] == 'user' -%}}"
    "{{{{- '<|user_start|>' + (system if loop.first else '') + message['content'] + '<|user_end|>' -}}}}"
    "{{%- else -%}}"
    "{{{{- '<|assistant_start|>' + message['content'] + '<|assistant_end|>' -}}}}"
    "{{%- endif -%}}"
    "{{%- endfor -%}}"
    "{{%- if add_generation_prompt -%}}{{{{- '<|assistant_start|>' -}}}}{{%- endif -%}}")


# -----------------------------------------------------------------------------
# from a row of data to messages

ROLE_OF = {'system': 'system', 'human': 'user', 'user': 'user', 'gpt': 'assistant', 'assistant': 'assistant'}
READ_KEYS = ['messages', 'conversations', 'system', 'instruction', 'input', 'output',  # of a row
             'role', 'from', 'content', 'value', 'weight']  # of a message
# a row with one of these is skipped: without its value the conversation would be another one
REFUSED_KEYS = ['history', 'tool_calls', 'function_call']


def messages_of(row):
    """Return the messages of a row of data, which has one of these forms; ValueError with the reason if it
    cannot be used.
        {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}  OpenAI
        {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}      ShareGPT
        {"instruction": "...", "input": "...", "output": "..."}                                      Alpaca
    Each may have a "system" as well. The list of messages may stand alone, as nanochat has it."""
    row, turns = parts_of(row)
    for part in [row, *turns]:
        for key in REFUSED_KEYS:
            if part.get(key):
                raise InputError(f"{key} cannot be used")
    messages = []
    if row.get('system'):
        messages.append({'role': 'system', 'content': text_of(row['system'])})
    if 'instruction' in row:
        question = text_of(row['instruction'])
        if row.get('input'):
            question += '\n\n' + text_of(row['input'])
        messages.append({'role': 'user', 'content': question})
        messages.append({'role': 'assistant', 'content': text_of(row.get('output'))})
    for turn in turns:
        role = str(turn.get('role') or turn.get('from'))
        if role not in ROLE_OF:
            raise InputError(f"a message has the role {role[:20]}")
        content = turn['content'] if 'content' in turn else turn.get('value')
        message = {'role': ROLE_OF[role], 'content': text_of(content)}
        weight = turn.get('weight')
        if weight not in (None, 0, 1):
            raise InputError("the weight of a message is not 0 or 1")
        if weight == 0:
            message['weight'] = 0
        messages.append(message)
    if not all(message['content'].strip() for message in messages):
        raise InputError("a message is empty")
    roles = ' '.join(message['role'] for message in messages)
    if not re.fullmatch('(system )?user assistant( user assistant)*', roles):
        raise InputError("user and assistant do not take turns")
    return messages


def parts_of(row):
    """Return the row as a dict, and the list of its messages as they are: [] if it has an instruction."""
    if isinstance(row, list):
        row = {'messages': row}
    turns = []
    if isinstance(row, dict) and 'instruction' not in row:
        turns = row.get('messages') or row.get('conversations')
    if not isinstance(turns, list) or not all(isinstance(part, dict) for part in [row, *turns]):
        raise InputError("none of the forms in docs/chat.md")
    return row, turns


def text_of(content):
    """Return the text of a content: a string, or a list of parts {"type": "text", "text": "..."}."""
    if isinstance(content, list):
        for part in content:
            is_text = isinstance(part, dict) and part.get('type') == 'text'
            if not is_text or not isinstance(part.get('text'), str):
                raise InputError("a part of a message is not a text")
        content = ''.join(part['text'] for part in content)
    if not isinstance(content, str):
        raise InputError("a message has no text")
    return without_surrogates(content)  # JSON can hold half of a pair


def unread_keys(row):
    """Return the keys of a row and of its messages, a set, that have a value and are not read."""
    row, turns = parts_of(row)
    found = set()
    for part in [row, *turns]:
        for key, value in part.items():
            if value and key not in READ_KEYS:
                found.add(key)
    return found


# -----------------------------------------------------------------------------
# a tokenizer with what conversations need


def with_chat_tokens(state):
    """A tokenizer's state with the roles as special tokens: new ids at the end of its vocabulary, for those
    that it has not."""
    tokenizer = make_tokenizer(state)
    wanted = ROLE_TOKENS
    if tokenizer.end_of_text is None:
        wanted = (BOS, *ROLE_TOKENS)
    new = [token for token in wanted if token not in tokenizer.special]
    if state['kind'] == 'hf':
        tokenizer.tokenizer.add_special_tokens(new)
        config = dict(tokenizer.config)
        if BOS in new:
            config['bos_token'] = BOS
        return {**state, 'json': tokenizer.tokenizer.to_str(), 'config': json.dumps(config)}
    if state['kind'] == 'tiktoken':
        special = dict(tokenizer.special)
        for i, token in enumerate(new):
            special[token] = tokenizer.n_vocab + i
        return {**tokenizer.state(), 'special_tokens': special}
    return {**state, 'added': [*state.get('added', []), *new]}


# -----------------------------------------------------------------------------
# from messages to ids


def chat_format(tokenizer):
    """The ChatFormat of a tokenizer; None if it has no roles."""
    if all(token in tokenizer.special for token in ROLE_TOKENS):
        return ChatFormat(tokenizer)
    return None


class ChatFormat:
    """How conversations become ids. A role's name in a message stays text.
        bos         the token that begins a conversation
        stop_ids    the ids that end an answer
        template    the same in Jinja, for transformers"""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.special = tokenizer.special
        ends = [self.special[ASSISTANT_END], tokenizer.end_of_text, *tokenizer.stop_ids]
        self.stop_ids = list(dict.fromkeys(ends))
        names = {id: token for token, id in self.special.items()}
        self.bos = names[tokenizer.end_of_text]
        self.template = TEMPLATE.format(bos=self.bos)

    def render(self, messages, answer=False):
        """(ids, mask), two arrays: the conversation's tokens, and which of them are learned: what the
        assistant says, and the end of its turn. answer: end with the beginning of the assistant's next
        turn."""
        if messages[0]['role'] == 'system':
            first = messages[0]['content'] + '\n\n' + messages[1]['content']
            messages = [{'role': 'user', 'content': first}, *messages[2:]]
        ids = [self.special[self.bos]]
        mask = [False]
        for message in messages:
            role = message['role']  # 'user' or 'assistant'
            content = self.tokenizer.encode(message['content']).tolist()
            ids += [self.special[f'<|{role}_start|>'], *content, self.special[f'<|{role}_end|>']]
            is_learned = role == 'assistant' and message.get('weight') != 0
            mask += [False] + [is_learned] * (len(content) + 1)
        if answer:
            ids.append(self.special[ASSISTANT_START])
            mask.append(False)
        return np.array(ids), np.array(mask)


# -----------------------------------------------------------------------------
# a conversation at a terminal


def fit_prompt(chat, messages, most):
    """(ids of the prompt for the assistant's next turn, the messages in it). So that it has at most `most`
    ids, the oldest questions are left out, and their answers. ValueError if the last one alone has more."""
    while True:
        ids = chat.render(messages, answer=True)[0].tolist()
        if len(ids) <= most:
            return ids, messages
        if len(messages) == 1:
            raise InputError(f"that is longer than what the answer leaves free ({most} tokens). a smaller "
                             "--max_new_tokens leaves more")
        messages = messages[2:]


def converse(chat, reply, most):
    """A conversation at the terminal, until Ctrl-D. reply(ids) prints the answer to a prompt while it is
    generated and returns its text; most: how many ids a prompt may have."""
    print("Ctrl-D ends")
    messages = []
    while True:
        try:
            line = input('> ').strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            continue
        asked = [*messages, {'role': 'user', 'content': line}]
        try:
            ids, kept = fit_prompt(chat, asked, most)
        except ValueError as e:
            print(f'({e})')
            continue
        if len(kept) < len(asked):
            print("(earlier messages no longer fit and are forgotten)")
        messages = [*kept, {'role': 'assistant', 'content': reply(ids)}]
        print()

# -----------------------------------------------------------------------------
# a split of a dataset


class Conversations(Tokens):
    """
    A split of conversations, which answers what Tokens answers. Beside train.bin lie
        train.mask    one bit per id (numpy's packbits, little-endian): 1 if it counts as a target, as the
                      assistant says it; all other targets are -1
        train.starts  where each conversation starts in train.bin, uint64, little-endian
    They are packed into windows best fit: the longest first, each into the window with the least free space
    that is enough. None is cut, unless it alone is longer than a window.
    """
    masked = True

    def __init__(self, folder, split, meta, token_bytes, seed=0, document_mask=False):
        super().__init__(folder, split, meta, token_bytes, seed, document_mask)
        bits = np.fromfile(os.path.join(folder, f'{split}.mask'), np.uint8)
        starts = np.fromfile(os.path.join(folder, f'{split}.starts'), '<u8')
        sha256 = hashlib.sha256(bits.tobytes() + starts.tobytes()).hexdigest()
        if len(bits) != math.ceil(self.n / 8) or sha256 != self.entry.get('mask_sha256', sha256):
            raise InputError(f"{split}.mask and {split}.starts in {folder} are not those of {split}.bin. run "
                             "prepare.py for it again with --overwrite")
        self.mask = np.unpackbits(bits, count=self.n, bitorder='little').view(bool)
        self.starts = starts.astype(np.int64)
        self.lengths = np.diff(self.starts, append=self.n) - 1  # of inputs: the last id has no target
        self.fingerprint['mask_sha256'] = sha256[:16]

    @functools.cache
    def packing(self, block_size):
        """(the conversations of each window, how many of its targets count): a function of data and seed."""
        lengths = np.minimum(self.lengths, block_size)
        n_before = np.append(0, np.cumsum(self.mask))  # ids that count before each place
        first_target = self.starts + 1
        n_targets = n_before[first_target + lengths] - n_before[first_target]
        usable = np.flatnonzero(n_targets > 0)
        # the longest first, equally long ones in a random order
        order = np.lexsort((hash64(self.seed, ORDER, usable.astype(np.uint64)), -lengths[usable]))
        packed = best_fit(usable[order].tolist(), lengths.tolist(), block_size)
        targets = np.array([n_targets[window].sum() for window in packed], dtype=np.int64)
        return packed, targets

    def window_numbers(self, seed, numbers, block_size):
        """The windows of the training samples `numbers`: an epoch takes all of them, in a fresh order."""
        packed, _ = self.packing(block_size)
        _, places = shuffled(seed, np.asarray(numbers, dtype=np.uint64), len(packed))
        return places.astype(np.int64)

    def batch(self, seed, numbers, block_size):
        return self.eval_batch(self.window_numbers(seed, numbers, block_size) * block_size, block_size)

    def eval_batch(self, starts, block_size):
        """x, y (-1: does not count), and which conversation of its window an id belongs to (-1: none)."""
        packed, _ = self.packing(block_size)
        x = np.zeros((len(starts), block_size), dtype=np.int64)
        y = np.full_like(x, -1)
        doc_ids = np.full_like(x, -1)
        for row, number in enumerate(starts // block_size):
            at = 0
            for i, conversation in enumerate(packed[number]):
                start = self.starts[conversation]
                n = min(self.lengths[conversation], block_size)
                ids = self.read([start], n + 1)[0]
                place = slice(at, at + n)
                x[row, place] = ids[:-1]
                y[row, place] = np.where(self.mask[start + 1:start + 1 + n], ids[1:], -1)
                doc_ids[row, place] = i
                at += n
        return x, y, doc_ids

    def count_targets(self, seed, numbers, block_size):
        """How many targets of the training samples `numbers` count."""
        _, targets = self.packing(block_size)
        return int(targets[self.window_numbers(seed, numbers, block_size)].sum())

    def n_targets(self, block_size):
        return len(self.packing(block_size)[0]) * block_size

    def summary(self, block_size):
        packed, targets = self.packing(block_size)
        n_longer = (self.lengths > block_size).sum()
        return (f"{len(self.starts):,} conversations in {len(packed):,} windows, {targets.sum():,} of "
                f"{self.n:,} tokens are learned; {n_longer:,} are longer than block_size (cut or left out)")


def best_fit(longest_first, lengths, block_size):
    """[the conversations of each window]"""
    packed = []
    not_full = []  # (free space, -place of its last conversation, window), sorted
    for place, conversation in enumerate(longest_first):
        length = lengths[conversation]
        at = bisect.bisect_left(not_full, (length,))  # the least free space that is enough
        if at < len(not_full):
            free, _, window = not_full.pop(at)
        else:
            free = block_size
            window = []
            packed.append(window)
        window.append(conversation)
        if free > length:
            bisect.insort(not_full, (free - length, -place, window))
    return packed
