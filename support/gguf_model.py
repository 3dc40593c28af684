"""What llama.cpp calls things: the sizes of a network and its weights, as a GGUF file names them. It has two
of the presets, GPT-2 and Llama."""

import dataclasses

import torch

from support.hf_names import preset_of
from model import rope_table

# our names, theirs; {} is the number of the layer
NAMES = {
    'transformer.wte': 'token_embd',
    'transformer.wpe': 'position_embd',
    'transformer.h.{}.ln_1': 'blk.{}.attn_norm',
    'transformer.h.{}.attn.c_attn': 'blk.{}.attn_qkv',
    'transformer.h.{}.attn.c_q': 'blk.{}.attn_q',
    'transformer.h.{}.attn.c_k': 'blk.{}.attn_k',
    'transformer.h.{}.attn.c_v': 'blk.{}.attn_v',
    'transformer.h.{}.attn.c_proj': 'blk.{}.attn_output',
    'transformer.h.{}.ln_2': 'blk.{}.ffn_norm',
    'transformer.h.{}.mlp.c_gate': 'blk.{}.ffn_gate',
    'transformer.h.{}.mlp.c_fc': 'blk.{}.ffn_up',
    'transformer.h.{}.mlp.c_proj': 'blk.{}.ffn_down',
    'transformer.ln_f': 'output_norm',
    'lm_head': 'output',
}


def arch_of(config):
    """The preset that llama.cpp has for a GPTConfig; ValueError if there is none."""
    arch = preset_of(config)
    if arch == 'modern':
        raise ValueError("llama.cpp has no NanoChat (--arch=modern). write a folder for transformers: "
                         "--to=FOLDER; or train with --arch=gpt2 or llama")
    if arch == 'gpt2' and config.mlp == 'relu2':
        raise ValueError("llama.cpp's GPT-2 has no squared ReLU (--mlp=relu2). write a folder for "
                         "transformers: --to=FOLDER; or train with --mlp=gelu_tanh")
    return arch


def sizes(config, arch):
    """The keys of a GGUF file that describe the network, {key: value}."""
    keys = {
        'general.architecture': arch,
        'context_length': config.block_size,
        'embedding_length': config.n_embd,
        'block_count': config.n_layer,
        'feed_forward_length': config.mlp_width,
        'attention.head_count': config.n_head,
        'attention.head_count_kv': config.n_kv_head,
        'vocab_size': config.vocab_size,
    }
    if arch == 'gpt2':
        keys['attention.layer_norm_epsilon'] = float(config.norm_eps)
    else:
        keys['attention.layer_norm_rms_epsilon'] = float(config.norm_eps)
        keys['rope.dimension_count'] = config.n_embd // config.n_head
        keys['rope.freq_base'] = float(config.rope_theta)
        kind, *numbers = config.rope_scaling.split(':')
        if kind == 'linear':
            keys.update({'rope.scaling.type': 'linear', 'rope.scaling.factor': float(numbers[0])})
    return {name if name.startswith('general.') else f'{arch}.{name}': value for name, value in keys.items()}


def tensors(weights, config, arch):
    """Yield (their name, float32 tensor) for our weights, a state_dict."""
    D = config.n_embd // config.n_head
    for ours, theirs in NAMES.items():
        for i in range(config.n_layer if '{}' in ours else 1):
            name, their_name = ours.format(i), theirs.format(i)
            if name + '.weight' not in weights or (config.tie and ours == 'lm_head'):
                continue
            p = weights[name + '.weight'].float()
            if name.endswith(('.c_q', '.c_k')):
                # its Llama rotates channels 2i and 2i + 1 of a head, where we rotate i and i + D/2
                p = p.view(-1, 2, D // 2, config.n_embd).transpose(1, 2).reshape(p.shape)
            yield their_name + '.weight', p
            if name + '.bias' in weights:
                yield their_name + '.bias', weights[name + '.bias'].float()
            elif arch == 'gpt2' and ours not in ('transformer.wte', 'transformer.wpe', 'lm_head'):
                yield their_name + '.bias', torch.zeros(p.shape[0])  # its GPT-2 always has biases
    if config.rope_scaling.startswith('llama3'):
        yield 'rope_freqs.weight', rope_factors(config)


def rope_factors(config):
    """By what rope_scaling divides each frequency, (D/2)."""
    inv_freq = []
    for scaling in ('none', config.rope_scaling):
        cos, sin = rope_table(dataclasses.replace(config, block_size=2, rope_scaling=scaling))
        inv_freq.append(torch.atan2(sin[1], cos[1]))  # the angle at position 1
    return inv_freq[0] / inv_freq[1]
