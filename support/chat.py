"""
How a conversation becomes tokens, and how one is held (sample.py --chat). It is a list of messages {'role':
'system', 'user' or 'assistant', 'content': text}.

A model from Hugging Face has a chat template of its own, which is used as it is. Every other tokenizer gets
nanochat's roles as special tokens (https://github.com/karpathy/nanochat/blob/master/nanochat/tokenizer.py):

    <bos> <|user_start|> question <|user_end|> <|assistant_start|> answer <|assistant_end|> <|user_start|> ...

where <bos> is the tokenizer's end-of-text token, or <|bos|> if it has none. There is no role for the system:
what it says stands before the first question.
"""

import datetime
import json

import numpy as np

from configurator import escape_control_characters, fail
from support.hf_tokenizer import text_of_token
from support.samples import Sample
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
HELP = "/system TEXT sets what stands before the conversation, /reset begins a new one, Ctrl-D ends"


# -----------------------------------------------------------------------------
# a tokenizer with what conversations need


def with_chat_tokens(state):
    """A tokenizer's state with all that conversations need: unchanged if it has a chat template or the roles,
    else with the roles as new ids at the end of its vocabulary."""
    if state['kind'] == 'hf':
        return with_template(state)
    if state['kind'] == 'tiktoken':
        tokenizer = make_tokenizer(state)
        special = tokenizer.special_ids()
        wanted = ROLE_TOKENS if END_OF_TEXT in special else (BOS, *ROLE_TOKENS)
        new = [token for token in wanted if token not in special]
        special.update({token: tokenizer.n_vocab + i for i, token in enumerate(new)})
        return {**tokenizer.state(), 'special_tokens': special}  # with its merges
    bos = [BOS] if state['kind'] == 'char' else []
    return {**state, 'added': state.get('added') or [*bos, *ROLE_TOKENS]}


def without_chat_tokens(state):
    """The tokenizer before with_chat_tokens(), whose ids are the first ones of the larger vocabulary."""
    state = {key: value for key, value in state.items() if key != 'added'}
    if ROLE_TOKENS[0] in state.get('special_tokens', {}):
        state['special_tokens'] = {token: id for token, id in state['special_tokens'].items()
                                   if token not in (BOS, *ROLE_TOKENS)}
    return state


def with_template(state):
    """The state of a Hugging Face tokenizer with a chat template: its own, or nanochat's roles."""
    if template_of(state):
        return state
    import tokenizers
    tokenizer, config = tokenizers.Tokenizer.from_str(state['json']), config_of(state)
    bos = text_of_token(config.get('bos_token') or config.get('eos_token'))
    tokenizer.add_special_tokens([*ROLE_TOKENS] if bos else [BOS, *ROLE_TOKENS])
    bos = bos or BOS
    config.update(chat_template=TEMPLATE.format(bos=bos), bos_token=bos)
    return {**state, 'json': tokenizer.to_str(), 'config': json.dumps(config)}


def config_of(state):
    config = json.loads(state.get('config') or '{}')
    return config if isinstance(config, dict) else {}


def template_of(state):
    """The chat template in a Hugging Face tokenizer's state, or None. Of several, the one named default."""
    template = config_of(state).get('chat_template')
    if isinstance(template, list):
        template = {entry['name']: entry['template'] for entry in template}.get('default')
    return template


# -----------------------------------------------------------------------------
# from messages to ids


def chat_format(tokenizer):
    """The format that a tokenizer's conversations have; None if it has none."""
    if tokenizer.state()['kind'] == 'hf':
        return TemplateFormat(tokenizer) if template_of(tokenizer.state()) else None
    return RoleFormat(tokenizer) if {*ROLE_TOKENS} <= tokenizer.special_ids().keys() else None


