"""
What a model writes while it is trained: samples.md, a section each time. The prompts are shared out over the processes, each has random
numbers of its own, so the texts depend neither on the number of processes nor on what was drawn before, and training is left alone.
"""

import math
import os
import re

import torch

from configurator import fail, warn
from dataset import empty_prompt, hash64, write_whole


def due(it, interval, growth=1.0):
    """Whether iteration `it` is one to sample at: every `interval`, each gap `growth` times the one before. A function of `it`
    alone, so a resume agrees."""
    if growth == 1:
        return it % interval == 0
    k = round(math.log1p(it * (growth - 1) / interval) / math.log(growth))  # the gap that ends nearest to `it`
    return it == round(interval * (growth ** k - 1) / (growth - 1))


def read_prompts(path, tokenizer):
    """[(prompt, its ids)] of a file with a prompt per line (\\n in it is a new line); without a file three empty ones."""
    lines = ['', '', '']
    if path is not None:
        try:
            with open(path, encoding='utf-8') as f:
                lines = [line.rstrip('\r\n').replace('\\n', '\n') for line in f if line.strip()]
        except (OSError, UnicodeDecodeError) as e:
            fail(f"sample_prompts cannot be read ({path}: {getattr(e, 'strerror', None) or e}). name a text file with a prompt per line")
        if not lines:
            fail(f"sample_prompts is empty ({path}). write a prompt per line")
    try:
        return [(line, tokenizer.encode_prompt(line) or empty_prompt(tokenizer)) for line in lines]
    except ValueError as e:
        fail(f"a prompt cannot be encoded: {e}. use others with --sample_prompts=FILE")


@torch.no_grad()
def write(model, tokenizer, prompts, n_tokens, it, seed, procs, autocast, stop=lambda: False):
    """[(prompt, continuation)] of n_tokens each, the same in all processes. None if stop() says so."""
    device, was_training = model.lm_head.weight.device, model.training
    out = torch.zeros(len(prompts), max(len(ids) for _, ids in prompts) + n_tokens, dtype=torch.int64, device=device)
    exact = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # a draw wants a cumulated sum, for which CUDA has no deterministic one
    model.eval()
    try:
        for i in range(procs.rank, len(prompts) + procs.rank, procs.world_size):  # as often in every process, as stop() may ask all
            if stop():
                return None
            if i < len(prompts) or procs.sharded:  # blocks are gathered by all or by none
                ids, generator = prompts[min(i, len(prompts) - 1)][1], torch.Generator(device).manual_seed(int(hash64(seed, 4, it, i)[0]) >> 1)
                with autocast:
                    row = model.generate(torch.tensor([ids], device=device), n_tokens, 0.8, 200, None, tokenizer.n_vocab, None, generator)[0]  # as sample.py does
                out[i:i + 1, :len(row)] = row
    finally:
        torch.use_deterministic_algorithms(exact)
        model.train(was_training)
    texts = []
    for (prompt, ids), row in zip(prompts, procs.sum(out).tolist()):
        new = row[len(ids):len(ids) + n_tokens]
        new = new[:next((i for i, id in enumerate(new) if id in (tokenizer.stop_ids or ())), None)]
        before = tokenizer.decode(ids)
        texts.append((prompt, tokenizer.decode(ids + new)[len(before):]))
    return texts


SECTION = r'(?m)^(?=## after [\d,]+ iterations$)'  # where one begins


def append(out_dir, it, texts):
    """A section for iteration `it` at the end of samples.md, in place of those of this and later ones that an interrupted run may have left."""
    path = os.path.join(out_dir, 'samples.md')
    old = ''
    if os.path.exists(path):
        with open(path, encoding='utf-8') as f:
            old = f.read()
    sections = [part for part in re.split(SECTION, old) if (m := re.match(r'## after ([\d,]+) ', part)) and int(m[1].replace(',', '')) < it]
    section = f"## after {it:,} iterations\n\n"
    for prompt, text in texts:
        fence = '`' * max(3, 1 + max(map(len, re.findall('`+', prompt + text)), default=0))
        section += (f"{prompt!r} goes on:\n\n" if prompt else '') + f"{fence}text\n{text}\n{fence}\n\n"
    write_whole(path, ('# What it writes\n\n' + ''.join([*sections, section])).encode('utf-8', 'replace'))


def writer(out_dir, tokenizer, path, n_tokens, seed, model, procs, autocast, stop):
    """A job for the training loop, its prompts read now: job(it) adds a section to samples.md, unless out_dir is None."""
    prompts = read_prompts(path, tokenizer)

    def job(it):
        texts = write(model, tokenizer, prompts, n_tokens, it, seed, procs, autocast, stop)
        if texts is None:
            return None
        if procs.is_main and out_dir is not None:
            try:
                append(out_dir, it, texts)
            except OSError as e:  # a full disk must not end a run
                warn(f"samples.md could not be written ({e.strerror}), the run goes on")
        prompt, text = texts[0]
        procs.print(f"step {it}: it writes {(prompt + text)[:100]!r}")
        return {'sample': True}
    return job
