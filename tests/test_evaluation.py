"""Losses, bits per byte and the scores of benchmarks, held against computations one by one."""

import contextlib
import copy
import json
import math
import random

import numpy as np
import pytest
import torch
from conftest import TEXT, char_dataset
from torch.nn import functional as F

import evaluation
from dataset import Dataset
from model import GPT, GPTConfig
from tokenizer import make_tokenizer

PLAIN = contextlib.nullcontext()  # no autocast
BYTES = {'kind': 'byte'}


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


def test_the_loss_and_bits_per_byte_are_those_of_all_targets_one_by_one(data):
    net = small_model(data.vocab_size)
    split = copy.copy(data.val)
    # as if 0, a new line, were no text
    split.token_bytes = split.token_bytes * (np.arange(data.vocab_size) > 0)
    ids = torch.from_numpy(split.read([0], split.n)[0])
    nats = []
    for begin in range(0, len(ids) - 1, 16):  # the last window is shorter
        part = ids[begin:begin + 17]
        logits = net(part[None, :-1], part[None, 1:])[0][0]
        nats.append(F.cross_entropy(logits, part[1:], reduction='none'))
    nats = torch.cat(nats)
    text = data.tokenizer.decode(ids[1:].tolist()).replace('\n', '')
    bits = nats[ids[1:] > 0].sum().item() / math.log(2)
    for batch_size in (1, 7, 1000):
        found = evaluation.text_loss(net, split, 0, 16, batch_size, PLAIN)
        assert found['tokens'] == len(nats) and found['bytes'] == len(text.encode()) > len(text)
        assert found['loss'] == pytest.approx(nats.mean().item(), rel=1e-5)
        assert found['bpb'] == pytest.approx(bits / found['bytes'], rel=1e-5)
    split.token_bytes = 0 * split.token_bytes
    assert evaluation.text_loss(net, split, 0, 16, 7, PLAIN)['bpb'] is None


def test_the_standard_error_is_what_other_windows_would_give():
    torch.manual_seed(0)
    nats = torch.rand(200, 40).double()
    found = [evaluation.ratio_of_sums(row, torch.full((40,), 16.0)) for row in nats]
    losses, errors = np.array(found).T
    assert np.std(losses) == pytest.approx(np.mean(errors), rel=0.15)


def test_all_processes_have_the_same_number_of_turns_and_share_the_work():
    shares = [list(evaluation.shared_among(7, rank, 3)) for rank in range(3)]
    assert [len(share) for share in shares] == [3, 3, 3], 'FSDP needs all of them each time'
    assert sorted(i for i, counts in sum(shares, []) if counts) == list(range(7))


# -----------------------------------------------------------------------------
# samples in the loop


def test_samples_come_at_growing_gaps_that_follow_from_the_iteration():
    def steps(interval, growth):
        return [it for it in range(1, 1200) if evaluation.next_sample_step(it, interval, growth) == it]
    assert steps(100, 1.5) == [100, 250, 475, 812]
    assert steps(300, 1.0) == steps(300, 0.5) == [300, 600, 900]


def test_prompts_are_lines_without_byte_order_mark_and_backslash_n_is_a_new_line(tmp_path):
    (tmp_path / 'prompts.txt').write_bytes('\ufeffTo be\r\n\r\nQ:\\nA:\r\nlast\r\n'.encode())
    assert evaluation.read_prompts(tmp_path / 'prompts.txt') == ['To be', 'Q:\nA:', 'last']


def test_samples_are_of_the_prompts_that_the_tokenizer_can_encode():
    letters = make_tokenizer({'kind': 'char', 'chars': 'The '})
    assert evaluation.prompts_for_samples(None, letters) == ['', 'The ']


# -----------------------------------------------------------------------------
# benchmarks

