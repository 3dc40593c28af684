"""
Conversations: the forms in which people have them, how they become token ids with a loss mask, and how one is
held at a terminal. A conversation is a list of messages {'role': 'user', 'content': text}, whose roles are
'user', 'assistant' and, for the first one, 'system'.

Every tokenizer gets nanochat's roles as special tokens
(https://github.com/karpathy/nanochat/blob/master/nanochat/tokenizer.py):

    <bos> <|user_start|> question <|user_end|> <|assistant_start|> answer <|assistant_end|> <|user_start|> ...

where <bos> is the token that stands before each document, or <|bos|> if there is none. There is no role for
the system: what it says stands before the first question.
"""

import json
import re

import numpy as np

from tokenizer import ASSISTANT_END, make_tokenizer

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


def messages_of(row):
    """The messages of a row of data, which has one of these forms; ValueError says what is wrong with it.
        {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}  OpenAI
        {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}      ShareGPT
        {"instruction": "...", "input": "...", "output": "..."}                                      Alpaca
    Each may have a "system" as well. The list of messages may stand alone, as nanochat has it."""
    messages = []
    try:
        if isinstance(row, list):
            row = {'messages': row}
        if row.get('system'):
            messages.append({'role': 'system', 'content': row['system']})
        if 'instruction' in row:
            question = row['instruction']
            if row.get('input'):
                question += '\n\n' + row['input']
            messages.append({'role': 'user', 'content': question})
            messages.append({'role': 'assistant', 'content': row['output']})
        else:
            for turn in row.get('messages') or row['conversations']:
                role = ROLE_OF[turn.get('role') or turn['from']]
                content = turn['content'] if 'content' in turn else turn['value']
                messages.append({'role': role, 'content': content})
        if row.get('history'):
            raise ValueError("it has a history, which is not read")
        # UnicodeEncodeError, for half of a surrogate pair, is a ValueError
        if not all(message['content'].encode().strip() for message in messages):
            raise ValueError("a message is empty")
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f"it is in none of the forms in docs/chat.md ({type(e).__name__}: {e})")
    roles = ' '.join(message['role'] for message in messages)
    if not re.fullmatch('(system )?user assistant( user assistant)*', roles):
        raise ValueError(f"user and assistant do not take turns ({roles[:60]})")
    return messages


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
        self.stop_ids = [self.special[ASSISTANT_END], tokenizer.end_of_text]
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
            mask += [False] + [role == 'assistant'] * (len(content) + 1)
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
            raise ValueError(f"that is longer than what the answer leaves free ({most} tokens). a smaller "
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
