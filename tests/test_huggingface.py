"""An exported model is the same model to transformers, and one from there is the same here: logits, loss,
gradients, texts, tokens."""

import dataclasses
import hashlib
import json
import os
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, data_file

import checkpoint
import huggingface
import model
from chat import chat_format, with_chat_tokens
from huggingface import convert, weight_names
from model import GPT, GPTConfig
from tokenizer import make_tokenizer, same_tokenizer

transformers = pytest.importorskip('transformers')
huggingface_hub = pytest.importorskip('huggingface_hub')

SIZES = dict(block_size=128, vocab_size=97, n_layer=2, n_head=4, n_embd=32)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
SHAPES = {
    'gpt2': dict(arch='gpt2', bias=True),
    'gpt2 without bias': dict(arch='gpt2', bias=False, mlp='gelu_tanh', n_layer=3),
    'gpt2 untied, odd': dict(arch='gpt2', bias=True, tie=False, vocab_size=131, mlp_width=72, n_head=1),
    'llama': dict(arch='llama', n_kv_head=2, vocab_size=101, mlp_width=80),
    'llama far': dict(arch='llama', rope_theta=5e5, rope_scaling=LLAMA3, norm_eps=1e-6),
    'llama tied': dict(arch='llama', n_kv_head=1, tie=True, n_layer=1),
    'modern': dict(arch='modern', n_kv_head=2, vocab_size=99, mlp_width=56),
    'modern tied': dict(arch='modern', tie=True, init='gpt2', mlp='gelu', softcap=0.0, n_kv_head=1),
}
BYTES = make_tokenizer({'kind': 'byte'})


def random_model(shape):
    """A model all of whose weights, biases and gains too, differ from what anything starts with."""
    torch.manual_seed(1)
    net = GPT(GPTConfig(**{**SIZES, **shape})).eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            is_gain = 'ln_' in name and name.endswith('weight')
            p.copy_(torch.randn_like(p) * 0.2 + (1 if is_gain else 0))
    return net


def write(net, folder, tokenizer=BYTES, **options):
    huggingface.write_folder(str(folder), net.state_dict(), net.config, tokenizer, **options)


def written(net, folder, tokenizer=BYTES, **options):
    """transformers' model of the folder that is written."""
    write(net, folder, tokenizer, **options)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return theirs.eval()


# -----------------------------------------------------------------------------
# the network