CORE = """icl_tasks:
-
  label: sums
  dataset_uri: sums.jsonl
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
CHANCE = 'Eval Task,Random baseline\nsums,0\nwho,50\nchoice,20\nhellaswag,25\n'


def write_tasks(folder):
    """HellaSwag and a bundle with tasks of all kinds, of which a tiny model can learn some."""
    sums = []
    for a in range(6):
        for b in range(4):
            sums.append({'context': f'{a} plus {b} is ', 'continuation': str(a + b)})
    who, choice, swag = [], [], []
    for i, word in enumerate(('one', 'three', 'blue', 'green', 'house', 'tree')):
        choices = [word, word + 's', 'no', word[:2]]
        choice.append({'query': f'Say {word}:', 'choices': choices, 'gold': i % 4})
        swag.append({'ctx': f'Say {word}:', 'endings': choices, 'label': i % 4})
        options = [f'The {word} saw the cat as the {x}' for x in (word, 'cat')]
        who.append({'context_options': options, 'continuation': 'had eyes.', 'gold': i % 2})
    bundle = folder / 'eval_bundle'
    (bundle / 'eval_data').mkdir(parents=True)
    files = {'sums.jsonl': sums, 'who.jsonl': who, 'choice.jsonl': choice, '../../hellaswag_val.jsonl': swag}
    for name, rows in files.items():
        (bundle / 'eval_data' / name).write_text('\n'.join(json.dumps(row) for row in rows))
    (bundle / 'core.yaml').write_text(CORE)
    (bundle / 'eval_meta_data.csv').write_text(CHANCE)
    return folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'tasks').mkdir()
    return write_tasks(tmp_path / 'tasks')


EOT = '<|endoftext|>'


# of each alternative: what is given, the answer
@pytest.mark.parametrize('example, expected, right', [
    ({'ctx': 'Say a:', 'endings': ['b', 'bc'], 'label': '1'}, [('Say a:', ' b'), ('Say a:', ' bc')], 1),
    ({'query': 'Say a:', 'choices': ['bx', 'by'], 'gold': 0},
     [(f'{EOT}Say a: b', 'x'), (f'{EOT}Say a: b', 'y')], 0),
    ({'query': 'Say a:', 'choices': ['b', 'bc'], 'gold': 1},
     [(f'{EOT}Say a: ', 'b'), (f'{EOT}Say a: ', 'bc')], 1),
    ({'context_options': ['A cat', 'A dog'], 'continuation': 'ran.', 'gold': 1},
     [(f'{EOT}A cat', ' ran.'), (f'{EOT}A dog', ' ran.')], 1),
    ({'context': 'One and ', 'continuation': 'two'}, [(f'{EOT}One and', ' two')], 0),
    # as pandas and other programs write a whole number
    ({'ctx': 'A', 'endings': ['b', 'c'], 'label': 1.0}, [('A', ' b'), ('A', ' c')], 1),
    ({'query': 'A', 'choices': ['b', 'c'], 'gold': '1'}, [(f'{EOT}A ', 'b'), (f'{EOT}A ', 'c')], 1),
    ({'context_options': ['A', 'B'], 'continuation': 'c', 'gold': 1.0},
     [(f'{EOT}A', ' c'), (f'{EOT}B', ' c')], 1),
])
def test_what_an_answer_is_follows_from_the_fields(example, expected, right):
    tokenizer = make_tokenizer(BYTES)
    rows, answer = evaluation.render(example, [], ' ', tokenizer)
    found = [(tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:])) for ids, start in rows]
    assert (found, answer) == (expected, right)
    assert type(answer) is int


def test_shots_are_those_of_nanochat_and_a_prompt_that_is_too_long_loses_its_beginning(folder):
    tokenizer = make_tokenizer(BYTES)
    examples = [f'{a} plus {b} is\nAnswer: {a + b}' for a in range(6) for b in range(4)]
    random.Random(1337).shuffle(examples)
    for block_size in (256, 40):
        task, = evaluation.load_tasks('sums', 0, str(folder), tokenizer, block_size)['sums']
        assert task.n_truncated == (0 if block_size == 256 else 24)
        for i, (((ids, start),), _) in enumerate(task.examples):
            others = [k for k in range(24) if k != i]
            shots = [examples[k] for k in random.Random(1234 + i).sample(others, 2)]
            text = EOT + '\n\n'.join([*shots, examples[i]])
            assert ids.tolist() == tokenizer.encode_prompt(text)[-block_size:]
            assert tokenizer.decode(ids[start:].tolist()) == examples[i].partition('Answer:')[2]


def test_examples_in_batches_have_the_scores_that_they_have_one_by_one(folder):
    net = small_model(257, block_size=256, arch='llama')
    text = ''.join(f'{a} plus {b} is\nAnswer: {a + b}\n\n' for a in range(6) for b in range(4))
    learn(net, make_tokenizer(BYTES).encode(text), 80, 96)
    tasks = evaluation.load_tasks('hellaswag,who,choice,sums', 0, str(folder), make_tokenizer(BYTES), 256)
    for name, (task,) in tasks.items():
        rows = [row for its_rows, _ in task.examples for row in its_rows]
        losses, greedy = evaluation.answer_losses(net, rows, PLAIN)
        for (ids, start), loss, all_likeliest in zip(rows, losses, greedy, strict=True):
            with torch.no_grad():
                logits = net(ids[None, :-1], ids[None, 1:])[0][0, start - 1:]
            assert F.cross_entropy(logits, ids[start:]).item() == pytest.approx(loss, abs=1e-4)
            assert (logits.argmax(-1) == ids[start:]).all() == all_likeliest
        right = greedy
        if name != 'sums':
            chosen = np.array(losses).reshape(len(task.examples), -1).argmin(axis=1)
            right = chosen == [answer for _, answer in task.examples]
        accuracy = evaluation.score_task(net, task, PLAIN)['accuracy']
        assert accuracy == pytest.approx(np.mean(right))
    assert 0 < accuracy < 1, 'of sums, of which it has learned some'


def test_core_is_the_mean_of_the_centered_accuracies(folder):
    net = small_model(257, block_size=64)
    tasks = evaluation.load_tasks('core, who,hellaswag', 3, str(folder), make_tokenizer(BYTES), 64)
    metrics, results = evaluation.evaluate_tasks(net, tasks, PLAIN)
    chances = {'sums': 0, 'who': 0.5, 'choice': 0.2, 'hellaswag_10shot': 0.25, 'hellaswag': 0.25}
    centered = []
    for name, chance in chances.items():
        found = results[name]
        assert found['examples'] == 3
        centered.append((found['accuracy'] - chance) / (1 - chance))
    assert metrics['core'] == pytest.approx(np.mean(centered[:4]))
    assert metrics['who'] == results['who']['accuracy'] and list(metrics) == ['core', 'who', 'hellaswag']


def test_a_file_of_ones_own_is_named_by_its_path_and_nan_is_never_right(folder):
    path = str(folder / 'eval_bundle' / 'eval_data' / 'choice.jsonl')
    tasks = evaluation.load_tasks(path, 0, None, make_tokenizer(BYTES), 64)
    net = small_model(257, block_size=64)
    torch.nn.init.constant_(net.lm_head.weight, math.nan)
    found = evaluation.evaluate_tasks(net, tasks, PLAIN)[1][path]
    assert found['chance'] == 0.25 and found['accuracy'] == 0


@pytest.mark.parametrize('gold', ['2', '-1', '0.5', 'null', '"a"', 'NaN', 'Infinity'])
def test_a_task_that_is_missing_or_broken_is_one_line(folder, capsys, gold):
    broken = '{"context_options": ["a", "b"], "continuation": "c", "gold": GOLD}'.replace('GOLD', gold)
    (folder / 'eval_bundle' / 'eval_data' / 'who.jsonl').write_text(broken)
    for name in ('summs', 'who'):
        with pytest.raises(SystemExit) as e:
            evaluation.load_tasks(name, 0, str(folder), make_tokenizer(BYTES), 256)
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.count('\n') == 1, err
