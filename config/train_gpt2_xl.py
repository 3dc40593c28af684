# GPT-2 1.5B (XL) on OpenWebText.
#
#   data     python prepare.py openwebtext   (or nanoGPT's files as data/openwebtext/)
#   launch   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_xl.py
#   batch    4 sequences x 1,024 tokens x 16 micro-batches x 8 GPUs = 524,288 tokens per iteration
#   budget   600,000 iterations = 315 billion tokens
#   cost     one H100 trains 41,000 tokens/s with micro-batches of 8 (docs/gpus.md); AdamW is 7% of a step
#            without accumulation
#   loss     should be below the 2.85 of 124M (docs/reading_logs.md, "GPT-2 on OpenWebText"). OpenAI's GPT-2
#            of this size, trained on other text, has 2.54

wandb_project = 'owt'
wandb_run_name = 'gpt2-1558M'

n_layer = 48
n_head = 25
n_embd = 1600  # 1,556.8M parameters
batch_size = 4
block_size = 1024
gradient_accumulation_steps = 16 * 8  # over all GPUs

max_iters = 600000
learning_rate = 2e-4  # GPT-3's for this size (arXiv 2005.14165, table 2.1)
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 200
log_interval = 10
