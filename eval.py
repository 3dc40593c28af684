"""
How good is a model? Its loss, perplexity and bits per byte over a text, a sample of what it writes, and its
accuracy on benchmarks. The numbers go to eval_ITERATION.json in the run's folder.

    $ python eval.py out-quickstart
    $ python eval.py --init_from=gpt2 --dataset=openwebtext --tasks=hellaswag
    $ torchrun --standalone --nproc_per_node=8 eval.py out --tasks=hellaswag,core --max_per_task=500

The loss is in nats per token, and depends on what a token is. Bits per byte do not: use them to compare
models with different tokenizers.
"""

from configurator import launched_by_torchrun, process_ranks, InputError, check_range, configure, print0

# -----------------------------------------------------------------------------
init_from = 'resume'  # the checkpoint in out_dir; or a checkpoint, a Hugging Face folder or name ('gpt2')
out_dir = 'out'  # the run's folder, if init_from is 'resume'
dataset: str = None  # the text: data/<dataset>. None: what the model was trained on
data_dir: str = None  # the folder of the datasets and of the tasks' files. None: data/ beside this file
split = 'val'  # 'train', or 'none': only the tasks
eval_tokens = 0  # evaluate so many tokens, in windows spread evenly; 0: the whole split
tasks = ''  # 'hellaswag,core': HellaSwag, CORE, tasks of its bundle, FILE.jsonl with tasks of your own
max_per_task = 0  # examples of each task; 0: all
sample_tokens = 100  # length of a text that the model writes; 0: none
batch_size = 8  # windows per batch and process
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'
dtype = 'auto'  # 'float32', 'bfloat16', 'float16'
backend = 'auto'  # of torch.distributed: 'nccl', 'gloo'
ddp_timeout = 600  # seconds that a process waits for the others
# -----------------------------------------------------------------------------
config, given = configure(globals(), positional='out_dir')

import math
import os
import time

import torch
import torch.distributed

import checkpoint
from benchmarks import evaluate_tasks, load_tasks
from dataset import Dataset
from evaluation import text_loss
from files import write_json
from processes import autocast, choose_device, choose_dtype, init_processes
from sampling import generate_text
from tokenizer import make_tokenizer, token_bytes


# -----------------------------------------------------------------------------
# processes and device
check_range(config, ['batch_size', 'ddp_timeout'], 1)
check_range(config, ['eval_tokens', 'max_per_task', 'sample_tokens'], 0)
if split == 'none' and not tasks:
    raise InputError("nothing to do (split=none, and no tasks). use --split=val, --tasks=hellaswag, or both")
ddp = launched_by_torchrun()
rank, local_rank, world_size = process_ranks()
master_process = rank == 0
device = choose_device(device, local_rank)
if ddp:
    init_processes(backend, device, ddp_timeout)
dtype = choose_dtype(dtype, device)
ctx = autocast(device, dtype)
torch.set_float32_matmul_precision('highest' if dtype == 'float32' else 'high')  # high: TF32

# -----------------------------------------------------------------------------
# the checkpoint, the text, the tasks: what is wrong with their files is said before the work
try:
    path = checkpoint.find(out_dir if init_from == 'resume' else init_from)
    ckpt = checkpoint.read(path)
    model = checkpoint.build_model(ckpt)
    # nanoGPT's have no tokenizer: the dataset has it
    tokenizer = make_tokenizer(ckpt['tokenizer'] or checkpoint.tokenizer_state_of(ckpt, dataset, data_dir))
except ValueError as e:
    raise InputError(str(e))
block_size = model.config.block_size
vocab_size = model.config.vocab_size
if split != 'none':
    dataset = dataset or ckpt['config'].get('dataset')
    if not dataset:
        raise InputError(f"{path} does not tell which text it was trained on. name one with --dataset=NAME, or use "
              "--split=none and --tasks")
    # a run with document_mask never looked across documents
    data = Dataset(dataset, data_dir, document_mask=ckpt['config'].get('document_mask', False))
    if split not in data.splits:
        raise InputError(f"no such split ({split}) in {data.folder}. use one of {', '.join(data.splits)}, or none")
    if not checkpoint.is_compatible(ckpt, data.tokenizer_state, data.meta['vocab_size']):
        raise InputError(f"dataset {dataset} has another tokenizer than the model ("
              f"{data.meta['vocab_size']} ids, up to {vocab_size} there). make one with the model's, from "
              f"the same text: python prepare.py {dataset}_2 --input=FILE --tokenizer={path}")
task_list = load_tasks(tasks, max_per_task, data_dir, tokenizer, block_size) if tasks else {}

model.to(device).eval()
print0(f"{path}, iteration {ckpt['iter_num']:,}: {model.config.arch}, "
       f"{model.get_num_params(non_embedding=False):,} parameters, block_size {block_size}; {world_size} x "
       f"{device}, {dtype}")
result = {'checkpoint': path, 'iter': ckpt['iter_num'], 'dtype': dtype}
ckpt = None  # free its memory


def save(result):
    """Into the folder of the checkpoint. A model of the Hub has none."""
    if master_process and os.path.isfile(path):
        file = os.path.join(os.path.dirname(path), f"eval_{result['iter']:08d}.json")
        if write_json(file, result):
            print0(f"written to {file}")


# -----------------------------------------------------------------------------
# the loss of the text, and what the model writes
if split != 'none':
    t0 = time.perf_counter()
    tokens = data.splits[split]
    if not tokens.token_bytes.any():  # nanoGPT's datasets only name their tokenizer
        tokens.token_bytes = token_bytes(tokenizer.state(), vocab_size)
    n_windows = math.ceil(eval_tokens / block_size)
    found = text_loss(model, tokens, n_windows, block_size, batch_size, ctx, rank, world_size)
    if not math.isfinite(found['loss']):
        raise InputError(f"the loss of {dataset}/{split} is not finite ({found['loss']}, in {dtype}). try "
              "--dtype=float32, else an older checkpoint")
    bpb = "bits per byte unknown"
    if found['bpb'] is not None:
        bpb = f"{found['bpb']:.4f} ± {found['bpb_error']:.4f} bits per byte"
    print0(f"{dataset}/{split}: loss {found['loss']:.4f} ± {found['loss_error']:.4f}, perplexity "
           f"{found['perplexity']:.2f}, {bpb}, over {found['tokens']:,} tokens = {found['bytes']:,} bytes in "
           f"{time.perf_counter() - t0:.0f} s")
    result.update(dataset=dataset, split=split, **found)
    if sample_tokens and master_process:
        with ctx:
            result['sample'] = generate_text(model, tokenizer, '', sample_tokens, seed=1337)
        print0(f"it writes\n---\n{result['sample']}\n---")
    save(result)  # the tasks may take hours

# -----------------------------------------------------------------------------
# the tasks
if tasks:
    metrics, result['tasks'] = evaluate_tasks(model, task_list, ctx, rank, world_size)
    result.update(metrics)
    save(result)
if ddp:
    torch.distributed.barrier()  # nobody leaves while another still talks
    torch.distributed.destroy_process_group()
