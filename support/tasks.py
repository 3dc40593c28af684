"""
Benchmarks: examples with known answers, and how many of them a model gets right.

    hellaswag            four endings of a sentence, from https://github.com/rowanz/hellaswag, scored as in
                         https://github.com/karpathy/build-nanogpt: context and ending are encoded separately
    arc_easy, copa, ...  a task of the evaluation bundle (llm-foundry's Eval Gauntlet): core.yaml names it,
                         eval_data/ has its examples, eval_meta_data.csv the accuracy of guessing. The
                         bundle's own hellaswag is called hellaswag_10shot here
    core                 all tasks of core.yaml. CORE is the mean of their centered accuracies: 0 for
                         guessing, 1 for all correct (https://arxiv.org/abs/2406.11794)

The bundle's prompts and scores are those of https://github.com/karpathy/nanochat, so that numbers compare:
the end-of-text token, where there is one, some solved examples (shots), then one of the alternatives.
    multiple_choice      they begin alike. The model chooses the end with the lowest loss per token
    schema               they end alike. It chooses the beginning that gives the end the lowest loss
    language_modeling    correct if each token of the answer is the most likely one

Questions whose answers are generated and compared, `eval.py --tasks=FILE.jsonl`. A line of the file:

    {"kind": "generate", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}
    {"kind": "generate", "prompt": "2 + 3 =", "answer": "5", "group": "sum"}

The model answers greedily; an answer is right if it is `answer`, but for spaces at its ends. A prompt is
continued as plain text up to the end of its line. With "group" each group is reported as well.
"""

import collections
import csv
import dataclasses
import itertools
import json
import math
import os
import random
import re

import numpy as np
import torch
from torch.nn import functional as F

from configurator import fail
from dataset import DATA_DIR
from support.chat import chat_format
from support.compiling import uncompiled
from support.errors import first_line
from support.evaluate import eval_mode
from support.varying_shapes import varying_shapes

HELLASWAG_URL = 'https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl'
BUNDLE_URL = 'https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip'
# what an example has, by kind of task
FIELDS = {'hellaswag': {'ctx': str, 'endings': list, 'label': int},
          'multiple_choice': {'query': str, 'choices': list, 'gold': int},
          'schema': {'context_options': list, 'continuation': str, 'gold': int},
          'language_modeling': {'context': str, 'continuation': str}}


@dataclasses.dataclass
class Task:
    name: str
    path: str  # of its examples, one JSON object per line
    kind: str  # see the top of this file
    chance: float  # the accuracy of guessing
    shots: int = 0  # solved examples in the prompt
    delimiter: str = ' '  # between context and answer
    # filled by load_task()
    answers: list = dataclasses.field(default_factory=list)  # per example: the correct alternative's number
    rows: list = dataclasses.field(default_factory=list)  # per alternative: (example, ids, answer's start)
    truncated: int = 0  # examples that are too long for the model


# -----------------------------------------------------------------------------
# reading


def split_names(text):
    """The names in a list such as 'hellaswag,core', each once."""
    names = [name.strip() for name in text.split(',')]
    return list(dict.fromkeys(filter(None, names)))


def load_task(name, folder, tokenizer, block_size, max_examples=None):
    """The task `name` from the files in `folder`, tokenized; at most max_examples, always the same ones."""
    if name == 'hellaswag':
        task = Task(name, os.path.join(folder, 'hellaswag_val.jsonl'), 'hellaswag', 0.25)
        remedy = f"download {HELLASWAG_URL}"
    elif name.endswith('.jsonl'):
        task, remedy = task_of_file(os.path.expanduser(name)), "name a file that is there"
    else:
        tasks = bundle(folder)
        if name not in tasks:
            limit = ". eval.py takes --max_per_task=N in place of NAME:N" if ':' in name else ''
            fail(f"no such task ({name}). use hellaswag, core, or one of {', '.join(tasks)}{limit}")
        task = tasks[name]
        remedy = f"download {BUNDLE_URL} and unpack it there"
    if not os.path.exists(task.path):
        fail(f"the examples of {name} are missing ({task.path}). {remedy}; --data_dir names another folder "
             f"than {folder}")
    examples = read_examples(task.path, task.kind)
    random.Random(1337).shuffle(examples)  # nanochat's seeds, here and below: the same examples and prompts
    examples = examples[:max_examples]
    for i, example in enumerate(examples):
        others = len(examples) - 1
        picked = random.Random(1234 + i).sample(range(others), min(task.shots, others))
        shots = [examples[k if k < i else k + 1] for k in picked]  # any example but this one
        try:
            rows = render(task, example, shots, tokenizer)
        except ValueError as e:
            fail(f"{name} cannot be encoded: {e}. leave it out, or train with a tokenizer that has all "
                 "characters: byte, gpt2, ...")
        task.answers.append(answer_of(example))
        task.truncated += max(len(ids) for ids, _ in rows) > block_size
        for ids, start in rows:
            cut = max(0, len(ids) - block_size)  # a prompt that is too long loses its beginning
            ids = np.array(ids[cut:], dtype=np.int32)
            task.rows.append((i, ids, max(1, start - cut)))  # nothing predicts the first token
    return task


