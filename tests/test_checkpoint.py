"""Checkpoints: what a stranger brings is read or named, and nothing in it is executed; a resume takes what it
should; a save is whole or absent."""

import argparse
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import checkpoint
import huggingface
import model
from configurator import kinds_of
from model import GPT, GPTConfig

TOKENIZER = {'kind': 'char', 'chars': '\n .0123456789eimst'}
SIZES = {'n_layer': 2, 'n_head': 2, 'n_embd': 32, 'block_size': 16}
DEFAULTS = {  # knobs as train.py has them
    'out_dir': 'out', 'overwrite': False, 'batch_size': 12, 'block_size': 1024, 'n_layer': 12,
    'gradient_accumulation_steps': 40, 'weight_decay': 0.1, 'grad_clip': 1.0, 'max_iters': 600000,
    'max_tokens': None, 'eval_iters': 200, 'document_mask': False, 'device': 'auto', 'wandb_log': False,
    'sample_prompts': None, 'max_minutes': None, 'shard': 1}
GIVEN = {**SIZES, 'batch_size': 4, 'gradient_accumulation_steps': 1, 'max_iters': 6, 'eval_iters': 2}


def network(**shape):
    """A GPT whose weights, biases and gains too, differ from what anything starts with."""
    torch.manual_seed(1)
    net = GPT(GPTConfig(**{'vocab_size': 18, 'bias': False, **SIZES, **shape})).eval()
    for p in net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return net


def our_state(it=2, net=None, **changes):
    """What train.py saves; the optimizer is AdamW after one update."""
    net = net or network()
    optimizer = net.configure_optimizers(0.3, 0.0, (0.8, 0.97))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = {
        'model': net.state_dict(), 'optimizer': optimizer.state_dict(), 'model_args': net.config.model_args(),
        'iter_num': it, 'best_val_loss': 3.25, 'config': {'dataset': 'toy', **DEFAULTS, **GIVEN},
        'given': sorted(GIVEN), 'tokenizer': TOKENIZER, 'data': {'train': {'tokens': 9, 'sha256': 'ab'}},
        'tokens_per_iter': 64, 'train_seconds': 1.5}
    return {**state, **changes}


def nanogpt_state(net=None):
    """What nanoGPT's train.py saves: six keys, seven arguments, a config of another machine."""
    state = our_state(net=net)
    for name in ['given', 'tokenizer', 'data', 'tokens_per_iter', 'train_seconds']:
        del state[name]
    for name in set(state['model_args']) - {*SIZES, 'bias', 'vocab_size', 'dropout'}:
        del state['model_args'][name]
    state['best_val_loss'] = torch.tensor(3.25)
    state['config'].update(device='cuda', weight_decay=9.0)
    return state


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'ckpt.pt'


@pytest.fixture
def ckpt(path):
    torch.save(our_state(), path)
    return checkpoint.read(path)


# -----------------------------------------------------------------------------
# what a stranger's checkpoint may be: the table in docs/from_nanogpt.md


def wrapped(state):
    """As torch.compile and DDP name the weights, in any order, also where parts were compiled."""
    prefixes = ['', 'module.', '_orig_mod.', 'module._orig_mod.', '_orig_mod.module.']
    weights = {}
    for i, (name, p) in enumerate(state['model'].items()):
        weights[prefixes[i % 5] + name.replace('.attn.', '.attn._orig_mod.')] = p
    return {**state, 'model': weights}


def of_other_classes(state):
    """numpy's scalars, in a config of argparse's."""
    state['config'].update(learning_rate=np.float32(0.5), bias=np.bool_(False), dataset=np.str_('toy'))
    state['model_args']['n_layer'] = np.int32(2)
    config = argparse.Namespace(**state['config'])
    return {**state, 'iter_num': np.int64(2), 'best_val_loss': np.float64(3.25), 'config': config}


def nanogpts_first(state):
    """Without the fields bias and dropout, with the causal masks among the weights."""
    del state['model_args']['bias'], state['model_args']['dropout']
    state['model']['transformer.h.0.attn.bias'] = torch.ones(1, 1, 16, 16)
    return state


class TheirConfig:
    """build-nanogpt's GPTConfig."""


def of_build_nanogpt(state):
    config = TheirConfig()
    vars(config).update(SIZES, vocab_size=18)
    return {'model': state['model'], 'config': config, 'step': 2, 'val_loss': 3.25}


