"""Benchmarks score the answers that their fields name, as if they were computed one by one."""

import json
import math
import random

import numpy as np
import pytest
import torch
from test_evaluation import PLAIN, learn, small_model
from torch.nn import functional as F

from configurator import InputError
from flatgpt.benchmarks import Task, encode_example, evaluate_tasks, load_tasks, parse_example, score_task
from flatgpt.tokenizer import make_tokenizer

EOT = '<|endoftext|>'
BYTES = make_tokenizer({'kind': 'byte'})
CORE = """icl_tasks:
- {label: sums, dataset_uri: sums.jsonl, num_fewshot: [2], continuation_delimiter: "\\nAnswer: "}
- {label: who, dataset_uri: who.jsonl, num_fewshot: [0]}
- {label: choice, dataset_uri: choice.jsonl, num_fewshot: [3]}
- {label: hellaswag, dataset_uri: choice.jsonl, num_fewshot: [0]}
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
    return write_tasks(tmp_path)


# of each alternative: the prompt, the answer
@pytest.mark.parametrize('example, expected, right', [
    ({'ctx': 'Say a:', 'endings': ['b', 'bc'], 'label': '1'}, [('Say a:', ' b'), ('Say a:', ' bc')], 1),
    ({'query': 'Say a:', 'choices': ['bx', 'by'], 'gold': 0},
     [(f'{EOT}Say a: b', 'x'), (f'{EOT}Say a: b', 'y')], 0),
    ({'query': 'Say a:', 'choices': ['b', 'bc'], 'gold': 1.0},  # as pandas writes it
     [(f'{EOT}Say a: ', 'b'), (f'{EOT}Say a: ', 'bc')], 1),
    ({'context_options': ['A cat', 'A dog'], 'continuation': 'ran.', 'gold': 1},
     [(f'{EOT}A cat', ' ran.'), (f'{EOT}A dog', ' ran.')], 1),
    ({'context': 'One and ', 'continuation': 'two'}, [(f'{EOT}One and', ' two')], 0),
])
def test_what_an_answer_is_follows_from_the_fields(example, expected, right):
    task = Task('one', [parse_example(example, ' ')], 0, 0.0)
    rows = encode_example(task, 0, BYTES)
    result = [(BYTES.decode(ids[:start]), BYTES.decode(ids[start:])) for ids, start in rows]
    assert (result, task.examples[0].gold) == (expected, right)


def test_shots_are_those_of_nanochat(folder):
    examples = [f'{a} plus {b} is\nAnswer: {a + b}' for a in range(6) for b in range(4)]
    random.Random(1337).shuffle(examples)
    task, = load_tasks('sums', 0, str(folder), BYTES)['sums']
    for i in range(len(examples)):
        others = [k for k in range(24) if k != i]
        shots = [examples[k] for k in random.Random(1234 + i).sample(others, 2)]
        (ids, start), = encode_example(task, i, BYTES)
        assert ids == BYTES.encode_prompt(EOT + '\n\n'.join([*shots, examples[i]]))
        assert BYTES.decode(ids[start:]) == examples[i].partition('Answer:')[2]


@pytest.mark.parametrize('block_size', [256, 40])  # of the second, prompts lose their beginning
def test_the_scores_are_those_of_alternatives_computed_one_by_one(folder, block_size):
    net = small_model(257, block_size=block_size, arch='llama')
    if block_size == 256:
        text = ''.join(f'{a} plus {b} is\nAnswer: {a + b}\n\n' for a in range(6) for b in range(4))
        learn(net, BYTES.encode(text), 80, 96)
    for name, (task,) in load_tasks('hellaswag,who,choice,sums', 0, str(folder), BYTES).items():
        n_correct = 0
        n_long = 0
        for i, example in enumerate(task.examples):
            losses = []
            rows = encode_example(task, i, BYTES)
            n_long += max(len(ids) for ids, _ in rows) > block_size
            for ids, start in rows:
                answer = torch.tensor(ids[start:])
                ids = torch.tensor(ids[-block_size:])
                with torch.no_grad():
                    logits = net(ids[None, :-1], ids[None, 1:])[0][0, -len(answer):]
                losses.append(F.cross_entropy(logits, answer).item())
            is_greedy = bool((logits.argmax(-1) == answer).all())
            n_correct += is_greedy if name == 'sums' else losses.index(min(losses)) == example.gold
        score = score_task(net, task, BYTES, PLAIN)
        assert (score['accuracy'], score['truncated']) == (n_correct / len(task.examples), n_long), name
    assert block_size == 40 or 0 < score['accuracy'] < 1, 'of sums, of which it has learned some'


def test_core_is_the_mean_of_the_centered_accuracies(folder):
    net = small_model(257, block_size=64)
    tasks = load_tasks('core, who,hellaswag', 3, str(folder), BYTES)
    metrics, details = evaluate_tasks(net, tasks, BYTES, PLAIN)
    chances = {'sums': 0, 'who': 0.5, 'choice': 0.2, 'hellaswag_10shot': 0.25, 'hellaswag': 0.25}
    centered = []
    for name, chance in chances.items():
        assert details[name]['examples'] == 3
        centered.append((details[name]['accuracy'] - chance) / (1 - chance))
    assert metrics['core'] == pytest.approx(np.mean(centered[:4]))
    assert metrics['who'] == details['who']['accuracy'] and list(metrics) == ['core', 'who', 'hellaswag']
    answers = [False] * 7 + [True]  # stopped in the third task
    metrics, details = evaluate_tasks(net, tasks, BYTES, PLAIN, should_stop=lambda: answers.pop(0))
    assert metrics == {} and list(details) == ['sums', 'who']


def test_a_file_of_your_own_is_named_by_its_path_and_nan_is_never_correct(folder):
    path = str(folder / 'eval_bundle' / 'eval_data' / 'choice.jsonl')
    net = small_model(257, block_size=64)
    torch.nn.init.constant_(net.lm_head.weight, math.nan)
    score = evaluate_tasks(net, load_tasks(path, 0, None, BYTES), BYTES, PLAIN)[1][path]
    assert score['chance'] == 0.25 and score['accuracy'] == 0


@pytest.mark.parametrize('name, tokenizer', [
    ('summs', BYTES), ('gone.jsonl', BYTES), ('who', make_tokenizer({'kind': 'char', 'chars': 'abc'}))])
def test_a_task_that_is_missing_or_cannot_be_encoded_is_an_input_error(folder, name, tokenizer):
    with pytest.raises(InputError):
        load_tasks(name, 0, str(folder), tokenizer)


@pytest.mark.parametrize('gold', ['2', '-1', '0.5', 'null', 'NaN'])
def test_an_example_without_its_correct_alternative_is_an_input_error(folder, gold):
    broken = '{"context_options": ["a", "b"], "continuation": "c", "gold": GOLD}'.replace('GOLD', gold)
    (folder / 'eval_bundle' / 'eval_data' / 'who.jsonl').write_text(broken)
    with pytest.raises(InputError, match='who'):
        load_tasks('who', 0, str(folder), BYTES)
