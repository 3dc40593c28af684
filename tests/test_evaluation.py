"""Losses, bits per byte and the scores of benchmarks, held against computations one by one."""

import contextlib
import copy
import functools
import json
import math
import os
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import REPO, TEXT, char_dataset, data_file, run_processes
from torch.nn import functional as F

import evaluation
from chat import with_chat_tokens
from dataset import Dataset
from model import GPT, GPTConfig
from tokenizer import make_tokenizer, token_bytes

PLAIN = contextlib.nullcontext()  # no autocast
BYTES = {'kind': 'byte'}
ARCHS = {'gpt2': {}, 'llama': {'n_kv_head': 2}, 'modern': {}}


def learn(net, ids, n_steps, T):
    """Train on windows of T + 1 ids."""
    ids = torch.tensor(np.asarray(ids).astype('int64'))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(n_steps):
        x = torch.stack([ids[s:s + T + 1] for s in torch.randint(len(ids) - T, (8,))])
        net(x[:, :-1], x[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()


def save_model(folder, net, tokenizer_state=None, **more):
    """folder/ckpt.pt with nanoGPT's keys and, if it is given, a tokenizer."""
    folder.mkdir(exist_ok=True)
    state = {'model': net.state_dict(), 'model_args': net.config.model_args(), 'iter_num': 7,
             'best_val_loss': 1.0, 'config': {'dataset': 'toy'}, **more}
    if tokenizer_state:
        state['tokenizer'] = tokenizer_state
    torch.save(state, folder / 'ckpt.pt')
    return folder


def small_model(vocab_size, **sizes):
    torch.manual_seed(1)
    defaults = {'block_size': 16, 'n_layer': 2, 'n_head': 2, 'n_embd': 32}
    return GPT(GPTConfig(**{**defaults, 'vocab_size': vocab_size, **sizes})).eval()


# -----------------------------------------------------------------------------
# the loss of a text


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """Characters, some of which have two bytes."""
    folder = tmp_path_factory.mktemp('accents')
    return Dataset('toy', char_dataset(folder, text=TEXT[:9000].replace('is', '\u00e9\u00e9')), 16)


def all_ids(split):
    return torch.from_numpy(split.read([0], split.n)[0])


def test_the_loss_and_bits_per_byte_are_those_of_all_targets_one_by_one(data):
    net = small_model(data.vocab_size)
    learn(net, all_ids(data.train), 40, 16)
    ids = all_ids(data.val)
    nats = 0.0
    for begin in range(0, len(ids) - 1, 16):  # the last window is shorter
        part = ids[begin:begin + 17]
        logits = net(part[None, :-1], part[None, 1:])[0][0]
        nats += F.cross_entropy(logits, part[1:], reduction='sum').item()
    n_bytes = len(data.tokenizer.decode(ids[1:].tolist()).encode())
    for batch_size in (1, 7, 1000):
        found = evaluation.text_loss(net, data.val, 0, 16, batch_size, PLAIN)
        assert found['tokens'] == len(ids) - 1 < found['bytes'] == n_bytes
        assert found['loss'] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
        assert found['bpb'] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)
        assert found['perplexity'] == pytest.approx(math.exp(found['loss']))
    both = (found['loss'], found['bpb'])
    assert evaluation.mean_loss(net, data.val, 0, 16, 7, PLAIN) == pytest.approx(both)


@pytest.mark.parametrize('kind', ['byte', 'char', 'gpt2'])
def test_a_guess_costs_the_log_of_the_vocabulary_and_special_tokens_are_no_text(kind, monkeypatch, tmp_path):
    text = TEXT[:3000].replace('is', '\u00e9')
    if kind == 'gpt2':
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(data_file('tiktoken_cache')))
    states = {'byte': BYTES, 'char': {'kind': 'char', 'chars': ''.join(sorted(set(text)))},
              'gpt2': {'kind': 'tiktoken', 'name': 'gpt2'}}
    tokenizer = make_tokenizer(states[kind])
    ids = tokenizer.encode(text).tolist()
    n_targets = len(ids) - 1
    n_bytes = len(text.encode()) - len(tokenizer.decode(ids[:1]).encode())
    if tokenizer.end_of_text is not None:
        ids[1:1] = ids[50:50] = 3 * [tokenizer.end_of_text]
    (tmp_path / 'text').mkdir()
    np.array(ids, dtype='<u2').tofile(tmp_path / 'text' / 'train.bin')
    n_vocab = tokenizer.n_vocab + 5  # some that stand for nothing
    net = small_model(n_vocab, block_size=32, n_layer=1, n_head=1, n_embd=4, tie=False)
    torch.nn.init.zeros_(net.lm_head.weight)
    split = Dataset('text', tmp_path, 32).train
    sizes = token_bytes(tokenizer.state(), n_vocab)
    found = evaluation.text_loss(net, split, 0, 32, 7, PLAIN, token_bytes=sizes)
    assert found['bytes'] == n_bytes and found['tokens'] == len(ids) - 1
    assert found['loss'] == pytest.approx(math.log(n_vocab))
    assert found['bpb'] == pytest.approx(n_targets * math.log2(n_vocab) / n_bytes)
    assert evaluation.text_loss(net, split, 0, 32, 7, PLAIN, token_bytes=0 * sizes)['bpb'] is None


