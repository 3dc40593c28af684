"""Checkpoints of build-nanogpt, written here as it writes them: the same network, and nothing in them is
executed."""

import dataclasses
import json
import os
import sys
import types

import pytest
import torch
from conftest import make_dataset
from test_huggingface import assert_refused
from torch.nn import functional as F

from model import GPT
from support import load

FLAGS = ['--device=cpu', '--dtype=float32']


def random_weights(shapes):
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


# -----------------------------------------------------------------------------
# build-nanogpt


@dataclasses.dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 257
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32


@pytest.fixture
def their_script(monkeypatch):
    """A module that stands for the script in which the class was defined, gone when the file is read."""
    module = types.ModuleType('train_gpt2')
    module.GPTConfig, GPTConfig.__module__ = GPTConfig, 'train_gpt2'
    monkeypatch.setitem(sys.modules, 'train_gpt2', module)
    return module


def build_nanogpt_weights():
    C = 32
    shapes = {'transformer.wte.weight': (257, C), 'transformer.wpe.weight': (32, C)}
    for i in range(2):
        h = f'transformer.h.{i}.'
        shapes.update(
            {
                h + 'attn.c_attn.weight': (3 * C, C),
                h + 'attn.c_attn.bias': (3 * C,),
                h + 'attn.c_proj.weight': (C, C),
                h + 'attn.c_proj.bias': (C,),
                h + 'mlp.c_fc.weight': (4 * C, C),
                h + 'mlp.c_fc.bias': (4 * C,),
                h + 'mlp.c_proj.weight': (C, 4 * C),
                h + 'mlp.c_proj.bias': (C,),
            }
        )
        shapes.update({h + f'ln_{j}.{kind}': (C,) for j in (1, 2) for kind in ('weight', 'bias')})
    shapes.update({'transformer.ln_f.weight': (C,), 'transformer.ln_f.bias': (C,)})
    weights = random_weights(shapes)
    return {**weights, 'lm_head.weight': weights['transformer.wte.weight']}


def build_nanogpt_logits(w, idx):
    """Its network, written down once more."""

    def norm(x, name):
        return F.layer_norm(x, (32,), w[name + '.weight'], w[name + '.bias'])

    def linear(x, name):
        return F.linear(x, w[name + '.weight'], w[name + '.bias'])

    B, T = idx.shape
    x = w['transformer.wte.weight'][idx] + w['transformer.wpe.weight'][:T]
    for i in range(2):
        h = f'transformer.h.{i}.'
        q, k, v = (
            part.view(B, T, 4, 8).transpose(1, 2)
            for part in linear(norm(x, h + 'ln_1'), h + 'attn.c_attn').split(32, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, 32)
        x = x + linear(y, h + 'attn.c_proj')
        x = x + linear(
            F.gelu(linear(norm(x, h + 'ln_2'), h + 'mlp.c_fc'), approximate='tanh'), h + 'mlp.c_proj'
        )
    return F.linear(norm(x, 'transformer.ln_f'), w['lm_head.weight'])


@pytest.fixture
def build_nanogpt(tmp_path, their_script, monkeypatch):
    """log/model_00250.pt"""
    weights, path = build_nanogpt_weights(), tmp_path / 'log' / 'model_00250.pt'
    path.parent.mkdir()
    torch.save({'model': weights, 'config': GPTConfig(), 'step': 250, 'val_loss': 3.25}, path)
    monkeypatch.delitem(sys.modules, 'train_gpt2')  # its script is not here
    return path, weights


@pytest.fixture
def byte_data(tmp_path):
    folder = make_dataset(tmp_path / 'data', 'bytes', text='ab\n' * 2000)
    meta = {
        'tokenizer': {'kind': 'byte'},
        'vocab_size': 257,
        'end_of_text': 256,
        'dtype': 'uint16',
        'splits': {},
    }
    (folder / 'meta.json').write_text(json.dumps(meta))
    return [f"--data_dir={tmp_path / 'data'}", '--dataset=bytes']


def test_build_nanogpts_checkpoint_is_sampled_evaluated_and_finetuned(
    build_nanogpt, byte_data, tmp_path, script
):
    path, weights = build_nanogpt
    state = load.read(str(path))
    assert state['iter_num'] == 250 and state['best_val_loss'] == 3.25
    net, idx = load.build(GPT, state).eval(), torch.randint(257, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(
            net(idx, full_logits=True)[0], build_nanogpt_logits(weights, idx), atol=1e-5, rtol=1e-5
        )
    for source in (path, path.parent):
        done = script(
            'sample.py',
            f'--init_from={source}',
            *FLAGS,
            *byte_data,
            '--max_new_tokens=4',
            '--num_samples=1',
        )
        assert done.status == 0, done.err
    done = script('eval.py', f'--init_from={path}', *FLAGS, *byte_data, f"--to={tmp_path / 'eval'}")
    assert done.status == 0 and 'after 250 iterations: gpt2' in done.out, done.err
    train = [
        f"--out_dir={tmp_path / 'out'}",
        *FLAGS,
        *byte_data,
        '--max_iters=2',
        '--warmup_iters=0',
        '--batch_size=2',
        '--block_size=16',
        '--gradient_accumulation_steps=1',
        '--eval_iters=1',
        '--learning_rate=1e-3',
    ]
    done = script('train.py', f'--init_from={path}', *train)
    assert done.status == 0, done.err
    tuned = load.read(str(tmp_path / 'out' / 'ckpt.pt'))
    assert tuned['model_args']['mlp'] == 'gelu_tanh' and tuned['model_args']['bias']
    # there is no optimizer in it to continue with
    assert_refused(
        script('train.py', f'--init_from=resume:{path}', *train[1:], f"--out_dir={tmp_path / 'o'}"),
        ['weights only', f'--init_from={path}'],
    )


class Evil:
    """A pickle of it creates the file `path` when it is loaded the usual way."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class EvilConfig(Evil):
    pass


def test_what_wants_to_run_code_is_refused_also_beside_a_config(tmp_path, their_script, capsys):
    made, path = str(tmp_path / 'made'), tmp_path / 'model_00001.pt'
    for ckpt in (
        {'config': GPTConfig(), 'model': {}, 'step': Evil(made)},
        {'config': Evil(made)},
        {'config': EvilConfig(made)},
    ):
        torch.save(ckpt, path)
        with pytest.raises(SystemExit):
            load.read(str(path))
        assert 'refused, as loading it would run code' in capsys.readouterr().err
        assert not os.path.exists(made)
    torch.save({'config': GPTConfig(n_layer=Evil(made))}, path)
    with pytest.raises(SystemExit):
        load.read(str(path))
    assert not os.path.exists(made)


def test_a_config_of_another_network_or_of_other_sizes_is_refused(tmp_path, their_script, capsys):
    path, weights = tmp_path / 'model_00001.pt', build_nanogpt_weights()
    other = GPTConfig()
    other.n_experts = 8
    for config, word in (
        (other, 'n_experts'),
        (GPTConfig(n_layer=3), 'transformer.h.2'),
        (GPTConfig(block_size=64), 'transformer.wpe'),
    ):
        torch.save({'model': weights, 'config': config, 'step': 1}, path)
        with pytest.raises(SystemExit):
            load.build(GPT, load.read(str(path)))
        assert word in capsys.readouterr().err
