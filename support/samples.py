"""
Text while it is generated: whole characters only, and nothing of the text to stop at. A conversation that is
held (sample.py --chat). And what a model writes while it is trained: samples.md, a section each time. Each
prompt has its own random numbers, in every process the same: the texts do not depend on what was drawn
before, and training is left alone.
"""

import os
import re

import torch

from configurator import escape_control_characters, fail, out_of_range, warn
from dataset import SAMPLES, hash_seed
from support.chat import chat_format
from support.compiling import varying_shapes
from support.evaluate import Interrupted, eval_mode, next_end
from support.files import write_whole
from support.tokenizer import empty_prompt


class Sample:
    """A text that is being generated. `ids`: the prompt's, of which the first `hidden` are not shown."""

    def __init__(self, ids, hidden, tokenizer, stop_ids=(), stop_text=None):
        self.ids, self.tokenizer = ids, tokenizer
        self.stop_ids, self.stop_text = stop_ids, stop_text
        self.done = False  # it needs no more ids
        self.finished = False  # its text is complete
        self.shown = ids[hidden:]
        self.text = tokenizer.decode(self.shown)
        self.begin = len(self.text)  # where the stop text may begin: behind the prompt
        self.taken = 0  # characters that new_text() has returned
        # the ids from n_decoded on are not in the text yet. They are decoded together with those from
        # n_context on, as some tokenizers decode the beginning of a text differently
        self.n_context, self.n_decoded = 0, len(self.shown)

    def add(self, id):
        """Take the next id."""
        self.done = self.done or id in self.stop_ids
        if not self.done:
            self.shown.append(id)
            self.decode()

    def finish(self):
        """No more ids will come: decode what is left, be it part of a character."""
        self.finished = True
        self.decode()

    def decode(self):
        before = self.tokenizer.decode(self.shown[self.n_context:self.n_decoded])
        now = self.tokenizer.decode(self.shown[self.n_context:])
        if now.endswith('\ufffd') and not self.finished:
            return  # this character lacks some of its bytes
        self.text += now[len(before):]
        self.n_context, self.n_decoded = self.n_decoded, len(self.shown)
        if self.stop_text and (at := self.text.find(self.stop_text, self.begin)) >= 0:
            self.text, self.done = self.text[:at], True

    def new_text(self):
        """The text since the last call, without an end that may become the stop text."""
        end = len(self.text)
        if self.stop_text and not self.done and not self.finished:
            end = max(self.begin, self.taken, end - len(self.stop_text) + 1)
        new, self.taken = self.text[self.taken:end], end
        return new


# -----------------------------------------------------------------------------
# prompts


def read_text(path):
    """The text of a file, or of standard input ('-')."""
    try:
        with open(0 if path == '-' else path, encoding='utf-8', closefd=path != '-') as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as e:
        fail(f"no prompt in {path} ({getattr(e, 'strerror', None) or e}). name a file of UTF-8 text")


def prompts_in(path):
    """The prompts in a file: its lines but the empty ones; \\n is a new line inside a prompt."""
    prompts = [line.replace('\\n', '\n') for line in read_text(path).split('\n') if line.strip()]
    if not prompts:
        fail(f"no prompt in the file ({path}): it is empty. write one per line")
    return prompts


def begin(text, tokenizer, stop_text=None):
    """A Sample that continues `text`, to its end. ValueError if that cannot be encoded."""
    ids = tokenizer.encode_prompt(text) or empty_prompt(tokenizer)
    # a first token that nobody wrote, such as Llama's <s>, is not shown
    hidden = ids[:1] == [tokenizer.end_of_text] and not text.startswith(tokenizer.decode(ids[:1]))
    return Sample(ids, int(hidden), tokenizer, tokenizer.stop_ids or (), stop_text)


# -----------------------------------------------------------------------------
# in the training loop


def parse_style(sample_tokens):
    """{tokens, temperature, top_k, top_p} of 200 or '64 temperature=1 top_p=0.8'; what is not given is as in
    sample.py. ValueError for anything else."""
    style = {'tokens': 200, 'temperature': 0.8, 'top_k': 200, 'top_p': 1.0}
    for part in f"tokens={sample_tokens}".split():
        name, value = part.split('=')
        if name not in style:
            raise ValueError(name)
        style[name] = type(style[name])(value)
    if (out_of_range(style, above_zero='tokens top_k top_p', from_zero='temperature')
            or style['tokens'] > 1_000_000 or style['top_p'] > 1):
        raise ValueError(sample_tokens)
    return style


def write(model, tokenizer, prompts, sample_tokens, it, seed, autocast, poll=lambda: None):
    """[(prompt, continuation)], of which each process finds the same. prompts: [(text, its ids)]."""
    device, style, written = model.lm_head.weight.device, parse_style(sample_tokens), []
    n_tokens = style.pop('tokens')
    with eval_mode(model), varying_shapes(), autocast:
        for i, (text, ids) in enumerate(prompts):
            if poll() == 'stop':
                raise Interrupted
            generator = torch.Generator(device).manual_seed(hash_seed(seed, SAMPLES, it, i))
            sample = Sample(ids, 0, tokenizer, tokenizer.stop_ids or ())
            try:
                out = model.generate(torch.tensor([ids], device=device), n_tokens, **style,
                                     vocab_size=tokenizer.n_vocab, generator=generator)
            except FloatingPointError as e:
                written.append((text, f"(nothing: {e})"))
                continue
            for id in out[0, len(ids):].tolist():
                sample.add(id)
            sample.finish()
            written.append((text, sample.text[sample.begin:]))
    return written


