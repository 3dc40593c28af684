"""An exported model is the same model to transformers: the same logits, loss, gradients, texts and tokens."""

import dataclasses
import gzip
import hashlib
import json
import os
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from conftest import bytes_in, is_refused
from test_tasks import export
from torch.nn import functional as F

import model
from dataset import Dataset
from model import GPT, GPTConfig
from support import files, hf_export, huggingface, load
from support.huggingface import convert, weight_names
from support.tokenizer import TiktokenTokenizer, make_tokenizer, same_tokenizer

transformers = pytest.importorskip('transformers')
huggingface_hub = pytest.importorskip('huggingface_hub')
COMMON = dict(block_size=128, vocab_size=97, n_layer=2, n_head=4, n_embd=32)
SHAPES = {
    'gpt2': dict(arch='gpt2'),
    'gpt2 without bias': dict(arch='gpt2', bias=False, mlp='gelu_tanh', n_layer=3),
    'gpt2 untied, odd': dict(arch='gpt2', tie=False, vocab_size=131, mlp_width=72, n_head=1),
    'llama': dict(arch='llama', n_kv_head=2, vocab_size=101, mlp_width=80),
    'llama far': dict(arch='llama', rope_theta=5e5, rope_scaling='llama3:8.0:1.0:4.0:16', norm_eps=1e-6),
    'llama tied': dict(arch='llama', n_kv_head=1, tie=True, n_layer=1),
    'modern': dict(arch='modern', n_kv_head=2, vocab_size=99, mlp_width=56),
    'modern tied': dict(arch='modern', tie=True, init='gpt2', mlp='gelu', softcap=0.0, n_kv_head=1),
}
BYTES = {'kind': 'byte'}


def random_model(shape):
    """A model all of whose weights, biases and gains too, differ from what anything starts with."""
    torch.manual_seed(1)
    net = GPT(GPTConfig(**{**COMMON, **shape})).eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1 if 'ln_' in name and name.endswith('weight') else 0))
    return net


def exported(net, folder, tokenizer=BYTES, **kwargs):
    return export(net, tokenizer, folder, **kwargs)