def test_the_standard_error_is_what_other_windows_would_give(data):
    net = small_model(data.vocab_size)
    starts = evaluation.windows(data.train.n - 1, 16)[:480]
    random.Random(0).shuffle(starts)
    losses, errors = [], []
    for part in np.split(starts, 20):
        sums, counts = [], []
        for start in part:
            x, y, _ = data.train.eval_batch(np.array([start]), 16)
            _, nats = net(torch.from_numpy(x), torch.from_numpy(y), reduction='sum')
            sums.append(nats.item())
            counts.append(16.0)
        loss, loss_error = evaluation.ratio_of_sums(torch.tensor(sums), torch.tensor(counts))
        losses.append(loss)
        errors.append(loss_error)
    assert 0.6 < np.std(losses, ddof=1) / np.mean(errors) < 1.6
    assert math.isnan(evaluation.ratio_of_sums(torch.ones(1), torch.ones(1))[1])


def test_windows_are_spread_evenly_and_a_compiled_model_sees_one_shape(data):
    net = small_model(data.vocab_size)
    net.train()
    shapes = set()
    handle = net.register_forward_pre_hook(lambda module, args: shapes.add((args[0].shape, args[0].stride())))
    asked = []

    class Split:
        token_bytes = data.train.token_bytes
        n_targets = data.train.n_targets

        def eval_batch(self, starts, block_size):
            asked.extend(starts)
            return data.train.eval_batch(starts, block_size)
    found = evaluation.text_loss(net, Split(), 10, 16, 4, PLAIN)
    handle.remove()
    assert found['tokens'] == 160 and len(shapes) == 1
    gaps = np.diff(asked[:10])
    assert asked[0] == 0 and max(gaps) - min(gaps) <= 16 and asked[9] > 0.85 * data.train.n
    assert net.training and all(p.grad is None for p in net.parameters())


def test_processes_share_the_numbers_and_make_as_many_rounds():
    for n, world_size in ((1, 3), (7, 1), (7, 2), (6, 3)):
        found = []
        rounds = set()
        for rank in range(world_size):
            pairs = list(evaluation.shared_among(n, rank, world_size))
            rounds.add(len(pairs))
            found += [i for i, counts in pairs if counts]
        assert sorted(found) == list(range(n)) and len(rounds) == 1


SHARDED = """
import contextlib, json, sys
sys.path[:0] = {paths!r}
import torch
import evaluation
from common import shard_model
from test_evaluation import PLAIN, dataset_and_tasks, small_model

torch.distributed.init_process_group('gloo')
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
split, tasks = dataset_and_tasks({folder!r})
net = small_model(split.vocab_size, block_size=64, arch='llama')
shard_model(net, world_size, 'float32', 'cpu')
loss, bpb = evaluation.mean_loss(net, split, 7, 16, 2, PLAIN, rank, world_size)
found = evaluation.evaluate_tasks(net, tasks, PLAIN, rank, world_size)
if rank == 0:
    print(json.dumps([loss, bpb, found]))
torch.distributed.destroy_process_group()
"""


def dataset_and_tasks(folder):
    """A split of bytes with the tokens of conversations, and tasks of three kinds."""
    tokenizer = make_tokenizer(with_chat_tokens(BYTES))
    paths = [os.path.join(folder, f'{kind}.jsonl') for kind in ('multiple_choice', 'generate')]
    tasks = evaluation.load_tasks(','.join(paths), 0, None, tokenizer, 64)
    return Dataset('bytes', folder, 16).train, tasks


