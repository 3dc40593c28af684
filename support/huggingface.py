"""
Hugging Face folders, read into our weights: what transformers calls things, in both directions, and the files
themselves. Three presets are architectures of transformers: GPT-2, Llama and NanoChat. Nothing in such a
folder is executed, and transformers is not needed. support/hf_export.py writes them.

    ckpt = huggingface.read('HuggingFaceTB/SmolLM2-135M')  # a folder, or a name on the Hub
"""

import json
import os
import re

import torch

from configurator import fail
from support.errors import first_line
from support.hf_tokenizer import guess_special
from support.hub_datasets import GPT2_NAMES, get_file, has_file, is_hub_name

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

# parts in which each of the three leaves no choice
PARTS = ('norm', 'positions', 'fused_qkv', 'embd_norm', 'qk_norm', 'near', 'near_layers')
# their fields, ours
FIELDS = {
    'gpt2': {'n_positions': 'block_size', 'n_ctx': 'block_size',  # the second for llama.cpp's converter
             'n_embd': 'n_embd', 'n_layer': 'n_layer', 'n_head': 'n_head', 'n_inner': 'mlp_width',
             'activation_function': 'mlp', 'layer_norm_epsilon': 'norm_eps'},
    'llama': {'max_position_embeddings': 'block_size', 'hidden_size': 'n_embd',
              'num_hidden_layers': 'n_layer', 'num_attention_heads': 'n_head',
              'num_key_value_heads': 'n_kv_head', 'intermediate_size': 'mlp_width', 'hidden_act': 'mlp',
              'rms_norm_eps': 'norm_eps'},
}
FIELDS['modern'] = FIELDS['llama']
# transformers' defaults, for what a config.json leaves out
LLAMA_DEFAULTS = dict(num_key_value_heads=None, max_position_embeddings=2048, rms_norm_eps=1e-6,
                      tie_word_embeddings=False, hidden_act='silu')
DEFAULTS = {
    'gpt2': dict(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12, n_inner=None,
                 activation_function='gelu_new', layer_norm_epsilon=1e-5, tie_word_embeddings=True),
    'llama': LLAMA_DEFAULTS,
    'modern': {**LLAMA_DEFAULTS, 'hidden_act': 'relu2', 'final_logit_softcapping': 15.0},
}
ACTIVATIONS = {'gelu': 'gelu', 'gelu_tanh': 'gelu_new', 'relu2': 'relu2', 'swiglu': 'silu'}  # ours, theirs
OUR_ACTIVATIONS = {**{theirs: ours for ours, theirs in ACTIVATIONS.items()},
                   'gelu_pytorch_tanh': 'gelu_tanh', 'gelu_fast': 'gelu_tanh'}
