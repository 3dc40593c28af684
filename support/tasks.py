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

In a FILE.jsonl of one's own the lines say of which kind they are: one of these three, or

    {"kind": "generate", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}

The model answers greedily; an answer is right if it is `answer`, but for spaces at its ends.
"""

import csv
import dataclasses
import json
import math
import os
import random
import re

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from configurator import fail
from support.chat import chat_format
from support.compiling import varying_shapes
from support.dataset_meta import DATA_DIR
from support.errors import first_line
from support.evaluate import eval_mode, rounds
from support.parallel import Distributed

@dataclasses.dataclass
class Task:
    name: str
    path: str  # of its examples, one JSON object per line
    kind: str = None  # see the top of this file. None: as the examples say
    chance: float = None  # the accuracy of guessing
    shots: int = 0  # solved examples in the prompt
    delimiter: str = ' '  # between context and answer
    # filled by read_examples()
    tokenizer: object = None
    # per example: for each alternative (its ids, where its answer begins); the right one's number, or text
    examples: list = dataclasses.field(default_factory=list)
    truncated: int = 0  # examples that are too long for the model


# -----------------------------------------------------------------------------
# reading


def load_tasks(text, folder, tokenizer, block_size):
    """{name: [Task, ...]} of 'hellaswag,core:100', tokenized, from the files in `folder` (None: data/). A
    number behind a name is how many examples of each task are used, always the same ones; otherwise all
    are."""
    tasks = {}
    for named in filter(None, map(str.strip, text.split(','))):
        name, n = re.fullmatch(r'(.+?)(?::(\d+))?', named).groups()
        tasks[name] = find_tasks(name, folder or DATA_DIR)
        for task in tasks[name]:
            read_examples(task, tokenizer, block_size, int(n) if n else None)
    return tasks


def find_tasks(name, folder):
    """The tasks that `name` stands for, their examples not read yet."""
    if name == 'hellaswag':
        return [Task(name, os.path.join(folder, 'hellaswag_val.jsonl'), name, 0.25)]
    if name.endswith('.jsonl'):
        return [Task(name, os.path.expanduser(name))]
    tasks = bundle(os.path.join(folder, 'eval_bundle'))
    if name != 'core' and name not in tasks:
        fail(f"no such task ({name}). use hellaswag, core, FILE.jsonl, or one of {', '.join(tasks)}")
    return list(tasks.values()) if name == 'core' else [tasks[name]]


def bundle(root):
    """{name: Task} of the tasks in root/core.yaml."""
    tasks = {}
    try:
        import yaml
        with open(os.path.join(root, 'core.yaml'), encoding='utf-8') as f:
            entries = yaml.safe_load(f)['icl_tasks']
        with open(os.path.join(root, 'eval_meta_data.csv'), newline='', encoding='utf-8') as f:
            chance = {row['Eval Task']: float(row['Random baseline']) / 100 for row in csv.DictReader(f)}
        for entry in entries:
            label = entry['label']
            name = 'hellaswag_10shot' if label == 'hellaswag' else label
            path = os.path.join(root, 'eval_data', entry['dataset_uri'])
            tasks[name] = Task(name, path, entry['icl_task_type'], chance[label],
                               int(entry['num_fewshot'][0]), entry.get('continuation_delimiter', ' '))
    except Exception as e:  # a file may say anything
        fail(f"the evaluation bundle in {root} cannot be read ({type(e).__name__}: {first_line(e)}). get it "
             "with python prepare.py core, or name another --data_dir. it needs pip install pyyaml")
    return tasks


def read_examples(task, tokenizer, block_size, limit):
    """Fill the task from its file."""
    task.tokenizer, number = tokenizer, 0
    try:
        with open(task.path, encoding='utf-8') as f:
            lines = [(number, line) for number, line in enumerate(f, 1) if line.strip()]
        # nanochat's seeds, here and below: the same examples and prompts
        random.Random(1337).shuffle(lines)
        examples = []
        for number, line in lines[:limit]:
            examples.append(json.loads(line))
        for i, (number, _) in enumerate(lines[:limit]):
            add_example(task, examples, i, block_size)
        assert examples, 'it is empty'
    except Exception as e:  # a file may say anything
        fail(f"{task.path}:{number} cannot be used ({type(e).__name__}: {first_line(e)}). correct it (see "
             "docs/evaluation.md), get it by python prepare.py hellaswag or core, or name another --data_dir")


def add_example(task, examples, i, block_size):
    """Add examples[i] to the task, prompted with some of the others."""
    example, others = examples[i], len(examples) - 1
    task.kind = task.kind or example['kind']
    assert example.get('kind', task.kind) == task.kind, f'its kind is not {task.kind}'
    picked = random.Random(1234 + i).sample(range(others), min(task.shots, others))
    shots = [examples[k if k < i else k + 1] for k in picked]  # any example but this one
    rows, answer = render(task, example, shots), answer_of(task, example)
    assert task.kind == 'generate' or 0 <= answer < len(rows), 'no such answer'
    task.truncated += max(len(ids) for ids, _ in rows) > block_size
    # a prompt that is too long loses its beginning, and nothing predicts the first token
    rows = [(torch.tensor(ids[-block_size:]), max(1, start - max(0, len(ids) - block_size)))
            for ids, start in rows]
    task.examples.append((rows, answer))


def answer_of(task, example):
    """The number of an example's correct alternative; of a question the text."""
    if task.kind == 'generate':
        return example['answer'].strip()
    if task.kind == 'language_modeling':
        return 0
    return example['label' if task.kind == 'hellaswag' else 'gold']


