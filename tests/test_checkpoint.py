"""Checkpoints: whatever a stranger brings is read or named, and nothing in it is executed; a resume takes
what it should; a save is whole or absent."""

import argparse
import copy
import dataclasses
import errno
import json
import math
import os
import resource
import shutil
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import checkpoint
import huggingface
from configurator import kinds_of
from model import GPT, GPTConfig

SIZES = dict(block_size=16, vocab_size=18, n_layer=2, n_head=2, n_embd=32)
TOKENIZER = {'kind': 'char', 'chars': '\n .0123456789eimst'}
CONFIG = dict(  # what a run was given
    dataset='toy', batch_size=4, block_size=16, gradient_accumulation_steps=1, max_iters=6,
    learning_rate=1e-2, eval_iters=2, n_layer=2, n_head=2, n_embd=32, bias=False, dropout=0.0)
DEFAULTS = dict(  # knobs as train.py has them
    out_dir='out', init_from='scratch', overwrite=False, dataset='openwebtext', batch_size=12,
    block_size=1024, gradient_accumulation_steps=40, total_batch_size=None, document_mask=False, arch='gpt2',
    n_layer=12, n_head=12, n_embd=768, n_kv_head=None, mlp_width=None, dropout=0.0, bias=False,
    learning_rate=6e-4, weight_decay=0.1, beta1=0.9, beta2=0.95, adam_eps=1e-8, grad_clip=1.0,
    max_iters=600000, max_tokens=None, max_epochs=None, lr_schedule='cosine', decay_lr=True, eval_iters=200,
    sample_prompts=None, wandb_log=False, device='auto', dtype='auto', compile='auto', backend='auto')


def network(**shape):
    """A GPT whose weights, biases and gains too, differ from what anything starts with."""
    torch.manual_seed(1)
    net = GPT(GPTConfig(**{'bias': False, **SIZES, **shape})).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


def optimizer_state(net):
    """AdamW's, after one update."""
    net = copy.deepcopy(net)
    optimizer = net.configure_optimizers(0.3, 1e-3, (0.8, 0.97))
    idx = torch.randint(net.config.vocab_size, (2, 16))
    net(idx, idx)[1].backward()
    optimizer.step()
    return optimizer.state_dict()


def our_state(net, it=2, **changes):
    """What train.py saves."""
    config = {**DEFAULTS, **CONFIG}
    state = {
        'model': net.state_dict(), 'optimizer': optimizer_state(net), 'model_args': net.config.model_args(),
        'iter_num': it, 'best_val_loss': 3.25, 'config': config, 'given': sorted(CONFIG), 'scaler': {},
        'tokenizer': TOKENIZER, 'data': {'name': 'toy', 'train': {'tokens': 900, 'sha256': 'ab'}},
        'tokens_per_iter': 64, 'train_seconds': 1.5}
    return {**state, **changes}


def nanogpt_state(net):
    """What nanoGPT's train.py saves: six keys, a loss that is a tensor, a config of another machine."""
    fields = ['n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout']
    config = {**CONFIG, 'backend': 'nccl', 'device': 'cuda', 'dtype': 'float16', 'compile': True,
              'weight_decay': 9.0, 'beta2': 0.5}
    return {
        'model': net.state_dict(), 'optimizer': optimizer_state(net),
        'model_args': {name: getattr(net.config, name) for name in fields},
        'iter_num': 2, 'best_val_loss': torch.tensor(3.25), 'config': config}


# -----------------------------------------------------------------------------
# what a stranger's checkpoint may be: the table in docs/from_nanogpt.md


def renamed(prefix):
    def write(folder):
        net = network()
        state = nanogpt_state(net)
        state['model'] = {prefix + name: p for name, p in state['model'].items()}
        torch.save(state, folder / 'ckpt.pt')
        return folder / 'ckpt.pt', net
    return write


def compiled_blocks(folder):
    net = network()
    state = nanogpt_state(net)
    weights = {}
    for name, p in state['model'].items():
        weights[name.replace('.attn.', '.attn._orig_mod.')] = p
    torch.save({**state, 'model': weights}, folder / 'ckpt.pt')
    return folder / 'ckpt.pt', net


def of_this_project(folder):
    net = network(arch='llama', n_kv_head=1)
    torch.save(our_state(net), folder / 'ckpt.pt')
    return folder / 'ckpt.pt', net


def of_an_older_version(folder):
    """As a170a90 wrote it, with its run.json."""
    scaling = dict(zip(huggingface.ROPE_SCALING, [8.0, 1.0, 4.0, 16.0]))
    net = network(arch='llama', rope_scaling=scaling)
    args = {**net.config.model_args(), 'rope_scaling': 'llama3:8:1:4:16', 'near': 0, 'near_layers': 0}
    state = our_state(net, model_args=args, trained_on={
        'tokens per iteration': 64, 'train': '1,900 tokens, sha256 0123456789abcdef', 'train ids': 'e3e0'},
        tokens=128, seconds=1.5, loss_sum=[14.7, 5.7], bad_steps=0, environment={'torch': '2.13'}, version=1,
        wandb_run_id=None, optimizer_class='AdamW')
    for name in ['given', 'data', 'tokens_per_iter', 'train_seconds']:
        del state[name]
    state['config'].update(budget='384 tokens', token_noise=0.05, teacher=None, weight_decay=0.2, seed=7)
    torch.save(state, folder / 'ckpt.pt')
    given = ['batch_size', 'eval_iters', 'budget', 'token_noise', 'device']
    (folder / 'run.json').write_text(json.dumps({'given': given}))
    return folder / 'ckpt.pt', net