ROPE_KEYS = {
    'default': [],
    'linear': ['factor'],
    'llama3': ['factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'],
}
# fields of a config.json that change the network, and the only value that we read
ONLY = {'quantization_config': None, 'attention_bias': False, 'mlp_bias': False, 'add_cross_attention': False,
        'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False}
CONSTANTS = r'\.(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)$'  # that older versions saved as weights


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


def convert(name, p, n_embd, n_head, arch):
    """The weight `p`, `name` by our names, from our layout into theirs. The same call converts it back."""
    if arch == 'gpt2' and re.search(r'\.(c_attn|c_proj|c_fc)\.weight$', name):
        p = p.t()  # OpenAI's "Conv1D" is a Linear with its matrix transposed
    if arch == 'modern' and re.search(r'\.c_[qk]\.weight$', name):
        # NanoChat rotates by the opposite angle. Exchanging the two halves of each head does the same.
        p = p.view(-1, 2, n_embd // n_head // 2, n_embd).flip(1).reshape(p.shape)
    return p.contiguous()


# -----------------------------------------------------------------------------
# config.json


def preset_of(config):
    """The preset whose architecture in transformers has the parts of a GPTConfig. ValueError if none has."""
    wrong = {}
    for arch in CLASSES:
        there = type(config)(arch=arch)
        more = {'gpt2': ['softcap'], 'llama': ['softcap', 'mlp'], 'modern': []}[arch]
        wrong[arch] = [f"{name}={getattr(config, name)} (there: {getattr(there, name)})"
                       for name in (*PARTS, *more) if getattr(config, name) != getattr(there, name)]
        if arch != 'llama' and config.mlp == 'swiglu':
            wrong[arch].append("mlp=swiglu (there: gelu, gelu_tanh, relu2)")
        if arch == 'gpt2' and config.n_kv_head != config.n_head:
            wrong[arch].append(f"n_kv_head={config.n_kv_head} (there: the same as n_head)")
    arch = min(wrong, key=lambda arch: len(wrong[arch]))
    if wrong[arch]:
        raise ValueError(f"no architecture of transformers has these parts; the nearest, {CLASSES[arch]}, "
                         f"differs in {', '.join(wrong[arch])}. train with one of the presets: --arch=gpt2, "
                         "llama or modern")
    return arch


def to_config(config, tokenizer, dtype):
    """The config.json, a dict, for a GPTConfig. ValueError if transformers has no such architecture."""
    arch = preset_of(config)
    out = {
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
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS[arch].items()},
    }
    if arch == 'gpt2':
        dropouts = dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), config.dropout)
        return {**out, 'activation_function': ACTIVATIONS[config.mlp], **dropouts}
    kind, *numbers = config.rope_scaling.split(':')
    scaling = None
    if kind != 'none':
        scaling = {'rope_type': kind, **dict(zip(ROPE_KEYS[kind], map(float, numbers)))}
    if kind == 'llama3':
        scaling[ROPE_KEYS[kind][-1]] = int(numbers[-1].partition('.')[0])
    out.update({
        'head_dim': config.n_embd // config.n_head,
        'hidden_act': ACTIVATIONS[config.mlp],
        'attention_dropout': config.dropout,
        'attention_bias': False,
        'rope_parameters': {**(scaling or {'rope_type': 'default'}), 'rope_theta': config.rope_theta},
        'rope_theta': config.rope_theta,  # this and the next for transformers 4
        'rope_scaling': scaling,
    })
    last = {'mlp_bias': False} if arch == 'llama' else {'final_logit_softcapping': config.softcap or None}
    return {**out, **last}


def from_config(theirs):
    """The arguments of a GPTConfig for a config.json, a dict. An exception of some kind if there are none."""
    kind = theirs.get('model_type')
    if kind not in PRESET_OF:
        raise ValueError(f"its model_type is {kind!r}; flatgpt reads gpt2, llama and nanochat")
    for name, value in ONLY.items():
        if theirs.get(name) not in (None, value):
            raise ValueError(f"its {name} is {theirs[name]!r}, which flatgpt's network does not have")
    arch = PRESET_OF[kind]
    c = {**DEFAULTS[arch], **theirs}
    args = {ours: c[theirs] for theirs, ours in FIELDS[arch].items() if theirs != 'n_ctx'}
    args.update(arch=arch, bias=arch == 'gpt2', vocab_size=c['vocab_size'], tie=c['tie_word_embeddings'])
    if args['tie']:
        args['init'] = 'gpt2'  # init='modern' starts the head at zero
    activation, args['mlp'] = args['mlp'], OUR_ACTIVATIONS.get(args['mlp'])
    if not args['mlp'] or (args['mlp'] == 'swiglu') != (arch == 'llama'):
        raise ValueError(f"its activation is {activation!r}; flatgpt's {arch} has "
                         f"{'silu' if arch == 'llama' else 'gelu, gelu_new, relu2'}")
    if arch == 'modern':
        args['softcap'] = c['final_logit_softcapping'] or 0.0
    if arch != 'gpt2':
        head_dim = args['n_embd'] // args['n_head']
        if (c.get('head_dim') or head_dim) != head_dim:
            raise ValueError(f"its head_dim is {c['head_dim']}; flatgpt's is hidden_size / heads = "
                             f"{head_dim}")
        args['rope_theta'], args['rope_scaling'] = read_rope(c)
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


# -----------------------------------------------------------------------------
# a folder


def read(source):
    """The model `source`, a folder or a name on the Hub, as the state of a checkpoint that starts a run."""
    try:
        args = from_config(json.loads(read_json(get_file(source, 'config.json'))))
        weights = read_weights(source, args)
    except ImportError as e:
        fail(f"to read {source} a package is needed that is not installed ({e.name}). pip install {e.name}")
    except Exception as e:  # a file may say anything
        fail(f"{source} cannot be read into flatgpt ({type(e).__name__}: {first_line(e)}). choose another "
             "model, or save it again with transformers' save_pretrained")
    if args['tie']:  # transformers does not look at a head in the file either
        weights['lm_head.weight'] = weights['transformer.wte.weight']
    biases = [name for name in weights if name.endswith('.bias')]
    if not any(weights[name].any() for name in biases):  # transformers' GPT-2 always has them
        args['bias'] = False
        weights = {name: p for name, p in weights.items() if name not in biases}
    tokenizer = read_tokenizer(source, needed=False)
    if tokenizer is None and args['vocab_size'] == 50257:
        tokenizer = {'kind': 'tiktoken', 'name': 'gpt2'}
    return {'model': weights, 'model_args': args, 'iter_num': 0, 'config': {}, 'path': source,
            'best_val_loss': float('inf'), 'tokenizer': tokenizer}


