"""A GGUF file holds the same network and the same tokenizer. Read here by the packages gguf and transformers;
llama.cpp itself ran in dev/handover.py of commit bcd6dc1."""

import codecs
import re

import numpy as np
import pytest
import torch
from conftest import is_refused
from test_huggingface import BYTES, SHAPES, TRICKY, random_model, sentencepiece_like

from support import gguf as gguf_file, huggingface
from support.gguf import rope_factors, vocabulary
from support.choose_tokenizer import learn_bpe
from support.hf_tokenizer import bytes_to_unicode
from support.huggingface import to_config
from support.tokenizer import make_tokenizer

gguf, transformers = pytest.importorskip('gguf'), pytest.importorskip('transformers')
READABLE = {
    'gpt2': dict(arch='gpt2', mlp='gelu_tanh'),
    'gpt2 untied, without bias': dict(arch='gpt2', mlp='gelu_tanh', tie=False, bias=False, mlp_width=72),
    'llama': SHAPES['llama'],
    'llama tied, one key': dict(arch='llama', n_kv_head=1, tie=True, n_layer=1),
}


def written(net, path, tokenizer=BYTES, dtype='float32'):
    gguf_file.write(str(path), net.state_dict(), net.config, tokenizer, dtype, 'mine')
    return gguf.GGUFReader(path)


