"""
What a model is measured by: its loss over a text, window by window, and questions whose answers are known. eval.py uses it,
and train.py where it is asked to in the loop. The model is only looked at: no gradient, no random number, no change of mode.

    hellaswag                four endings of a sentence, from HellaSwag's own file (https://github.com/rowanz/hellaswag), scored as in
                             https://github.com/karpathy/build-nanogpt: context and ending encoded apart, nothing before them
    arc_easy, copa, ...      a task of the evaluation bundle: core.yaml names it, eval_data/ has its questions, eval_meta_data.csv
                             tells chance (the files of llm-foundry's "Eval Gauntlet"). Its 10-shot hellaswag is hellaswag_10shot here
    core                     all in core.yaml; CORE is the mean of their centred accuracies, 0 for chance, 1 for all right
                             (https://arxiv.org/abs/2406.11794)

The bundle's questions are put and scored as in https://github.com/karpathy/nanochat, so that numbers can be compared: the document
token first, the same examples in the prompt, and as the answer what the encoded alternatives do not share:
    multiple_choice          alternatives that begin alike: the end with the smallest loss per token is the model's choice
    schema                   alternatives that end alike: the beginning that makes the end likeliest
    language_modeling        right if each token of the answer is the likeliest one
"""

import csv
import dataclasses
import importlib.util
import json
import math
import os
import random

import numpy as np
import torch
from torch.nn import functional as F

from configurator import fail
from dataset import make_tokenizer

HELLASWAG = 'https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl'
BUNDLE = 'https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip'


# -----------------------------------------------------------------------------
# loss over a text


def byte_lengths(tokenizer_state, vocab_size):
    """Bytes of text per token id, 0 for special tokens, (vocab_size,); None if the tokenizer is not at hand on this machine."""
    package = {'tiktoken': 'tiktoken', 'hf': 'tokenizers'}.get(tokenizer_state['kind'])
    if package and not (importlib.util.find_spec(package) and ('ranks' in tokenizer_state or 'json' in tokenizer_state)):
        return None
    lengths = make_tokenizer(tokenizer_state).byte_lengths()[:vocab_size]
    return torch.tensor(np.pad(lengths, (0, vocab_size - len(lengths))), dtype=torch.float32)


def cut(n_targets, block_size, stride=None):
    """Windows over the first n_targets targets of a text (the ids from the second one on), as rows (begin, done, end): the ids from
    `begin` to before `end` are read, the targets behind `done` counted. Each window moves on by `stride` targets, and what it has
    read before them is context; by default there is none."""
    stride = stride or block_size
    ends = np.unique(np.minimum(np.arange(block_size, max(n_targets, block_size) + stride, stride), n_targets))
    done = np.concatenate(([0], ends[:-1]))
    return np.stack((np.maximum(0, done - (block_size - stride)), done, ends), axis=1)


@torch.no_grad()
def text_loss(model, tokens, windows, block_size, batch_size, procs, autocast, lengths=None, stop=lambda: False, tick=lambda done, n: None):
    """The mean loss of `tokens` over `windows` (see cut), and bits per byte, each with its standard error over the windows. Bytes are
    counted, not tokens, and special tokens left out, so models with different tokenizers can be compared. The work is shared out over
    the processes; each window has a place of its own, so the sums do not depend on who did what. None if stop() says so."""
    device, n = model.lm_head.weight.device, len(windows)
    sums = torch.zeros(4, n, device=device)  # per window: nats, nats of the targets that are text, targets, bytes
    lengths = torch.zeros(model.config.vocab_size) if lengths is None else lengths
    lengths, was_training = lengths.to(device), model.training
    model.eval()
    for at in range(procs.rank * batch_size, n + procs.rank * batch_size, procs.world_size * batch_size):  # as often in every process: stop() may ask all
        if stop():
            model.train(was_training)
            return None
        tick(min(at + batch_size * procs.world_size, n), n)
        rows = windows[at:at + batch_size]
        if len(rows) == 0 and not procs.sharded:  # blocks are gathered by all or by none
            continue
        ids = torch.from_numpy(tokens.windows(np.resize(rows[:, 0] if len(rows) else windows[:1, 0], batch_size), block_size + 1))
        x, y = ids[:, :-1].to(device), ids[:, 1:].clone()  # (B, T)
        targets = torch.arange(1, block_size + 1) + torch.from_numpy(rows[:, :1])
        y[:len(rows)][(targets <= torch.from_numpy(rows[:, 1:2])) | (targets > torch.from_numpy(rows[:, 2:]))] = -1
        y[len(rows):] = -1  # a last, incomplete batch keeps its shape, as compiled models like it
        y = y.to(device)
        with autocast:
            nats = model(x, y, reduction='none')[1].float().view(y.shape)
        size = lengths[y.clamp(min=0)] * (y >= 0)
        sums[:, at:at + len(rows)] = torch.stack((nats.sum(1), (nats * (size > 0)).sum(1), (y >= 0).sum(1), size.sum(1)))[:, :len(rows)]
    model.train(was_training)
    nats, text_nats, count, size = procs.sum(sums).cpu().double()
    loss, error = ratio(nats, count)
    bits, bits_error = ratio(text_nats / math.log(2), size) if size.sum() > 0 else (None, None)
    return {'loss': loss, 'loss_error': error, 'perplexity': math.exp(min(loss, 700.0)), 'bpb': bits, 'bpb_error': bits_error,
            'tokens': int(count.sum()), 'bytes': int(size.sum())}


