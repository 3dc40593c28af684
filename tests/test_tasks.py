"""Tasks are scored as transformers scores them, one by one."""

import contextlib
import copy
import functools
import json
import math
import os
import random
import shutil

import pytest
import torch

from model import GPT, GPTConfig
from support import hf_export, tasks
from support.chat import with_chat_tokens
from support.tokenizer import make_tokenizer


# what parallel.init() returns to a single process
ONE = tasks.Distributed('cpu')
PLAIN = contextlib.nullcontext()  # no autocast
BYTES = {'kind': 'byte'}
SHAPES = {'gpt2': dict(arch='gpt2'), 'llama': dict(arch='llama', n_kv_head=2), 'modern': dict(arch='modern')}
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


def write_tasks(folder):
    """HellaSwag and a bundle of tasks of all kinds, with examples of which a tiny model can learn some."""
    rng = random.Random(0)
    sums = [{'context': f'{a} plus {b} is ', 'continuation': str(a + b)} for a in range(6) for b in range(4)]
    who = [{'context_options': [f'The {a} saw the {b} as the {x}' for x in (a, b)],
            'continuation': end, 'gold': gold}
           for a, b in (('cat', 'dog'), ('king', 'man'), ('sun', 'sea'))
           for end, gold in (('had eyes.', 0), ('was there.', 1))]
    choice = [{'query': f'Say {a}:', 'choices': [a, a + 's', 'no', a[:2]], 'gold': rng.randrange(4)}
              for a in 'one three blue green house tree'.split()]
    swag = [{'ctx': q['query'], 'endings': q['choices'], 'label': q['gold']} for q in choice]
    bundle = folder / 'eval_bundle'
    data = bundle / 'eval_data'
    (data / 'maths').mkdir(parents=True)
    for path, examples in ((data / 'maths' / 'sums.jsonl', sums), (data / 'who.jsonl', who),
                           (data / 'choice.jsonl', choice), (folder / 'hellaswag_val.jsonl', swag)):
        path.write_text('\n'.join(map(json.dumps, examples)) + '\n')
    (bundle / 'core.yaml').write_text(CORE)
    (bundle / 'eval_meta_data.csv').write_text(CHANCE)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_tasks(tmp_path / 'tasks')


