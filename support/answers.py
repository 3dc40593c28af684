"""
Questions whose answers are generated and compared, `eval.py --tasks=FILE.jsonl`. A line of the file:

    {"kind": "generate", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}
    {"kind": "generate", "prompt": "2 + 3 =", "answer": "5", "group": "sum"}

The model answers greedily; an answer is right if it is `answer`, but for spaces at its ends. A prompt is
continued as plain text up to the end of its line. With "group" each group is reported as well.
"""

import collections
import itertools
import json
import os

import torch

from configurator import fail
from support.chat_format import chat_format
from support.evaluate import eval_mode
from support.tasks import share_of


def first_row(path):
    """The first line of a file of tasks, a dict."""
    try:
        with open(path, encoding='utf-8') as f:
            row = json.loads(next((line for line in f if line.strip()), '{}'))
        return row if isinstance(row, dict) else {}
    except (OSError, ValueError, RecursionError) as e:
        reason = getattr(e, 'strerror', None) or e
        fail(f"the tasks cannot be read ({path}: {reason}). name a .jsonl file")


def is_generated(name):
    """Whether a name among --tasks is a file of questions whose answers are generated."""
    return name.endswith('.jsonl') and first_row(os.path.expanduser(name)).get('kind') == 'generate'


def read_questions(path, tokenizer, block_size, max_examples=None):
    """[(ids of the prompt, answer, group)]; every mistake ends the script with one line."""
    questions, form = [], chat_format(tokenizer)
    try:
        with open(path, encoding='utf-8') as f:
            lines = [(n, line) for n, line in enumerate(f, 1) if line.strip()][:max_examples]
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, 'strerror', None) or e
        fail(f"the questions cannot be read ({path}: {reason}). name a .jsonl file")
    for number, line in lines:
        try:
            row = json.loads(line)
            if row.get('kind') != 'generate' or not isinstance(row.get('answer'), str):
                raise ValueError("it needs \"kind\": \"generate\" and an \"answer\"")
            ids = prompt_ids(row, tokenizer, form)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            fail(f"{path}:{number} is no question ({str(e)[:150]}). see docs/evaluation.md")
        if len(ids) >= block_size:
            fail(f"{path}:{number} has {len(ids)} tokens, and the model reads {block_size}. take it out, or "
                 "use a model with a larger block_size")
        questions.append((ids, row['answer'].strip(), str(row.get('group', ''))))
    if not questions:
        fail(f"{path} has no question. see docs/evaluation.md")
    return questions


def prompt_ids(row, tokenizer, form):
    if 'messages' not in row:
        return tokenizer.encode_prompt(row['prompt'])
    if form is None:
        raise ValueError("it is a conversation, and this model's tokenizer has neither the roles nor a chat "
                         "template")
    return form.render(row['messages'], answer=True)[0].tolist()


def score_answers(model, tokenizer, questions, batch_size, dist, autocast, tick=lambda done, n: None):
    """{group: what eval.json says of it}, with '' for all questions; the processes share them."""
    device, form = model.lm_head.weight.device, chat_format(tokenizer)
    stop = form.stop_ids if form else list(tokenizer.stop_ids or ())
    order = sorted(range(len(questions)), key=lambda i: len(questions[i][0]))
    batches = []  # of prompts of one length
    for _, alike in itertools.groupby(order, lambda i: len(questions[i][0])):
        alike = list(alike)
        batches += [alike[i:i + batch_size] for i in range(0, len(alike), batch_size)]
    right = torch.zeros(len(questions), device=device)
    with eval_mode(model):
        # as many rounds in every process: a sharded model needs all of them
        for first in range(0, len(batches), dist.world_size):
            tick(min(first + dist.world_size, len(batches)), len(batches))
            b = first + dist.rank
            if b >= len(batches) and not dist.sharded:
                continue
            numbers = batches[min(b, len(batches) - 1)]
            rows = [questions[i] for i in numbers]
            with autocast:
                answers = greedy_answers(model, tokenizer, [ids for ids, _, _ in rows], stop,
                                         max(len(tokenizer.encode(answer)) for _, answer, _ in rows) + 8)
            if b < len(batches):
                found = [float(given == answer) for given, (_, answer, _) in zip(answers, rows)]
                right[numbers] = torch.tensor(found, device=device)
    dist.all_reduce_sum(right)
    groups = collections.defaultdict(list)
    for (_, _, group), value in zip(questions, right.tolist()):
        groups[''].append(value)
        if group:
            groups[group].append(value)
    return {name: share_of(values) for name, values in groups.items()}


def greedy_answers(model, tokenizer, prompts, stop, max_new_tokens):
    """The texts that follow prompts of one length, up to a stop id or, without one, the end of the line."""
    idx = torch.tensor(prompts, device=model.lm_head.weight.device)
    out = model.generate(idx, max_new_tokens, temperature=0, vocab_size=tokenizer.n_vocab, stop=stop or None)
    answers = []
    for row in out[:, idx.size(1):].tolist():
        ends = [i for i, id in enumerate(row) if id in stop]
        text = tokenizer.decode(row[:ends[0]] if ends else row)
        answers.append(text.strip() if ends else text.strip().split('\n')[0].strip())
    return answers

