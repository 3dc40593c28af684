# A Llama of 1.3 billion parameters, on 45 billion tokens.
#
#   data     python prepare.py fineweb_edu_50b --input='hf:HuggingFaceFW/fineweb-edu/sample/100BT/*.parquet' \
#                --max_tokens=5e10
#            50 billion tokens (about 100 GB), so that none is seen twice. 1,439M parameters with GPT-2's
#            tokens, 1,267M with a vocabulary of 8,192
#   launch   torchrun --standalone --nproc_per_node=8 train.py config/train_llama_1b.py
#   batch    4 sequences x 2,048 tokens x 8 micro-batches x 8 GPUs = 524,288 tokens per iteration
#   budget   45 billion tokens = 85,831 iterations, 31 to 36 tokens per parameter
#   cost     34 to 36 hours on 8 H100 at an MFU of 40%: 45e9 tokens x 8.7 to 9.2 GFLOP = 3.9e20 to 4.2e20
#            FLOP. With less memory: --shard=0, --activation_checkpointing
#   loss     unknown: no row of docs/reading_logs.md is comparable

out_dir = 'out-llama-1b'
dataset = 'fineweb_edu_50b'
wandb_project = 'llama'
wandb_run_name = 'llama-1b'

arch = 'llama'
bias = False
n_layer = 24
n_head = 32
n_embd = 2048
mlp_width = 5632  # 8/3 of n_embd, rounded up to a multiple of 256
batch_size = 4
block_size = 2048
gradient_accumulation_steps = 8 * 8  # over all GPUs

max_tokens = 45e9
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 2000
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 100
log_interval = 10
