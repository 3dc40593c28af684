"""
How a checkpoint is read: ours, nanoGPT's, build-nanogpt's or a Hugging Face folder. Nothing in it is
executed, everything is checked. `cls` is the class of the network, model.GPT, whose settings are cls.Config.
"""

import contextlib
import dataclasses
import functools
import glob
import os
import warnings

import torch

from configurator import fail, say
from support import cpu, huggingface
from support.checkpoint import VERSION, Damaged, candidates, newest, verify_records
from support.dataset_meta import folder_of, read_meta, read_tokenizer_state
from support.errors import first_line
from support.hub_datasets import is_folder, is_hub_name
from support.tokenizer import check_tokenizer_state, make_tokenizer, same_tokenizer

# causal masks and rotations, which older versions of nanoGPT and transformers saved among the weights
CONSTANTS = '.attn.bias', '.attn.masked_bias', '.rotary_emb.inv_freq'
FREE = {'block_size', 'rope_theta', 'rope_scaling'}  # no weights depend on them, unless positions are learned


# -----------------------------------------------------------------------------
# which file


def find(source, hub=True):
    """The path that `source` means: a file; a run folder's ckpt.pt, else its newest checkpoint; a Hugging
    Face folder, or with `hub` a name there."""
    if os.path.isfile(source) or (hub and is_hub_name(source)):
        return source
    single = os.path.join(source, 'ckpt.pt')
    path = single if os.path.exists(single) else newest(source)
    if path is None and not is_folder(source):
        no_checkpoint(source)
    return path or source


def no_checkpoint(path):
    """Say so, and name the folders here that hold checkpoints."""
    names = sorted({os.path.dirname(file) for file in glob.glob('*/ckpt*.pt')})
    fail(f"no checkpoint in {path} (there is: {', '.join(names) or 'none here'}). train first "
         "(--init_from=auto), or name another with --out_dir, --init_from or --teacher: a run's folder, a "
         "file such as out/ckpt_00001000.pt (resume:PATH), a Hugging Face folder or name (gpt2, OWNER/NAME)")


def newest_whole(out_dir):
    """The path of the newest checkpoint that is whole; damaged ones are named. If none is, that is an error,
    never a new beginning."""
    damaged = []
    for path in candidates(out_dir):
        try:
            unpack(path)
        except Damaged as e:
            damaged.append(f"{path} {e}")
            continue
        for what in damaged:
            say(f"note: {what}. it is left out", 'stdout')
        return path
    if not damaged:
        no_checkpoint(out_dir)
    fail(f"no checkpoint in {out_dir} is whole ({'; '.join(damaged)}). bring one back from a copy, or start "
         "anew with --init_from=scratch --overwrite")


# -----------------------------------------------------------------------------
# what is in it


class Settings:
    """Stands for build-nanogpt's GPTConfig: it takes the attributes, and has no code."""


def unpack(path, verify=True):
    """What the checkpoint file `path` holds, its checksums verified. Nothing in it is executed. Raises
    Damaged."""
    try:
        with open(path, 'rb') as f:
            # a run may replace it meanwhile, and torch opens it twice: once for the table of contents, once
            # for the numbers. Those of two files would give weights that are wrong, and finite
            same = f'/dev/fd/{f.fileno()}'
            path = same if os.path.exists(same) else path
            if verify:
                verify_records(path)
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            config = [(Settings, name) for name in names if name.endswith('Config')]
            with warnings.catch_warnings(action='ignore'), torch.serialization.safe_globals(config):
                return torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except Damaged:
        raise
    except OSError as e:
        raise Damaged(f"cannot be read ({e.strerror})") from e
    except Exception as e:  # as a pickle, a text may be any nonsense
        raise Damaged("is damaged, or holds more than tensors and plain values: refused, as that would run "
                      f"code ({type(e).__name__}: {first_line(e)})") from e


