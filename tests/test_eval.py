"""The loss that eval.py prints is that of transformers, whatever the windows, batches and processes."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import is_refused, make_dataset
from test_tasks import BYTES, ONE, PLAIN, export, learn, write_tasks
from warm import processes

from dataset import Dataset
from model import GPT, GPTConfig, load
from support.evaluate import Interrupted, ngram_bits_per_byte, rounds, text_loss, windows
from support.files import read_json
from support.tokenizer import make_tokenizer, token_bytes

# some characters have two bytes
TEXT = ''.join(f"{a} times {b} is {a * b}: \u00e9t\u00e9.\n" for a in range(20) for b in range(20))
ASCII = ''.join(map(chr, range(32, 127))) + '\n' + TEXT.replace('\u00e9', 'e')  # all that the tasks need


def save_checkpoint(folder, data, train_steps=0, **config):
    """A model for the Dataset `data`, as folder/ckpt.pt."""
    torch.manual_seed(1)
    sizes = dict(block_size=16, vocab_size=data.vocab_size, n_layer=2, n_head=2, n_embd=32)
    model = GPT(GPTConfig(**{**sizes, **config}))
    learn(model, data.train.windows([0], data.train.n)[0], train_steps, 16)
    folder.mkdir(exist_ok=True)
    torch.save({'model': model.state_dict(), 'model_args': model.config.model_args(), 'iter_num': train_steps,
                'config': {'dataset': data.name}, 'tokenizer': data.tokenizer_state}, folder / 'ckpt.pt')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """Three trained models in run folders, and their text."""
    folder = tmp_path_factory.mktemp('trained')
    make_dataset(folder / 'data', text=TEXT)
    for arch in ('gpt2', 'llama', 'modern'):
        save_checkpoint(folder / arch, Dataset('tiny', f'{folder}/data'), 40, arch=arch)
    return folder


def flags(run, arch, *more):
    return [f'--out_dir={run / arch}', f"--data_dir={run / 'data'}", '--device=cpu', '--dtype=float32', *more]


def results(folder):
    return read_json(folder / 'eval.json')


def told(run, arch):
    return results(run / arch)['texts']['tiny/val']


@pytest.fixture
def with_tasks(tmp_path):
    """The flags for a model of a text in ASCII, with HellaSwag and the bundle beside it."""
    data_dir = write_tasks(tmp_path / 'data')
    make_dataset(data_dir, 'ascii', ASCII)
    save_checkpoint(tmp_path / 'out', Dataset('ascii', str(data_dir)), block_size=128)
    return [f'--data_dir={data_dir}', f"--out_dir={tmp_path / 'out'}", '--device=cpu', '--dtype=float32']


@pytest.mark.parametrize('arch', ['gpt2', 'llama', 'modern'])
def test_loss_and_bits_per_byte_are_those_of_transformers(works, run, tmp_path, arch):
    result = works('eval.py', *flags(run, arch))
    found = told(run, arch)
    model, tokenizer = load(f'{run}/{arch}')
    theirs = export(model, tokenizer.state(), tmp_path / 'hf')
    data = Dataset('tiny', f'{run}/data')
    ids = torch.from_numpy(data.val.windows([0], data.val.n)[0])
    nats, size = 0.0, 0
    for begin in range(0, len(ids) - 1, 16):  # the last window is shorter
        part = ids[begin:begin + 17]
        with torch.no_grad():
            logits = theirs(part[None, :-1]).logits[0]
        nats += torch.nn.functional.cross_entropy(logits, part[1:], reduction='sum').item()
        size += len(tokenizer.decode(part[1:].tolist()).encode())
    assert found['tokens'] == len(ids) - 1 < found['bytes'] == size
    assert found['loss'] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert found['bpb'] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found['perplexity'] == pytest.approx(math.exp(found['loss']))
    assert f"loss {found['loss']:.4f} \u00b1 {found['loss_error']:.4f}" in result.out
    assert '\nit writes\n| ' in result.out
    for batch_size in (3, 100_000_000):  # the last one has no room but for what there is
        works('eval.py', *flags(run, arch, f'--batch_size={batch_size}'))
        for key in 'loss loss_error bpb bpb_error tokens'.split():
            assert told(run, arch)[key] == pytest.approx(found[key], rel=1e-5), batch_size


@pytest.mark.parametrize('sharded', [False, True])
def test_processes_share_the_numbers_and_make_as_many_rounds(sharded):
    for n, world_size in ((0, 2), (1, 3), (7, 1), (7, 2), (6, 3)):
        asked, found = [], []
        for rank in range(world_size):
            dist = SimpleNamespace(rank=rank, world_size=world_size, sharded=sharded)
            made = list(rounds(n, dist, lambda: asked.append(rank), max))
            found += [i for i, counts in made if counts]
            assert len(made) == asked.count(rank) or not sharded, 'a sharded model needs all of them'
        assert sorted(found) == list(range(n))
        # otherwise they would wait for each other
        assert len({asked.count(rank) for rank in range(world_size)}) == 1
    with pytest.raises(Interrupted):
        list(rounds(5, dist, lambda: 'stop', max))


def test_its_error_is_what_other_windows_would_give(script, run):
    """The spread of the losses of many small parts of the text is what the error of each of them predicts."""
    model, _ = load(f'{run}/modern')
    data = Dataset('tiny', f'{run}/data')
    rows = windows(data.train.n - 1, 16)[:500]
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0)).view(20, 25)
    parts = [text_loss(model, data.train, rows[part.numpy()], 16, 25, ONE, PLAIN, np.zeros(999)) for part in order]
    assert 0.6 < np.std([part['loss'] for part in parts], ddof=1) / np.mean([part['loss_error'] for part in parts]) < 1.5
    assert parts[0]['bpb'] is None, 'no bytes are known without the tokenizer'


@pytest.mark.parametrize('kind', ['byte', 'char', 'gpt2'])
def test_a_guess_costs_the_log_of_the_vocabulary_and_special_tokens_are_no_text(kind, request, tmp_path):
    text = TEXT[:3000]
    if kind == 'gpt2':
        request.getfixturevalue('gpt2')
    tokenizer = make_tokenizer({'byte': BYTES, 'char': {'kind': 'char', 'chars': ''.join(sorted(set(text)))},
                                'gpt2': {'kind': 'tiktoken', 'name': 'gpt2'}}[kind])
    ids = tokenizer.encode(text).tolist()
    n, size = len(ids) - 1, len(text.encode()) - len(tokenizer.decode(ids[:1]).encode())
    if tokenizer.end_of_text is not None:
        ids[1:1] = ids[50:50] = 3 * [tokenizer.end_of_text]
    (tmp_path / 'text').mkdir()
    np.array(ids, dtype='<u2').tofile(tmp_path / 'text' / 'train.bin')
    V = tokenizer.n_vocab + 5  # some that stand for nothing
    model = GPT(GPTConfig(block_size=32, vocab_size=V, n_layer=1, n_head=1, n_embd=4, tie=False))
    torch.nn.init.zeros_(model.lm_head.weight)
    data, rows = Dataset('text', str(tmp_path)).train, windows(len(ids) - 1, 32)
    found = text_loss(model, data, rows, 32, 7, ONE, PLAIN, token_bytes(tokenizer.state(), V))
    assert found['bytes'] == size and found['tokens'] == len(ids) - 1
    assert found['loss'] == pytest.approx(math.log(V))
    assert found['bpb'] == pytest.approx(n * math.log2(V) / size)


def test_counts_predict_as_by_hand(works, with_tasks, tmp_path):
    text, seen = b'abracadabra, the cat sat', b'the cat sat on the mat, and the cow sat by abraham'

    def probability(context, byte):
        """Witten and Bell's, with the longest context first."""
        shorter = probability(context[1:], byte) if context else 1 / 256
        places = [i for i in range(len(seen) - len(context)) if seen[i:].startswith(context)]
        after = [seen[i + len(context)] for i in places]
        if not after:
            return shorter
        return (after.count(byte) + len(set(after)) * shorter) / (len(after) + len(set(after)))
    want = [-math.log2(probability(text[i - 3:i], text[i])) for i in range(3, len(text))]
    assert ngram_bits_per_byte(text, seen, 3) == pytest.approx(sum(want) / len(want))
    out = works('eval.py', *with_tasks, '--sample_tokens=0').out
    found = results(tmp_path / 'out')['texts']['ascii/val']
    xz, counts = found['bpb_by_xz'], found['bpb_by_counts']
    assert f'for comparison: {xz:.4f} bits per byte by xz, {counts:.4f} by' in out
    assert 0 < xz < counts < found['bpb'], 'both know the training text, which repeats this one'


