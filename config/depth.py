# One setting, the depth of the network, determines all others.
#
#   data     python prepare.py fineweb   (or another large dataset: --dataset=NAME)
#   launch   python train.py config/depth.py --n_layer=12
#            torchrun --standalone --nproc_per_node=8 train.py config/depth.py --n_layer=24
#   a CPU    python prepare.py
#            python train.py config/depth.py --n_layer=4 --dataset=pystdlib --train_minutes=5
#   cost     docs/gpus.md, "What a depth costs": tokens, hours, dollars and memory of each depth
#   loss     depth 12: docs/reading_logs.md, "modern on FineWeb". Short runs on a CPU, on bytes: validation
#            1.440 after 400 iterations with 2 layers, where config/quickstart.py's rates, tuned by hand, reach
#            1.445; 1.456 and 1.428 after 200 with 4 layers (dev/results.md)
#
# Flags win, and the settings that depend on them follow: --max_tokens=1e8 also reduces the batch, and
# --n_embd=512 also changes heads, tokens and rates.
#
#   width    64 channels per layer, rounded up to heads of 128 channels, as nanochat does
#            (scripts/base_train.py)
#   tokens   20 per parameter (Chinchilla, arXiv 2203.15556), counting the matrices inside the blocks, as
#            embedding and head depend on the vocabulary. At depth 12 these are the 1.7 billion tokens of the
#            tuned run. nanochat's sweep found the lowest loss for a given compute at 17 per such parameter
#            for 80M of them, and at 8.5 for 400M (dev/LOG.md there, 2026-01-27): for a deep network that is
#            trained once and rarely used, lower --max_tokens
#   batch    2^19 tokens at depth 12, proportional to (tokens of the run)^0.383 (arXiv 2505.13738, as used by
#            nanochat). That law was fitted to large runs and leaves small ones too few iterations, so a batch
#            is at most 1/2,000 of the run. It is at least 2,048 tokens, as Muon's step takes the same time
#            for any batch
#   rates    config/arch_modern.py, executed at the end of this file

import math
import os

from configurator import process_ranks

out_dir = f'out-depth-{n_layer}'
dataset = 'fineweb'
wandb_project = 'depth'
wandb_run_name = f'depth-{n_layer}'

# the network
n_embd = 128 * math.ceil(64 * n_layer / 128)
block_size = 256 if n_layer < 6 else 512 if n_layer < 10 else 1024

# the length of the run
_parameters = 12 * n_layer * n_embd**2  # 4 n_embd^2 in attention, 8 in the MLP
max_tokens = 20.0 * _parameters
_tuned_tokens = 20.0 * 12 * 12 * 768**2  # at depth 12

# the batch, a power of two
_best_batch_size = min(2**19 * (max_tokens / _tuned_tokens) ** 0.383, max_tokens / 2000)
if train_minutes and n_layer < 8:
    _best_batch_size = 0  # the tokens that fit into these minutes are unknown; this suits a laptop
total_batch_size = 2 ** round(math.log2(max(2048, _best_batch_size)))
max_iters = math.ceil(max_tokens / total_batch_size)
max_tokens = None  # replaced by max_iters, so that --max_iters may be larger

# micro-batches of at most 32,768 tokens, fewer for larger networks, in proportion to the activations that the
# blocks save for the backward pass; --batch_size overrides this
_n_processes = process_ranks()[2]
_sequences = total_batch_size // (block_size * _n_processes)  # per iteration and process
_micro_tokens = min(32768, 32768 * (12 * 768) // (n_layer * n_embd))
batch_size = max(1, min(_sequences, _micro_tokens // block_size))
while _sequences % batch_size:
    batch_size -= 1

eval_interval = 200 if train_minutes else max(1, max_iters // 10)
_eval_tokens = min(10485760, total_batch_size * max_iters // 50)
if train_minutes and n_layer < 8:
    _eval_tokens = 102400
eval_iters = max(1, _eval_tokens // (batch_size * block_size))
sample_interval = 5 * eval_interval
log_interval = 10

with open(os.path.join(os.path.dirname(__file__), 'arch_modern.py')) as _file:
    exec(_file.read())
