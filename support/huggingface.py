"""
Hugging Face folders, read into our weights: what transformers calls things, in both directions, and the files
themselves. Three presets are architectures of transformers: GPT-2, Llama and NanoChat. Nothing in such a
folder is executed, and transformers is not needed. support/hf_export.py writes them.

    ckpt = huggingface.read('HuggingFaceTB/SmolLM2-135M')  # a folder, or a name on the Hub
"""

import dataclasses
import json
import os
import pathlib
import re

from configurator import fail
from support.errors import first_line
from support.hf_tokenizer import guess_special
from support.hub_datasets import GPT2_NAMES, get_file, is_hub_name

CLASSES = {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM', 'modern': 'NanoChatForCausalLM'}
PRESET_OF = {'gpt2': 'gpt2', 'llama': 'llama', 'nanochat': 'modern'}  # by model_type

# Our names, Llama's names; {} is the number of the layer. GPT-2's names are ours.
LLAMA = {
    'transformer.wte': 'model.embed_tokens',
    'transformer.h.{}.ln_1': 'model.layers.{}.input_layernorm',
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
GPT2 = {name: name for name in ('transformer.wpe', 'transformer.h.{}.attn.c_attn', *LLAMA)}
NANOCHAT = {
    **LLAMA,
    'transformer.h.{}.mlp.c_fc': 'model.layers.{}.mlp.fc1',
    'transformer.h.{}.mlp.c_proj': 'model.layers.{}.mlp.fc2',
}
TABLES = {'gpt2': GPT2, 'llama': LLAMA, 'modern': NANOCHAT}


# fields of a GPTConfig that a folder tells in a way of its own, or that only training asks for
ELSEWHERE = 'arch dropout init rope_theta rope_scaling'.split()
# what transformers calls the fields of a GPTConfig
LLAMA_FIELDS = {'vocab_size': 'vocab_size', 'block_size': 'max_position_embeddings', 'n_embd': 'hidden_size',
                'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads',
                'n_kv_head': 'num_key_value_heads', 'mlp_width': 'intermediate_size', 'mlp': 'hidden_act',
                'norm_eps': 'rms_norm_eps', 'tie': 'tie_word_embeddings'}
FIELDS = {
    'gpt2': {'vocab_size': 'vocab_size', 'block_size': 'n_positions', 'n_embd': 'n_embd',
             'n_layer': 'n_layer', 'n_head': 'n_head', 'mlp_width': 'n_inner', 'mlp': 'activation_function',
             'norm_eps': 'layer_norm_epsilon', 'tie': 'tie_word_embeddings'},
    'llama': LLAMA_FIELDS,
    'modern': {**LLAMA_FIELDS, 'softcap': 'final_logit_softcapping'},
}
# what an old config.json leaves out
DEFAULTS = {'n_inner': None, 'num_key_value_heads': None, 'rope_theta': 10000.0}
ACTIVATIONS = {'gelu': 'gelu', 'gelu_pytorch_tanh': 'gelu_tanh', 'gelu_new': 'gelu_tanh', 'relu2': 'relu2',
               'silu': 'swiglu'}  # theirs, ours; of two that are the same, the second is written
ROPE_KEYS = {
    'default': [],
    'llama3': 'factor low_freq_factor high_freq_factor original_max_position_embeddings'.split(),
}
# fields that change the network without a trace in the weights, and the only value that we read
ONLY = {'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False, 'partial_rotary_factor': 1.0}


# -----------------------------------------------------------------------------
# weights


def weight_names(arch, n_layer):
    """{our name: their name} of all weights that a model of this preset may have."""
    return {ours.format(i) + kind: theirs.format(i) + kind for ours, theirs in TABLES[arch].items()
            for i in range(n_layer if '{}' in ours else 1) for kind in ('.weight', '.bias')}


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
    """The preset whose architecture in transformers has the parts of a GPTConfig: whatever a folder cannot
    tell is as in the preset, fields that you added too. ValueError if there is none."""
    wrong = {}
    for arch in CLASSES:
        there = type(config)(arch=arch, n_head=config.n_head, bias=config.bias if arch == 'gpt2' else None)
        names = {field.name for field in dataclasses.fields(config)} - {*ELSEWHERE, *FIELDS[arch]}
        if 'swiglu' in (config.mlp, there.mlp):
            names.add('mlp')
        wrong[arch] = [f'{name}={getattr(config, name)}' for name in sorted(names)
                       if getattr(config, name) != getattr(there, name)]
    arch = min(wrong, key=lambda arch: len(wrong[arch]))
    if wrong[arch]:
        raise ValueError(f"no architecture of transformers has these parts; the nearest, {CLASSES[arch]}, "
                         f"has not {', '.join(wrong[arch])}. train with --arch=gpt2, llama or modern")
    return arch


def to_config(config, tokenizer, dtype):
    """The config.json, a dict, for a GPTConfig. ValueError if transformers has no such architecture."""
    arch = preset_of(config)
    out = {
        'architectures': [CLASSES[arch]],
        'model_type': 'nanochat' if arch == 'modern' else arch,
        'bos_token_id': tokenizer.end_of_text,
        'eos_token_id': tokenizer.stop_ids[0] if tokenizer.stop_ids else None,
        'pad_token_id': None,  # NanoChat's default is 1, and row 1 of its embedding would not train
        'dtype': dtype,
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS[arch].items()},
    }
    out[FIELDS[arch]['mlp']] = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[config.mlp]
    if arch == 'gpt2':
        out['n_ctx'] = config.block_size  # for llama.cpp's converter
        return {**out, **dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), config.dropout)}
    if arch == 'modern':
        out['final_logit_softcapping'] = config.softcap or None
    kind, *numbers = config.rope_scaling.replace('none', 'default').split(':')
    rope = {'rope_type': kind, **dict(zip(ROPE_KEYS[kind], map(float, numbers)))}
    if kind == 'llama3':
        rope['original_max_position_embeddings'] = int(float(numbers[-1]))
    out.update({
        'attention_dropout': config.dropout,
        'rope_parameters': {**rope, 'rope_theta': config.rope_theta},
        'rope_theta': config.rope_theta,  # this and the next for transformers 4
        'rope_scaling': rope if numbers else None,
    })
    return out


