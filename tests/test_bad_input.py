"""Damaged inputs: each is used, or refused in one line with status 2, and no file goes."""

import json
import random

import pytest
import torch
from conftest import TEXT, TINY, char_dataset

import checkpoint
import prepare
from dataset import Dataset
from model import GPT, GPTConfig


def damaged(content):
    """Versions of a file's content, bytes."""
    rng = random.Random(1)
    yield from [b'', content[:1], content[:len(content) // 2], content[:-1], content[::-1]]
    yield from [content + content, bytes(len(content)), content.decode('latin-1').encode('utf-16')]
    for n_changes in [1] * 8 + [20] * 4:
        changed = bytearray(content)
        for _ in range(n_changes):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        yield bytes(changed)


def state_of(folder):
    files = [path for path in folder.rglob('*') if path.is_file() and path.name != '.lock']
    return {path: path.read_bytes() for path in files}


def a_dataset(folder, file):
    toy = char_dataset(folder) / 'toy'
    if file == 'meta.json':
        (toy / file).write_text(json.dumps({'vocab_size': 18, 'tokenizer': {'kind': 'ids', 'n_vocab': 18}}))

    def use(path):
        data = Dataset('toy', folder, 16)
        data.train.batch(1, range(4), 16)
        data.tokenizer.decode([0, 1])

    return toy / file, use


def a_checkpoint(folder):
    model = GPT(GPTConfig(block_size=16, vocab_size=18, n_layer=1, n_head=2, n_embd=8, bias=False))
    state = {'model': model.state_dict(), 'model_args': model.config.model_args(), 'iter_num': 2}
    torch.save(state, folder / 'ckpt.pt')
    return folder / 'ckpt.pt', lambda path: checkpoint.build_model(checkpoint.read(path))


def a_text(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path, lambda path: list(prepare.read_documents([str(path)]))


INPUTS = {
    'meta.json': lambda folder: a_dataset(folder, 'meta.json'),
    'meta.pkl': lambda folder: a_dataset(folder, 'meta.pkl'),
    'train.bin': lambda folder: a_dataset(folder, 'train.bin'),
    'ckpt.pt': a_checkpoint,
    'a.txt': lambda folder: a_text(folder, 'a.txt', 'caf\u00e9 <|endoftext|> na\u00efve'),
    'a.jsonl': lambda folder: a_text(folder, 'a.jsonl', '{"text": "caf\u00e9"}\n{"text": "tea"}\n'),
}


@pytest.mark.parametrize('kind', INPUTS)
def test_a_damaged_input_is_used_or_refused_in_a_line(kind, tmp_path, capsys):
    path, use = INPUTS[kind](tmp_path)
    use(path)
    n_refused = 0
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        before = state_of(tmp_path)
        try:
            use(path)
        except ValueError as e:
            n_refused += 1
            assert str(e) and '\n' not in str(e).strip()
        except SystemExit as e:
            n_refused += 1
            err = capsys.readouterr().err
            assert e.code == 2 and err.startswith('error: ') and err.count('\n') == 1
        assert state_of(tmp_path) == before
    assert n_refused


def test_through_the_scripts(script, tmp_path):
    folder = char_dataset(tmp_path / 'data')
    (folder / 'toy' / 'meta.json').write_text('{"vocab_size": "many"}')
    out = tmp_path / 'out'
    out.mkdir()
    (out / 'ckpt.pt').write_bytes(b'PK\x03\x04 and nothing behind it')
    (tmp_path / 'bad.jsonl').write_text('{"text": "a"}\n{"text": \n')
    commands = [
        ['train.py', *TINY, '--dataset=toy', f'--data_dir={folder}', f"--out_dir={tmp_path / 'new'}"],
        ['train.py', *TINY, '--init_from=resume', f'--out_dir={out}'],
        ['sample.py', str(out)],
        ['prepare.py', str(tmp_path / 'bad.jsonl'), '--tokenizer=byte', f'--data_dir={folder}'],
        ['plot.py', str(out)],
    ]
    before = state_of(tmp_path)
    for name, *args in commands:
        result = script(name, *args)
        assert result.status == 2, (name, args, result.err)
        assert result.err.startswith('error: ') and result.err.count('\n') == 1
    assert state_of(tmp_path) == before


OUT_OF_RANGE = [
    ('train.py', 'min_lr', [-1, 1]), ('train.py', 'save_interval', [-1]), ('train.py', 'max_tokens', [-1, 0]),
    ('train.py', 'max_epochs', [-1, 0]), ('train.py', 'max_minutes', [-1]), ('train.py', 'top_p', [-1, 0, 2]),
    ('train.py', 'lr_decay_iters', [-5]), ('train.py', 'decay_fraction', [0, 5]),
    ('train.py', 'adam_eps', [-1]), ('train.py', 'matrix_lr', [-1]), ('train.py', 'embedding_lr', [-1]),
    ('train.py', 'head_lr', [-1]),
    ('train.py', 'matrix_weight_decay', [-1]), ('train.py', 'seed', [-1, '9' * 23]),
    ('sample.py', 'top_k', [-1, 0]), ('sample.py', 'batch_size', [0]), ('sample.py', 'num_samples', [0]),
    ('sample.py', 'max_new_tokens', [-1]), ('sample.py', 'seed', ['9' * 23]),
    ('eval.py', 'sample_tokens', [-1]),
]


@pytest.mark.parametrize('name, knob, values', OUT_OF_RANGE, ids=lambda value: str(value)[:16])
def test_a_number_out_of_range_is_refused_in_a_line(script, tmp_path, name, knob, values):
    for value in values:
        result = script(name, f'--{knob}={value}', f"--out_dir={tmp_path / 'none'}")
        assert result.status == 2 and f'error: {knob} is out of range' in result.err
        assert result.err.count('\n') == 1


def test_a_dataset_of_several_inputs_has_a_name(script, works, tmp_path):
    paths = [tmp_path / 'a.txt', tmp_path / 'b.txt']
    for path in paths:
        path.write_text(TEXT)
    flags = ['--input', *paths, '--tokenizer=byte', f"--data_dir={tmp_path / 'data'}"]
    result = script('prepare.py', *flags)
    assert result.status == 2 and 'name' in result.err and not (tmp_path / 'data').exists()
    assert '2 documents' in works('prepare.py', 'both', *flags).out


def test_a_lowest_rate_above_the_rate_is_no_error_where_the_rate_stays(script, tmp_path):
    flags = ['--decay_lr=False', '--min_lr=1', '--dataset=none', f'--data_dir={tmp_path}']
    assert 'range' not in script('train.py', *flags, f"--out_dir={tmp_path / 'none'}").err