def append(out_dir, it, texts):
    """Add a section for iteration `it` to samples.md, in place of those of this and later iterations that an
    interrupted run may have left."""
    path, content = os.path.join(out_dir, 'samples.md'), '# Samples\n\n'
    if os.path.exists(path):
        # somebody may have written into it; bytes that are not UTF-8 stay as they are
        with open(path, encoding='utf-8', errors='surrogateescape') as f:
            sections = re.split(r'(?m)^(?=## after \d[\d,]{,20} iterations$)', f.read())
        for section in sections[1:]:
            if int(section.split()[2].replace(',', '')) < it:
                content += section
    content += f"## after {it:,} iterations\n\n"
    for prompt, text in texts:
        fence = max(['``', *re.findall('`+', prompt + text)], key=len) + '`'  # longer than any in the text
        if prompt:
            content += f"{prompt!r} continues:\n\n"
        content += f"{fence}text\n{text}\n{fence}\n\n"
    write_whole(path, content.encode('utf-8', 'surrogateescape'))


def samples_in_loop(run, model, dist, autocast, stop):
    """For the training loop, the prompts read now: a function of the iteration that adds a section to
    samples.md and returns {}, as nothing is measured."""
    k, tokenizer = run.knobs, run.data.tokenizer()
    texts = prompts_in(k['sample_prompts']) if k['sample_prompts'] else [''] * 3
    try:
        prompts = [(text, begin(text, tokenizer).ids) for text in texts]
    except ValueError as e:
        fail(f"a prompt cannot be encoded: {e}. use others with --sample_prompts=FILE")

    def sample(it):
        texts = write(model, tokenizer, prompts, k['sample_tokens'], it, k['seed'], autocast, stop.poll)
        if dist.is_main and not k['eval_only']:
            try:
                append(k['out_dir'], it, texts)
            except OSError as e:  # a full disk must not end a run
                warn(f"samples.md could not be written ({e.strerror}), the run continues")
        following = min(next_end(it + 1, k['sample_interval']), k['max_iters'])
        then = f" (next at step {following})" if following > it else ''
        dist.print(f"step {it}: it writes {''.join(texts[0])[:100]!r}{then}")
        return {}

    return sample


# -----------------------------------------------------------------------------
# a conversation at a terminal, or one answer to each prompt


class Session:
    """A model and the messages so far. generate: a function (ids, on_token) that stops at the stop ids."""

    def __init__(self, model, tokenizer, max_new_tokens, generate):
        self.format = chat_format(tokenizer)
        if self.format is None:
            fail("this model knows no conversations: its tokenizer has neither roles nor a chat template. "
                 "python prepare.py NAME --chat --input=FILE makes a dataset, for config/finetune_chat.py")
        self.tokenizer, self.generate = tokenizer, generate
        self.room = model.config.block_size - min(max_new_tokens, model.config.block_size // 2)
        self.system, self.turns = [], []  # messages

    def answer(self, question, write=lambda text: None):
        """The model's answer, given to `write` piece by piece. It is kept, also if it was interrupted. The
        oldest turns are left out where not all fit. ValueError if the question is too long or cannot be
        encoded."""
        turns = [*self.turns, {'role': 'user', 'content': question}]
        while len(ids := self.format.render(self.system + turns, answer=True)[0].tolist()) > self.room:
            if len(turns) == 1:
                raise ValueError(f"that is longer than what the answer leaves free ({self.room} tokens; less "
                                 "--max_new_tokens leaves more)")
            del turns[:2]
        if len(turns) <= len(self.turns):
            write("(earlier messages no longer fit and are forgotten)\n")
        sample = Sample(ids, len(ids), self.tokenizer, self.format.stop_ids)

        def on_token(new):
            sample.add(new.item())
            write(sample.new_text())
            return sample.done

        self.generate(ids, on_token)
        sample.finish()
        write(sample.new_text())
        self.turns = [*turns, {'role': 'assistant', 'content': sample.text}]
        return sample.text


def answer_file(session, questions):
    """Print the answer to each question, a conversation of its own; for scripts."""
    for question in questions:
        session.turns = []
        try:
            print(session.answer(question).replace('\n', '\\n'), flush=True)
        except ValueError as e:
            fail(f"a prompt cannot be answered: {e}. shorten it")


def talk(session):
    """Turns at the terminal until Ctrl-D. Ctrl-C ends an answer."""
    print("/system TEXT begins a new conversation, before which TEXT stands, if there is any; Ctrl-D ends")
    while True:
        try:
            line = input('> ').strip()
        except (EOFError, OSError, KeyboardInterrupt):  # OSError: the terminal is gone
            print()
            return
        if line.startswith('/system'):
            text = line.removeprefix('/system').strip()
            session.system, session.turns = [{'role': 'system', 'content': text}] if text else [], []
        elif line:
            try:
                session.answer(line, lambda text: print(escape_control_characters(text), end='', flush=True))
            except ValueError as e:
                print(f"({e})", end='')
            print()