def ratio(part, whole):
    """(sum of part / sum of whole, its standard error), taking the windows as drawn independently; the error of one is not known."""
    r, n = (part.sum() / whole.sum()).item(), len(part)
    return r, ((part - r * whole).square().sum() * n / (n - 1)).sqrt().item() / whole.sum().item() if n > 1 else None


# -----------------------------------------------------------------------------
# questions


@dataclasses.dataclass
class Task:
    name: str
    kind: str  # see the top
    chance: float  # accuracy of a guess
    shots: int  # examples in the prompt
    gold: list  # the number of the right alternative of each question
    rows: list = dataclasses.field(default_factory=list)  # an alternative each: (number of the question, ids, where its answer begins)
    truncated: int = 0  # questions that the model's context is too short for


def load(name, folder, tokenizer, block_size, most=0):
    """The task `name`, from the files in `folder`: at most `most` of its questions, the same ones each time; 0: all."""
    if name == 'hellaswag':
        path = os.path.join(folder, 'hellaswag_val.jsonl')
        kind, shots, delimiter, chance, address = 'hellaswag', 0, ' ', 0.25, HELLASWAG
    else:
        entries = bundle(folder)
        if name not in entries:
            fail(f"no such task ({name}). use hellaswag, core, or one of {', '.join(entries)}")
        path, kind, shots, delimiter, chance = entries[name]
        address = f"{BUNDLE} and unpack it there"
    if not os.path.exists(path):
        fail(f"the questions of {name} are not there ({path}). fetch {address}; --tasks_dir names another folder than {folder}")
    questions = read_questions(path, kind)
    random.Random(1337).shuffle(questions)  # nanochat's seeds, here and below: its questions and examples
    questions = questions[:most or None]
    task = Task(name, kind, chance, shots, [q.get('label', q.get('gold', 0)) for q in questions])
    for i, question in enumerate(questions):
        others = len(questions) - 1  # an example is any but the question itself
        examples = [questions[k + (k >= i)] for k in random.Random(1234 + i).sample(range(others), min(shots, others))]
        try:
            rows = render(kind, question, examples, delimiter, tokenizer)
        except ValueError as e:
            fail(f"{name} cannot be asked: {e}. leave it out, or train with a tokenizer that has all characters: byte, gpt2, ...")
        task.truncated += max(len(ids) for ids, _ in rows) > block_size
        for ids, start in rows:  # too long a one loses its beginning; the first token that is left has nothing to be predicted from
            lost = max(0, len(ids) - block_size)
            task.rows.append((i, np.array(ids[lost:], dtype=np.int32), max(1, start - lost)))
    return task