def of_an_older_version(state):
    """Of commit a170a90."""
    state['model_args'].update(rope_scaling='llama3:8:1:4:16', near=0, near_layers=0)
    state['config'].update(token_noise=0.05, weight_decay=0.2)
    state.update(trained_on={'tokens per iteration': 64}, seconds=state.pop('train_seconds'))
    for name in ['given', 'data', 'tokens_per_iter']:
        del state[name]
    return state


SCALING = dict(zip(huggingface.ROPE_SCALING, [8.0, 1.0, 4.0, 16.0]))
READ = {  # a state, the network, what is made of the state
    "nanoGPT's": (nanogpt_state, {}, None),
    'compiled, in DDP': (nanogpt_state, {}, wrapped),
    'other classes': (nanogpt_state, {}, of_other_classes),
    "nanoGPT's first": (nanogpt_state, {'bias': True}, nanogpts_first),
    'an untied head': (nanogpt_state, {'tie': False}, None),  # no field of nanoGPT's says so
    "build-nanogpt's": (our_state, {'bias': True, 'mlp': 'gelu_tanh'}, of_build_nanogpt),
    'ours': (our_state, {'arch': 'llama', 'n_kv_head': 1}, None),
    "commit a170a90's": (our_state, {'arch': 'llama', 'rope_scaling': SCALING}, of_an_older_version),
}


def write(kind, path):
    make, shape, edit = READ[kind]
    net = network(**shape)
    state = make(net=net)
    torch.save(edit(state) if edit else state, path)
    return net


@pytest.mark.parametrize('kind', READ)
def test_what_is_read_is_the_same_network(kind, path):
    net = write(kind, path)
    ckpt = checkpoint.read(path)
    idx = torch.randint(18, (2, 16))
    assert torch.equal(checkpoint.build_model(ckpt).eval()(idx, idx)[0], net(idx, idx)[0])
    assert ckpt['iter_num'] == 2 and type(ckpt['model_args']['n_layer']) is int
    if kind == "build-nanogpt's":  # without an optimizer
        with pytest.raises(ValueError):
            checkpoint.check_optimizer(ckpt)
        return
    checkpoint.check_optimizer(ckpt)
    assert ckpt['tokens_per_iter'] == 64 and ckpt['best_val_loss'] == 3.25


def test_what_a_file_leaves_out_is_nanogpts_network_also_where_the_preset_is_edited(path, monkeypatch):
    net = write("nanoGPT's", path)
    edited = {**model.GPT2, 'mlp': 'relu2'}
    monkeypatch.setitem(model.PRESETS, 'gpt2', edited)
    assert checkpoint.build_model(checkpoint.read(path)).config == net.config
    net = network()  # with the edit, which its checkpoint has to tell
    torch.save(our_state(net=net), path)
    monkeypatch.setitem(model.PRESETS, 'gpt2', model.GPT2)
    assert net.config.mlp == 'relu2' and checkpoint.build_model(checkpoint.read(path)).config == net.config


# what git-lfs leaves in a clone in place of a file
POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:' + b'0' * 64 + b'\nsize 1234567\n'


def with_args(**changes):
    state = our_state()
    state['model_args'].update(changes)
    return state


with_nan = network()
with_nan.lm_head.weight.data[3, 3] = math.nan
REFUSED = {  # a word of the line: what the file holds
    'bare weights': network().state_dict(),
    'safetensors': (200).to_bytes(8, 'little') + b'{"__metadata__":{}}',
    'GGUF': b'GGUF\x03\0\0\0' + bytes(100),
    'llm.c': np.array([20240326, 5], '<i4').tobytes() + bytes(1016),
    'git lfs pull': POINTER,
    'damaged': b'PK\x03\x04',
    'finite': our_state(net=with_nan),
    'near': with_args(arch='local', near=16384),
    'mlp.c_fc': with_args(mlp_width=64),
}


@pytest.mark.parametrize('word', REFUSED)
def test_what_is_not_read_is_called_what_it_is_in_a_line(word, path):
    if isinstance(REFUSED[word], bytes):
        path.write_bytes(REFUSED[word])
    else:
        torch.save(REFUSED[word], path)
    with pytest.raises(ValueError) as refused:
        checkpoint.read(path)
    line = str(refused.value)
    assert word in line and '\n' not in line and '--overwrite' not in line


def test_a_pointer_of_git_lfs_in_a_folder_of_weights_is_called_that(tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps(huggingface.to_config(network().config, 'float32')))
    (tmp_path / 'model.safetensors').write_bytes(POINTER)
    with pytest.raises(ValueError, match='git lfs pull') as refused:
        checkpoint.read(tmp_path)
    assert 'save_pretrained' not in str(refused.value)


