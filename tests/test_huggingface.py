"""What leaves through huggingface.py is what transformers makes of it: the same logits, loss, gradients, texts and tokens."""

import json

import pytest
import torch

import checkpoint
import huggingface
from conftest import own_process
from dataset import Dataset, TiktokenTokenizer, make_tokenizer, same_tokenizer
from model import GPT, GPTConfig

transformers = pytest.importorskip('transformers')
COMMON = dict(block_size=128, vocab_size=97, n_layer=2, n_head=4, n_embd=32)
SHAPES = {
    'gpt2': dict(arch='gpt2'),
    'gpt2 without bias': dict(arch='gpt2', bias=False),
    'gpt2 with the tanh gelu': dict(arch='gpt2', mlp='gelu_tanh', n_layer=3),
    'gpt2 untied, odd': dict(arch='gpt2', tie=False, vocab_size=131, mlp_width=72, n_head=1),
    'llama': dict(arch='llama'),
    'llama grouped': dict(arch='llama', n_kv_head=2, vocab_size=101, mlp_width=80),
    'llama tied, one key': dict(arch='llama', n_kv_head=1, tie=True, n_layer=1),
    'llama far': dict(arch='llama', rope_theta=500000.0, rope_scaling='llama3:8.0:1.0:4.0:16', norm_eps=1e-6),
    'llama stretched': dict(arch='llama', rope_scaling='linear:4.0'),
    'modern': dict(arch='modern'),
    'modern grouped': dict(arch='modern', n_kv_head=2, vocab_size=99, mlp_width=56),
    'modern tied, no cap': dict(arch='modern', tie=True, init='gpt2', softcap=0.0, n_head=2),
    'modern with gelu': dict(arch='modern', mlp='gelu', softcap=3.0, n_kv_head=1),
}
BYTES = {'kind': 'byte'}


def random_model(shape):
    """Weights that are all different from what anything starts with, biases and gains too."""
    torch.manual_seed(1)
    net = GPT(GPTConfig(**{**COMMON, **shape})).eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1 if 'ln_' in name and name.endswith('weight') else 0))
    return net


def exported(net, folder, tokenizer=BYTES, **kwargs):
    huggingface.write(str(folder), net.state_dict(), net.config, tokenizer, **kwargs)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype='auto', attn_implementation='eager').eval()