@pytest.mark.parametrize('shape', READABLE)
def test_transformers_reads_the_file_as_the_same_network(shape, tmp_path):
    pytest.importorskip('accelerate')
    net = random_model(dict(READABLE[shape], vocab_size=257))
    written(net, tmp_path / 'm.gguf')
    c, sizes = net.config, {}
    if c.arch == 'gpt2':  # it does not look for these in the file
        sizes = dict(n_positions=c.block_size, n_inner=c.mlp_width, tie_word_embeddings=c.tie)
    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path, gguf_file='m.gguf', dtype=torch.float32, **sizes).eval()
    idx = torch.randint(257, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(theirs(idx).logits, net(idx, full_logits=True)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('dtype, error', [
    ('float32', 0.0), ('float16', 2**-11), ('bfloat16', 2**-8), ('q8_0', 1 / 127)])
def test_matrices_have_the_dtype_that_was_asked_for_and_vectors_are_exact(dtype, error, tmp_path):
    net = random_model(dict(arch='gpt2', vocab_size=257, mlp_width=72))  # 72: no whole blocks of 32
    found = {tensor.name: tensor for tensor in written(net, tmp_path / 'm.gguf', dtype=dtype).tensors}
    matrix = gguf_file.KINDS[dtype]
    for ours, theirs, kind in (
            ('transformer.wte.weight', 'token_embd.weight', matrix),
            ('transformer.h.1.ln_2.bias', 'blk.1.ffn_norm.bias', 'F32'),
            ('transformer.h.1.mlp.c_proj.weight', 'blk.1.ffn_down.weight',
             'F16' if dtype == 'q8_0' else matrix)):
        tensor, p = found[theirs], net.state_dict()[ours].numpy()
        assert tensor.tensor_type.name == kind
        back = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        bound = {'F32': 0.0, 'F16': 2**-11}.get(kind, error)
        assert np.abs(back - p).max() <= bound * np.abs(p).max()
        assert (back == p).all() == (bound == 0.0)


def test_scaled_rotations_are_those_of_transformers(tmp_path):
    rope = pytest.importorskip('transformers.modeling_rope_utils')
    net = random_model(dict(SHAPES['llama far'], vocab_size=257))
    theirs = transformers.LlamaConfig(**to_config(net.config, make_tokenizer(BYTES), 'float32'))
    inv_freq, _ = rope.ROPE_INIT_FUNCTIONS['llama3'](theirs, 'cpu')
    plain = 500000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(rope_factors(net.config), plain / inv_freq, rtol=1e-4, atol=0.0)
    factors = next(t.data for t in written(net, tmp_path / 'm.gguf').tensors if t.name == 'rope_freqs.weight')
    assert np.array_equal(factors, rope_factors(net.config).numpy()) and len(set(factors.round(3))) > 1


def encode(keys, text, split):
    """The ids of a text by the vocabulary and merges in `keys`, as llama.cpp's BPE defines them; split: the
    regular expression of its pre-tokenizer."""
    regex, letters = pytest.importorskip('regex'), bytes_to_unicode()
    number = {token: i for i, token in enumerate(keys['tokenizer.ggml.tokens'])}
    rank = {tuple(merge.split(' ')): i for i, merge in enumerate(keys['tokenizer.ggml.merges'])}
    ids = []
    for word in regex.findall(split, text):
        parts = [letters[b] for b in word.encode()]
        while rank.keys() & (pairs := list(zip(parts, parts[1:]))):
            i = min(range(len(pairs)), key=lambda i: rank.get(pairs[i], len(rank)))
            parts[i:i + 2] = [''.join(pairs[i])]
        ids += [number[part] for part in parts]
    return ids


GPT2_SPLIT = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # llama.cpp's gpt-2
)
LLAMA_SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize('kind', ['gpt2', 'bpe', 'byte'])
def test_vocabulary_and_merges_give_our_ids(kind, request):
    text = "It's 12345 o'clock, we'LL go.\n\n\tdef f(x):\n        return x  # \u00e9\u6771\n" * 3
    text += TRICKY.strip()
    if kind == 'gpt2':
        request.getfixturevalue('gpt2')
    if kind == 'bpe':
        ours = learn_bpe(400, [text])
    else:
        ours = make_tokenizer(BYTES if kind == 'byte' else {'kind': 'tiktoken', 'name': 'gpt2'})
    vocab_size = ours.n_vocab + 7
    keys = vocabulary(ours.state(), vocab_size)
    assert keys['tokenizer.ggml.pre'] == ('llama-bpe' if kind == 'bpe' else 'gpt-2')
    assert encode(keys, text, LLAMA_SPLIT if kind == 'bpe' else GPT2_SPLIT) == ours.encode(text).tolist()
    names, types = keys['tokenizer.ggml.tokens'], keys['tokenizer.ggml.token_type']
    assert len(names) == len(types) == vocab_size == len(set(names))
    eot = ours.end_of_text
    assert keys['tokenizer.ggml.eos_token_id'] == keys['tokenizer.ggml.bos_token_id'] == eot
    assert names[eot] == '<|endoftext|>' and types[eot] == 3 and keys['tokenizer.ggml.add_bos_token'] is False
    assert types[ours.n_vocab:] == [5] * 7


def test_characters_are_the_words_of_a_vocabulary_without_an_end():
    chars = '\t\n\r !"\'\\~x\u00e9\u6771\U0001f600\u007f\u0085'
    keys = vocabulary({'kind': 'char', 'chars': chars}, len(chars) + 1)
    assert keys['tokenizer.ggml.model'] == 'rwkv' and not any('eos' in key for key in keys)
    words = keys['tokenizer.ggml.tokens']
    # as RWKV's files are read, where small hexadecimal digits alone are known
    back = [codecs.decode(word, 'unicode_escape').encode('latin-1') for word in words]
    assert back[:-1] == [c.encode() for c in chars]
    assert all(word.isascii() and not re.search(r'\\x[0-9a-f]?[A-F]', word) for word in words)
    with pytest.raises(UnicodeDecodeError):  # what only pads the vocabulary is no text
        back[-1].decode()


def test_a_tokenizer_from_hugging_face_is_left_to_llama_cpp(tmp_path):
    sentencepiece_like(tmp_path)
    with pytest.raises(ValueError, match='convert_hf_to_gguf'):
        vocabulary(huggingface.read_tokenizer(str(tmp_path)), 271)


def test_export_writes_a_gguf_file_or_nothing(tiny, tmp_path, script, works):
    works('train.py', *tiny)
    out, to, x = f"--out_dir={tmp_path / 'out'}", tmp_path / 'made' / 'm.gguf', f"--to={tmp_path / 'x.gguf'}"
    assert 'gpt2, 0.03M parameters in bfloat16' in works('export.py', out, f'--to={to}', '--dtype=bfloat16').out
    fields = gguf.GGUFReader(to).fields
    assert fields['gpt2.context_length'].contents() == 16 and fields['general.name'].contents() == 'm'
    is_refused(script('export.py', out, f'--to={to}'), 'm.gguf is there already')
    is_refused(script('export.py', out, f"--to={tmp_path / 'x'}", '--dtype=q8_0'), 'NAME.gguf')
    for flags, words in ((['--arch=modern'], ['NanoChat', '--arch=gpt2 or llama']),
                         (['--mlp=relu2'], ['--mlp=relu2', '--to=FOLDER', 'gelu_tanh'])):
        works('train.py', *tiny, '--overwrite', *flags)
        is_refused(script('export.py', out, x), *words)
    left = {path.name for folder in (tmp_path, to.parent) for path in folder.iterdir()}
    assert left == set('data made out m.gguf'.split()), 'nothing half-written stays'