def numpy_scalars(folder):
    net = network()
    state = nanogpt_state(net)
    state['best_val_loss'] = np.float64(3.25)
    state['iter_num'] = np.int64(2)
    state['model_args']['n_layer'] = np.int32(2)
    state['config'].update(learning_rate=np.float32(0.5), bias=np.bool_(False), dataset=np.str_('toy'))
    torch.save(state, folder / 'ckpt.pt')
    return folder / 'ckpt.pt', net


def a_namespace(folder):
    net = network()
    state = nanogpt_state(net)
    state['config'] = argparse.Namespace(**state['config'])
    torch.save(state, folder / 'ckpt.pt')
    return folder / 'ckpt.pt', net


def before_torch_1_6(folder):
    net = network()
    torch.save(nanogpt_state(net), folder / 'ckpt.pt', _use_new_zipfile_serialization=False)
    return folder / 'ckpt.pt', net


def nanogpts_first(folder):
    """Without the fields bias and dropout, with the causal masks among the weights."""
    net = network(bias=True)
    state = nanogpt_state(net)
    del state['model_args']['bias'], state['model_args']['dropout']
    for i in range(2):
        state['model'][f'transformer.h.{i}.attn.bias'] = torch.ones(1, 1, 16, 16)
    torch.save(state, folder / 'ckpt.pt')
    return folder / 'ckpt.pt', net


def without_an_optimizer(folder):
    net = network()
    state = nanogpt_state(net)
    del state['optimizer']
    torch.save(state, folder / 'ckpt.pt')
    return folder / 'ckpt.pt', net


def another_optimizer(folder):
    """It is resumed: a parameter without AdamW's moments begins anew."""
    net = network()
    state = nanogpt_state(net)
    state['optimizer'] = torch.optim.SGD(net.parameters(), momentum=0.9).state_dict()
    torch.save(state, folder / 'ckpt.pt')
    return folder / 'ckpt.pt', net


def an_untied_head(folder):
    """Of a fork without the line that ties the head: no field says so."""
    net = network(tie=False)
    torch.save(nanogpt_state(net), folder / 'ckpt.pt')
    return folder / 'ckpt.pt', net


@dataclasses.dataclass
class TheirConfig:
    """build-nanogpt's; its script is not here when the file is read."""
    block_size: int = 16
    vocab_size: int = 18
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32


def of_build_nanogpt(folder):
    net = network(bias=True, mlp='gelu_tanh')
    script = types.ModuleType('train_gpt2')
    script.GPTConfig = TheirConfig
    sys.modules['train_gpt2'] = script
    TheirConfig.__module__, TheirConfig.__qualname__ = 'train_gpt2', 'GPTConfig'
    path = folder / 'model_00250.pt'
    torch.save({'model': net.state_dict(), 'config': TheirConfig(), 'step': 250, 'val_loss': 3.25}, path)
    del sys.modules['train_gpt2']
    return path, net


def bare_weights(folder):
    net = network()
    torch.save(net.state_dict(), folder / 'weights.pt')
    (folder / 'config.json').write_text(json.dumps({**SIZES, 'bias': False}))
    return folder / 'weights.pt', net


