"""
How good is a model? Its loss, perplexity and bits per byte over a text, and its accuracy on benchmarks.

    $ python eval.py out-quickstart
    $ python eval.py --init_from=gpt2 --dataset=openwebtext --tasks=hellaswag
    $ torchrun --standalone --nproc_per_node=8 eval.py --out_dir=out --tasks=hellaswag,core:500

The loss is in nats per token, and depends on what a token is. Bits per byte do not: use them to compare
models with different tokenizers.
"""

from typing import Literal

from configurator import configure, escape_control_characters, fail, out_of_range

# -----------------------------------------------------------------------------
init_from = 'resume'  # the checkpoint in out_dir; or PATH of one; or a Hugging Face folder or name
out_dir = 'out'  # the run's folder, if init_from is 'resume'
dataset: str = None  # the text: data/<dataset>. None: what the model was trained on
data_dir: str = None  # the folder with the datasets and the tasks' files. None: data/ beside this file
split: Literal['val', 'train', 'none'] = 'val'  # none: only the tasks
eval_tokens: int = None  # evaluate so many tokens, in windows spread evenly. None: the whole split
tasks = ''  # e.g. 'hellaswag,core': HellaSwag and the evaluation bundle; or tasks of the bundle by name; or
# FILE.jsonl with tasks of your own: docs/evaluation.md. 'core:500': with 500 examples of each task
to: str = None  # the folder for eval.json. None: the checkpoint's
sample_tokens = 100  # length of a text that the model writes; 0: none
batch_size = 8  # windows per batch and process
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: a GPU if there is one
dtype = 'auto'  # 'float32', 'bfloat16', 'float16'; auto: bfloat16 where the hardware has it
backend = 'auto'  # of torch.distributed: 'nccl', 'gloo'; auto: nccl on GPUs, gloo elsewhere
ddp_timeout = 600  # seconds that a process waits for the others
# -----------------------------------------------------------------------------
knobs, given = configure(globals(), positional='out_dir')

import lzma
import math
import os
import shlex
import time
import zlib

import torch

from model import GPT
from support import cpu, devices, load, parallel, report, samples
from support.conversations import open_dataset
from support.errors import explain_lost_data
from support.evaluate import ngram_bits_per_byte, text_loss, windows
from support.files import read_json, write_json
from support.tasks import evaluate_tasks, load_tasks
from support.tokenizer import empty_prompt, make_tokenizer, same_tokenizer, token_bytes

# -----------------------------------------------------------------------------
# the knobs are checked, as far as that needs no checkpoint

problems = out_of_range(knobs, above_zero='eval_tokens batch_size ddp_timeout', from_zero='sample_tokens')
if split == 'none' and not tasks:
    problems.append("nothing to do (split=none and no tasks). use --split=val, --tasks=hellaswag, or both")
if problems:
    fail(*problems)
dist = parallel.init(device, backend, ddp_timeout)
explain_lost_data()
device = dist.device
cpu.watch(device)
dtype, _ = devices.choose_dtype(dtype, device)
autocast = devices.autocast(device, dtype)

# -----------------------------------------------------------------------------
# the checkpoint

path = load.find(out_dir if init_from == 'resume' else init_from, hub=init_from != 'resume')
if to is None and os.path.isfile(path):
    to = os.path.dirname(path) or '.'
state = load.read(path)
config = load.model_config(GPT, state)
block_size = config.block_size
# a nanoGPT checkpoint has no tokenizer: its dataset has
tokenizer_state = load.tokenizer_state(state, None if state.get('tokenizer') else dataset, data_dir)

# -----------------------------------------------------------------------------
# the text

if split != 'none':
    trained = state['config'].get('dataset')
    name = dataset or trained
    if not name:
        fail(f"{path} does not say which text it was trained on. name one with --dataset=NAME, or use "
             "--split=none and --tasks")
    # a run with document_mask never looked across texts
    data = open_dataset(name, data_dir, document_mask=state['config'].get('document_mask'),
                        vocab_size=config.vocab_size)
    tokens = getattr(data, split)
    if tokens is None:
        fail(f"no val.bin in {data.folder}. use --split=train")
    if not same_tokenizer(state.get('tokenizer'), data.tokenizer_state):
        fail(f"dataset {name} has another tokenizer than the model. make one with the model's from the same "
             f"text: python prepare.py {shlex.quote(name + '_2')} --input=FILE "
             f"--tokenizer={'' if path.endswith('.pt') else 'hf:'}{shlex.quote(path)}")
    if 'ranks' in data.tokenizer_state:  # a checkpoint may have no more than its name
        tokenizer_state = data.tokenizer_state
    other, seen = '', state.get('trained_on', {})
    if name == trained and (seen.get(split, tokens.fingerprint) != tokens.fingerprint
                            or seen.get(f'{split} ids', tokens.sampled) != tokens.sampled):
        other = ' (another text)'
        dist.print(f"note: {name} is not the text that this run had under that name, and may hold some that "
                   "it was trained on")