# -----------------------------------------------------------------------------
# prompts


def render(task, example, shots):
    """[(ids, where the answer begins)], one for each alternative of the example."""
    tokenizer = task.tokenizer

    def encode(text):
        return tokenizer.encode(text).tolist()

    if task.kind == 'generate':
        form = chat_format(tokenizer)
        if form is None:
            raise ValueError("it is a conversation, and the tokenizer has no roles for one")
        return [(form.render(example['messages'], answer=True)[0].tolist(), 0)]
    if task.kind == 'hellaswag':
        context = encode(example['ctx'])
        return [(context + encode(' ' + ending), len(context)) for ending in example['endings']]
    first = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    prompt = ''.join(texts(task, shot)[answer_of(task, shot)] + '\n\n' for shot in shots)
    rows = [first + encode(prompt + text) for text in texts(task, example)]
    longest = min(map(len, rows)) - 1  # every answer keeps at least one token
    if task.kind == 'schema':
        shared = min(len(os.path.commonprefix([row[::-1] for row in rows])), longest)
        return [(row, len(row) - shared) for row in rows]
    beginnings = rows
    if task.kind == 'language_modeling':
        # without the space before the answer: it belongs to the answer's first token
        context = (prompt + example['context'].strip() + task.delimiter).strip()
        beginnings = [*rows, first + encode(context)]
    shared = min(len(os.path.commonprefix(beginnings)), longest)
    return [(row, shared) for row in rows]


def texts(task, example):
    """An example written out once for each alternative."""
    if task.kind == 'multiple_choice':
        return [example['query'] + task.delimiter + choice for choice in example['choices']]
    if task.kind == 'schema':
        return [context + task.delimiter + example['continuation'] for context in example['context_options']]
    return [example['context'].strip() + task.delimiter + example['continuation']]


# -----------------------------------------------------------------------------
# scoring


def score(model, task, dist, autocast, poll):
    """Whether the model is right, 1.0 or 0.0 for each example, the same in all processes."""
    correct = torch.zeros(len(task.examples), device=model.lm_head.weight.device)
    judge = judge_answer if task.kind == 'generate' else judge_alternatives
    tick = dist.progress(task.name)
    if dist.sharded and judge is judge_answer:
        dist = Distributed(dist.device)  # each for itself: answers take different numbers of forward passes
    with eval_mode(model), varying_shapes(), autocast:
        for i, counts in rounds(len(task.examples), dist, poll, tick):
            correct[i] += judge(model, task, *task.examples[i]) and counts
    return dist.all_reduce_sum(correct).cpu()


