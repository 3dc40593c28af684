"""
Accuracy on HellaSwag, CORE and tasks of your own. Call model.eval() first, in all processes; no result depends
on the number of processes. Names of benchmarks:

    hellaswag         https://github.com/rowanz/hellaswag, scored as https://github.com/karpathy/build-nanogpt
    arc_easy, ...     a task of the evaluation bundle (llm-foundry's Eval Gauntlet): core.yaml names it,
                      eval_data/ has its examples, eval_meta_data.csv the accuracy of guessing. The bundle's
                      own hellaswag is called hellaswag_10shot here
    core              all tasks of core.yaml. CORE is the mean of their centered accuracies: 0 for guessing,
                      1 for all correct (https://arxiv.org/abs/2406.11794)
    FILE.jsonl        your own examples

The fields of an example tell how its answer is chosen (docs/evaluation.md has a table):

    ctx, endings, label                      HellaSwag: the ending with the lowest loss per token
    query, choices, gold                     multiple choice: alternatives begin alike; the end with the
                                             lowest loss per token
    context_options, continuation, gold      schema: they end alike; the beginning that gives the end the
                                             lowest loss
    context, continuation                    language modeling: one answer, correct if each of its tokens is
                                             the most likely one

A prompt is the end-of-text token, where there is one, some solved examples (shots), then an alternative.
Prompts and scores are those of https://github.com/karpathy/nanochat, so that numbers compare.
"""

import csv
import dataclasses
import json
import math
import os
import random

import torch
from torch.nn.utils.rnn import pad_sequence

from configurator import InputError, print0
from dataset import DATA_DIR
from evaluation import shared_among
from files import first_line
from processes import all_reduce_sum
from sampling import without_cudnn_attention


# -----------------------------------------------------------------------------
# reading


@dataclasses.dataclass
class Task:
    name: str
    path: str  # of its examples, one JSON object per line
    chance: float = None  # accuracy of guessing; None: follows from the number of alternatives
    shots: int = 0  # solved examples in the prompt
    delimiter: str = ' '  # between context and answer
    # what read_examples() fills in. Of each example: its rows [(ids, where the answer begins)], one for each
    # alternative, and the number of the right one
    examples: list = dataclasses.field(default_factory=list)
    n_truncated: int = 0  # examples that are too long for the model


def load_tasks(names, max_per_task, data_dir, tokenizer, block_size):
    """{name: [Task, ...]} of names such as 'hellaswag,core', tokenized, from the files in data_dir (None:
    data/). max_per_task: the number of examples of each task, always the same ones; 0: all."""
    folder = data_dir or DATA_DIR
    tasks = {}
    for name in names.split(','):
        name = name.strip()
        try:
            if name == 'hellaswag':
                tasks[name] = [Task(name, os.path.join(folder, 'hellaswag_val.jsonl'))]
            elif name.endswith('.jsonl'):
                tasks[name] = [Task(name, os.path.expanduser(name))]
            else:
                bundle = read_bundle(os.path.join(folder, 'eval_bundle'))
                tasks[name] = [task for task in bundle if name in ('core', task.name)]
                if not tasks[name]:
                    raise InputError("core.yaml has no such task")
            for task in tasks[name]:
                read_examples(task, tokenizer, block_size, max_per_task)
        except Exception as e:  # a file may hold anything
            raise InputError(f"the task {name} cannot be read ({type(e).__name__}: {first_line(e)}). get its files with "
                  "python prepare.py hellaswag or core, name another --data_dir, or correct your own, see "
                  "docs/evaluation.md")
    return tasks


def read_bundle(folder):
    """The tasks of the evaluation bundle, in the order of core.yaml."""
    import yaml  # pip install pyyaml
    with open(os.path.join(folder, 'core.yaml'), encoding='utf-8-sig') as f:
        entries = yaml.safe_load(f)['icl_tasks']
    chance = {}
    with open(os.path.join(folder, 'eval_meta_data.csv'), newline='', encoding='utf-8-sig') as f:
        for row in csv.DictReader(f):
            chance[row['Eval Task']] = float(row['Random baseline']) / 100
    tasks = []
    for entry in entries:
        label = entry['label']
        name = 'hellaswag_10shot' if label == 'hellaswag' else label
        path = os.path.join(folder, 'eval_data', entry['dataset_uri'])
        tasks.append(Task(name, path, chance[label], int(entry['num_fewshot'][0]),
                          entry.get('continuation_delimiter', ' ')))
    return tasks


