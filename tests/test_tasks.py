"""Questions are scored as transformers scores them, one by one, whatever the batches and however many processes."""

import contextlib
import json
import math
import random
import shutil
from types import SimpleNamespace

import pytest
import torch

import huggingface
import tasks
from dataset import make_tokenizer
from model import GPT, GPTConfig

ONE = SimpleNamespace(rank=0, world_size=1, sharded=False, sum=lambda tensor: tensor)
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


def write_questions(folder):
    """HellaSwag and a bundle of four tasks of all kinds, with questions that a tiny model can learn some of."""
    rng = random.Random(0)
    sums = [{'context': f'{a} plus {b} is ', 'continuation': str(a + b)} for a in range(6) for b in range(4)]
    who = [{'context_options': [f'The {a} saw the {b} as the {x}' for x in (a, b)], 'continuation': end, 'gold': gold}
           for a, b in (('cat', 'dog'), ('king', 'man'), ('sun', 'sea')) for end, gold in (('had eyes.', 0), ('was there.', 1))]
    choice = [{'query': f'Say {a}:', 'choices': [a, a + 's', 'no', a[:2]], 'gold': rng.randrange(4)} for a in ('one', 'three', 'blue', 'green', 'house', 'tree')]
    swag = [{'ctx': q['query'], 'endings': q['choices'], 'label': q['gold']} for q in choice]
    data = folder / 'eval_bundle' / 'eval_data'
    (data / 'maths').mkdir(parents=True)
    for path, questions in ((data / 'maths' / 'sums.jsonl', sums), (data / 'who.jsonl', who), (data / 'choice.jsonl', choice), (folder / 'hellaswag_val.jsonl', swag)):
        path.write_text('\n'.join(map(json.dumps, questions)) + '\n')
    (folder / 'eval_bundle' / 'core.yaml').write_text(CORE)
    (folder / 'eval_bundle' / 'eval_meta_data.csv').write_text('Eval Task,Random baseline\nsums,0\nwho,50\nchoice,25\nhellaswag,25\n')
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_questions(tmp_path / 'questions')


def make_net(shape, trained, vocab_size=257, block_size=256):
    """Random weights that are all different from what anything starts with; trained: on what the questions are about."""
    torch.manual_seed(1)
    net = GPT(GPTConfig(block_size=block_size, vocab_size=vocab_size, n_layer=2, n_head=4, n_embd=32, **SHAPES[shape]))
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(torch.randn_like(p) * (0.05 if trained else 0.3) + (1 if 'ln_' in name and name.endswith('weight') else 0))
    if trained:
        text = ''.join(f'{a} plus {b} is\nAnswer: {a + b}\n\n' for a in range(6) for b in range(4))
        ids = torch.tensor(make_tokenizer(BYTES).encode(text).astype('int64'))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(80):
            starts = torch.randint(len(ids) - 97, (8,))
            x = torch.stack([ids[s:s + 97] for s in starts])
            net(x[:, :-1], x[:, 1:])[1].backward()
            optimizer.step(), optimizer.zero_grad()
    return net.eval()