def bundle(folder):
    """{name: (path, kind, shots, delimiter, chance)} of the tasks in eval_bundle/core.yaml."""
    folder = os.path.join(folder, 'eval_bundle')
    try:
        import yaml
    except ImportError:
        fail("the evaluation bundle's core.yaml needs a package that is not installed (yaml). pip install pyyaml")
    try:
        with open(os.path.join(folder, 'core.yaml'), encoding='utf-8') as f:
            entries = yaml.safe_load(f)['icl_tasks']
        with open(os.path.join(folder, 'eval_meta_data.csv'), newline='', encoding='utf-8') as f:
            chances = {row['Eval Task']: float(row['Random baseline']) / 100 for row in csv.DictReader(f)}
        tasks = {}
        for e in entries:
            name = 'hellaswag_10shot' if e['label'] == 'hellaswag' else e['label']
            path = os.path.normpath(os.path.join(folder, 'eval_data', e['dataset_uri']))
            assert path.startswith(os.path.normpath(folder) + os.sep), f"{e['dataset_uri']} is outside"
            tasks[name] = path, e['icl_task_type'], int(e['num_fewshot'][0]), e.get('continuation_delimiter', ' '), chances[e['label']]
    except FileNotFoundError as e:
        fail(f"the evaluation bundle is not there ({e.filename}). fetch {BUNDLE} and unpack it in {os.path.dirname(folder)}; --tasks_dir names another folder")
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError) as e:
        fail(f"the evaluation bundle in {folder} cannot be read ({type(e).__name__}: {' '.join(str(e).split())[:120]}). fetch {BUNDLE} again")
    unknown = [name for name, (_, kind, *_) in tasks.items() if kind not in ('multiple_choice', 'schema', 'language_modeling')]
    if unknown:
        fail(f"core.yaml has kinds of task that are not known here ({', '.join(unknown)}). use multiple_choice, schema, language_modeling")
    return tasks


FIELDS = {'hellaswag': ('ctx', 'endings', 'label'), 'multiple_choice': ('query', 'choices', 'gold'),
          'schema': ('context_options', 'continuation', 'gold'), 'language_modeling': ('context', 'continuation')}


def read_questions(path, kind):
    """The questions of a file, a JSON object a line, each checked."""
    questions, types = [], {'choices': list, 'endings': list, 'context_options': list, 'gold': int, 'label': int}
    with open(path, encoding='utf-8', errors='replace') as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                question = json.loads(line)
                for field in FIELDS[kind]:
                    assert type(question[field]) is types.get(field, str), f"{field} is {question[field]!r}"
                options = next((question[field] for field in FIELDS[kind] if types.get(field) is list), [''])
                assert all(isinstance(option, str) for option in options) and 0 <= question.get('gold', question.get('label', 0)) < len(options), 'no such answer'
            except (ValueError, TypeError, KeyError, AssertionError) as e:
                fail(f"{path}:{number} is not a question of the kind {kind} ({type(e).__name__}: {str(e)[:120]}). fetch the file again")
            questions.append(question)
    if not questions:
        fail(f"{path} is empty. fetch the file again")
    return questions


def render(kind, question, examples, delimiter, tokenizer):
    """[(ids, where the answer begins)], one for each alternative of the question."""
    encode = lambda text: [int(id) for id in tokenizer.encode(text)]
    if kind == 'hellaswag':
        context = encode(question['ctx'])
        return [(context + encode(' ' + ending), len(context)) for ending in question['endings']]
    first = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    shots = ''.join(alternatives(kind, example, delimiter)[example.get('gold', 0)] + '\n\n' for example in examples)
    rows = [first + encode(shots + text) for text in alternatives(kind, question, delimiter)]
    if kind == 'schema':
        shared = min(common([row[::-1] for row in rows]), min(map(len, rows)) - 1)
        return [(row, len(row) - shared) for row in rows]
    # without the space before the answer, which belongs to the answer's first token
    beginning = [first + encode((shots + question['context'].strip() + delimiter).strip())] if kind == 'language_modeling' else []
    shared = min(common(rows + beginning), min(map(len, rows)) - 1)  # each answer keeps a token, were it the beginning of another
    return [(row, shared) for row in rows]


def alternatives(kind, question, delimiter):
    if kind == 'multiple_choice':
        return [question['query'] + delimiter + choice for choice in question['choices']]
    if kind == 'schema':
        return [context + delimiter + question['continuation'] for context in question['context_options']]
    return [question['context'].strip() + delimiter + question['continuation']]


def common(rows):
    """How many ids the rows have in common at their beginning."""
    return next((i for i, ids in enumerate(zip(*rows)) if len(set(ids)) > 1), min(map(len, rows)))


