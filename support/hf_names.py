"""
What Hugging Face calls things: the names of the weights and the fields of config.json, in both directions.
Three presets are architectures of transformers: GPT-2, Llama and NanoChat.
"""

import re


CLASSES = {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM', 'modern': 'NanoChatForCausalLM'}
PRESET_OF = {'gpt2': 'gpt2', 'llama': 'llama', 'nanochat': 'modern'}  # by model_type

# Our names, Llama's names; {} is the number of the layer. GPT-2's names are ours.
LLAMA = {
    'transformer.wte': 'model.embed_tokens',
    'transformer.wpe': None,
    'transformer.h.{}.ln_1': 'model.layers.{}.input_layernorm',
    'transformer.h.{}.attn.c_attn': None,
    'transformer.h.{}.attn.c_q': 'model.layers.{}.self_attn.q_proj',
    'transformer.h.{}.attn.c_k': 'model.layers.{}.self_attn.k_proj',
    'transformer.h.{}.attn.c_v': 'model.layers.{}.self_attn.v_proj',
    'transformer.h.{}.attn.c_proj': 'model.layers.{}.self_attn.o_proj',
    'transformer.h.{}.ln_2': 'model.layers.{}.post_attention_layernorm',
    'transformer.h.{}.mlp.c_gate': 'model.layers.{}.mlp.gate_proj',
    'transformer.h.{}.mlp.c_fc': 'model.layers.{}.mlp.up_proj',
    'transformer.h.{}.mlp.c_proj': 'model.layers.{}.mlp.down_proj',
    'transformer.ln_f': 'model.norm',
    'lm_head': 'lm_head',
}
# NanoChat's names are Llama's, except
NANOCHAT = {
    'transformer.h.{}.mlp.c_fc': 'model.layers.{}.mlp.fc1',
    'transformer.h.{}.mlp.c_proj': 'model.layers.{}.mlp.fc2',
}
TABLES = {'gpt2': {name: name for name in LLAMA}, 'llama': LLAMA, 'modern': {**LLAMA, **NANOCHAT}}

# the parts in which each of the three leaves no choice
FIXED = {
    'gpt2': dict(norm='layernorm', positions='learned', fused_qkv=True, embd_norm=False, qk_norm=False,
                 softcap=0.0, near=0, near_layers=0),
    'llama': dict(norm='rmsnorm', positions='rope', fused_qkv=False, embd_norm=False, qk_norm=False,
                  softcap=0.0, mlp='swiglu', near=0, near_layers=0),
    'modern': dict(norm='rmsnorm_plain', positions='rope', fused_qkv=False, embd_norm=True, qk_norm=True,
                   near=0, near_layers=0),
}
ACTIVATIONS = {'gelu': 'gelu', 'gelu_tanh': 'gelu_new', 'relu2': 'relu2'}  # ours, theirs
OUR_ACTIVATIONS = {'gelu': 'gelu', 'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh',
                   'gelu_fast': 'gelu_tanh', 'relu2': 'relu2'}
ROPE_KEYS = {
    'default': [],
    'linear': ['factor'],
    'llama3': ['factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'],
}
# fields of a config.json that change the network, and the only value that we read
ONLY = {'quantization_config': None, 'attention_bias': False, 'mlp_bias': False, 'add_cross_attention': False,
        'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False}


# -----------------------------------------------------------------------------
# weights


def weight_names(arch, n_layer):
    """{our name: their name} of all weights that a model of this preset may have."""
    names = {}
    for ours, theirs in TABLES[arch].items():
        layers = range(n_layer) if '{}' in ours else [0]
        for kind in ('.weight', '.bias'):
            if theirs:
                names.update({ours.format(i) + kind: theirs.format(i) + kind for i in layers})
    return names


def convert(name, p, config, arch):
    """The weight `p`, `name` by our names, from our layout into theirs. The same call converts it back."""
    if arch == 'gpt2' and re.search(r'\.(c_attn|c_proj|c_fc)\.weight$', name):
        p = p.t()  # OpenAI's "Conv1D" is a Linear with its matrix transposed
    if arch == 'modern' and re.search(r'\.c_[qk]\.weight$', name):
        # NanoChat rotates by the opposite angle. Exchanging the two halves of each head does the same.
        D = config.n_embd // config.n_head
        p = p.view(-1, 2, D // 2, config.n_embd).flip(1).reshape(p.shape)
    return p.contiguous()


# -----------------------------------------------------------------------------
# config.json


def preset_of(config):
    """The preset whose architecture in transformers has the parts of a GPTConfig. ValueError if none has."""
    differences = {}
    for arch, fixed in FIXED.items():
        differences[arch] = [f"{name}={getattr(config, name)} (there: {value})"
                             for name, value in fixed.items() if getattr(config, name) != value]
    arch = min(differences, key=lambda arch: len(differences[arch]))
    wrong = differences[arch]
    if arch != 'llama' and config.mlp not in ACTIVATIONS:
        wrong.append(f"mlp={config.mlp} (there: {', '.join(ACTIVATIONS)})")
    if arch == 'gpt2' and config.n_kv_head != config.n_head:
        wrong.append(f"n_kv_head={config.n_kv_head} (there: the same as n_head)")
    if wrong:
        raise ValueError(f"no architecture of transformers has these parts; the nearest, {CLASSES[arch]}, "
                         f"differs in {', '.join(wrong)}. train with one of the presets: --arch=gpt2, "
                         "llama or modern")
    return arch


def to_config(config, tokenizer, dtype):
    """The config.json, a dict, for a GPTConfig. ValueError if transformers has no such architecture."""
    arch = preset_of(config)
    common = {
        'architectures': [CLASSES[arch]],
        'model_type': 'nanochat' if arch == 'modern' else arch,
        'vocab_size': config.vocab_size,
        'bos_token_id': tokenizer.end_of_text,
        'eos_token_id': tokenizer.stop_ids[0] if tokenizer.stop_ids else None,
        'pad_token_id': None,  # NanoChat's default is 1, and row 1 of its embedding would not train
        'tie_word_embeddings': config.tie,
        'initializer_range': 0.02,
        'use_cache': True,
        'dtype': dtype,
        'torch_dtype': dtype,  # the same for transformers 4
    }
    return {**common, **(to_gpt2(config) if arch == 'gpt2' else to_llama(config, arch))}


def to_gpt2(config):
    return {
        'n_positions': config.block_size,
        'n_ctx': config.block_size,  # the same, for llama.cpp's converter
        'n_embd': config.n_embd,
        'n_layer': config.n_layer,
        'n_head': config.n_head,
        'n_inner': config.mlp_width,
        'activation_function': ACTIVATIONS[config.mlp],
        'layer_norm_epsilon': config.norm_eps,
        'resid_pdrop': config.dropout,
        'embd_pdrop': config.dropout,
        'attn_pdrop': config.dropout,
    }


def to_llama(config, arch):
    """What config.json says of a Llama, or of a NanoChat."""
    kind = config.rope_scaling.split(':')[0]
    numbers = [float(number) for number in config.rope_scaling.split(':')[1:]]
    if kind == 'llama3':
        numbers[-1] = int(numbers[-1])
    scaling = None
    if kind != 'none':
        scaling = {'rope_type': kind, **dict(zip(ROPE_KEYS[kind], numbers))}
    if arch == 'llama':
        last = {'mlp_bias': False}
    else:
        last = {'final_logit_softcapping': config.softcap or None}
    return {
        'max_position_embeddings': config.block_size,
        'hidden_size': config.n_embd,
        'num_hidden_layers': config.n_layer,
        'num_attention_heads': config.n_head,
        'num_key_value_heads': config.n_kv_head,
        'head_dim': config.n_embd // config.n_head,
        'intermediate_size': config.mlp_width,
        'hidden_act': 'silu' if arch == 'llama' else ACTIVATIONS[config.mlp],
        'rms_norm_eps': config.norm_eps,
        'attention_dropout': config.dropout,
        'attention_bias': False,
        'rope_parameters': {**(scaling or {'rope_type': 'default'}), 'rope_theta': config.rope_theta},
        'rope_theta': config.rope_theta,  # this and the next for transformers 4
        'rope_scaling': scaling,
        **last,
    }


def from_config(theirs):
    """The arguments of a GPTConfig for a config.json, a dict. ValueError or KeyError if there are none."""
    kind = theirs.get('model_type')
    if kind not in PRESET_OF:
        raise ValueError(f"its model_type is {kind!r}; flatgpt reads gpt2, llama and nanochat")
    for name, value in ONLY.items():
        if theirs.get(name) not in (None, value):
            raise ValueError(f"its {name} is {theirs[name]!r}, which flatgpt's network does not have")
    return from_gpt2(theirs) if kind == 'gpt2' else from_llama(theirs, PRESET_OF[kind])


def our_activation(name):
    if name not in OUR_ACTIVATIONS:
        raise ValueError(f"its activation is {name!r}; flatgpt has {', '.join(ACTIVATIONS.values())}")
    return OUR_ACTIVATIONS[name]


def from_gpt2(theirs):
    # transformers' defaults, for what an old config.json leaves out
    c = dict(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12, n_inner=None,
             activation_function='gelu_new', layer_norm_epsilon=1e-5, tie_word_embeddings=True)
    c.update(theirs)
    return dict(
        arch='gpt2', bias=True, block_size=c['n_positions'], vocab_size=c['vocab_size'],
        n_layer=c['n_layer'], n_head=c['n_head'], n_embd=c['n_embd'],
        mlp=our_activation(c['activation_function']), mlp_width=c['n_inner'] or 4 * c['n_embd'],
        norm_eps=c['layer_norm_epsilon'], tie=c['tie_word_embeddings'])


def from_llama(theirs, arch):
    # transformers' defaults
    c = dict(num_key_value_heads=None, max_position_embeddings=2048, rms_norm_eps=1e-6,
             tie_word_embeddings=False, final_logit_softcapping=15.0,
             hidden_act='silu' if arch == 'llama' else 'relu2')
    c.update(theirs)
    H, C = c['num_attention_heads'], c['hidden_size']
    if (c.get('head_dim') or C // H) != C // H:
        raise ValueError(f"its head_dim is {c['head_dim']}; flatgpt's is hidden_size / heads = {C // H}")
    if arch == 'llama' and c['hidden_act'] != 'silu':
        raise ValueError(f"its activation is {c['hidden_act']!r}; flatgpt's gated MLP has silu")
    theta, scaling = read_rope(c)
    args = dict(
        arch=arch, bias=False, block_size=c['max_position_embeddings'], vocab_size=c['vocab_size'],
        n_layer=c['num_hidden_layers'], n_head=H, n_kv_head=c['num_key_value_heads'] or H, n_embd=C,
        mlp_width=c['intermediate_size'], norm_eps=c['rms_norm_eps'], rope_theta=theta,
        rope_scaling=scaling, tie=c['tie_word_embeddings'])
    if args['tie']:
        args['init'] = 'gpt2'  # init='modern' starts the head at zero
    if arch == 'modern':
        args['mlp'] = our_activation(c['hidden_act'])
        args['softcap'] = c['final_logit_softcapping'] or 0.0
    return args


def read_rope(c):
    """rope_theta and rope_scaling, as GPTConfig has them, of a config.json of transformers 4 or 5."""
    rope = {**(c.get('rope_scaling') or {}), **(c.get('rope_parameters') or {})}
    kind = rope.get('rope_type', rope.get('type', 'default'))
    part = rope.get('partial_rotary_factor', c.get('partial_rotary_factor'))
    if kind not in ROPE_KEYS or part not in (None, 1.0):
        raise ValueError(f"its rotary positions are of the kind {kind!r}; flatgpt has default, linear and "
                         "llama3, over whole heads")
    theta = float(rope.get('rope_theta') or c.get('rope_theta') or 10000.0)
    if kind == 'default':
        return theta, 'none'
    return theta, ':'.join([kind] + [str(rope[key]) for key in ROPE_KEYS[kind]])
