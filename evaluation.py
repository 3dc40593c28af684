"""
How good is a model? Its loss on a text, in nats per token and in bits per byte; its accuracy on benchmarks.

Plain functions for train.py and eval.py. None of them changes what is trained, all processes call them
together, and no result depends on the number of processes.

Benchmarks, and how an answer is chosen:

    hellaswag         four endings of a sentence, the one with the lowest loss per token counts. Examples:
                      https://github.com/rowanz/hellaswag, scored as https://github.com/karpathy/build-nanogpt
    arc_easy, ...     a task of the evaluation bundle (llm-foundry's Eval Gauntlet): core.yaml names it,
                      eval_data/ has its examples, eval_meta_data.csv the accuracy of guessing. The bundle's
                      own hellaswag is called hellaswag_10shot here
    core              all tasks of core.yaml. CORE is the mean of their centered accuracies: 0 for guessing,
                      1 for all correct (https://arxiv.org/abs/2406.11794)
    FILE.jsonl        your own: docs/evaluation.md

The bundle's prompts and scores are those of https://github.com/karpathy/nanochat, so that numbers compare. A
prompt is the end-of-text token, where there is one, some solved examples (shots), then an alternative:

    multiple_choice      alternatives begin alike; the end with the lowest loss per token is chosen
    schema               they end alike; the beginning that gives the end the lowest loss is chosen
    language_modeling    one answer, correct if each of its tokens is the most likely one
    generate             the model's greedy reply to a conversation has to be the answer
"""

import codecs
import contextlib
import csv
import dataclasses
import json
import math
import os
import random
import sys

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from chat import chat_format
from common import all_reduce_sum, first_line, print0
from configurator import error
from dataset import DATA_DIR, windows