def read_weights(source, args):
    """{our name: tensor}; names that are not ours stay. The files stay mapped, and the dtypes what they are:
    load.build() converts."""
    from safetensors import safe_open
    arch, weights = args['arch'], {}
    n_layer = min(args['n_layer'], 10_000)  # load.build() refuses more, and a file may say anything
    names = {theirs: ours for ours, theirs in weight_names(arch, n_layer).items()}
    for path in weight_files(source):
        with safe_open(path, framework='pt') as f:
            for name in f.keys():
                if re.search(CONSTANTS, name):
                    continue
                p = f.get_tensor(name)
                if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                    raise ValueError(f"{name} is {p.dtype}; flatgpt reads float32, bfloat16, float16")
                if arch == 'gpt2' and not name.startswith(('transformer.', 'lm_head.')):
                    name = 'transformer.' + name  # OpenAI's GPT-2 was saved without it
                ours = names.get(name, name)
                weights[ours] = convert(ours, p, args['n_embd'], args['n_head'], arch)
    return weights


def weight_files(source):
    """The paths of a model's safetensors files."""
    path = get_file(source, 'model.safetensors', needed=False)
    if path:
        return [path]
    index = get_file(source, 'model.safetensors.index.json', needed=False)
    if index:
        weight_map = json.loads(read_json(index)).get('weight_map') or {'': 'model.safetensors'}
        names = sorted({os.path.basename(str(file)) for file in weight_map.values()})  # {weight: file}
        return [get_file(source, name) for name in names]
    if any(has_file(source, name) for name in ('pytorch_model.bin', 'pytorch_model.bin.index.json')):
        fail(f"the weights of {source} are a pickle (pytorch_model.bin), which can run code when it is "
             "loaded; refused. if you trust it, convert it: python -c \"from transformers import "
             f"AutoModelForCausalLM as M; M.from_pretrained('{source}').save_pretrained('FOLDER')\"")
    return [get_file(source, 'model.safetensors')]


def read_tokenizer(source, needed=True):
    """The state of a model's tokenizer, for make_tokenizer(). If it has none: an error, or None."""
    if source in GPT2_NAMES:
        return {'kind': 'tiktoken', 'name': 'gpt2'}
    path, config = source, None
    if source.endswith('tokenizer.json') and os.path.isfile(source):
        source = os.path.dirname(source) or '.'
    if not source.endswith('.json') or not os.path.isfile(source):  # else of any name, by Tokenizer.save()
        if not os.path.isdir(source) and not is_hub_name(source):
            fail(f"no such tokenizer (hf:{source}). name a folder that has a tokenizer.json, or OWNER/NAME")
        path = get_file(source, 'tokenizer.json', needed=False)
        config = get_file(source, 'tokenizer_config.json', needed=False)
    if path is None and needed:
        fail(f"no tokenizer.json in {source}. make one: python -c \"from transformers import "
             f"AutoTokenizer as T; T.from_pretrained('{source}').save_pretrained('FOLDER')\"")
    if path is None:
        return None
    state = {'kind': 'hf', 'name': os.path.basename(source.rstrip('/')), 'json': read_json(path)}
    content = json.loads(state['json'])
    if config:
        state['config'] = read_json(config)
    elif isinstance(content, dict) and (found := guess_special(content.get('added_tokens') or [])):
        print(f"note: {state['name']} has no tokenizer_config.json; taken from its names: "
              + ', '.join(f'{key} {token}' for key, token in found.items()))
        state['config'] = json.dumps(found)
    return state


def read_json(path):
    """The text of a JSON file; an error if it is not JSON."""
    try:
        with open(path, encoding='utf-8') as f:
            text = f.read()
        json.loads(text)
        return text
    except (OSError, ValueError, RecursionError) as e:
        fail(f"{path} cannot be read ({first_line(e)}). download or save it again")
