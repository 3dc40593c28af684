"""
Hugging Face's folders: read as a checkpoint that starts a run, and written for transformers and all that
opens the same files. What transformers calls our weights and sizes stands in the tables below, ours on the
left. Three presets are architectures of transformers: gpt2 is GPT-2, llama Llama, modern NanoChat. Nothing in
a folder is executed, and transformers is not needed.

    ckpt = huggingface.read('HuggingFaceTB/SmolLM2-135M')  # a folder, or a name on the Hub

What cannot be read or written is a ValueError of one line.
"""

import base64
import dataclasses
import json
import os
import re
import zipfile

import torch

from common import first_line
from model import PRESETS, GPTConfig
from tokenizer import ASSISTANT_END, bytes_to_unicode, hugging_face_state, oniguruma

# on the Hub; as nanoGPT calls them
GPT2_REPOS = {
    'gpt2': 'openai-community/gpt2',
    'gpt2-medium': 'openai-community/gpt2-medium',
    'gpt2-large': 'openai-community/gpt2-large',
    'gpt2-xl': 'openai-community/gpt2-xl',
}
CLASSES = {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM', 'modern': 'NanoChatForCausalLM'}
MODEL_TYPES = {'gpt2': 'gpt2', 'llama': 'llama', 'modern': 'nanochat'}

# weights, without their .weight or .bias; {} is the number of the layer
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
GPT2_WEIGHTS = {  # our names are GPT-2's
    'transformer.wte': 'transformer.wte',
    'transformer.wpe': 'transformer.wpe',
    'transformer.h.{}.ln_1': 'transformer.h.{}.ln_1',
    'transformer.h.{}.attn.c_attn': 'transformer.h.{}.attn.c_attn',
    'transformer.h.{}.attn.c_proj': 'transformer.h.{}.attn.c_proj',
    'transformer.h.{}.ln_2': 'transformer.h.{}.ln_2',
    'transformer.h.{}.mlp.c_fc': 'transformer.h.{}.mlp.c_fc',
    'transformer.h.{}.mlp.c_proj': 'transformer.h.{}.mlp.c_proj',
    'transformer.ln_f': 'transformer.ln_f',
    'lm_head': 'lm_head',
}
WEIGHTS = {'gpt2': GPT2_WEIGHTS, 'llama': LLAMA_WEIGHTS, 'modern': NANOCHAT_WEIGHTS}

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
# our mlp, their activation
ACTIVATIONS = {'gelu': 'gelu', 'gelu_tanh': 'gelu_new', 'relu2': 'relu2', 'swiglu': 'silu'}
# what the rope_scaling of llama3 says
ROPE_SCALING = ['factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings']


# -----------------------------------------------------------------------------
# weights


def weight_names(arch, n_layer):
    """{our name: their name} of all weights that a model of this preset may have."""
    names = {}
    for ours, theirs in WEIGHTS[arch].items():
        layers = range(n_layer) if '{}' in ours else [0]
        for i in layers:
            for kind in ['.weight', '.bias']:
                names[ours.format(i) + kind] = theirs.format(i) + kind
    return names


def convert(name, p, n_head, arch):
    """The weight `p`, `name` by our names, from our layout into theirs. The same call converts it back."""
    if arch == 'gpt2' and re.search(r'\.(c_attn|c_proj|c_fc)\.weight$', name):
        p = p.t()  # OpenAI's "Conv1D" is a Linear with its matrix transposed
    if arch == 'modern' and re.search(r'\.c_[qk]\.weight$', name):
        # NanoChat rotates by the opposite angle; exchanging the two halves of each head does the same
        n_embd = p.size(1)
        halves = p.view(-1, 2, n_embd // n_head // 2, n_embd)  # (heads, 2, D/2, C)
        p = halves.flip(1).reshape(p.shape)
    return p.contiguous()


# -----------------------------------------------------------------------------
# config.json


def check_parts(config):
    """ValueError if the network of a GPTConfig has parts that transformers' one of this preset has not."""
    arch = config.arch
    preset = PRESETS[arch]
    required = {name: preset[name] for name in ['norm', 'positions', 'embd_norm', 'fused_qkv', 'qk_norm']}
    if arch == 'gpt2':
        required['n_kv_head'] = config.n_head
    else:
        required['bias'] = False
    if arch != 'modern':
        required['softcap'] = 0.0
    if 'swiglu' in (config.mlp, preset['mlp']):
        required['mlp'] = preset['mlp']
    known = {field.name for field in dataclasses.fields(GPTConfig)}
    for field in dataclasses.fields(config):
        if field.name not in known:  # somebody has added it
            required[field.name] = field.default
    for name, value in required.items():
        found = getattr(config, name)
        if found != value:
            raise ValueError(f"{name}={found}, where transformers' {CLASSES[arch]} has {value}. train one "
                             f"with the parts of arch={arch}")


def to_config(config, tokenizer, dtype):
    """The config.json, a dict, of a GPTConfig. ValueError if transformers has no such network."""
    check_parts(config)
    arch = config.arch
    out = {
        'architectures': [CLASSES[arch]],
        'model_type': MODEL_TYPES[arch],
        'bos_token_id': tokenizer.end_of_text,
        'eos_token_id': tokenizer.stop_ids[0] if tokenizer.stop_ids else None,
        'pad_token_id': None,  # NanoChat's default is 1, and row 1 of its embedding would not train
        'dtype': dtype,
    }
    for ours, theirs in FIELDS[arch].items():
        out[theirs] = getattr(config, ours)
    out[FIELDS[arch]['mlp']] = ACTIVATIONS[config.mlp]
    if arch == 'gpt2':
        out['n_ctx'] = config.block_size  # for llama.cpp's converter
        for name in ['resid_pdrop', 'embd_pdrop', 'attn_pdrop']:
            out[name] = config.dropout
        return out
    if arch == 'modern' and not config.softcap:
        out['final_logit_softcapping'] = None
    out['attention_dropout'] = config.dropout
    rope = {'rope_type': 'default'}
    if config.rope_scaling:
        rope = {'rope_type': 'llama3', **config.rope_scaling}
    out['rope_parameters'] = {**rope, 'rope_theta': config.rope_theta}
    out['rope_theta'] = config.rope_theta  # this and the next for transformers 4
    out['rope_scaling'] = rope if config.rope_scaling else None
    return out


def from_config(theirs):
    """The arguments of a GPTConfig for a config.json, a dict. An exception of some kind if there are none."""
    archs = {model_type: arch for arch, model_type in MODEL_TYPES.items()}
    if theirs.get('model_type') not in archs:
        raise ValueError(f"its model_type is {theirs.get('model_type')!r}")
    arch = archs[theirs['model_type']]
    # what an old config.json leaves out; transformers 5 has rope_parameters, 4 rope_scaling and rope_theta
    rope = theirs.get('rope_parameters') or theirs.get('rope_scaling') or {}
    defaults = {'n_inner': None, 'num_key_value_heads': None, 'rope_theta': 10000.0,
                'tie_word_embeddings': arch == 'gpt2'}
    theirs = {**defaults, **theirs, **rope}
    # these change the network and leave no trace in the weights
    required = {
        'scale_attn_weights': True,
        'scale_attn_by_inverse_layer_idx': False,
        'partial_rotary_factor': 1.0,
    }
    for name, value in required.items():
        if theirs.get(name, value) != value:
            raise ValueError(f"its {name} is {theirs[name]!r}, which model.py has not")
    args = {'arch': arch, 'bias': arch == 'gpt2'}
    for ours, name in FIELDS[arch].items():
        args[ours] = theirs[name]
    activations = {activation: mlp for mlp, activation in ACTIVATIONS.items()}
    activations['gelu_pytorch_tanh'] = 'gelu_tanh'
    if args['mlp'] not in activations:
        raise ValueError(f"its activation is {args['mlp']!r}")
    args['mlp'] = activations[args['mlp']]
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
# files of a folder, or of a model on the Hub


def is_hub_name(source):
    """Whether `source` may name a model on the Hub: gpt2 and its sisters, OWNER/NAME, OWNER/NAME@REVISION."""
    if source in GPT2_REPOS:
        return not os.path.exists(source)
    owner = os.path.dirname(source)
    if source.endswith('.pt'):
        return False
    return bool(re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?', source)) and not os.path.exists(owner)


def get_file(source, name, needed=True):
    """The path of the file `name` of the model `source`: in a folder, in Hugging Face's cache, or downloaded.
    If the model has no such file: ValueError if it is needed, else None."""
    if not is_hub_name(source):
        path = os.path.join(source, name)
        if os.path.isfile(path):
            return path
        if needed:
            raise ValueError(f"no {name} in {source}. name a folder of save_pretrained or export.py")
        return None
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise ValueError(f"{source} is no path of this machine, and the Hub needs a package "
                         "(huggingface_hub). pip install huggingface_hub")
    huggingface_hub.utils.disable_progress_bars()
    repo, _, revision = GPT2_REPOS.get(source, source).partition('@')
    try:
        return huggingface_hub.hf_hub_download(repo, name, revision=revision or None)
    except Exception as e:  # the network has many ways to fail, and they have no common class
        absent = isinstance(e, huggingface_hub.errors.EntryNotFoundError)
        if isinstance(e, huggingface_hub.errors.LocalEntryNotFoundError):  # the Hub does not answer
            # the cache knows that there is no such file, or was never asked for it
            cached = huggingface_hub.try_to_load_from_cache(repo, name, revision=revision or None)
            is_offline = isinstance(e.__cause__, huggingface_hub.errors.OfflineModeIsEnabled)
            absent = cached is not None or is_offline
        if absent and not needed:
            return None
        raise ValueError(f"{name} of {source} cannot be had from {huggingface_hub.constants.ENDPOINT} "
                         f"({type(e).__name__}: {first_line(e)}). check the name, which no file or folder "
                         "here has; accept its terms and log in if it wants that (hf auth login); or name "
                         "a folder")


def read_json_file(path):
    """The dict in a JSON file. ValueError for something else."""
    with open(path, encoding='utf-8-sig') as f:
        value = json.load(f)
    if not isinstance(value, dict):
        raise ValueError(f"{os.path.basename(path)} holds no JSON object")
    return value


def weight_files(source):
    """The paths of the files with a model's weights."""
    for name in ['model.safetensors', 'pytorch_model.bin']:
        path = get_file(source, name, needed=False)
        if path:
            return [path]
        index = get_file(source, name + '.index.json', needed=False)  # {'weight_map': {weight: file}}
        if index:
            files = sorted(set(read_json_file(index)['weight_map'].values()))
            return [get_file(source, os.path.basename(file)) for file in files]
    raise ValueError("it has neither model.safetensors nor pytorch_model.bin")


def load_file(path):
    """{name: tensor} of a file of weights, which stays mapped. Nothing in it is executed."""
    if path.endswith('.safetensors'):
        from safetensors import safe_open
        with safe_open(path, framework='pt') as f:
            return {name: f.get_tensor(name) for name in f.keys()}
    return torch.load(path, map_location='cpu', weights_only=True, mmap=zipfile.is_zipfile(path))


# -----------------------------------------------------------------------------
# reading


def read(source):
    """The model `source`, a folder or a name on the Hub, as the dict of a checkpoint (see checkpoint.read)
    without an optimizer."""
    path = get_file(source, 'config.json')
    try:
        theirs = read_json_file(path)
        weights = {}
        for file in weight_files(source):
            weights.update(load_file(file))
        return as_checkpoint(theirs, weights, read_tokenizer(source, needed=False), source)
    except ImportError as e:
        raise ValueError(f"{source} needs a package that is not installed ({e.name}). pip install "
                         "safetensors tokenizers")
    except Exception as e:  # a file may say anything
        raise ValueError(f"{source} cannot be read into model.py ({type(e).__name__}: {first_line(e)}). "
                         "GPT-2, Llama and NanoChat can, with their activations, and rope as it is or "
                         "llama3's: choose another model, or save this one again with save_pretrained")


def as_checkpoint(theirs, weights, tokenizer_state, path):
    """The dict of a checkpoint for a config.json, a dict, and the weights under their names. dtypes stay:
    checkpoint.build_model() converts."""
    args = from_config(theirs)
    arch = args['arch']
    n_layer = min(args['n_layer'], len(weights))  # a file may say anything
    our_names = {their_name: ours for ours, their_name in weight_names(arch, n_layer).items()}
    model = {}
    for name, p in weights.items():
        if arch == 'gpt2' and not name.startswith(('transformer.', 'lm_head.')):
            name = 'transformer.' + name  # OpenAI's GPT-2 was saved without it
        ours = our_names.get(name, name)
        model[ours] = convert(ours, p, args['n_head'], arch)
    biases = [name for name in model if name.endswith('.bias') and not name.endswith('.attn.bias')]
    if biases and not any(model[name].any() for name in biases):  # transformers' GPT-2 always has them
        args['bias'] = False
        for name in biases:
            del model[name]
    return {'model': model, 'model_args': args, 'tokenizer': tokenizer_state, 'path': path}


def read_tokenizer(source, needed=True):
    """The state of a model's tokenizer, for make_tokenizer(). If it has none: ValueError, or None."""
    if source in GPT2_REPOS and is_hub_name(source):
        return {'kind': 'tiktoken', 'name': 'gpt2'}
    path = get_file(source, 'tokenizer.json', needed)
    if path is None:
        return None
    for name in ['tokenizer_config.json', 'chat_template.jinja']:  # the Hub's files come one by one
        get_file(source, name, needed=False)
    state = hugging_face_state(os.path.dirname(path))
    state['name'] = os.path.basename(source.rstrip('/'))  # not that of a folder in the cache
    return state


# -----------------------------------------------------------------------------
# writing


def write_folder(folder, weights, config, tokenizer, dtype='float32', chat=None, card=''):
    """Write a model (our weights, its GPTConfig) and its tokenizer into `folder`, the weights in `dtype`, in
    files of up to 5 GB. chat: chat.chat_format(tokenizer); card: the text of README.md. Returns the name of
    its class in transformers; ValueError if it has none."""
    from huggingface_hub import save_torch_state_dict
    theirs = to_config(config, tokenizer, dtype)
    tokenizer_json, tokenizer_config = to_tokenizer_json(tokenizer, config.block_size, chat)
    texts = {
        'config.json': json.dumps(theirs, indent=2),
        'generation_config.json': json.dumps(generation_config(config, tokenizer, chat), indent=2),
        'tokenizer.json': tokenizer_json,
        'tokenizer_config.json': tokenizer_config,
        'README.md': card,
    }
    os.makedirs(folder, exist_ok=True)
    renamed = their_weights(weights, config, getattr(torch, dtype))
    save_torch_state_dict(renamed, folder, max_shard_size='5GB', metadata={'format': 'pt'})
    for name, text in texts.items():
        with open(os.path.join(folder, name), 'w', encoding='utf-8') as f:
            f.write(text.rstrip('\n') + '\n')
    # safetensors makes its files for their owner alone; those just written have what the umask says
    mode = os.stat(os.path.join(folder, 'config.json')).st_mode
    for name in os.listdir(folder):
        os.chmod(os.path.join(folder, name), mode)
    return theirs['architectures'][0]


def their_weights(weights, config, dtype):
    """Our weights {name: tensor} under their names, in their layout and in `dtype`."""
    arch = config.arch
    names = weight_names(arch, config.n_layer)
    out = {}
    for ours, p in weights.items():
        if ours not in names:
            raise ValueError(f"{ours} is a weight that transformers' {CLASSES[arch]} has not")
        if ours == 'lm_head.weight' and config.tie:
            continue
        theirs = names[ours]
        out[theirs] = convert(ours, p, config.n_head, arch).to(dtype)
        is_affine = re.search(r'(ln_.|c_attn|c_proj|c_fc)\.weight$', theirs)
        if arch == 'gpt2' and not config.bias and is_affine:  # transformers' GPT-2 always has biases
            n_outputs = out[theirs].shape[-1]  # they come last in a Conv1D
            out[theirs.removesuffix('weight') + 'bias'] = torch.zeros(n_outputs, dtype=dtype)
    return out


def generation_config(config, tokenizer, chat):
    """generation_config.json, a dict: what transformers' generate() does by default."""
    stop_ids = list((chat or tokenizer).stop_ids)  # after an answer, or a text
    out = {
        'bos_token_id': tokenizer.end_of_text,
        'eos_token_id': None,
        'pad_token_id': None,
        'max_new_tokens': max(1, config.block_size // 2),
    }
    if stop_ids:
        out['eos_token_id'] = stop_ids if len(stop_ids) > 1 else stop_ids[0]
        out['pad_token_id'] = stop_ids[0]
    if config.vocab_size > tokenizer.n_vocab:  # ids that only pad the vocabulary
        out['suppress_tokens'] = list(range(tokenizer.n_vocab, config.vocab_size))
    return out


# -----------------------------------------------------------------------------
# our tokenizers as tokenizer.json

# Readers insist on an id that ends a text, and a vocabulary of characters has none. They are told the first
# of these that it has, else its last character: transformers leaves that one out when it shows a text without
# special tokens, so a new line would be a bad choice. generate() does not stop there.
RARE = '\x00\x03\x04\x1a\x0c|~^`\\$@#&%*_=+<>{}[]'


def to_tokenizer_json(tokenizer, block_size, chat):
    """The texts of tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken
    state = tokenizer.state()
    kind = state['kind']
    if kind == 'hf':  # as it came
        plain_config = json.dumps({'tokenizer_class': 'PreTrainedTokenizerFast'})
        return state['json'], state.get('config', plain_config)
    if kind == 'ids':
        raise ValueError("its ids are no text, for which transformers has no tokenizer")
    special = tokenizer.special
    end = None
    if kind == 'char':
        chars = state['chars']
        vocab = {char: id for id, char in enumerate(chars)}
        out = char_tokenizer({**vocab, **special})
        rare = [char for char in RARE if char in chars]
        end = rare[0] if rare else chars[-1]
        out.add_tokens([AddedToken(end, special=False, normalized=False)])
    elif kind == 'byte':
        ranks = {bytes([byte]): byte for byte in range(256)}
        out = bpe_tokenizer(ranks, special)
    else:
        ranks = {}
        for line in state['ranks'].splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        out = bpe_tokenizer(ranks, special, state['pat_str'])
    out.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    for token, id in special.items():
        if id == tokenizer.end_of_text:
            end = token
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'model_max_length': block_size,
        'clean_up_tokenization_spaces': False,
    }
    if end is not None:
        config.update(bos_token=end, eos_token=end, pad_token=end)
    if chat:  # finetuned on conversations
        config.update(eos_token=ASSISTANT_END, chat_template=chat.template)
    return out.to_str(pretty=True), json.dumps(config, indent=2)


def char_tokenizer(vocab):
    """vocab: {character or special token: id}"""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    out = Tokenizer(models.WordLevel(vocab))  # without an unknown token: an unknown character is an error
    out.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
    out.decoder = decoders.Fuse()
    return out


def bpe_tokenizer(ranks, special, pattern=None):
    """A byte-level BPE. ranks: {token, in bytes: id}; special: {token: id}; pattern: the regular expression
    that splits the text (tiktoken's; None: nothing does)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    letters = bytes_to_unicode()

    def spell(token):
        return ''.join(letters[byte] for byte in token)

    vocab = {spell(token): rank for token, rank in ranks.items()}
    vocab.update(special)
    merges = [(spell(left), spell(right)) for left, right in merges_of(ranks)]
    # ignore_merges: a word in the vocabulary is that token, however its merges would end, as in tiktoken
    out = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    steps = []
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(oniguruma(pattern)), 'isolated'))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    out.pre_tokenizer = pre_tokenizers.Sequence(steps)
    out.decoder = decoders.ByteLevel()
    return out


def merges_of(ranks):
    """The merges that made the tokens {bytes: rank}, in order: the last merge of each token, found by merging
    its bytes with the tokens of lower rank."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pair_ranks = [ranks.get(left + right, rank) for left, right in zip(parts, parts[1:])]
            best = min(pair_ranks)
            if best >= rank:
                break  # not made of two tokens: it is only found whole (ignore_merges)
            i = pair_ranks.index(best)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append(parts)
    return merges
