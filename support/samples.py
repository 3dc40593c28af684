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
from support.evaluate import eval_mode, parse_interval
from support.files import write_whole
from support.tokenizer import empty_prompt


def prompts_in(text):
    """The prompts in a file's text: its lines but the empty ones; \\n is a new line inside a prompt."""
    lines = [line.rstrip('\r') for line in text.split('\n')]
    return [line.replace('\\n', '\n') for line in lines if line.strip()]


def read_prompts(path, tokenizer):
    """[(prompt, its ids)] of a file with a prompt per line, \\n for a new line. None: three empty ones."""
    prompts = ['', '', '']
    if path is not None:
        try:
            with open(path, encoding='utf-8') as f:
                prompts = prompts_in(f.read())
        except (OSError, UnicodeDecodeError) as e:
            reason = getattr(e, 'strerror', None) or e
            fail(f"sample_prompts cannot be read ({path}: {reason}). name a text file with a prompt per line")
        if not prompts:
            fail(f"sample_prompts is empty ({path}). write a prompt per line")
    try:
        return [(text, tokenizer.encode_prompt(text) or empty_prompt(tokenizer)) for text in prompts]
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


def style_problems(sample_tokens):
    try:
        parse_style(sample_tokens)
    except ValueError:
        return [f"sample_tokens is out of range ({sample_tokens}). use a million or less but above 0, and "
                "behind it, if you like, temperature (0 or more), top_k, top_p (up to 1) and prompts, as in "
                "'64 temperature=1 top_p=0.8 prompts=1'"]
    return []


def next_in_interval(it, interval):
    """The next iteration after `it` at which an interval ends."""
    (gap, growth), k, end = parse_interval(interval), 0, 0
    if growth == 1:
        return (it // gap + 1) * gap
    while end <= it:
        k += 1
        end = round(gap * (growth ** k - 1) / (growth - 1))
    return end


def choose(prompts, n, it, seed):
    """n of the prompts at random, others at each iteration; None: all."""
    if n is None or n >= len(prompts):
        return prompts
    generator = torch.Generator().manual_seed(hash_seed(seed, SAMPLES, it))
    return [prompts[i] for i in torch.randperm(len(prompts), generator=generator)[:n].tolist()]


def write(model, tokenizer, prompts, sample_tokens, it, seed, dist, autocast, is_stopping=lambda: False):
    """[(prompt, continuation)], the same in all processes; None if is_stopping()."""
    device, style = model.lm_head.weight.device, parse_style(sample_tokens)
    n_tokens, prompts = style['tokens'], choose(prompts, style['prompts'], it, seed)
    longest = max(len(ids) for _, ids in prompts)
    out = torch.zeros(len(prompts), longest + n_tokens, dtype=torch.int64, device=device)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # sampling needs cumsum: not deterministic on CUDA
    try:
        with eval_mode(model), uncompiled(model):
            # as many rounds in every process: is_stopping() and a sharded model need all of them
            for first in range(0, len(prompts), dist.world_size):
                if is_stopping():
                    return None
                i = first + dist.rank
                if i < len(prompts) or dist.sharded:
                    _, ids = prompts[min(i, len(prompts) - 1)]
                    random_seed = hash_seed(seed, SAMPLES, it, i)
                    with autocast:
                        row = generate(model, ids, style, tokenizer.n_vocab, random_seed)
                    out[i:i + 1, :len(row)] = row
    finally:
        torch.use_deterministic_algorithms(deterministic)
    dist.all_reduce_sum(out)
    return [(text, continuation(tokenizer, ids, row[len(ids):len(ids) + n_tokens]))
            for (text, ids), row in zip(prompts, out.tolist())]


def generate(model, ids, style, vocab_size, seed):
    """`ids` and what follows them, drawn in a style of parse_style's; -1 if the logits are not finite."""
    device = model.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    idx = torch.tensor([ids], device=device)
    try:
        return model.generate(idx, style['tokens'], style['temperature'], style['top_k'], style['top_p'],
                              vocab_size, generator=generator)[0]
    except FloatingPointError:
        return torch.cat((idx[0], torch.full((style['tokens'],), -1, device=device)))


def continuation(tokenizer, ids, new):
    """The text of the ids `new` that follow `ids`, up to a token that ends a text."""
    if -1 in new:
        return '(nothing: its logits are not finite)'
    for i, id in enumerate(new):
        if id in (tokenizer.stop_ids or ()):
            new = new[:i]
            break
    return tokenizer.decode(ids + new)[len(tokenizer.decode(ids)):]


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


def tell(it, prompt, text, dist, following):
    """The beginning of a sample on the console: a line of it; on a terminal some lines as they are."""
    if not dist.on_terminal:
        return dist.print(f"step {it}: it writes {(prompt + text)[:100]!r}{following}")
    from support.console import width
    lines = [line[:width() - 2] for line in escape_control_characters(prompt + text).expandtabs().split('\n')]
    dist.print(f"step {it}: it writes{following}\n" + '\n'.join(f'| {line}' for line in lines[:8]))


def in_loop(out_dir, tokenizer, prompts_file, sample_tokens, seed, model, dist, autocast, is_stopping,
            next_after=None):
    """For the training loop, the prompts read now: a function of the iteration that adds a section to
    samples.md (out_dir None: it only prints) and returns {}, as nothing is measured."""
    prompts = read_prompts(prompts_file, tokenizer)

    def sample(it):
        texts = write(model, tokenizer, prompts, sample_tokens, it, seed, dist, autocast, is_stopping)
        if texts is None:
            return {}
        if dist.is_main and out_dir is not None:
            try:
                append(out_dir, it, texts)
            except OSError as e:  # a full disk must not end a run
                warn(f"samples.md could not be written ({e.strerror}), the run continues")
        following = next_after(it) if next_after else it
        tell(it, *texts[0], dist, f" (next at step {following})" if following > it else '')
        return {}

    return sample


def samples_in_loop(run, model, dist, autocast, stop):
    """in_loop() as the knobs of a run ask for it."""
    k = run.knobs
    out_dir = None if k['eval_only'] else k['out_dir']

    def next_after(it):
        return min(next_in_interval(it, k['sample_interval']), k['max_iters'])
    return in_loop(out_dir, run.data.tokenizer(), k['sample_prompts'], k['sample_tokens'], k['seed'],
                   model, dist, autocast, stop.asks_to_stop, next_after)
