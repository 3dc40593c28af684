"""
Accuracy on HellaSwag, CORE and tasks of your own.

Names of benchmarks:

    hellaswag         https://github.com/rowanz/hellaswag, scored as https://github.com/karpathy/build-nanogpt
    arc_easy, ...     a task of the evaluation bundle (llm-foundry's Eval Gauntlet): core.yaml lists them,
                      eval_data/ has the examples, eval_meta_data.csv the accuracy of guessing. The bundle's
                      own hellaswag is called hellaswag_10shot here
    core              all tasks of core.yaml. CORE is the mean of their centered accuracies, which are 0 for
                      guessing and 1 if all answers are correct (https://arxiv.org/abs/2406.11794)
    FILE.jsonl        your own examples, one JSON object per line

The fields of an example determine how it is scored:

    ctx, endings, label                      HellaSwag: the ending with the lowest loss per token is chosen
    query, choices, gold                     multiple choice: the alternatives have the same beginning, and
                                             the one whose end has the lowest loss per token is chosen
    context_options, continuation, gold      schema: the alternatives have the same end, and the one in which
                                             this end has the lowest loss is chosen
    context, continuation                    language modeling: correct if each token of the continuation is
                                             the most likely one

A prompt consists of the end-of-text token, if the tokenizer has one, a number of solved examples (shots), and
an alternative. Prompts and scores are those of https://github.com/karpathy/nanochat, so they can be compared.
"""

import csv
import dataclasses
import json
import math
import os
import random

import torch
from torch.nn.utils.rnn import pad_sequence

from configurator import InputError, print0, process_ranks
from flatgpt.dataset import DATA_DIR
from flatgpt.evaluation import share_of_range
from flatgpt.files import first_line
from flatgpt.processes import all_reduce_sum
from flatgpt.sampling import without_cudnn_attention

# -----------------------------------------------------------------------------
# reading


@dataclasses.dataclass
class Example:
    kind: str  # 'hellaswag', 'choice', 'schema', 'language_modeling'
    context: str  # the text before the answer; '' if it is found by comparing the alternatives
    texts: list  # the alternatives, each with its context
    gold: int  # index of the correct alternative


@dataclasses.dataclass
class Task:
    name: str
    examples: list  # of Example
    n_shots: int  # number of solved examples in a prompt
    chance: float  # accuracy of guessing


def load_tasks(names, max_per_task, data_dir, tokenizer):
    """
    Return {name: [Task, ...]} for names such as 'hellaswag,core'. Raise InputError if a file cannot be read,
    or if the tokenizer lacks a character.

    max_per_task: the maximum number of examples of each task, always the same ones; 0: all
    data_dir: the folder of the files; None: data/
    """
    folder = data_dir or DATA_DIR
    tasks = {}
    for name in names.split(','):
        name = name.strip()
        if name == 'hellaswag':
            tasks[name] = [read_task(name, os.path.join(folder, 'hellaswag_val.jsonl'), max_per_task)]
        elif name.endswith('.jsonl'):
            tasks[name] = [read_task(name, name, max_per_task)]
        else:
            tasks[name] = []
            for task_name, settings in read_bundle(os.path.join(folder, 'eval_bundle')).items():
                if name in ('core', task_name):
                    tasks[name].append(read_task(task_name, limit=max_per_task, **settings))
            if not tasks[name]:
                raise InputError(f"there is no such task: {name}. Use hellaswag, core, a task in core.yaml "
                                 "or FILE.jsonl.")
        for task in tasks[name]:
            # if the tokenizer lacks a character, raise its InputError now rather than after an hour
            characters = set('\n' if task.n_shots else '')
            for example in task.examples:
                characters.update(*example.texts)
            try:
                tokenizer.encode(' '.join(sorted(characters)))  # with spaces, as ids may be numbers
            except InputError as e:
                raise InputError(f"the tokenizer cannot encode the task {task.name}: {e}") from e
    return tasks