class Evil:
    """Unpickled by the ordinary reader, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_in_a_file_is_executed(path, tmp_path):
    evil = Evil(tmp_path / 'made')
    for state in [{'model': {}, 'x': evil}, {'model': {}, 'config': argparse.Namespace(x=evil)}]:
        torch.save(state, path)
        with pytest.raises(ValueError):
            checkpoint.read(path)
    assert not (tmp_path / 'made').exists()


def test_a_checkpoint_is_read_where_dev_fd_shares_the_position_of_the_file(path, monkeypatch):
    """As on macOS and the BSDs, which have no /proc."""
    torch.save(our_state(), path)
    exists = os.path.exists

    def open_duplicate(name, *args, **options):
        if str(name).startswith('/dev/fd/'):
            return os.fdopen(os.dup(int(str(name)[len('/dev/fd/'):])), 'rb')
        return open(name, *args, **options)

    monkeypatch.setattr(torch.serialization, 'open', open_duplicate, raising=False)
    monkeypatch.setattr(os.path, 'exists', lambda path: not str(path).startswith('/proc') and exists(path))
    assert checkpoint.read(path)['iter_num'] == 2


@pytest.mark.skipif(not os.path.exists('/proc/self/fd'), reason='a file cannot be opened by its number')
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_one_file(path, tmp_path, monkeypatch):
    torch.save(torch.zeros(1000), path)
    torch.save(torch.ones(1000), tmp_path / 'other.pt')
    real = torch.UntypedStorage.from_file

    def replaced_meanwhile(*args):  # torch has read the table of contents, and maps the numbers now
        os.replace(tmp_path / 'other.pt', path)
        return real(*args)

    monkeypatch.setattr(torch.UntypedStorage, 'from_file', replaced_meanwhile)
    assert not checkpoint.unpack(str(path)).any()


# -----------------------------------------------------------------------------
# the model


@pytest.mark.parametrize('arch, block_size', [('gpt2', 8), ('llama', 32)])
def test_positions_are_cropped_and_with_rope_also_added(arch, block_size, path):
    net = network(arch=arch)
    torch.save(our_state(net=net), path)
    other = checkpoint.build_model(checkpoint.read(path), block_size=block_size).eval()
    idx = torch.randint(18, (2, 8))
    assert torch.equal(net(idx, idx)[0], other(idx, idx)[0])
    assert other.config.block_size == block_size


@pytest.mark.parametrize('tie', [True, False])
def test_a_grown_vocabulary_leaves_the_old_rows_as_they_were(tie, path):
    net = network(tie=tie)
    torch.save(our_state(net=net), path)
    grown = checkpoint.build_model(checkpoint.read(path), vocab_size=22).eval()
    assert (grown.lm_head.weight is grown.transformer.wte.weight) == tie
    idx = torch.randint(18, (2, 16))
    logits = grown(idx, idx)[0]
    assert logits.size(2) == 22
    torch.testing.assert_close(logits[:, :, :18], net(idx, idx)[0])
    assert not torch.equal(grown.lm_head.weight[18], grown.lm_head.weight[19])


def test_a_model_outlives_the_file_that_it_came_from(ckpt, path, tmp_path):
    net, tokenizer = checkpoint.load(tmp_path)
    path.write_bytes(b'')
    assert torch.equal(net.lm_head.weight, network().lm_head.weight)
    assert tokenizer.decode(tokenizer.encode_prompt('3 tim')) == '3 tim'


def test_a_tokenizer_that_a_checkpoint_does_not_tell_is_that_of_its_dataset(ckpt, data_dir):
    ckpt['tokenizer'] = None
    assert checkpoint.tokenizer_state_of(ckpt, None, data_dir)['kind'] == 'char'
    with pytest.raises(ValueError):
        checkpoint.tokenizer_state_of(ckpt, 'none', data_dir)
    ckpt['config']['dataset'] = '..'  # a stranger's, which opens nothing
    with pytest.raises(SystemExit):
        checkpoint.tokenizer_state_of(ckpt, None, data_dir)


# -----------------------------------------------------------------------------
# where a run goes on


def save(folder, it, best=True, only_best=False, keep=1):
    return checkpoint.save(str(folder), our_state(it), best, only_best, keep)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def iter_of(path):
    return torch.load(path, weights_only=True)['iter_num']


@pytest.fixture
def run(tmp_path):
    """A run's folder with the checkpoints of three iterations; the first is the best."""
    for it in [2, 4, 6]:
        assert save(tmp_path, it, best=it == 2, keep=0)
    return tmp_path


