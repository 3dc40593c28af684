"""nanoGPT's checkpoints and ours are read, anything else is refused in one line, and nothing in a file is
executed. A resume restores the right settings, and a save is complete or absent."""

import json
import math
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configurator import InputError, kinds_of
from flatgpt import checkpoint, huggingface
import model
from model import GPT, GPTConfig

TOKENIZER = {'kind': 'char', 'chars': '\n .0123456789eimst'}
SIZES = {'n_layer': 2, 'n_head': 2, 'n_embd': 32, 'block_size': 16}
DEFAULTS = {  # settings of train.py
    'out_dir': 'out', 'overwrite': False, 'batch_size': 12, 'block_size': 1024, 'n_layer': 12, 'n_head': 12,
    'n_embd': 768, 'weight_decay': 0.1, 'grad_clip': 1.0, 'max_iters': 600000, 'max_tokens': None,
    'eval_iters': 200, 'document_mask': False, 'device': 'auto', 'sample_prompts': None, 'shard': 1}
EVALUATION = {'sequences': 8, 'document_mask': False}
GIVEN = {**SIZES, 'batch_size': 4, 'max_iters': 6, 'eval_iters': 2}


def network(**shape):
    """Return a GPT in which no weight, bias or gain has its initial value."""
    torch.manual_seed(1)
    net = GPT(GPTConfig(**{'vocab_size': 18, 'bias': False, **SIZES, **shape})).eval()
    for p in net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return net


def our_state(it=2, net=None, **changes):
    """Return what train.py saves, with a small part of the optimizer's state."""
    net = net or network()
    state = {
        'model': net.state_dict(), 'optimizer': {'state': {0: {'step': torch.ones(())}}},
        'model_args': net.config.model_args(), 'iter_num': it, 'best_val_loss': 3.25,
        'config': {**DEFAULTS, **GIVEN}, 'given': GIVEN, 'tokenizer': TOKENIZER,
        'data': {'train': {'tokens': 9}}, 'tokens_per_iter': 64, 'best_iter': 2, 'evaluation': EVALUATION}
    return {**state, **changes}


def nanogpt_state(net=None):
    """Return what nanoGPT's train.py saves: six keys, seven arguments, a config of another machine."""
    ours = our_state(net=net)
    state = {name: ours[name] for name in ['model', 'optimizer', 'iter_num']}
    state['model_args'] = {name: ours['model_args'][name] for name in model.NANOGPT_FIELDS}
    state['config'] = {**ours['config'], 'dataset': 'toy', 'dtype': 'float16'}
    state['best_val_loss'] = torch.tensor(3.25)
    return state


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'ckpt.pt'


def read(path, state):
    torch.save(state, path)
    return checkpoint.read(path)


@pytest.fixture
def ckpt(path):
    return read(path, our_state())


# -----------------------------------------------------------------------------
# what is read: the table in docs/from_nanogpt.md


def wrapped(state):
    """Rename the weights as torch.compile and DDP do, in any order, also if only blocks are compiled."""
    prefixes = ['', 'module.', '_orig_mod.', 'module._orig_mod.', '_orig_mod.module.']
    weights = {}
    for i, (name, p) in enumerate(state['model'].items()):
        weights[prefixes[i % 5] + name.replace('.attn.', '.attn._orig_mod.')] = p
    return {**state, 'model': weights}


def nanogpts_first(state):
    """Remove the fields bias and dropout, and add a causal mask to the weights."""
    del state['model_args']['bias'], state['model_args']['dropout']
    state['model']['transformer.h.0.attn.bias'] = torch.ones(1, 1, 16, 16)
    return state


def of_67db31c(state):
    return {**state, 'given': sorted(state['given'])}


READ = {  # a state, the network, what is done to the state
    "nanoGPT's, compiled, in DDP": (nanogpt_state, {}, wrapped),
    "nanoGPT's first": (nanogpt_state, {'bias': True}, nanogpts_first),
    'an untied head': (nanogpt_state, {'tie': False}, dict),  # no field of nanoGPT says so
    'ours': (our_state, {'arch': 'llama', 'n_kv_head': 1}, dict),
    "commit 67db31c's": (our_state, {}, of_67db31c),
}