def by_transformers(folder, name, theirs, encode, first, block_size, most=0):
    """[(nats per token and whether all were the likeliest, for each alternative)] of each question: each by a call of its own, each text
    written out by the rules of the bundle's authors."""
    if name == 'hellaswag':
        path, kind, shots, delimiter = folder / 'hellaswag_val.jsonl', name, 0, ' '
    else:
        path, kind, shots, delimiter, _ = tasks.bundle(str(folder))[name]
    questions = [json.loads(line) for line in open(path)]
    random.Random(1337).shuffle(questions)
    questions = questions[:most or len(questions)]
    out = []
    for i, q in enumerate(questions):
        pool = [other for k, other in enumerate(questions) if k != i]
        prompt = ''
        for e in random.Random(1234 + i).sample(pool, min(shots, len(pool))):
            if kind == 'multiple_choice':
                prompt += f"{e['query']}{delimiter}{e['choices'][e['gold']]}\n\n"
            elif kind == 'language_modeling':
                prompt += f"{e['context'].strip()}{delimiter}{e['continuation']}\n\n"
        if kind == 'hellaswag':
            rows = [(encode(q['ctx']) + encode(' ' + end), len(encode(' ' + end))) for end in q['endings']]
        elif kind == 'multiple_choice':
            ids = [first + encode(f"{prompt}{q['query']}{delimiter}{c}") for c in q['choices']]
            same = 0
            while same < min(map(len, ids)) - 1 and all(row[same] == ids[0][same] for row in ids):
                same += 1
            rows = [(row, len(row) - same) for row in ids]
        elif kind == 'schema':
            ids = [first + encode(f"{c}{delimiter}{q['continuation']}") for c in q['context_options']]
            same = 0
            while same < min(map(len, ids)) - 1 and all(row[-1 - same] == ids[0][-1 - same] for row in ids):
                same += 1
            rows = [(row, same) for row in ids]
        else:
            whole = first + encode(f"{prompt}{q['context'].strip()}{delimiter}{q['continuation']}")
            without = first + encode(f"{prompt}{q['context'].strip()}{delimiter}".strip())
            assert whole[:len(without)] == without
            rows = [(whole, len(whole) - len(without))]
        scores = []
        for ids, n in rows:
            ids = torch.tensor([ids[-block_size:]])
            n = min(n, ids.size(1) - 1)
            with torch.no_grad():
                logprobs = theirs(ids).logits[0, -1 - n:-1].double().log_softmax(-1)
            target = ids[0, -n:]
            nll = -logprobs.gather(1, target[:, None])
            scores.append((nll.mean().item(), bool((logprobs.argmax(-1) == target).all())))
        if kind == 'language_modeling':
            out.append((scores, scores[0][1]))
        else:
            out.append((scores, min(range(len(scores)), key=lambda k: scores[k][0]) == q.get('gold', q.get('label'))))
    return out


def compare(folder, name, net, theirs, tokenizer, batch_tokens, most=0):
    task = tasks.load(name, str(folder), tokenizer, net.config.block_size, most)
    scores = tasks.score(net, task, batch_tokens, ONE, contextlib.nullcontext())
    found = tasks.grade(task, scores)
    first = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    want = by_transformers(folder, name, theirs, lambda text: [int(i) for i in tokenizer.encode(text)], first, net.config.block_size, most)
    assert len(want) == found['questions'] == len(found['right'])
    each = (scores[:, 0] / scores[:, 1]).tolist()
    assert each == pytest.approx([nll for alternatives, _ in want for nll, _ in alternatives], abs=1e-4)
    assert found['right'] == [right for _, right in want]
    assert found['accuracy'] == sum(found['right']) / len(want)
    return found


def export(net, tokenizer_state, folder):
    transformers = pytest.importorskip('transformers')
    huggingface.write(str(folder), net.state_dict(), net.config, tokenizer_state)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype='auto', attn_implementation='eager').eval()


@pytest.mark.parametrize('trained', [False, True])
@pytest.mark.parametrize('shape', SHAPES)
def test_transformers_gives_each_question_the_same_score(shape, trained, folder, tmp_path):
    net = make_net(shape, trained)
    theirs = export(net, BYTES, tmp_path / 'hf')
    found = {name: compare(folder, name, net, theirs, make_tokenizer(BYTES), 700) for name in ('hellaswag', 'sums', 'who', 'choice', 'hellaswag_10shot')}
    assert found['sums']['shots'] == 2 and found['sums']['questions'] == 24 and found['hellaswag_10shot']['chance'] == 0.25
    if trained and shape != 'gpt2':  # which learns nothing in so few steps
        assert 0 < found['sums']['accuracy'] < 1 and found['who']['centered'] == pytest.approx(2 * found['who']['accuracy'] - 1)


def test_the_same_on_real_questions_and_prompts_that_are_too_long(test_data, gpt2, tmp_path):
    (tmp_path / 'questions').mkdir()
    shutil.copy(test_data / 'hellaswag_val_1000.jsonl', tmp_path / 'questions' / 'hellaswag_val.jsonl')
    shutil.copytree(test_data / 'eval_bundle', tmp_path / 'questions' / 'eval_bundle')
    tokenizer = make_tokenizer({'kind': 'tiktoken', 'name': 'gpt2'})
    net = make_net('llama', False, 50304, block_size=128)
    theirs = export(net, tokenizer.state(), tmp_path / 'hf')
    for name, most in (('hellaswag', 6), ('arc_easy', 5), ('winograd', 6), ('lambada_openai', 6), ('copa', 6), ('bigbench_cs_algorithms', 4)):
        found = compare(tmp_path / 'questions', name, net, theirs, tokenizer, 500, most)
        assert found['questions'] == most and (found['truncated'] > 0 if found['shots'] else True), name