def task_of_file(path):
    """The Task in a file of one's own, whose lines say their kind."""
    row = first_row(path)
    kind = row.get('kind')
    if kind not in ('multiple_choice', 'schema', 'language_modeling'):
        fail(f"{path} has tasks of an unknown kind ({kind!r:.40}). use generate, multiple_choice, schema or "
             "language_modeling: docs/evaluation.md")
    alternatives = row.get('choices') or row.get('context_options') or []
    chance = 0.0 if kind == 'language_modeling' or len(alternatives) < 2 else 1 / len(alternatives)
    return Task(os.path.basename(path), path, kind, chance)


def answer_of(example):
    """The number of an example's correct alternative."""
    return example.get('gold', example.get('label', 0))


def bundle(folder):
    """{name: Task} of the tasks in eval_bundle/core.yaml, their examples not read yet."""
    root = os.path.join(folder, 'eval_bundle')
    try:
        import yaml
    except ImportError:
        fail("the evaluation bundle's core.yaml needs a package that is not installed (yaml). pip install "
             "pyyaml")
    try:
        return read_bundle(root, yaml.safe_load)
    except FileNotFoundError as e:
        fail(f"the evaluation bundle is missing ({e.filename}). download {BUNDLE_URL} and unpack it in "
             f"{folder}; --data_dir names another folder")
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError, AssertionError,
            RecursionError) as e:
        reason = first_line(e)
        fail(f"the evaluation bundle in {root} cannot be read ({type(e).__name__}: {reason}). download "
             f"{BUNDLE_URL} again")


def read_bundle(root, load_yaml):
    with open(os.path.join(root, 'core.yaml'), encoding='utf-8') as f:
        entries = load_yaml(f)['icl_tasks']
    with open(os.path.join(root, 'eval_meta_data.csv'), newline='', encoding='utf-8') as f:
        chance = {row['Eval Task']: float(row['Random baseline']) / 100 for row in csv.DictReader(f)}
    tasks = {}
    for entry in entries:
        label, uri, kind = entry['label'], entry['dataset_uri'], entry['icl_task_type']
        name = 'hellaswag_10shot' if label == 'hellaswag' else label
        path = os.path.normpath(os.path.join(root, 'eval_data', uri))
        assert path.startswith(os.path.normpath(root) + os.sep), f"{uri} is outside"
        assert kind in FIELDS, f"{label} is of an unknown kind, {kind}"
        delimiter = entry.get('continuation_delimiter', ' ')
        assert 0 <= chance[label] < 1, f"{label} is guessed with {chance[label]:.0%}"
        tasks[name] = Task(name, path, kind, chance[label], int(entry['num_fewshot'][0]), delimiter)
    return tasks


def read_examples(path, kind):
    """The examples in a file, a JSON object per line, each checked."""
    examples = []
    with open(path, encoding='utf-8', errors='replace') as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                example = json.loads(line)
                check_example(example, kind)
            except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as e:
                fail(f"{path}:{number} is not an example of {kind} ({type(e).__name__}: {first_line(e)}). "
                     "download the file again")
            examples.append(example)
    if not examples:
        fail(f"{path} is empty. download the file again")
    return examples


def check_example(example, kind):
    """Raise an error unless `example`, which a file brought, has the fields of its kind."""
    alternatives = ['']
    for field, type_ in FIELDS[kind].items():
        assert type(example[field]) is type_, f"{field} is {example[field]!r}"
        if type_ is list:
            alternatives = example[field]
    assert all(isinstance(text, str) for text in alternatives), 'an alternative is no text'
    assert 0 <= answer_of(example) < len(alternatives), 'no such answer'