def read(path, verify=True):
    """The checkpoint at `path` (see find) as a dict on the CPU, with 'path' in it."""
    try:
        ckpt = unpack(path, verify) if os.path.isfile(path) else huggingface.read(path)
    except Damaged as e:
        fail(f"{path} {e}. take another of its run, if there is one")
    with explained(path):
        return checked(ckpt, path)


@contextlib.contextmanager
def explained(path):
    try:
        yield
    except Exception as e:  # a file may say anything
        why = first_line(' '.join(str(e).split()))
        fail(f"{path} is not a checkpoint of flatgpt or nanoGPT, or not of model.py as it is now "
             f"({type(e).__name__}: {why}). take another, or the code that it was trained with")


def checked(ckpt, path):
    """The checkpoint's dict with what older versions lack; an exception of some kind if it says what cannot
    be."""
    assert ckpt.get('version', VERSION) <= VERSION, 'a newer flatgpt wrote it: update this one'
    ckpt = {name: value for name, value in ckpt.items() if value is not None}
    if isinstance(ckpt.get('config'), Settings):
        ckpt = {'model': ckpt['model'], 'iter_num': ckpt.get('step', 0),
                'best_val_loss': ckpt.get('val_loss', float('inf')),
                # a network with its five fields has biases and the tanh approximation
                'model_args': {'bias': True, 'mlp': 'gelu_tanh', **vars(ckpt['config'])}}
    # nanoGPT saves the names of the compiled model
    weights = {name.removeprefix('_orig_mod.').removeprefix('module.'): p
               for name, p in ckpt['model'].items()}
    if 'tokenizer' in ckpt:
        check_tokenizer_state(ckpt['tokenizer'])
    # older than that flag, or than the next ones
    bias, head = 'transformer.ln_f.bias' in weights, weights.get('lm_head.weight')
    args = {'bias': bias, 'dropout': 0.0, 'near_layers': 0, **ckpt['model_args']}
    if head is not None and not head.equal(weights.get('transformer.wte.weight', head)):
        args['tie'] = False  # no field says so where model.py has lost the line that ties them
    return {**ckpt, 'model': weights, 'model_args': args, 'iter_num': int(ckpt.get('iter_num', 0)),
            'best_val_loss': float(ckpt.get('best_val_loss', 'inf')), 'config': dict(ckpt.get('config', {})),
            'path': path}


# -----------------------------------------------------------------------------
# what becomes of it


def model_config(cls, ckpt):
    """The cls.Config of a checkpoint."""
    with explained(ckpt['path']):
        known = {field.name for field in dataclasses.fields(cls.Config)}
        # what is off and not known here, other code may have had
        config = cls.Config(**{name: value for name, value in ckpt['model_args'].items()
                               if name in known or value})
        problems = config.problems()
        assert not problems, problems
    return config


def build(cls, ckpt, dropout=0.0, **changes):
    """The network of a checkpoint, with its weights, on the CPU. changes: a smaller block_size; with rotary
    positions any block_size, rope_theta and rope_scaling."""
    assert changes.keys() <= FREE, f"besides dropout only {', '.join(sorted(FREE))} can change"
    config = dataclasses.replace(model_config(cls, ckpt), dropout=dropout, **changes)
    block_size = config.block_size
    if config.positions == 'learned':
        config.block_size = ckpt['model_args']['block_size']
    with torch.device('meta'):  # no time for random numbers that are overwritten at once
        model = cls(config)
    if any(buffer.is_meta for buffer in model.buffers()):  # a table of yours, which no checkpoint brings
        model = cls(config)
    with explained(ckpt['path']):
        # copied, as the file may be replaced while it is mapped
        weights = {name: p.clone() for name, p in ckpt['model'].items()
                   if not name.endswith(CONSTANTS) or name in model.state_dict()}
        assert all(torch.isfinite(p).all() for p in weights.values()), 'its weights are not finite'
        first = {}  # of the names of one parameter, which stay one, such as a tied head
        for name, p in model.named_parameters(remove_duplicate=False):
            if name in weights:
                loaded = torch.nn.Parameter(weights[name].to(p.dtype), p.requires_grad)
                loaded.__dict__.update(p.__dict__)  # what you gave it
                weights[name] = first.setdefault(p, loaded)
        model.load_state_dict(weights, assign=True)
    if block_size != config.block_size:
        model.crop_block_size(block_size)
    return model