@pytest.mark.parametrize('shape', SHAPES)
def test_a_folder_is_the_same_network_to_transformers_and_read_back(shape, tmp_path):
    """The same logits, loss, gradients and greedy text there; the same tensors and sizes here."""
    net = random_model(SHAPES[shape])
    theirs = exported(net, tmp_path / 'hf')
    c = net.config
    assert type(theirs).__name__ == huggingface.CLASSES[c.arch]
    idx = torch.randint(c.vocab_size, (3, 40), generator=torch.Generator().manual_seed(2))
    idx[0, :5] = 1  # NanoChat's padding by default; it must count here
    logits, loss = net(idx[:, :-1], idx[:, 1:])
    want = theirs(idx, labels=idx)
    torch.testing.assert_close(logits, want.logits[:, :-1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, want.loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    want.loss.backward()
    names, got = weight_names(c.arch, c.n_layer), {name: p.grad for name, p in theirs.named_parameters()}
    grads = {names[name]: convert(name, p.grad, c.n_embd, c.n_head, c.arch)
             for name, p in net.named_parameters()}
    assert set(grads) - {'lm_head.weight'} <= set(got)  # a tied matrix has one name there, another here
    for name in grads.keys() & got.keys():
        torch.testing.assert_close(grads[name], got[name], atol=1e-5, rtol=1e-4, msg=lambda m: f'{name}: {m}')
    text = theirs.generate(idx[:2, :8], max_new_tokens=20, do_sample=False, eos_token_id=None,
                           suppress_tokens=None)
    assert torch.equal(net.generate(idx[:2, :8], 20, temperature=0), text)
    back, weights = huggingface.read(f'{tmp_path}/hf'), net.state_dict()
    assert set(back['model']) == set(weights)
    assert all(torch.equal(p, weights[name]) for name, p in back['model'].items())
    again = load.model_config(GPT, back)
    again.init = c.init  # the folder does not tell how it was initialised
    assert again == c and make_tokenizer(back['tokenizer']).n_vocab == 257


def auto_tokenizer(folder, tokenizer):
    vocab_size = -(-tokenizer.n_vocab // 64) * 64
    net = GPT(GPTConfig(block_size=64, vocab_size=vocab_size, n_layer=1, n_head=1, n_embd=4))
    hf_export.write(str(folder), net.state_dict(), net.config, tokenizer.state())
    return transformers.AutoTokenizer.from_pretrained(folder)


TRICKY = ("  two  spaces\n\n\n  lines\t\ttabs \r\nwindows\r\n  \n it's we'LL 'S don't 12345678 3.14 ... !!!\n"
          "\tif x:\n        y = 1  # \u00e9\u00fc\u6771\u4eac\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
          "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 a\u0301 \u00a0nbsp\u3000wide   \n   end   ")


@pytest.mark.parametrize('name', ['gpt2', 'byte', 'char'])
def test_the_exported_tokenizer_gives_our_ids_and_text(name, tmp_path, test_data, request):
    with gzip.open(test_data / 'gutenberg_val.jsonl.gz', 'rt', encoding='utf-8') as f:
        text = json.loads(next(f))['text'][:50_000] + TRICKY
    if name == 'gpt2':
        request.getfixturevalue('gpt2')
    ours = make_tokenizer({'gpt2': {'kind': 'tiktoken', 'name': 'gpt2'}, 'byte': BYTES,
                           'char': {'kind': 'char', 'chars': ''.join(sorted(set(text)))}}[name])
    theirs = auto_tokenizer(tmp_path / 'hf', ours)
    ids = ours.encode(text).tolist()
    assert theirs(text)['input_ids'] == ids and theirs.decode(ids) == text
    if ours.end_of_text is not None:
        assert theirs('<|endoftext|>')['input_ids'] == [ours.end_of_text] == [theirs.eos_token_id]
    # and read back, by the package tokenizers
    back = make_tokenizer(huggingface.read_tokenizer(f'{tmp_path}/hf'))
    assert back.encode(text).tolist() == ids and back.decode(ids) == text
    assert back.end_of_text == ours.end_of_text and back.token_bytes().tolist() == ours.token_bytes().tolist()
    assert same_tokenizer(back.state(), ours.state()) and same_tokenizer(ours.state(), back.state())


def test_a_character_vocabulary_names_a_rare_character_as_end_of_text(tmp_path):
    ours = make_tokenizer({'kind': 'char', 'chars': '\n $abc'})
    theirs = auto_tokenizer(tmp_path / 'hf', ours)
    text = 'ab\n\nc a\n'
    assert theirs(text + '$')['input_ids'] == ours.encode(text + '$').tolist()
    assert theirs.decode(ours.encode(text).tolist(), skip_special_tokens=True) == text
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == 2
    assert files.read_json(tmp_path / 'hf' / 'generation_config.json')['eos_token_id'] is None, 'no text ends there'


def sentencepiece_like(folder):
    """A folder like Llama 2's: a vocabulary that marks spaces and puts one first, <s> before a prompt, bytes
    for characters that it lacks. Returns its model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    special = ['<unk>', '<s>', '</s>']
    words = [*special, *(f'<0x{b:02X}>' for b in range(256))]
    words += '▁ t h e c a ▁t ▁th ▁the ▁c at ▁cat'.split()
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
    eos = {'__type': 'AddedToken', 'content': '</s>', 'lstrip': False, 'normalized': False, 'rstrip': False,
           'single_word': False}
    settings = {'bos_token': '<s>', 'eos_token': eos, 'tokenizer_class': 'PreTrainedTokenizerFast'}
    (folder / 'tokenizer.json').write_text(tok.to_str())
    files.write_json(f'{folder}/tokenizer_config.json', settings)
    return theirs


def openai_like(folder):
    """A folder like OpenAI's gpt2 on the Hub: short names, masks among the weights, a config.json of the old
    kind. Returns its model."""
    from safetensors.torch import save_file
    torch.manual_seed(4)
    sizes = {'n_embd': 8, 'n_layer': 2, 'n_head': 2, 'n_positions': 64}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    weights = {name.removeprefix('transformer.'): p.contiguous() for name, p in theirs.state_dict().items()
               if name != 'lm_head.weight'}
    weights.update({f'h.{i}.attn.bias': torch.ones(1, 1, 64, 64) for i in range(2)})
    folder.mkdir(parents=True)
    save_file(weights, folder / 'model.safetensors')
    files.write_json(f'{folder}/config.json', {
        **sizes, 'model_type': 'gpt2', 'n_ctx': 64, 'vocab_size': 50257, 'activation_function': 'gelu_new',
        'layer_norm_epsilon': 1e-5})
    return theirs


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server on this machine that answers as the Hub does; its models are the folders in hub.folder."""
    folder, requests = tmp_path / 'hub', []

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path):
            repo, _, rest = path.lstrip('/').partition('/resolve/')
            self.known, self.file = (folder / repo).is_dir(), folder / repo / rest.partition('/')[2]
            return str(self.file)

        def end_headers(self):
            self.send_header('X-Repo-Commit', '0' * 40)
            self.send_header('ETag', f'"{hashlib.sha1(self.path.encode()).hexdigest()}"')
            if not self.file.is_file():
                self.send_header('X-Error-Code', 'EntryNotFound' if self.known else 'RepoNotFound')
            super().end_headers()

        def log_message(self, *args):
            requests.append((self.command, self.path))

    def patch(**constants):
        """Set what huggingface_hub takes from the environment when it is imported."""
        for name, value in constants.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f'http://127.0.0.1:{server.server_port}'
    patch(ENDPOINT=url, HF_HUB_CACHE=f'{tmp_path}/cache', HF_HUB_OFFLINE=False, HF_HUB_DISABLE_XET=True,
          HUGGINGFACE_CO_URL_TEMPLATE=url + '/{repo_id}/resolve/{revision}/{filename}')
    yield SimpleNamespace(folder=folder, requests=requests, url=url, patch=patch)
    server.shutdown()
    server.server_close()


def test_a_llama_from_the_hub_is_sampled_and_finetuned_as_it_came(hub, tmp_path, tiny, script, works):
    folder = hub.folder / 'someone' / 'tiny-llama'
    theirs = sentencepiece_like(folder)
    text = tmp_path / 'text.txt'
    text.write_text('the cat, the cat and the cat\n' * 200)
    data_dir, out_dir = f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}"
    works('prepare.py', 'cats', f'--input={text}', '--tokenizer=hf:someone/tiny-llama', data_dir)
    data = Dataset('cats', f'{tmp_path}/data')
    assert data.meta['end_of_text'] == 1 and data.meta['vocab_size'] == 271
    assert bytes_in(data) == text.stat().st_size + 1
    tok, ids = data.tokenizer(), data.train.windows([0], data.train.n)[0].tolist()
    assert ids[0] == 1 and ids[1:] == tok.encode(text.read_text()).tolist()[:len(ids) - 1]
    # greedily the same text, also from the cache without the server; <s> is not shown
    flags = ['--device=cpu', '--dtype=float32', '--init_from=someone/tiny-llama']
    prompt = transformers.AutoTokenizer.from_pretrained(folder)('the cat', return_tensors='pt')['input_ids']
    want = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)[0]
    for offline in (False, True):
        hub.requests.clear()
        hub.patch(HF_HUB_OFFLINE=offline)
        done = works('sample.py', *flags, '--start=the cat', '--temperature=0', '--max_new_tokens=20',
                     '--num_samples=1')
        assert done.out.split('\n---')[0] == tok.decode(want[1:].tolist())
    assert prompt[0, 0] == 1 and not hub.requests
    # a dataset with another tokenizer is refused, its own is finetuned on and exported as it came
    is_refused(script('train.py', *flags, *tiny), 'another tokenizer')
    works('train.py', *flags, out_dir, data_dir, '--dataset=cats', *tiny[2:6], '--max_iters=3',
          '--eval_iters=1', '--warmup_iters=0')
    works('export.py', out_dir, f"--to={tmp_path / 'hf'}")
    assert (tmp_path / 'hf' / 'tokenizer.json').read_text().strip() == (folder / 'tokenizer.json').read_text()
    generation = files.read_json(tmp_path / 'hf' / 'generation_config.json')
    assert generation['bos_token_id'] == 1 and generation['eos_token_id'] == [2, 1]