# -----------------------------------------------------------------------------
# the tasks: what is wrong with their files is said before the work

sizes = token_bytes(tokenizer_state, config.vocab_size)  # 0: known by name alone, or ids are no text
tokenizer = make_tokenizer(tokenizer_state) if sizes.any() or tasks else None
loaded = load_tasks(tasks, data_dir, tokenizer, block_size)

# -----------------------------------------------------------------------------
# the model

torch.set_float32_matmul_precision('highest' if dtype == 'float32' else 'high')
model = load.build(GPT, state).to(device).eval()
cpu.faster(model)
iter_num = state['iter_num']
result = {'checkpoint': os.path.relpath(path, to), 'iter': iter_num,
          'weights': hash(tuple(zlib.crc32(p.float().numpy().tobytes()) for p in state['model'].values()))}
del state  # and its memory
dist.print(f"{path}, iteration {f'{iter_num:,}' if iter_num else 'unknown'}: {config.arch}, "
           f"{model.get_num_params(False):,} parameters, {block_size} positions; {dist.world_size} x "
           f"{device}, {dtype}")
before = read_json(os.path.join(to, 'eval.json')) if to else {}
if not result.items() <= before.items():
    before = {}  # about other weights
result = {'texts': {}, 'tasks': {}, **before, **result}


def save():
    """Write `result` to eval.json, and into the run's report."""
    if not (to and dist.is_main):
        return
    file = os.path.join(to, 'eval.json')
    try:
        write_json(file, result)
        if os.path.exists(os.path.join(to, 'log.csv')):
            report.write(to)
            file += ' and report.md'
    except OSError as e:
        fail(f"{to} cannot be written into ({e.strerror}). the numbers are above; name another folder with "
             "--to")
    return file


# -----------------------------------------------------------------------------
# the loss of the text, and how the model continues nothing


def evaluate_text():
    most = max(1, eval_tokens // block_size) if eval_tokens else None
    starts = windows(tokens.n_targets(block_size), block_size, most)
    name, t0 = f"{data.name}/{split}{other}", time.perf_counter()
    if len(starts) == most:
        name += f", {most:,} windows"  # beside the result of all of it
    found = text_loss(model, tokens, starts, block_size, min(batch_size, len(starts)), dist, autocast, sizes,
                      tick=dist.progress(name))
    if not math.isfinite(found['loss']):
        fail(f"the loss of {name} is not finite ({found['loss']}, in {dtype}). try --dtype=float32, else an "
             "older checkpoint")
    result['texts'][name] = {**found, 'dtype': dtype}
    bpb = "bits per byte unknown without the tokenizer itself (a text of prepare.py brings it)"
    amount = f"{found['tokens']:,} tokens"
    if found['bpb'] is not None:
        bpb = f"{found['bpb']:.4f} ± {found['bpb_error']:.4f} bits per byte"
        amount += f" = {found['bytes']:,} bytes"
    dist.print(f"{name}: loss {found['loss']:.4f} ± {found['loss_error']:.4f}, perplexity "
               f"{found['perplexity']:.2f}, {bpb}, over {amount} in {time.perf_counter() - t0:.0f} s")
    if found['bpb'] is None:
        return
    if split == 'val' and found['tokens'] == tokens.n - 1 and data.train.n < 2**24 and dist.is_main:
        # of more it takes minutes; of what the network was not trained on it would be no comparison
        if seen.get('train ids', data.train.sampled) == data.train.sampled:
            result['texts'][name].update(by_other_means())
    if sample_tokens:  # so that the numbers have a face
        (_, text), = samples.write(model, tokenizer, [('', empty_prompt(tokenizer))], sample_tokens, iter_num,
                                   1337, autocast)
        result['sample'] = text
        dist.print('it writes\n| ' + escape_control_characters(text).replace('\n', '\n| '))


def by_other_means():
    """The bits per byte of the validation text that programs need which are no networks."""
    texts = [part.windows([0], part.n)[0] for part in (data.train, data.val)]
    train, val = (tokenizer.decode(ids[sizes[ids] > 0].tolist()).encode() for ids in texts)
    # xz -9e of both, less that of the training text, is what the validation text adds
    alone, both = (len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in (train, train + val))
    xz = 8 * (both - alone) / len(val)
    ngram = ngram_bits_per_byte(val, train)
    dist.print(f"for comparison: {xz:.4f} bits per byte by xz, {ngram:.4f} by counts of up to 6 bytes, both "
               f"after the training text of {data.name}")
    return {'bpb_by_xz': xz, 'bpb_by_counts': ngram}


if split != 'none':
    evaluate_text()
    if loaded:
        save()  # the tasks may take hours

# -----------------------------------------------------------------------------
# the tasks, and CORE

metrics, found = evaluate_tasks(loaded, model, dist, autocast)
result['tasks'].update({name: {**numbers, 'dtype': dtype} for name, numbers in found.items()})
if 'core' in metrics:
    result['core'] = metrics['core']
if written := save():
    dist.print(f"written to {written}")
dist.close()
