"""
Read and write Hugging Face folders, without transformers and without executing anything in them.

    ckpt = huggingface.read('HuggingFaceTB/SmolLM2-135M')  # a folder, or a name on the Hub

In the tables below, our names are on the left and those of transformers on the right. The presets gpt2, llama
and modern are the GPT-2, Llama and NanoChat of transformers.
"""

import dataclasses
import json
import os
import re

import numpy as np
import torch

from configurator import InputError
from flatgpt.files import check_not_lfs_pointer, first_line, read_json
from flatgpt.tokenizer import (
    ASSISTANT_END, GPT2_STATE, PATTERN, Tokenizer, bytes_to_unicode, import_package, package_errors,
    pre_tokenizer_of, without_surrogates)
from model import NANOGPT

# -----------------------------------------------------------------------------
# names: ours, theirs

GPT2_REPOS = {  # nanoGPT's names and those on the Hub
    'gpt2': 'openai-community/gpt2',
    'gpt2-medium': 'openai-community/gpt2-medium',
    'gpt2-large': 'openai-community/gpt2-large',
    'gpt2-xl': 'openai-community/gpt2-xl',
}
CLASSES = {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM', 'modern': 'NanoChatForCausalLM'}
MODEL_TYPES = {'gpt2': 'gpt2', 'llama': 'llama', 'modern': 'nanochat'}
ACTIVATION_NAMES = {'gelu': 'gelu', 'gelu_tanh': 'gelu_new', 'relu2': 'relu2', 'swiglu': 'silu'}
ROPE_SCALING = ['factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings']

# {field of GPTConfig: (field of config.json, its default in transformers, if config.json omits it)}
GPT2_FIELDS = {
    'vocab_size': ('vocab_size', 50257),
    'block_size': ('n_positions', 1024),
    'n_embd': ('n_embd', 768),
    'n_layer': ('n_layer', 12),
    'n_head': ('n_head', 12),
    'mlp_width': ('n_inner', None),
    'mlp': ('activation_function', 'gelu_new'),
    'norm_eps': ('layer_norm_epsilon', 1e-5),
    'tie': ('tie_word_embeddings', True),
}
LLAMA_FIELDS = {
    'vocab_size': ('vocab_size', 32000),
    'block_size': ('max_position_embeddings', 2048),
    'n_embd': ('hidden_size', 4096),
    'n_layer': ('num_hidden_layers', 32),
    'n_head': ('num_attention_heads', 32),
    'n_kv_head': ('num_key_value_heads', None),
    'mlp_width': ('intermediate_size', 11008),
    'mlp': ('hidden_act', 'silu'),
    'norm_eps': ('rms_norm_eps', 1e-6),
    'tie': ('tie_word_embeddings', False),
    'rope_theta': ('rope_theta', 10000.0),
}
NANOCHAT_FIELDS = {
    **LLAMA_FIELDS,
    'vocab_size': ('vocab_size', 50304),
    'n_embd': ('hidden_size', 768),
    'n_layer': ('num_hidden_layers', 12),
    'n_head': ('num_attention_heads', 6),
    'mlp_width': ('intermediate_size', 8192),
    'mlp': ('hidden_act', 'relu2'),
    'softcap': ('final_logit_softcapping', 15.0),
}
FIELDS = {'gpt2': GPT2_FIELDS, 'llama': LLAMA_FIELDS, 'modern': NANOCHAT_FIELDS}

# weights without .weight or .bias; {} is the index of the layer
GPT2_WEIGHTS = {
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
WEIGHTS = {'gpt2': GPT2_WEIGHTS, 'llama': LLAMA_WEIGHTS, 'modern': NANOCHAT_WEIGHTS}

# The networks of transformers. They repeat the presets of model.py, as those may be edited
LLAMA_NETWORK = dict(NANOGPT, norm='rmsnorm', bias=False, positions='rope', fused_qkv=False, mlp='swiglu',
                     tie=False)
NANOCHAT_NETWORK = dict(LLAMA_NETWORK, norm='rmsnorm_plain', norm_eps=1e-6, embd_norm=True, qk_norm=True,
                        mlp='relu2', softcap=15.0, init='modern')
NETWORKS = {'gpt2': NANOGPT, 'llama': LLAMA_NETWORK, 'modern': NANOCHAT_NETWORK}


def inverse(table):
    """Return {theirs: ours} of a table {ours: theirs}."""
    return {theirs: ours for ours, theirs in table.items()}


# -----------------------------------------------------------------------------
# weights


def weight_names(arch, n_layer):
    """Return {our name: their name} of all weights that a model of this preset can have."""
    names = {}
    for ours, theirs in WEIGHTS[arch].items():
        for i in range(n_layer):
            for kind in ['.weight', '.bias']:
                names[ours.format(i) + kind] = theirs.format(i) + kind  # without {}, the same for each i
    return names


def convert(name, p, n_head, arch):
    """Convert the weight `p` between our layout and theirs; the conversion is its own inverse. name: ours."""
    if arch == 'gpt2' and name.endswith(('c_attn.weight', 'c_proj.weight', 'c_fc.weight')):
        p = p.t()  # OpenAI's "Conv1D" is a Linear with its matrix transposed
    if arch == 'modern' and name.endswith(('c_q.weight', 'c_k.weight')):
        # NanoChat rotates by the opposite angle: exchange the two halves of each head
        n_embd = p.size(1)
        halves = p.view(-1, 2, n_embd // n_head // 2, n_embd)  # (heads, 2, D/2, C)
        p = halves.flip(1).reshape(p.shape)
    return p.contiguous()


# -----------------------------------------------------------------------------
# config.json


def check_network(config):
    """Raise InputError if the network of a GPTConfig differs from that of its class in transformers."""
    arch = config.arch
    # fields that may have any value: config.json contains them, or they do not matter there
    any_value = [*FIELDS[arch], 'arch', 'bias', 'dropout', 'init', 'rope_theta', 'rope_scaling']
    if 'swiglu' in (config.mlp, NETWORKS[arch]['mlp']):
        any_value.remove('mlp')  # swiglu has three matrices, the others have two
    required = {**NETWORKS[arch], 'n_kv_head': config.n_head}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        wanted = required.get(field.name, field.default)  # a field that an edit added must be at its default
        if field.name not in any_value and value != wanted:
            raise InputError(f"{CLASSES[arch]} of transformers has another network: {field.name} is {wanted} "
                             f"there, {value} here. Train a model with an unedited preset.")


def to_config(config, dtype):
    """Return the config.json of a GPTConfig, a dict."""
    check_network(config)
    arch = config.arch
    theirs = {'architectures': [CLASSES[arch]], 'model_type': MODEL_TYPES[arch], 'dtype': dtype}
    for ours, (name, _) in FIELDS[arch].items():
        theirs[name] = getattr(config, ours)
    theirs[FIELDS[arch]['mlp'][0]] = ACTIVATION_NAMES[config.mlp]
    if arch == 'gpt2':
        theirs['n_ctx'] = config.block_size  # for llama.cpp's converter
        return theirs
    if arch == 'modern':
        theirs['final_logit_softcapping'] = config.softcap or None
    rope = {'rope_type': 'default', 'rope_theta': config.rope_theta}
    if config.rope_scaling:
        rope = {**rope, **config.rope_scaling, 'rope_type': 'llama3'}
        theirs['rope_scaling'] = rope  # for transformers 4, like the rope_theta above
    theirs['rope_parameters'] = rope
    return theirs


def from_config(theirs, path):
    """Return the arguments of GPTConfig for a config.json, a dict. path: the file's, for messages."""
    arch = inverse(MODEL_TYPES).get(theirs.get('model_type'))
    if arch is None:
        raise unsupported(path, 'model_type', theirs.get('model_type'))
    # transformers 5 has rope_parameters, 4 rope_scaling and rope_theta
    rope = theirs.get('rope_parameters') or theirs.get('rope_scaling') or {}
    theirs = {**theirs, **rope}
    # these change the results, but neither names nor shapes of the weights
    required = {
        'scale_attn_weights': True,
        'scale_attn_by_inverse_layer_idx': False,
        'partial_rotary_factor': 1.0,
    }
    for name, value in required.items():
        if theirs.get(name, value) != value:
            raise unsupported(path, name, theirs[name])

    args = {**NETWORKS[arch], 'arch': arch}
    for ours, (name, default) in FIELDS[arch].items():
        args[ours] = theirs.get(name, default)
    activation = args['mlp']
    args['mlp'] = inverse(ACTIVATION_NAMES).get(activation)
    if args['mlp'] is None:
        raise unsupported(path, 'activation', activation)
    if args['tie']:
        args['init'] = 'gpt2'  # modern's initializes the head to zero
    if arch == 'modern':
        args['softcap'] = args['softcap'] or 0.0
    rope_type = rope.get('rope_type', rope.get('type', 'default'))
    if rope_type == 'llama3':
        args['rope_scaling'] = {name: rope[name] for name in ROPE_SCALING}
    elif rope_type != 'default':
        raise unsupported(path, 'rope_type', rope_type)
    return args


def unsupported(path, name, value):
    """Return the InputError for a value in a config.json."""
    return InputError(f"{path} describes a network that model.py lacks: {name} is {value!r}. Use a GPT-2, "
                      "Llama or NanoChat model; docs/huggingface.md lists what can be read.")


# -----------------------------------------------------------------------------
# read

# patterns of the files to download; pickles are downloaded only if there are no safetensors
CONFIG_FILES = ['tokenizer*', 'config.json', 'generation_config.json']
MODEL_FILES = ['model*.safetensors', 'model.safetensors.index.json', *CONFIG_FILES]
PICKLE_FILES = ['pytorch_model*.bin', 'pytorch_model.bin.index.json']


def is_hub_name(source):
    """Return whether `source` may be on the Hub: a name of GPT2_REPOS, OWNER/NAME or OWNER/NAME@REVISION."""
    if source.endswith('.pt') or os.path.exists(source) or os.path.exists(os.path.dirname(source)):
        return False
    is_full_name = re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?', source) is not None
    return source in GPT2_REPOS or is_full_name


def find_folder(source, patterns):
    """Return the folder of a model. A model on the Hub is downloaded into Hugging Face's cache.

    patterns: of the files to download.
    """
    if not is_hub_name(source):
        return source
    huggingface_hub = import_package('huggingface_hub')
    repo, _, revision = GPT2_REPOS.get(source, source).partition('@')
    try:
        huggingface_hub.utils.disable_progress_bars()
        return huggingface_hub.snapshot_download(repo, revision=revision or None, allow_patterns=patterns)
    except Exception as e:  # the errors of a network have no common class
        raise InputError(f"{source} is not a local path and could not be downloaded from the Hub: "
                         f"{type(e).__name__}, {first_line(e)}. Check the name and the network; if the model "
                         "asks for it, accept its terms and log in (hf auth login).") from e


def weight_files(folder):
    """Return the paths of a model's weights: one file, or the shards in an index; [] if there are none.

    Shards that are not in the index may be those of another model.
    """
    for name in ['model.safetensors', 'pytorch_model.bin']:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return [path]
        if os.path.exists(path + '.index.json'):
            with open(path + '.index.json', encoding='utf-8-sig') as f:
                shards = sorted(set(json.load(f)['weight_map'].values()))
            return [os.path.join(folder, shard) for shard in shards]
    return []


def load_weights(path):
    """Return {their name: tensor in their layout} of a file of weights."""
    check_not_lfs_pointer(path)
    if path.endswith('.safetensors'):
        import_package('safetensors')
        from safetensors.torch import load_file
        return load_file(path)
    return torch.load(path, map_location='cpu', weights_only=True)


def read(source):
    """Return the model in a folder or on the Hub as the dict of a checkpoint, see checkpoint.read()."""
    folder = find_folder(source, MODEL_FILES)
    try:
        with open(os.path.join(folder, 'config.json'), encoding='utf-8-sig') as f:
            args = from_config(json.load(f), f.name)
        files = weight_files(folder) or weight_files(find_folder(source, PICKLE_FILES))
        if not files:
            raise FileNotFoundError("no model.safetensors, no pytorch_model.bin")
        weights = {}
        for path in files:
            weights.update(load_weights(path))

        arch = args['arch']
        our_names = inverse(weight_names(arch, min(args['n_layer'], len(weights))))
        model = {}
        for name, p in weights.items():
            if arch == 'gpt2' and not name.startswith(('transformer.', 'lm_head.')):
                name = 'transformer.' + name  # OpenAI's GPT-2 was saved without it
            ours = our_names.get(name, name)
            model[ours] = convert(ours, p, args['n_head'], arch)
        tokenizer_state = read_tokenizer(source, optional=True)
    except InputError:
        raise
    except Exception as e:  # a file may contain anything
        raise InputError(f"{source} is damaged, or not a model that transformers has saved "
                         f"({type(e).__name__}: {first_line(e)}). Save it again with save_pretrained(), or "
                         "use another model.") from e
    return {'model': model, 'model_args': args, 'tokenizer': tokenizer_state, 'path': source}


def read_tokenizer(source, optional=False):
    """Return the state of a model's tokenizer. optional: return None if the model has none."""
    if source in GPT2_REPOS and is_hub_name(source):
        return GPT2_STATE
    folder = find_folder(source, CONFIG_FILES)
    if optional and not os.path.exists(os.path.join(folder, 'tokenizer.json')):
        return None
    state = tokenizer_state(folder)
    state['name'] = os.path.basename(source.rstrip('/'))  # not that of a folder in the cache
    return state


# -----------------------------------------------------------------------------
# their tokenizers

# the tokens that begin and end a text, if tokenizer_config.json does not name them
SPECIAL_NAMES = {
    'bos_token': ['<|bos|>', '<s>', '<bos>', '<SOS>'],  # SimpleLLaMA's bpe_8k.json has <SOS> and <EOS>
    'eos_token': ['<|endoftext|>', '</s>', '<eos>', '<EOS>'],
}


class HFTokenizer(Tokenizer):
    """A tokenizer.json, read by the `tokenizers` package.

    A document starts with the tokenizer's beginning-of-sequence token or, without one, with its
    end-of-sequence token.
    """

    def __init__(self, state):
        tokenizers = import_package('tokenizers')
        self.tokenizer = tokenizers.Tokenizer.from_str(state['json'])
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocab = self.tokenizer.get_vocab()
        pre_tokenizer = self.tokenizer.pre_tokenizer
        if isinstance(pre_tokenizer, tokenizers.pre_tokenizers.ByteLevel) and not self.tokenizer.decoder:
            # SimpleLLaMA's bpe_8k.json: its authors set these two after loading it
            self.tokenizer.decoder = tokenizers.decoders.ByteLevel()
            if '<UNK>' in vocab:
                self.tokenizer.model.unk_token = '<UNK>'
            state = {**state, 'json': self.tokenizer.to_str()}
        added = self.tokenizer.get_added_tokens_decoder()  # {id: AddedToken}
        special = {token.content: id for id, token in added.items() if token.special}
        super().__init__(state, self.text_pieces_of(vocab, added, special), special)

        self.config = json.loads(state.get('config', '{}'))  # of tokenizer_config.json
        id_of = {}  # of 'bos_token' and 'eos_token'
        for key, names in SPECIAL_NAMES.items():
            for name in names:
                if name in special:
                    self.config.setdefault(key, name)
            token = self.config.get(key)
            if isinstance(token, dict):  # with its properties
                token = token['content']
            id_of[key] = special.get(token)
        self.end_of_text = id_of['bos_token']
        if self.end_of_text is None:
            self.end_of_text = id_of['eos_token']
        # the end-of-sequence token ends a text, and so does the token that starts the next document
        ends = [id_of['eos_token'], self.end_of_text, *state.get('stop_ids', [])]
        self.stop_ids = [id for id in dict.fromkeys(ends) if id is not None]

    def text_pieces_of(self, vocab, added, special):
        """Return {id: bytes} of the tokens in `vocab`, {token: id}, without special tokens.

        The unknown token has no bytes, as it takes the place of a text that is lost.
        """
        unknown = getattr(self.tokenizer.model, 'unk_token', None)
        byte_of = {}
        if 'ByteLevel' in str(self.tokenizer.decoder):  # tokens have a character for each byte
            byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        pieces = {}
        for token, id in vocab.items():
            if token in special:
                continue
            if token == unknown:
                pieces[id] = b''
            elif id not in added and all(letter in byte_of for letter in token):
                pieces[id] = bytes(byte_of[letter] for letter in token)
            elif re.fullmatch('<0x[0-9A-F]{2}>', token):  # sentencepiece's token for a byte
                pieces[id] = bytes.fromhex(token[3:5])
            else:
                pieces[id] = token.replace('\u2581', ' ').encode()  # sentencepiece's mark for a space
        return pieces

    def encode(self, text):
        return np.array(self.encode_with(text, is_prompt=False).ids, dtype=np.uint32)

    def encode_prompt(self, text):
        encoding = self.encode_with(text, is_prompt=True)
        # Keep the tokens that the template puts first, such as Llama's <s>, and drop those that it puts last,
        # such as </s>, which would end the text. sequence_ids is None for a token of the template
        ids = encoding.ids
        while len(ids) > 1 and encoding.sequence_ids[len(ids) - 1] is None:
            ids.pop()
        if ids[:2] == [self.end_of_text] * 2:  # the text itself begins with it
            return ids[1:]
        return ids

    def encode_with(self, text, is_prompt):
        self.tokenizer.encode_special_tokens = not is_prompt  # True: as text
        text = without_surrogates(text)
        name = self._state.get('name', 'tokenizer.json')
        with package_errors(f"the tokenizer {name!r} cannot encode the text", "Add an unknown token to it."):
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=is_prompt)[0]

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def tokenizer_state(path):
    """Return the state of a Hugging Face tokenizer.

    path: a tokenizer.json (of any name), or the folder that contains it. If they exist, these files in the
    folder are read as well: tokenizer_config.json, generation_config.json (the ids that end a text) and
    config.json (the size of the model's embedding).
    """
    path = os.path.abspath(path)
    file = os.path.join(path, 'tokenizer.json') if os.path.isdir(path) else path
    folder = os.path.dirname(file)
    content = read_valid_json(file) if os.path.exists(file) else {}
    if 'model' not in content:
        raise InputError(f"no tokenizer.json: {path}. docs/huggingface.md shows how to make one from "
                         "sentencepiece's tokenizer.model, or from vocab.json and merges.txt.")
    # a token that was added after training, often [PAD], may have no row in the model's embedding
    n_rows = read_json(os.path.join(folder, 'config.json')).get('vocab_size') or float('inf')
    with package_errors(f"{file} is not valid", "Download or save it again."):
        added = content.get('added_tokens', [])
        content['added_tokens'] = [token for token in added if token['id'] < n_rows]
    state = {'kind': 'hf', 'name': os.path.basename(path), 'json': json.dumps(content, ensure_ascii=False)}
    config_file = os.path.join(folder, 'tokenizer_config.json')
    if os.path.exists(config_file):
        state['config'] = json.dumps(read_valid_json(config_file))
    stop_ids = read_json(os.path.join(folder, 'generation_config.json')).get('eos_token_id')
    if stop_ids is not None:
        state['stop_ids'] = stop_ids if isinstance(stop_ids, list) else [stop_ids]
    return state


def read_valid_json(path):
    """Return the dict in a JSON file, or raise InputError."""
    check_not_lfs_pointer(path)
    content = read_json(path)
    if not content:
        raise InputError(f"{path} is not a valid JSON file. Download or save it again.")
    return content


# -----------------------------------------------------------------------------
# write


def write_folder(folder, weights, config, tokenizer, dtype='float32', chat=None):
    """Write a model and its tokenizer into `folder`, the weights in files of up to 5 GB.

    weights, config: a GPT's state_dict() and GPTConfig. dtype: of the written weights, a name. chat: the
    tokenizer's chat_format() of conversations.py.
    """
    from huggingface_hub import save_torch_state_dict
    theirs = to_config(config, dtype)
    stop_ids = chat.stop_ids if chat else tokenizer.stop_ids
    generation = {
        'bos_token_id': tokenizer.end_of_text,
        'eos_token_id': list(stop_ids) if stop_ids else None,
        'pad_token_id': None,  # NanoChat's default is 1; token 1 would not be trained in transformers
    }
    theirs.update(generation)
    tokenizer_json, tokenizer_config = to_tokenizer_json(tokenizer, chat)
    texts = {
        'config.json': json.dumps(theirs, indent=2),
        'generation_config.json': json.dumps(generation, indent=2),
        'tokenizer.json': tokenizer_json,
        'tokenizer_config.json': json.dumps(tokenizer_config, indent=2),
    }
    os.makedirs(folder, exist_ok=True)
    save_torch_state_dict(their_weights(weights, config, getattr(torch, dtype)), folder)
    for name, text in texts.items():
        with open(os.path.join(folder, name), 'w', encoding='utf-8') as f:
            f.write(text)


def their_weights(weights, config, dtype):
    """Return a state_dict() with their names, in their layout and in `dtype`."""
    arch = config.arch
    names = weight_names(arch, config.n_layer)
    converted = {}
    for ours, p in weights.items():
        if ours == 'lm_head.weight' and config.tie:
            continue
        if ours not in names:  # model.py was edited
            raise InputError(f"{CLASSES[arch]} of transformers has no weight {ours}. Train a model without "
                             "it.")
        theirs = names[ours]
        converted[theirs] = convert(ours, p, config.n_head, arch).to(dtype)
        if arch == 'gpt2' and not config.bias and ('.h.' in ours or '.ln_f.' in ours):
            # transformers' GPT-2 always has biases, one per output
            converted[theirs.replace('.weight', '.bias')] = torch.zeros(p.size(0), dtype=dtype)
    return converted


def to_tokenizer_json(tokenizer, chat):
    """Return the text of tokenizer.json and the dict of tokenizer_config.json."""
    state = tokenizer.state()
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False}
    if state['kind'] == 'ids':
        raise InputError("transformers has no tokenizer for ids that are plain numbers. Export a model of "
                         "text.")
    if state['kind'] == 'hf':
        text = state['json']
        config.update(tokenizer.config)
    else:
        text = our_tokenizer(tokenizer).to_str()
        for token, id in tokenizer.special.items():
            if id == tokenizer.end_of_text:
                config.update(bos_token=token, eos_token=token, pad_token=token)
    if chat:
        config.update(bos_token=chat.bos, eos_token=ASSISTANT_END, chat_template=chat.template)
    return text, config


def our_tokenizer(tokenizer):
    """Convert a tokenizer of characters, bytes or tiktoken to one of the `tokenizers` package."""
    import tokenizers  # its Tokenizer is not ours
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    special = tokenizer.special
    if tokenizer.state()['kind'] == 'char':
        # it has no unknown token, so an unknown character is an error
        theirs = tokenizers.Tokenizer(models.WordLevel({**tokenizer.id_of, **special}))
        theirs.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
        theirs.decoder = decoders.Fuse()
    else:
        letters = bytes_to_unicode()
        ids = {}  # of the tokens, with a character for each byte
        for id, piece in tokenizer.text_pieces.items():
            ids[''.join(letters[byte] for byte in piece)] = id
        # tiktoken merges any two tokens whose concatenation is a token; the lowest resulting id goes first
        merges = []
        for token in sorted(ids, key=ids.get):
            for i in range(1, len(token)):
                if token[:i] in ids and token[i:] in ids:
                    merges.append((token[:i], token[i:]))
        # ignore_merges: as in tiktoken, a word that is itself a token gets its id even if no merge yields it
        theirs = tokenizers.Tokenizer(models.BPE({**ids, **special}, merges, ignore_merges=True))
        theirs.pre_tokenizer = pre_tokenizer_of(tokenizer.state().get('pat_str', PATTERN))
        theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return theirs
