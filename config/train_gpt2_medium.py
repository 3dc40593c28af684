# GPT-2 350M (medium) on OpenWebText.
#
#   data     python prepare.py openwebtext   (or nanoGPT's files as data/openwebtext/)
#   launch   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_medium.py
#   batch    8 sequences x 1,024 tokens x 8 micro-batches x 8 GPUs = 524,288 tokens per iteration
#   budget   600,000 iterations = 315 billion tokens
#   cost     one H100 trains 190,500 tokens/s at micro-batches of 24, in 27.2 GB (dev/results.md). The whole
#            run was not measured by us
#   loss     not measured by us; 124M reaches 2.85 (nanoGPT's README). OpenAI's GPT-2 of this size, trained
#            on other text, has 2.84

wandb_project = 'owt'
wandb_run_name = 'gpt2-350M'

n_layer = 24
n_head = 16
n_embd = 1024  # 354.6M parameters
batch_size = 8
block_size = 1024
gradient_accumulation_steps = 8 * 8  # over all GPUs: with fewer, each does more of them

max_iters = 600000
learning_rate = 3e-4  # GPT-3's for this size (arXiv 2005.14165, table 2.1)
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 200
log_interval = 10