@torch.no_grad()
def score(model, task, batch_tokens, procs, autocast, stop=lambda: False, tick=lambda done, n: None):
    """For each of task.rows (nats of its answer, tokens of its answer, how many of them were the likeliest), (rows, 3) in float64, the
    same in all processes. Batches are rows of like length with at most batch_tokens tokens, shared out over the processes."""
    device, was_training = model.lm_head.weight.device, model.training
    order = sorted(range(len(task.rows)), key=lambda i: -len(task.rows[i][1]))  # longest first: too little memory shows at once
    batches = []
    while order:
        size = max(1, batch_tokens // len(task.rows[order[0]][1]))
        batches.append(order[:size])
        order = order[size:]
    scores = torch.zeros(len(task.rows), 3, device=device)
    model.eval()
    for b in range(procs.rank, len(batches) + procs.rank, procs.world_size):
        if stop():
            model.train(was_training)
            return None
        tick(min(b + procs.world_size, len(batches)), len(batches))
        batch = batches[b] if b < len(batches) else batches[-1][:1] if procs.sharded else []  # blocks are gathered by all or by none
        if not batch:
            continue
        rows = [task.rows[i][1:] for i in batch]
        ids = np.zeros((len(rows), len(rows[0][0])), dtype=np.int64)
        answer = np.zeros(ids.shape, dtype=bool)
        for r, (row, start) in enumerate(rows):
            ids[r, :len(row)], answer[r, start:len(row)] = row, True
        ids, answer = torch.from_numpy(ids).to(device), torch.from_numpy(answer[:, 1:]).to(device)  # (B, T), (B, T - 1)
        with autocast:
            # forward, not a call: the shapes are many, and torch.compile would compile each
            logits = (model if procs.sharded else model.forward)(ids[:, :-1], full_logits=True)[0][answer].float()  # (answer tokens, V)
        targets, each = ids[:, 1:][answer], torch.zeros(2, *answer.shape, device=device)
        each[0][answer] = F.cross_entropy(logits, targets, reduction='none')
        each[1][answer] = (logits.argmax(dim=-1) == targets).float()
        if b < len(batches):
            scores[batch] = torch.stack((each[0].sum(1), answer.sum(1), each[1].sum(1)), dim=1)
    model.train(was_training)
    return procs.sum(scores).cpu().double()


def grade(task, scores):
    """Accuracy over the task's questions, its standard error, and which questions were answered right."""
    nats, count, greedy = scores.numpy().T
    rows_of = [[] for _ in task.gold]
    for i, (question, _, _) in enumerate(task.rows):
        rows_of[question].append(i)
    if task.kind == 'language_modeling':
        right = [bool(greedy[rows[0]] == count[rows[0]]) for rows in rows_of]
    else:
        right = [int(np.argmin((nats / count)[rows])) == gold for rows, gold in zip(rows_of, task.gold)]
    n = len(right)
    accuracy = sum(right) / n
    result = {'accuracy': accuracy, 'error': math.sqrt(accuracy * (1 - accuracy) / n), 'chance': task.chance,
              'centered': (accuracy - task.chance) / (1 - task.chance), 'questions': n, 'shots': task.shots, 'truncated': task.truncated, 'right': right}
    if task.kind == 'hellaswag':  # the likeliest ending as a whole, which favours short ones
        result['accuracy_sum'] = sum(int(np.argmin(nats[rows])) == gold for rows, gold in zip(rows_of, task.gold)) / n
    return result


def exam(name, folder, tokenizer, most, model, batch_size, procs, autocast, stop):
    """A job for the training loop, its files read now: job(it) asks the task `name`, or all of 'core', and returns {name: accuracy} or
    {'core': CORE}; None if stop() says so."""
    tasks = [load(each, folder, tokenizer, model.config.block_size, most) for each in (bundle(folder) if name == 'core' else [name])]

    def job(it):
        found = []
        for task in tasks:
            scores = score(model, task, batch_size * model.config.block_size, procs, autocast, stop, procs.ticker(task.name))
            if scores is None:
                return None
            found.append(grade(task, scores))
        if name == 'core':
            core = sum(result['centered'] for result in found) / len(found)
            procs.print(f"step {it}: CORE {core:.4f} over {len(tasks)} tasks (chance: 0)")
            return {'core': core}
        accuracy, error = found[0]['accuracy'], found[0]['error']
        procs.print(f"step {it}: {name} {100 * accuracy:.2f} \u00b1 {100 * error:.2f} % of {found[0]['questions']:,} questions (chance: {100 * found[0]['chance']:.0f} %)")
        return {name: accuracy}
    return job
