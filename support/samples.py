"""
What a model writes while it is trained: samples.md, a section each time. The processes share the prompts, and
each prompt has its own random numbers: the texts do not depend on the number of processes, nor on what was
drawn before, and training is left alone.
"""

import os
import re

import torch

from configurator import fail, warn
from dataset import SAMPLES, hash_seed
from support.evaluate import eval_mode
from support.files import write_whole
from support.prompts import prompts_in
from support.tokenizer import empty_prompt


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


def write(model, tokenizer, prompts, n_tokens, it, seed, dist, autocast, is_stopping=lambda: False):
    """[(prompt, continuation of n_tokens)], the same in all processes; None if is_stopping()."""
    device = model.lm_head.weight.device
    longest = max(len(ids) for _, ids in prompts)
    out = torch.zeros(len(prompts), longest + n_tokens, dtype=torch.int64, device=device)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # sampling needs cumsum: not deterministic on CUDA
    try:
        with eval_mode(model):
            # as many rounds in every process: is_stopping() and a sharded model need all of them
            for first in range(0, len(prompts), dist.world_size):
                if is_stopping():
                    return None
                i = first + dist.rank
                if i < len(prompts) or dist.sharded:
                    _, ids = prompts[min(i, len(prompts) - 1)]
                    random_seed = hash_seed(seed, SAMPLES, it, i)
                    with autocast:
                        row = generate(model, ids, n_tokens, tokenizer.n_vocab, random_seed)
                    out[i:i + 1, :len(row)] = row
    finally:
        torch.use_deterministic_algorithms(deterministic)
    dist.all_reduce_sum(out)
    return [(text, continuation(tokenizer, ids, row[len(ids):len(ids) + n_tokens]))
            for (text, ids), row in zip(prompts, out.tolist())]


def generate(model, ids, n_tokens, vocab_size, seed):
    """`ids` and n_tokens more, drawn as by sample.py's defaults; -1 if the logits are not finite."""
    device = model.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    idx = torch.tensor([ids], device=device)
    try:
        return model.generate(idx, n_tokens, 0.8, top_k=200, vocab_size=vocab_size, generator=generator)[0]
    except FloatingPointError:
        return torch.cat((idx[0], torch.full((n_tokens,), -1, device=device)))


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
    path = os.path.join(out_dir, 'samples.md')
    old = ''
    if os.path.exists(path):
        with open(path, encoding='utf-8') as f:
            old = f.read()
    content = '# Samples\n\n'
    for section in re.split(r'(?m)^(?=## after [\d,]+ iterations$)', old):
        heading = re.match(r'## after ([\d,]+) ', section)
        if heading and int(heading[1].replace(',', '')) < it:
            content += section
    content += f"## after {it:,} iterations\n\n"
    for prompt, text in texts:
        ticks = re.findall('`+', prompt + text)
        fence = '`' * max(3, 1 + max(map(len, ticks), default=0))  # longer than any in the text
        if prompt:
            content += f"{prompt!r} continues:\n\n"
        content += f"{fence}text\n{text}\n{fence}\n\n"
    write_whole(path, content.encode('utf-8', 'replace'))


def in_loop(out_dir, tokenizer, prompts_file, n_tokens, seed, model, dist, autocast, is_stopping):
    """For the training loop, the prompts read now: a function of the iteration that adds a section to
    samples.md (out_dir None: it only prints) and returns {}, as nothing is measured."""
    prompts = read_prompts(prompts_file, tokenizer)

    def sample(it):
        texts = write(model, tokenizer, prompts, n_tokens, it, seed, dist, autocast, is_stopping)
        if texts is None:
            return {}
        if dist.is_main and out_dir is not None:
            try:
                append(out_dir, it, texts)
            except OSError as e:  # a full disk must not end a run
                warn(f"samples.md could not be written ({e.strerror}), the run continues")
        prompt, text = texts[0]
        dist.print(f"step {it}: it writes {(prompt + text)[:100]!r}")
        return {}

    return sample