def from_config(theirs):
    """The arguments of a GPTConfig for a config.json, a dict. An exception of some kind if there are none."""
    arch = PRESET_OF[theirs['model_type']]
    # rotary positions: transformers 5 has rope_parameters, 4 has rope_scaling and rope_theta
    rope = theirs.get('rope_parameters') or theirs.get('rope_scaling') or {}
    c = {**DEFAULTS, 'tie_word_embeddings': arch == 'gpt2', **theirs, **rope}
    for name, value in ONLY.items():
        if c.get(name, value) != value:
            raise ValueError(f"its {name} is {c[name]!r}, which flatgpt's network does not have")
    args = {'arch': arch, 'bias': arch == 'gpt2', **{ours: c[name] for ours, name in FIELDS[arch].items()}}
    args['mlp'] = ACTIVATIONS[args['mlp']]
    if args['tie']:
        args['init'] = 'gpt2'  # init='modern' starts the head at zero
    if arch == 'modern':
        args['softcap'] = args['softcap'] or 0.0
    if arch != 'gpt2':
        kind = rope.get('rope_type', rope.get('type', 'default'))
        numbers = [str(rope[key]) for key in ROPE_KEYS[kind]]
        args['rope_theta'] = float(c['rope_theta'])
        args['rope_scaling'] = ':'.join([kind, *numbers]) if numbers else 'none'
    return args


# -----------------------------------------------------------------------------
# a folder


