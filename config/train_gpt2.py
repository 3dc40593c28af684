# GPT-2 124M on OpenWebText: nanoGPT's reproduction.
#
#   data     python prepare.py openwebtext   (or nanoGPT's files as data/openwebtext/)
#   launch   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
#   one GPU  python train.py config/train_gpt2.py --batch_size=32 --total_batch_size=491520
#   batch    12 sequences x 1,024 tokens x 5 micro-batches x 8 GPUs = 491,520 tokens per iteration
#   budget   600,000 iterations = 295 billion tokens
#   cost     about 4 days on 8 A100 40GB (nanoGPT's README); 6.6 days on one H100, by its 518,200 tokens/s
#            with micro-batches of 32 (docs/gpus.md)
#   loss     validation about 2.85 (nanoGPT's README): docs/reading_logs.md, "GPT-2 on OpenWebText". OpenAI's
#            GPT-2 of this size, trained on other text, has 3.12

wandb_project = 'owt'
wandb_run_name = 'gpt2-124M'

n_layer = 12
n_head = 12
n_embd = 768  # 124.4M parameters
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8  # over all GPUs

max_iters = 600000
learning_rate = 6e-4
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 200
log_interval = 10
