"""Checkpoints of build-nanogpt, written here as it writes them: the same network, and nothing in them is
executed."""

import dataclasses
import sys
import types

import pytest
import torch
from conftest import TINY, Evil, is_refused, make_dataset
from test_huggingface import random_model

from model import GPT
from support import load
from support.files import write_json


@dataclasses.dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 257
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32


@pytest.fixture
def their_script(monkeypatch):
    """A module that stands for the script in which the class was defined."""
    module = types.ModuleType('train_gpt2')
    module.GPTConfig, GPTConfig.__module__ = GPTConfig, 'train_gpt2'
    monkeypatch.setitem(sys.modules, 'train_gpt2', module)


def network():
    """Its network is GPT-2 with biases and the tanh approximation; test_huggingface.py holds ours against
    transformers'. A head of its own, as in forks, is in no field."""
    return random_model(dict(arch='gpt2', mlp='gelu_tanh', tie=False, **dataclasses.asdict(GPTConfig())))


def test_their_checkpoint_is_sampled_and_finetuned(tmp_path, their_script, monkeypatch, script, works):
    net, path = network(), tmp_path / 'log' / 'model_00250.pt'
    path.parent.mkdir()
    torch.save({'model': net.state_dict(), 'config': GPTConfig(), 'step': 250, 'val_loss': 3.25}, path)
    monkeypatch.delitem(sys.modules, 'train_gpt2')  # its script is not here
    state = load.read(str(path))
    assert state['iter_num'] == 250 and state['best_val_loss'] == 3.25
    idx = torch.randint(257, (2, 24))
    assert torch.equal(load.build(GPT, state).eval()(idx)[0], net(idx)[0])
    folder = make_dataset(tmp_path / 'data', 'bytes', text='ab\n' * 2000)
    meta = {'tokenizer': {'kind': 'byte'}, 'vocab_size': 257, 'end_of_text': 256, 'dtype': 'uint16',
            'splits': {}}
    write_json(f'{folder}/meta.json', meta)
    data = [f"--data_dir={tmp_path / 'data'}", '--dataset=bytes', '--device=cpu']
    works('sample.py', f'--init_from={path}', *data, '--max_new_tokens=4', '--num_samples=1')
    done = works('eval.py', f'--init_from={path}', *data, f"--to={tmp_path / 'eval'}")
    assert 'iteration 250: gpt2' in done.out
    train = [*TINY[:6], *TINY[9:], *data]
    works('train.py', f'--init_from={path}', *train, f"--out_dir={tmp_path / 'out'}")
    tuned = load.read(f'{tmp_path}/out/ckpt.pt')
    assert tuned['model_args']['mlp'] == 'gelu_tanh' and tuned['model_args']['bias']
    # there is no optimizer in it to continue with
    done = script('train.py', f'--init_from=resume:{path}', *train, f"--out_dir={tmp_path / 'o'}")
    is_refused(done, 'weights only', f'--init_from={path}')


class EvilConfig(Evil):
    pass


def test_what_wants_to_run_code_is_refused_also_beside_a_config(tmp_path, their_script, capsys):
    made, path = tmp_path / 'made', tmp_path / 'model_00001.pt'
    for ckpt in ({'config': GPTConfig(), 'model': {}, 'step': Evil(made)}, {'config': Evil(made)},
                 {'config': EvilConfig(made)}, {'config': GPTConfig(n_layer=Evil(made))}):
        torch.save(ckpt, path)
        with pytest.raises(SystemExit):
            load.read(str(path))
        assert capsys.readouterr().err.count('\n') == 1 and not made.exists()


def test_a_config_of_another_network_or_of_other_sizes_is_refused(tmp_path, their_script, capsys):
    path, other = tmp_path / 'model_00001.pt', GPTConfig()
    other.n_experts = 8
    for config, word in ((other, 'n_experts'), (GPTConfig(n_layer=3), 'transformer.h.2'),
                         (GPTConfig(block_size=64), 'transformer.wpe')):
        torch.save({'model': network().state_dict(), 'config': config, 'step': 1}, path)
        with pytest.raises(SystemExit):
            load.build(GPT, load.read(str(path)))
        assert word in capsys.readouterr().err