def resumed(out_dir):
    return checkpoint.load_for_resume(str(out_dir))['iter_num']


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run, capsys):
    path = run / 'ckpt_00000006.pt'
    flipped = bytearray(path.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    for damage in [flipped, flipped[:-1000], b'']:
        path.write_bytes(damage)
        assert resumed(run) == 4 and str(path) in capsys.readouterr().out


def test_a_state_that_is_not_finite_is_not_gone_on_from(run):
    state = our_state(6)
    state['optimizer']['state'][1]['exp_avg'][0] = math.nan
    torch.save(state, run / 'ckpt_00000006.pt')
    assert resumed(run) == 4


@pytest.mark.parametrize('optimizer', [None, {'state': 3}])
def test_without_an_optimizer_a_checkpoint_is_not_resumed(optimizer, path, tmp_path):
    torch.save(our_state(optimizer=optimizer), path)
    with pytest.raises(SystemExit) as ended:
        resumed(tmp_path)
    assert ended.value.code == 2


# -----------------------------------------------------------------------------
# what a resume takes over


def inherit(ckpt, resuming=True, **flags):
    """The knobs and the names given, for a start of train.py with these flags."""
    kinds = kinds_of({'__annotations__': {'max_tokens': float}}, DEFAULTS)
    return checkpoint.inherit({**DEFAULTS, **flags}, set(flags), ckpt, resuming, kinds)


def test_a_new_run_has_at_most_the_checkpoints_context_but_with_rope_any(ckpt):
    assert inherit(ckpt, resuming=False, block_size=32)[0]['block_size'] == 16
    ckpt['model_args']['positions'] = 'rope'
    config, _ = inherit(ckpt, resuming=False, block_size=32)
    assert config['block_size'] == 32 and config['batch_size'] == 12  # only weights are taken


def test_what_belongs_to_a_start_or_is_no_knob_is_not_taken_over(ckpt, capsys):
    wrong = {'out_dir': '/', 'device': 'cuda:7', 'overwrite': True, 'grad_clip': 'much', 'token_noise': 0.05}
    ckpt['config'].update(wrong)
    ckpt['given'].update(wrong)
    config, _ = inherit(ckpt)
    assert 'token_noise=0.05' in capsys.readouterr().out
    assert all(config.get(name) == DEFAULTS.get(name) for name in wrong)


def test_what_belonged_to_the_start_before_and_is_not_given_again_is_named_in_a_note(ckpt, capsys):
    before = {'wandb_log': True, 'sample_prompts': 'p.txt', 'max_minutes': 5.0, 'shard': 0, 'out_dir': 'a'}
    ckpt['config'].update(before)
    ckpt['given'].update(before)
    config, _ = inherit(ckpt, shard=8)
    out = capsys.readouterr().out
    notes = [line for line in out.splitlines() if 'wandb_log' in line]
    assert len(notes) == 1 and "sample_prompts='p.txt'" in notes[0] and 'max_minutes=5.0' in notes[0]
    assert 'shard' not in out and 'out_dir' not in out  # given now; tells nothing
    assert config['wandb_log'] is False and config['shard'] == 8


def test_a_length_that_is_given_anew_replaces_the_old_one(ckpt):
    ckpt['config']['max_tokens'] = 384.0
    ckpt['given'].add('max_tokens')
    assert inherit(ckpt)[0]['max_tokens'] == 384
    config, given = inherit(ckpt, max_iters=50)
    assert config['max_tokens'] is None and 'max_tokens' not in given


def test_of_commit_a170a90_run_json_tells_what_was_given(path, tmp_path):
    write("commit a170a90's", path)
    assert inherit(checkpoint.read(path))[0]['weight_decay'] == 0.2  # nothing tells
    (tmp_path / 'run.json').write_text(json.dumps({'given': ['batch_size']}))
    config, _ = inherit(checkpoint.read(path))
    assert config['batch_size'] == 4 and config['weight_decay'] == 0.1  # this was left to the defaults


@pytest.mark.parametrize('flags, best', [
    ({'batch_size': 2, 'eval_iters': 4}, 3.25), ({'eval_iters': 3}, math.inf),
    ({'document_mask': True}, math.inf)])
def test_the_best_loss_begins_anew_where_the_evaluation_is_another_one(flags, best, ckpt):
    inherit(ckpt, **flags)
    assert ckpt['best_val_loss'] == best


def test_a_run_is_not_deleted_from_which_the_weights_come(ckpt, tmp_path):
    with pytest.raises(SystemExit):
        inherit(ckpt, resuming=False, overwrite=True, out_dir=str(tmp_path))


def check(ckpt, state, n_ids, padded=None, masked=False, resuming=False):
    """The vocabulary size for a dataset with such a tokenizer, or None where it is refused."""
    data = SimpleNamespace(
        name='toy', meta={'vocab_size': n_ids}, vocab_size=padded or n_ids, tokenizer_state=state,
        fingerprint=ckpt['data'], train=SimpleNamespace(masked=masked))
    try:
        return checkpoint.check_data(ckpt, data, 64, resuming)
    except SystemExit:
        return None


def test_another_tokenizer_is_refused(ckpt):
    other = {'kind': 'char', 'chars': 'abcdefghijklmnopqr'}
    assert check(ckpt, TOKENIZER, 18) == 18 and check(ckpt, other, 18) is None
    ckpt['tokenizer'] = None  # nanoGPT's, of which the size is known
    assert check(ckpt, other, 18) == 18 and check(ckpt, other, 17) is None and check(ckpt, other, 19) is None
    gpt2 = {'kind': 'tiktoken', 'name': 'gpt2'}
    ckpt['model_args']['vocab_size'] = 50304  # padded
    assert check(ckpt, gpt2, 50257, 50304) == 50304
    ckpt['tokenizer'] = gpt2
    ckpt['model_args']['vocab_size'] = 50257  # Hugging Face's, where our datasets pad it
    assert check(ckpt, gpt2, 50257, 50304) == 50257


# -----------------------------------------------------------------------------
# writing


def test_wherever_the_disk_is_full_the_older_checkpoints_stay_and_no_part_is_left(tmp_path, capsys):
    resource = pytest.importorskip('resource', reason='not on Windows')
    save(tmp_path, 1)
    before = names_in(tmp_path)
    size = (tmp_path / 'ckpt.pt').stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in range(0, size, size // 20):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        written = save(tmp_path, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not written and 'File too large' in capsys.readouterr().out
        assert names_in(tmp_path) == before and iter_of(tmp_path / 'ckpt.pt') == 1


def test_without_hard_links_the_names_are_copies(tmp_path, monkeypatch):
    def no_links(*args):
        raise OSError

    monkeypatch.setattr(os, 'link', no_links)
    assert save(tmp_path, 1) and save(tmp_path, 2)
    assert names_in(tmp_path) == ['ckpt.pt', 'ckpt_00000002.pt', 'ckpt_best.pt']
    assert iter_of(tmp_path / 'ckpt.pt') == iter_of(tmp_path / 'ckpt_best.pt') == 2


# -----------------------------------------------------------------------------
# a run's folder


def prepare(folder, iteration, delete=False, best_iter=None):
    """As a new run does it, if `iteration` is 0, or a resume."""
    lock = checkpoint.lock_folder(folder) if iteration else None
    checkpoint.prepare_folder(str(folder), iteration, delete, lock, best_iter).close()


def test_only_delete_removes_a_run_and_nothing_else(run):
    for name in ['ckpt_original.pt', 'ckpt_00000008.pt.old', 'log.csv.old', 'eval_00000002.json']:
        (run / name).write_text('')
    for name in ['notes.txt', 'eval_notes.json', 'evaluation.csv.old']:
        (run / name).write_text('mine')
    before = names_in(run)
    with pytest.raises(SystemExit):  # another run has begun in the meantime
        prepare(run, 0)
    assert names_in(run) == ['.lock', *before]
    prepare(run, 0, delete=True)
    assert names_in(run) == ['.lock', 'eval_notes.json', 'evaluation.csv.old', 'notes.txt']


def test_going_back_to_an_earlier_iteration_sets_aside_what_is_later_and_names_the_best_up_to_it(tmp_path):
    for it in [2, 4, 6]:
        save(tmp_path, it, best=it != 4, keep=0)
        (tmp_path / f'eval_{it:08d}.json').write_text('{}')
    prepare(tmp_path, 4, best_iter=2)
    assert iter_of(tmp_path / 'ckpt_best.pt') == 2 and iter_of(tmp_path / 'ckpt.pt') == 4
    names = names_in(tmp_path)
    assert 'eval_00000004.json' in names and 'eval_00000006.json' not in names
    assert 'eval_00000006.json.old' in names and 'ckpt_00000006.pt.old' in names


def test_nanogpts_ckpt_pt_keeps_a_name_when_it_is_continued_in_place(path, tmp_path):
    write("nanoGPT's", path)
    prepare(tmp_path, 2)
    save(tmp_path, 4)
    assert iter_of(path) == 4 and iter_of(tmp_path / 'ckpt_original.pt') == 2
