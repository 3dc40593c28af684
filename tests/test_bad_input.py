"""Bad input is used, or refused in one line with status 2, and no file is changed."""

import json
import random

import pytest
import torch
from conftest import char_dataset

from configurator import InputError
from flatgpt import checkpoint, huggingface
from flatgpt.dataset import Dataset
from model import GPT, GPTConfig


def damaged(content):
    """Yield damaged versions of a file's content, bytes."""
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


def a_hugging_face_folder(folder):
    model = GPT(GPTConfig(arch='llama', block_size=16, vocab_size=18, n_layer=1, n_head=2, n_embd=8))
    (folder / 'config.json').write_text(json.dumps(huggingface.to_config(model.config, 'float32')))
    weights = huggingface.their_weights(model.state_dict(), model.config, torch.float32)
    torch.save(weights, folder / 'pytorch_model.bin')
    return folder / 'config.json', lambda path: checkpoint.build_model(checkpoint.read(folder))


INPUTS = {
    'meta.json': lambda folder: a_dataset(folder, 'meta.json'),
    'meta.pkl': lambda folder: a_dataset(folder, 'meta.pkl'),
    'train.bin': lambda folder: a_dataset(folder, 'train.bin'),
    'ckpt.pt': a_checkpoint,
    'config.json': a_hugging_face_folder,
}


@pytest.mark.parametrize('kind', INPUTS)
def test_a_damaged_file_is_used_or_refused_in_one_line(kind, tmp_path):
    path, use = INPUTS[kind](tmp_path)
    use(path)
    n_refused = 0
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        before = state_of(tmp_path)
        try:
            use(path)
        except InputError as e:
            n_refused += 1
            assert str(e) and '\n' not in str(e).strip()
        assert state_of(tmp_path) == before
    assert n_refused


@pytest.mark.parametrize('name, flags', [
    ('train.py', [
        'min_lr=-1', 'min_lr=1', 'save_interval=-1', 'max_tokens=0', 'max_epochs=0', 'max_minutes=-1',
        'top_p=0', 'top_p=2', 'lr_decay_iters=-5', 'decay_fraction=0', 'adam_eps=-1', 'matrix_lr=-1',
        'embedding_lr=-1', 'learning_rate=0', 'head_lr=-1', 'matrix_weight_decay=-1', 'seed=-1',
        f"seed={'9' * 23}"]),
    ('sample.py', [
        'top_k=0', 'batch_size=0', 'num_samples=0', 'max_new_tokens=-1', f"seed={'9' * 23}"]),
    ('eval.py', ['sample_tokens=-1']),
])
def test_a_number_out_of_range_is_refused(script, tmp_path, name, flags):
    for flag in flags:
        result = script(name, f'--{flag}', f"--out_dir={tmp_path / 'none'}")
        knob = flag.partition('=')[0]
        assert result.status == 2 and f'error: {knob} is out of range' in result.err
    if name == 'train.py':  # without decay, min_lr is not used
        result = script(name, '--decay_lr=False', '--min_lr=1', '--dataset=none', f'--data_dir={tmp_path}')
        assert 'out of range' not in result.err
