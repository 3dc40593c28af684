"""
Conversations: the forms in which people have them, how they become token ids with a loss mask, and how one is
held at a terminal. A conversation is a list of messages {'role': 'user', 'content': text}, whose roles are
'user', 'assistant' and, for the first one, 'system'.

A Hugging Face tokenizer that has a chat template keeps it. Every other tokenizer gets nanochat's roles as
special tokens (https://github.com/karpathy/nanochat/blob/master/nanochat/tokenizer.py):

    <bos> <|user_start|> question <|user_end|> <|assistant_start|> answer <|assistant_end|> <|user_start|> ...

where <bos> is the tokenizer's end-of-text token, or <|bos|> if it has none. There is no role for the system:
what it says stands before the first question.
"""

import datetime
import functools
import json
import os
import re

import numpy as np

from common import first_line
from tokenizer import ASSISTANT_END, END_OF_TEXT, make_tokenizer, text_of_token

USER_START = '<|user_start|>'
USER_END = '<|user_end|>'
ASSISTANT_START = '<|assistant_start|>'
ROLE_TOKENS = (USER_START, USER_END, ASSISTANT_START, ASSISTANT_END)
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
    if isinstance(row, list):
        row = {'messages': row}
    if not isinstance(row, dict):
        raise ValueError(f"it is no object ({str(row)[:60]})")
    messages = []
    if row.get('system'):
        messages.append({'role': 'system', 'content': row['system']})
    if 'instruction' in row:
        question = row['instruction']
        if row.get('input'):
            question = f"{question}\n\n{row['input']}"
        messages.append({'role': 'user', 'content': question})
        messages.append({'role': 'assistant', 'content': row.get('output')})
    else:
        turns = row.get('messages') or row.get('conversations')
        if not isinstance(turns, list):
            raise ValueError(f"it has neither messages nor conversations nor an instruction ({list(row)})")
        for turn in turns:
            if not isinstance(turn, dict):
                raise ValueError(f"a message is no object ({str(turn)[:60]})")
            name = turn.get('role') or turn.get('from')
            if not isinstance(name, str) or name not in ROLE_OF:
                raise ValueError(f"no such role ({str(name)[:60]})")
            messages.append({'role': ROLE_OF[name], 'content': turn.get('content', turn.get('value'))})
    if row.get('history'):
        raise ValueError("it has a history, which is not read")
    for message in messages:
        content = message['content']
        # UnicodeEncodeError, for half of a surrogate pair, is a ValueError
        if not isinstance(content, str) or not content.encode().strip():
            raise ValueError(f"a content of the {message['role']} is empty or no text")
    roles = ' '.join(message['role'] for message in messages)
    if not re.fullmatch('(system )?user assistant( user assistant)*', roles):
        raise ValueError(f"user and assistant do not take turns ({roles[:60]})")
    return messages


# -----------------------------------------------------------------------------
# a tokenizer with what conversations need


def with_chat_tokens(state):
    """A tokenizer's state with what conversations need: unchanged if it has a chat template or the roles,
    else with the roles as new ids at the end of its vocabulary."""
    tokenizer = make_tokenizer(state)
    if state['kind'] == 'hf':
        return with_template(tokenizer)
    wanted = ROLE_TOKENS
    if tokenizer.end_of_text is None:
        wanted = (BOS, *ROLE_TOKENS)
    new = [token for token in wanted if token not in tokenizer.special]
    if state['kind'] == 'tiktoken':
        special = dict(tokenizer.special)
        for i, token in enumerate(new):
            special[token] = tokenizer.n_vocab + i
        return {**tokenizer.state(), 'special_tokens': special}
    return {**state, 'added': [*state.get('added', []), *new]}


def with_template(tokenizer):
    """The state of a Hugging Face tokenizer with a chat template: its own, or nanochat's roles."""
    state = tokenizer.state()
    config = tokenizer.config
    if config.get('chat_template'):
        return state
    bos = text_of_token(config.get('bos_token') or config.get('eos_token')) or BOS
    tokenizer.tokenizer.add_special_tokens([bos, *ROLE_TOKENS])
    config = {**config, 'chat_template': TEMPLATE.format(bos=bos), 'bos_token': bos}
    return {**state, 'json': tokenizer.tokenizer.to_str(), 'config': json.dumps(config)}


# -----------------------------------------------------------------------------
# from messages to ids


def chat_format(tokenizer):
    """The format of a tokenizer's conversations; None if it has none. It has
        render(messages, answer=False)  (ids, mask), two arrays: the conversation's tokens, and which of them
                                        are learned: what the assistant says, and the end of its turn. answer:
                                        end with the beginning of the assistant's next turn
        stop_ids                        the ids that end an answer
        template                        the same in Jinja, for transformers"""
    if tokenizer.state()['kind'] == 'hf':
        return TemplateFormat(tokenizer) if tokenizer.config.get('chat_template') else None
    has_roles = all(token in tokenizer.special for token in ROLE_TOKENS)
    return RoleFormat(tokenizer) if has_roles else None


