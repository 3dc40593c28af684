"""
What a model writes while it is trained: samples.md, a section each time. The processes share the prompts, and
each prompt has its own random numbers: the texts do not depend on the number of processes, nor on what was
drawn before, and training is left alone.
"""

import os
import re

import torch

from configurator import escape_control_characters, fail, warn
from dataset import SAMPLES, hash_seed
from support.compiling import uncompiled
from support.console import width
from support.evaluate import eval_mode, next_end, rounds
from support.files import write_whole
from support.streaming import Sample
from support.tokenizer import empty_prompt


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
    if not prompts and path != '-':  # a conversation that ends before it begins is none
        fail(f"no prompt in the file ({path}): it is empty. write one per line")
    return prompts


def begin(text, tokenizer, stop_ids=(), stop_text=None):
    """A Sample that continues `text`. ValueError if that cannot be encoded."""
    try:
        ids = tokenizer.encode_prompt(text)
    except ValueError:
        if text != '\n':  # the usual beginning, also where the vocabulary has no new line
            raise
        ids = []
    # a first token that the tokenizer adds by itself, such as Llama's <s>, is not shown
    hidden = ids[:1] == [tokenizer.end_of_text] and not text.startswith(tokenizer.decode(ids[:1]))
    return Sample(ids or empty_prompt(tokenizer), int(hidden), tokenizer, stop_ids, stop_text)


def read_prompts(path, tokenizer):
    """[(prompt, its ids)] of a file with a prompt per line. None: three empty ones."""
    prompts = ['', '', ''] if path is None else prompts_in(path)
    try:
        return [(text, begin(text, tokenizer).ids) for text in prompts]
    except ValueError as e:
        fail(f"a prompt cannot be encoded: {e}. use others with --sample_prompts=FILE")


def parse_style(sample_tokens):
    """{tokens, temperature, top_k, top_p, prompts} of 200 or '64 temperature=1 top_p=0.8 prompts=1'; what is
    not given is as in sample.py, prompts None: all. ValueError for anything else."""
    style = {'temperature': 0.8, 'top_k': 200, 'top_p': None, 'prompts': None}
    number, *others = str(sample_tokens).split()
    style['tokens'] = int(number)
    for other in others:
        name, _, value = other.partition('=')
        if name not in style:
            raise ValueError(name)
        style[name] = float(value) if name in ('temperature', 'top_p') else int(value)
    for name, value in style.items():
        if value is not None and not (value > 0 or (name == 'temperature' and value == 0)):
            raise ValueError(name)
    if style['tokens'] > 10**6 or (style['top_p'] or 0) > 1:
        raise ValueError(sample_tokens)
    return style


def choose(prompts, n, it, seed):
    """n of the prompts at random, others at each iteration; None: all."""
    if n is None or n >= len(prompts):
        return prompts
    generator = torch.Generator().manual_seed(hash_seed(seed, SAMPLES, it))
    return [prompts[i] for i in torch.randperm(len(prompts), generator=generator)[:n].tolist()]


def write(model, tokenizer, prompts, sample_tokens, it, seed, dist, autocast, is_stopping=lambda: False):
    """[(prompt, continuation)], the same in all processes."""
    device, style = model.lm_head.weight.device, parse_style(sample_tokens)
    n_tokens, prompts = style['tokens'], choose(prompts, style['prompts'], it, seed)
    longest = max(len(ids) for _, ids in prompts)
    out = torch.zeros(len(prompts), longest + n_tokens, dtype=torch.int64, device=device)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # sampling needs cumsum: not deterministic on CUDA
    try:
        with eval_mode(model), uncompiled(model):
            for i, counts in rounds(len(prompts), dist, is_stopping):
                with autocast:
                    row = generate(model, prompts[i][1], style, tokenizer.n_vocab,
                                   hash_seed(seed, SAMPLES, it, i))
                if counts:
                    out[i, :len(row)] = row
    finally:
        torch.use_deterministic_algorithms(deterministic)
    dist.all_reduce_sum(out)
    return [(text, continuation(tokenizer, ids, row[len(ids):len(ids) + n_tokens]))
            for (text, ids), row in zip(prompts, out.tolist())]


def generate(model, ids, style, vocab_size, seed):
    """`ids` and what follows them, drawn in a style of parse_style's; -1 if the logits are not finite."""
    device = model.lm_head.weight.device
    idx = torch.tensor([ids], device=device)
    try:
        return model.generate(idx, style['tokens'], style['temperature'], style['top_k'], style['top_p'],
                              vocab_size, generator=torch.Generator(device).manual_seed(seed))[0]
    except FloatingPointError:
        return torch.cat((idx[0], torch.full((style['tokens'],), -1, device=device)))


def continuation(tokenizer, ids, new):
    """The text of the ids `new` that follow `ids`, up to a token that ends a text."""
    if -1 in new:
        return '(nothing: its logits are not finite)'
    sample = Sample(ids, 0, tokenizer, tokenizer.stop_ids or ())
    for id in new:
        sample.add(id)
    sample.finish()
    return sample.text[sample.begin:]


def append(out_dir, it, texts):
    """Add a section for iteration `it` to samples.md, in place of those of this and later iterations that an
    interrupted run may have left."""
    path, old, content = os.path.join(out_dir, 'samples.md'), '', '# Samples\n\n'
    if os.path.exists(path):
        # somebody may have written into it; bytes that are not UTF-8 stay as they are
        with open(path, encoding='utf-8', errors='surrogateescape') as f:
            old = f.read()
    for section in re.split(r'(?m)^(?=## after [0-9][0-9,]{0,20} iterations$)', old)[1:]:
        if int(section.split()[2].replace(',', '')) < it:
            content += section
    new = f"## after {it:,} iterations\n\n"
    for prompt, text in texts:
        ticks = re.findall('`+', prompt + text)
        fence = '`' * max(3, 1 + max(map(len, ticks), default=0))  # longer than any in the text
        if prompt:
            new += f"{prompt!r} continues:\n\n"
        new += f"{fence}text\n{text}\n{fence}\n\n"
    write_whole(path, content.encode('utf-8', 'surrogateescape') + new.encode('utf-8', 'replace'))


def tell(it, text, following, dist):
    """The beginning of a sample on the console: a line of it; on a terminal some lines as they are."""
    then = f" (next at step {following})" if following > it else ''
    if not dist.on_terminal:
        return dist.print(f"step {it}: it writes {text[:100]!r}{then}")
    lines = escape_control_characters(text).expandtabs().split('\n')[:8]
    dist.print(f"step {it}: it writes{then}\n" + '\n'.join(f'| {line[:width() - 2]}' for line in lines))


def samples_in_loop(run, model, dist, autocast, stop):
    """For the training loop, the prompts read now: a function of the iteration that adds a section to
    samples.md and returns {}, as nothing is measured."""
    k, tokenizer = run.knobs, run.data.tokenizer()
    prompts = read_prompts(k['sample_prompts'], tokenizer)

    def sample(it):
        texts = write(model, tokenizer, prompts, k['sample_tokens'], it, k['seed'], dist, autocast,
                      stop.asks_to_stop)
        if dist.is_main and not k['eval_only']:
            try:
                append(k['out_dir'], it, texts)
            except OSError as e:  # a full disk must not end a run
                warn(f"samples.md could not be written ({e.strerror}), the run continues")
        tell(it, ''.join(texts[0]), min(next_end(it + 1, k['sample_interval']), k['max_iters']), dist)
        return {}

    return sample