def test_gpt2_by_its_name_is_openais_network(hub, tmp_path, gpt2, works):
    theirs = openai_like(hub.folder / 'openai-community' / 'gpt2')
    ids = torch.randint(50257, (4 * 32 + 1,))  # a dataset of nanoGPT's, as long as the evaluation
    for split in ('train', 'val'):
        ids.numpy().astype('<u2').tofile(tmp_path / f'{split}.bin')
    flags = '--init_from=gpt2', '--device=cpu', '--dtype=float32'
    done = works('train.py', 'config/eval_gpt2.py', *flags, f'--data_dir={tmp_path.parent}',
                 f'--dataset={tmp_path.name}', '--batch_size=2', '--eval_iters=2', '--block_size=32')
    with torch.no_grad():
        logits = theirs(ids[:-1].view(4, 32)).logits
    assert f'val loss {F.cross_entropy(logits.flatten(0, 1), ids[1:]):.4f}' in done.out
    done = works('sample.py', *flags, '--start=All that', '--temperature=0', '--max_new_tokens=8',
                 '--num_samples=1')
    prompt = torch.tensor([gpt2.encode('All that')])
    want = theirs.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0].tolist()
    assert done.out.split('\n---')[0] == gpt2.decode(want)


def test_what_the_hub_lacks_is_one_line(hub, tmp_path, script):
    to = f"--to={tmp_path / 'x'}"
    for offline, words in ((False, ['RepositoryNotFoundError', hub.url]), (True, ['go online', 'folder'])):
        hub.patch(HF_HUB_OFFLINE=offline)
        is_refused(script('export.py', '--init_from=someone/nothing', to), 'someone/nothing', *words)
    hub.patch(HF_HUB_OFFLINE=False)
    folder = hub.folder / 'someone' / 'pickled'
    openai_like(folder)
    (folder / 'model.safetensors').unlink()
    (folder / 'pytorch_model.bin').write_bytes(b'cos\nsystem\n')
    is_refused(script('sample.py', '--init_from=someone/pickled'), 'is a pickle', 'save_pretrained')
    downloads = [path for command, path in hub.requests if command == 'GET']
    assert downloads and not any(path.endswith('.bin') for path in downloads)
    assert not (tmp_path / 'x').exists()