def test_two_processes_that_share_a_sharded_model_find_what_one_finds(tmp_path):
    (tmp_path / 'bytes').mkdir()
    np.frombuffer(TEXT[:3000].encode(), np.uint8).astype('<u2').tofile(tmp_path / 'bytes' / 'train.bin')
    state = with_chat_tokens(BYTES)
    meta = {'tokenizer': state, 'vocab_size': make_tokenizer(state).n_vocab}
    (tmp_path / 'bytes' / 'meta.json').write_text(json.dumps(meta))
    rng = random.Random(3)
    choices, replies = [], []
    for i in range(5):  # an odd number, of different lengths
        words = [chr(97 + rng.randrange(26)) * rng.randrange(1, 9) for _ in range(4)]
        choices.append({'kind': 'multiple_choice', 'query': words[0], 'choices': words[1:], 'gold': i % 3})
        messages = [{'role': 'user', 'content': words[0]}]
        replies.append({'kind': 'generate', 'messages': messages, 'answer': 'a' * (i + 1)})
    write_jsonl(tmp_path / 'multiple_choice.jsonl', choices)
    write_jsonl(tmp_path / 'generate.jsonl', replies)
    split, tasks = dataset_and_tasks(str(tmp_path))
    net = small_model(split.vocab_size, block_size=64, arch='llama')
    loss, bpb = evaluation.mean_loss(net, split, 7, 16, 2, PLAIN)
    expected = evaluation.evaluate_tasks(net, tasks, PLAIN)
    script = tmp_path / 'sharded.py'
    script.write_text(SHARDED.format(paths=[str(REPO), str(REPO / 'tests')], folder=str(tmp_path)))
    result = run_processes(2, script)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found[:2] == pytest.approx([loss, bpb]) and found[2] == expected


# -----------------------------------------------------------------------------
# samples in the loop


def test_samples_come_at_growing_gaps_that_follow_from_the_iteration():
    def steps(interval, growth, most=1200):
        return [it for it in range(1, most) if evaluation.is_sample_step(it, interval, growth)]
    assert steps(100, 1.5) == [100, 250, 475, 812]
    assert steps(300, 1.0) == steps(300, 0.5) == [300, 600, 900]
    assert steps(0, 1.5) == []


@pytest.mark.parametrize('content', [
    'To be\n\nQ:\\nA:\n  \nlast'.encode(), '\ufeffTo be\r\n\r\nQ:\\nA:\r\nlast\r\n'.encode(),
    'To be\nQ:\\nA:\nlast\n'.encode('utf-16')])
def test_prompts_are_lines_without_byte_order_mark_and_backslash_n_is_a_new_line(content, tmp_path):
    (tmp_path / 'prompts.txt').write_bytes(content)
    assert evaluation.read_prompts(tmp_path / 'prompts.txt') == ['To be', 'Q:\nA:', 'last']


def test_the_loop_takes_the_short_prompts_that_its_tokenizer_has(tmp_path, capsys):
    letters = make_tokenizer({'kind': 'char', 'chars': 'The '})
    assert evaluation.prompts_for_samples(None, letters) == ['', 'The ']
    (tmp_path / 'prompts.txt').write_text('The \nA\n')
    is_refused(capsys, evaluation.prompts_for_samples, str(tmp_path / 'prompts.txt'), letters)


@pytest.mark.parametrize('content', [None, b'', b'\n \n', b'caf\xe9'])
def test_prompts_that_cannot_be_read_are_one_line(content, tmp_path, capsys):
    path = tmp_path / 'prompts.txt'
    if content is not None:
        path.write_bytes(content)
    is_refused(capsys, evaluation.read_prompts, path)


def is_refused(capsys, function, *args):
    with pytest.raises(SystemExit) as e:
        function(*args)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith('error: ') and err.count('\n') == 1, err


# -----------------------------------------------------------------------------
# benchmarks

CORE = """icl_tasks:
-
  label: sums
  dataset_uri: maths/sums.jsonl
  num_fewshot: [2]
  icl_task_type: language_modeling
  continuation_delimiter: "\\nAnswer: " # this separates questions from answers
-
  label: who
  dataset_uri: who.jsonl
  num_fewshot: [0]
  icl_task_type: schema
-
  label: choice
  dataset_uri: choice.jsonl
  num_fewshot: [3]
  icl_task_type: multiple_choice
-
  label: hellaswag
  dataset_uri: choice.jsonl
  num_fewshot: [0]
  icl_task_type: multiple_choice
"""
CHANCE = 'Eval Task,Random baseline\nsums,0\nwho,50\nchoice,25\nhellaswag,25\n'


