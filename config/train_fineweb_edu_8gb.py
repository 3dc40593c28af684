# 124M scale in a weekend on a card with 8 GB: the recipe of config/arch_modern.py on educational web pages.
# Batch and iterations are those for which the recipe was tuned.
#
#   data     python prepare.py fineweb_edu --max_tokens=2e9         (a download; then 4 GB on disk)
#   launch   python train.py config/train_fineweb_edu_8gb.py config/arch_modern.py --init_from=auto
#            (the same line again goes on after an interruption)
#   batch    2 sequences x 1,024 tokens x 256 micro-batches = 524,288 tokens per iteration; 7.3 GB by
#            plan.py
#   budget   3,250 iterations = 1.7 billion tokens, so that none is seen twice
#   cost     1.7e9 tokens x 0.855 GFLOP = 1.5e18 FLOP: 38 hours on an RTX 4060, 28 on an RTX 3070, at 35% of
#            their 30 and 41 TFLOP/s. Arithmetic; not measured by us
#   loss     about 3.1 for validation, an estimate: 3.28 on FineWeb for the source of the recipe
#            (modded-nanogpt, track 3, result 36), less 0.2: a GPT-2's after 10 billion tokens is 3.03 on
#            FineWeb-Edu (the reproduction behind Razvanip/nanoGPT2-124m), 3.27 on FineWeb (llm.c). OpenAI's
#            GPT-2 of this size has 3.29 on FineWeb-Edu (build-nanogpt)

out_dir = 'out-fineweb-edu-8gb'
dataset = 'fineweb_edu'
wandb_project = 'fineweb-edu'
wandb_run_name = '124M-8gb'

n_layer, n_embd = 12, 768
batch_size = 2
block_size = 1024
gradient_accumulation_steps = 256

max_iters = 3250
warmup_iters = 250  # without config/arch_modern.py behind it this is a GPT-2

eval_interval = 125  # every hour and a half
eval_iters = 1048576 // (batch_size * block_size)
save_interval = 25  # a power cut costs twenty minutes
log_interval = 1