# -----------------------------------------------------------------------------
# prompts


def render(task, example, shots, tokenizer):
    """[(ids, where the answer begins)], one for each alternative of the example."""
    def encode(text):
        return [int(id) for id in tokenizer.encode(text)]

    if task.kind == 'hellaswag':
        context = encode(example['ctx'])
        return [(context + encode(' ' + ending), len(context)) for ending in example['endings']]
    first = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    solved = [texts(task, shot)[answer_of(shot)] + '\n\n' for shot in shots]
    prompt = ''.join(solved)
    rows = [first + encode(prompt + text) for text in texts(task, example)]
    longest = min(map(len, rows)) - 1  # every answer keeps at least one token
    if task.kind == 'schema':
        shared = min(n_shared([row[::-1] for row in rows]), longest)
        return [(row, len(row) - shared) for row in rows]
    beginnings = rows
    if task.kind == 'language_modeling':
        # without the space before the answer: it belongs to the answer's first token
        context = (prompt + example['context'].strip() + task.delimiter).strip()
        beginnings = [*rows, first + encode(context)]
    shared = min(n_shared(beginnings), longest)
    return [(row, shared) for row in rows]


def texts(task, example):
    """An example written out once for each alternative."""
    if task.kind == 'multiple_choice':
        return [example['query'] + task.delimiter + choice for choice in example['choices']]
    if task.kind == 'schema':
        return [context + task.delimiter + example['continuation'] for context in example['context_options']]
    return [example['context'].strip() + task.delimiter + example['continuation']]


def n_shared(rows):
    """How many ids all rows have in common at their beginning."""
    n = 0
    for ids in zip(*rows):
        if len(set(ids)) > 1:
            break
        n += 1
    return n


# -----------------------------------------------------------------------------
# scoring


def score(model, task, batch_tokens, dist, autocast, is_stopping=lambda: False, tick=lambda done, n: None):
    """For each of task.rows: the nats of its answer, its number of tokens, and how many of them are the most
    likely ones; (rows, 3) in float64, the same in all processes. None if is_stopping()."""
    scores = torch.zeros(len(task.rows), 3, device=model.lm_head.weight.device)
    batches = make_batches(task.rows, batch_tokens)
    with eval_mode(model), uncompiled(model), varying_shapes():
        # as many rounds in every process: is_stopping() and a sharded model need all of them
        for first in range(0, len(batches), dist.world_size):
            if is_stopping():
                return None
            tick(min(first + dist.world_size, len(batches)), len(batches))
            b = first + dist.rank
            if b < len(batches):
                scores[batches[b]] = score_batch(model, [task.rows[i] for i in batches[b]], dist, autocast)
            elif dist.sharded:
                score_batch(model, [task.rows[batches[-1][0]]], dist, autocast)
    dist.all_reduce_sum(scores)
    return scores.cpu().double()