def read_examples(task, tokenizer, block_size, limit):
    """Fill the task from its file; limit: at most so many examples, 0: all."""
    with open(task.path, encoding='utf-8-sig') as f:
        lines = [line for line in f if line.strip()]
    # with nanochat's seeds, here and below: the same examples and prompts
    random.Random(1337).shuffle(lines)
    if limit > 0:
        lines = lines[:limit]
    if not lines:
        raise InputError(f"{task.path} is empty")
    parsed = []
    try:
        for line in lines:
            parsed.append(json.loads(line))
        n_others = len(parsed) - 1
        for i, line in enumerate(lines):
            chosen = random.Random(1234 + i).sample(range(n_others), min(task.shots, n_others))
            shots = [parsed[k + (k >= i)] for k in chosen]  # among all examples but this one
            rows, answer = render(parsed[i], shots, task.delimiter, tokenizer)
            if not 0 <= answer < len(rows):
                raise InputError(f"it has no alternative {answer}")
            if max(len(ids) for ids, _ in rows) > block_size:
                task.n_truncated += 1
            shortened = []
            for ids, start in rows:
                n_cut = max(0, len(ids) - block_size)  # a prompt that is too long loses its beginning
                start = max(1, start - n_cut)  # nothing predicts the first token
                shortened.append((torch.tensor(ids[n_cut:]), start))
            task.examples.append((shortened, answer))
    except Exception as e:  # the line may hold anything
        raise InputError(f"{e!r} in {task.path}, {line[:80]!r}")


def render(example, shots, delimiter, tokenizer):
    """([(ids, where the answer begins)] of the alternatives of an example, the number of the right one)."""
    if 'endings' in example:  # HellaSwag
        context = tokenizer.encode(example['ctx']).tolist()
        rows = []
        for ending in example['endings']:
            rows.append((context + tokenizer.encode(' ' + ending).tolist(), len(context)))
        return rows, whole_number(example['label'])
    first = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    prompt = ''
    for shot in shots:
        texts, answer = alternatives(shot, delimiter)
        prompt += texts[answer] + '\n\n'
    texts, answer = alternatives(example, delimiter)
    rows = [first + tokenizer.encode(prompt + text).tolist() for text in texts]
    n_shared_at_most = min(len(row) for row in rows) - 1  # every answer has at least one token
    if 'context_options' in example:  # schema
        endings = [row[::-1] for row in rows]
        n_shared = min(len(os.path.commonprefix(endings)), n_shared_at_most)
        return [(row, len(row) - n_shared) for row in rows], answer
    beginnings = rows
    if len(rows) == 1:  # language modeling
        # without the space before the answer: it belongs to the answer's first token
        context = (prompt + example['context'].strip() + delimiter).strip()
        beginnings = [rows[0], first + tokenizer.encode(context).tolist()]
    n_shared = min(len(os.path.commonprefix(beginnings)), n_shared_at_most)
    return [(row, n_shared) for row in rows], answer


def alternatives(example, delimiter):
    """(an example written out once for each alternative, the number of the right one)"""
    if 'choices' in example:
        texts = [example['query'] + delimiter + choice for choice in example['choices']]
        return texts, whole_number(example['gold'])
    if 'context_options' in example:
        ending = delimiter + example['continuation']
        texts = [context + ending for context in example['context_options']]
        return texts, whole_number(example['gold'])
    return [example['context'].strip() + delimiter + example['continuation']], 0


def whole_number(value):
    """Return the int of 1, '1' or 1.0, as pandas writes it."""
    number = float(value)
    if not number.is_integer():
        raise InputError(f"not a whole number: {value}")
    return int(number)

# -----------------------------------------------------------------------------
# scoring