def bare_weights_of_transformers(folder):
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(2)
    config = transformers.GPT2Config(vocab_size=18, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    config.save_pretrained(folder)
    torch.save(theirs.state_dict(), folder / 'weights.pt')
    return folder / 'weights.pt', lambda idx, targets: (theirs(idx).logits, None)


READ = {  # how it is written, whether it can be resumed
    'ours': (of_this_project, True),
    "ours of an older version": (of_an_older_version, True),
    "nanoGPT's": (renamed(''), True),
    'compiled': (renamed('_orig_mod.'), True),
    'in DDP': (renamed('module.'), True),
    'compiled, in DDP': (renamed('module._orig_mod.'), True),
    'in DDP, compiled': (renamed('_orig_mod.module.'), True),
    'its parts compiled': (compiled_blocks, True),
    'numpy scalars': (numpy_scalars, True),
    'argparse.Namespace': (a_namespace, True),
    'torch before 1.6': (before_torch_1_6, True),
    "nanoGPT's first": (nanogpts_first, True),
    'no optimizer': (without_an_optimizer, False),
    'another optimizer': (another_optimizer, True),
    'an untied head': (an_untied_head, True),
    "build-nanogpt's": (of_build_nanogpt, False),
    'bare weights beside a config.json': (bare_weights, False),
    "bare weights beside Hugging Face's": (bare_weights_of_transformers, False),
}


@pytest.mark.parametrize('kind', READ)
def test_what_is_read_is_the_same_network(kind, tmp_path, monkeypatch):
    make, can_resume = READ[kind]
    path, net = make(tmp_path)
    ckpt = checkpoint.read(path)
    model = checkpoint.build_model(ckpt).eval()
    idx = torch.randint(18, (2, 16))
    with torch.no_grad():
        wanted, _ = net(idx, idx)
        torch.testing.assert_close(model(idx, idx)[0], wanted, atol=2e-6, rtol=2e-6)
    assert ckpt['iter_num'] in (0, 2, 250) and ckpt['best_val_loss'] in (3.25, math.inf)
    for value in ckpt['model_args'].values():
        assert type(value) in (int, float, bool, str, dict, type(None))
    if can_resume:
        checkpoint.check_optimizer(ckpt)
        assert ckpt['tokens_per_iter'] == 64
    else:
        with pytest.raises(ValueError):
            checkpoint.check_optimizer(ckpt)


class Evil:
    """Unpickled by the ordinary reader, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class EvilConfig(Evil):
    pass


def changed(**changes):
    def write(folder):
        torch.save(our_state(network(), **changes), folder / 'ckpt.pt')
    return write


def with_args(**changes):
    def write(folder):
        net = network()
        torch.save(our_state(net, model_args={**net.config.model_args(), **changes}), folder / 'ckpt.pt')
    return write


def nan_weights(folder):
    net = network()
    net.lm_head.weight.data[3, 3] = math.nan
    torch.save(our_state(net), folder / 'ckpt.pt')


def bytes_of(content):
    return lambda folder: (folder / 'ckpt.pt').write_bytes(content)


def bits_of_ours(edit):
    def write(folder):
        torch.save(our_state(network()), folder / 'ckpt.pt')
        content = bytearray((folder / 'ckpt.pt').read_bytes())
        (folder / 'ckpt.pt').write_bytes(edit(content))
    return write


def flipped(content):
    content[len(content) // 2] ^= 1
    return content


REFUSED = {
    'bare weights alone': lambda folder: torch.save(network().state_dict(), folder / 'ckpt.pt'),
    'safetensors': bytes_of((200).to_bytes(8, 'little') + b'{"__metadata__":{}}'),
    'a GGUF': bytes_of(b'GGUF\x03\0\0\0' + bytes(100)),
    'a model of llm.c': bytes_of(np.array([20240326, 5], '<i4').tobytes() + bytes(1016)),
    'tokens of llm.c': bytes_of(np.array([20240520, 1], '<i4').tobytes() + bytes(1016)),
    'a text': bytes_of(b'once upon a time'),
    'an empty file': bytes_of(b''),
    'a file cut short': bits_of_ours(lambda content: content[:len(content) // 2]),
    'a flipped bit': bits_of_ours(flipped),
    'a list': lambda folder: torch.save([1, 2], folder / 'ckpt.pt'),
    'other keys': lambda folder: torch.save({'state_dict': {}, 'epoch': 3}, folder / 'ckpt.pt'),
    'no weights': changed(model={}),
    'weights that are not finite': nan_weights,
    'the preset local': with_args(arch='local', near=16384, near_layers=1),
    'an unknown field': with_args(n_experts=8),
    'another number of layers': with_args(n_layer=10**9),
    'other sizes': with_args(n_embd=64),
    'a size that is a text': with_args(n_head='two'),
    'sizes that do not fit': with_args(n_head=5),
    'a list of arguments': changed(model_args=[1]),
    'a count that is a text': changed(iter_num='two'),
    'a config that is a number': changed(config=3),
    'a tokenizer of another kind': changed(tokenizer={'kind': 'mine'}),
    'an optimizer that is a list': changed(optimizer=[1]),
    'data that is a text': changed(data='toy'),
}


@pytest.mark.parametrize('kind', REFUSED)
def test_what_is_not_read_is_named_in_a_line(kind, tmp_path):
    REFUSED[kind](tmp_path)
    before = (tmp_path / 'ckpt.pt').read_bytes()
    with pytest.raises(ValueError) as refused:
        checkpoint.read(tmp_path / 'ckpt.pt')
    line = str(refused.value)
    assert 'ckpt.pt' in line and '\n' not in line and '\x1b' not in line and 'overwrite' not in line
    assert (tmp_path / 'ckpt.pt').read_bytes() == before


@pytest.mark.parametrize('legacy', [False, True])
def test_nothing_in_a_file_is_executed(legacy, tmp_path):
    made, path = tmp_path / 'made', tmp_path / 'ckpt.pt'
    for evil in [{'model': {}, 'x': Evil(made)}, {'model': {}, 'config': EvilConfig(made)}, Evil(made),
                 {'model': {}, 'config': argparse.Namespace(x=Evil(made))}]:
        torch.save(evil, path, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(ValueError):
            checkpoint.read(path)
        assert not made.exists()


def test_mutated_bytes_are_refused_or_read_and_never_a_traceback(tmp_path):
    torch.save(nanogpt_state(network()), tmp_path / 'whole.pt')
    whole = (tmp_path / 'whole.pt').read_bytes()
    rng = np.random.default_rng(1)
    path = tmp_path / 'ckpt.pt'
    for _ in range(60):
        content = bytearray(whole)
        for place in rng.integers(len(whole), size=rng.integers(1, 20)):
            content[place] = rng.integers(256)
        path.write_bytes(content[:rng.integers(1, len(whole) + 1)] if rng.random() < 0.3 else content)
        try:
            checkpoint.read(path, verify=False)
        except ValueError as e:
            assert '\n' not in str(e)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_one_file(tmp_path, monkeypatch):
    path = tmp_path / 'ckpt.pt'
    ones, twos = torch.full((1000,), 1.0), torch.full((1000,), 2.0)
    one = {'iter_num': 1, 'model': {'a': ones, 'b': ones.clone()}}
    two = {'model': {'b': twos, 'a': twos.clone()}, 'longer': torch.zeros(300), 'iter_num': 2}
    torch.save(one, path)
    torch.save(two, tmp_path / 'two.pt')
    real = torch.UntypedStorage.from_file

    def replaced_meanwhile(*args):  # torch has read the table of contents, and maps the numbers now
        if (tmp_path / 'two.pt').exists():
            os.replace(tmp_path / 'two.pt', path)
        return real(*args)

    monkeypatch.setattr(torch.UntypedStorage, 'from_file', replaced_meanwhile)
    found = checkpoint.unpack(str(path))
    assert found['iter_num'] == 1 and all(found['model'][name].eq(1.0).all() for name in 'ab')


def test_nanogpts_sample_py_finds_in_ours_what_it_asks_for(tmp_path):
    net = network(bias=True)
    assert checkpoint.save(tmp_path, our_state(net), best=True, only_best=False, keep=2)
    ckpt = torch.load(tmp_path / 'ckpt.pt', map_location='cpu')
    assert {'model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config'} <= set(ckpt)
    assert set(ckpt['model_args']) == {
        'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout'}
    assert ckpt['config']['dataset'] == 'toy'
    assert torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / 'ckpt.pt') == []


# -----------------------------------------------------------------------------
# the model


def test_positions_are_cropped_and_with_rope_also_added(tmp_path):
    for arch in ['gpt2', 'llama']:
        torch.save(our_state(network(arch=arch)), tmp_path / 'ckpt.pt')
        ckpt = checkpoint.read(tmp_path / 'ckpt.pt')
        whole = checkpoint.build_model(ckpt).eval()
        cropped = checkpoint.build_model(ckpt, block_size=8, dropout=0.1).eval()
        assert cropped.config.block_size == 8 and cropped.config.dropout == 0.1
        idx = torch.randint(18, (2, 8))
        assert torch.equal(whole(idx, idx)[0], cropped(idx, idx)[0])
    longer = checkpoint.build_model(ckpt, block_size=32)
    assert longer(torch.randint(18, (1, 32)))[0].shape == (1, 1, 18)
    torch.save(our_state(network()), tmp_path / 'ckpt.pt')
    with pytest.raises(ValueError):
        checkpoint.build_model(checkpoint.read(tmp_path / 'ckpt.pt'), block_size=32)


@pytest.mark.parametrize('tie', [True, False])
def test_a_grown_vocabulary_leaves_the_old_rows_as_they_were(tie, tmp_path):
    net = network(tie=tie)
    torch.save(our_state(net), tmp_path / 'ckpt.pt')
    ckpt = checkpoint.read(tmp_path / 'ckpt.pt')
    torch.manual_seed(1337)
    grown = checkpoint.build_model(ckpt, vocab_size=22)
    assert (grown.lm_head.weight is grown.transformer.wte.weight) == tie
    for module, old in [(grown.lm_head, net.lm_head), (grown.transformer.wte, net.transformer.wte)]:
        assert module.weight.shape == (22, 32) and torch.equal(module.weight[:18], old.weight)
        # near the mean of the others, and apart from each other
        assert (module.weight[18:] - old.weight.mean(0)).abs().max() < old.weight.std()
        assert not torch.equal(module.weight[18], module.weight[19])
    torch.manual_seed(1337)
    assert torch.equal(checkpoint.build_model(ckpt, vocab_size=22).lm_head.weight, grown.lm_head.weight)
    assert checkpoint.build_model(ckpt, vocab_size=18).lm_head.weight.shape == (18, 32)


def test_a_model_outlives_the_file_that_it_came_from(tmp_path):
    net = network()
    torch.save(our_state(net), tmp_path / 'ckpt.pt')
    model, tokenizer = checkpoint.load(tmp_path)
    (tmp_path / 'ckpt.pt').write_bytes(b'')
    assert torch.equal(model.lm_head.weight, net.lm_head.weight)
    assert model.lm_head.weight is model.transformer.wte.weight and not model.training
    assert tokenizer.decode(tokenizer.encode_prompt('3 tim')) == '3 tim'


def test_a_tokenizer_that_a_checkpoint_does_not_tell_is_that_of_its_dataset(data_dir, tmp_path):
    net = network()
    torch.save(nanogpt_state(net), tmp_path / 'ckpt.pt')
    _, tokenizer = checkpoint.load(tmp_path, data_dir=data_dir)
    assert tokenizer.decode(tokenizer.encode_prompt('3 times')) == '3 times'
    _, tokenizer = checkpoint.load(tmp_path, dataset='toy', data_dir=data_dir)
    ckpt = checkpoint.read(tmp_path / 'ckpt.pt')
    for changes, dataset in [({}, 'none'), ({'dataset': 'none'}, None)]:
        ckpt['config'].update(changes)
        with pytest.raises(ValueError):
            checkpoint.tokenizer_state_of(ckpt, dataset, data_dir)
    ckpt['config']['dataset'] = '..'  # a stranger's, which opens nothing
    with pytest.raises((ValueError, SystemExit)):
        checkpoint.tokenizer_state_of(ckpt, None, data_dir)
    ckpt['model_args']['vocab_size'] = 50304
    del ckpt['config']['dataset']
    assert checkpoint.tokenizer_state_of(ckpt) == {'kind': 'tiktoken', 'name': 'gpt2'}


# -----------------------------------------------------------------------------
# where a run goes on


def saved(out_dir, *its, **changes):
    """Checkpoints of the iterations `its`, each with weights of its own."""
    out_dir.mkdir(exist_ok=True)
    net = network()
    for it in its:
        with torch.no_grad():
            net.lm_head.weight[0, 0] = float(it)
        state = copy.deepcopy(our_state(net, it, **changes))
        assert checkpoint.save(out_dir, state, best=it == its[0], only_best=False, keep=0)


def resumed(out_dir, step=0):
    return checkpoint.load_for_resume(str(out_dir), step)


def test_a_resume_takes_the_newest_or_the_named_checkpoint(tmp_path, capsys):
    saved(tmp_path, 2, 4, 6)
    assert resumed(tmp_path)['iter_num'] == 6
    assert resumed(tmp_path, step=4)['iter_num'] == 4
    (tmp_path / 'ckpt_00000002.pt').unlink()
    assert resumed(tmp_path, step=2)['path'].endswith('ckpt_best.pt')
    with pytest.raises(SystemExit) as ended:
        resumed(tmp_path, step=5)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith('error: ')


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys):
    saved(tmp_path, 2, 4, 6)
    path = tmp_path / 'ckpt_00000006.pt'
    for content in [b'', path.read_bytes()[:-1000], bytes(flipped(bytearray(path.read_bytes())))]:
        path.write_bytes(content)  # ckpt.pt is another name of it
        assert resumed(tmp_path)['iter_num'] == 4
        assert capsys.readouterr().out.count(str(path)) == 1


def test_a_state_that_is_not_finite_is_not_gone_on_from(tmp_path):
    saved(tmp_path, 2)
    state = our_state(network(), 4)
    state['optimizer']['state'][1]['exp_avg'][0] = math.nan
    torch.save(state, tmp_path / 'ckpt_00000004.pt')
    assert resumed(tmp_path)['iter_num'] == 2
    checkpoint.load(tmp_path / 'ckpt_00000004.pt')  # its weights are fine


@pytest.mark.parametrize('damage', [
    'nothing there', 'all damaged', 'weights only', 'no optimizer', 'a teacher'])
def test_where_no_checkpoint_can_be_resumed_that_is_an_error_and_nothing_is_lost(damage, tmp_path, capsys):
    changes = {}
    if damage == 'weights only':
        changes = {'optimizer': None}
    if damage == 'no optimizer':
        changes = {'optimizer': {'state': 3}}
    if damage == 'a teacher':
        changes = {'config': {**CONFIG, 'teacher': 'out-a'}}
    if damage != 'nothing there':
        saved(tmp_path, 2, 4, **changes)
    if damage == 'all damaged':
        for path in tmp_path.glob('ckpt*.pt'):
            path.write_bytes(b'PK\x03\x04')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as ended:
        resumed(tmp_path)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith('error: ') and err.count('\n') == 1
    assert 'overwrite' not in err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_find_takes_files_folders_and_names(tmp_path):
    saved(tmp_path / 'out', 2, 4)
    out = str(tmp_path / 'out')
    assert checkpoint.find(out) == os.path.join(out, 'ckpt.pt')
    assert checkpoint.find(f'{out}/ckpt_00000002.pt') == f'{out}/ckpt_00000002.pt'
    assert checkpoint.newest(out) == os.path.join(out, 'ckpt_00000004.pt')
    (tmp_path / 'out' / 'ckpt.pt').unlink()
    assert checkpoint.find(out) == os.path.join(out, 'ckpt_00000004.pt')
    assert checkpoint.find('gpt2') == 'gpt2' and checkpoint.find('OWNER/NAME@main') == 'OWNER/NAME@main'
    assert checkpoint.exists(out) and not checkpoint.exists(tmp_path)
    with pytest.raises(ValueError):
        checkpoint.find(str(tmp_path))


# -----------------------------------------------------------------------------
# what a resume takes over


@pytest.fixture
def our_ckpt(tmp_path):
    torch.save(our_state(network()), tmp_path / 'ckpt.pt')
    return checkpoint.read(tmp_path / 'ckpt.pt')


def inherit(ckpt, resuming=True, **flags):
    """The knobs and the names given, for a start of train.py with these flags."""
    annotations = {'max_tokens': float, 'max_epochs': float, 'compile': bool | str}
    kinds = kinds_of({'__annotations__': annotations}, DEFAULTS)
    return checkpoint.inherit({**DEFAULTS, **flags}, set(flags), ckpt, resuming, kinds)


def test_what_was_given_holds_unless_it_is_given_again(our_ckpt, capsys):
    config, given = inherit(our_ckpt, learning_rate=0.5)
    assert config['learning_rate'] == 0.5 and config['batch_size'] == 4 and config['max_iters'] == 6
    assert {'learning_rate', 'batch_size', 'max_iters'} <= given
    out = capsys.readouterr().out
    assert '0.01 -> 0.5' in out and 'batch_size' not in out


def test_an_edited_default_counts_and_is_told(our_ckpt, monkeypatch, capsys):
    monkeypatch.setitem(DEFAULTS, 'grad_clip', 0.5)
    monkeypatch.setitem(DEFAULTS, 'learning_rate', 3e-4)  # this one was given
    config, given = inherit(our_ckpt)
    assert config['grad_clip'] == 0.5 and 'grad_clip' not in given
    assert config['learning_rate'] == 0.01
    assert '1.0 -> 0.5' in capsys.readouterr().out


def test_the_architecture_is_the_checkpoints(our_ckpt, capsys):
    config, _ = inherit(our_ckpt, n_layer=5, block_size=8)
    assert config['n_layer'] == 2 and config['block_size'] == 16 and config['n_kv_head'] == 2
    out = capsys.readouterr().out
    assert 'n_layer=5' in out and 'block_size=8' in out
    config, _ = inherit(our_ckpt, resuming=False, n_layer=5, block_size=8)
    assert config['n_layer'] == 2 and config['block_size'] == 8
    assert inherit(our_ckpt, resuming=False)[0]['block_size'] == 16
    assert inherit(our_ckpt, resuming=False)[0]['batch_size'] == 12  # only weights are taken
    with pytest.raises(SystemExit):
        inherit(our_ckpt, resuming=False, block_size=32)


def test_what_belongs_to_a_start_is_never_taken_over(our_ckpt):
    wrong = dict(out_dir='/', data_dir='/', sample_prompts='/etc/passwd', wandb_log=True, device='cuda:7',
                 backend='nccl', init_from='gpt2', overwrite=True)
    our_ckpt['config'].update(wrong)
    our_ckpt['given'].update(wrong)
    config, _ = inherit(our_ckpt)
    for name in set(wrong) & set(DEFAULTS):
        assert config[name] == DEFAULTS[name]


def test_knobs_that_are_gone_or_say_nonsense_are_left_out_with_one_note(our_ckpt, capsys):
    wrong = dict(token_noise=0.05, grad_clip='much', beta1=None, dropout=[0.1], weight_decay=math.nan)
    our_ckpt['config'].update(wrong)
    our_ckpt['given'].update(wrong)
    config, given = inherit(our_ckpt)
    assert 'token_noise' not in config and 'token_noise' not in given
    for name in ['grad_clip', 'beta1', 'dropout', 'weight_decay']:
        assert config[name] == DEFAULTS[name]
    lines = [line for line in capsys.readouterr().out.splitlines() if 'token_noise=0.05' in line]
    assert len(lines) == 1 and 'much' in lines[0]


def test_a_length_that_is_given_anew_replaces_the_old_one(our_ckpt):
    our_ckpt['config']['max_tokens'] = 384.0
    our_ckpt['given'].add('max_tokens')
    config, given = inherit(our_ckpt)
    assert config['max_tokens'] == 384 and config['max_iters'] == 6
    config, given = inherit(our_ckpt, max_iters=50)
    assert config['max_tokens'] is None and 'max_tokens' not in given
    config, given = inherit(our_ckpt, max_epochs=2.0)
    assert config['max_iters'] == DEFAULTS['max_iters'] and 'max_iters' not in given


def test_of_nanogpts_all_is_given_but_what_fits_its_machine(tmp_path):
    torch.save(nanogpt_state(network()), tmp_path / 'ckpt.pt')
    config, given = inherit(checkpoint.read(tmp_path / 'ckpt.pt'))
    assert config['batch_size'] == 4 and config['max_iters'] == 6
    for name in ['device', 'dtype', 'compile', 'backend']:
        assert config[name] == 'auto'
    # its optimizer's own, which a resume of nanoGPT's keeps, whatever it writes into config
    assert config['weight_decay'] == 0.3 and config['adam_eps'] == 1e-8
    assert (config['beta1'], config['beta2']) == (0.8, 0.97)


def test_of_an_older_version_run_json_tells_what_was_given(tmp_path):
    of_an_older_version(tmp_path)
    ckpt = checkpoint.read(tmp_path / 'ckpt.pt')
    assert ckpt['data']['train'] == {'tokens': 1900, 'sha256': '0123456789abcdef'}
    assert ckpt['train_seconds'] == 1.5 and ckpt['loss_ema'] == [14.7, 5.7] and ckpt['tokens'] == 128
    config, given = inherit(ckpt)
    assert config['batch_size'] == 4 and config['max_iters'] == 6  # that of its budget
    assert config['weight_decay'] == 0.1  # it was left to the defaults
    (tmp_path / 'run.json').unlink()
    config, given = inherit(checkpoint.read(tmp_path / 'ckpt.pt'))
    assert config['weight_decay'] == 0.2


@pytest.mark.parametrize('flags, same', [
    ({}, True),
    ({'batch_size': 2, 'eval_iters': 4}, True),
    ({'eval_iters': 3}, False),
    ({'document_mask': True}, False),
])
def test_the_best_loss_begins_anew_where_the_evaluation_is_another_one(flags, same, our_ckpt):
    inherit(our_ckpt, **flags)
    assert our_ckpt['best_val_loss'] == (3.25 if same else math.inf)


def test_a_run_is_not_deleted_from_which_the_weights_come(our_ckpt):
    with pytest.raises(SystemExit):
        inherit(our_ckpt, resuming=False, overwrite=True, out_dir=os.path.dirname(our_ckpt['path']))
    inherit(our_ckpt, resuming=False, overwrite=True, out_dir='another')


def fake_data(state=TOKENIZER, n_ids=18, padded=18, masked=False, tokens=900, sha256='ab'):
    fingerprint = {'name': 'toy', 'train': {'tokens': tokens, 'sha256': sha256}}
    return SimpleNamespace(name='toy', meta={'vocab_size': n_ids}, vocab_size=padded, tokenizer_state=state,
                           fingerprint=fingerprint, train=SimpleNamespace(masked=masked))


def test_other_data_another_batch_or_tokenizer_are_refused(our_ckpt):
    assert checkpoint.check_data(our_ckpt, fake_data(), 64, resuming=True) == 18
    assert checkpoint.check_data(our_ckpt, fake_data(sha256='unknown'), 64, resuming=True) == 18
    others = [(fake_data(), 128), (fake_data(tokens=901), 64), (fake_data(sha256='cd'), 64)]
    for data, tokens_per_iter in others:
        with pytest.raises(SystemExit):
            checkpoint.check_data(our_ckpt, data, tokens_per_iter, resuming=True)
        assert checkpoint.check_data(our_ckpt, data, tokens_per_iter, resuming=False) == 18
    other = {'kind': 'char', 'chars': 'abcdefghijklmnopqr'}
    for resuming in (True, False):
        with pytest.raises(SystemExit):
            checkpoint.check_data(our_ckpt, fake_data(other), 64, resuming)


def test_conversations_may_add_their_tokens_in_a_new_run_alone(our_ckpt):
    roles = ['<|bos|>', '<|user_start|>', '<|user_end|>', '<|assistant_start|>', '<|assistant_end|>']
    data = fake_data({**TOKENIZER, 'added': roles}, n_ids=23, padded=23, masked=True)
    assert checkpoint.check_data(our_ckpt, data, 64, resuming=False) == 23
    with pytest.raises(SystemExit):
        checkpoint.check_data(our_ckpt, data, 64, resuming=True)
    our_ckpt['tokenizer'] = None  # nanoGPT's
    assert checkpoint.check_data(our_ckpt, data, 64, resuming=False) == 23


def test_a_padded_vocabulary_stays_as_it_is(our_ckpt):
    gpt2 = {'kind': 'tiktoken', 'name': 'gpt2'}
    our_ckpt['tokenizer'] = gpt2
    our_ckpt['model_args']['vocab_size'] = 50257  # Hugging Face's, where our datasets pad it
    data = fake_data(gpt2, n_ids=50257, padded=50304)
    assert checkpoint.check_data(our_ckpt, data, 64, resuming=False) == 50257


# -----------------------------------------------------------------------------
# writing


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def iter_of(path):
    return torch.load(path, weights_only=True)['iter_num']


def small_state(it):
    return {'iter_num': it, 'model': {name: torch.full((1000,), float(it)) for name in 'ab'}}


def test_the_newest_stay_and_the_links_name_the_newest_and_the_best(tmp_path):
    for it, best in [(1, True), (2, True), (3, False), (4, False), (5, False)]:
        assert checkpoint.save(tmp_path, small_state(it), best, only_best=False, keep=2)
    assert names_in(tmp_path) == ['ckpt.pt', 'ckpt_00000004.pt', 'ckpt_00000005.pt', 'ckpt_best.pt']
    assert iter_of(tmp_path / 'ckpt.pt') == 5 and iter_of(tmp_path / 'ckpt_best.pt') == 2
    assert checkpoint.save(tmp_path, small_state(6), best=False, only_best=True, keep=0)
    assert iter_of(tmp_path / 'ckpt.pt') == 5
    assert checkpoint.save(tmp_path, small_state(7), best=True, only_best=True, keep=1)
    assert iter_of(tmp_path / 'ckpt.pt') == iter_of(tmp_path / 'ckpt_best.pt') == 7
    assert names_in(tmp_path) == ['ckpt.pt', 'ckpt_00000007.pt', 'ckpt_best.pt']


def test_without_a_best_one_ckpt_pt_is_the_newest(tmp_path):
    for it in (1, 2):
        checkpoint.save(tmp_path, small_state(it), best=False, only_best=True, keep=2)
    assert iter_of(tmp_path / 'ckpt.pt') == 2


def test_wherever_the_disk_is_full_the_older_checkpoints_stay_and_no_part_is_left(tmp_path, capsys):
    checkpoint.save(tmp_path, small_state(1), best=True, only_best=False, keep=1)
    size = (tmp_path / 'ckpt.pt').stat().st_size
    before = names_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in range(0, size, size // 40):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            written = checkpoint.save(tmp_path, small_state(2), best=True, only_best=False, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        out = capsys.readouterr().out
        assert not written and out.startswith('warning: ') and out.count('\n') == 1
        assert names_in(tmp_path) == before and iter_of(tmp_path / 'ckpt.pt') == 1
    assert checkpoint.save(tmp_path, small_state(2), best=True, only_best=False, keep=1)
    assert iter_of(tmp_path / 'ckpt.pt') == 2


def test_a_flush_that_fails_is_a_failed_save(tmp_path, monkeypatch):
    def no_room(fd):
        raise OSError(errno.ENOSPC, 'No space left on device')

    checkpoint.save(tmp_path, small_state(1), best=False, only_best=False, keep=1)
    monkeypatch.setattr(os, 'fsync', no_room)
    assert not checkpoint.save(tmp_path, small_state(2), best=False, only_best=False, keep=1)
    assert names_in(tmp_path) == ['ckpt.pt', 'ckpt_00000001.pt']


def test_without_hard_links_the_names_are_copies(tmp_path, monkeypatch, capsys):
    def no_links(*args):
        raise PermissionError(errno.EPERM, 'Operation not permitted')

    monkeypatch.setattr(os, 'link', no_links)
    for it in (1, 2):
        assert checkpoint.save(tmp_path, small_state(it), best=True, only_best=False, keep=1)
    assert names_in(tmp_path) == ['ckpt.pt', 'ckpt_00000002.pt', 'ckpt_best.pt']
    assert iter_of(tmp_path / 'ckpt_best.pt') == 2

    def no_room(source, to):
        to.write(b'half')
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(shutil, 'copyfileobj', no_room)
    capsys.readouterr()
    assert checkpoint.save(tmp_path, small_state(3), best=True, only_best=False, keep=1)
    assert capsys.readouterr().out.startswith('warning: ')
    assert names_in(tmp_path) == ['ckpt.pt', 'ckpt_00000003.pt', 'ckpt_best.pt']
    assert iter_of(tmp_path / 'ckpt_best.pt') == 2


def test_a_link_in_the_way_of_a_temporary_file_is_not_followed(tmp_path):
    precious, out = tmp_path / 'precious', tmp_path / 'out'
    precious.write_text('precious')
    out.mkdir()
    for name in ['ckpt_00000001.pt.tmp', 'ckpt.pt.tmp']:
        (out / name).symlink_to(precious)
    checkpoint.save(out, small_state(1), best=False, only_best=False, keep=1)
    assert precious.read_text() == 'precious' and names_in(out) == ['ckpt.pt', 'ckpt_00000001.pt']


# -----------------------------------------------------------------------------
# a run's folder


LOG = 'iter,loss,val_loss\n0,,3.0\n0,2.9,\n2,2.5,\n4,,2.4\n4,2.3,\n6,,2.2\n'


def resume_at(folder, iteration):
    lock = checkpoint.lock_folder(str(folder))
    checkpoint.prepare_folder(str(folder), iteration, delete=False, lock=lock)
    lock.close()


def test_what_is_after_the_start_of_a_resume_is_put_aside(tmp_path):
    saved(tmp_path, 2, 4, 6)
    (tmp_path / 'log.csv').write_text(LOG)
    for name in ['ckpt_00000008.pt.tmp', 'log.csv.tmp']:
        (tmp_path / name).write_text('half')
    resume_at(tmp_path, 4)
    assert names_in(tmp_path) == [
        '.lock', 'ckpt.pt', 'ckpt_00000002.pt', 'ckpt_00000004.pt', 'ckpt_00000006.pt.old', 'ckpt_best.pt',
        'log.csv']
    assert iter_of(tmp_path / 'ckpt.pt') == 4 and iter_of(tmp_path / 'ckpt_best.pt') == 2
    assert (tmp_path / 'log.csv').read_text() == 'iter,loss,val_loss\n0,,3.0\n0,2.9,\n2,2.5,\n'
    assert resumed(tmp_path)['iter_num'] == 4


def test_a_best_checkpoint_that_is_later_goes_aside_too(tmp_path):
    saved(tmp_path, 2)
    checkpoint.save(tmp_path, our_state(network(), 6), best=True, only_best=False, keep=0)
    (tmp_path / 'ckpt_00000006.pt').unlink()
    resume_at(tmp_path, 2)
    assert names_in(tmp_path) == ['.lock', 'ckpt.pt', 'ckpt.pt.old', 'ckpt_00000002.pt', 'ckpt_best.pt.old']
    assert iter_of(tmp_path / 'ckpt.pt') == 2


def test_only_delete_removes_a_run_and_nothing_else(tmp_path):
    saved(tmp_path, 2)
    (tmp_path / 'log.csv').write_text(LOG)
    (tmp_path / 'notes.txt').write_text('mine')
    before = names_in(tmp_path)
    with pytest.raises(SystemExit):  # a new run, where another one has begun in the meantime
        checkpoint.prepare_folder(str(tmp_path), 0, delete=False)
    assert set(before) <= set(names_in(tmp_path))
    checkpoint.prepare_folder(str(tmp_path), 0, delete=True).close()
    assert names_in(tmp_path) == ['.lock', 'notes.txt']


def test_the_log_of_a_run_that_saved_nothing_is_put_aside(tmp_path):
    (tmp_path / 'log.csv').write_text(LOG)
    checkpoint.prepare_folder(str(tmp_path), 0, delete=False).close()
    assert names_in(tmp_path) == ['.lock', 'log.csv.old']


def test_nanogpts_ckpt_pt_keeps_a_name_when_it_is_continued_in_place(tmp_path):
    torch.save(nanogpt_state(network()), tmp_path / 'ckpt.pt')
    content = (tmp_path / 'ckpt.pt').read_bytes()
    resume_at(tmp_path, 2)
    checkpoint.save(tmp_path, our_state(network(), 4), best=True, only_best=False, keep=1)
    assert iter_of(tmp_path / 'ckpt.pt') == 4
    assert (tmp_path / 'ckpt_original_00000002.pt').read_bytes() == content


def test_a_folder_that_cannot_be_written_into_is_an_error(tmp_path, capsys):
    (tmp_path / 'file').write_text('')
    with pytest.raises(SystemExit) as ended:
        checkpoint.prepare_folder(str(tmp_path / 'file'), 0, delete=False)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith('error: ')
