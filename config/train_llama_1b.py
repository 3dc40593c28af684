# A Llama of 1.3B parameters, on 45 billion tokens.
#
#   data     a large set as data/fineweb_edu (or --dataset=NAME), with GPT-2's tokens (1,439M parameters) or
#            those of a smaller vocabulary (1,267M with 8,192 ids)
#   launch   torchrun --standalone --nproc_per_node=8 train.py config/train_llama_1b.py
#   batch    4 sequences x 2,048 tokens x 8 micro-batches x 8 GPUs = 524,288 tokens per iteration
#   budget   45 billion tokens = 85,831 iterations, 31 to 36 tokens per parameter
#   cost     45e9 tokens x 8.7 to 9.2 GFLOP = 3.9e20 to 4.2e20 FLOP: 34 to 36 hours on 8 H100 at 40% of
#            their peak. Arithmetic; not measured by us
#   loss     not measured by us

out_dir = 'out-llama-1b'
dataset = 'fineweb_edu'
wandb_project = 'llama'
wandb_run_name = 'llama-1b'

arch = 'llama'
bias = False
n_layer, n_head, n_embd = 24, 32, 2048
mlp_width = 5632  # 8/3 of n_embd, rounded up to a multiple of 256
batch_size = 4
block_size = 2048
gradient_accumulation_steps = 8 * 8  # over all GPUs

budget = '45e9 tokens'
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 2000
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 100
log_interval = 10