def evaluate_tasks(model, tasks, ctx, rank=0, world_size=1, should_stop=None):
    """The results of load_tasks(), printed, as two dicts: one number for each name that was asked for,
    {'hellaswag': accuracy, 'core': CORE, ...}; all about each task, {name: {'accuracy': ..., ...}}.
    should_stop: as in text_loss(); if it returns True, names that are not complete are left out."""
    results = {}
    metrics = {}
    for name, parts in tasks.items():
        for task in parts:
            if task.name not in results:  # it may be named by itself, and be part of core
                found = score_task(model, task, ctx, rank, world_size, should_stop)
                if found is None:
                    return metrics, results
                results[task.name] = found
        metrics[name] = results[parts[0].name]['accuracy']
        if name == 'core':
            centered = [results[task.name]['centered'] for task in parts]
            metrics[name] = sum(centered) / len(centered)
            print0(f"CORE {metrics[name]:.4f}, the mean of {len(centered)} centered accuracies")
    return metrics, results


def score_task(model, task, ctx, rank=0, world_size=1, should_stop=None):
    """Accuracy, its standard error and what else is known of a task, a dict; None if should_stop() is true."""
    rows = []
    for its_rows, _ in task.examples:
        rows += its_rows
    losses, greedy = answer_losses(model, rows, ctx, rank, world_size, should_stop)
    if losses is None:
        return None
    n = len(task.examples)
    n_correct = 0
    chance = 0.0
    first = 0
    for its_rows, answer in task.examples:
        own = losses[first:first + len(its_rows)]
        if len(own) == 1:  # language modeling
            n_correct += greedy[first]
        else:
            n_correct += math.isfinite(own[answer]) and own.index(min(own)) == answer  # nan is never right
            chance += 1 / len(own)
        first += len(own)
    accuracy = n_correct / n
    chance = chance / n if task.chance is None else task.chance
    # a Bayesian's, with a flat prior: a few examples, all of them right, are no certainty
    q = (n_correct + 1) / (n + 2)
    standard_error = math.sqrt(q * (1 - q) / (n + 3))
    print0(f"{task.name}: accuracy {100 * accuracy:.2f} ± {100 * standard_error:.2f}% of {n:,} examples "
           f"(guessing: {100 * chance:.0f}%; truncated: {task.n_truncated:,})")
    return {'accuracy': accuracy, 'error': standard_error, 'chance': chance,
            'centered': (accuracy - chance) / (1 - chance), 'examples': n, 'shots': task.shots,
            'truncated': task.n_truncated}


@torch.no_grad()
def answer_losses(model, rows, ctx, rank=0, world_size=1, should_stop=None):
    """Two lists over rows, [(ids, where the answer begins)]: nats per token of the answer, and 1.0 if each of
    its tokens is the most likely one, else 0.0. The same in all processes. should_stop: as in text_loss();
    if it returns True, both are None."""
    assert not model.training, "call model.eval() first"
    device = next(model.parameters()).device
    # batches of similar lengths, of at most 2,048 tokens after padding: their logits take 0.4 GB, of 50,304
    # ids in float32
    batches = []
    for i in sorted(range(len(rows)), key=lambda i: len(rows[i][0])):
        if not batches or (len(batches[-1]) + 1) * len(rows[i][0]) > 2048:
            batches.append([])
        batches[-1].append(i)
    # each row has its own place; the device is asked for all of them at the end
    found = torch.zeros(2, len(rows), device=device)  # loss, greedy
    # texts have all lengths, and each would be compiled
    with torch.compiler.set_stance('force_eager'), without_cudnn_attention(), ctx:
        for batch, counts in shared_among(len(batches), rank, world_size):
            if should_stop is not None and should_stop():
                return None, None
            ids = pad_sequence([rows[i][0] for i in batches[batch]], batch_first=True)  # (B, T)
            x = ids[:, :-1].contiguous()
            y = torch.full_like(x, -1)  # targets: the answers
            for k, i in enumerate(batches[batch]):
                row, start = rows[i]
                y[k, start - 1:len(row) - 1] = row[start:]
            y = y.to(device)
            logits, nats = model(x.to(device), y, reduction='none')
            if counts:
                place = torch.tensor(batches[batch], device=device)
                found[0, place] = nats.view(y.shape).sum(1) / (y >= 0).sum(1)
                found[1, place] = ((logits.argmax(dim=-1) == y) | (y < 0)).all(dim=1).float()
    losses, greedy = all_reduce_sum(found).tolist()
    return losses, greedy
