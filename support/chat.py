"""
How a conversation becomes tokens. It is a list of messages {'role': 'system', 'user' or 'assistant',
'content': text}.

A model from Hugging Face has a chat template of its own, which is used as it is. Every other tokenizer gets
nanochat's roles as special tokens (https://github.com/karpathy/nanochat/blob/master/nanochat/tokenizer.py):

    <bos> <|user_start|> question <|user_end|> <|assistant_start|> answer <|assistant_end|> <|user_start|> ...

where <bos> is the tokenizer's end-of-text token, or <|bos|> if it has none. There is no role for the system:
what it says stands before the first question.
"""

import contextlib
import datetime
import functools
import json
import os
import re

import numpy as np

from configurator import escape_control_characters
from support.errors import first_line
from support.hf_tokenizer import text_of_token
from support.tokenizer import ASSISTANT_END, END_OF_TEXT, make_tokenizer

USER_START, USER_END, ASSISTANT_START = '<|user_start|>', '<|user_end|>', '<|assistant_start|>'
ROLE_TOKENS = (USER_START, USER_END, ASSISTANT_START, ASSISTANT_END)
BOS = '<|bos|>'  # only where the tokenizer has no token of that kind
# the same for transformers and llama.cpp; {bos} is filled in
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
# a tokenizer with what conversations need


def with_chat_tokens(state):
    """A tokenizer's state with all that conversations need: unchanged if it has a chat template or the roles,
    else with the roles as new ids at the end of its vocabulary."""
    tokenizer = make_tokenizer(state)
    if state['kind'] == 'hf':
        return with_template(tokenizer)
    special = dict(tokenizer.special)
    wanted = ROLE_TOKENS if tokenizer.end_of_text is not None else (BOS, *ROLE_TOKENS)
    new = [token for token in wanted if token not in special]
    if state['kind'] == 'tiktoken':
        special.update({token: tokenizer.n_vocab + i for i, token in enumerate(new)})
        return {**tokenizer.state(), 'special_tokens': special}  # with its merges
    return {**state, 'added': [*state.get('added', []), *new]}


def without_chat_tokens(state):
    """The tokenizer before with_chat_tokens(), whose ids are the first ones of the larger vocabulary."""
    state = {key: value for key, value in state.items() if key != 'added'}
    if 'special_tokens' in state:
        state['special_tokens'] = {token: id for token, id in state['special_tokens'].items()
                                   if token not in (BOS, *ROLE_TOKENS)}
    return state


def with_template(tokenizer):
    """The state of a Hugging Face tokenizer with a chat template: its own, or nanochat's roles."""
    state, config = tokenizer.state(), tokenizer.config
    if config.get('chat_template'):
        return state
    bos = text_of_token(config.get('bos_token') or config.get('eos_token')) or BOS
    tokenizer.tokenizer.add_special_tokens([bos, *ROLE_TOKENS])
    config = {**config, 'chat_template': TEMPLATE.format(bos=bos), 'bos_token': bos}
    return {**state, 'json': tokenizer.tokenizer.to_str(), 'config': json.dumps(config)}


# -----------------------------------------------------------------------------
# from messages to ids


def chat_format(tokenizer):
    """The format that a tokenizer's conversations have; None if it has none."""
    if tokenizer.state()['kind'] == 'hf':
        return TemplateFormat(tokenizer) if tokenizer.config.get('chat_template') else None
    return RoleFormat(tokenizer) if {*ROLE_TOKENS} <= tokenizer.special.keys() else None


class RoleFormat:
    """nanochat's roles as special tokens. A role's name in the text itself stays text."""

    def __init__(self, tokenizer):
        self.tokenizer, self.special = tokenizer, tokenizer.special
        self.bos = tokenizer.end_of_text
        self.stop_ids = [self.special[ASSISTANT_END], self.bos]
        self.template = TEMPLATE.format(bos=BOS if BOS in self.special else END_OF_TEXT)

    def render(self, messages, answer=False):
        """(ids, mask), two arrays: the conversation's tokens, and which of them the assistant says, the end
        of its turn included. answer: end with the beginning of the assistant's next turn."""
        if messages[0]['role'] == 'system':
            both = '\n\n'.join(message['content'] for message in messages[:2])
            messages = [{'role': 'user', 'content': both}, *messages[2:]]
        ids, mask = [self.bos], [False]
        for message in messages:
            content = self.tokenizer.encode(message['content']).tolist()
            says = message['role'] == 'assistant'
            start, end = (ASSISTANT_START, ASSISTANT_END) if says else (USER_START, USER_END)
            ids += [self.special[start], *content, self.special[end]]
            mask += [False] + [says] * (len(content) + 1)
        if answer:
            ids, mask = [*ids, self.special[ASSISTANT_START]], [*mask, False]
        return np.array(ids), np.array(mask)


class TemplateFormat:
    """What a Hugging Face tokenizer's own template makes of a conversation."""

    def __init__(self, tokenizer):
        config, self.raw = tokenizer.config, tokenizer.tokenizer
        self.name, self.template = tokenizer.state()['name'], config['chat_template']
        self.names = {name: text_of_token(config[name]) for name in config
                      if name.endswith('_token') and text_of_token(config[name]) is not None}
        self.special = [id for id, token in self.raw.get_added_tokens_decoder().items() if token.special]
        self.stop_ids = list(tokenizer.stop_ids or ())
        # the token that ends the assistant's turn, found in a small conversation
        with contextlib.suppress(ValueError, IndexError):
            ids, mask = self.render([{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}])
            self.stop_ids = list(dict.fromkeys([int(ids[mask][-1]), *self.stop_ids]))

    def text(self, messages, answer=False):
        """The conversation as the template writes it. ValueError if it cannot."""
        try:
            template = compile_template(self.template)
            return template.render(messages=messages, add_generation_prompt=answer, **self.names)
        except Exception as e:  # it is a program by somebody else
            raise ValueError(f"the chat template of {self.name} fails ({type(e).__name__}: "
                             f"{escape_control_characters(first_line(e))})")

    def render(self, messages, answer=False):
        """As RoleFormat.render()."""
        text = self.text(messages, answer)
        self.raw.encode_special_tokens = False  # they are recognized, none is added
        encoding = self.raw.encode(text, add_special_tokens=False)
        ids, begins = np.array(encoding.ids), np.array([start for start, _ in encoding.offsets])
        mask = np.zeros(len(ids), dtype=bool)
        for i, message in enumerate([] if answer else messages):
            if message['role'] != 'assistant':
                continue
            # some templates let an answer begin with <think>, and take that out again
            before, after = self.text(messages[:i]), self.text(messages[:i + 1])
            begin = os.path.commonprefix([self.text(messages[:i], True), after])
            if not text.startswith(after) or not begin.startswith(before):
                raise ValueError(f"the chat template of {self.name} rewrites earlier turns, so it is not "
                                 "known which tokens the assistant says")
            said = np.flatnonzero((begins >= len(begin)) & (begins < len(after)))
            ends = np.flatnonzero(np.isin(ids[said], self.special))
            # without the new line after the end of a turn
            mask[said[:ends[-1] + 1] if len(ends) else said] = True
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
    environment.globals.update(raise_exception=raise_exception, strftime_now=datetime.datetime.now().strftime)
    # {% generation %} ... {% endgeneration %} marks in some templates what the assistant says: a comment
    return environment.from_string(re.sub(r'\{%(-?\s*(end)?generation\s*-?)%\}', r'{#\1#}', source))