def edited(**changes):
    """Change fields of config.json."""
    def edit(folder):
        config = folder / 'config.json'
        files.write_json(f'{config}', {**files.read_json(config), **changes})
    return edit


def without(name):
    """Leave out a weight."""
    def write(folder):
        from safetensors.torch import load_file, save_file
        weights = load_file(folder / 'model.safetensors')
        del weights[name]
        save_file(weights, folder / 'model.safetensors')
    return write


def replaced(name, content):
    return lambda folder: (folder / name).write_bytes(content)


DAMAGES = {
    'model_type': (edited(model_type='qwen3'), 'gpt2, llama and nanochat'),
    'rope': (edited(rope_parameters={'rope_type': 'yarn', 'factor': 2.0}), 'yarn'),
    'attention': (edited(partial_rotary_factor=0.5), 'partial_rotary_factor'),
    'missing': (without('model.layers.1.mlp.up_proj.weight'), 'mlp.c_fc'),
    'truncated': (replaced('model.safetensors', bytes(1000)), 'cannot be read'),
    'tokenizer': (replaced('tokenizer.json', b'{"version": "1.0"}'), 'tokenizer'),
}


@pytest.mark.parametrize('what', DAMAGES)
def test_a_folder_that_cannot_be_read_is_refused_in_one_line(what, tmp_path, script):
    damage, word = DAMAGES[what]
    net = random_model(SHAPES['llama'])
    hf_export.write(str(tmp_path), net.state_dict(), net.config, BYTES)
    damage(tmp_path)
    is_refused(script('sample.py', f'--init_from={tmp_path}', '--device=cpu'), word)