@contextlib.contextmanager
def eval_mode(model):
    """Inside, the model is in eval mode and keeps no gradients; afterwards it is as before."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


# -----------------------------------------------------------------------------
# the loss of a text


def mean_loss(model, split, n_windows, block_size, batch_size, ctx, rank=0, world_size=1):
    """(mean loss in nats per token, bits per byte) of a split of a Dataset; see text_loss()."""
    result = text_loss(model, split, n_windows, block_size, batch_size, ctx, rank, world_size)
    return result['loss'], result['bpb']


def text_loss(model, split, n_windows, block_size, batch_size, ctx, rank=0, world_size=1, token_bytes=None):
    """
    The loss of a split of a Dataset over n_windows windows, spread evenly over it (0: all of it).
    token_bytes: bytes of text per id, where the model knows more of them than the dataset does.

    Returns a dict: loss (nats per token), perplexity, bpb (bits per byte), loss_error and bpb_error (their
    standard errors), tokens and bytes (how many were predicted). Bits per byte leave out tokens that are no
    text, such as <|endoftext|>, and so compare models with different tokenizers; they are None where the
    bytes of the tokens are unknown.
    """
    device = next(model.parameters()).device
    starts = windows(split.n_targets(block_size), block_size, n_windows)
    n_batches = math.ceil(len(starts) / batch_size)
    if token_bytes is None:
        token_bytes = split.token_bytes
    token_bytes = torch.as_tensor(token_bytes, dtype=torch.float32, device=device)
    # each window has its own place in the sums, so it does not matter which process fills it
    sums = torch.zeros(4, len(starts), device=device)  # per window: nats, nats of text, targets, bytes
    compiler = contextlib.nullcontext()
    if device.type == 'cpu':  # an evaluation's graph takes a CPU longer to compile than it saves
        compiler = torch.compiler.set_stance('force_eager')
    with eval_mode(model), compiler:
        for batch, counts in shared_among(n_batches, rank, world_size):
            place = slice(batch * batch_size, (batch + 1) * batch_size)
            n_rows = len(starts[place])
            # the last batch is filled up: a compiled model sees one shape only
            x, y, doc_ids = split.eval_batch(np.resize(starts[place], batch_size), block_size)
            x = torch.from_numpy(x).contiguous().to(device)  # (B, T)
            y = torch.from_numpy(y).contiguous().to(device)
            if doc_ids is not None:
                doc_ids = torch.from_numpy(doc_ids).contiguous().to(device)
            with ctx:
                _, nats = model(x, y, doc_ids, reduction='none', return_logits=False)
            is_target = y >= 0
            nats = nats.float().view(y.shape) * is_target  # (B, T)
            n_bytes = token_bytes[y.clamp(min=0)] * is_target
            text_nats = nats * (n_bytes > 0)
            parts = (nats.sum(1), text_nats.sum(1), is_target.sum(1), n_bytes.sum(1))
            if counts:
                sums[:, place] = torch.stack(parts)[:, :n_rows]
    nats, text_nats, n_targets, n_bytes = all_reduce_sum(sums).cpu().double()
    loss, loss_error = ratio_of_sums(nats, n_targets)
    bpb, bpb_error = None, None
    if n_bytes.sum() > 0:
        bpb, bpb_error = ratio_of_sums(text_nats / math.log(2), n_bytes)
    return {'loss': loss, 'loss_error': loss_error, 'perplexity': math.exp(min(loss, 700.0)), 'bpb': bpb,
            'bpb_error': bpb_error, 'tokens': int(n_targets.sum()), 'bytes': int(n_bytes.sum())}


def shared_among(n, rank, world_size):
    """This process's share of range(n), as pairs (i, counts). Where it has fewer numbers than the others it
    repeats the last one, and `counts` is False: a model sharded by FSDP needs all processes each time."""
    for first in range(0, n, world_size):
        i = first + rank
        yield min(i, n - 1), i < n


def ratio_of_sums(parts, wholes):
    """(sum(parts) / sum(wholes), its standard error), taking the windows as independent; of one window the
    error is nan."""
    n = len(parts)
    ratio = parts.sum() / wholes.sum()
    if n == 1:
        return ratio.item(), math.nan
    variance = (parts - ratio * wholes).square().sum() * n / (n - 1)
    return ratio.item(), (variance.sqrt() / wholes.sum()).item()


# -----------------------------------------------------------------------------
# samples in the training loop


def next_sample_step(it, interval, growth=1.0):
    """The first iteration from `it` on after which samples are due. Each gap is `growth` times the one
    before: 100 and 1.5 give 100, 250, 475, ... It follows from `it` alone, so a resume agrees."""
    if growth <= 1:
        return math.ceil(it / interval) * interval
    step = 0.0
    gap = interval
    while round(step) < it:
        step += gap
        gap *= growth
    return round(step)


def is_sample_step(it, interval, growth=1.0):
    """Whether samples are due after `it` iterations; interval 0: never."""
    return interval > 0 and next_sample_step(it, interval, growth) == it


def read_prompts(path):
    """The prompts in a file: its lines but the empty ones. \\n in a line is a new line inside the prompt."""
    prompts = []
    for line in read_text(path).split('\n'):
        if line.strip():
            prompts.append(line.replace('\\n', '\n'))
    if not prompts:
        error(f"no prompt in the file ({path}): it is empty. write one per line")
    return prompts


def prompts_for_samples(path, tokenizer):
    """The prompts for samples while training: those of the file `path`. None: three short ones, without those
    that the tokenizer cannot encode."""
    prompts = read_prompts(path) if path else ['', 'The ', 'Hello, I am']
    encodable = []
    for prompt in prompts:
        try:
            tokenizer.encode_prompt(prompt)
            encodable.append(prompt)
        except ValueError as e:
            if path:
                error(f"a prompt of {path} cannot be encoded ({e}). leave it out")
    return encodable


def read_text(path):
    """The text of a file, or of standard input ('-'): UTF-8, or UTF-16 with a byte order mark."""
    try:
        if path == '-':
            content = sys.stdin.buffer.read()
        else:
            with open(path, 'rb') as f:
                content = f.read()
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = content.decode('utf-16' if is_utf16 else 'utf-8-sig')
    except (OSError, UnicodeError) as e:
        error(f"no prompt can be read from {path} ({e}). name a file of UTF-8 text")
    return text.replace('\r\n', '\n')


# -----------------------------------------------------------------------------
# benchmarks: reading


@dataclasses.dataclass
class Task:
    name: str
    path: str  # of its examples, one JSON object per line
    kind: str = None  # 'hellaswag', 'multiple_choice', ...; None: as the examples say
    chance: float = None  # accuracy of guessing; None: follows from the number of alternatives
    shots: int = 0  # solved examples in the prompt
    delimiter: str = ' '  # between context and answer
    tokenizer: object = None
    # what read_examples() fills in. Of each example: its rows [(ids, where the answer begins)], one for each
    # alternative, and the number of the right one; for 'generate' the right text
    examples: list = dataclasses.field(default_factory=list)
    n_truncated: int = 0  # examples that are too long for the model


KINDS = ('hellaswag', 'multiple_choice', 'schema', 'language_modeling', 'generate')


def load_tasks(names, max_per_task, data_dir, tokenizer, block_size):
    """{name: [Task, ...]} of names such as 'hellaswag,core', tokenized, from the files in data_dir (None:
    data/). max_per_task: the number of examples of each task, always the same ones; 0: all."""
    tasks = {}
    for name in names.split(','):
        name = name.strip()
        if name:
            tasks[name] = find_tasks(name, data_dir or DATA_DIR)
            for task in tasks[name]:
                read_examples(task, tokenizer, block_size, max_per_task)
    return tasks


def find_tasks(name, data_dir):
    """The tasks that `name` stands for; their examples are not read yet."""
    if name == 'hellaswag':
        return [Task(name, os.path.join(data_dir, 'hellaswag_val.jsonl'), 'hellaswag', chance=0.25)]
    if name.endswith('.jsonl'):
        return [Task(name, os.path.expanduser(name))]
    bundle = read_bundle(os.path.join(data_dir, 'eval_bundle'))
    if name == 'core':
        return list(bundle.values())
    if name not in bundle:
        error(f"no such task ({name}). use hellaswag, core, FILE.jsonl, or one of {', '.join(bundle)}")
    return [bundle[name]]


def read_bundle(folder):
    """{name: Task} of the evaluation bundle in `folder`."""
    tasks = {}
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
            name = 'hellaswag_10shot' if label == 'hellaswag' else label
            tasks[name] = Task(name, os.path.join(folder, 'eval_data', entry['dataset_uri']),
                               entry['icl_task_type'], chance[label], int(entry['num_fewshot'][0]),
                               entry.get('continuation_delimiter', ' '))
    except ImportError:
        error("the evaluation bundle needs a package that is not installed (pyyaml). pip install pyyaml")
    except Exception as e:  # the file may hold anything
        error(f"the evaluation bundle in {folder} cannot be read ({type(e).__name__}: {first_line(e)}). get "
              "it with python prepare.py core, or name another --data_dir")
    return tasks


def read_examples(task, tokenizer, block_size, limit):
    """Fill the task from its file."""
    task.tokenizer = tokenizer
    number = 0
    try:
        lines = []
        with open(task.path, encoding='utf-8-sig') as f:
            for number, line in enumerate(f, start=1):
                if line.strip():
                    lines.append((number, line))
        # with nanochat's seeds, here and below: the same examples and prompts
        random.Random(1337).shuffle(lines)
        if limit:
            lines = lines[:limit]
        parsed = []
        for number, line in lines:
            parsed.append(json.loads(line))
        for i, (number, _) in enumerate(lines):
            add_example(task, parsed, i, block_size)
        if not lines:
            raise ValueError('it is empty')
    except Exception as e:  # the file may hold anything
        error(f"{task.path}:{number} cannot be used ({type(e).__name__}: {first_line(e)}). correct it (see "
              "docs/evaluation.md), get it with python prepare.py hellaswag or core, or name another "
              "--data_dir")


def add_example(task, parsed, i, block_size):
    """Add parsed[i] to the task, with some of the others as solved examples in its prompt."""
    example = parsed[i]
    if task.kind is None:
        task.kind = example['kind']
    if task.kind not in KINDS:
        raise ValueError(f"no such kind ({task.kind}). use one of {', '.join(KINDS)}")
    if example.get('kind', task.kind) != task.kind:
        raise ValueError(f"its kind is not {task.kind}, as that of the others")
    n_others = len(parsed) - 1
    shots = []
    for k in random.Random(1234 + i).sample(range(n_others), min(task.shots, n_others)):
        shots.append(parsed[k if k < i else k + 1])  # any example but this one
    rows = render(task, example, shots)
    answer = answer_of(task, example)
    if task.kind != 'generate' and not 0 <= answer < len(rows):
        raise ValueError(f"it has no alternative {answer}")
    if max(len(ids) for ids, _ in rows) > block_size:
        task.n_truncated += 1
    shortened = []
    for ids, start in rows:
        n_cut = max(0, len(ids) - block_size)  # a prompt that is too long loses its beginning
        start = max(1, start - n_cut)  # nothing predicts the first token
        if start >= len(ids) - n_cut and task.kind != 'generate':
            raise ValueError('an answer has no token to predict')
        shortened.append((torch.tensor(ids[n_cut:]), start))
    task.examples.append((shortened, answer))


def answer_of(task, example):
    """The number of the right alternative; for 'generate' the right text."""
    if task.kind == 'generate':
        return example['answer'].strip()
    if task.kind == 'language_modeling':
        return 0
    if task.kind == 'hellaswag':
        return int(example['label'])
    return example['gold']


# -----------------------------------------------------------------------------
# benchmarks: prompts


def render(task, example, shots):
    """[(ids, where the answer begins)] of the alternatives of an example."""
    tokenizer = task.tokenizer
    if task.kind == 'generate':
        chat = chat_format(tokenizer)
        if chat is None:
            raise ValueError("it is a conversation, and the tokenizer has no roles for one")
        ids, _ = chat.render(example['messages'], answer=True)
        return [(ids.tolist(), len(ids))]
    if task.kind == 'hellaswag':
        context = tokenizer.encode(example['ctx']).tolist()
        return [(context + tokenizer.encode(' ' + ending).tolist(), len(context))
                for ending in example['endings']]
    first = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    prompt = ''
    for shot in shots:
        prompt += alternatives(task, shot)[answer_of(task, shot)] + '\n\n'
    rows = [first + tokenizer.encode(prompt + text).tolist() for text in alternatives(task, example)]
    n_shared_at_most = min(len(row) for row in rows) - 1  # every answer has at least one token
    if task.kind == 'schema':
        endings = [row[::-1] for row in rows]
        n_shared = min(len(os.path.commonprefix(endings)), n_shared_at_most)
        return [(row, len(row) - n_shared) for row in rows]
    beginnings = rows
    if task.kind == 'language_modeling':
        # without the space before the answer: it belongs to the answer's first token
        context = (prompt + example['context'].strip() + task.delimiter).strip()
        beginnings = [rows[0], first + tokenizer.encode(context).tolist()]
    n_shared = min(len(os.path.commonprefix(beginnings)), n_shared_at_most)
    return [(row, n_shared) for row in rows]


def alternatives(task, example):
    """An example written out once for each alternative."""
    if task.kind == 'multiple_choice':
        return [example['query'] + task.delimiter + choice for choice in example['choices']]
    if task.kind == 'schema':
        ending = task.delimiter + example['continuation']
        return [context + ending for context in example['context_options']]
    return [example['context'].strip() + task.delimiter + example['continuation']]


# -----------------------------------------------------------------------------
# benchmarks: scoring


def evaluate_tasks(model, tasks, ctx, rank=0, world_size=1):
    """{'hellaswag': accuracy, 'core': CORE, ...} of load_tasks()."""
    return summarize(tasks, score_tasks(model, tasks, ctx, rank, world_size))


def score_tasks(model, tasks, ctx, rank=0, world_size=1):
    """{task: {'accuracy': 0.3, 'error': its standard error, ...}} of load_tasks(), each printed."""
    results = {}
    for parts in tasks.values():
        for task in parts:
            if task.name in results:  # by its own name, and in core
                continue
            result = accuracy_of(task, is_correct(model, task, ctx, rank, world_size))
            results[task.name] = result
            print0(f"{task.name}: accuracy {100 * result['accuracy']:.2f} ± {100 * result['error']:.2f}% of "
                   f"{result['examples']:,} examples (guessing: {100 * result['chance']:.0f}%; truncated: "
                   f"{result['truncated']:,})")
    return results


def summarize(tasks, results):
    """One number for each name that was asked for: an accuracy, or CORE."""
    metrics = {}
    for name, parts in tasks.items():
        metrics[name] = results[parts[0].name]['accuracy']
        if name == 'core':
            centered = [results[task.name]['centered'] for task in parts]
            metrics[name] = sum(centered) / len(centered)
            print0(f"CORE {metrics[name]:.4f}, the mean of {len(centered)} centered accuracies")
    return metrics


def accuracy_of(task, correct):
    """Accuracy and standard error of a list of booleans."""
    n = len(correct)
    n_correct = sum(correct)
    accuracy = n_correct / n
    chance = task.chance
    if chance is None:
        chance = 0.0
        for rows, _ in task.examples:
            if len(rows) > 1:
                chance += 1 / len(rows) / n
    # a Bayesian's, with a flat prior: a few examples, all of them right, are no certainty
    q = (n_correct + 1) / (n + 2)
    return {'accuracy': accuracy, 'error': math.sqrt(q * (1 - q) / (n + 3)), 'chance': chance,
            'centered': (accuracy - chance) / (1 - chance), 'examples': n, 'shots': task.shots,
            'truncated': task.n_truncated}


def is_correct(model, task, ctx, rank=0, world_size=1):
    """Whether the model is right, for each example; the same list in all processes."""
    # Texts have all lengths: each would be compiled, and cuDNN's attention would plan for it, half a second
    # each (https://github.com/modelscope/FunASR/issues/3704)
    attention = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    with eval_mode(model), torch.compiler.set_stance('force_eager'), attention, ctx:
        if task.kind == 'generate':
            return replies_are_correct(model, task, rank, world_size)
        losses, greedy = answer_losses(model, task, rank, world_size)
    correct = []
    first = 0
    for rows, answer in task.examples:
        own = losses[first:first + len(rows)]
        if task.kind == 'language_modeling':
            correct.append(greedy[first])
        else:  # a loss that is not a number is never right
            correct.append(math.isfinite(own[answer]) and own.index(min(own)) == answer)
        first += len(rows)
    return correct


def answer_losses(model, task, rank=0, world_size=1):
    """Two lists over the rows of all examples: nats per token of the answer, and whether each of its tokens
    is the most likely one (computed for 'language_modeling' alone)."""
    device = next(model.parameters()).device
    rows = []
    for its_rows, _ in task.examples:
        rows += its_rows
    # each row has its own place in the sums; the device is asked for all of them at the end
    losses = torch.zeros(len(rows), device=device)
    greedy = torch.zeros(len(rows), device=device)
    needs_logits = task.kind == 'language_modeling'
    batches = batches_by_length([len(ids) for ids, _ in rows])
    for batch, counts in shared_among(len(batches), rank, world_size):
        ids = pad_sequence([rows[i][0] for i in batches[batch]], batch_first=True)  # (B, T)
        x = ids[:, :-1].contiguous()
        y = torch.full_like(x, -1)  # targets: the answers
        for k, i in enumerate(batches[batch]):
            row, start = rows[i]
            y[k, start - 1:len(row) - 1] = row[start:]
        x, y = x.to(device), y.to(device)
        logits, nats = model(x, y, reduction='none', return_logits=needs_logits)
        is_answer = y >= 0
        if counts:
            place = torch.tensor(batches[batch], device=device)
            losses[place] = (nats.float().view(y.shape) * is_answer).sum(1) / is_answer.sum(1)
            if needs_logits:
                hits = (logits.argmax(dim=-1) == y) | ~is_answer
                greedy[place] = hits.all(dim=1).float()
    return all_reduce_sum(losses).tolist(), [hit > 0 for hit in all_reduce_sum(greedy).tolist()]


def batches_by_length(lengths, max_tokens=2048):
    """Lists of indices of `lengths`, similar ones together, with at most max_tokens after padding (whose
    logits take 0.4 GB, of 50,304 ids in float32)."""
    batches = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[i] > max_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def replies_are_correct(model, task, rank=0, world_size=1):
    """Whether the greedy reply to each conversation is the answer, but for spaces at its ends."""
    tokenizer = task.tokenizer
    stop_ids = chat_format(tokenizer).stop_ids
    device = next(model.parameters()).device
    if isinstance(model, FSDPModule):  # which needs all processes at each token
        rank = 0
        world_size = 1
    correct = torch.zeros(len(task.examples), device=device)
    for i in range(rank, len(task.examples), world_size):
        rows, answer = task.examples[i]
        idx = rows[0][0][None].to(device)  # (1, T)
        # 8 tokens more than the answer has, for spaces and the end of the turn
        n_tokens = len(tokenizer.encode(answer)) + 8
        out = model.generate(idx, n_tokens, temperature=0.0, vocab_size=tokenizer.n_vocab, stop_ids=stop_ids)
        reply = []
        for token in out[0, idx.size(1):].tolist():
            if token in stop_ids:
                break
            reply.append(token)
        correct[i] = float(tokenizer.decode(reply).strip() == answer)
    if not isinstance(model, FSDPModule):
        all_reduce_sum(correct)
    return [right > 0 for right in correct.tolist()]