def write_jsonl(path, rows):
    path.write_text('\n'.join(json.dumps(row) for row in rows) + '\n')


def write_tasks(folder):
    """HellaSwag and a bundle with tasks of all kinds, of which a tiny model can learn some."""
    rng = random.Random(0)
    sums = []
    for a in range(6):
        for b in range(4):
            sums.append({'context': f'{a} plus {b} is ', 'continuation': str(a + b)})
    who = []
    for a, b in (('cat', 'dog'), ('king', 'man'), ('sun', 'sea')):
        for ending, gold in (('had eyes.', 0), ('was there.', 1)):
            who.append({'context_options': [f'The {a} saw the {b} as the {x}' for x in (a, b)],
                        'continuation': ending, 'gold': gold})
    choice, swag = [], []
    for a in ('one', 'three', 'blue', 'green', 'house', 'tree'):
        choices = [a, a + 's', 'no', a[:2]]
        gold = rng.randrange(4)
        choice.append({'query': f'Say {a}:', 'choices': choices, 'gold': gold})
        swag.append({'ctx': f'Say {a}:', 'endings': choices, 'label': gold})
    bundle = folder / 'eval_bundle'
    (bundle / 'eval_data' / 'maths').mkdir(parents=True)
    write_jsonl(bundle / 'eval_data' / 'maths' / 'sums.jsonl', sums)
    write_jsonl(bundle / 'eval_data' / 'who.jsonl', who)
    write_jsonl(bundle / 'eval_data' / 'choice.jsonl', choice)
    write_jsonl(folder / 'hellaswag_val.jsonl', swag)
    (bundle / 'core.yaml').write_text(CORE)
    (bundle / 'eval_meta_data.csv').write_text(CHANCE)
    return folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'tasks').mkdir()
    return write_tasks(tmp_path / 'tasks')


@functools.cache
def trained(arch, vocab_size, block_size):
    net = small_model(vocab_size, block_size=block_size, n_head=4, arch=arch, **ARCHS[arch])
    with torch.no_grad():
        for name, p in net.named_parameters():  # all different from their initial values
            p.copy_(torch.randn_like(p) * 0.05 + ('ln_' in name and name.endswith('weight')))
    text = ''
    for a in range(6):
        for b in range(4):
            text += f'{a} plus {b} is\nAnswer: {a + b}\n\n'
    if vocab_size == 257:
        learn(net, make_tokenizer(BYTES).encode(text), 80, 96)
    return net.eval()


def make_net(arch, vocab_size=257, block_size=256):
    """A model of bytes that has learned what the examples are about; of GPT-2's tokens: random weights."""
    return copy.deepcopy(trained(arch, vocab_size, block_size))


def same_beginning(rows):
    """How many ids all of them begin with; each keeps one."""
    return min(len(os.path.commonprefix(rows)), *(len(row) - 1 for row in rows))


def rows_of(kind, delimiter, example, prompt, encode, first):
    """[(ids, length of the answer)] of an example's alternatives, by the rules of the bundle's authors."""
    if kind == 'hellaswag':
        endings = [encode(' ' + ending) for ending in example['endings']]
        return [(encode(example['ctx']) + ending, len(ending)) for ending in endings]
    if kind == 'multiple_choice':
        rows = [first + encode(f"{prompt}{example['query']}{delimiter}{c}") for c in example['choices']]
        return [(row, len(row) - same_beginning(rows)) for row in rows]
    if kind == 'schema':
        ending = f"{delimiter}{example['continuation']}"
        rows = [first + encode(context + ending) for context in example['context_options']]
        return [(row, same_beginning([row[::-1] for row in rows])) for row in rows]
    whole = first + encode(f"{prompt}{example['context'].strip()}{delimiter}{example['continuation']}")
    without = first + encode(f"{prompt}{example['context'].strip()}{delimiter}".strip())
    assert whole[:len(without)] == without
    return [(whole, len(whole) - len(without))]


