"""
Conversations: their token ids, loss masks and order; a chat at the terminal.

Rows of data become messages, and messages become token ids with a loss mask, which are packed into sequences.
A conversation is a list of messages {'role': 'user', 'content': text}. The roles 'user' and 'assistant'
alternate; the first message may have the role 'system'. An answer with 'weight': 0 is not trained on.

With every tokenizer, conversations have nanochat's format
(https://github.com/karpathy/nanochat/blob/master/nanochat/tokenizer.py):

    <bos> <|user_start|> question <|user_end|> <|assistant_start|> answer <|assistant_end|> <|user_start|> ...

<bos> is the token that begins each document, or <|bos|> if the tokenizer has none. There is no token for the
system message; it is put before the first question.
"""

import bisect
import functools
import hashlib
import json
import os

import numpy as np

from configurator import InputError
from flatgpt.dataset import MAKE_AGAIN, ORDER, Tokens, hash64, shuffled
from flatgpt.tokenizer import ASSISTANT_END, make_tokenizer, without_surrogates


# -----------------------------------------------------------------------------
# rows of data to messages

ROLE_OF = {'system': 'system', 'human': 'user', 'user': 'user', 'gpt': 'assistant', 'assistant': 'assistant'}
# the keys of rows and messages that are read
READ_KEYS = ['messages', 'conversations', 'system', 'instruction', 'input', 'output',
             'role', 'from', 'content', 'value', 'weight']
# a row with one of these is refused: without their values, the answers would be wrong
REFUSED_KEYS = ['history', 'tool_calls', 'function_call']


