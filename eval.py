"""
How good is a model? Its loss, perplexity and bits per byte over a text, and its answers to questions.

    $ python eval.py --out_dir=out-quickstart
    $ python eval.py --init_from=gpt2 --dataset=openwebtext --tasks=hellaswag
    $ torchrun --standalone --nproc_per_node=8 eval.py --out_dir=out --tasks=hellaswag,core --max_per_task=500

Loss is in nats per token, and depends on what a token is. Bits per byte do not: compare models with different tokenizers by them.
"""

from configurator import configure, fail, out_of_range

# -----------------------------------------------------------------------------
init_from = 'resume'  # 'resume': the checkpoint in out_dir; or the path of one; or a Hugging Face folder or name (gpt2, OWNER/NAME)
out_dir = 'out'  # ignored if init_from is not 'resume'
dataset: str = None  # data/<dataset>, the text. None: what the model was trained on
data_dir: str = None  # where the datasets lie. None: data/ beside this file
split = 'val'  # 'val', 'train', or 'none': only the tasks
eval_tokens: int = None  # so many tokens from the start on. None: all of the split
block_size: int = None  # tokens that the model sees at once. None: as many as it was trained with
stride: int = None  # tokens by which the window over the text moves on. None: block_size, so that windows do not overlap; less gives each token more context, and takes longer
tasks = ''  # 'hellaswag', names from the evaluation bundle ('arc_easy', 'copa', ...), 'core': all of them; with commas between
tasks_dir: str = None  # where hellaswag_val.jsonl and eval_bundle/ lie. None: data/ beside this file
max_per_task: int = None  # questions per task, the same ones each time. None: all
to: str = None  # the folder for eval.json. None: that of the checkpoint
batch_size = 8  # windows per batch and process; tasks take batches of as many tokens
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: the GPU if there is one
dtype = 'auto'  # 'float32', 'bfloat16', 'float16'; auto: bfloat16 where the hardware has it
compile: bool | str = False  # torch.compile the model, for the text
backend = 'auto'  # of torch.distributed: 'nccl', 'gloo'; auto: nccl on GPUs, gloo elsewhere
ddp_timeout = 600  # seconds that a process waits for the others
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import os
import time
from contextlib import nullcontext

import torch

import checkpoint
import report
import tasks as questions
from dataset import DATA_DIR, Dataset, make_tokenizer, same_tokenizer
from parallel import Processes, choose_compile, choose_dtype, compile_model

problems = out_of_range(knobs, above_zero='eval_tokens block_size stride max_per_task batch_size ddp_timeout', words=dict(split='val train none'))
names = list(dict.fromkeys(name.strip() for name in tasks.split(',') if name.strip()))
if split == 'none' and not names:
    problems.append("nothing to do (split=none and no tasks). use --split=val, --tasks=hellaswag, or both")
if problems:
    fail(*problems)
procs = Processes(device, backend, ddp_timeout)
device, master = procs.device, procs.is_main
dtype, _ = choose_dtype(dtype, device)
compiling, _ = choose_compile(compile, device)

# -----------------------------------------------------------------------------
# the model, its tokenizer, the text

path = checkpoint.find(out_dir, hub=False) if init_from == 'resume' else checkpoint.find(init_from)
state = checkpoint.read(path)
config = checkpoint.model_config(state)
block_size = config.block_size if block_size is None else block_size
if config.positions == 'learned' and block_size > config.block_size:
    problems.append(f"block_size={block_size}, but the model has learned only {config.block_size} positions. use --block_size={config.block_size} or less")
if stride is not None and stride > block_size:
    problems.append(f"stride={stride} would leave tokens out, as a window has {block_size}. use --stride={block_size} or less")
if problems:
    fail(*problems)
# of nanoGPT's checkpoints, the dataset tells the tokenizer
tokenizer_state = checkpoint.tokenizer_state(state, None if state.get('tokenizer') else dataset, data_dir)
data = None
if split != 'none':
    name = dataset or state['config'].get('dataset')
    if not name:
        fail(f"{path} does not say which text it was trained on. name one with --dataset=NAME, or use --split=none and --tasks")
    data = Dataset(name, data_dir)
    tokens = getattr(data, split)
    if tokens is None:
        fail(f"no val.bin in {data.folder}. use --split=train")
    if not same_tokenizer(state.get('tokenizer'), data.tokenizer_state):
        fail(f"dataset {name} has another tokenizer than the model. make one with the model's from the same text: python prepare.py {name}_2 --input=FILE --tokenizer=...")
    tokens.vocab_size = min(tokens.vocab_size, config.vocab_size)
    if tokens.n < 2:
        fail(f"{tokens.path} has {tokens.n} token, and nothing follows it. use a longer text")
tasks_dir = tasks_dir or DATA_DIR
wanted, missing = [], []
for name in names:
    entries = questions.bundle(tasks_dir) if name == 'core' else {name: None}
    absent = [entry for entry, (file, *_) in entries.items() if not os.path.exists(file)] if name == 'core' else []
    missing += absent
    wanted += [entry for entry in entries if entry not in absent and entry not in wanted]