def test_tasks_by_the_command_line(works, with_tasks, tmp_path):
    result = works('eval.py', *with_tasks, '--tasks=hellaswag,core', '--split=none')
    found = results(tmp_path / 'out')
    core = 'sums who choice hellaswag_10shot'.split()
    assert list(found['tasks']) == ['hellaswag', *core] and not found['texts']
    assert found['core'] == pytest.approx(sum(found['tasks'][name]['centered'] for name in core) / 4)
    assert re.search(r'^sums .* % of 24 examples', result.out, re.M)
    assert f"CORE {found['core']:.4f}, the mean of 4" in result.out
    # earlier results of the same weights stay
    works('eval.py', *with_tasks, '--tasks=who:3', '--dtype=bfloat16')
    again = results(tmp_path / 'out')
    assert again['tasks']['who']['questions'] == 3 and again['tasks']['sums'] == found['tasks']['sums']
    assert 'ascii/val' in again['texts']
    path = tmp_path / 'out' / 'ckpt.pt'
    state = torch.load(path)
    state['model']['lm_head.weight'].neg_()
    torch.save(state, path)
    works('eval.py', *with_tasks)
    assert not results(tmp_path / 'out')['tasks'], 'of other weights'


def test_two_processes_share_the_work_and_find_the_same(works, with_tasks, tmp_path):
    flags = [*with_tasks, '--tasks=choice,sums', '--batch_size=1']
    works('eval.py', *flags)
    want = results(tmp_path / 'out')
    (tmp_path / 'out' / 'eval.json').unlink()
    (status, err, out), other = processes(2, 'eval.py', *flags)
    assert status == other[0] == 0 and out.count('perplexity') == 1 and 'perplexity' not in other[2], err
    assert results(tmp_path / 'out') == want, 'to the bit: the batches are the same'


@pytest.mark.parametrize('flag, words', [
    ('--split=none', 'nothing to do'), ('--dataset=other', 'another tokenizer'), ('--tasks=hellaswag', 'hellaswag_val.jsonl')])
def test_mistakes_are_one_line(script, run, flag, words):
    make_dataset(run / 'data', 'other', 'abcabc' * 100)
    is_refused(script('eval.py', *flags(run, 'gpt2', flag)), words)