def read_bundle(folder):
    """Return {name: arguments of read_task()} of the evaluation bundle, in the order of core.yaml."""
    settings = {}
    try:
        import yaml
        with open(os.path.join(folder, 'core.yaml'), encoding='utf-8-sig') as f:
            entries = yaml.safe_load(f)['icl_tasks']
        chance = {}
        with open(os.path.join(folder, 'eval_meta_data.csv'), newline='', encoding='utf-8-sig') as f:
            for row in csv.DictReader(f):
                chance[row['Eval Task']] = float(row['Random baseline']) / 100
        for entry in entries:
            label = entry['label']
            settings['hellaswag_10shot' if label == 'hellaswag' else label] = {
                'path': os.path.join(folder, 'eval_data', entry['dataset_uri']),
                'n_shots': int(entry['num_fewshot'][0]),
                'chance': chance[label],
                'delimiter': entry.get('continuation_delimiter', ' '),
            }
    except Exception as e:  # the files may contain anything
        raise InputError(f"the tasks of CORE cannot be read: {folder} ({first_line(e)}). Run "
                         "pip install pyyaml and python prepare.py core.") from e
    return settings


def read_task(name, path, limit, n_shots=0, chance=None, delimiter=' '):
    """
    Return the Task of a file of examples.

    limit: the maximum number of examples; 0: all. chance: the accuracy of guessing; None: computed from the
    numbers of alternatives. delimiter: the text between a context and its answer.
    """
    try:
        with open(path, encoding='utf-8-sig') as f:
            lines = [line for line in f if line.strip()]
        random.Random(1337).shuffle(lines)  # nanochat's seed, for the same examples
        if limit > 0:
            lines = lines[:limit]
        if not lines:
            raise ValueError("it is empty")
        examples = [parse_example(json.loads(line), delimiter) for line in lines]
    except Exception as e:  # the file may contain anything
        raise InputError(f"the examples of {name} cannot be read: {path} ({type(e).__name__}: "
                         f"{first_line(e)}). Run python prepare.py hellaswag or core; see docs/evaluation.md "
                         "for the format of your own.") from e
    if chance is None:
        chances = [1 / len(example.texts) for example in examples if len(example.texts) > 1]
        chance = sum(chances) / len(examples)
    return Task(name, examples, n_shots, chance)


def parse_example(fields, delimiter):
    """Return the Example of a JSON object."""
    gold = fields.get('gold', 0)
    context = ''
    if 'endings' in fields:
        kind = 'hellaswag'
        context = fields['ctx']
        texts = [context + ' ' + ending for ending in fields['endings']]
        gold = fields['label']
    elif 'choices' in fields:
        kind = 'choice'
        texts = [fields['query'] + delimiter + choice for choice in fields['choices']]
    elif 'context_options' in fields:
        kind = 'schema'
        texts = [option + delimiter + fields['continuation'] for option in fields['context_options']]
    else:
        kind = 'language_modeling'
        context = fields['context'].strip() + delimiter
        texts = [context + fields['continuation']]
    gold = float(gold)  # 1, '1' or, as pandas writes it, 1.0
    if gold not in range(len(texts)):
        raise ValueError(f"there is no alternative {gold}")
    return Example(kind, context, texts, int(gold))


# -----------------------------------------------------------------------------
# prompts


def few_shot_prompt(task, i):
    """Return the text before example i: other examples with their answers, chosen as in nanochat."""
    n_others = len(task.examples) - 1
    prompt = ''
    for k in random.Random(1234 + i).sample(range(n_others), min(task.n_shots, n_others)):
        shot = task.examples[k if k < i else k + 1]  # number k of the others, which skip example i
        prompt += shot.texts[shot.gold] + '\n\n'
    return prompt


def encode_example(task, i, tokenizer):
    """Return a pair (ids, index where the answer starts) for each alternative of example i, a list."""
    example = task.examples[i]
    if example.kind == 'hellaswag':  # as in build-nanogpt
        context = tokenizer.encode(example.context).tolist()
        endings = [tokenizer.encode(text[len(example.context):]).tolist() for text in example.texts]
        return [(context + ending, len(context)) for ending in endings]
    first = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    prompt = few_shot_prompt(task, i)
    rows = [first + tokenizer.encode(prompt + text).tolist() for text in example.texts]
    max_length = min(len(row) for row in rows) - 1  # an answer has at least one token
    if example.kind == 'schema':  # the answer is the end that all alternatives have in common
        n_answer = min(common_length([row[::-1] for row in rows]), max_length)
        return [(row, len(row) - n_answer) for row in rows]
    if example.kind == 'choice':  # the answer follows the beginning that all have in common
        start = min(common_length(rows), max_length)
    else:  # without the space before the answer, which belongs to its first token
        context = first + tokenizer.encode((prompt + example.context).strip()).tolist()
        start = min(common_length([rows[0], context]), max_length)
    return [(row, start) for row in rows]