def one_by_one(task, net, encode, first, limit):
    """([nats per token], [all the most likely]) of all rows, [correct] of the examples; one call a row."""
    with open(task.path) as f:
        examples = [json.loads(line) for line in f]
    random.Random(1337).shuffle(examples)
    examples = examples[:limit]
    losses, greedy, correct = [], [], []
    for i, example in enumerate(examples):
        pool = [other for k, other in enumerate(examples) if k != i]
        prompt = ''
        for shot in random.Random(1234 + i).sample(pool, min(task.shots, len(pool))):
            if task.kind == 'multiple_choice':
                prompt += f"{shot['query']}{task.delimiter}{shot['choices'][shot['gold']]}\n\n"
            else:
                prompt += f"{shot['context'].strip()}{task.delimiter}{shot['continuation']}\n\n"
        scores = []
        for ids, n in rows_of(task.kind, task.delimiter, example, prompt, encode, first):
            ids = torch.tensor([ids[-net.config.block_size:]])
            n = min(n, ids.size(1) - 1)
            target = ids[0, -n:]
            with torch.no_grad():
                logits = net(ids[:, :-1], ids[:, 1:])[0][0, -n:].double()
            scores.append(F.cross_entropy(logits, target).item())
            greedy.append(bool((logits.argmax(-1) == target).all()))
        losses += scores
        answer = example.get('gold', example.get('label'))
        right = greedy[-1] if task.kind == 'language_modeling' else scores.index(min(scores)) == answer
        correct.append(right)
    return losses, greedy, correct


def compare(folder, name, net, tokenizer, limit=0):
    (task,), = evaluation.load_tasks(name, limit, str(folder), tokenizer, net.config.block_size).values()
    first = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    losses, greedy, correct = one_by_one(task, net, lambda text: tokenizer.encode(text).tolist(), first,
                                         limit or None)
    with torch.no_grad():
        found = evaluation.answer_losses(net, task)
    assert found[0] == pytest.approx(losses, abs=1e-4)
    if task.kind == 'language_modeling':
        assert found[1] == greedy
    assert evaluation.is_correct(net, task, PLAIN) == correct
    return evaluation.accuracy_of(task, correct)


@pytest.mark.parametrize('arch', ARCHS)
def test_examples_in_batches_have_the_scores_that_they_have_one_by_one(arch, folder):
    net = make_net(arch)
    found = {}
    for name in ('hellaswag', 'sums', 'who', 'choice'):
        found[name] = compare(folder, name, net, make_tokenizer(BYTES))
    assert found['sums']['shots'] == 2 and found['sums']['examples'] == 24
    if arch != 'gpt2':  # which learns nothing in so few steps
        assert 0 < found['sums']['accuracy'] < 1


def test_the_same_on_real_examples_and_prompts_that_are_too_long(monkeypatch, tmp_path):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(data_file('tiktoken_cache')))
    shutil.copy(data_file('hellaswag_val_1000.jsonl'), tmp_path / 'hellaswag_val.jsonl')
    (tmp_path / 'eval_bundle').symlink_to(data_file('eval_bundle'))
    tokenizer = make_tokenizer({'kind': 'tiktoken', 'name': 'gpt2'})
    net = make_net('llama', 50304, block_size=128)
    for name in ('hellaswag', 'arc_easy', 'winograd', 'lambada_openai', 'copa', 'bigbench_cs_algorithms'):
        found = compare(tmp_path, name, net, tokenizer, 4)
        assert found['examples'] == 4 and (found['truncated'] > 0 or not found['shots']), name


def test_core_is_the_mean_of_the_centered_accuracies(folder):
    net = make_net('llama')
    tasks = evaluation.load_tasks('core, who,hellaswag', 0, str(folder), make_tokenizer(BYTES), 256)
    results = evaluation.score_tasks(net, tasks, PLAIN)
    names = ['sums', 'who', 'choice', 'hellaswag_10shot']
    assert list(results) == [*names, 'hellaswag']
    metrics = evaluation.evaluate_tasks(net, tasks, PLAIN)
    assert metrics['core'] == pytest.approx(sum(results[name]['centered'] for name in names) / 4)
    assert metrics['who'] == results['who']['accuracy'] and list(metrics) == ['core', 'who', 'hellaswag']
    few = evaluation.load_tasks('core', 3, str(folder), make_tokenizer(BYTES), 256)
    assert [len(task.examples) for task in few['core']] == [3, 3, 3, 3]


