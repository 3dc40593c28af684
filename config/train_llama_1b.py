# A Llama of 1.3B parameters, on 45 billion tokens.
#
#   data     50 billion tokens of FineWeb-Edu, so that none is seen twice: by its name alone, prepare.py takes
#            the sample of 10 billion, which would be 4.5 epochs. The sample of 100 billion, up to 50:
#            python prepare.py fineweb_edu_50b --input=hf:HuggingFaceFW/fineweb-edu:sample-100BT \
#                --max_tokens=5e10               (about 100 GB; GPT-2's tokens: 1,439M parameters. With a
#            smaller vocabulary they are fewer: 1,267M with 8,192 ids)
#   launch   torchrun --standalone --nproc_per_node=8 train.py config/train_llama_1b.py
#   batch    4 sequences x 2,048 tokens x 8 micro-batches x 8 GPUs = 524,288 tokens per iteration
#   budget   45 billion tokens = 85,831 iterations, 31 to 36 tokens per parameter
#   cost     45e9 tokens x 8.7 to 9.2 GFLOP = 3.9e20 to 4.2e20 FLOP: 34 to 36 hours on 8 H100 at 40% of
#            their peak. Arithmetic; not measured by us
#   loss     not measured by us

out_dir = 'out-llama-1b'
dataset = 'fineweb_edu_50b'
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
