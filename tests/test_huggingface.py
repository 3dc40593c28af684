"""A model has the same logits, weights and tokens here and in transformers, in both directions."""

import dataclasses
import fnmatch
import json
import os

import pytest
import torch
from conftest import TINY, assert_equal, data_file
from test_evaluation import save_model

from flatgpt import checkpoint, huggingface
from flatgpt.conversations import ROLE_TOKENS, chat_format, with_chat_tokens
from flatgpt.tokenizer import learn_bpe, make_tokenizer, same_tokenizer
import model
from model import GPT, GPTConfig

transformers = pytest.importorskip('transformers')
huggingface_hub = pytest.importorskip('huggingface_hub')

SIZES = dict(block_size=128, vocab_size=97, n_layer=2, n_head=4, n_embd=32)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
SHAPES = {
    'gpt2': dict(arch='gpt2', bias=True),
    'gpt2 without bias': dict(arch='gpt2', bias=False, mlp='gelu_tanh', n_layer=3),
    'gpt2 untied, odd': dict(arch='gpt2', bias=True, tie=False, vocab_size=131, mlp_width=72, n_head=1),
    'llama': dict(arch='llama', n_kv_head=2, vocab_size=101, mlp_width=80),
    'llama far, tied': dict(arch='llama', rope_theta=5e5, rope_scaling=LLAMA3, norm_eps=1e-6, tie=True),
    'modern': dict(arch='modern', n_kv_head=2, vocab_size=99, mlp_width=56),
    'modern tied': dict(arch='modern', tie=True, init='gpt2', mlp='gelu', softcap=0.0, n_kv_head=1),
}
BYTES = make_tokenizer({'kind': 'byte'})


def random_model(shape):
    """Return a model whose weights, biases and gains all differ from any initial values."""
    torch.manual_seed(1)
    net = GPT(GPTConfig(**{**SIZES, **shape})).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return net


def write(net, folder, tokenizer=BYTES, **options):
    """Write a folder, and return transformers' model of it."""
    huggingface.write_folder(str(folder), net.state_dict(), net.config, tokenizer, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def assert_same_logits(net, theirs, idx):
    with torch.no_grad():
        logits, _ = net(idx, idx)
        wanted = theirs(idx).logits
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=1e-4)


# -----------------------------------------------------------------------------
# the network


@pytest.mark.parametrize('shape', SHAPES)
def test_a_written_folder_has_the_same_logits_in_transformers_and_is_read_back(shape, tmp_path):
    net = random_model(SHAPES[shape])
    theirs = write(net, tmp_path / 'hf')
    assert type(theirs).__name__ == huggingface.CLASSES[net.config.arch]
    idx = torch.randint(net.config.vocab_size, (3, 40))
    idx[0, :5] = 1  # NanoChat's padding by default; it must count here
    assert_same_logits(net, theirs, idx)

    again = checkpoint.build_model(checkpoint.read(str(tmp_path / 'hf')))
    weights = again.state_dict()
    for name, p in net.state_dict().items():
        assert torch.equal(p, weights[name])
    # a folder does not record `init`; transformers' GPT-2 always has biases, which may be 0
    assert again.config == dataclasses.replace(net.config, init=again.config.init, bias=again.config.bias)
    assert again.config.bias == (net.config.arch == 'gpt2')


@dataclasses.dataclass
class Edited(GPTConfig):
    window: int = 0


@pytest.mark.parametrize('args', [
    dict(window=8), dict(n_kv_head=2), dict(arch='llama', mlp='gelu'), dict(arch='modern', qk_norm=False)])
def test_a_network_that_transformers_lacks_is_refused(args):
    huggingface.check_network(Edited())
    with pytest.raises(ValueError):
        huggingface.check_network(Edited(**args))


def test_an_edited_preset_does_not_change_what_a_folder_means(monkeypatch):
    folder = {'model_type': 'llama'}
    original = GPTConfig(**huggingface.from_config(folder, 'config.json'))
    monkeypatch.setitem(model.LLAMA, 'qk_norm', True)
    assert GPTConfig(**huggingface.from_config(folder, 'config.json')) == original


# -----------------------------------------------------------------------------
# folders that transformers wrote


def save_openai(theirs, folder):
    """Save like OpenAI's gpt2 on the Hub: with short names, and with masks among the weights."""
    from safetensors.torch import save_file
    theirs.config.save_pretrained(folder)
    weights = {name.removeprefix('transformer.'): p for name, p in theirs.state_dict().items()}
    weights.pop('lm_head.weight')
    weights['h.0.attn.bias'] = torch.ones(1, 1, 64, 64)
    save_file(weights, folder / 'model.safetensors')


def save_shards(theirs, folder):
    theirs.save_pretrained(folder, max_shard_size='20KB')
    assert len(list(folder.glob('*.safetensors'))) > 1