def test_export_writes_all_or_nothing(tiny, tmp_path, script, works):
    works('train.py', *tiny, '--arch=modern', '--n_kv_head=1')
    out, to = f"--out_dir={tmp_path / 'out'}", tmp_path / 'hf'
    assert 'identical' in works('export.py', out, f'--to={to}').out
    assert '| dataset | tiny |' in (to / 'README.md').read_text()
    # finetune what was exported, on the same data, whose tokenizer is recognised
    works('train.py', *tiny[:-1], f'--init_from={to}', f"--out_dir={tmp_path / 'again'}")
    x = f"--to={tmp_path / 'x'}"
    is_refused(script('export.py', out, f'--to={to}'), 'not empty', 'another')
    is_refused(script('export.py', out), '--to=')
    works('train.py', *tiny, '--overwrite', '--arch=local')
    is_refused(script('export.py', out, x), 'near=16384', 'NanoChatForCausalLM')
    is_refused(script('export.py', out, f"--to={tmp_path / 'x.gguf'}"), 'near=16384')
    assert sorted(os.listdir(tmp_path)) == 'again data hf out'.split(), 'nothing half-written stays'


def test_what_was_added_to_the_network_is_refused(tiny, tmp_path, script, works, monkeypatch):
    @dataclasses.dataclass
    class Mine(GPTConfig):
        window: int = 0
    assert huggingface.preset_of(Mine(arch='llama')) == 'llama'
    for arch in ('gpt2', 'llama', 'modern'):
        with pytest.raises(ValueError, match='window=8'):
            huggingface.preset_of(Mine(arch=arch, window=8))
    with pytest.raises(ValueError, match='wte2.weight is not in gpt2'):
        hf_export.their_weights({'transformer.wte2.weight': torch.zeros(1)}, Mine(), torch.float32)
    works('train.py', *tiny)
    # without a field it shows in the logits
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(model.CausalSelfAttention, 'scaled_dot_product_attention',
                        staticmethod(lambda *args, **kwargs: 1.5 * real(*args, **kwargs)))
    is_refused(script('export.py', f"--out_dir={tmp_path / 'out'}", f"--to={tmp_path / 'hf'}"), 'computes something else')
    assert not (tmp_path / 'hf').exists()


def test_a_pattern_is_exported_as_meant(tmp_path, gpt2):
    # possessive counts, as cl100k_base has them; the end of the text
    pattern = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
               r"\s++$|\s*[\r\n]|\s+(?!\S)|\s")
    import tiktoken
    ranks = {token: rank for token, rank in gpt2._mergeable_ranks.items() if rank < 20000}
    ours = TiktokenTokenizer(tiktoken.Encoding('mine', pat_str=pattern, mergeable_ranks=ranks,
                                               special_tokens={'<|endoftext|>': len(ranks)}))
    theirs = auto_tokenizer(tmp_path, ours)
    for text in (TRICKY, '1234567', 'end  \n', '  \n\n x', 'line  \nline', 'line  '):
        assert theirs(text)['input_ids'] == ours.encode(text).tolist(), text


def test_half_precision_and_padding_arrive_as_meant(tmp_path):
    net = random_model(dict(arch='llama', vocab_size=320))  # 257 bytes, padded
    theirs = exported(net, tmp_path / 'hf', dtype='bfloat16')
    assert theirs.dtype == torch.bfloat16 and theirs.config.pad_token_id is None
    with torch.no_grad():
        theirs.lm_head.weight[300] += 100 * theirs.lm_head.weight[300].sign()
    assert theirs.generate(torch.tensor([[65, 66]]), max_new_tokens=50, do_sample=True, top_k=None).max() < 257
    back = huggingface.read(f'{tmp_path}/hf')
    assert all(torch.equal(p, net.state_dict()[name].bfloat16()) for name, p in back['model'].items())