@pytest.mark.parametrize('kind', READ)
def test_what_is_read_is_the_same_network_with_the_same_settings(kind, path):
    make, shape, edit = READ[kind]
    net = network(**shape)
    ckpt = read(path, edit(make(net=net)))
    idx = torch.randint(18, (2, 16))
    assert torch.equal(checkpoint.build_model(ckpt).eval()(idx, idx)[0], net(idx, idx)[0])
    assert ckpt['optimizer'] and ckpt['iter_num'] == 2 and ckpt['best_val_loss'] == 3.25
    assert GIVEN.items() <= ckpt['given'].items() and 'dtype' not in ckpt['given']


def test_what_a_file_omits_is_nanogpts_network_also_if_the_preset_is_edited(path, monkeypatch):
    state = nanogpt_state()
    monkeypatch.setitem(model.PRESETS, 'gpt2', {**model.GPT2, 'mlp': 'relu2'})
    assert read(path, state)['model_args']['mlp'] == 'gelu'
    state = our_state(net=network())
    monkeypatch.undo()
    assert read(path, state)['model_args']['mlp'] == 'relu2'


# a file of a clone without git-lfs
POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:' + b'0' * 64 + b'\nsize 1234567\n'


class Evil:
    """Creates a file when the ordinary unpickler reads it."""

    def __reduce__(self):
        return Path.touch, (Path('made'),)


with_nan = network()
with_nan.lm_head.weight.data[3, 3] = math.nan
other_args = {**network().config.model_args(), 'mlp_width': 64}
REFUSED = {  # a word of the message: what the file contains
    'nor a Hugging Face folder': network().state_dict(),
    'not a checkpoint': b'GGUF' + bytes(100),
    'git lfs pull': POINTER,
    'finite': our_state(net=with_nan),
    'mlp.c_fc': our_state(model_args=other_args),
    'window': our_state(model_args={**other_args, 'window': 9}),
    'layers': our_state(model_args={**network().config.model_args(), 'n_layer': 10**6}),
    'numpy': {**nanogpt_state(), 'iter_num': np.int64(2)},
    'pathlib': {'model': {}, 'x': Evil()},
}


def test_a_field_of_other_code_that_is_off_does_not_matter(path):
    net = GPT(GPTConfig(arch='llama', vocab_size=20, **SIZES))
    torch.save(our_state(net=net, model_args={**net.config.model_args(), 'window': 0}), path)
    assert checkpoint.build_model(checkpoint.read(path)).config == net.config