@pytest.mark.parametrize('shape', SHAPES)
def test_transformers_gives_the_same_logits_loss_gradients_and_text(shape, tmp_path):
    net = random_model(SHAPES[shape])
    theirs = exported(net, tmp_path / 'hf')
    assert type(theirs).__name__ == {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM', 'modern': 'NanoChatForCausalLM'}[net.config.arch]
    V = net.config.vocab_size
    idx = torch.randint(V, (3, 40), generator=torch.Generator().manual_seed(2))
    idx[0, :5] = 1  # NanoChat's padding by default; it must count here
    logits, loss = net(idx[:, :-1], idx[:, 1:])
    want = theirs(idx, labels=idx)
    torch.testing.assert_close(logits, want.logits[:, :-1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, want.loss, atol=1e-5, rtol=1e-5)
    loss.backward(), want.loss.backward()
    grads = huggingface.translate({name: p.grad for name, p in net.named_parameters()}, net.config, net.config.arch, there=True)
    got = {name: p.grad for name, p in theirs.named_parameters()}
    assert set(grads) - {'lm_head.weight'} <= set(got) and len(got) >= len(grads) - 1
    for name, grad in grads.items():
        if name in got:  # a tied matrix has one name there, another here
            torch.testing.assert_close(grad, got[name], atol=1e-5, rtol=1e-4, msg=lambda m: f'{name}: {m}')
    # text: their cache and generate(), our definition
    want = theirs.generate(idx[:2, :8], max_new_tokens=100, do_sample=False, eos_token_id=None, suppress_tokens=None)
    assert torch.equal(net.generate(idx[:2, :8], 100, temperature=0), want)


@pytest.mark.parametrize('shape', SHAPES)
def test_export_then_import_gives_identical_tensors_and_the_same_network(shape, tmp_path):
    net = random_model(SHAPES[shape])
    huggingface.write(str(tmp_path / 'hf'), net.state_dict(), net.config, BYTES)
    back = huggingface.read(str(tmp_path / 'hf'))
    weights = net.state_dict()
    assert set(back['model']) == set(weights) and all(torch.equal(p, weights[name]) for name, p in back['model'].items())
    again = GPTConfig(**back['model_args'])
    again.init = net.config.init  # how it began is not told there
    assert again == net.config
    assert make_tokenizer(back['tokenizer']).n_vocab == 257


def auto_tokenizer(folder, tokenizer):
    net = GPT(GPTConfig(block_size=64, vocab_size=-(-tokenizer.n_vocab // 64) * 64, n_layer=1, n_head=1, n_embd=4))
    huggingface.write(str(folder), net.state_dict(), net.config, tokenizer.state())
    return transformers.AutoTokenizer.from_pretrained(folder)


TRICKY = ("  two  spaces\n\n\n  lines\t\ttabs \r\nwindows\r\n  \n it's we'LL 'S don't 12345678 3.14 ... !!!\n\tif x:\n        y = 1  # \u00e9\u00fc\u6771\u4eac"
          "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 a\u0301 \u00a0nbsp\u3000wide   \n   end   ")


@pytest.mark.parametrize('name', ['gpt2', 'o200k_base', 'byte', 'char'])
def test_the_exported_tokenizer_gives_our_ids_and_text(name, tmp_path, test_data, gpt2):
    import gzip
    with gzip.open(test_data / 'gutenberg_val.jsonl.gz', 'rt', encoding='utf-8') as f:
        text = ''.join(json.loads(line)['text'] for line in f)
    text = text[:1_000_000] + TRICKY
    assert len(text) > 1_000_000
    if name == 'char':
        ours = make_tokenizer({'kind': 'char', 'chars': ''.join(sorted(set(text)))})
    else:
        ours = make_tokenizer({'kind': 'byte'} if name == 'byte' else {'kind': 'tiktoken', 'name': name})
    theirs = auto_tokenizer(tmp_path / 'hf', ours)
    ids = ours.encode(text).tolist()
    assert theirs(text)['input_ids'] == ids
    assert theirs.decode(ids) == text
    if ours.end_of_text is not None:
        assert theirs.eos_token_id == theirs.bos_token_id == ours.end_of_text and theirs('<|endoftext|>')['input_ids'] == [ours.end_of_text]
    # and read back, through tokenizers
    back = make_tokenizer(huggingface.read_tokenizer(str(tmp_path / 'hf')))
    assert back.encode(text).tolist() == ids and back.decode(ids) == text and back.end_of_text == ours.end_of_text
    assert back.n_vocab == ours.n_vocab and same_tokenizer(back.state(), ours.state()) and same_tokenizer(ours.state(), back.state())
    assert back.byte_lengths().tolist() == ours.byte_lengths().tolist()
    assert not same_tokenizer(back.state(), {'kind': 'char', 'chars': 'abc'})


def sentencepiece_like(folder, net=None):
    """A folder as Llama 2's: a vocabulary that marks spaces and puts one first, <s> before a prompt, bytes for odd characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    words = ['<unk>', '<s>', '</s>', *(f'<0x{b:02X}>' for b in range(256)), '▁', 't', 'h', 'e', 'c', 'a', '▁t', '▁th', '▁the', '▁c', 'at', '▁cat']
    vocab = {word: i for i, word in enumerate(words)}
    merges = [('▁', 't'), ('▁t', 'h'), ('▁th', 'e'), ('▁', 'c'), ('a', 't'), ('▁c', 'at')]
    tok = Tokenizer(models.BPE(vocab, merges, unk_token='<unk>', byte_fallback=True, fuse_unk=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    tok.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    tok.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:3]])
    tok.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 1)])
    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True)
    torch.manual_seed(3)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    (folder / 'tokenizer.json').write_text(tok.to_str())
    (folder / 'tokenizer_config.json').write_text(json.dumps({'bos_token': '<s>', 'eos_token': {'__type': 'AddedToken', 'content': '</s>', 'lstrip': False, 'normalized': False, 'rstrip': False, 'single_word': False}, 'tokenizer_class': 'PreTrainedTokenizerFast'}))
    return theirs


def openai_like(folder):
    """A folder as OpenAI's gpt2 on the Hub: short names, masks among the weights, a config.json of the old kind."""
    from safetensors.torch import save_file
    torch.manual_seed(4)
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=64)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    weights = {name.removeprefix('transformer.'): p.contiguous() for name, p in theirs.state_dict().items() if name != 'lm_head.weight'}
    weights.update({f'h.{i}.attn.bias': torch.ones(1, 1, 64, 64) for i in range(2)})
    folder.mkdir(parents=True)
    save_file(weights, folder / 'model.safetensors')
    (folder / 'config.json').write_text(json.dumps({'model_type': 'gpt2', 'n_embd': 8, 'n_layer': 2, 'n_head': 2, 'n_positions': 64, 'n_ctx': 64,
                                                    'vocab_size': 50257, 'activation_function': 'gelu_new', 'layer_norm_epsilon': 1e-5}))
    return theirs


@pytest.fixture
def hub(tmp_path):
    """A server on this machine that answers as the Hub does; its models are the folders in hub.folder."""
    import hashlib
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    folder = tmp_path / 'hub'

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            repo, _, rest = self.path.lstrip('/').partition('/resolve/')
            path = folder / repo / rest.partition('/')[2]
            requests.append((self.command, self.path))
            if not path.is_file():
                self.send_response(404)
                self.send_header('X-Error-Code', 'EntryNotFound' if (folder / repo).is_dir() else 'RepoNotFound')
                self.send_header('Content-Length', '0')
                return self.end_headers()
            content = path.read_bytes()
            self.send_response(200)
            for name, value in {'X-Repo-Commit': '0' * 40, 'ETag': f'"{hashlib.sha1(content).hexdigest()}"', 'Content-Length': str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == 'GET':
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    requests = []
    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.folder, server.requests = folder, requests
    server.env = {'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'HF_HOME': str(tmp_path / 'cache'), 'HF_HUB_OFFLINE': '0', 'HF_HUB_DISABLE_XET': '1'}
    yield server
    server.shutdown()


def test_a_llama_from_the_hub_is_sampled_and_finetuned_with_its_own_tokenizer(hub, tmp_path, tiny):
    theirs = sentencepiece_like(hub.folder / 'someone' / 'tiny-llama')
    text = tmp_path / 'text.txt'
    text.write_text('the cat, the cat and the cat\n' * 200)
    done = own_process('prepare.py', 'cats', f'--input={text}', '--tokenizer=hf:someone/tiny-llama', f"--data_dir={tmp_path / 'data'}", env=hub.env)
    assert done.status == 0, done.err
    meta = json.loads((tmp_path / 'data' / 'cats' / 'meta.json').read_text())
    assert meta['end_of_text'] == 1 and meta['vocab_size'] == 271 and sum(s['bytes'] for s in meta['splits'].values()) == text.stat().st_size + 1
    data = Dataset('cats', str(tmp_path / 'data'))
    tok = data.tokenizer()
    ids = data.train.windows([0], data.train.n)[0].tolist()
    assert ids[0] == 1 and ids[1:] == tok.encode(text.read_text()).tolist()[:len(ids) - 1] and tok.cut == 'nowhere'
    # train on from it, greedily the same text before
    flags = ['--device=cpu', '--dtype=float32', '--init_from=someone/tiny-llama', f"--out_dir={tmp_path / 'out'}"]
    train = [*flags, f"--data_dir={tmp_path / 'data'}", '--dataset=cats', '--max_iters=3', '--warmup_iters=0', '--batch_size=2', '--block_size=32',
             '--gradient_accumulation_steps=1', '--eval_iters=1', '--learning_rate=1e-3']
    done = own_process('train.py', *train, env=hub.env)
    assert done.status == 0 and 'llama, 2 layers' in done.out, done.err
    done = own_process('sample.py', *flags, '--start=the cat', '--temperature=0', '--max_new_tokens=20', '--num_samples=1', env=hub.env)
    assert done.status == 0, done.err
    auto = transformers.AutoTokenizer.from_pretrained(hub.folder / 'someone' / 'tiny-llama')
    prompt = auto('the cat', return_tensors='pt')['input_ids']
    assert prompt[0, 0] == 1
    want = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)[0]
    assert done.out.split('\n---')[0] == tok.decode(want[1:].tolist())  # <s> is not shown
    # what was trained goes back, its tokenizer as it came
    done = own_process('export.py', f"--out_dir={tmp_path / 'out'}", f"--to={tmp_path / 'hf'}")
    assert done.status == 0, done.err
    assert (tmp_path / 'hf' / 'tokenizer.json').read_text().strip() == (hub.folder / 'someone' / 'tiny-llama' / 'tokenizer.json').read_text()
    generation = json.loads((tmp_path / 'hf' / 'generation_config.json').read_text())
    assert generation['bos_token_id'] == 1 and generation['eos_token_id'] == [2, 1]
    # a second time nothing is fetched, and without the server the cache serves
    done = own_process('sample.py', *flags, '--start=the', '--max_new_tokens=2', env={**hub.env, 'HF_HUB_OFFLINE': '1'})
    assert done.status == 0, done.err
    # a dataset of another tokenizer is refused
    done = own_process('train.py', *flags, *tiny[:-1], f"--out_dir={tmp_path / 'other'}", env=hub.env)
    assert done.status == 2 and 'another tokenizer' in done.err and done.err.count('\n') == 1


def test_gpt2_by_its_name_is_openais_network(hub, tmp_path, gpt2):
    theirs = openai_like(hub.folder / 'openai-community' / 'gpt2')
    text = tmp_path / 'text.txt'
    text.write_text('All that glisters is not gold;\nOften have you heard that told.\n' * 200)
    assert own_process('prepare.py', 'merchant', f'--input={text}', f"--data_dir={tmp_path / 'data'}").status == 0
    flags = ['--device=cpu', '--dtype=float32', '--init_from=gpt2', f"--data_dir={tmp_path / 'data'}"]
    done = own_process('train.py', 'config/eval_gpt2.py', *flags, '--dataset=merchant', '--eval_iters=2', '--batch_size=2', '--block_size=32', env=hub.env)
    assert done.status == 0, done.err
    data = Dataset('merchant', str(tmp_path / 'data'))
    idx = torch.from_numpy(data.val.windows([0, 32, 64, 96], 33))
    with torch.no_grad():
        want = torch.nn.functional.cross_entropy(theirs(idx[:, :-1]).logits.flatten(0, 1), idx[:, 1:].flatten())
    assert f'val loss {want:.4f}' in done.out
    done = own_process('train.py', *flags, '--dataset=merchant', '--eval_only', '--block_size=65', '--batch_size=2', env=hub.env)
    assert done.status == 2 and '--block_size=64' in done.err
    done = own_process('sample.py', '--device=cpu', '--dtype=float32', '--init_from=gpt2', '--start=All that', '--temperature=0', '--max_new_tokens=8', '--num_samples=1', env=hub.env)
    prompt = torch.tensor([gpt2.encode('All that')])
    assert done.status == 0 and done.out.split('\n---')[0] == gpt2.decode(theirs.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0].tolist())


def test_what_the_hub_lacks_is_one_line(hub, tmp_path):
    for env, words in ((hub.env, ['no such model', 'someone/nothing']), ({**hub.env, 'HF_HUB_OFFLINE': '1'}, ['does not answer', 'folder'])):
        for name in ('sample.py', 'export.py'):
            done = own_process(name, '--init_from=someone/nothing', *([f"--to={tmp_path / 'x'}"] if name == 'export.py' else []), env=env)
            assert done.status == 2 and done.err.startswith('error: ') and done.err.count('\n') == 1 and all(word in done.err for word in words), done.err
    (hub.folder / 'someone' / 'pickled').mkdir(parents=True)
    (hub.folder / 'someone' / 'pickled' / 'config.json').write_text('{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}')
    (hub.folder / 'someone' / 'pickled' / 'pytorch_model.bin').write_bytes(b'cos\nsystem\n')
    done = own_process('sample.py', '--init_from=someone/pickled', env=hub.env)
    assert done.status == 2 and 'pickle' in done.err and 'save_pretrained' in done.err and done.err.count('\n') == 1
    assert not any(command == 'GET' and path.endswith('.bin') for command, path in hub.requests), 'it is not even fetched'
    assert any(command == 'GET' for command, path in hub.requests)
    assert not (tmp_path / 'x').exists()


def damage_tokenizer(folder, script):
    """Odd settings of a tokenizer are no reason to fail: then it has no such token."""
    for content in ('[]', 'null', '{"bos_token": ["a"], "eos_token": 7}'):
        (folder / 'tokenizer_config.json').write_text(content)
        done = script('sample.py', f'--init_from={folder}', '--device=cpu', '--max_new_tokens=2', '--num_samples=1', '--start=0')
        assert done.status == 0, done.err
        done = script('sample.py', f'--init_from={folder}', '--device=cpu', '--start=a')  # id 97, and the model has 97
        assert done.status == 2 and 'another tokenizer' in done.err and done.err.count('\n') == 1


def damage(folder, name, change):
    content = json.loads((folder / name).read_text())
    content.update(change)
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize('what, words', {
    'model_type': ['qwen3', 'gpt2, llama and nanochat'], 'activation': ['relu'], 'rope': ['yarn'], 'attention bias': ['attention_bias'],
    'head size': ['head_dim'], 'no layers': ['num_hidden_layers'], 'quantized': ['quantization_config'], 'shape': ['shape', '(97, 32)'],
    'missing': ['1 missing', 'up_proj'], 'extra': ['1 unknown', 'q_norm'], 'truncated': ['model.safetensors', 'cannot be read'], 'not json': ['config.json'],
    'no weights': ['no model.safetensors'], 'pickle': ['pickle', 'save_pretrained'], 'tokenizer': ['tokenizer.json'], 'no tokenizer': ['tokenizer'],
    'a type': ['cannot be read'], 'no heads': ['cannot be read'], 'a flag': ['tie is 0'], 'size': ['block_size'], 'layers': ['n_layer'], 'nan': ['norm_eps'],
    'index': ['no model.safetensors'], 'two lines': ['cannot be read'], 'token': [],
}.items(), ids=lambda v: v if isinstance(v, str) else '')
def test_a_folder_that_cannot_be_read_is_refused_in_one_line(what, words, tmp_path, script):
    from safetensors.torch import load_file, save_file
    folder = tmp_path / 'hf'
    net = random_model(SHAPES['llama'])
    huggingface.write(str(folder), net.state_dict(), net.config, BYTES)
    config, file = folder / 'config.json', folder / 'model.safetensors'
    changes = {'model_type': {'model_type': 'qwen3'}, 'activation': {'hidden_act': 'relu'}, 'attention bias': {'attention_bias': True}, 'head size': {'head_dim': 16},
               'rope': {'rope_parameters': {'rope_type': 'yarn', 'factor': 2.0}}, 'quantized': {'quantization_config': {'bits': 4}}, 'a type': {'hidden_size': 'many'}, 'no heads': {'num_attention_heads': 0},
               'a flag': {'tie_word_embeddings': 0}, 'size': {'max_position_embeddings': 10**12}, 'layers': {'num_hidden_layers': 10**9}, 'nan': {'rms_norm_eps': float('nan')},
               'two lines': {'intermediate_size': [1, 2]}}
    if what in changes:
        damage(folder, 'config.json', changes[what])
    elif what == 'no layers':
        content = json.loads(config.read_text())
        del content['num_hidden_layers']
        config.write_text(json.dumps(content))
    elif what in ('missing', 'extra', 'shape'):
        weights = load_file(file)
        if what == 'missing':
            del weights['model.layers.1.mlp.up_proj.weight']
        elif what == 'extra':
            weights['model.layers.0.self_attn.q_norm.weight'] = torch.ones(8)
        else:
            weights['lm_head.weight'] = weights['lm_head.weight'][:-1].clone()
        save_file(weights, file)
    elif what == 'truncated':
        file.write_bytes(file.read_bytes()[:-1000])
    elif what == 'not json':
        config.write_text('{"model_type": ')
    elif what in ('no weights', 'pickle'):
        file.unlink()
        if what == 'pickle':
            (folder / 'pytorch_model.bin').write_bytes(b'cos\nsystem\n')
    elif what == 'index':
        file.unlink()
        (folder / 'model.safetensors.index.json').write_text('{"weight_map": null}')
    elif what == 'token':
        return damage_tokenizer(folder, script)
    elif what == 'tokenizer':
        (folder / 'tokenizer.json').write_text('{"version": "1.0"}')
    elif what == 'no tokenizer':
        (folder / 'tokenizer.json').unlink()
    done = script('sample.py', f'--init_from={folder}', '--device=cpu')
    assert done.status == 2 and done.err.startswith('error: ') and done.err.count('\n') == 1 and all(word in done.err for word in words), done.err


def test_export_writes_all_or_nothing_and_in_pieces(tiny, tmp_path, script):
    assert script('train.py', *tiny, '--arch=modern', '--n_kv_head=1').status == 0
    out, to = f"--out_dir={tmp_path / 'out'}", tmp_path / 'hf'
    done = script('export.py', out, f'--to={to}', '--shard_gb=2e-5')
    assert done.status == 0 and 'NanoChatForCausalLM' in done.out and 'identical' in done.out, done.err
    files = sorted(p.name for p in to.glob('*.safetensors'))
    assert len(files) > 1 and (to / 'model.safetensors.index.json').exists() and all((to / file).stat().st_size < 2.2e4 for file in files)
    net, tok = checkpoint.load(str(tmp_path / 'out'))
    again, tok2 = checkpoint.load(str(to))
    assert all(torch.equal(p, q) for p, q in zip(net.state_dict().values(), again.state_dict().values(), strict=True))
    theirs, auto = transformers.AutoModelForCausalLM.from_pretrained(to), transformers.AutoTokenizer.from_pretrained(to)
    ids = torch.tensor([tok.encode_prompt('3 times ')])
    want = theirs.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()
    assert auto.decode(want) == tok.decode(net.generate(ids, 8, temperature=0)[0].tolist())
    # finetune what was exported, on the same data, whose tokenizer is recognised
    done = script('train.py', *tiny[:-1], f'--init_from={to}', f"--out_dir={tmp_path / 'again'}")
    assert done.status == 0 and 'modern' in done.out, done.err
    for flags, words in (([out, f'--to={to}'], ['not empty', 'another folder']), ([out], ['--to=']), ([out, f"--to={tmp_path / 'x'}", '--dtype=int8'], ['int8', 'bfloat16']),
                         ([f"--out_dir={tmp_path / 'none'}", f"--to={tmp_path / 'x'}"], ['none'])):
        done = script('export.py', *flags)
        assert done.status == 2 and done.err.startswith('error: ') and done.err.count('\n') == 1 and all(word in done.err for word in words), done.err
    assert script('train.py', *tiny, '--overwrite', '--arch=modern', '--positions=learned').status == 0
    done = script('export.py', out, f"--to={tmp_path / 'x'}")
    assert done.status == 2 and 'positions=learned' in done.err and done.err.count('\n') == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ['again', 'data', 'hf', 'out'], 'nothing half-written stays'


def test_an_out_dir_is_never_a_name_on_the_hub(script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ('sample.py', 'export.py'):
        done = script(name, '--out_dir=out/typo', *(['--to=x'] if name == 'export.py' else []))
        assert done.status == 2 and done.err.startswith('error: no checkpoint at out/typo') and done.err.count('\n') == 1


def test_a_pattern_with_possessive_counts_is_exported_as_meant(tmp_path, gpt2):
    import tiktoken
    pattern = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"  # cl100k_base's
    ours = TiktokenTokenizer(tiktoken.Encoding('mine', pat_str=pattern, mergeable_ranks=gpt2._mergeable_ranks, special_tokens={'<|endoftext|>': 50256}))
    theirs = auto_tokenizer(tmp_path / 'hf', ours)
    for text in (TRICKY, '1234567', 'end  \n', '  \n\n x', 'line  \nline'):
        assert theirs(text)['input_ids'] == ours.encode(text).tolist(), text


def test_half_precision_and_padding_arrive_as_meant(tmp_path):
    net = random_model(dict(arch='llama', vocab_size=320))  # 257 bytes, padded
    theirs = exported(net, tmp_path / 'hf', dtype='bfloat16')
    assert theirs.dtype == torch.bfloat16 and theirs.config.pad_token_id is None
    with torch.no_grad():
        theirs.lm_head.weight[300] += 100 * theirs.lm_head.weight[300].sign()
    out = theirs.generate(torch.tensor([[65, 66]]), max_new_tokens=50, do_sample=True, top_k=None)
    assert out.max() < 257
    back = huggingface.read(str(tmp_path / 'hf'))
    assert all(torch.equal(p, net.state_dict()[name].bfloat16()) for name, p in back['model'].items())