def make_batches(rows, batch_tokens):
    """The numbers of the rows in batches of at most batch_tokens tokens (or one row) and of similar lengths.
    The longest come first, so that too little memory shows at once."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][1]))
    batches = []
    while order:
        size = max(1, batch_tokens // len(rows[order[0]][1]))
        batches.append(order[:size])
        order = order[size:]
    return batches


def score_batch(model, rows, dist, autocast):
    """The scores of some rows, the longest of them first, (B, 3)."""
    device = model.lm_head.weight.device
    ids = np.zeros((len(rows), len(rows[0][1])), dtype=np.int64)
    in_answer = np.zeros(ids.shape, dtype=bool)
    for r, (_, row, start) in enumerate(rows):
        ids[r, :len(row)] = row
        in_answer[r, start:len(row)] = True
    ids = torch.from_numpy(ids).to(device)  # (B, T)
    in_answer = torch.from_numpy(in_answer[:, 1:]).to(device)  # (B, T - 1)
    with autocast:
        logits = model(ids[:, :-1], full_logits=True)[0][in_answer].float()  # (answer tokens, V)
    targets = ids[:, 1:][in_answer]
    nats, likeliest = torch.zeros(2, *in_answer.shape, device=device)
    nats[in_answer] = F.cross_entropy(logits, targets, reduction='none')
    likeliest[in_answer] = (logits.argmax(dim=-1) == targets).float()
    return torch.stack((nats.sum(1), in_answer.sum(1), likeliest.sum(1)), dim=1)


def share_of(correct, chance=0.0, shots=0, truncated=0):
    """What eval.json says of examples of which `correct` tells whether they are."""
    n = len(correct)
    p = sum(correct) / n
    return {'accuracy': p, 'error': math.sqrt(p * (1 - p) / n), 'chance': chance,
            'centered': (p - chance) / (1 - chance), 'questions': n, 'shots': shots, 'truncated': truncated}


def accuracy(task, scores):
    """A dict with the accuracy, its standard error, ... and which examples are correct. Its keys are those of
    eval.json, where `questions` is the number of examples."""
    nats, count, likeliest = scores.numpy().T
    rows_of = [[] for _ in task.answers]
    for i, (example, _, _) in enumerate(task.rows):
        rows_of[example].append(i)

    def chosen(losses):
        return [int(np.argmin(losses[rows])) for rows in rows_of]

    if task.kind == 'language_modeling':
        correct = [bool(likeliest[rows[0]] == count[rows[0]]) for rows in rows_of]
    else:
        correct = [choice == answer for choice, answer in zip(chosen(nats / count), task.answers)]
    result = {**share_of(correct, task.chance, task.shots, task.truncated), 'correct': correct}
    if task.kind == 'hellaswag':  # by the loss of the whole ending, which favors short ones
        same = [choice == answer for choice, answer in zip(chosen(nats), task.answers)]
        result['accuracy_sum'] = sum(same) / len(same)
    return result


# -----------------------------------------------------------------------------
# questions whose answers are generated


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
            fail(f"{path}:{number} is no question ({first_line(e)}). see docs/evaluation.md")
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


# -----------------------------------------------------------------------------
# in the training loop


def in_loop(names, folder, tokenizer, model, batch_size, dist, autocast, is_stopping):
    """An evaluation for the training loop, its files read now: a function of the iteration that returns
    {'hellaswag': accuracy, 'core': CORE, ...} for `names` such as 'hellaswag,core', or {} if interrupted.
    'core:100' uses 100 examples of each of CORE's tasks; without a number it is 500, of HellaSwag all.
    folder None: data/."""
    folder = folder or DATA_DIR
    batch_tokens = batch_size * model.config.block_size
    tasks = {}
    for named in split_names(names):
        name, limit = with_limit(named)
        parts = bundle(folder) if name == 'core' else [name]
        tasks[name] = [load_task(part, folder, tokenizer, model.config.block_size, limit) for part in parts]

    def evaluate_tasks(it):
        metrics = {}
        for name, parts in tasks.items():
            results = []
            for task in parts:
                tick = dist.progress(task.name)
                scores = score(model, task, batch_tokens, dist, autocast, is_stopping, tick)
                if scores is None:
                    return {}
                results.append(accuracy(task, scores))
            metrics[name], text = summary(name, results)
            dist.print(f"step {it}: {text}")
        return metrics

    return evaluate_tasks


def with_limit(named):
    """('core', 100) of 'core:100', ('core', 500) of 'core', ('hellaswag', None) of 'hellaswag'."""
    found = re.fullmatch(r'(.+):(\d+)', named)
    if not found:
        return named, None if named == 'hellaswag' else 500
    if int(found[2]) == 0:
        fail(f"tasks is out of range ({named}). use a number above 0 behind the colon: core:500")
    return found[1], int(found[2])


def tasks_in_loop(run, model, dist, autocast, stop):
    """in_loop() as the knobs of a run ask for it."""
    k = run.knobs
    return in_loop(k['tasks'], k['data_dir'], run.data.tokenizer(), model, k['batch_size'], dist,
                   autocast, stop.asks_to_stop)


def summary(name, results):
    """(CORE or the accuracy on one task, a line about it)"""
    if name == 'core':
        core = core_metric(results)
        return core, f"CORE {core:.4f} over {len(results)} tasks (chance: 0)"
    result, = results
    percent = f"{100 * result['accuracy']:.2f} \u00b1 {100 * result['error']:.2f} %"
    return result['accuracy'], (f"{name} {percent} of {result['questions']:,} examples (chance: "
                                f"{100 * result['chance']:.0f} %)")


def core_metric(results):
    """The mean of the centered accuracies."""
    return sum(result['centered'] for result in results) / len(results)
