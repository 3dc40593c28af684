"""Chat templates of Hugging Face tokenizers: Jinja, rendered in a sandbox as transformers does it."""

import datetime
import json

import numpy as np

from support.chat_format import BOS, ROLE_TOKENS, TEMPLATE
from support.errors import first_line


def config_of(state):
    config = json.loads(state.get('config') or '{}')
    return config if isinstance(config, dict) else {}


def template_of(state):
    """The template in a tokenizer's state, or None. Of several, the one named default."""
    template = config_of(state).get('chat_template')
    if isinstance(template, list):
        named = {entry.get('name'): entry.get('template') for entry in template if isinstance(entry, dict)}
        template = named.get('default')
    return template if isinstance(template, str) else None


def with_template(state):
    """The state with a chat template: its own, or nanochat's roles as special tokens at the end of its
    vocabulary."""
    if template_of(state):
        return state
    import tokenizers
    tokenizer, config = tokenizers.Tokenizer.from_str(state['json']), config_of(state)
    token = config.get('bos_token') or config.get('eos_token')
    bos = token.get('content') if isinstance(token, dict) else token
    new = [*ROLE_TOKENS] if bos else [BOS, *ROLE_TOKENS]
    tokenizer.add_special_tokens(new)
    bos = bos or BOS
    config.update(chat_template=TEMPLATE.format(bos=bos), bos_token=bos)
    return {**state, 'json': tokenizer.to_str(), 'config': json.dumps(config)}


def make_environment():
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %} marks in some templates what the assistant says."""
        tags = {'generation'}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(['name:endgeneration'], drop_needle=True)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters['tojson'] = tojson
    environment.globals['raise_exception'] = raise_exception
    environment.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class TemplateFormat:
    """What a Hugging Face tokenizer's own template makes of a conversation."""

    def __init__(self, tokenizer):
        self.tokenizer, self.raw = tokenizer, tokenizer.tokenizer
        config = config_of(tokenizer.state())
        self.names = {}
        for name in ('bos_token', 'eos_token', 'unk_token', 'pad_token'):
            token = config.get(name)
            token = token.get('content') if isinstance(token, dict) else token
            if isinstance(token, str):
                self.names[name] = token
        added = self.raw.get_added_tokens_decoder()
        self.special = {id for id, token in added.items() if token.special}
        self.source = template_of(tokenizer.state())
        self.compiled = make_environment().from_string(self.source)
        self.stop_ids = self.end_ids()

    def text(self, messages, answer=False):
        """The conversation as the template writes it. ValueError if it cannot."""
        try:
            return self.compiled.render(messages=messages, add_generation_prompt=answer, **self.names)
        except Exception as e:  # it is a program by somebody else
            raise ValueError(f"the chat template of {self.tokenizer.state()['name']} fails "
                             f"({type(e).__name__}: {first_line(e)})")

    def encode(self, text):
        """(ids, where in the text each begins); special tokens are recognized, none is added."""
        self.raw.encode_special_tokens = False
        encoding = self.raw.encode(text, add_special_tokens=False)
        return np.array(encoding.ids), np.array([start for start, _ in encoding.offsets])

    def render(self, messages, answer=False):
        """As RoleFormat.render()."""
        text = self.text(messages, answer)
        ids, begins = self.encode(text)
        mask = np.zeros(len(ids), dtype=bool)
        for i, message in enumerate(messages):
            if message['role'] != 'assistant':
                continue
            before, after = self.text(messages[:i], True), self.text(messages[:i + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(f"the chat template of {self.tokenizer.state()['name']} rewrites earlier "
                                 "turns, so it is not known which tokens the assistant says")
            said = np.flatnonzero((begins >= len(before)) & (begins < len(after)))
            ends = [n for n, at in enumerate(said) if int(ids[at]) in self.special]
            mask[said[:ends[-1] + 1] if ends else said] = True  # not the new line after the end of a turn
        return ids, mask

    def end_ids(self):
        """The ids that end the assistant's turn, found in a small conversation."""
        messages = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
        ids, mask = self.render(messages)
        last = int(ids[np.flatnonzero(mask)[-1]])
        return list(dict.fromkeys([last, *(self.tokenizer.stop_ids or ())]))

    def template(self):
        return self.source