def messages_of(row):
    """
    Return the messages of a row of data, and the set of its keys that have a value but are not read. Raise
    InputError with the reason if the row cannot be used. A row has one of these forms:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}  OpenAI
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}      ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}                                      Alpaca

    Each may have a "system" as well. A row may also be the list of messages itself, as in nanochat.
    """
    if isinstance(row, list):
        row = {'messages': row}
    turns = []
    if isinstance(row, dict) and 'instruction' not in row:
        turns = row.get('messages') or row.get('conversations')
    if not isinstance(turns, list) or not all(isinstance(item, dict) for item in [row, *turns]):
        raise InputError("none of the forms in docs/chat.md")
    unread = set()
    for item in [row, *turns]:
        for key, value in item.items():
            if value and key in REFUSED_KEYS:
                raise InputError(f"{key} cannot be used")
            if value and key not in READ_KEYS:
                unread.add(key)

    if 'instruction' in row:
        question = text_of(row['instruction'])
        if row.get('input'):
            question += '\n\n' + text_of(row['input'])
        turns = [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': row.get('output')}]
    if row.get('system'):
        turns = [{'role': 'system', 'content': row['system']}, *turns]
    messages = []
    for turn in turns:
        role = str(turn.get('role') or turn.get('from'))
        if role not in ROLE_OF:
            raise InputError(f"a message has the role {role[:20]!r}")
        content = turn['content'] if 'content' in turn else turn.get('value')
        message = {'role': ROLE_OF[role], 'content': text_of(content)}
        if not message['content'].strip():
            raise InputError("a message is empty")
        weight = turn.get('weight')
        if weight not in (None, 0, 1):
            raise InputError("the weight of a message is not 0 or 1")
        if weight == 0:
            message['weight'] = 0
        messages.append(message)
    roles = [message['role'] for message in messages]
    if roles[:1] == ['system']:
        roles = roles[1:]
    if not roles or roles != ['user', 'assistant'] * (len(roles) // 2):
        raise InputError("user and assistant do not alternate")
    return messages, unread


def text_of(content):
    """Return the text of a content: a string, or a list of {"type": "text", "text": "..."}."""
    items = content if isinstance(content, list) else [{'type': 'text', 'text': content}]
    texts = []
    for item in items:
        if not isinstance(item, dict) or item.get('type') != 'text' or not isinstance(item.get('text'), str):
            raise InputError("a message contains something other than text")
        texts.append(item['text'])
    return without_surrogates(''.join(texts))  # JSON may contain half of a surrogate pair


# -----------------------------------------------------------------------------
# messages to token ids

ASSISTANT_START = '<|assistant_start|>'
ROLE_TOKENS = ['<|user_start|>', '<|user_end|>', ASSISTANT_START, ASSISTANT_END]
BOS = '<|bos|>'  # added if no token begins a document
# ChatFormat.render() in Jinja, for transformers; TOKEN_BOS is replaced
TEMPLATE = """
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{{- 'TOKEN_BOS' -}}
{%- for message in turns -%}
    {%- if message['role'] == 'user' -%}
        {{- '<|user_start|>' + (system if loop.first else '') + message['content'] + '<|user_end|>' -}}
    {%- else -%}
        {{- '<|assistant_start|>' + message['content'] + '<|assistant_end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant_start|>' -}}
{%- endif -%}
"""


def with_chat_tokens(state):
    """Return a tokenizer's state with the role tokens. Missing ones are added after its last id."""
    tokenizer = make_tokenizer(state)
    needed = ROLE_TOKENS
    if tokenizer.end_of_text is None:
        needed = [BOS, *ROLE_TOKENS]
    new = [token for token in needed if token not in tokenizer.special]
    if state['kind'] == 'hf':
        tokenizer.tokenizer.add_special_tokens(new)
        config = dict(tokenizer.config)
        if BOS in new:
            config['bos_token'] = BOS
        return {**state, 'json': tokenizer.tokenizer.to_str(), 'config': json.dumps(config)}
    if state['kind'] == 'tiktoken':
        special = dict(tokenizer.special)
        for id, token in enumerate(new, start=tokenizer.n_vocab):
            special[token] = id
        return {**tokenizer.state(), 'special_tokens': special}
    return {**state, 'added': [*state.get('added', []), *new]}


def chat_format(tokenizer):
    """Return the ChatFormat of a tokenizer, or None if it has no role tokens."""
    if all(token in tokenizer.special for token in ROLE_TOKENS):
        return ChatFormat(tokenizer)
    return None


class ChatFormat:
    """
    A converter of messages to token ids. The name of a role token in a message is encoded as text.

    bos: the token that begins a conversation
    stop_ids: list of the ids that end an answer
    template: the same conversion in Jinja, for transformers
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.special = tokenizer.special
        stop_ids = [self.special[ASSISTANT_END], tokenizer.end_of_text, *tokenizer.stop_ids]
        self.stop_ids = list(dict.fromkeys(stop_ids))  # without duplicates
        token_of = {id: token for token, id in self.special.items()}
        self.bos = token_of[tokenizer.end_of_text]
        self.template = TEMPLATE.replace('TOKEN_BOS', self.bos)

    def render(self, messages, add_generation_prompt=False):
        """
        Return the token ids of a conversation and its loss mask, two arrays.

        The mask is True for the targets of the loss: the answers, and the tokens that end them.
        add_generation_prompt: append the token that begins the assistant's next answer
        """
        if messages[0]['role'] == 'system':
            question = messages[0]['content'] + '\n\n' + messages[1]['content']
            messages = [{'role': 'user', 'content': question}, *messages[2:]]
        ids = [self.special[self.bos]]
        mask = [False]
        for message in messages:
            role = message['role']  # 'user' or 'assistant'
            content = self.tokenizer.encode(message['content']).tolist()
            ids += [self.special[f'<|{role}_start|>'], *content, self.special[f'<|{role}_end|>']]
            is_target = role == 'assistant' and message.get('weight') != 0
            mask += [False] + [is_target] * (len(content) + 1)
        if add_generation_prompt:
            ids.append(self.special[ASSISTANT_START])
            mask.append(False)
        return np.array(ids), np.array(mask)


# -----------------------------------------------------------------------------
# a split of a dataset


class Conversations(Tokens):
    """
    A split of conversations, with the methods of Tokens. In addition to train.bin, it has the files

    train.mask    one bit per token (numpy's packbits, little-endian): 1 if it is a target of the loss
    train.starts  the positions in train.bin where conversations start, uint64, little-endian

    The conversations are packed into sequences of block_size tokens. A conversation is cut only if it is
    longer than block_size. In eval_batch() and eval_starts(), sequence i starts at i * block_size.
    """
    masked = True

    def __init__(self, folder, split, meta, token_bytes, seed=0, document_mask=False):
        super().__init__(folder, split, meta, token_bytes, seed, document_mask)
        try:
            bits = np.fromfile(os.path.join(folder, f'{split}.mask'), np.uint8)
            starts = np.fromfile(os.path.join(folder, f'{split}.starts'), '<u8')
        except OSError as e:
            raise InputError(f"{folder} has no {split}.mask or {split}.starts. {MAKE_AGAIN}") from e
        sha256 = hashlib.sha256(bits.tobytes() + starts.tobytes()).hexdigest()
        if sha256 != self.entry.get('mask_sha256'):
            raise InputError(f"{split}.mask or {split}.starts in {folder} does not belong to {split}.bin. "
                             f"{MAKE_AGAIN}")
        self.mask = np.unpackbits(bits, count=self.n, bitorder='little').view(bool)
        self.starts = starts.astype(np.int64)
        # number of inputs of each conversation: the last token is only a target
        self.lengths = np.diff(self.starts, append=self.n) - 1
        self.fingerprint['mask_sha256'] = sha256[:16]

    @functools.cache
    def packing(self, block_size):
        """
        Return the sequences, a list of lists of conversation indices, and the number of unmasked targets in
        each, an array. Both are functions of the data and the seed.

        A conversation without unmasked targets is skipped, for example if its first answer begins after
        block_size.
        """
        lengths = np.minimum(self.lengths, block_size)
        n_before = np.append(0, np.cumsum(self.mask))  # number of targets before each position
        first = self.starts + 1  # the first token is not a target
        targets_per_conversation = n_before[first + lengths] - n_before[first]
        usable = np.flatnonzero(targets_per_conversation > 0)
        if len(usable) == 0:
            raise InputError(f"no conversation in {self.paths[0]} has an answer within its first "
                             f"{block_size} tokens. Use a larger block_size or shorter questions.")
        # longest first; equal lengths in random order
        random_order = hash64(self.seed, ORDER, usable.astype(np.uint64))
        longest_first = usable[np.lexsort((random_order, -lengths[usable]))]
        sequences = best_fit(longest_first.tolist(), lengths.tolist(), block_size)
        n_targets = [targets_per_conversation[sequence].sum() for sequence in sequences]
        return sequences, np.array(n_targets, dtype=np.int64)

    def sequence_indices(self, seed, indices, block_size):
        """Return the sequence indices of the training samples `indices`. An epoch contains each sequence
        once; each epoch has a different order."""
        sequences, _ = self.packing(block_size)
        _, chosen = shuffled(seed, np.asarray(indices, dtype=np.uint64), len(sequences))
        return chosen.astype(np.int64)

    def read_packed(self, sequence_indices, block_size):
        """Return x, y (-1: masked or padding), and the index of each token's conversation within its sequence
        (-1: padding), all (len(sequence_indices), block_size)."""
        sequences, _ = self.packing(block_size)
        x = np.zeros((len(sequence_indices), block_size), dtype=np.int64)
        y = np.full_like(x, -1)
        doc_ids = np.full_like(x, -1)
        for row, index in enumerate(sequence_indices):
            end = 0
            for i, conversation in enumerate(sequences[index]):
                start = self.starts[conversation]
                length = min(self.lengths[conversation], block_size)
                ids = self.read([start], length + 1)[0]
                is_target = self.mask[start + 1:start + 1 + length]
                columns = slice(end, end + length)
                x[row, columns] = ids[:-1]
                y[row, columns] = np.where(is_target, ids[1:], -1)
                doc_ids[row, columns] = i
                end += length
        return x, y, doc_ids

    def batch(self, seed, indices, block_size):
        return self.read_packed(self.sequence_indices(seed, indices, block_size), block_size)

    def eval_batch(self, starts, block_size):
        return self.read_packed(starts // block_size, block_size)

    def count_targets(self, seed, indices, block_size):
        """Return the number of unmasked targets of the training samples `indices`."""
        _, n_targets = self.packing(block_size)
        return int(n_targets[self.sequence_indices(seed, indices, block_size)].sum())

    def tokens_per_epoch(self, block_size):
        sequences, _ = self.packing(block_size)
        return len(sequences) * block_size

    def summary(self, block_size):
        sequences, n_targets = self.packing(block_size)
        n_longer = (self.lengths > block_size).sum()
        return (f"{len(self.starts):,} conversations in {len(sequences):,} sequences, {n_targets.sum():,} of "
                f"{self.n:,} tokens are targets; {n_longer:,} are longer than block_size (cut or skipped)")


def best_fit(longest_first, lengths, block_size):
    """Pack each conversation into the sequence with the least sufficient free space. Return the conversations
    of each sequence."""
    sequences = []
    # (free space, -rank of the last conversation in it, sequence), sorted. Ranks are unique, so sequences are
    # never compared; of those with equal space, the one that was filled last is used
    not_full = []
    for rank, conversation in enumerate(longest_first):
        length = lengths[conversation]
        i = bisect.bisect_left(not_full, (length,))  # the first with at least this much space
        if i < len(not_full):
            free, _, sequence = not_full.pop(i)
        else:
            free = block_size
            sequence = []
            sequences.append(sequence)
        sequence.append(conversation)
        if free > length:
            bisect.insort(not_full, (free - length, -rank, sequence))
    return sequences


# -----------------------------------------------------------------------------
# a conversation at the terminal


def fit_prompt(chat, messages, max_tokens):
    """
    Return the token ids of a prompt for the assistant's next answer, and its messages.

    The oldest questions are dropped with their answers until the prompt has at most max_tokens. Raise
    InputError if the last question alone is longer.
    """
    while True:
        ids, _ = chat.render(messages, add_generation_prompt=True)
        if len(ids) <= max_tokens:
            return ids.tolist(), messages
        if len(messages) == 1:
            raise InputError(f"the message is too long: {len(ids)} of at most {max_tokens} tokens. Write a "
                             "shorter one, or use a smaller --max_new_tokens.")
        messages = messages[2:]


def converse(chat, reply, max_tokens):
    """
    Hold a conversation at the terminal, until Ctrl-D.

    reply: a function that takes the ids of a prompt, prints the answer while it is generated, and returns it
    max_tokens: maximum length of a prompt
    """
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
            ids, kept = fit_prompt(chat, asked, max_tokens)
        except InputError as e:  # too long, or the tokenizer lacks a character
            print(f'({e})')
            continue
        if len(kept) < len(asked):
            print("(the oldest messages no longer fit into the context and are dropped)")
        messages = [*kept, {'role': 'assistant', 'content': reply(ids)}]
        print()