def common_length(rows):
    """Return the number of ids with which all rows begin."""
    n = 0
    for ids in zip(*rows):
        if len(set(ids)) > 1:
            break
        n += 1
    return n


# -----------------------------------------------------------------------------
# scoring


def evaluate_tasks(model, tasks, tokenizer, ctx, should_stop=None):
    """
    Print and return the results of the tasks of load_tasks() as two dicts: a number for each name,
    {'hellaswag': accuracy, 'core': CORE, ...}, and the details of each task, {name: {'accuracy': ..., ...}}.

    All processes call this, after model.eval(). The results do not depend on the number of processes.
    should_stop: see text_loss(); after it has returned True, names that are not complete are missing.
    """
    details = {}
    metrics = {}
    for name, its_tasks in tasks.items():
        for task in its_tasks:
            if task.name not in details:  # a task may be named and be in core as well
                score = score_task(model, task, tokenizer, ctx, should_stop)
                if score is None:
                    return metrics, details
                details[task.name] = score
        if name != 'core':
            metrics[name] = details[its_tasks[0].name]['accuracy']
        else:
            centered = [details[task.name]['centered'] for task in its_tasks]
            metrics[name] = sum(centered) / len(centered)
            print0(f"CORE {metrics[name]:.4f}, the mean of {len(centered)} centered accuracies")
    return metrics, details


def score_task(model, task, tokenizer, ctx, should_stop=None):
    """Return accuracy, standard error and other details of a task, a dict; None if should_stop() is true."""
    assert not model.training, "call model.eval() first"
    n_correct = 0
    n_truncated = 0  # examples that are too long for the model
    for i, is_repeat in share_of_range(len(task.examples), process_ranks()):
        if should_stop is not None and should_stop():
            return None
        rows = encode_example(task, i, tokenizer)
        correct = is_correct(model, rows, task.examples[i].gold, ctx)
        if not is_repeat:
            n_correct += correct
            n_truncated += max(len(ids) for ids, _ in rows) > model.config.block_size
    n_correct, n_truncated = all_reduce_sum(torch.tensor([n_correct, n_truncated])).tolist()
    n = len(task.examples)
    accuracy = n_correct / n
    # standard deviation of the posterior under a uniform prior, which is not 0 even for a perfect score
    q = (n_correct + 1) / (n + 2)
    error = math.sqrt(q * (1 - q) / (n + 3))
    print0(f"{task.name}: accuracy {100 * accuracy:.2f} ± {100 * error:.2f}% of {n:,} examples "
           f"(guessing: {100 * task.chance:.0f}%; truncated: {n_truncated:,})")
    return {'accuracy': accuracy, 'error': error, 'chance': task.chance,
            'centered': (accuracy - task.chance) / (1 - task.chance), 'examples': n, 'shots': task.n_shots,
            'truncated': n_truncated}


@torch.no_grad()
def is_correct(model, rows, gold, ctx):
    """Return whether a model answers an example correctly. rows: see encode_example()."""
    device = next(model.parameters()).device
    block_size = model.config.block_size
    sequences = []
    targets = []
    for ids, start in rows:
        n_cut = max(0, len(ids) - block_size)  # a prompt that is too long loses its beginning
        start = max(1, start - n_cut)  # nothing predicts the first token
        sequences.append(torch.tensor(ids[n_cut:-1]))
        targets.append(torch.tensor([-1] * (start - 1) + ids[n_cut + start:]))
    x = pad_sequence(sequences, batch_first=True).to(device)  # (B, T)
    y = pad_sequence(targets, batch_first=True, padding_value=-1).to(device)  # (B, T), -1: no target
    is_language_modeling = len(rows) == 1
    # force_eager, as each example has another shape and would be compiled
    with torch.compiler.set_stance('force_eager'), without_cudnn_attention(), ctx:
        # without logits, the loss is computed in chunks: ten alternatives may have 10,000 tokens
        logits, nats = model(x, y, reduction='none', return_logits=is_language_modeling)
    if is_language_modeling:
        return bool(((logits.argmax(dim=-1) == y) | (y < 0)).all())
    losses = nats.view(y.shape).sum(1) / (y >= 0).sum(1)  # (B,), nats per token of an answer
    return bool(losses.argmin() == gold and losses[gold].isfinite())  # nan is never correct
