"""
The door to Hugging Face: folders that transformers opens, written from our weights, and read into them. Used by export.py to
write, and by whatever takes --init_from to read. Nothing in such a folder is executed, and transformers is not needed.

    state = huggingface.read('HuggingFaceTB/SmolLM2-135M')                      # a folder or a name on the Hub
    huggingface.write('out-hf', weights, GPTConfig(...), tokenizer_state)
"""

import json
import os
import re

import torch

from configurator import fail
from dataset import END_OF_TEXT, byte_letters, make_tokenizer
from model import GPT, PRESETS, GPTConfig, parse_rope_scaling

# our names, theirs; {} is the number of a layer. A weight that an architecture lacks is None there
CLASSES = ('GPT2LMHeadModel', 'LlamaForCausalLM', 'NanoChatForCausalLM')
NAMES = {
    'transformer.wte.weight':           ('transformer.wte.weight',            'model.embed_tokens.weight',                        'model.embed_tokens.weight'),
    'transformer.wpe.weight':           ('transformer.wpe.weight',            None,                                               None),
    'transformer.h.{}.ln_1.weight':     ('transformer.h.{}.ln_1.weight',      'model.layers.{}.input_layernorm.weight',           None),
    'transformer.h.{}.ln_1.bias':       ('transformer.h.{}.ln_1.bias',        None,                                               None),
    'transformer.h.{}.attn.c_attn.weight': ('transformer.h.{}.attn.c_attn.weight', None,                                          None),
    'transformer.h.{}.attn.c_attn.bias':   ('transformer.h.{}.attn.c_attn.bias', None,                                            None),
    'transformer.h.{}.attn.c_q.weight': (None,                                'model.layers.{}.self_attn.q_proj.weight',          'model.layers.{}.self_attn.q_proj.weight'),
    'transformer.h.{}.attn.c_k.weight': (None,                                'model.layers.{}.self_attn.k_proj.weight',          'model.layers.{}.self_attn.k_proj.weight'),
    'transformer.h.{}.attn.c_v.weight': (None,                                'model.layers.{}.self_attn.v_proj.weight',          'model.layers.{}.self_attn.v_proj.weight'),
    'transformer.h.{}.attn.c_proj.weight': ('transformer.h.{}.attn.c_proj.weight', 'model.layers.{}.self_attn.o_proj.weight',     'model.layers.{}.self_attn.o_proj.weight'),
    'transformer.h.{}.attn.c_proj.bias':   ('transformer.h.{}.attn.c_proj.bias', None,                                            None),
    'transformer.h.{}.ln_2.weight':     ('transformer.h.{}.ln_2.weight',      'model.layers.{}.post_attention_layernorm.weight',  None),
    'transformer.h.{}.ln_2.bias':       ('transformer.h.{}.ln_2.bias',        None,                                               None),
    'transformer.h.{}.mlp.c_gate.weight': (None,                              'model.layers.{}.mlp.gate_proj.weight',             None),
    'transformer.h.{}.mlp.c_fc.weight': ('transformer.h.{}.mlp.c_fc.weight',  'model.layers.{}.mlp.up_proj.weight',               'model.layers.{}.mlp.fc1.weight'),
    'transformer.h.{}.mlp.c_fc.bias':   ('transformer.h.{}.mlp.c_fc.bias',    None,                                               None),
    'transformer.h.{}.mlp.c_proj.weight': ('transformer.h.{}.mlp.c_proj.weight', 'model.layers.{}.mlp.down_proj.weight',          'model.layers.{}.mlp.fc2.weight'),
    'transformer.h.{}.mlp.c_proj.bias': ('transformer.h.{}.mlp.c_proj.bias',  None,                                               None),
    'transformer.ln_f.weight':          ('transformer.ln_f.weight',           'model.norm.weight',                                None),
    'transformer.ln_f.bias':            ('transformer.ln_f.bias',             None,                                               None),
    'lm_head.weight':                   ('lm_head.weight',                    'lm_head.weight',                                   'lm_head.weight'),
}
# the parts that each of the three has, where it has no choice
FIXED = {
    'gpt2': dict(norm='layernorm', positions='learned', fused_qkv=True, embd_norm=False, qk_norm=False, softcap=0.0),
    'llama': dict(norm='rmsnorm', positions='rope', fused_qkv=False, embd_norm=False, qk_norm=False, softcap=0.0, mlp='swiglu'),
    'modern': dict(norm='rmsnorm_plain', positions='rope', fused_qkv=False, embd_norm=True, qk_norm=True),
}
ACTIVATIONS = {'gelu': 'gelu', 'gelu_tanh': 'gelu_new', 'relu2': 'relu2'}  # ours, theirs
SAME = {'gelu_pytorch_tanh': 'gelu_new', 'gelu_fast': 'gelu_new'}
ROPE_KEYS = {'default': [], 'linear': ['factor'], 'llama3': ['factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings']}
GPT2_NAMES = {name: 'openai-community/' + name for name in ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')}  # as nanoGPT calls them


def translate(weights, config, arch, there):
    """Our weights under their names and in their layout if `there`, else theirs under ours. Each direction undoes the other."""
    column = PRESETS.index(arch)
    out = {}
    for ours, row in NAMES.items():
        for layer in range(config.n_layer) if '{}' in ours else [0]:
            mine, theirs = ours.format(layer), (row[column] or '').format(layer)
            name = mine if there else theirs
            if name not in weights:
                continue
            p = weights[name]
            if arch == 'gpt2' and re.search(r'\.(c_attn|c_proj|c_fc)\.weight$', mine):
                p = p.t()  # OpenAI's "Conv1D" is a Linear with its matrix transposed
            if arch == 'modern' and re.search(r'\.c_[qk]\.weight$', mine):
                # NanoChat turns the other way than Llama, and we turn as Llama does: with the two halves of each head's channels
                # exchanged, the one becomes the other
                D = config.n_embd // config.n_head
                p = p.view(-1, 2, D // 2, config.n_embd).flip(1).reshape(p.shape)
            out[theirs if there else mine] = p.contiguous()
    return out


# -----------------------------------------------------------------------------
# configurations


def to_config(config, tokenizer=None, dtype='float32'):
    """The config.json (a dict) for a GPTConfig, and the preset whose architecture it is. A ValueError says why there is none."""
    differences = {arch: [f"{name}={getattr(config, name)} (there: {value})" for name, value in fixed.items() if getattr(config, name) != value]
                   for arch, fixed in FIXED.items()}
    arch = min(differences, key=lambda arch: len(differences[arch]))
    wrong = differences[arch]
    if arch != 'llama' and config.mlp not in ACTIVATIONS:
        wrong.append(f"mlp={config.mlp} (there: {', '.join(ACTIVATIONS)})")
    if arch == 'gpt2' and config.n_kv_head != config.n_head:
        wrong.append(f"n_kv_head={config.n_kv_head} (there: as n_head)")
    if wrong:
        raise ValueError(f"no architecture of transformers has these parts; the nearest, {CLASSES[PRESETS.index(arch)]}, differs in {', '.join(wrong)}")
    end_of_text = getattr(tokenizer, 'end_of_text', None)
    out = {'architectures': [CLASSES[PRESETS.index(arch)]], 'model_type': 'nanochat' if arch == 'modern' else arch, 'vocab_size': config.vocab_size,
           'bos_token_id': end_of_text, 'eos_token_id': (getattr(tokenizer, 'stop_ids', None) or [None])[0],
           'pad_token_id': None,  # or NanoChat's default applies, which is 1, and row 1 of the embedding does not train
           'tie_word_embeddings': config.tie, 'initializer_range': 0.02, 'use_cache': True, 'dtype': dtype, 'torch_dtype': dtype}
    if arch == 'gpt2':
        return {**out, 'n_positions': config.block_size, 'n_embd': config.n_embd, 'n_layer': config.n_layer, 'n_head': config.n_head,
                'n_inner': config.mlp_width, 'activation_function': ACTIVATIONS[config.mlp], 'layer_norm_epsilon': config.norm_eps,
                **{name: config.dropout for name in ('resid_pdrop', 'embd_pdrop', 'attn_pdrop')}}, arch
    kind, numbers = config.rope_scaling.split(':')[0], parse_rope_scaling(config.rope_scaling)
    scaling = {'rope_type': kind, **dict(zip(ROPE_KEYS[kind], numbers))} if kind != 'none' else None
    if kind == 'llama3':
        scaling['original_max_position_embeddings'] = int(numbers[-1])
    rope = {**(scaling or {'rope_type': 'default'}), 'rope_theta': config.rope_theta}
    return {**out, 'max_position_embeddings': config.block_size, 'hidden_size': config.n_embd, 'num_hidden_layers': config.n_layer,
            'num_attention_heads': config.n_head, 'num_key_value_heads': config.n_kv_head, 'head_dim': config.n_embd // config.n_head,
            'intermediate_size': config.mlp_width, 'hidden_act': 'silu' if arch == 'llama' else ACTIVATIONS[config.mlp],
            'rms_norm_eps': config.norm_eps, 'attention_dropout': config.dropout, 'attention_bias': False,
            'rope_parameters': rope, 'rope_theta': config.rope_theta, 'rope_scaling': scaling,  # what transformers 5 reads, and what 4 did
            **({'mlp_bias': False} if arch == 'llama' else {'final_logit_softcapping': config.softcap or None})}, arch


def from_config(theirs):
    """(model_args, preset) of a config.json. A ValueError says what our network lacks."""
    kind = theirs.get('model_type')
    if kind not in ('gpt2', 'llama', 'nanochat'):
        raise ValueError(f"its model_type is {kind!r}; flatgpt reads gpt2, llama and nanochat")
    refuse = {'quantization_config': None, 'attention_bias': False, 'mlp_bias': False, 'scale_attn_by_inverse_layer_idx': False,
              'add_cross_attention': False, 'scale_attn_weights': kind == 'gpt2' or None}
    for name, fine in refuse.items():
        if theirs.get(name, fine) != fine and theirs.get(name) is not None:
            raise ValueError(f"its {name} is {theirs[name]!r}, which flatgpt's network does not have")

    def activation(name):
        for ours, value in ACTIVATIONS.items():
            if SAME.get(name, name) == value:
                return ours
        raise ValueError(f"its activation is {name!r}; flatgpt has {', '.join(ACTIVATIONS.values())}")

    if kind == 'gpt2':
        defaults = dict(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12, n_inner=None, activation_function='gelu_new',
                        layer_norm_epsilon=1e-5, tie_word_embeddings=True)
        c = {**defaults, **theirs}
        return dict(arch='gpt2', block_size=c['n_positions'], vocab_size=c['vocab_size'], n_layer=c['n_layer'], n_head=c['n_head'], n_embd=c['n_embd'],
                    bias=True, mlp=activation(c['activation_function']), mlp_width=c['n_inner'] or 4 * c['n_embd'],
                    norm_eps=c['layer_norm_epsilon'], tie=c['tie_word_embeddings']), 'gpt2'
    arch = 'llama' if kind == 'llama' else 'modern'
    defaults = dict(num_key_value_heads=None, max_position_embeddings=2048, rms_norm_eps=1e-6, tie_word_embeddings=False, final_logit_softcapping=15.0,
                    hidden_act='silu' if kind == 'llama' else 'relu2')  # what transformers takes where config.json is silent
    c = {**defaults, **theirs}
    H, C = c['num_attention_heads'], c['hidden_size']
    if (c.get('head_dim') or C // H) != C // H:
        raise ValueError(f"its head_dim is {c['head_dim']}, flatgpt's heads share the {C} channels: {C // H} each")
    if kind == 'llama' and c['hidden_act'] != 'silu':
        raise ValueError(f"its activation is {c['hidden_act']!r}; flatgpt's gated MLP has silu")
    rope = {**(c.get('rope_scaling') or {}), **(c.get('rope_parameters') or {})}
    rope_type = rope.get('rope_type', rope.get('type', 'default'))
    if rope_type not in ROPE_KEYS or rope.get('partial_rotary_factor', c.get('partial_rotary_factor', 1.0)) not in (None, 1.0):
        raise ValueError(f"its rotary positions are of the kind {rope_type!r}; flatgpt has default, linear and llama3, over whole heads")
    keys = ROPE_KEYS[rope_type]
    return dict(arch=arch, block_size=c['max_position_embeddings'], vocab_size=c['vocab_size'], n_layer=c['num_hidden_layers'], n_head=H, n_embd=C,
                bias=False, n_kv_head=c['num_key_value_heads'] or H, mlp_width=c['intermediate_size'], norm_eps=c['rms_norm_eps'],
                rope_theta=float(rope.get('rope_theta') or c.get('rope_theta') or 10000.0),
                rope_scaling=':'.join([rope_type, *(str(rope[key]) for key in keys)]) if keys else 'none',
                tie=c['tie_word_embeddings'], init='gpt2' if c['tie_word_embeddings'] else None,
                **({} if kind == 'llama' else dict(mlp=activation(c['hidden_act']), softcap=c['final_logit_softcapping'] or 0.0))), arch


# -----------------------------------------------------------------------------
# reading


def is_hub_name(source):
    """Whether `source` could be a model's name on the Hub: gpt2 and its sisters, OWNER/NAME or OWNER/NAME@REVISION, and no path that
    is there."""
    return not os.path.exists(source) and (source in GPT2_NAMES or (
        re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?', source) is not None and not source.endswith(('.pt', '.bin', '.safetensors'))))


def is_folder(source):
    return os.path.isfile(os.path.join(source, 'config.json'))


def get_file(source, name, needed=True):
    """The path of the file `name` of a folder or of a model on the Hub (from its cache, or the network); None if there is none."""
    if os.path.isdir(source):
        path = os.path.join(source, name)
        if os.path.isfile(path):
            return path
        if needed:
            fail(f"no {name} in {source}. name a folder that transformers' save_pretrained or export.py wrote")
        return None
    try:
        import huggingface_hub
        from huggingface_hub import errors
        from huggingface_hub.utils import logging
    except ImportError:
        fail(f"to fetch {source} a package is needed that is not installed (huggingface_hub). pip install huggingface_hub")
    logging.set_verbosity_error()  # its retries are no news; the last word is ours
    endpoint = os.environ.get('HF_ENDPOINT', 'https://huggingface.co')
    repo, _, revision = GPT2_NAMES.get(source, source).partition('@')
    try:
        return huggingface_hub.hf_hub_download(repo, name, revision=revision or None)
    except errors.LocalEntryNotFoundError as e:  # not in the cache, and no answer; before EntryNotFoundError, which it is as well
        cached = huggingface_hub.try_to_load_from_cache(repo, name, revision=revision or None)
        cached = cached or huggingface_hub.try_to_load_from_cache(source.partition('@')[0], name)  # nanoGPT's users have it as plain gpt2
        if isinstance(cached, str):
            return cached
        offline = isinstance(e.__cause__, errors.OfflineModeIsEnabled)
        if not needed and (cached is not None or (offline and get_file(source, 'config.json'))):
            return None  # known not to be there
        answer = getattr(getattr(e.__cause__, 'response', None), 'status_code', None)
        what = f"answers with status {answer}" if answer else f"does not answer ({type(e.__cause__).__name__})"
        fail(f"{name} of {source} is neither in a folder nor in Hugging Face's cache, and {endpoint} {what}. " +
             ('hf auth login, if it is private' if answer in (401, 403) else 'go online or try again, or name a folder'), everywhere=True)
    except errors.EntryNotFoundError:
        if needed:
            fail(f"no {name} in {source} at {endpoint}. choose a model that has it", everywhere=True)
    except errors.GatedRepoError:
        fail(f"{source} is open only to those who accepted its terms at {endpoint}. accept them, then: hf auth login", everywhere=True)
    except errors.RepositoryNotFoundError:
        fail(f"no such model at {endpoint} ({source}). name a folder, or OWNER/NAME as it stands there; for a private one: hf auth login", everywhere=True)
    except Exception as e:  # the network has many ways to fail, and they have no common class
        fail(f"{name} of {source} cannot be fetched ({type(e).__name__}: {one_line(e)}). try again, or name a folder", everywhere=True)
    return None


def has_file(source, name):
    """Whether there is such a file, without fetching it."""
    if os.path.isdir(source):
        return os.path.isfile(os.path.join(source, name))
    import huggingface_hub
    try:
        repo, _, revision = GPT2_NAMES.get(source, source).partition('@')
        return huggingface_hub.file_exists(repo, name, revision=revision or None)
    except Exception:  # only a better message depends on it
        return False


def one_line(e):
    return ' '.join(str(e).split())[:150]


def read_json(path):
    try:
        with open(path, encoding='utf-8') as f:
            out = json.load(f)
        assert isinstance(out, dict), 'it is not a dict'
        return out
    except (OSError, ValueError, AssertionError, RecursionError) as e:
        fail(f"{path} cannot be read ({one_line(e)}). fetch or save it again")


def read_tokenizer(source, needed=True):
    """The state of a model's tokenizer, for dataset.make_tokenizer."""
    if source in GPT2_NAMES:
        return {'kind': 'tiktoken', 'name': 'gpt2'}
    if not os.path.isdir(source) and not is_hub_name(source):
        fail(f"no such tokenizer (hf:{source}). name a folder with a tokenizer.json, or OWNER/NAME on the Hub")
    path = get_file(source, 'tokenizer.json', needed=False)
    if path is None:
        if needed:
            fail(f"no tokenizer.json in {source}. make one: python -c \"from transformers import AutoTokenizer as T; "
                 f"T.from_pretrained('{source}').save_pretrained('FOLDER')\"")
        return None
    state = {'kind': 'hf', 'name': os.path.basename(source.rstrip('/'))}
    for key, file in (('json', path), ('config', get_file(source, 'tokenizer_config.json', needed=False))):
        if file:
            try:
                with open(file, encoding='utf-8') as f:
                    state[key] = f.read()
                json.loads(state[key])
            except (OSError, ValueError, RecursionError) as e:
                fail(f"{file} cannot be read ({one_line(e)}). fetch or save it again")
    return state


def read(source):
    """The weights and tokenizer of a Hugging Face folder or model name, as a checkpoint that starts a run (checkpoint.read)."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        fail(f"to read {source} a package is needed that is not installed (safetensors). pip install safetensors")
    try:
        theirs = read_json(get_file(source, 'config.json'))
        model_args, arch = from_config(theirs)
        config = GPTConfig(**model_args)
        if problems := config.problems():
            raise ValueError(problems[0])
        with torch.device('meta'):
            shapes = {name: p.shape for name, p in GPT(config).state_dict().items()}
    except KeyError as e:
        fail(f"the config.json of {source} does not tell {e}. name a folder that transformers' save_pretrained or export.py wrote")
    except (ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as e:
        fail(f"{source} cannot be read into flatgpt ({one_line(e)}). choose another model")
    paths = {'model.safetensors': get_file(source, 'model.safetensors', needed=False)}
    if paths['model.safetensors'] is None and (index := get_file(source, 'model.safetensors.index.json', needed=False)):
        weight_map = read_json(index).get('weight_map')
        files = sorted({os.path.basename(str(file)) for file in weight_map.values()}) if isinstance(weight_map, dict) else []
        paths = {file: get_file(source, file, needed=False) for file in files or ['model.safetensors']}
    if missing := [file for file, path in paths.items() if path is None]:
        if missing == ['model.safetensors'] and (has_file(source, 'pytorch_model.bin') or has_file(source, 'pytorch_model.bin.index.json')):
            fail(f"the weights of {source} are a pickle (pytorch_model.bin), which can run code when it is loaded; refused. if you trust it, "
                 f"convert it: python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{source}').save_pretrained('FOLDER')\"")
        fail(f"no {missing[0]} in {source}. fetch or save it again")

    # the weights, one by one, theirs -> ours; the files stay mapped and the numbers what they are, checkpoint.build makes them float32
    has = {}
    for file, path in paths.items():
        try:
            with safe_open(path, framework='pt') as f:
                for name in f.keys():
                    if not re.search(r'\.(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)$', name):  # tables of older versions, no weights
                        # OpenAI's GPT-2 was saved without the first part of the names
                        full = name if arch != 'gpt2' or name.startswith(('transformer.', 'lm_head.')) else 'transformer.' + name
                        has[full] = f.get_tensor(name)
                        if has[full].dtype not in (torch.float32, torch.bfloat16, torch.float16):
                            raise ValueError(f"{name} is {has[full].dtype}; flatgpt reads float32, bfloat16 and float16")
        except (SafetensorError, OSError, ValueError) as e:
            fail(f"{path} cannot be read ({one_line(e)}). fetch or save it again")
    if config.tie:  # whatever the file may have as a head: transformers does not look at it either
        has['lm_head.weight'] = has.get('transformer.wte.weight' if arch == 'gpt2' else 'model.embed_tokens.weight', torch.zeros(0))
    weights = translate(has, config, arch, there=False)
    missing, extra = [name for name in shapes if name not in weights], len(has) - len(weights)
    if missing or extra:
        known = translate(weights, config, arch, there=True)
        names = [NAMES[re.sub(r'\.\d+\.', '.{}.', name)][PRESETS.index(arch)].format(*re.findall(r'\.(\d+)\.', name)) for name in missing[:1]]
        names += [name for name in has if name not in known][:1] if extra else []
        fail(f"the weights of {source} are not those of its config.json ({len(missing)} missing, {extra} unknown, such as {names[0]}). fetch or save it again")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            fail(f"{name} of {source} has the shape {tuple(weights[name].shape)}, its config.json says {tuple(shape)}. fetch or save it again")
    if arch == 'gpt2' and not any(p.any() for name, p in weights.items() if name.endswith('.bias')):
        weights = {name: p for name, p in weights.items() if not name.endswith('.bias')}  # transformers' GPT-2 always has them
        config.bias = False
    return {'model': weights, 'model_args': config.model_args(), 'iter_num': 0, 'best_val_loss': float('inf'), 'config': {}, 'path': source,
            'tokenizer': read_tokenizer(source, needed=False) or ({'kind': 'tiktoken', 'name': 'gpt2'} if arch == 'gpt2' and config.vocab_size == 50257 else None)}


# -----------------------------------------------------------------------------
# writing


def write(folder, weights, config, tokenizer_state, dtype='float32', shard_gb=5.0):
    """Write a model (our weights, its GPTConfig) and its tokenizer into `folder`, which transformers then opens. ValueError if its
    parts are no architecture of transformers."""
    from huggingface_hub import save_torch_state_dict
    tokenizer = make_tokenizer(tokenizer_state)
    theirs, arch = to_config(config, tokenizer, dtype)
    weights = {name: p.to(getattr(torch, dtype)) for name, p in translate(weights, config, arch, there=True).items()}
    if config.tie:
        weights.pop('lm_head.weight', None)
    if arch == 'gpt2' and not config.bias:  # transformers' GPT-2 cannot do without
        for name in [name for name in weights if re.search(r'(ln_.|c_attn|c_proj|c_fc)\.weight$', name)]:
            width = weights[name].shape[-1]  # outputs come last in a Conv1D
            weights[name.removesuffix('weight') + 'bias'] = torch.zeros(width, dtype=weights[name].dtype)
    os.makedirs(folder, exist_ok=True)
    save_torch_state_dict(weights, folder, max_shard_size=max(1, int(shard_gb * 1e9)), metadata={'format': 'pt'})
    # texts end with what their authors ended them with, or, after training here, with what stands before the next
    stop = tokenizer.stop_ids or [None]
    generation = {'bos_token_id': theirs['bos_token_id'], 'eos_token_id': stop if len(stop) > 1 else stop[0], 'pad_token_id': stop[0],
                  'max_length': config.block_size}
    if config.vocab_size > tokenizer.n_vocab:  # ids that only fill the matrix up
        generation['suppress_tokens'] = list(range(tokenizer.n_vocab, config.vocab_size))
    content, settings = to_tokenizer_json(tokenizer, config.block_size)
    for name, text in (('config.json', json.dumps(theirs, indent=2)), ('generation_config.json', json.dumps(generation, indent=2)),
                       ('tokenizer.json', content), ('tokenizer_config.json', settings)):
        with open(os.path.join(folder, name), 'w', encoding='utf-8') as f:
            f.write(text.rstrip('\n') + '\n')


def to_tokenizer_json(tokenizer, block_size):
    """One of ours as the texts of tokenizer.json and tokenizer_config.json."""
    state = tokenizer.state()
    if state['kind'] == 'hf':
        return state['json'], state.get('config') or json.dumps({'tokenizer_class': 'PreTrainedTokenizerFast'})
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    if state['kind'] == 'char':
        out = Tokenizer(models.WordLevel({c: i for i, c in enumerate(tokenizer.chars)}))  # an unknown character is an error, as here
        out.pre_tokenizer, out.decoder = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated'), decoders.Fuse()
        special = {}
    else:
        letters = byte_letters()
        if state['kind'] == 'byte':
            vocab, merges, special = {letters[i]: i for i in range(256)}, [], {END_OF_TEXT: tokenizer.end_of_text}
            cut = []
        else:
            ranks, special = tokenizer.encoding._mergeable_ranks, tokenizer.encoding._special_tokens
            spell = lambda token: ''.join(letters[b] for b in token)
            vocab, merges = {spell(token): rank for token, rank in ranks.items()}, [tuple(map(spell, pair)) for pair in merges_of(ranks)]
            # Oniguruma, which `tokenizers` uses, reads {1,3}+ as "again and again", not as possessive, and $ as the end of a line
            pattern = re.sub(r'(\{\d+(?:,\d*)?\})\+', r'\1', tokenizer.encoding._pat_str).replace('$', r'\z')
            cut = [pre_tokenizers.Split(Regex(pattern), 'isolated')]
        # ignore_merges: a word that is in the vocabulary is that token, however its merges would go, as in tiktoken
        out = Tokenizer(models.BPE({**vocab, **special}, merges, ignore_merges=True))
        out.pre_tokenizer = pre_tokenizers.Sequence([*cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        out.decoder = decoders.ByteLevel()
    out.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': block_size, 'clean_up_tokenization_spaces': False}
    if END_OF_TEXT in special:
        settings.update(bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    return out.to_str(pretty=True), json.dumps(settings, indent=2)


def merges_of(ranks):
    """The merges that made the tokens {bytes: rank}, in order: each token's last step, with those before it alone."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            if ranks.get(parts[best] + parts[best + 1], rank) >= rank:
                break  # not made of two: its letters are never joined, it is found whole (ignore_merges)
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            yield parts
