# GPT-2 124M on ten billion tokens of FineWeb-Edu, as in Karpathy's build-nanogpt.
#
#   data     python prepare.py fineweb_edu   (30 GB become 10 billion tokens)
#            python prepare.py hellaswag     (the benchmark)
#   launch   torchrun --standalone --nproc_per_node=8 train.py config/train_edu_124m.py
#   batch    64 sequences x 1,024 tokens x 8 GPUs = 524,288 tokens per iteration; with fewer GPUs, the same in
#            more micro-batches. For a card with less than 40 GB: docs/gpus.md, "Which micro-batch fits"
#   budget   5 x 19,073 iterations = 50 billion tokens, five epochs; one epoch: --max_iters=19073
#   cost     26 hours on one H100, without evaluations: 5.0e10 tokens at 536,100 tokens/s (docs/gpus.md)
#   loss     OpenAI's GPT-2 of this size has 3.29, and 0.294 on HellaSwag (docs/reading_logs.md, "OpenAI's
#            weights on FineWeb-Edu"); GPT-3 of this size has 0.337 (build-nanogpt)

import os

out_dir = 'out-edu-124m'
dataset = 'fineweb_edu'
wandb_project = 'fineweb-edu'
wandb_run_name = 'gpt2-124M'

batch_size = 64
block_size = 1024
total_batch_size = 524288  # tokens; gradient_accumulation_steps follows from it

max_iters = 5 * 19073
warmup_iters = 715
learning_rate = 1e-3
min_lr = 1e-4

eval_interval = 250
eval_iters = 40
tasks = 'hellaswag'
tasks_interval = 250
sample_interval = 250
sample_prompts = os.path.join(os.path.dirname(__file__), 'prompts.txt')
sample_tokens = 32
temperature = 1.0
top_k = 50
save_interval = 5000
log_interval = 10