def distill(model, teachers, data, device):
    """Makes `model` learn what the runs `teachers` (see find), with commas between them, predict in the mean,
    beside the text's own next tokens, 7 to 3: https://arxiv.org/abs/1503.02531. The loss has the value of the
    text's, as without a teacher."""
    experts = []
    for teacher in teachers.split(','):
        ckpt = read(find(teacher))
        if ckpt['model_args']['block_size'] < model.config.block_size or \
                not same_tokenizer(ckpt.get('tokenizer'), data.tokenizer_state) or \
                not data.meta['vocab_size'] <= ckpt['model_args']['vocab_size'] <= data.vocab_size:
            fail(f"the teacher {teacher} has another tokenizer or a shorter context. name a run on the same "
                 "dataset, with the same block_size or a longer one")
        experts.append(build(type(model), ckpt).to(device).eval())
        cpu.faster(experts[-1])
    model.forward = functools.partial(distilled, model.forward, experts)


def distilled(forward, experts, idx, targets=None, doc_ids=None, **options):
    """GPT.forward, bound to its model, with distill()'s loss in training. Not a closure: a copy of the model
    would compute with the weights of the original."""
    if targets is None or not forward.__self__.training:
        return forward(idx, targets, doc_ids, **options)
    logits, loss = forward(idx, targets, doc_ids)
    n = min(network.config.vocab_size for network in (forward.__self__, *experts))  # one may be padded
    with torch.no_grad():
        wanted = sum(expert(idx, None, doc_ids, full_logits=True)[0][..., :n].float().softmax(-1)
                     for expert in experts) / len(experts)
    nats = -(wanted * logits.float().log_softmax(-1)[..., :n]).sum(-1)
    counted = targets >= 0
    learned = 0.3 * loss + 0.7 * nats[counted].sum() / counted.sum().clamp(1)
    return None, learned + (loss - learned).detach()


def tokenizer_state(ckpt, dataset_name, data_dir):
    """What a checkpoint's tokens mean: it says so itself; for nanoGPT's, the folder of its dataset does."""
    if dataset_name is None and ckpt.get('tokenizer'):
        return ckpt['tokenizer']
    vocab_size = ckpt['model_args']['vocab_size']
    name = dataset_name or ckpt['config'].get('dataset') or '?'
    folder = folder_of(name, data_dir)  # refuses a path: it may be a stranger's
    if glob.glob(os.path.join(glob.escape(folder), '[mt]*[ln]')):  # meta.json, meta.pkl, train*.bin
        meta = read_meta(folder)
        state = read_tokenizer_state(folder, meta)
        if 0 <= vocab_size - meta['vocab_size'] < 64 and same_tokenizer(ckpt.get('tokenizer'), state):
            return state
        fail(f"dataset {name} has another tokenizer than the checkpoint ({meta['vocab_size']} ids, "
             f"up to {vocab_size} there). name the one it was trained on with --dataset=NAME")
    if vocab_size in (50257, 50304) and not dataset_name:  # as nanoGPT assumes
        return {'kind': 'tiktoken', 'name': 'gpt2'}
    fail(f"the checkpoint does not tell its tokenizer, and there is no dataset {name}. make it, or name the "
         "one it was trained on with --dataset=NAME (in --data_dir=PATH)")


def model_and_tokenizer(cls, source, dataset_name=None, data_dir=None):
    """(model, tokenizer) of a run's folder, a checkpoint, or a Hugging Face folder or name, on the CPU, in
    eval mode."""
    ckpt = read(find(source))
    model = build(cls, ckpt).eval()
    cpu.faster(model)
    # for model.generate('a text', 100)
    model.tokenizer = make_tokenizer(tokenizer_state(ckpt, dataset_name, data_dir))
    return model, model.tokenizer