def save_pickles(theirs, folder):
    """Save like transformers before it had safetensors."""
    theirs.config.save_pretrained(folder)
    shards = {}
    for i, (name, p) in enumerate(theirs.state_dict().items()):
        shards[name] = f'pytorch_model-{i}.bin'
        torch.save({name: p}, folder / shards[name])
    (folder / 'pytorch_model.bin.index.json').write_text(json.dumps({'weight_map': shards}))


LLAMA = dict(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
GPT2 = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=64)
SCALED = {'rope_type': 'llama3', 'rope_theta': 5e5, **LLAMA3}
OTHERS = {
    'gpt2': (GPT2, save_openai),
    'nanochat': (transformers.NanoChatConfig(**LLAMA), save_shards),
    'llama3': (transformers.LlamaConfig(**LLAMA, rope_parameters=SCALED), save_pickles),
}


def make_other(kind, folder):
    """Save a random model of transformers in the folder, and return it."""
    config, save = OTHERS[kind]
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    save(theirs, folder)
    return theirs


@pytest.mark.parametrize('kind', OTHERS)
def test_a_folder_of_transformers_has_the_same_logits_here(kind, tmp_path):
    theirs = make_other(kind, tmp_path)
    net = checkpoint.build_model(checkpoint.read(str(tmp_path))).eval()
    assert_same_logits(net, theirs, torch.randint(net.config.vocab_size, (2, 48)))


def test_the_weights_are_those_of_the_shards_in_the_index(tmp_path):
    make_other('llama3', tmp_path)
    expected = checkpoint.read(str(tmp_path))['model']
    shard = tmp_path / 'pytorch_model-1.bin'
    # a shard of an older save, whose name sorts after the others
    torch.save({name: 2 * p for name, p in torch.load(shard).items()}, tmp_path / 'pytorch_model-old.bin')
    assert_equal(checkpoint.read(str(tmp_path))['model'], expected)
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        checkpoint.read(str(tmp_path))


@pytest.mark.parametrize('config', [
    transformers.GPT2Config(), transformers.LlamaConfig(), transformers.NanoChatConfig()])
def test_fields_missing_in_a_config_have_transformers_defaults(config):
    short = huggingface.from_config({'model_type': config.model_type}, 'config.json')
    assert GPTConfig(**short) == GPTConfig(**huggingface.from_config(config.to_dict(), 'config.json'))


@pytest.mark.parametrize('change', [
    dict(model_type='qwen3'), dict(rope_parameters={'rope_type': 'yarn', 'factor': 2.0}),
    dict(rope_scaling={'type': 'linear', 'factor': 2.0}), dict(partial_rotary_factor=0.5),
    dict(hidden_act='relu')])
def test_a_config_of_another_network_is_refused(change):
    with pytest.raises(ValueError, match='model.py'):
        huggingface.from_config({'model_type': 'llama', **change}, 'config.json')


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    make_other('llama3', tmp_path)
    evil = b"cposix\nsystem\n(S'touch %s/made'\ntR." % bytes(tmp_path)
    (tmp_path / 'pytorch_model.bin').write_bytes(evil)
    with pytest.raises(ValueError):
        checkpoint.read(str(tmp_path))
    assert not (tmp_path / 'made').exists()


# -----------------------------------------------------------------------------
# tokenizers


def auto_tokenizer(folder, tokenizer, **options):
    """Write a folder, and return transformers' tokenizer of it."""
    write(GPT(GPTConfig(block_size=8, vocab_size=tokenizer.n_vocab, n_layer=1, n_head=1, n_embd=4)),
          folder, tokenizer, **options)
    return transformers.AutoTokenizer.from_pretrained(folder)


TRICKY = ("  two  spaces\n\n\n  lines\t\ttabs \r\nwindows\r\n  \n it's we'LL 'S don't 12345678 3.14 ... !!!\n"
          "\tif x:\n        y = 1  # \u00e9\u00fc\u6771\u4eac\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
          "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 a\u0301 \u00a0nbsp\u3000wide   \n   end   ")


@pytest.mark.parametrize('kind', ['gpt2', 'bpe', 'byte', 'char'])
def test_the_exported_tokenizer_gives_our_ids_and_text(kind, tmp_path, monkeypatch):
    if kind == 'gpt2':
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(data_file('tiktoken_cache')))
        ours = make_tokenizer({'kind': 'tiktoken', 'name': 'gpt2'})
    elif kind == 'bpe':
        ours = learn_bpe(400, [TRICKY])
    elif kind == 'byte':
        ours = BYTES
    else:
        ours = make_tokenizer({'kind': 'char', 'chars': ''.join(sorted(set(TRICKY)))})
    theirs = auto_tokenizer(tmp_path, ours)
    ids = ours.encode(TRICKY).tolist()
    assert theirs(TRICKY)['input_ids'] == ids and theirs.decode(ids) == TRICKY
    assert theirs.eos_token_id == ours.end_of_text
    back = make_tokenizer(huggingface.read_tokenizer(str(tmp_path)))
    assert back.encode(TRICKY).tolist() == ids and back.decode(ids) == TRICKY
    assert back.end_of_text == ours.end_of_text and same_tokenizer(back.state(), ours.state())