def learn(net, ids, n_steps, T):
    """Train on windows of T + 1 ids."""
    ids, optimizer = torch.tensor(ids.astype('int64')), torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(n_steps):
        x = torch.stack([ids[s:s + T + 1] for s in torch.randint(len(ids) - T, (8,))])
        net(x[:, :-1], x[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def trained(shape, vocab_size, block_size):
    torch.manual_seed(1)
    net = GPT(GPTConfig(block_size=block_size, vocab_size=vocab_size, n_layer=2, n_head=4, n_embd=32, **SHAPES[shape]))
    with torch.no_grad():
        for name, p in net.named_parameters():  # all different from their initial values
            p.copy_(torch.randn_like(p) * 0.05 + ('ln_' in name and name.endswith('weight')))
    text = ''.join(f'{a} plus {b} is\nAnswer: {a + b}\n\n' for a in range(6) for b in range(4))
    learn(net, make_tokenizer(BYTES).encode(text), 80 if vocab_size == 257 else 0, 96)
    return net.eval()


def make_net(shape, vocab_size=257, block_size=256):
    """A model of bytes that has learned what the examples are about; of GPT-2's tokens: random weights."""
    return copy.deepcopy(trained(shape, vocab_size, block_size))


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


def by_transformers(task, theirs, encode, first, block_size, limit):
    """[([(nats per token, all the most likely) of each alternative], correct)], by a call for each."""
    with open(task.path) as f:
        examples = [json.loads(line) for line in f]
    random.Random(1337).shuffle(examples)
    examples, out = examples[:limit], []
    for i, example in enumerate(examples):
        pool = [other for k, other in enumerate(examples) if k != i]
        prompt = ''
        for e in random.Random(1234 + i).sample(pool, min(task.shots, len(pool))):
            if task.kind == 'multiple_choice':
                prompt += f"{e['query']}{task.delimiter}{e['choices'][e['gold']]}\n\n"
            elif task.kind == 'language_modeling':
                prompt += f"{e['context'].strip()}{task.delimiter}{e['continuation']}\n\n"
        scores = []
        for ids, n in rows_of(task.kind, task.delimiter, example, prompt, encode, first):
            ids = torch.tensor([ids[-block_size:]])
            n = min(n, ids.size(1) - 1)
            with torch.no_grad():
                logprobs = theirs(ids).logits[0, -1 - n:-1].double().log_softmax(-1)
            target = ids[0, -n:]
            scores.append((-logprobs.gather(1, target[:, None]).mean().item(), bool((logprobs.argmax(-1) == target).all())))
        best = min(range(len(scores)), key=lambda k: scores[k][0])
        answer = example.get('gold', example.get('label'))
        out.append((scores, scores[0][1] if task.kind == 'language_modeling' else best == answer))
    return out


def compare(folder, name, net, theirs, tokenizer, limit=None):
    named = f'{name}:{limit}' if limit else name
    (task,), = tasks.load_tasks(named, str(folder), tokenizer, net.config.block_size).values()
    correct = tasks.score(net, task, ONE, PLAIN, lambda: None)
    first = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    encode = lambda text: tokenizer.encode(text).tolist()
    want = by_transformers(task, theirs, encode, first, net.config.block_size, limit)
    for (rows, _), (alternatives, _) in zip(task.examples, want):
        losses, likeliest = tasks.losses_of(net, rows)
        assert losses == pytest.approx([nll for nll, _ in alternatives], abs=1e-4)
        assert likeliest == [sure for _, sure in alternatives]
    assert correct.tolist() == [right for _, right in want]
    return tasks.accuracy(task, correct)


def export(net, tokenizer_state, folder, **kwargs):
    transformers = pytest.importorskip('transformers')
    hf_export.write(str(folder), net.state_dict(), net.config, tokenizer_state, **kwargs)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype='auto', attn_implementation='eager').eval()


@pytest.mark.parametrize('shape', SHAPES)
def test_transformers_gives_each_example_the_same_score(shape, folder, tmp_path):
    net = make_net(shape)
    theirs = export(net, BYTES, tmp_path / 'hf')
    found = {name: compare(folder, name, net, theirs, make_tokenizer(BYTES))
             for name in 'hellaswag sums who choice'.split()}
    assert found['sums']['shots'] == 2 and found['sums']['questions'] == 24
    if shape != 'gpt2':  # which learns nothing in so few steps
        assert 0 < found['sums']['accuracy'] < 1


def test_the_same_on_real_examples_and_prompts_that_are_too_long(test_data, gpt2, tmp_path):
    shutil.copy(test_data / 'hellaswag_val_1000.jsonl', tmp_path / 'hellaswag_val.jsonl')
    (tmp_path / 'eval_bundle').symlink_to(test_data / 'eval_bundle')
    tokenizer = make_tokenizer({'kind': 'tiktoken', 'name': 'gpt2'})
    net = make_net('llama', 50304, block_size=128)
    theirs = export(net, tokenizer.state(), tmp_path / 'hf')
    for name, limit in dict(hellaswag=6, arc_easy=5, winograd=6, lambada_openai=6, copa=6, bigbench_cs_algorithms=4).items():
        found = compare(tmp_path, name, net, theirs, tokenizer, limit)
        assert found['questions'] == limit, name
        assert found['truncated'] > 0 or not found['shots'], name


def test_an_answer_is_right_but_for_spaces_at_its_ends(tmp_path):
    net, tokenizer = make_net('llama', 261), make_tokenizer(with_chat_tokens(BYTES))
    said = {'6': '6', '7': ' 7 ', '8': '8 and more', '99999': '9' * 90}  # by the right answer

    def generate(idx, n, stop, **kwargs):
        answer = next(text for answer, text in said.items() if f'Say {answer}<' in tokenizer.decode(idx[0].tolist()))
        return torch.cat((idx, torch.tensor([[*answer.encode(), stop[0]][:n]])), dim=1)
    net.generate = generate
    path = tmp_path / 'x.jsonl'
    path.write_text('\n'.join(json.dumps({'kind': 'generate', 'answer': answer, 'messages': [
        {'role': 'user', 'content': f'Say {answer}'}]}) for answer in said))
    (task,), = tasks.load_tasks(str(path), '', tokenizer, 256).values()
    sharded = tasks.Distributed('cpu', world_size=2)
    sharded.sharded = True
    assert tasks.score(net, task, sharded, PLAIN, lambda: None).tolist() == [1, 1, 0, 0]


def test_accuracy_comes_with_its_error_and_less_than_chance_is_negative_and_nan_is_never_right(folder):
    task, = tasks.load_tasks('choice', str(folder), make_tokenizer(BYTES), 256)['choice']
    found = tasks.accuracy(task, torch.tensor([1.0, 0, 0, 0, 0, 0]))
    assert [found[name] for name in 'accuracy error centered'.split()] == pytest.approx(
        [1 / 6, math.sqrt(2 / 8 * 6 / 8 / 9), (1 / 6 - 1 / 4) / (3 / 4)])
    net = make_net('gpt2')
    net.lm_head.weight.data *= math.nan
    assert not tasks.score(net, task, tasks.Distributed('cpu'), PLAIN, lambda: None).any()


@pytest.mark.parametrize('name, path, content, words', [
    ('summs', None, None, 'sums, who, choice, hellaswag_10shot'),
    ('who', 'eval_data/who.jsonl', '{"context_options": ["a", "b"], "continuation": "c", "gold": 2}',
     'who.jsonl:1'),
    ('who', 'eval_data/who.jsonl', '{"context_options": ["a", "b"], "continuation": "c"}', 'who.jsonl:1'),
    ('hellaswag', '../hellaswag_val.jsonl', None, 'prepare.py hellaswag'),
    ('choice', 'core.yaml', '[' * 10_000, 'cannot be read'),
    ('choice', 'core.yaml', None, 'prepare.py core')])
def test_what_is_missing_or_broken_is_one_line(folder, capsys, name, path, content, words):
    if path and content:
        (folder / 'eval_bundle' / path).write_text(content)
    elif path:
        (folder / 'eval_bundle' / path).unlink()
    with pytest.raises(SystemExit) as e:
        tasks.load_tasks(name, str(folder), make_tokenizer(BYTES), 256)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith('error: ') and err.count('\n') == 1 and words in err
