"""
Evaluate a model: the loss of a text, a sample, and accuracy on benchmarks.

    $ python eval.py out-quickstart
    $ python eval.py --init_from=gpt2 --dataset=openwebtext --tasks=hellaswag
    $ torchrun --standalone --nproc_per_node=8 eval.py out --tasks=hellaswag,core --max_per_task=500

The loss is in nats per token and depends on the tokenizer. Use bits per byte to compare models with different
tokenizers. The results are written to eval_ITERATION.json in the folder of the run; an earlier file of that
name is replaced.
"""

from configurator import InputError, configure, launched_by_torchrun, print0, process_ranks

# -----------------------------------------------------------------------------
init_from = 'resume'  # the checkpoint in out_dir; or a checkpoint, a Hugging Face folder or name ('gpt2')
out_dir = 'out'  # the folder of the run, if init_from is 'resume'
dataset: str = None  # the text: data/<dataset>. None: the dataset that the model was trained on
data_dir: str = None  # the folder of the datasets and of the files of tasks. None: data/ next to this file
split = 'val'  # 'train'; 'none': only the tasks are evaluated
eval_tokens = 0  # number of tokens, in sequences spread evenly over the split; 0: the whole split
tasks = ''  # 'hellaswag,core': HellaSwag, CORE, single tasks of CORE, FILE.jsonl with your own examples
max_per_task = 0  # examples of each task; 0: all
sample_tokens = 100  # length of the sample; 0, or split='none': no sample
batch_size = 8  # sequences per batch and process
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

from flatgpt import checkpoint
from flatgpt.dataset import Dataset
from flatgpt.evaluation import text_loss
from flatgpt.files import write_json
from flatgpt.processes import autocast, choose_device, choose_dtype, init_processes, loss_chunk_size
from flatgpt.sampling import generate_text
from flatgpt.tokenizer import make_tokenizer, token_bytes

# -----------------------------------------------------------------------------
# processes and device
if split == 'none' and not tasks:
    raise InputError("there is nothing to evaluate: split=none, and no tasks. Use --split=val or "
                     "--tasks=hellaswag.")
ddp = launched_by_torchrun()
ddp_rank, ddp_local_rank, ddp_world_size = process_ranks()
used_device = choose_device(device, ddp_local_rank)  # 'cpu', 'cuda:0', 'mps'
if ddp:
    init_processes(backend, used_device, ddp_timeout)
compute_dtype = choose_dtype(dtype, used_device)
ctx = autocast(used_device, compute_dtype)
torch.set_float32_matmul_precision('highest' if compute_dtype == 'float32' else 'high')  # high: TF32

# -----------------------------------------------------------------------------
# the model, the text, the tasks: all files are read before the evaluation, so that a mistake shows at once
path = checkpoint.find(out_dir if init_from == 'resume' else init_from)
ckpt = checkpoint.read(path)
model = checkpoint.build_model(ckpt).to(used_device).eval()
block_size = model.config.block_size
vocab_size = model.config.vocab_size
model.loss_chunk_size = loss_chunk_size(used_device, batch_size * block_size, vocab_size, compiled=False)
# The checkpoint's tokenizer, even if --dataset names another text. nanoGPT's checkpoints have none; it is in
# the folder of the dataset
tokenizer = make_tokenizer(ckpt['tokenizer'] or checkpoint.tokenizer_state_of(ckpt, dataset, data_dir))
if split != 'none':
    dataset_name = dataset or checkpoint.setting(ckpt, 'dataset', '')
    if not dataset_name:
        raise InputError(f"{path} does not name the dataset that it was trained on. Use --dataset=NAME, or "
                         "--split=none with --tasks.")
    # as in training: attention within documents, conversations packed with the same seed
    data = Dataset(dataset_name, data_dir, seed=checkpoint.setting(ckpt, 'seed', 0),
                   document_mask=checkpoint.setting(ckpt, 'document_mask', False))
    if split not in data.splits:
        raise InputError(f"{data.folder} has no such split: {split}. Use {', '.join(data.splits)} or none.")
    if not checkpoint.is_compatible(ckpt, data.tokenizer_state, data.meta['vocab_size']):
        raise InputError(f"dataset {dataset_name} does not have the tokenizer of {path}. Prepare the text "
                         f"with it: python prepare.py NAME --input=FILE --tokenizer={path}.")
loaded_tasks = {}  # {name: [Task, ...]}
if tasks:
    from flatgpt.benchmarks import evaluate_tasks, load_tasks
    loaded_tasks = load_tasks(tasks, max_per_task, data_dir, tokenizer)
print0(f"{path}, iteration {ckpt['iter_num']:,}: {model.config.arch}, "
       f"{model.get_num_params(non_embedding=False):,} parameters, block_size {block_size}; "
       f"{ddp_world_size} x {used_device}, {compute_dtype}")
result = {'checkpoint': path, 'iter': ckpt['iter_num'], 'dtype': compute_dtype}
ckpt = None  # free its memory


def save():
    """Write `result` next to the checkpoint. A model of the Hugging Face Hub has no such folder."""
    if ddp_rank == 0 and os.path.isfile(path):
        file = os.path.join(os.path.dirname(path), f"eval_{result['iter']:08d}.json")
        if write_json(file, result):
            print0(f"written: {file}")


# -----------------------------------------------------------------------------
# the loss of the text, and a sample
if split != 'none':
    t0 = time.perf_counter()
    split_data = data.splits[split]
    if not split_data.token_bytes.any():  # unknown, as nanoGPT's datasets do not contain their tokenizer
        split_data.token_bytes = token_bytes(tokenizer.state(), vocab_size)
    n_sequences = math.ceil(eval_tokens / block_size)
    losses = text_loss(model, split_data, n_sequences, batch_size, ctx)
    loss = losses['loss']
    if not math.isfinite(loss):
        raise InputError(f"the loss of {dataset_name}/{split} is not finite: {loss} in {compute_dtype}. Use "
                         "--dtype=float32 or an older checkpoint.")
    perplexity = math.exp(min(loss, 700.0))
    bpb_text = "bits per byte unknown"
    size = f"{losses['tokens']:,} tokens"
    if losses['bpb'] is not None:
        bpb_text = f"{losses['bpb']:.4f} ± {losses['bpb_error']:.4f} bits per byte"
        size += f" = {losses['bytes']:,} bytes"
    print0(f"{dataset_name}/{split}: loss {loss:.4f} ± {losses['loss_error']:.4f}, "
           f"perplexity {perplexity:.2f}, {bpb_text}, over {size} in {time.perf_counter() - t0:.0f} s")
    result.update(dataset=dataset_name, split=split, perplexity=perplexity, **losses)
    if sample_tokens and ddp_rank == 0:
        with ctx:
            result['sample'] = generate_text(model, tokenizer, '', sample_tokens, seed=1337)
        print0(f"a sample:\n---\n{result['sample']}\n---")
    save()  # the tasks may take hours

# -----------------------------------------------------------------------------
# the tasks
if tasks:
    metrics, result['tasks'] = evaluate_tasks(model, loaded_tasks, tokenizer, ctx)
    result.update(metrics)
    save()
if ddp:
    torch.distributed.barrier()  # wait until all ranks have finished communicating
    torch.distributed.destroy_process_group()