@pytest.mark.parametrize('word', REFUSED)
def test_what_is_not_read_is_refused_in_a_line_and_not_executed(word, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if isinstance(REFUSED[word], bytes):
        path.write_bytes(REFUSED[word])
    else:
        torch.save(REFUSED[word], path)
    with pytest.raises(InputError, match=word) as refused:
        checkpoint.read(path)
    assert '\n' not in str(refused.value) and os.listdir() == ['ckpt.pt']


def test_a_pointer_of_git_lfs_in_a_hugging_face_folder_is_named(tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps(huggingface.to_config(network().config, 'float32')))
    (tmp_path / 'model.safetensors').write_bytes(POINTER)
    with pytest.raises(InputError, match='git lfs pull'):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize('changes', [
    {'iter_num': 'x'}, {'iter_num': -1}, {'train_seconds': math.nan}, {'wall_seconds': math.inf},
    {'tokens': [1]}, {'samples': 0.5}, {'starts': 5}, {'tokenizer': 7}, {'data': 'x'}, {'best_iter': 'x'},
    {'config': {'a\nb': 1}}, {'scaler': 3}, {'optimizer_class': 4}, {'evaluation': 1}, {'commit': 1}])
def test_an_entry_of_another_type_is_refused(path, changes):
    with pytest.raises(InputError, match=next(iter(changes))):
        read(path, our_state(**changes))


@pytest.mark.parametrize('args', [
    {'softcap': 'x'}, {'norm_eps': [1]}, {'n_head': -2}, {'block_size': 16.0}, {'n_layer': 2**60}, {'mlp': 3},
    {'positions': 'rope', 'block_size': 2**26}, {'rope_scaling': 3}])
def test_a_field_of_the_network_of_another_type_or_size_is_refused(path, args):
    state = our_state()
    state['model_args'].update(args)
    with pytest.raises(InputError):
        read(path, state)


def test_a_file_cannot_ask_for_more_memory_than_it_has(path):
    state = our_state()
    for name in ['transformer.wte.weight', 'lm_head.weight']:
        state['model'][name] = torch.zeros(1, 32).expand(2**24, 32)
    state['model_args']['vocab_size'] = 2**24
    with pytest.raises(InputError, match='numbers'):
        read(path, state)
    torch.save(our_state(), path)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    with pytest.raises(InputError):
        checkpoint.read(path)


def test_names_in_a_file_are_printed_without_their_escape_sequences(path):
    state = our_state()
    state['model']['\x1b[2J\nx'] = torch.zeros(1)
    with pytest.raises(InputError) as refused:
        read(path, state)
    assert '\x1b' not in str(refused.value) and '\n' not in str(refused.value)


def test_settings_of_another_type_count_as_missing(ckpt):
    ckpt['config'].update(dataset=5, seed='x', document_mask=True)
    assert checkpoint.setting(ckpt, 'dataset', '') == '' and checkpoint.setting(ckpt, 'seed', 3) == 3
    assert checkpoint.setting(ckpt, 'document_mask', False) is True


@pytest.mark.skipif(not os.path.exists('/proc/self/fd'), reason='a file cannot be opened by its number')
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_one_file(path, tmp_path, monkeypatch):
    torch.save(torch.zeros(1000), path)
    torch.save(torch.ones(1000), tmp_path / 'other.pt')
    real = torch.UntypedStorage.from_file

    def replaced_meanwhile(*args):  # torch has read the table of contents, and maps the tensors now
        os.replace(tmp_path / 'other.pt', path)
        return real(*args)

    monkeypatch.setattr(torch.UntypedStorage, 'from_file', replaced_meanwhile)
    assert not checkpoint.unpack(str(path)).any()


# -----------------------------------------------------------------------------
# the model and the tokenizer


@pytest.mark.parametrize('shape, changes', [
    ({}, {'block_size': 8}), ({'arch': 'llama'}, {'block_size': 32}),
    ({}, {'vocab_size': 22}), ({'tie': False}, {'vocab_size': 22})])
def test_another_context_or_a_larger_vocabulary_leaves_the_logits_alone(shape, changes, path):
    net = network(**shape)
    other = checkpoint.build_model(read(path, our_state(net=net)), **changes).eval()
    idx = torch.randint(18, (2, 8))
    logits = other(idx, idx)[0]
    torch.testing.assert_close(logits[:, :, :18], net(idx, idx)[0])
    assert changes.items() <= vars(other.config).items() and logits.size(2) == other.config.vocab_size
    assert (other.lm_head.weight is other.transformer.wte.weight) == net.config.tie
    assert len(other.lm_head.weight.unique(dim=0)) == other.config.vocab_size  # new tokens differ


def test_a_model_outlives_its_file(ckpt, path, tmp_path):
    net, tokenizer = checkpoint.load(tmp_path)
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(net.transformer.ln_f.weight, network().transformer.ln_f.weight)
    assert tokenizer.decode(tokenizer.encode_prompt('3 tim')) == '3 tim'


def test_the_tokenizer_of_nanogpts_checkpoint_is_its_datasets(path, data_dir):
    ckpt = read(path, nanogpt_state())
    assert checkpoint.tokenizer_state_of(ckpt, None, data_dir)['kind'] == 'char'
    ckpt['config']['dataset'] = '..'  # opens nothing outside of data_dir
    for name in [None, 'none']:
        with pytest.raises(InputError):
            checkpoint.tokenizer_state_of(ckpt, name, data_dir)


GPT2 = {'kind': 'tiktoken', 'name': 'gpt2'}
OTHER = {'kind': 'char', 'chars': 'abcdefghijklmnopqr'}


@pytest.mark.parametrize('known, vocab_size, state, n_ids, expected', [
    (TOKENIZER, 18, TOKENIZER, 18, 18),
    (TOKENIZER, 18, OTHER, 18, None),
    (None, 18, OTHER, 18, 18),  # nanoGPT's, of which only the size is known
    (None, 18, OTHER, 17, None),
    (None, 50304, GPT2, 50257, 50304),  # padded
    (GPT2, 50257, GPT2, 50257, 50257),  # Hugging Face's, which our datasets pad
])
def test_another_tokenizer_is_refused(known, vocab_size, state, n_ids, expected):
    ckpt = {'path': 'x', 'tokenizer': known, 'model_args': {'vocab_size': vocab_size}}
    data = SimpleNamespace(name='toy', meta={'vocab_size': n_ids}, vocab_size=50304, tokenizer_state=state,
                           train=SimpleNamespace(masked=False))
    try:
        found = checkpoint.check_data(ckpt, data, 64, resuming=False)
    except InputError:
        found = None
    assert found == expected


# -----------------------------------------------------------------------------
# what a resume restores


def inherit(ckpt, resuming=True, **flags):
    """Return the settings, and those given, of a start of train.py with these flags."""
    kinds = kinds_of({'__annotations__': {'max_tokens': float}}, DEFAULTS)
    return checkpoint.inherit({**DEFAULTS, **flags}, flags, ckpt, resuming, kinds)


def test_what_is_given_now_wins_over_what_was_given_and_that_over_the_defaults(ckpt, capsys):
    ckpt['config'].update(weight_decay=0.5, device='cuda')  # a default that has been edited since
    ckpt['given'].update(sample_prompts='p.txt', shard=0, grad_clip='much', token_noise=0.05, max_iters=6.0)
    ckpt['config'].update(ckpt['given'])
    config, given = inherit(ckpt, eval_iters=7, n_layer=3)
    assert config == {**DEFAULTS, **GIVEN, 'eval_iters': 7}
    assert given == {**GIVEN, 'eval_iters': 7}
    assert type(config['max_iters']) is int
    changes = [line.strip() for line in capsys.readouterr().out.splitlines() if '->' in line]
    # what belongs to a start, has another type or is no setting is not restored, but named
    assert sorted(changes) == [
        'eval_iters: 2 -> 7', "grad_clip: 'much' -> 1.0", "sample_prompts: 'p.txt' -> None", 'shard: 0 -> 1',
        'token_noise: 0.05 -> None', 'weight_decay: 0.5 -> 0.1']


def test_a_budget_that_is_given_now_replaces_the_old_one(ckpt):
    ckpt['given']['max_tokens'] = 384.0
    assert inherit(ckpt)[1]['max_tokens'] == 384
    assert 'max_tokens' not in inherit(ckpt, max_iters=50)[1]


def test_a_new_run_has_at_most_the_checkpoints_context_and_with_rope_any(ckpt):
    assert inherit(ckpt, resuming=False, block_size=32)[0]['block_size'] == 16
    ckpt['model_args']['positions'] = 'rope'
    config, _ = inherit(ckpt, resuming=False, block_size=32)
    assert config['block_size'] == 32 and config['batch_size'] == 12  # only weights are taken


def test_a_run_is_not_deleted_if_the_weights_come_from_it(ckpt, tmp_path):
    with pytest.raises(InputError):
        inherit(ckpt, resuming=False, overwrite=True, out_dir=str(tmp_path))


# -----------------------------------------------------------------------------
# a run's folder


def save(folder, it, best=True, keep=0):
    return checkpoint.save(str(folder), our_state(it), best, False, keep)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def iter_of(path):
    return torch.load(path, weights_only=True)['iter_num']


def resumed(out_dir):
    return checkpoint.load_for_resume(str(out_dir))['iter_num']


def best_of(out_dir, **changes):
    ckpt = checkpoint.load_for_resume(str(out_dir))
    return checkpoint.best_so_far(ckpt, {**EVALUATION, **changes}, str(out_dir))[1]


@pytest.fixture
def run(tmp_path):
    """A run's folder with three checkpoints, the first of which is the best, and their evaluations."""
    for it in [2, 4, 6]:
        assert save(tmp_path, it, best=it == 2)
        (tmp_path / f'eval_{it:08d}.json').write_text('{}')
    return tmp_path


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_resumed(run, capsys):
    path = run / 'ckpt_00000006.pt'
    flipped = bytearray(path.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    for damage in [flipped, flipped[:-1000], b'']:
        path.write_bytes(damage)
        assert resumed(run) == 4 and str(path) in capsys.readouterr().out
    checkpoint.prepare_folder(str(run), 4, delete=False)  # ckpt.pt is the damaged one, too
    assert iter_of(checkpoint.find(run)) == 4


def test_without_an_optimizer_a_checkpoint_is_not_resumed(path, tmp_path):
    torch.save(our_state(optimizer=None), path)
    with pytest.raises(InputError):
        resumed(tmp_path)


def test_the_best_loss_starts_again_if_its_checkpoint_or_its_measure_is_another(run):
    assert best_of(run) == 2
    assert best_of(run, sequences=9) is best_of(run, document_mask=True) is None
    save(run, 8)  # ckpt_best.pt is another one, as after a kill before the links were made
    os.replace(run / 'ckpt_00000008.pt', run / 'other.pt')
    assert best_of(run) is None
    (run / 'ckpt_best.pt').unlink()
    assert best_of(run) is None


def test_going_back_to_an_earlier_iteration_renames_what_is_later(run):
    checkpoint.prepare_folder(str(run), 4, delete=False)
    names = names_in(run)
    assert {'ckpt_best.pt', 'ckpt_00000004.pt', 'eval_00000004.json'} < set(names) and best_of(run) == 2
    for name in ['ckpt.pt', 'ckpt_00000006.pt', 'eval_00000006.json']:
        assert name not in names and f'{name}.old' in names
    assert iter_of(checkpoint.find(run)) == resumed(run) == 4
    save(run, 8)  # a new best, after which the run goes back
    checkpoint.prepare_folder(str(run), 4, delete=False, best_iter=2)
    assert iter_of(run / 'ckpt_best.pt') == best_of(run) == 2


def test_only_delete_removes_a_run_and_nothing_else(run):
    for name in ['ckpt_original.pt', 'ckpt_00000010.pt.old', 'log.csv.old', 'ckpt_00000002.pt.copy.pt',
                 'notes.txt', 'eval_notes.json', 'evaluation.csv.old']:
        (run / name).write_text('')
    before = names_in(run)
    checkpoint.prepare_folder(str(run), 8, delete=False)
    assert names_in(run) == before
    checkpoint.prepare_folder(str(run), 0, delete=True)
    assert names_in(run) == ['ckpt_00000002.pt.copy.pt', 'eval_notes.json', 'evaluation.csv.old', 'notes.txt']


def test_nanogpts_ckpt_pt_is_kept_when_its_run_is_resumed(path, tmp_path):
    torch.save(nanogpt_state(), path)
    checkpoint.prepare_folder(str(tmp_path), 2, delete=False)
    assert best_of(tmp_path) is None  # nanoGPT measures it on random sequences
    save(tmp_path, 4)
    assert iter_of(path) == 4 and iter_of(tmp_path / 'ckpt_original.pt') == 2


def test_if_the_disk_is_full_at_any_byte_the_older_checkpoints_stay(tmp_path, capsys):
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
    assert save(tmp_path, 1, keep=1) and save(tmp_path, 2, keep=1)
    assert names_in(tmp_path) == ['ckpt.pt', 'ckpt_00000002.pt', 'ckpt_best.pt']
    assert iter_of(tmp_path / 'ckpt.pt') == iter_of(tmp_path / 'ckpt_best.pt') == 2


def test_a_checkpoint_that_cannot_be_removed_does_not_keep_the_links_from_the_newest(tmp_path, monkeypatch):
    def refuse(path):  # Windows, while another program reads the file
        raise PermissionError(13, 'Permission denied')

    save(tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, 'remove', refuse)
        assert save(tmp_path, 2, keep=1)
    assert iter_of(tmp_path / 'ckpt.pt') == iter_of(tmp_path / 'ckpt_best.pt') == 2
    assert save(tmp_path, 3, keep=1)
    assert names_in(tmp_path) == ['ckpt.pt', 'ckpt_00000003.pt', 'ckpt_best.pt']


def test_a_link_that_cannot_be_replaced_keeps_no_other_from_the_newest(tmp_path, monkeypatch, capsys):
    replace = os.replace

    def refuse_best(source, target):
        if target.endswith('ckpt_best.pt'):
            raise PermissionError(13, 'Permission denied')
        replace(source, target)

    save(tmp_path, 1)
    monkeypatch.setattr(os, 'replace', refuse_best)
    assert save(tmp_path, 2) and 'ckpt_best.pt' in capsys.readouterr().out
    assert iter_of(tmp_path / 'ckpt.pt') == 2 and iter_of(tmp_path / 'ckpt_best.pt') == 1