def test_no_batch_and_no_number_of_processes_changes_a_score(folder):
    net = make_net('modern', True)
    task = tasks.load('choice', str(folder), make_tokenizer(BYTES), 256)
    want = tasks.score(net, task, 10_000, ONE, contextlib.nullcontext())
    for tokens in (1, 300, 1000):
        torch.testing.assert_close(tasks.score(net, task, tokens, ONE, contextlib.nullcontext()), want, atol=1e-4, rtol=0)
    for n in (2, 3):
        parts, calls = [], [0] * n
        for rank in range(n):
            def stop(rank=rank):
                calls[rank] += 1
                return False
            parts.append(tasks.score(net, task, 300, SimpleNamespace(rank=rank, world_size=n, sharded=False, sum=lambda tensor: tensor), contextlib.nullcontext(), stop))
        assert torch.equal(sum(parts), tasks.score(net, task, 300, ONE, contextlib.nullcontext())), 'to the bit: the batches are the same'
        assert len(set(calls)) == 1 and calls[0] > 0, 'all ask equally often, or they would wait for each other'
    assert tasks.score(net, task, 300, ONE, contextlib.nullcontext(), stop=lambda: True) is None


def test_scoring_leaves_no_trace(folder):
    net = make_net('gpt2', True).train()
    before, random_state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    tasks.score(net, tasks.load('sums', str(folder), make_tokenizer(BYTES), 256), 500, ONE, contextlib.nullcontext())
    assert net.training and all(torch.equal(v, before[k]) and v.grad is None for k, v in net.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state()) and all(p.grad is None for p in net.parameters())


def test_accuracy_comes_with_its_error_and_less_than_chance_is_negative(folder):
    task = tasks.load('choice', str(folder), make_tokenizer(BYTES), 256)
    scores = torch.ones(len(task.rows), 3, dtype=torch.float64)
    for i, (question, _, _) in enumerate(task.rows):
        if i % 4 == (task.gold[question] + (question > 0)) % 4:  # only the first question is answered right
            scores[i, 0] = 0.5
    found = tasks.grade(task, scores)
    assert found['right'] == [True] + [False] * 5 and found['accuracy'] == 1 / 6
    assert found['error'] == pytest.approx(math.sqrt(1 / 6 * 5 / 6 / 6)) and found['centered'] == pytest.approx((1 / 6 - 1 / 4) / (3 / 4))


def test_what_is_absent_or_broken_is_one_line(folder, capsys):
    def error(name, tokenizer=make_tokenizer(BYTES)):
        with pytest.raises(SystemExit) as e:
            tasks.load(name, str(folder), tokenizer, 256)
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.startswith('error: ') and err.count('\n') == 1
        return err
    assert 'sums, who, choice, hellaswag_10shot' in error('summs')
    assert 'cannot be asked' in error('sums', make_tokenizer({'kind': 'char', 'chars': 'ab'}))
    (folder / 'eval_bundle' / 'eval_data' / 'who.jsonl').write_text('{"context_options": ["a", "b"], "continuation": "c", "gold": 2}\n')
    assert 'who.jsonl:1' in error('who')
    (folder / 'eval_bundle' / 'eval_data' / 'who.jsonl').unlink()
    assert tasks.BUNDLE in error('who') and str(folder) in error('who')
    (folder / 'hellaswag_val.jsonl').unlink()
    assert tasks.HELLASWAG in error('hellaswag') and str(folder) in error('hellaswag')
    (folder / 'eval_bundle' / 'core.yaml').write_text(CORE.replace('who.jsonl', '../../../who.jsonl'))
    assert 'outside' in error('choice')
    (folder / 'eval_bundle' / 'core.yaml').unlink()
    assert tasks.BUNDLE in error('choice')
