"""
How a conversation becomes tokens. A model from Hugging Face has a chat template of its own, which is used as
it is. Every other tokenizer gets nanochat's roles as special tokens
(https://github.com/karpathy/nanochat/blob/master/nanochat/tokenizer.py):

    <bos> <|user_start|> question <|user_end|> <|assistant_start|> answer <|assistant_end|> <|user_start|> ...

where <bos> is the tokenizer's end-of-text token, or <|bos|> if it has none. There is no role for the system:
what it says stands before the first question.

A conversation is a list of messages {'role': 'system', 'user' or 'assistant', 'content': text}.
"""

import json

import numpy as np

from support.tokenizer import END_OF_TEXT, make_tokenizer

USER_START, USER_END = '<|user_start|>', '<|user_end|>'
ASSISTANT_START, ASSISTANT_END = '<|assistant_start|>', '<|assistant_end|>'
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
# the same for Ollama, whose templates are Go's, after {bos}
OLLAMA_TEMPLATE = (
    '{{- $system := "" }}'
    '{{- range $i, $message := .Messages }}'
    '{{- if eq .Role "system" }}{{- $system = printf "%s\\n\\n" .Content }}'
    '{{- else if eq .Role "user" }}<|user_start|>{{ $system }}{{ .Content }}<|user_end|>{{- $system = "" }}'
    '{{- if eq (len (slice $.Messages $i)) 1 }}<|assistant_start|>{{- end }}'
    '{{- else }}<|assistant_start|>{{ .Content }}<|assistant_end|>'
    '{{- end }}{{- end }}')


def with_chat_tokens(state):
    """A tokenizer's state with all that conversations need: unchanged if it has a chat template or the roles,
    else with the roles as new ids at the end of its vocabulary."""
    if state['kind'] == 'hf':
        from support.chat_template import with_template
        return with_template(state)
    if state['kind'] == 'tiktoken':
        tokenizer = make_tokenizer(state)
        special = tokenizer.special_ids()
        bos = [] if END_OF_TEXT in special else [BOS]
        new = [token for token in (*bos, *ROLE_TOKENS) if token not in special]
        special.update({token: tokenizer.n_vocab + i for i, token in enumerate(new)})
        return {**tokenizer.state(), 'special_tokens': special}  # with its merges
    if state.get('added'):
        return state
    bos = [BOS] if state['kind'] == 'char' else []
    return {**state, 'added': [*bos, *ROLE_TOKENS]}


def without_chat_tokens(state):
    """The tokenizer before with_chat_tokens(), whose ids are the first ones of the larger vocabulary."""
    if state['kind'] == 'tiktoken' and ROLE_TOKENS[0] in state.get('special_tokens', {}):
        special = {token: id for token, id in state['special_tokens'].items()
                   if token not in (BOS, *ROLE_TOKENS)}
        return {**state, 'special_tokens': special}
    return {key: value for key, value in state.items() if key != 'added'}


def chat_format(tokenizer):
    """The format that a tokenizer's conversations have; None if it has none."""
    if tokenizer.state()['kind'] == 'hf':
        from support.chat_template import TemplateFormat, template_of
        return TemplateFormat(tokenizer) if template_of(tokenizer.state()) else None
    special = tokenizer.special_ids()
    return RoleFormat(tokenizer, special) if all(token in special for token in ROLE_TOKENS) else None


def merge_system(messages):
    """The messages without one of the system's: it stands before the first question."""
    if messages[0]['role'] != 'system':
        return messages
    first = {'role': 'user', 'content': messages[0]['content'] + '\n\n' + messages[1]['content']}
    return [first, *messages[2:]]


class RoleFormat:
    """nanochat's roles as special tokens. A role's name in the text itself stays text."""

    def __init__(self, tokenizer, special):
        self.tokenizer, self.special = tokenizer, special
        self.bos = special[BOS] if tokenizer.end_of_text is None else tokenizer.end_of_text
        self.stop_ids = [special[ASSISTANT_END], self.bos]

    def render(self, messages, answer=False):
        """(ids, mask), two arrays: the conversation's tokens, and which of them the assistant says, the end
        of its turn included. answer: end with the beginning of the assistant's next turn."""
        ids, mask = [self.bos], [False]
        for message in merge_system(messages):
            content = [int(id) for id in self.tokenizer.encode(message['content'])]
            says = message['role'] == 'assistant'
            start, end = (ASSISTANT_START, ASSISTANT_END) if says else (USER_START, USER_END)
            ids += [self.special[start], *content, self.special[end]]
            mask += [False] + [says] * (len(content) + 1)
        if answer:
            ids, mask = [*ids, self.special[ASSISTANT_START]], [*mask, False]
        return np.array(ids), np.array(mask)

    def template(self):
        """The same as a Jinja template."""
        return TEMPLATE.format(bos=self.bos_text())

    def bos_text(self):
        return BOS if self.tokenizer.end_of_text is None else END_OF_TEXT

    def ollama_template(self):
        """The same in Go's language. Where llama.cpp adds the first token to every text, it is left out."""
        does = self.tokenizer.encode_prompt('a')[:1] == [self.bos]
        return ('' if does else self.bos_text()) + OLLAMA_TEMPLATE


def dump(messages):
    """A conversation as a line of JSON, always the same for the same messages."""
    return json.dumps([[m['role'], m['content']] for m in messages], ensure_ascii=False)
