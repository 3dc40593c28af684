"""
Checkpoints of other trainers, made into one of ours that starts a run. Nothing in them is executed.

build-nanogpt (https://github.com/karpathy/build-nanogpt): log/model_05000.pt, whose config is an object of a
class in its script. nanochat (https://github.com/karpathy/nanochat): a folder with model_005000.pt, which are
weights alone, and meta_005000.json; its tokenizer is in ../../tokenizer/tokenizer.pkl. Its network is our
'modern' until January 2026, when it got parts that ours lacks.
"""

import base64
import os
import pickle
import re

import torch

from configurator import fail
from model import GPTConfig
from support.files import read_json
from support.hf_names import convert

NUMBERED = re.compile(r'model_(\d+)\.pt')
NANOCHAT_SIZES = {'block_size': 'sequence_len', 'n_layer': 'n_layer', 'n_head': 'n_head',
                  'n_kv_head': 'n_kv_head', 'n_embd': 'n_embd'}
NANOCHAT_NAMES = re.compile(r'transformer\.wte|lm_head|transformer\.h\.\d+\.'
                            r'(attn\.c_[qkv]|(attn|mlp)\.c_proj|mlp\.c_fc)')


class Settings:
    """Stands for a class of another project: it takes the attributes, and has no code."""


def newest(folder):
    """The path of the newest model_NNNNN.pt in a folder, or None."""
    found = [(int(match[1]), name) for name in os.listdir(folder) if (match := NUMBERED.fullmatch(name))]
    return os.path.join(folder, max(found)[1]) if found else None


def unpack(path):
    """What torch.load gives for a file that wants a class named ...Config: a Settings in its place. None if
    it wants anything else."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if not names or not all(re.fullmatch(r'[\w.]*Config', name) for name in names):
        return None
    with torch.serialization.safe_globals([(Settings, name) for name in names]):
        return torch.load(path, map_location='cpu', weights_only=True, mmap=True)


def as_ours(ckpt, path):
    """A checkpoint that unpack() or torch.load gave, with our keys."""
    if isinstance(ckpt.get('config'), Settings):
        return from_build_nanogpt(ckpt, path)
    names = [str(name).removeprefix('_orig_mod.') for name in ckpt]
    if 'model' not in ckpt and 'transformer.wte.weight' in names:
        return from_nanochat(dict(zip(names, ckpt.values())), path)
    return ckpt


def from_build_nanogpt(ckpt, path):
    sizes = vars(ckpt['config'])
    known = {'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias'}
    if 'model_args' in ckpt or sizes.keys() - known:
        fail(f"{path} has a config that is not build-nanogpt's (it has "
             f"{', '.join(sorted(sizes.keys() - known)) or 'model_args as well'}). save it again with plain "
             "dicts only")
    args = dict(sizes)
    if 'bias' not in sizes:
        # its own config has five fields; a network with them has biases and the tanh approximation
        args.update(bias=True, dropout=0.0, mlp='gelu_tanh')
    return {'model': ckpt['model'], 'model_args': args, 'iter_num': ckpt.get('step', 0),
            'best_val_loss': ckpt.get('val_loss', float('inf')), 'config': {}}


def from_nanochat(weights, path):
    folder, name = os.path.split(path)
    meta_path = os.path.join(folder, name.replace('model_', 'meta_').replace('.pt', '.json'))
    meta = read_json(meta_path)
    theirs = meta.get('model_config')
    if not isinstance(theirs, dict):
        fail(f"{path} has weights alone, and {meta_path} does not tell the sizes of the network. put "
             "nanochat's meta_NNNNNN.json beside it")
    wrong = sorted({'ve_gate' if 've_gate' in key else key.split('.')[0] for key in weights
                    if not NANOCHAT_NAMES.match(key)})
    if 'S' in theirs.get('window_pattern', 'L'):
        wrong.append(f"window_pattern={theirs['window_pattern']}")
    if wrong:
        fail(f"{path} is of a nanochat with parts that flatgpt's network lacks ({', '.join(wrong)}). its "
             "checkpoints of before January 2026 can be read")
    args = {ours: theirs[key] for ours, key in NANOCHAT_SIZES.items()}
    config = GPTConfig(arch='modern', vocab_size=weights['transformer.wte.weight'].shape[0], **args)
    weights = {key: convert(key, p, config, 'modern') for key, p in weights.items()}
    out = {'model': weights, 'model_args': config.model_args(), 'iter_num': meta.get('step', 0), 'config': {}}
    tokenizer = nanochat_tokenizer(folder)
    return {**out, 'tokenizer': tokenizer} if tokenizer else out


def nanochat_tokenizer(folder):
    """The state of the tokenizer of nanochat's checkpoints in `folder`, or None."""
    for place in ('.', '../../tokenizer'):
        path = os.path.join(folder, place, 'tokenizer.pkl')
        if os.path.isfile(path):
            break
    else:
        return None
    try:
        with open(path, 'rb') as f:
            found = vars(EncodingUnpickler(f).load())
        ranks = found['mergeable_ranks'].items()
        lines = b''.join(base64.b64encode(token) + b' %d\n' % rank for token, rank in ranks)
        return {'kind': 'tiktoken', 'name': str(found['name']), 'pat_str': str(found['pat_str']),
                'special_tokens': dict(found['special_tokens']), 'ranks': lines}
    except Exception as e:  # whatever a strange pickle may raise
        fail(f"{path} is not nanochat's tokenizer ({type(e).__name__}: {e}). take it away, and name a "
             "dataset with --dataset=NAME")


class EncodingUnpickler(pickle.Unpickler):
    """Plain values, and the attributes of a tiktoken.Encoding without its code."""

    def find_class(self, module, name):
        if (module, name) == ('tiktoken.core', 'Encoding'):
            return Settings
        raise pickle.UnpicklingError(f"it wants to run {module}.{name}")