@pytest.mark.parametrize('shape', SHAPES)
def test_a_folder_is_the_same_network_to_transformers_and_read_back(shape, tmp_path):
    net = random_model(SHAPES[shape])
    config = net.config
    theirs = written(net, tmp_path / 'hf')
    assert type(theirs).__name__ == huggingface.CLASSES[config.arch]
    idx = torch.randint(config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(2))
    idx[0, :5] = 1  # NanoChat's padding by default; it must count here
    logits, loss = net(idx[:, :-1], idx[:, 1:])
    wanted = theirs(idx, labels=idx)
    torch.testing.assert_close(logits, wanted.logits[:, :-1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, wanted.loss, atol=1e-5, rtol=1e-5)

    loss.backward()
    wanted.loss.backward()
    names = weight_names(config.arch, config.n_layer)
    their_grads = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in net.named_parameters():
        if names[name] in their_grads:  # a tied matrix has one name there, another here
            grad = convert(name, p.grad, config.n_head, config.arch)
            torch.testing.assert_close(grad, their_grads[names[name]], atol=1e-5, rtol=1e-4)

    text = theirs.generate(idx[:2, :8], max_new_tokens=20, do_sample=False, eos_token_id=None,
                           suppress_tokens=None)
    assert torch.equal(net.generate(idx[:2, :8], 20, temperature=0), text)

    ckpt = checkpoint.read(str(tmp_path / 'hf'))
    weights = net.state_dict()
    assert set(ckpt['model']) == set(weights)
    for name, p in ckpt['model'].items():
        assert torch.equal(p, weights[name])
    again = checkpoint.build_model(ckpt).config
    again.init = config.init  # the folder does not tell how it was initialized
    assert again == config
    assert make_tokenizer(ckpt['tokenizer']).n_vocab == 257


def test_half_precision_and_padding_arrive_as_meant(tmp_path):
    net = random_model(dict(arch='llama', vocab_size=320))  # 257 bytes, padded
    theirs = written(net, tmp_path / 'hf', dtype='bfloat16')
    assert theirs.dtype == torch.bfloat16 and theirs.config.pad_token_id is None
    with torch.no_grad():
        theirs.lm_head.weight[300] += 100 * theirs.lm_head.weight[300].sign()
    text = theirs.generate(torch.tensor([[65, 66]]), max_new_tokens=50, do_sample=True, top_k=None)
    assert text.max() < 257
    ckpt = checkpoint.read(str(tmp_path / 'hf'))
    for name, p in ckpt['model'].items():
        assert torch.equal(p, net.state_dict()[name].bfloat16())
    assert checkpoint.build_model(ckpt).lm_head.weight.dtype == torch.float32


def test_a_network_that_transformers_has_not_is_refused(tmp_path):
    for shape in [dict(arch='llama', mlp='gelu'), dict(arch='gpt2', positions='rope'),
                  dict(arch='llama', softcap=15.0), dict(arch='modern', qk_norm=False)]:
        with pytest.raises(ValueError):
            write(random_model(shape), tmp_path / 'hf')
    assert not (tmp_path / 'hf').exists()


def test_a_field_or_weight_that_somebody_added_is_refused_where_it_is_used():
    @dataclasses.dataclass
    class Mine(GPTConfig):
        window: int = 0

    for arch in ['gpt2', 'llama', 'modern']:
        huggingface.check_parts(Mine(arch=arch))
        with pytest.raises(ValueError, match='window=8'):
            huggingface.check_parts(Mine(arch=arch, window=8))
    with pytest.raises(ValueError, match='wte2'):
        huggingface.their_weights({'transformer.wte2.weight': torch.zeros(1)}, GPTConfig(), torch.float32)


# -----------------------------------------------------------------------------
# folders of others


def save_file(weights, path):
    from safetensors.torch import save_file
    save_file(weights, path)


def openai_like(folder):
    """A folder like OpenAI's gpt2 on the Hub: short names, masks among the weights, a config.json of the old
    kind. Returns transformers' model."""
    torch.manual_seed(4)
    sizes = {'n_embd': 8, 'n_layer': 2, 'n_head': 2, 'n_positions': 64}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    weights = {}
    for name, p in theirs.state_dict().items():
        if name != 'lm_head.weight':
            weights[name.removeprefix('transformer.')] = p.contiguous()
    for i in range(2):
        weights[f'h.{i}.attn.bias'] = torch.ones(1, 1, 64, 64)
    folder.mkdir(parents=True)
    save_file(weights, folder / 'model.safetensors')
    (folder / 'config.json').write_text(json.dumps({
        **sizes, 'model_type': 'gpt2', 'n_ctx': 64, 'vocab_size': 50257, 'activation_function': 'gelu_new',
        'layer_norm_epsilon': 1e-5}))
    return theirs


def llama_like(folder):
    """A folder like Llama 2's: shards, a tied head, grouped queries; a vocabulary that marks spaces and puts
    one first, <s> before a prompt, bytes for characters that it lacks. Returns transformers' model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    special = ['<unk>', '<s>', '</s>']
    words = [*special]
    words += [f'<0x{byte:02X}>' for byte in range(256)]
    words += ['▁', 't', 'h', 'e', 'c', 'a', '▁t', '▁th', '▁the', '▁c', 'at', '▁cat']
    vocab = {word: i for i, word in enumerate(words)}
    merges = [('▁', 't'), ('▁t', 'h'), ('▁th', 'e'), ('▁', 'c'), ('a', 't'), ('▁c', 'at')]
    tok = Tokenizer(models.BPE(vocab, merges, unk_token='<unk>', byte_fallback=True, fuse_unk=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    tok.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(),
                                     decoders.Strip(' ', 1, 0)])
    tok.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tok.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 1)])
    torch.manual_seed(3)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
        tie_word_embeddings=True)).eval()
    theirs.save_pretrained(folder, max_shard_size='20KB')
    assert len(list(folder.glob('*.safetensors'))) > 1
    (folder / 'tokenizer.json').write_text(tok.to_str())
    (folder / 'tokenizer_config.json').write_text(json.dumps({
        'bos_token': '<s>', 'eos_token': {'__type': 'AddedToken', 'content': '</s>'},
        'tokenizer_class': 'PreTrainedTokenizerFast'}))
    return theirs


def nanochat_like(folder):
    torch.manual_seed(5)
    theirs = transformers.NanoChatForCausalLM(transformers.NanoChatConfig(
        vocab_size=300, hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64)).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    theirs.save_pretrained(folder)
    return theirs


def far_llama_like(folder):
    torch.manual_seed(6)
    rope = {'rope_type': 'llama3', 'rope_theta': 5e5, **LLAMA3}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rope_parameters=rope)).eval()
    theirs.save_pretrained(folder)
    return theirs


def with_a_pickle(folder):
    """As transformers saved before safetensors. Returns the model."""
    theirs = far_llama_like(folder)
    (folder / 'model.safetensors').unlink()
    torch.save(theirs.state_dict(), folder / 'pytorch_model.bin')
    return theirs


@pytest.mark.parametrize('make', [openai_like, llama_like, far_llama_like, nanochat_like, with_a_pickle])
def test_a_folder_of_transformers_is_the_same_network_here(make, tmp_path):
    theirs = make(tmp_path / 'hf')
    net = checkpoint.build_model(checkpoint.read(str(tmp_path / 'hf'))).eval()
    idx = torch.randint(net.config.vocab_size, (2, 48))
    with torch.no_grad():
        logits, _ = net(idx, idx)
        wanted = theirs(idx).logits
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=1e-4)


def edited(**changes):
    """Change fields of config.json."""
    def edit(folder):
        path = folder / 'config.json'
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return edit


def without_a_weight(folder):
    from safetensors.torch import load_file
    weights = load_file(folder / 'model.safetensors')
    del weights['model.layers.1.mlp.up_proj.weight']
    save_file(weights, folder / 'model.safetensors')


def replaced(name, content):
    return lambda folder: (folder / name).write_bytes(content)


DAMAGES = {
    'another network': edited(model_type='qwen3'),
    'another rope': edited(rope_parameters={'rope_type': 'yarn', 'factor': 2.0}),
    'another attention': edited(partial_rotary_factor=0.5),
    'other sizes': edited(hidden_size=64),
    'more layers': edited(num_hidden_layers=10**9),
    'a number that is a text': edited(num_attention_heads='four'),
    'no config': replaced('config.json', b'[]'),
    'a weight is missing': without_a_weight,
    'truncated': replaced('model.safetensors', bytes(1000)),
    'a tokenizer without a model': replaced('tokenizer.json', b'{"version": "1.0"}'),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_folder_that_cannot_be_read_is_refused(damage, tmp_path):
    write(random_model(SHAPES['llama']), tmp_path)
    DAMAGES[damage](tmp_path)
    with pytest.raises(ValueError) as refused:
        checkpoint.read(str(tmp_path))
    assert '\n' not in str(refused.value)


def test_a_pickle_that_wants_to_run_code_is_refused(tmp_path):
    with_a_pickle(tmp_path / 'hf')
    evil = b"cposix\nsystem\n(S'touch %s/made'\ntR." % bytes(tmp_path)
    (tmp_path / 'hf' / 'pytorch_model.bin').write_bytes(evil)
    with pytest.raises(ValueError):
        checkpoint.read(str(tmp_path / 'hf'))
    assert not (tmp_path / 'made').exists()


# -----------------------------------------------------------------------------
# tokenizers


def auto_tokenizer(folder, tokenizer, **options):
    """transformers' tokenizer of the folder that is written."""
    vocab_size = -(-tokenizer.n_vocab // 64) * 64
    net = GPT(GPTConfig(block_size=64, vocab_size=vocab_size, n_layer=1, n_head=1, n_embd=4))
    write(net, folder, tokenizer, **options)
    return transformers.AutoTokenizer.from_pretrained(folder)


TRICKY = ("  two  spaces\n\n\n  lines\t\ttabs \r\nwindows\r\n  \n it's we'LL 'S don't 12345678 3.14 ... !!!\n"
          "\tif x:\n        y = 1  # \u00e9\u00fc\u6771\u4eac\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
          "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 a\u0301 \u00a0nbsp\u3000wide   \n   end   ")


def gpt2_tokenizer(monkeypatch):
    if 'TIKTOKEN_CACHE_DIR' not in os.environ:
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(data_file('tiktoken_cache')))
    return make_tokenizer({'kind': 'tiktoken', 'name': 'gpt2'})


@pytest.mark.parametrize('kind', ['gpt2', 'byte', 'char'])
def test_the_exported_tokenizer_gives_our_ids_and_text(kind, tmp_path, monkeypatch):
    text = TRICKY * 3
    if kind == 'gpt2':
        ours = gpt2_tokenizer(monkeypatch)
    elif kind == 'byte':
        ours = BYTES
    else:
        ours = make_tokenizer({'kind': 'char', 'chars': ''.join(sorted(set(text)))})
    theirs = auto_tokenizer(tmp_path / 'hf', ours)
    ids = ours.encode(text).tolist()
    assert theirs(text)['input_ids'] == ids and theirs.decode(ids) == text
    if ours.end_of_text is not None:
        assert theirs('<|endoftext|>')['input_ids'] == [ours.end_of_text] == [theirs.eos_token_id]
    # and read back, by the package tokenizers
    back = make_tokenizer(huggingface.read_tokenizer(str(tmp_path / 'hf')))
    assert back.encode(text).tolist() == ids and back.decode(ids) == text
    assert back.end_of_text == ours.end_of_text
    assert back.token_bytes().tolist() == ours.token_bytes().tolist()
    assert same_tokenizer(back.state(), ours.state()) and same_tokenizer(ours.state(), back.state())


def test_a_character_vocabulary_names_a_rare_character_as_end_of_text(tmp_path):
    ours = make_tokenizer({'kind': 'char', 'chars': '\n $abc'})
    theirs = auto_tokenizer(tmp_path / 'hf', ours)
    text = 'ab\n\nc a\n'
    assert theirs(text + '$')['input_ids'] == ours.encode(text + '$').tolist()
    assert theirs.decode(ours.encode(text).tolist(), skip_special_tokens=True) == text
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == 2
    generation = json.loads((tmp_path / 'hf' / 'generation_config.json').read_text())
    assert generation['eos_token_id'] is None  # no text ends there


@pytest.mark.parametrize('state', [{'kind': 'byte'}, {'kind': 'char', 'chars': '\n !?abcdehilo'}])
def test_a_chat_is_exported_with_a_template_that_gives_our_ids(state, tmp_path):
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
    # and read back, it is a chat model still
    back = make_tokenizer(huggingface.read_tokenizer(str(tmp_path)))
    assert chat_format(back).render(messages)[0].tolist() == chat.render(messages)[0].tolist()


def test_a_pattern_is_exported_as_meant(tmp_path, monkeypatch):
    # possessive counts, as cl100k_base has them; the end of the text
    pattern = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
               r"\s++$|\s*[\r\n]|\s+(?!\S)|\s")
    state = gpt2_tokenizer(monkeypatch).state()
    ranks = b'\n'.join(state['ranks'].splitlines()[:20000])
    ours = make_tokenizer({'kind': 'tiktoken', 'name': 'mine', 'pat_str': pattern, 'ranks': ranks,
                           'special_tokens': {'<|endoftext|>': 20000}})
    theirs = auto_tokenizer(tmp_path, ours)
    for text in [TRICKY, '1234567', 'end  \n', '  \n\n x', 'line  \nline', 'line  ']:
        assert theirs(text)['input_ids'] == ours.encode(text).tolist(), text