def read(source):
    """The model `source`, a folder or a name on the Hub, as the state of a checkpoint that starts a run."""
    try:
        args = from_config(json.loads(read_json(get_file(source, 'config.json'))))
        weights = read_weights(source, args)
        if args['tie']:  # a head in the file stays: transformers 5 reads it, too
            weights.setdefault('lm_head.weight', weights['transformer.wte.weight'])
        tokenizer = read_tokenizer(source, needed=False)
    except Exception as e:  # a file may say anything
        fail(f"{source} cannot be read into flatgpt ({type(e).__name__}: {first_line(e)}). it reads gpt2, "
             "llama and nanochat, their activations, and rope as it is or llama3's: choose another model, or "
             "save this again with save_pretrained")
    biases = {name for name in weights if name.endswith('.bias')}
    if not any(weights[name].any() for name in biases):  # transformers' GPT-2 always has them
        args['bias'] = False
        weights = {name: weights[name] for name in weights.keys() - biases}
    return {'model': weights, 'model_args': args, 'iter_num': 0, 'config': {}, 'path': source,
            'best_val_loss': float('inf'), 'tokenizer': tokenizer}


def read_weights(source, args):
    """{our name: tensor}; names that are not ours stay. The files stay mapped, and the dtypes what they are:
    load.build() converts."""
    from safetensors import safe_open
    arch, weights = args['arch'], {}
    names = {theirs: ours for ours, theirs in weight_names(arch, 2**10).items()}  # as many layers as may be
    for path in weight_files(source):
        with safe_open(path, framework='pt') as f:
            for name in f.keys():
                p = f.get_tensor(name)
                if arch == 'gpt2' and not name.startswith(('transformer.', 'lm_head.')):
                    name = 'transformer.' + name  # OpenAI's GPT-2 was saved without it
                ours = names.get(name, name)
                weights[ours] = convert(ours, p, args['n_embd'], args['n_head'], arch)
    return weights


def weight_files(source):
    """The paths of a model's safetensors files."""
    if path := get_file(source, 'model.safetensors', needed=False):
        return [path]
    index = get_file(source, 'model.safetensors.index.json', needed=False)
    if index is None:
        fail(f"no model.safetensors in {source}. a pytorch_model.bin is a pickle, which can run code when it "
             "is loaded; if you trust it, convert it: python -c \"from transformers import "
             f"AutoModelForCausalLM as M; M.from_pretrained('{source}').save_pretrained('FOLDER')\"")
    files = json.loads(read_json(index))['weight_map'].values()  # {weight: file}
    return [get_file(source, os.path.basename(name)) for name in sorted({*files})]


def read_tokenizer(source, needed=True):
    """The state of a model's tokenizer, for make_tokenizer(). If it has none: an error, or None."""
    if source in GPT2_NAMES:
        return {'kind': 'tiktoken', 'name': 'gpt2'}
    folder, name = source, 'tokenizer.json'
    if os.path.isfile(source):  # of any name, by Tokenizer.save()
        folder, name = os.path.split(os.path.abspath(source))
    elif not os.path.isdir(source) and not is_hub_name(source):
        fail(f"no such tokenizer (hf:{source}). name a folder that has a tokenizer.json, or OWNER/NAME")
    path = get_file(folder, name, needed)
    config = get_file(folder, 'tokenizer_config.json', needed=False)
    if path is None:
        return None
    state = {'kind': 'hf', 'name': os.path.basename(source.rstrip('/')), 'json': read_json(path)}
    if config:
        state['config'] = read_json(config)
        # where transformers 5 writes it
        if 'chat_template' not in state['config'] and (
                template := get_file(folder, 'chat_template.jinja', needed=False)):
            state['config'] = json.dumps({**json.loads(state['config']),
                                          'chat_template': pathlib.Path(template).read_text('utf-8')})
    elif found := guess_special(json.loads(state['json']).get('added_tokens') or []):
        print(f"note: {state['name']} has no tokenizer_config.json; taken from its names: {found}")
        state['config'] = json.dumps(found)
    return state


def read_json(path):
    """The text of a JSON file with an object; an error if it is something else."""
    try:
        with open(path, encoding='utf-8') as f:
            text = f.read()
        assert isinstance(json.loads(text), dict), 'no JSON object'
        return text
    except Exception as e:  # a file may say anything
        fail(f"{path} cannot be read ({first_line(e)}). download or save it again")