class RoleFormat:
    """nanochat's roles as special tokens. A role's name in the text itself stays text."""

    def __init__(self, tokenizer):
        self.tokenizer, self.special = tokenizer, tokenizer.special_ids()
        self.bos = self.special[BOS] if tokenizer.end_of_text is None else tokenizer.end_of_text
        self.stop_ids = [self.special[ASSISTANT_END], self.bos]
        self.template = TEMPLATE.format(bos=BOS if tokenizer.end_of_text is None else END_OF_TEXT)

    def render(self, messages, answer=False):
        """(ids, mask), two arrays: the conversation's tokens, and which of them the assistant says, the end
        of its turn included. answer: end with the beginning of the assistant's next turn."""
        if messages[0]['role'] == 'system':
            both = '\n\n'.join(message['content'] for message in messages[:2])
            messages = [{'role': 'user', 'content': both}, *messages[2:]]
        ids, mask = [self.bos], [False]
        for message in messages:
            content = [int(id) for id in self.tokenizer.encode(message['content'])]
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
        state, self.raw = tokenizer.state(), tokenizer.tokenizer
        self.name, self.template, config = state['name'], template_of(state), config_of(state)
        names = {name: text_of_token(config.get(name))
                 for name in ('bos_token', 'eos_token', 'unk_token', 'pad_token')}
        self.names = {name: token for name, token in names.items() if token is not None}
        self.compiled = compile_template(self.template)
        # the token that ends the assistant's turn, found in a small conversation
        ids, mask = self.render([{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}])
        self.stop_ids = list(dict.fromkeys([int(ids[mask][-1]), *(tokenizer.stop_ids or ())]))

    def text(self, messages, answer=False):
        """The conversation as the template writes it. ValueError if it cannot."""
        try:
            return self.compiled.render(messages=messages, add_generation_prompt=answer, **self.names)
        except Exception as e:  # it is a program by somebody else
            raise ValueError(f"the chat template of {self.name} fails ({type(e).__name__}: {str(e)[:120]})")

    def render(self, messages, answer=False):
        """As RoleFormat.render()."""
        text = self.text(messages, answer)
        self.raw.encode_special_tokens = False  # they are recognized, none is added
        encoding = self.raw.encode(text, add_special_tokens=False)
        ids, begins = np.array(encoding.ids), np.array([start for start, _ in encoding.offsets])
        added, mask = self.raw.get_added_tokens_decoder(), np.zeros(len(ids), dtype=bool)
        for i, message in enumerate(messages):
            if message['role'] != 'assistant':
                continue
            before, after = self.text(messages[:i], True), self.text(messages[:i + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(f"the chat template of {self.name} rewrites earlier turns, so it is not "
                                 "known which tokens the assistant says")
            said = np.flatnonzero((begins >= len(before)) & (begins < len(after)))
            ends = [n for n, at in enumerate(said) if ids[at] in added and added[ids[at]].special]
            mask[said[:ends[-1] + 1] if ends else said] = True  # not the new line after the end of a turn
        return ids, mask


def compile_template(source):
    """A Jinja template, to be rendered in a sandbox as transformers does it."""
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

    def tojson(value, ensure_ascii=False, **options):
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters['tojson'] = tojson
    environment.globals['raise_exception'] = raise_exception
    environment.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


# -----------------------------------------------------------------------------
# a conversation at a terminal, or one answer to each prompt


class Session:
    """A model and the messages so far. generate: a function (ids, on_token) that stops at the stop ids."""

    def __init__(self, model, tokenizer, max_new_tokens, generate):
        self.format = chat_format(tokenizer)
        if self.format is None:
            fail("this model knows no conversations: its tokenizer has neither roles nor a chat template. "
                 "finetune it on some: python prepare.py NAME --chat --input=FILE, then "
                 "config/finetune_chat.py")
        self.tokenizer, self.generate = tokenizer, generate
        self.room = model.config.block_size - min(max_new_tokens, model.config.block_size // 2)
        self.messages = []

    def begin(self, system=None):
        """A new conversation; `system` stands before it (None: as before)."""
        if system is not None:
            self.messages = [{'role': 'system', 'content': system}] if system else []
        self.messages = [message for message in self.messages if message['role'] == 'system']

    def answer(self, question, write=lambda text: None):
        """The model's answer, given to `write` piece by piece. It is kept, also if it was interrupted. The
        oldest turns are left out where not all fit. ValueError if the question is too long or cannot be
        encoded."""
        n_system = len(self.messages) % 2
        messages, forgotten = [*self.messages, {'role': 'user', 'content': question}], 0
        while len(ids := self.format.render(messages, answer=True)[0].tolist()) > self.room:
            if len(messages) < n_system + 3:
                raise ValueError(f"that is longer than the model can read ({self.room} tokens)")
            del messages[n_system:n_system + 2]
            forgotten += 2
        if forgotten:
            write(f"({forgotten} earlier messages no longer fit and are forgotten)\n")
        sample = Sample(ids, len(ids), self.tokenizer, self.format.stop_ids)

        def on_token(new):
            sample.add(new.item())
            write(sample.new_text())
            return sample.done

        self.generate(ids, on_token)
        sample.finish()
        write(sample.new_text())
        self.messages = [*messages, {'role': 'assistant', 'content': sample.text}]
        return sample.text


def answer_file(session, questions):
    """Print the answer to each question, a conversation of its own; for scripts."""
    for question in questions:
        session.begin()
        try:
            print(session.answer(question).replace('\n', '\\n'), flush=True)
        except ValueError as e:
            fail(f"a prompt cannot be answered: {e}. shorten it")


def talk(session):
    """Turns at the terminal until Ctrl-D. Ctrl-C ends an answer."""
    print(HELP)
    while True:
        try:
            line = input('> ').strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        command, _, text = line.partition(' ')
        if command in ('/reset', '/system'):
            session.begin(text if command == '/system' else None)
        elif command.startswith('/'):
            print(HELP)
        elif line:
            try:
                session.answer(line, lambda text: print(escape_control_characters(text), end='', flush=True))
            except ValueError as e:
                print(f"({e})", end='')
            print()
