"""The loss that eval.py tells is that of transformers, whatever the windows, batches and number of processes."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, make_dataset, torchrun
from test_tasks import ONE, export, write_questions

import checkpoint
import tasks
from dataset import Dataset, make_tokenizer, train_starts
from model import GPT, GPTConfig

TEXT = ''.join(f"{a} times {b} is {a * b}: \u00e9t\u00e9.\n" for a in range(20) for b in range(20))  # some characters have two bytes


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """Three trained models in run folders, and their text."""
    folder = tmp_path_factory.mktemp('trained')
    make_dataset(folder / 'data', text=TEXT)
    data = Dataset('tiny', str(folder / 'data'))
    for arch in ('gpt2', 'llama', 'modern'):
        torch.manual_seed(1)
        model = GPT(GPTConfig(block_size=16, vocab_size=data.vocab_size, n_layer=2, n_head=2, n_embd=32, arch=arch))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(40):
            ids = torch.from_numpy(data.train.windows(train_starts(1, range(16 * step, 16 * step + 16), data.train.n, 16), 17))
            model(ids[:, :-1], ids[:, 1:])[1].backward()
            optimizer.step(), optimizer.zero_grad()
        (folder / arch).mkdir()
        torch.save({'model': model.state_dict(), 'model_args': model.config.model_args(), 'iter_num': 40, 'config': {'dataset': 'tiny'},
                    'tokenizer': data.tokenizer_state}, folder / arch / 'ckpt.pt')
    return folder


def flags(run, arch, *more):
    return [f'--out_dir={run / arch}', f"--data_dir={run / 'data'}", '--device=cpu', '--dtype=float32', *more]


def told(run, arch):
    return json.loads((run / arch / 'eval.json').read_text())['texts']['tiny/val']


@pytest.mark.parametrize('arch', ['gpt2', 'llama', 'modern'])
def test_loss_and_bits_per_byte_are_those_of_transformers(script, run, tmp_path, arch):
    result = script('eval.py', *flags(run, arch))
    assert result.status == 0, result.err
    found = told(run, arch)
    model, tokenizer = checkpoint.load(str(run / arch))
    theirs = export(model, tokenizer.state(), tmp_path / 'hf')
    data = Dataset('tiny', str(run / 'data'))
    ids = torch.from_numpy(data.val.windows([0], data.val.n)[0])
    nats, size = 0.0, 0
    for begin in range(0, len(ids) - 1, 16):  # the last window is shorter
        part = ids[begin:begin + 17][None]
        with torch.no_grad():
            nats += torch.nn.functional.cross_entropy(theirs(part[:, :-1]).logits[0], part[0, 1:], reduction='sum').item()
        size += len(tokenizer.decode(part[0, 1:].tolist()).encode())
    assert size == len(tokenizer.decode(ids[1:].tolist()).encode()) > len(ids)
    assert found['tokens'] == len(ids) - 1 and found['bytes'] == size
    assert found['loss'] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert found['bpb'] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found['perplexity'] == pytest.approx(math.exp(found['loss']))
    assert f"loss {found['loss']:.4f} \u00b1 {found['loss_error']:.4f}" in result.out and f"{found['bpb']:.4f}" in result.out
    # a window that moves on by five tokens: each target is counted once, with what comes before it in the window
    assert script('eval.py', *flags(run, arch, '--stride=5')).status == 0
    nats, done = 0.0, 0
    for end in [*range(16, len(ids) - 1, 5), len(ids) - 1]:
        part = ids[max(0, done - 11):end + 1][None]
        with torch.no_grad():
            nats += torch.nn.functional.cross_entropy(theirs(part[:, :-1]).logits[0, -(end - done):], part[0, -(end - done):], reduction='sum').item()
        done = end
    assert told(run, arch)['loss'] == pytest.approx(nats / (len(ids) - 1), rel=1e-5) and told(run, arch)['tokens'] == len(ids) - 1


def test_no_batch_size_changes_it(script, run):
    script('eval.py', *flags(run, 'modern'))
    want = told(run, 'modern')
    for batch_size in (1, 3, 1000):
        script('eval.py', *flags(run, 'modern', f'--batch_size={batch_size}'))
        found = told(run, 'modern')
        assert all(found[key] == pytest.approx(want[key], rel=1e-5) for key in ('loss', 'loss_error', 'bpb', 'bpb_error', 'tokens', 'bytes')), batch_size


def test_its_error_is_what_other_windows_would_give(script, run):
    """The spread of the losses of many small parts of the text is what the error of each of them predicts."""
    model, _ = checkpoint.load(str(run / 'modern'))
    data = Dataset('tiny', str(run / 'data'))
    windows = tasks.cut(data.train.n - 1, 16)[:500]
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0)).view(20, 25)
    parts = [tasks.text_loss(model, data.train, windows[part.numpy()], 16, 25, ONE, torch.no_grad()) for part in order]
    spread, predicted = np.std([part['loss'] for part in parts], ddof=1), np.mean([part['loss_error'] for part in parts])
    assert 0.6 < spread / predicted < 1.5
    assert parts[0]['bpb'] is None, 'no bytes are known without the tokenizer'


def test_special_tokens_are_no_text_and_bytes_do_not_depend_on_the_tokenizer(script, tmp_path):
    (tmp_path / 'in').mkdir()
    for i in range(6):
        (tmp_path / 'in' / f'{i}.txt').write_text(TEXT[500 * i:500 * i + 400], encoding='utf-8')
    assert script('prepare.py', 'docs', f"--input={tmp_path / 'in'}", '--tokenizer=byte', f"--data_dir={tmp_path / 'data'}", '--val_fraction=0.5').status == 0
    data = Dataset('docs', str(tmp_path / 'data'))
    place = [f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}"]
    assert script('train.py', *TINY, '--dataset=docs', *place).status == 0
    assert script('eval.py', *place, '--split=train', '--device=cpu', '--dtype=float32').status == 0
    found = json.loads((tmp_path / 'out' / 'eval.json').read_text())['texts']['docs/train']
    documents = data.meta['splits']['train']['documents']
    assert documents > 1 and found['tokens'] == data.train.n - 1 and found['bytes'] == data.train.n - documents == data.meta['splits']['train']['bytes']
    model, tokenizer = checkpoint.load(str(tmp_path / 'out'))
    nats = 0.0
    ids = torch.from_numpy(data.train.windows([0], data.train.n)[0])
    for begin in range(0, len(ids) - 1, 16):
        x, y = ids[begin:begin + 16][:len(ids) - 1 - begin], ids[begin + 1:begin + 17]
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(x[None], full_logits=True)[0][0], y, reduction='none')
        nats += losses[y != 256].sum().item()
    assert found['bpb'] == pytest.approx(nats / math.log(2) / found['bytes'], rel=1e-5)


@pytest.mark.parametrize('kind', ['byte', 'char', 'gpt2'])
def test_a_guess_costs_the_logarithm_of_the_vocabulary_and_bytes_are_those_of_the_text(kind, request):
    if kind == 'gpt2':
        request.getfixturevalue('gpt2')
    text = TEXT[:3000]
    tokenizer = make_tokenizer({'byte': {'kind': 'byte'}, 'char': {'kind': 'char', 'chars': ''.join(sorted(set(text)))}, 'gpt2': {'kind': 'tiktoken', 'name': 'gpt2'}}[kind])
    ids = np.asarray(tokenizer.encode(text)).astype('int64')
    tokens = SimpleNamespace(windows=lambda starts, length: np.stack([np.resize(np.roll(ids, -start), length) for start in starts]))
    V = tokenizer.n_vocab + 5  # some that stand for nothing
    model = GPT(GPTConfig(block_size=32, vocab_size=V, n_layer=1, n_head=1, n_embd=4, tie=False))
    torch.nn.init.zeros_(model.lm_head.weight)
    found = tasks.text_loss(model, tokens, tasks.cut(len(ids) - 1, 32), 32, 7, ONE, torch.no_grad(), tasks.byte_lengths(tokenizer.state(), V))
    size = len(text.encode()) - len(tokenizer.decode(ids[:1].tolist()).encode())
    assert found['bytes'] == size and found['tokens'] == len(ids) - 1
    assert found['loss'] == pytest.approx(math.log(V)) and found['bpb'] == pytest.approx((len(ids) - 1) * math.log2(V) / size)


def test_tasks_by_the_command_line(script, run, tmp_path):
    folder = write_questions(tmp_path / 'questions')
    data = make_dataset(tmp_path / 'data', 'ascii', ''.join(map(chr, range(32, 127))) + '\n' + TEXT.replace('\u00e9', 'e'))
    place = [f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}", '--device=cpu', '--dtype=float32']
    assert script('train.py', *TINY, *place, '--dataset=ascii', '--block_size=128', '--max_iters=2', '--warmup_iters=1').status == 0 and data.exists()
    result = script('eval.py', *place, f'--tasks_dir={folder}', '--tasks=hellaswag,core', '--split=none')
    assert result.status == 0, result.err
    found = json.loads((tmp_path / 'out' / 'eval.json').read_text())
    assert list(found['tasks']) == ['hellaswag', 'sums', 'who', 'choice', 'hellaswag_10shot'] and not found['texts']
    assert found['core'] == pytest.approx(sum(found['tasks'][name]['centered'] for name in list(found['tasks'])[1:]) / 4)
    assert re.search(r'^sums +2 +24 ', result.out, re.M) and f"CORE {found['core']:.4f}" in result.out
    # what was found out about the same weights stays
    assert script('eval.py', *place, f'--tasks_dir={folder}', '--tasks=who', '--max_per_task=3').status == 0
    again = json.loads((tmp_path / 'out' / 'eval.json').read_text())
    assert again['tasks']['who']['questions'] == 3 and again['tasks']['sums'] == found['tasks']['sums'] and 'ascii/val' in again['texts']
    (folder / 'eval_bundle' / 'eval_data' / 'who.jsonl').unlink()
    result = script('eval.py', *place, f'--tasks_dir={folder}', '--tasks=core', '--split=none')
    assert result.status == 0 and re.search('CORE needs all of its tasks; .*: who. fetch http', result.out)


def test_two_processes_share_the_work_and_find_the_same(script, tmp_path):
    folder = write_questions(tmp_path / 'questions')
    make_dataset(tmp_path / 'data', 'ascii', ''.join(map(chr, range(32, 127))) + '\n' + TEXT.replace('\u00e9', 'e'))
    place = [f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}", '--device=cpu', '--dtype=float32']
    assert script('train.py', *TINY, *place, '--dataset=ascii', '--block_size=128', '--max_iters=2', '--warmup_iters=1').status == 0
    wishes = [f'--tasks_dir={folder}', '--tasks=choice,sums', '--batch_size=1', '--stride=100']
    assert script('eval.py', *place, *wishes).status == 0
    want = json.loads((tmp_path / 'out' / 'eval.json').read_text())
    (tmp_path / 'out' / 'eval.json').unlink()
    result = torchrun(2, 'eval.py', *place, *wishes)
    assert result.status == 0 and result.out.count('bits per byte') == 1, result.err
    assert json.loads((tmp_path / 'out' / 'eval.json').read_text()) == want, 'to the bit: the batches are the same'


def test_mistakes_are_one_line(script, run, tmp_path):
    other = make_dataset(tmp_path / 'data', 'other', 'abcabc' * 100)
    for args, words in ((['--split=test'], 'val, train, none'), (['--stride=17'], '--stride=16'), (['--split=none'], 'nothing to do'), (['--block_size=17'], '--block_size=16'),
                        (['--dataset=other', f'--data_dir={other.parent}'], 'another tokenizer'), (['--dataset=nowhere'], 'no dataset nowhere'),
                        (['--tasks=hellaswag', f'--tasks_dir={tmp_path}'], 'hellaswag_val.jsonl')):
        result = script('eval.py', *flags(run, 'gpt2', *args))
        assert result.status == 2 and result.err.count('error: ') == 1 and all(word in result.err for word in words.split(' and ')), (args, result.err)