# -----------------------------------------------------------------------------
# the Hub, a server on this machine that answers as it does


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Its models are the folders in hub.folder; hub.requests has the paths that were asked for."""
    folder = tmp_path / 'hub'
    requests = []

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path):
            repo, _, rest = path.lstrip('/').partition('/resolve/')
            self.known = (folder / repo).is_dir()
            self.file = folder / repo / rest.partition('/')[2]
            return str(self.file)

        def end_headers(self):
            self.send_header('X-Repo-Commit', '0' * 40)
            self.send_header('ETag', f'"{hashlib.sha1(self.path.encode()).hexdigest()}"')
            if not self.file.is_file():
                self.send_header('X-Error-Code', 'EntryNotFound' if self.known else 'RepoNotFound')
            super().end_headers()

        def log_message(self, *args):
            requests.append(self.path)

    def patch(**constants):
        """Set what huggingface_hub takes from the environment when it is imported."""
        for name, value in constants.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)

    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f'http://127.0.0.1:{server.server_port}'
    patch(ENDPOINT=url, HF_HUB_CACHE=str(tmp_path / 'cache'), HF_HUB_OFFLINE=False, HF_HUB_DISABLE_XET=True,
          HUGGINGFACE_CO_URL_TEMPLATE=url + '/{repo_id}/resolve/{revision}/{filename}')
    yield SimpleNamespace(folder=folder, requests=requests, patch=patch)
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub_is_loaded_and_then_offline(hub):
    folder = hub.folder / 'someone' / 'tiny-llama'
    theirs = llama_like(folder)
    prompt = transformers.AutoTokenizer.from_pretrained(folder)('the cat', return_tensors='pt')['input_ids']
    wanted = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)
    for offline in (False, True):
        hub.requests.clear()
        hub.patch(HF_HUB_OFFLINE=offline)
        net, tokenizer = checkpoint.load('someone/tiny-llama')
        ids = tokenizer.encode_prompt('the cat')
        assert ids == prompt[0].tolist() and ids[0] == 1
        assert torch.equal(net.generate(torch.tensor([ids]), 20, temperature=0), wanted)
        assert bool(hub.requests) != offline


def test_gpt2_by_its_name_is_openais_network_with_openais_tokenizer(hub, monkeypatch):
    theirs = openai_like(hub.folder / 'openai-community' / 'gpt2')
    tokenizer = gpt2_tokenizer(monkeypatch)
    net = GPT.from_pretrained('gpt2', dict(dropout=0.1)).eval()
    assert net.config.dropout == 0.1 and net.config.vocab_size == 50257
    _, loaded = checkpoint.load('gpt2')
    assert loaded.encode_prompt('All that') == tokenizer.encode_prompt('All that')
    idx = torch.tensor([tokenizer.encode_prompt('All that is gold')])
    with torch.no_grad():
        torch.testing.assert_close(net(idx)[0][:, -1], theirs(idx).logits[:, -1], atol=1e-4, rtol=1e-4)


def test_what_the_hub_lacks_is_a_line(hub):
    for offline in (False, True):
        hub.patch(HF_HUB_OFFLINE=offline)
        with pytest.raises(ValueError) as refused:
            checkpoint.read('someone/nothing')
        assert '\n' not in str(refused.value)


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'runs').mkdir()
    with pytest.raises(ValueError):
        checkpoint.find('runs/first')
    assert not hub.requests


# -----------------------------------------------------------------------------
# export.py


def test_export_writes_all_or_nothing_and_what_it_wrote_is_trained_on(data_dir, tmp_path, script, works):
    out, to = f"--out_dir={tmp_path / 'out'}", tmp_path / 'hf'
    flags = [*TINY, '--dataset=toy', f'--data_dir={data_dir}', '--arch=modern', '--n_kv_head=1']
    works('train.py', *flags, out)
    works('export.py', out, f'--to={to}', '--dtype=bfloat16')
    assert '| dataset | toy |' in (to / 'README.md').read_text()
    # finetune what was exported, on the same data, whose tokenizer is recognized
    works('train.py', *flags, f'--init_from={to}', f"--out_dir={tmp_path / 'again'}")
    before = sorted(path.name for path in to.iterdir())
    for wrong in ([out, f'--to={to}'], [out], [out, f"--to={tmp_path / 'x'}", '--dtype=q8_0'],
                  [f"--init_from={tmp_path / 'nothing'}", f"--to={tmp_path / 'x'}"]):
        refused = script('export.py', *wrong)
        assert refused.status == 2 and refused.err.startswith('error: ')
    assert sorted(path.name for path in to.iterdir()) == before
    assert not (tmp_path / 'x').exists()


def test_an_edit_of_the_network_shows_in_the_logits(data_dir, tmp_path, script, works, monkeypatch):
    out = f"--out_dir={tmp_path / 'out'}"
    works('train.py', *TINY, '--dataset=toy', f'--data_dir={data_dir}', out, '--max_iters=1')
    monkeypatch.setattr(model.MLP, 'forward', lambda self, x: 1.5 * self.c_proj(self.c_fc(x)))
    refused = script('export.py', out, f"--to={tmp_path / 'hf'}")
    assert refused.status == 2 and not (tmp_path / 'hf').exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['out']