def test_accuracy_comes_with_its_error_less_than_chance_is_negative_and_nan_is_never_right(folder):
    task, = evaluation.load_tasks('choice', 0, str(folder), make_tokenizer(BYTES), 256)['choice']
    found = evaluation.accuracy_of(task, [True] + 5 * [False])
    assert [found['accuracy'], found['error'], found['centered']] == pytest.approx(
        [1 / 6, math.sqrt(2 / 8 * 6 / 8 / 9), (1 / 6 - 1 / 4) / (3 / 4)])
    net = make_net('gpt2')
    with torch.no_grad():
        net.lm_head.weight.mul_(math.nan)
    assert evaluation.is_correct(net, task, PLAIN) == 6 * [False]


def test_a_reply_is_right_but_for_spaces_at_its_ends(tmp_path, monkeypatch):
    state = with_chat_tokens(BYTES)
    tokenizer = make_tokenizer(state)
    net = small_model(tokenizer.n_vocab, block_size=256)
    said = {'6': '6', '7': ' 7 ', '8': '8 and more', '99999': '9' * 90}  # by the right answer

    def generate(idx, n, temperature, vocab_size, stop_ids):
        assert temperature == 0 and vocab_size == tokenizer.n_vocab
        text = tokenizer.decode(idx[0].tolist())
        reply = next(reply for answer, reply in said.items() if f'Say {answer}<' in text)
        new = [*reply.encode(), stop_ids[0], 65][:n]
        return torch.cat((idx, torch.tensor([new])), dim=1)
    monkeypatch.setattr(net, 'generate', generate)
    rows = []
    for answer in said:
        rows.append({'kind': 'generate', 'answer': answer,
                     'messages': [{'role': 'user', 'content': f'Say {answer}'}]})
    write_jsonl(tmp_path / 'own.jsonl', rows)
    (task,), = evaluation.load_tasks(str(tmp_path / 'own.jsonl'), 0, None, tokenizer, 256).values()
    answers = {answer for _, answer in task.examples}
    correct = evaluation.is_correct(net, task, PLAIN)
    assert answers == set(said) and sum(correct) == 2
    assert [answer for (_, answer), right in zip(task.examples, correct) if not right] in (
        ['8', '99999'], ['99999', '8'])
    assert evaluation.accuracy_of(task, correct)['chance'] == 0


def test_a_file_of_ones_own_says_its_kind_and_guessing_follows_from_its_choices(tmp_path):
    rows = [{'kind': 'multiple_choice', 'query': 'a', 'choices': ['b', 'c'], 'gold': 0},
            {'kind': 'multiple_choice', 'query': 'a', 'choices': ['b', 'c', 'd', 'e'], 'gold': 3}]
    (tmp_path / 'own.jsonl').write_text('\ufeff' + '\n\n'.join(json.dumps(row) for row in rows))
    (task,), = evaluation.load_tasks(str(tmp_path / 'own.jsonl'), 0, None, make_tokenizer(BYTES), 64).values()
    assert evaluation.accuracy_of(task, [True, True])['chance'] == pytest.approx(3 / 8)


@pytest.mark.parametrize('name, path, content', [
    ('summs', None, None),
    ('who', 'eval_data/who.jsonl', '{"context_options": ["a", "b"], "continuation": "c", "gold": 2}'),
    ('who', 'eval_data/who.jsonl', '{"context_options": ["a", "b"], "continuation": "c"}'),
    ('who', 'eval_data/who.jsonl', '[' * 10_000),
    ('who', 'eval_data/who.jsonl', ''),
    ('hellaswag', '../hellaswag_val.jsonl', None),
    ('choice', 'core.yaml', '[' * 10_000),
    ('choice', 'core.yaml', None)])
def test_tasks_that_are_missing_or_broken_are_one_line(folder, capsys, name, path, content):
    if path and content is not None:
        (folder / 'eval_bundle' / path).write_text(content)
    elif path:
        (folder / 'eval_bundle' / path).unlink()
    is_refused(capsys, evaluation.load_tasks, name, 0, str(folder), make_tokenizer(BYTES), 256)


# the last one: bytes have no roles
@pytest.mark.parametrize('row', [
    {'kind': 'riddle'}, {'query': 'a'}, ['kind'],
    {'kind': 'generate', 'messages': [{'role': 'user', 'content': 'a'}], 'answer': 'b'}])
def test_rows_of_ones_own_that_are_wrong_are_one_line(row, tmp_path, capsys):
    path = str(tmp_path / 'own.jsonl')
    write_jsonl(tmp_path / 'own.jsonl', [row])
    is_refused(capsys, evaluation.load_tasks, path, 0, None, make_tokenizer(BYTES), 256)