def judge_alternatives(model, task, rows, answer):
    losses, likeliest = losses_of(model, rows)
    if task.kind == 'language_modeling':
        return likeliest[0]
    return losses.index(min(losses)) == answer and losses[answer] < math.inf  # nan would be the least


def losses_of(model, rows):
    """Of each row's answer the nats per token, and whether all of its tokens are the most likely ones."""
    device = model.lm_head.weight.device
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True).to(device)  # (B, T)
    losses, likeliest = [], []
    for (row, start), logits in zip(rows, model(ids[:, :-1], full_logits=True)[0]):
        logits, targets = logits[start - 1:len(row) - 1].float(), row[start:].to(device)
        losses.append(F.cross_entropy(logits, targets).item())
        likeliest.append(torch.equal(logits.argmax(dim=-1), targets))
    return losses, likeliest


def judge_answer(model, task, rows, answer):
    """Whether what the model generates is right. It may take 8 tokens more than the answer, for spaces and
    the end of the turn."""
    tokenizer, stop = task.tokenizer, chat_format(task.tokenizer).stop_ids
    idx = rows[0][0][None].to(model.lm_head.weight.device)  # (1, T)
    out = model.generate(idx, len(tokenizer.encode(answer)) + 8, temperature=0, vocab_size=tokenizer.n_vocab,
                         stop=stop or None)
    return tokenizer.decode([id for id in out[0, idx.size(1):].tolist() if id not in stop]).strip() == answer


def accuracy(task, correct):
    """The accuracy, its standard error, ...: what eval.json says, where `questions` are examples."""
    p, n, chance = correct.mean().item(), len(correct), task.chance
    if chance is None:  # one's own
        chance = sum(len(rows) > 1 and 1 / len(rows) for rows, _ in task.examples) / n
    q = (n * p + 1) / (n + 2)  # so that a few examples, all of them right, are not sure
    return {'accuracy': p, 'error': math.sqrt(q * (1 - q) / (n + 3)), 'chance': chance,
            'centered': (p - chance) / (1 - chance), 'questions': n, 'shots': task.shots,
            'truncated': task.truncated}


def evaluate_tasks(tasks, model, dist, autocast, poll=lambda: None, at=''):
    """({name: accuracy or CORE}, {task: what accuracy() says}) of load_tasks(), told on the console behind
    `at`."""
    metrics, results = {}, {}
    for name, parts in tasks.items():
        for task in parts:
            r = results[task.name] = accuracy(task, score(model, task, dist, autocast, poll))
            dist.print(f"{at}{task.name} {100 * r['accuracy']:.2f} ± {100 * r['error']:.2f} % of "
                       f"{r['questions']:,} examples (chance: {100 * r['chance']:.0f} %; longer than "
                       f"the context: {r['truncated']:,})")
        metrics[name] = r['accuracy']
        if name == 'core':
            metrics[name] = sum(results[task.name]['centered'] for task in parts) / len(parts)
            dist.print(f"{at}CORE {metrics[name]:.4f}, the mean of {len(parts)} centered accuracies")
    return metrics, results


def tasks_in_loop(run, model, dist, autocast, stop):
    """For the training loop, the files read now: a function of the iteration that returns {'hellaswag':
    accuracy, 'core': CORE, ...}."""
    k = run.knobs
    tasks = load_tasks(k['tasks'], k['data_dir'], run.data.tokenizer(), model.config.block_size)

    def evaluate(it):
        return evaluate_tasks(tasks, model, dist, autocast, stop.poll, f"step {it}: ")[0]

    return evaluate