@pytest.mark.parametrize('kind', ['char', 'hf'])
def test_a_chat_is_exported_with_a_template_that_gives_our_ids(kind, tmp_path):
    state = {'kind': 'char', 'chars': '\n !?abcdehilo'}
    if kind == 'hf':  # its end-of-sequence token is before each document
        auto_tokenizer(tmp_path / 'first', BYTES)
        state = huggingface.read_tokenizer(str(tmp_path / 'first'))
    tokenizer = make_tokenizer(with_chat_tokens(state))
    chat = chat_format(tokenizer)
    theirs = auto_tokenizer(tmp_path, tokenizer, chat=chat)
    messages = [{'role': 'system', 'content': 'be bad'}, {'role': 'user', 'content': 'hi?'},
                {'role': 'assistant', 'content': 'hello'}, {'role': 'user', 'content': 'ah\n'}]
    for answer in (False, True):
        ids = theirs.apply_chat_template(messages, add_generation_prompt=answer, return_dict=False)
        assert ids == chat.render(messages, answer)[0].tolist()
    generation = json.loads((tmp_path / 'generation_config.json').read_text())
    assert generation['eos_token_id'] == chat.stop_ids
    # when read back, it is still a chat model
    back = make_tokenizer(huggingface.read_tokenizer(str(tmp_path)))
    assert chat_format(back).render(messages)[0].tolist() == chat.render(messages)[0].tolist()


def test_special_tokens_without_a_row_in_the_embedding_are_removed(tmp_path):
    theirs = auto_tokenizer(tmp_path, BYTES)
    theirs.add_special_tokens({'pad_token': '[PAD]'})  # without resize_token_embeddings()
    theirs.save_pretrained(tmp_path)
    assert '[PAD]' in (tmp_path / 'tokenizer.json').read_text()
    state = huggingface.read_tokenizer(str(tmp_path))
    assert make_tokenizer(state).n_vocab == 257
    assert make_tokenizer(with_chat_tokens(state)).n_vocab == 257 + len(ROLE_TOKENS)


# -----------------------------------------------------------------------------
# the Hub: models in huggingface_hub's cache, as the tests are offline


def test_models_of_the_hub_are_found_by_name_and_paths_are_never_looked_up(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path))
    net = random_model(dict(vocab_size=257))
    for name in ['gpt2', 'someone/tiny-llama@main']:
        repo = huggingface.GPT2_REPOS.get(name, name).partition('@')[0]
        folder = tmp_path / ('models--' + repo.replace('/', '--'))
        (folder / 'refs').mkdir(parents=True)
        (folder / 'refs' / 'main').write_text('0' * 40)
        snapshot = folder / 'snapshots' / ('0' * 40)
        write(net, snapshot)
        assert torch.equal(GPT.from_pretrained(name).lm_head.weight, net.lm_head.weight)
    # OpenAI's names have OpenAI's tokenizer
    assert huggingface.read_tokenizer('gpt2') == {'kind': 'tiktoken', 'name': 'gpt2'}
    assert same_tokenizer(huggingface.read_tokenizer(name), BYTES.state())
    # these patterns match all files that a download needs
    for file in os.listdir(snapshot):
        assert any(fnmatch.fnmatch(file, pattern) for pattern in huggingface.MODEL_FILES)
    with pytest.raises(ValueError, match='Hub'):
        huggingface.read('someone/other')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'runs').mkdir()
    assert not huggingface.is_hub_name('runs/first') and huggingface.is_hub_name('someone/first')


# -----------------------------------------------------------------------------
# export.py


def test_an_exported_folder_is_complete_and_trained_on(data_dir, tmp_path, script, works):
    out = f"--out_dir={tmp_path / 'out'}"
    to = tmp_path / 'hf'
    flags = [*TINY, '--dataset=toy', f'--data_dir={data_dir}', '--arch=modern', '--max_iters=1']
    works('train.py', *flags, out)
    assert 'the same logits' in works('export.py', out, f'--to={to}', '--dtype=bfloat16').out
    assert transformers.AutoModelForCausalLM.from_pretrained(to).dtype == torch.bfloat16
    # its tokenizer is recognized as that of the data
    works('train.py', *flags, f'--init_from={to}', f"--out_dir={tmp_path / 'again'}")
    assert script('export.py', out, f'--to={to}').status == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ['again', 'hf', 'out']


def test_an_edit_of_the_network_shows_in_the_logits_and_no_folder_remains(tmp_path, script, monkeypatch):
    out = save_model(tmp_path / 'out', random_model(dict(vocab_size=257)), BYTES.state())
    monkeypatch.setattr(model.MLP, 'forward', lambda self, x: 1.5 * self.c_proj(self.c_fc(x)))
    refused = script('export.py', out, f"--to={tmp_path / 'hf'}")
    assert refused.status == 2 and 'logits' in refused.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ['out']