torch.set_float32_matmul_precision('high')
model = checkpoint.build(state, **({} if block_size == config.block_size else {'block_size': block_size})).to(device).eval()
iter_num = state['iter_num']
state = None  # gives its memory back
autocast = nullcontext() if dtype == 'float32' else torch.autocast(device.type, dtype=getattr(torch, dtype))
procs.print(f"{path}, {f'after {iter_num:,} iterations' if iter_num else 'of unknown age'}: {config.arch}, {sum(p.numel() for p in model.parameters()):,} parameters, "
            f"{block_size} positions; {device}, {dtype}" + (f", {procs.world_size} processes" if procs.many else ''))
result = {'checkpoint': os.path.basename(path), 'iter': iter_num, 'block_size': block_size, 'dtype': dtype, 'texts': {}, 'tasks': {}}

# what is wrong with the questions is said before the work
tokenizer = make_tokenizer(tokenizer_state) if wanted else None
loaded = {name: questions.load(name, tasks_dir, tokenizer, block_size, max_per_task or 0) for name in wanted}
if missing:
    procs.print(f"note: CORE needs all of its tasks; not in {os.path.join(tasks_dir, 'eval_bundle')}: {', '.join(missing)}. fetch {questions.BUNDLE}")


def keep(result, to):
    """Put what was found into eval.json, beside what is known of the same weights. Returns the file."""
    file = os.path.join(to, 'eval.json')
    before = report.read_json(file)
    if all(before.get(key) == result[key] for key in ('checkpoint', 'iter', 'block_size', 'dtype')):
        result = {**before, **result, 'texts': {**before['texts'], **result['texts']}, 'tasks': {**before['tasks'], **result['tasks']}}
    try:
        os.makedirs(to, exist_ok=True)
        report.write_json(file, result)
        if os.path.exists(os.path.join(to, 'log.csv')):
            report.write(to)
    except OSError as e:
        fail(f"{to} cannot be written into ({e.strerror}). the numbers are above; name another folder with --to")
    return file


if to is None and os.path.isfile(path):
    to = os.path.dirname(path) or '.'

# -----------------------------------------------------------------------------
# the text

if data:
    windows = questions.cut(min(tokens.n - 1, eval_tokens or tokens.n), block_size, stride)
    if compiling:
        zeros = torch.zeros(batch_size, block_size, dtype=torch.int64, device=device)
        with torch.no_grad(), autocast:
            procs.print(compile_model(model, lambda: model(zeros, zeros, reduction='none'), compile) or 'compiled')
    t0 = time.perf_counter()
    lengths = questions.byte_lengths(tokenizer_state, config.vocab_size)
    found = questions.text_loss(model, tokens, windows, block_size, batch_size, procs, autocast, lengths, tick=procs.ticker(f"{data.name}/{split}"))
    result['texts'][f'{data.name}/{split}'] = {**found, 'stride': stride or block_size, 'sha256': data.meta['splits'].get(split, {}).get('sha256')}
    plus_minus = lambda error: '' if error is None else f" ± {error:.4f}"
    procs.print(f"{data.name}/{split}: loss {found['loss']:.4f}{plus_minus(found['loss_error'])}, perplexity {found['perplexity']:.2f}, " +
                (f"{found['bpb']:.4f}{plus_minus(found['bpb_error'])} bits per byte" if lengths is not None else "bits per byte unknown, as the tokenizer is not on this machine") +
                f", over {found['tokens']:,} tokens" + (f" = {found['bytes']:,} bytes" if lengths is not None else '') + f" in {time.perf_counter() - t0:.0f} s")

    if to and master and wanted:
        keep(result, to)  # the questions may take hours

# -----------------------------------------------------------------------------
# the questions

if wanted:
    procs.print(f"\n{'task':32} {'shots':>5} {'questions':>9}  {'accuracy':16} {'chance':>6} {'centred':>8}")
for name, task in loaded.items():
    found = questions.grade(task, questions.score(model, task, batch_size * block_size, procs, autocast, tick=procs.ticker(name)))
    found.pop('right')
    result['tasks'][name] = found
    procs.print(f"{name:32} {found['shots']:5} {found['questions']:9,}  {100 * found['accuracy']:5.2f} ± {100 * found['error']:4.2f} %   {100 * found['chance']:5.1f}% {found['centered']:8.4f}"
                + (f"  ({found['truncated']:,} too long for {block_size} positions)" if found['truncated'] else ''))
if 'core' in names:
    centered = [result['tasks'][name]['centered'] for name in questions.bundle(tasks_dir) if name in result['tasks']]
    if not missing:
        result['core'] = sum(centered) / len(centered)
        procs.print(f"CORE {result['core']:.4f}, the mean of {len(centered)} centred accuracies")

if to and master:
    procs.print(f"written to {keep(result, to)}" + (" and report.md" if os.path.exists(os.path.join(to, 'report.md')) else ''))
procs.close()
