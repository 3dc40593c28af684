"""
Hugging Face folders: read as a checkpoint that starts a run, and written for transformers and other programs
that open such folders. Three presets are networks of transformers: gpt2 is GPT-2, llama Llama, modern
NanoChat. Nothing in a folder is executed, and transformers is not needed.

    ckpt = huggingface.read('HuggingFaceTB/SmolLM2-135M')  # a folder, or a name on the Hub

In the tables below, our names are on the left and those of transformers on the right.
"""

import dataclasses
import json
import os
import re

import torch

from configurator import InputError
from files import check_not_lfs_pointer, first_line
from model import NANOGPT
from tokenizer import ASSISTANT_END, GPT2_STATE, bytes_to_unicode, hugging_face_state, pre_tokenizer_of

# on the Hub; as nanoGPT calls them
GPT2_REPOS = {
    'gpt2': 'openai-community/gpt2',
    'gpt2-medium': 'openai-community/gpt2-medium',
    'gpt2-large': 'openai-community/gpt2-large',
    'gpt2-xl': 'openai-community/gpt2-xl',
}
CLASSES = {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM', 'modern': 'NanoChatForCausalLM'}
ARCHS = {'gpt2': 'gpt2', 'llama': 'llama', 'nanochat': 'modern'}  # their model_type, our preset

# transformers' defaults, for what a config.json leaves out
DEFAULTS = {
    'gpt2': {
        'vocab_size': 50257,
        'n_positions': 1024,
        'n_embd': 768,
        'n_layer': 12,
        'n_head': 12,
        'n_inner': None,
        'activation_function': 'gelu_new',
        'layer_norm_epsilon': 1e-5,
        'tie_word_embeddings': True,
    },
    'llama': {
        'vocab_size': 32000,
        'max_position_embeddings': 2048,
        'hidden_size': 4096,
        'num_hidden_layers': 32,
        'num_attention_heads': 32,
        'num_key_value_heads': None,  # as many as num_attention_heads
        'intermediate_size': 11008,
        'hidden_act': 'silu',
        'rms_norm_eps': 1e-6,
        'tie_word_embeddings': False,
        'rope_theta': 10000.0,
    },
    'modern': {
        'vocab_size': 50304,
        'max_position_embeddings': 2048,
        'hidden_size': 768,
        'num_hidden_layers': 12,
        'num_attention_heads': 6,
        'num_key_value_heads': None,
        'intermediate_size': 8192,
        'hidden_act': 'relu2',
        'rms_norm_eps': 1e-6,
        'tie_word_embeddings': False,
        'rope_theta': 10000.0,
        'final_logit_softcapping': 15.0,
    },
}

# The networks of transformers, whatever the presets of model.py have been edited to
LLAMA_NETWORK = dict(NANOGPT, norm='rmsnorm', bias=False, positions='rope', fused_qkv=False, mlp='swiglu',
                     tie=False)
NANOCHAT_NETWORK = dict(LLAMA_NETWORK, norm='rmsnorm_plain', norm_eps=1e-6, embd_norm=True, qk_norm=True,
                        mlp='relu2', softcap=15.0, init='modern')
NETWORKS = {'gpt2': NANOGPT, 'llama': LLAMA_NETWORK, 'modern': NANOCHAT_NETWORK}

# weights, without their .weight or .bias; {} is the index of the layer
GPT2_WEIGHTS = [  # our names are GPT-2's
    'transformer.wte',
    'transformer.wpe',
    'transformer.h.{}.ln_1',
    'transformer.h.{}.attn.c_attn',
    'transformer.h.{}.attn.c_proj',
    'transformer.h.{}.ln_2',
    'transformer.h.{}.mlp.c_fc',
    'transformer.h.{}.mlp.c_proj',
    'transformer.ln_f',
    'lm_head',
]
LLAMA_WEIGHTS = {
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
NANOCHAT_WEIGHTS = {
    **LLAMA_WEIGHTS,
    'transformer.h.{}.mlp.c_fc': 'model.layers.{}.mlp.fc1',
    'transformer.h.{}.mlp.c_proj': 'model.layers.{}.mlp.fc2',
}
WEIGHTS = {
    'gpt2': {name: name for name in GPT2_WEIGHTS},
    'llama': LLAMA_WEIGHTS,
    'modern': NANOCHAT_WEIGHTS,
}

# fields of GPTConfig, fields of config.json
GPT2_FIELDS = {
    'vocab_size': 'vocab_size',
    'block_size': 'n_positions',
    'n_embd': 'n_embd',
    'n_layer': 'n_layer',
    'n_head': 'n_head',
    'mlp_width': 'n_inner',
    'mlp': 'activation_function',
    'norm_eps': 'layer_norm_epsilon',
    'tie': 'tie_word_embeddings',
}
LLAMA_FIELDS = {
    'vocab_size': 'vocab_size',
    'block_size': 'max_position_embeddings',
    'n_embd': 'hidden_size',
    'n_layer': 'num_hidden_layers',
    'n_head': 'num_attention_heads',
    'n_kv_head': 'num_key_value_heads',
    'mlp_width': 'intermediate_size',
    'mlp': 'hidden_act',
    'norm_eps': 'rms_norm_eps',
    'tie': 'tie_word_embeddings',
}
NANOCHAT_FIELDS = {**LLAMA_FIELDS, 'softcap': 'final_logit_softcapping'}
FIELDS = {'gpt2': GPT2_FIELDS, 'llama': LLAMA_FIELDS, 'modern': NANOCHAT_FIELDS}
# their activation on the left, our mlp on the right; of two names for one mlp, the last is written
ACTIVATIONS = {
    'gelu': 'gelu',
    'gelu_pytorch_tanh': 'gelu_tanh',
    'gelu_new': 'gelu_tanh',
    'relu2': 'relu2',
    'silu': 'swiglu',
}
# the fields of Llama 3's rope_scaling
ROPE_SCALING = ['factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings']


# -----------------------------------------------------------------------------
# weights


def weight_names(arch, n_layer):
    """Return {our name: their name} of all weights that a model of this preset may have."""
    names = {}
    for ours, theirs in WEIGHTS[arch].items():
        for i in range(n_layer):
            for kind in ['.weight', '.bias']:
                names[ours.format(i) + kind] = theirs.format(i) + kind
    return names


def convert(name, p, n_head, arch):
    """Convert the weight `p`, called `name` here, to their layout. The same call converts it back."""
    if arch == 'gpt2' and re.search(r'\.(c_attn|c_proj|c_fc)\.weight$', name):
        p = p.t()  # OpenAI's "Conv1D" is a Linear with its matrix transposed
    if arch == 'modern' and name.endswith(('.c_q.weight', '.c_k.weight')):
        # NanoChat rotates by the opposite angle; exchanging the two halves of each head does the same
        n_embd = p.size(1)
        halves = p.view(-1, 2, n_embd // n_head // 2, n_embd)  # (heads, 2, D/2, C)
        p = halves.flip(1).reshape(p.shape)
    return p.contiguous()


# -----------------------------------------------------------------------------
# config.json


def check_parts(config):
    """Raise InputError if a GPTConfig is not a network of transformers."""
    arch = config.arch
    network = {**NETWORKS[arch], 'n_kv_head': config.n_head}
    free = [*FIELDS[arch], 'arch', 'bias', 'dropout', 'init', 'rope_theta', 'rope_scaling']
    if 'swiglu' in (config.mlp, network['mlp']):
        free.remove('mlp')  # it has three matrices, the others have two
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        expected = network.get(field.name, field.default)  # a field that an edit has added is at its default
        if field.name not in free and value != expected:
            raise InputError(f"{field.name}={value} cannot be exported: transformers' {CLASSES[arch]} has "
                             f"{expected}.")


def to_config(config, dtype):
    """Return the config.json of a GPTConfig, a dict."""
    check_parts(config)
    arch = config.arch
    model_types = {ours: theirs for theirs, ours in ARCHS.items()}
    out = {'architectures': [CLASSES[arch]], 'model_type': model_types[arch], 'dtype': dtype}
    for ours, theirs in FIELDS[arch].items():
        out[theirs] = getattr(config, ours)
    activations = {mlp: activation for activation, mlp in ACTIVATIONS.items()}
    out[FIELDS[arch]['mlp']] = activations[config.mlp]
    if arch == 'gpt2':
        out['n_ctx'] = config.block_size  # for llama.cpp's converter
        return out
    if arch == 'modern':
        out['final_logit_softcapping'] = config.softcap or None
    rope = {'rope_type': 'default', 'rope_theta': config.rope_theta}
    if config.rope_scaling:
        rope = {**rope, **config.rope_scaling, 'rope_type': 'llama3'}
        out['rope_scaling'] = rope  # this and rope_theta are for transformers 4
    out['rope_theta'] = config.rope_theta
    out['rope_parameters'] = rope
    return out


def from_config(theirs):
    """Return the arguments of a GPTConfig for a config.json, a dict."""
    kind = theirs.get('model_type') or theirs['architectures'][0]
    arch = ARCHS.get(kind)
    for ours, name in CLASSES.items():
        if kind == name:
            arch = ours
    if arch is None:
        raise ValueError(f"it is a {kind}")
    # transformers 5 has rope_parameters, 4 rope_scaling and rope_theta
    rope = theirs.get('rope_parameters') or theirs.get('rope_scaling') or {}
    defaults = dict(DEFAULTS[arch])
    if 'n_ctx' in theirs:  # an older name of n_positions
        defaults['n_positions'] = theirs['n_ctx']
    theirs = {**defaults, **theirs, **rope}
    # these change the network and leave no trace in the weights
    required = {
        'scale_attn_weights': True,
        'scale_attn_by_inverse_layer_idx': False,
        'partial_rotary_factor': 1.0,
    }
    for name, value in required.items():
        if theirs.get(name, value) != value:
            raise ValueError(f"its {name} is {theirs[name]!r}, which model.py does not support")
    args = {**NETWORKS[arch], 'arch': arch}
    for ours, name in FIELDS[arch].items():
        args[ours] = theirs[name]
    args['mlp'] = ACTIVATIONS[args['mlp']]
    if args['tie']:
        args['init'] = 'gpt2'  # modern's starts the head at zero
    if arch == 'modern':
        args['softcap'] = args['softcap'] or 0.0
    if arch != 'gpt2':
        args['rope_theta'] = float(theirs['rope_theta'])
        kind = rope.get('rope_type', rope.get('type', 'default'))
        if kind == 'llama3':
            args['rope_scaling'] = {name: theirs[name] for name in ROPE_SCALING}
        elif kind != 'default':
            raise ValueError(f"its rope is {kind!r}")
    return args


# -----------------------------------------------------------------------------
# reading

# the files to download; the last ones only if there are no safetensors
TOKENIZER_FILES = ['tokenizer*', 'config.json', 'generation_config.json']
MODEL_FILES = ['model*.safetensors', 'model.safetensors.index.json', *TOKENIZER_FILES]
PICKLES = ['pytorch_model*.bin', 'pytorch_model.bin.index.json']


def is_hub_name(source):
    """Return whether `source` may name a model on the Hub: gpt2, OWNER/NAME, OWNER/NAME@REVISION."""
    owner = os.path.dirname(source)
    if source.endswith('.pt') or os.path.exists(source) or os.path.exists(owner):
        return False
    is_full_name = re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?', source) is not None
    return source in GPT2_REPOS or is_full_name


def find_folder(source, files):
    """Return the folder of a model: `source` itself, or for a name on the Hub a folder in Hugging Face's
    cache, with those of `files`, patterns of names, that the model has."""
    if not is_hub_name(source):
        return source
    repo, _, revision = GPT2_REPOS.get(source, source).partition('@')
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars
        disable_progress_bars()
        return snapshot_download(repo, revision=revision or None, allow_patterns=files)
    except ImportError as e:
        raise InputError(f"a package is missing: {e.name}. Run pip install huggingface_hub.") from e
    except Exception as e:  # the ways in which a network fails have no common class
        raise InputError(f"{source} is not a local path and could not be downloaded from the Hub: "
                         f"{type(e).__name__}: {first_line(e)}. Check the name; for some models, accept "
                         "the terms and log in: hf auth login.") from e


def weight_files(folder):
    """Return the paths of a model's weights: one file, or those that an index names; [] if there are none.

    Shards that the index does not name may belong to another model.
    """
    for name in ['model.safetensors', 'pytorch_model.bin']:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return [path]
        if os.path.exists(path + '.index.json'):
            with open(path + '.index.json', encoding='utf-8-sig') as f:
                shards = sorted(set(json.load(f)['weight_map'].values()))
            for shard in shards:
                if not os.path.exists(os.path.join(folder, shard)):
                    raise InputError(f"{folder} is incomplete: {shard} is missing. Download it again.")
            return [os.path.join(folder, shard) for shard in shards]
    return []


def read(source):
    """Read a model, a folder or a name on the Hub, as the dict of a checkpoint without an optimizer.

    Nothing in its files is executed. dtypes are kept; checkpoint.build_model() converts them.
    """
    folder = find_folder(source, MODEL_FILES)
    try:
        from safetensors.torch import load_file
    except ImportError as e:
        raise InputError(f"a package is missing: {e.name}. Run pip install safetensors.") from e
    try:
        with open(os.path.join(folder, 'config.json'), encoding='utf-8-sig') as f:
            args = from_config(json.load(f))
        files = weight_files(folder) or weight_files(find_folder(source, PICKLES))
        if not files:
            raise ValueError("it has no model.safetensors, no pytorch_model.bin and no .index.json of one")
        weights = {}
        for path in files:
            check_not_lfs_pointer(path)
            if path.endswith('.safetensors'):
                weights.update(load_file(path))
            else:
                weights.update(torch.load(path, map_location='cpu', weights_only=True))

        arch = args['arch']
        n_layer = len(weights)  # or fewer: a damaged config.json may have any number
        our_names = {theirs: ours for ours, theirs in weight_names(arch, n_layer).items()}
        model = {}
        for name, p in weights.items():
            if arch == 'gpt2' and not name.startswith(('transformer.', 'lm_head.')):
                name = 'transformer.' + name  # OpenAI's GPT-2 was saved without it
            ours = our_names.get(name, name)
            model[ours] = convert(ours, p, args['n_head'], arch)
        tokenizer_state = read_tokenizer(source, needed=False)
    except InputError:
        raise
    except Exception as e:  # the files may contain anything
        raise InputError(f"{source} cannot be read: {type(e).__name__}: {first_line(e)}. Use a GPT-2, Llama "
                         "or NanoChat model that was saved with save_pretrained.") from e
    return {'model': model, 'model_args': args, 'tokenizer': tokenizer_state, 'path': source}


def read_tokenizer(source, needed=True):
    """Return the state of a model's tokenizer, for make_tokenizer(). If it has none, raise InputError, or
    return None if it is not `needed`."""
    if source in GPT2_REPOS and is_hub_name(source):
        return GPT2_STATE
    folder = find_folder(source, TOKENIZER_FILES)
    if not needed and not os.path.exists(os.path.join(folder, 'tokenizer.json')):
        return None
    state = hugging_face_state(folder)
    state['name'] = os.path.basename(source.rstrip('/'))  # not that of a folder in the cache
    return state


# -----------------------------------------------------------------------------
# writing


def write_folder(folder, weights, config, tokenizer, dtype='float32', chat=None, card=''):
    """
    Write a model (our weights and a GPTConfig) and its tokenizer into `folder`, the weights in `dtype`.
    Return the name of its class in transformers.

    chat: conversations.chat_format(tokenizer); card: the text of README.md.
    """
    from huggingface_hub import save_torch_state_dict
    theirs = to_config(config, dtype)
    generation = {
        'bos_token_id': tokenizer.end_of_text,
        'eos_token_id': list((chat or tokenizer).stop_ids) or None,  # after an answer, or a text
        'pad_token_id': None,  # NanoChat's default is 1, and row 1 of its embedding would not train
    }
    theirs.update(generation)
    tokenizer_json, tokenizer_config = to_tokenizer_json(tokenizer, chat)
    texts = {
        'config.json': json.dumps(theirs, indent=2),
        'generation_config.json': json.dumps(generation, indent=2),
        'tokenizer.json': tokenizer_json,
        'tokenizer_config.json': tokenizer_config,
        'README.md': card,
    }
    os.makedirs(folder, exist_ok=True)
    renamed = their_weights(weights, config, getattr(torch, dtype))
    save_torch_state_dict(renamed, folder)
    for name, text in texts.items():
        with open(os.path.join(folder, name), 'w', encoding='utf-8') as f:
            f.write(text)
    return CLASSES[config.arch]


def their_weights(weights, config, dtype):
    """Return our weights {name: tensor} with their names, in their layout and in `dtype`."""
    arch = config.arch
    names = weight_names(arch, config.n_layer)
    out = {}
    for ours, p in weights.items():
        if ours not in names:
            raise InputError(f"{ours} is a weight that transformers' {CLASSES[arch]} has not")
        if ours == 'lm_head.weight' and config.tie:
            continue
        out[names[ours]] = convert(ours, p, config.n_head, arch).to(dtype)
        if arch == 'gpt2' and not config.bias and ('.h.' in ours or '.ln_f.' in ours):
            # transformers' GPT-2 always has biases, one for each output
            out[names[ours].replace('.weight', '.bias')] = torch.zeros(p.size(0), dtype=dtype)
    return out


# -----------------------------------------------------------------------------
# our tokenizers as tokenizer.json


def to_tokenizer_json(tokenizer, chat):
    """Return the contents of tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    state = tokenizer.state()
    kind = state['kind']
    special = tokenizer.special
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False}
    if kind == 'ids':
        raise InputError("transformers has no tokenizer for ids that are no text. Export text models only.")
    if kind == 'hf':  # unchanged
        text = state['json']
        config.update(tokenizer.config)
    else:
        if kind == 'char':
            vocab = {char: id for id, char in enumerate(state['chars'])}
            # without an unknown token: an unknown character is an error
            out = Tokenizer(models.WordLevel({**vocab, **special}))
            out.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
            out.decoder = decoders.Fuse()
        else:
            ranks = {piece: id for id, piece in tokenizer.text_pieces.items()}
            out = bpe_tokenizer(ranks, special, state.get('pat_str', r'[\s\S]'))  # bytes: no merges anyway
        out.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        text = out.to_str()
        for token, id in special.items():
            if id == tokenizer.end_of_text:
                config.update(bos_token=token, eos_token=token, pad_token=token)
    if chat:  # finetuned on conversations
        config.update(bos_token=chat.bos, eos_token=ASSISTANT_END, chat_template=chat.template)
    return text, json.dumps(config, indent=2)


def bpe_tokenizer(ranks, special, pattern):
    """Return a byte-level BPE of the tokenizers package.

    ranks: {token as bytes: id}; special: {token: id}; pattern: a regular expression of tiktoken's.
    """
    from tokenizers import Tokenizer, decoders, models
    letters = bytes_to_unicode()
    spelled = {}
    for token in ranks:
        spelled[token] = ''.join(letters[byte] for byte in token)
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    # tiktoken merges any two tokens that make a third one, the one of lowest rank first
    merges = []
    for token in sorted(ranks, key=ranks.get):
        for i in range(1, len(token)):
            left = token[:i]
            right = token[i:]
            if left in ranks and right in ranks:
                merges.append((spelled[left], spelled[right]))
    # ignore_merges: a word in the vocabulary is that token, however its merges would end, as in tiktoken
    out = Tokenizer(models.BPE({**vocab, **special}, merges, ignore_merges=True))
    out.pre_tokenizer = pre_tokenizer_of(pattern)
    out.decoder = decoders.ByteLevel()
    return out
