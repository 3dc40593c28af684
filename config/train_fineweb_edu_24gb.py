# 124M scale in a weekend on a card with 24 GB: config/train_fineweb_edu_8gb.py with a larger micro-batch and
# three times the tokens.
#
#   data     python prepare.py fineweb_edu --max_tokens=5.5e9      (a download; then 11 GB on disk)
#   launch   python train.py config/train_fineweb_edu_24gb.py config/arch_modern.py --init_from=auto
#            (the same line again goes on after an interruption)
#   batch    16 sequences x 1,024 tokens x 32 micro-batches = 524,288 tokens per iteration; 16.9 GB by
#            plan.py
#   budget   10,000 iterations = 5.2 billion tokens, so that none is seen twice
#   cost     5.24e9 tokens x 0.855 GFLOP = 4.5e18 FLOP: 44 hours on an RTX 3090, 19 on an RTX 4090, at 40% of
#            their 71 and 165 TFLOP/s. Arithmetic; not measured by us
#   loss     about 3.0 for validation, an estimate: that of config/train_fineweb_edu_8gb.py, less 0.09 for
#            three times the tokens. Two runs of modded-nanogpt on FineWeb (3.28 after 1.7 billion, 3.13 after
#            10 billion without shortcuts) give 0.08 for each factor e

out_dir = 'out-fineweb-edu-24gb'
dataset = 'fineweb_edu'
wandb_project = 'fineweb-edu'
wandb_run_name = '124M-24gb'

n_layer, n_embd = 12, 768
batch_size = 16
block_size = 1024
gradient_accumulation_steps = 32

max_iters = 10_000
warmup_iters = 250  # without config/arch_modern.py behind it this is a GPT-2

eval_interval = 250  # every hour on an RTX 3090
eval_iters = 1048576 // (batch_size * block_size)
save_interval = 50  # a power cut costs a quarter of an hour
log_interval = 5
