"""
A GGUF file: one file with weights, sizes and tokenizer, which llama.cpp and what is built on it open. It has
two of the presets, GPT-2 and Llama, and of tokenizers byte-level BPE, where it splits a text only by the
regular expressions that it knows by name, and RWKV's. Tokenizers from Hugging Face are left to its own
converter, which knows many of them by checksum.
"""

import dataclasses
import json

import torch

from model import rope_table
from support.chat import chat_format
from support.hf_export import their_weights, to_tokenizer_json
from support.huggingface import convert, preset_of
from support.tokenizer import PATTERN, make_tokenizer

KINDS = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'q8_0': 'Q8_0'}
NORMAL, CONTROL, UNUSED = 1, 3, 5  # llama.cpp's types of tokens
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# tiktoken's pattern, and llama.cpp's name for it. Ours (GPT-4's) differs from Llama 3's in one thing: it
# takes white space at the end of the text as one piece, also if a new line is inside
PRE = {GPT2_PATTERN: 'gpt-2', PATTERN: 'llama-bpe'}
# a list of merges must not be empty; this one cannot occur, as letters are merged one by one
NO_MERGES = ['<|no <|merges']


def write(path, weights, config, tokenizer_state, dtype, name):
    """Write a model (our weights, its GPTConfig, its tokenizer's state) to `path`. dtype: of the matrices;
    vectors and learned positions stay float32, as with llama.cpp's own converter. Returns the preset;
    ValueError if llama.cpp has no such network or tokenizer."""
    import gguf
    arch = preset_of(config)
    if arch == 'modern' or config.mlp == 'relu2':
        raise ValueError("llama.cpp has no NanoChat (--arch=modern) and no squared ReLU (--mlp=relu2). write "
                         "it for transformers: --to=FOLDER; or train --arch=gpt2 or llama, --mlp=gelu_tanh")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in {**sizes(config, arch), **vocabulary(tokenizer_state, config.vocab_size)}.items():
        kind = gguf.GGUFValueType
        # llama.cpp wants whole numbers unsigned
        writer.add_key_value(key, value, kind.UINT32 if type(value) is int else kind.get_type(value))
    for tensor_name, p in tensors(weights, config, arch):
        kind = KINDS[dtype]
        if p.dim() == 1 or tensor_name.startswith('position_embd'):
            kind = 'F32'
        elif dtype == 'q8_0' and p.shape[1] % 32:  # a quantized row has blocks of 32 numbers
            kind = 'F16'
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(tensor_name, gguf.quants.quantize(p.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arch


# -----------------------------------------------------------------------------
# the network


def sizes(config, arch):
    """The keys of a GGUF file that describe the network, {key: value}."""
    keys = {
        'context_length': config.block_size,
        'embedding_length': config.n_embd,
        'block_count': config.n_layer,
        'feed_forward_length': config.mlp_width,
        'attention.head_count': config.n_head,
        'attention.head_count_kv': config.n_kv_head,
        'vocab_size': config.vocab_size,
    }
    if arch == 'gpt2':
        keys['attention.layer_norm_epsilon'] = config.norm_eps
    else:
        keys['attention.layer_norm_rms_epsilon'] = config.norm_eps
        keys['rope.dimension_count'] = config.n_embd // config.n_head
        keys['rope.freq_base'] = float(config.rope_theta)
    return {f'{arch}.{name}': value for name, value in keys.items()}


def tensors(weights, config, arch):
    """Yield (their name, float32 tensor) for our weights, a state_dict."""
    import gguf
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.n_layer)
    D = config.n_embd // config.n_head
    for name, p in their_weights(weights, config, torch.float32).items():
        part, _, kind = name.rpartition('.')
        if arch == 'gpt2':  # matrices are as ours again
            p = convert(name, p, config.n_embd, config.n_head, arch)
        if part.endswith(('q_proj', 'k_proj')):
            # its Llama rotates channels 2i and 2i + 1 of a head, where we rotate i and i + D/2
            p = p.view(-1, 2, D // 2, config.n_embd).transpose(1, 2).reshape(p.shape)
        yield f'{names.get_name(part)}.{kind}', p
    if config.rope_scaling.startswith('llama3'):
        yield 'rope_freqs.weight', rope_factors(config)


def rope_factors(config):
    """By what rope_scaling divides each frequency, (D/2)."""
    inv_freq = []
    for scaling in ('none', config.rope_scaling):
        cos, sin = rope_table(dataclasses.replace(config, block_size=2, rope_scaling=scaling))
        inv_freq.append(torch.atan2(sin[1], cos[1]))  # the angle at position 1
    return inv_freq[0] / inv_freq[1]


# -----------------------------------------------------------------------------
# the tokenizer


def vocabulary(state, vocab_size):
    """{key: value} for the tokenizer with this state and a network with vocab_size ids. ValueError if
    llama.cpp has no such tokenizer."""
    tokenizer, kind = make_tokenizer(state), state['kind']
    if kind == 'char' and not tokenizer.stop_ids:
        return characters(state['chars'], vocab_size)
    pre = 'gpt-2'  # of single bytes: there is nothing to merge
    if kind != 'byte':
        pre = PRE.get(tokenizer.encoding._pat_str) if kind == 'tiktoken' else None
    if pre is None:
        raise ValueError(f"its tokenizer ({state.get('name', kind)}) is not one that we can describe to "
                         "llama.cpp. train with --tokenizer=byte, gpt2 or bpe:N; or write a folder, "
                         "--to=FOLDER, and try llama.cpp's convert_hf_to_gguf.py")
    content = json.loads(to_tokenizer_json(tokenizer, 0)[0])
    words = {id: (token, NORMAL) for token, id in content['model']['vocab'].items()}
    words.update({token['id']: (token['content'], CONTROL) for token in content['added_tokens']})
    words = {i: words.get(i, (f'[PAD{i}]', UNUSED)) for i in range(vocab_size)}
    keys = {
        'tokenizer.ggml.model': 'gpt2',
        'tokenizer.ggml.pre': pre,
        **tokens(words),
        'tokenizer.ggml.merges': [' '.join(pair) for pair in content['model']['merges']] or NO_MERGES,
        'tokenizer.ggml.add_bos_token': False,
    }
    if tokenizer.end_of_text is not None:
        keys['tokenizer.ggml.bos_token_id'] = tokenizer.end_of_text
        keys['tokenizer.ggml.eos_token_id'] = tokenizer.stop_ids[0]
    if form := chat_format(tokenizer):
        keys['tokenizer.chat_template'] = form.template
    return keys


def characters(chars, vocab_size):
    """The keys of one id per character: RWKV's tokenizer, which takes the longest token that fits, and is the
    only one for which llama.cpp does not insist on an id that ends a text."""
    spelled = (''.join(rf'\x{byte:02x}' for byte in char.encode('utf-8', 'surrogatepass')) for char in chars)
    words = {i: (text, NORMAL) for i, text in enumerate(spelled)}
    # no text has the byte \xff
    words.update({i: (rf'\xff{i}', UNUSED) for i in range(len(chars), vocab_size)})
    return {'tokenizer.ggml.model': 'rwkv', **tokens(words)}


def tokens(words):
    return {'tokenizer.ggml.tokens': [text for text, _ in words.values()],
            'tokenizer.ggml.token_type': [kind for _, kind in words.values()]}
