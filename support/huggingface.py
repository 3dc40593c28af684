"""
Hugging Face folders, which transformers opens: written from our weights, and read into them. Nothing in such
a folder is executed, and transformers is not needed.

    state = huggingface.read('HuggingFaceTB/SmolLM2-135M')  # a folder, or a name on the Hub
    huggingface.write('out-hf', state['model'], GPTConfig(**state['model_args']), state['tokenizer'])
"""

import json
import os
import re

import torch

from configurator import fail
from model import GPT, GPTConfig
from support.hub_datasets import GPT2_NAMES, get_file, has_file, is_hub_name, one_line
from support.hf_names import convert, from_config, preset_of, to_config, weight_names
from support.tokenizer import make_tokenizer

GPT2_TOKENIZER = {'kind': 'tiktoken', 'name': 'gpt2'}


# -----------------------------------------------------------------------------
# reading


def read(source):
    """The model `source`, a folder or a name on the Hub, as the state of a checkpoint that starts a run."""
    try:
        import safetensors
    except ImportError:
        fail(f"to read {source} a package is needed that is not installed (safetensors). pip install "
             "safetensors")
    config, params = read_config(source)
    arch = config.arch
    has = read_weights(source, arch)  # by their names
    names = {ours: theirs for ours, theirs in weight_names(arch, config.n_layer).items() if ours in params}
    if config.tie:  # transformers does not look at a head in the file either
        has[names['lm_head.weight']] = has.get(names['transformer.wte.weight'])
    missing = [name for name in names.values() if has.get(name) is None]
    unknown = sorted(has.keys() - set(names.values()))
    if missing or unknown:
        fail(f"the weights of {source} are not those of its config.json ({len(missing)} missing, "
             f"{len(unknown)} unknown, such as {(missing + unknown)[0]}). download or save it again")
    weights = {}
    for ours, theirs in names.items():
        shape = convert(ours, params[ours], config, arch).shape
        if has[theirs].shape != shape:
            fail(f"{theirs} of {source} has the shape {tuple(has[theirs].shape)}, its config.json says "
                 f"{tuple(shape)}. download or save it again")
        weights[ours] = convert(ours, has[theirs], config, arch)
    biases = [name for name in weights if name.endswith('.bias')]
    if not any(weights[name].any() for name in biases):  # transformers' GPT-2 always has them
        config.bias = False
        for name in biases:
            del weights[name]
    tokenizer = read_tokenizer(source, needed=False)
    if tokenizer is None and arch == 'gpt2' and config.vocab_size == 50257:
        tokenizer = dict(GPT2_TOKENIZER)
    return {'model': weights, 'model_args': config.model_args(), 'iter_num': 0, 'config': {}, 'path': source,
            'best_val_loss': float('inf'), 'tokenizer': tokenizer}