class RoleFormat:
    """nanochat's roles as special tokens. A role's name in a message stays text."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.special = tokenizer.special
        self.bos = tokenizer.end_of_text
        self.stop_ids = [self.special[ASSISTANT_END], self.bos]
        self.template = TEMPLATE.format(bos=BOS if BOS in self.special else END_OF_TEXT)

    def render(self, messages, answer=False):
        if messages[0]['role'] == 'system':
            first = messages[0]['content'] + '\n\n' + messages[1]['content']
            messages = [{'role': 'user', 'content': first}, *messages[2:]]
        ids = [self.bos]
        mask = [False]
        for message in messages:
            content = self.tokenizer.encode(message['content']).tolist()
            if message['role'] == 'assistant':
                ids += [self.special[ASSISTANT_START], *content, self.special[ASSISTANT_END]]
                mask += [False] + [True] * (len(content) + 1)
            else:
                ids += [self.special[USER_START], *content, self.special[USER_END]]
                mask += [False] * (len(content) + 2)
        if answer:
            ids.append(self.special[ASSISTANT_START])
            mask.append(False)
        return np.array(ids), np.array(mask)


class TemplateFormat:
    """What a Hugging Face tokenizer's own chat template makes of a conversation."""

    def __init__(self, tokenizer):
        self.name = tokenizer.state()['name']
        self.template = tokenizer.config['chat_template']
        self.tokenizer = tokenizer.tokenizer  # of the `tokenizers` package
        self.special_ids = list(tokenizer.special.values())
        self.variables = {}  # bos_token and others, which a template may write
        for name, token in tokenizer.config.items():
            if name.endswith('_token') and text_of_token(token) is not None:
                self.variables[name] = text_of_token(token)
        # what ends the assistant's turn is seen in a small conversation
        self.stop_ids = list(tokenizer.stop_ids)
        try:
            ids, mask = self.render([{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}])
        except ValueError:
            return  # said again, with the reason, for the first conversation
        if mask.any():
            end = int(ids[mask][-1])
            self.stop_ids = [end] + [id for id in self.stop_ids if id != end]

    def text(self, messages, answer=False):
        """The conversation as the template writes it. ValueError if it cannot."""
        try:
            template = compile_template(self.template)
            return template.render(messages=messages, add_generation_prompt=answer, **self.variables)
        except Exception as e:  # it is a program by somebody else
            reason = f'{type(e).__name__}: {first_line(e)!r}'
            raise ValueError(f"the chat template of {self.name} fails ({reason})")

    def render(self, messages, answer=False):
        text = self.text(messages, answer)
        if self.tokenizer.encode_special_tokens:
            self.tokenizer.encode_special_tokens = False  # they are recognized; none is added
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids)
        begins = np.array([begin for begin, _ in encoding.offsets])  # of each token, in characters
        mask = np.zeros(len(ids), dtype=bool)
        for i, message in enumerate(messages):
            if message['role'] != 'assistant' or answer:
                continue
            before = self.text(messages[:i])
            after = self.text(messages[:i + 1])
            # some templates let an answer begin with <think>, and take that out again once there is one
            prompt = os.path.commonprefix([self.text(messages[:i], answer=True), after])
            if not text.startswith(after) or not prompt.startswith(before):
                raise ValueError(f"the chat template of {self.name} rewrites earlier turns, so it is not "
                                 "known which tokens the assistant says")
            places = np.flatnonzero((begins >= len(prompt)) & (begins < len(after)))
            special = np.flatnonzero(np.isin(ids[places], self.special_ids))
            if len(special):  # up to the end of the turn, without a new line that follows it
                places = places[:special[-1] + 1]
            mask[places] = True
        return ids, mask


@functools.lru_cache(2)
def compile_template(source):
    """A Jinja template, to be rendered in a sandbox as transformers does it."""
    import jinja2.ext
    import jinja2.sandbox

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.globals['raise_exception'] = raise_exception
    environment.globals['strftime_now'] = datetime.datetime.now().strftime
    # {% generation %} ... {% endgeneration %} marks in some templates what the assistant says: a comment
    return environment.from_string(re.sub(r'\{%(-?\s*(end)?generation\s*-?)%\}', r'{#\1#}', source))


# -----------------------------------------------------------------------------
# a conversation at a terminal


def fit_prompt(chat, messages, most):
    """(ids of the prompt for the assistant's next turn, the messages in it). So that it has at most `most`
    ids, the oldest questions are left out, and their answers. ValueError if the last one alone has more."""
    system = [message for message in messages if message['role'] == 'system']
    turns = messages[len(system):]
    while True:
        ids = chat.render(system + turns, answer=True)[0].tolist()
        if len(ids) <= most:
            return ids, system + turns
        if len(turns) == 1:
            raise ValueError(f"that is longer than what the answer leaves free ({most} tokens). a smaller "
                             "--max_new_tokens leaves more")
        turns = turns[2:]


def converse(chat, reply, most):
    """A conversation at the terminal, until Ctrl-D. reply(ids) prints the answer to a prompt while it is
    generated and returns its text; most: how many ids a prompt may have."""
    print("/system TEXT begins a new conversation, with TEXT (or nothing) before it; Ctrl-D ends")
    messages = []
    while True:
        try:
            line = input('> ').strip()
        except (EOFError, OSError, KeyboardInterrupt):  # OSError: the terminal is gone
            print()
            return
        if line.startswith('/system'):
            text = line.removeprefix('/system').strip()
            messages = [{'role': 'system', 'content': text}] if text else []
            continue
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