def read_config(source):
    """The GPTConfig of a model, and its parameters by name, without memory (on the device 'meta')."""
    theirs = read_object(get_file(source, 'config.json'))
    try:
        config = GPTConfig(**from_config(theirs))
        if problems := config.problems():
            raise ValueError(problems[0])
        with torch.device('meta'):
            return config, GPT(config).state_dict()
    except KeyError as e:
        fail(f"the config.json of {source} does not tell {e}. name a folder that transformers' "
             "save_pretrained or export.py wrote")
    except (ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as e:
        fail(f"{source} cannot be read into flatgpt ({one_line(e)}). choose another model")


def read_weights(source, arch):
    """{their name: tensor}. The files stay mapped, and the dtypes what they are: load.build() converts."""
    from safetensors import SafetensorError, safe_open
    weights = {}
    for path in weight_files(source):
        try:
            with safe_open(path, framework='pt') as f:
                for name in f.keys():
                    if re.search(r'\.(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)$', name):
                        continue  # constants that older versions saved as well
                    p = f.get_tensor(name)
                    if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                        raise ValueError(f"{name} is {p.dtype}; flatgpt reads float32, bfloat16, float16")
                    if arch == 'gpt2' and not name.startswith(('transformer.', 'lm_head.')):
                        name = 'transformer.' + name  # OpenAI's GPT-2 was saved without it
                    weights[name] = p
        except (SafetensorError, OSError, ValueError) as e:
            fail(f"{path} cannot be read ({one_line(e)}). download or save it again")
    return weights


def weight_files(source):
    """The paths of a model's safetensors files."""
    names = ['model.safetensors']
    path = get_file(source, names[0], needed=False)
    if path:
        return [path]
    index = get_file(source, 'model.safetensors.index.json', needed=False)
    weight_map = read_object(index).get('weight_map') if index else None
    if isinstance(weight_map, dict) and weight_map:  # {weight: file}
        names = sorted({os.path.basename(str(file)) for file in weight_map.values()})
    paths = [get_file(source, name, needed=False) for name in names]
    if None not in paths:
        return paths
    pickles = ('pytorch_model.bin', 'pytorch_model.bin.index.json')
    if not index and any(has_file(source, name) for name in pickles):
        fail(f"the weights of {source} are a pickle (pytorch_model.bin), which can run code when it is "
             "loaded; refused. if you trust it, convert it: python -c \"from transformers import "
             f"AutoModelForCausalLM as M; M.from_pretrained('{source}').save_pretrained('FOLDER')\"")
    fail(f"no {names[paths.index(None)]} in {source}. download or save it again")


def read_tokenizer(source, needed=True):
    """The state of a model's tokenizer, for make_tokenizer(). If it has none: an error, or None."""
    if source in GPT2_NAMES:
        return dict(GPT2_TOKENIZER)
    if source.endswith('.json') and os.path.isfile(source):  # of any name, as Tokenizer.save() wrote it
        if os.path.basename(source) != 'tokenizer.json':
            return complete_tokenizer({'kind': 'hf', 'name': os.path.basename(source),
                                       'json': read_json_text(source)})
        source = os.path.dirname(source) or '.'
    if not os.path.isdir(source) and not is_hub_name(source):
        fail(f"no such tokenizer (hf:{source}). name a folder that has a tokenizer.json, or OWNER/NAME")
    path = get_file(source, 'tokenizer.json', needed=False)
    if path is None:
        if needed:
            fail(f"no tokenizer.json in {source}. make one: python -c \"from transformers import "
                 f"AutoTokenizer as T; T.from_pretrained('{source}').save_pretrained('FOLDER')\"")
        return None
    state = {'kind': 'hf', 'name': os.path.basename(source.rstrip('/')), 'json': read_json_text(path)}
    path = get_file(source, 'tokenizer_config.json', needed=False)
    if path:
        state['config'] = read_json_text(path)
    return complete_tokenizer(state)


def complete_tokenizer(state):
    """Without a tokenizer_config.json the names of the special tokens tell which of them begins and ends a
    text."""
    if 'config' not in state:
        from support.hf_tokenizer import guess_special
        content = json.loads(state['json'])
        found = guess_special(content.get('added_tokens') or []) if isinstance(content, dict) else {}
        if found:
            print(f"note: {state['name']} has no tokenizer_config.json; taken from its names: "
                  + ', '.join(f'{key} {token}' for key, token in found.items()))
            state['config'] = json.dumps(found)
    return state


def read_json_text(path):
    """The text of a JSON file; an error if it is not JSON."""
    try:
        with open(path, encoding='utf-8') as f:
            text = f.read()
        json.loads(text)
        return text
    except (OSError, ValueError, RecursionError) as e:
        fail(f"{path} cannot be read ({one_line(e)}). download or save it again")


def read_object(path):
    """The dict in a JSON file; an error if there is none."""
    value = json.loads(read_json_text(path))
    if not isinstance(value, dict):
        fail(f"{path} cannot be read (it is not a dict). download or save it again")
    return value


# -----------------------------------------------------------------------------
# writing


def write(folder, weights, config, tokenizer_state, dtype='float32', shard_gb=5.0, card=''):
    """Write a model (our weights, its GPTConfig) and its tokenizer into `folder`, the weights in `dtype`, in
    files of up to shard_gb * 10^9 bytes. card: the text of its README.md. Returns the name of its class in
    transformers; ValueError if it has none."""
    from huggingface_hub import save_torch_state_dict

    from support.hf_export_tokenizer import to_tokenizer_json
    tokenizer = make_tokenizer(tokenizer_state)
    theirs = to_config(config, tokenizer, dtype)
    content, settings = to_tokenizer_json(tokenizer, config.block_size)
    texts = {'config.json': json.dumps(theirs, indent=2),
             'generation_config.json': json.dumps(generation_config(config, tokenizer), indent=2),
             'tokenizer.json': content, 'tokenizer_config.json': settings}
    if card:
        texts['README.md'] = card
    os.makedirs(folder, exist_ok=True)
    save_torch_state_dict(their_weights(weights, config, getattr(torch, dtype)), folder,
                          max_shard_size=max(1, int(shard_gb * 1e9)), metadata={'format': 'pt'})
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
    arch, out = preset_of(config), {}
    for ours, theirs in weight_names(arch, config.n_layer).items():
        if ours in weights and not (config.tie and ours == 'lm_head.weight'):
            out[theirs] = convert(ours, weights[ours], config, arch).to(dtype)
    if arch == 'gpt2' and not config.bias:  # transformers' GPT-2 always has biases
        for name in [name for name in out if re.search(r'(ln_.|c_attn|c_proj|c_fc)\.weight$', name)]:
            n = out[name].shape[-1]  # the outputs come last in a Conv1D
            out[name.removesuffix('weight') + 'bias'] = torch.zeros(n, dtype=dtype)
    return out


def generation_config(config, tokenizer):
    """generation_config.json, a dict: what transformers' generate() does by default."""
    stop = tokenizer.stop_ids or [None]
    out = {'bos_token_id': tokenizer.end_of_text, 'eos_token_id': stop if len(stop) > 1 else stop[0],
           'pad_token_id': stop[0], 'max_new_tokens': max(1, config.block_size // 2)}
    if config.vocab_size > tokenizer.n_vocab:  # ids that only pad the vocabulary
        out['suppress_tokens'] = list(range(tokenizer.n_vocab, config.vocab_size))
    return out
