# The run for which config/arch_modern.py was tuned: 124M scale (162M parameters, as embedding and head are
# two matrices). Its source reports GPT-2's loss with a sixth of the tokens.
#
#   data     python prepare.py fineweb   (or another large dataset: --dataset=NAME)
#   launch   torchrun --standalone --nproc_per_node=8 train.py config/train_fineweb_124m.py \
#                config/arch_modern.py
#   batch    32 sequences x 1,024 tokens x 2 micro-batches x 8 GPUs = 524,288 tokens per iteration
#   budget   3,250 iterations = 1.7 billion tokens
#   cost     63 minutes on one H100, without evaluations: 1.7e9 tokens at 446,900 tokens/s (docs/gpus.md). The
#            source reports 8.4 minutes on 8 H100
#   loss     validation 3.28 (modded-nanogpt, track 3, result 36: 3.2787, mean of 10 runs); on the way there:
#            docs/reading_logs.md, "modern on FineWeb"

out_dir = 'out-fineweb-124m'
dataset = 'fineweb'
wandb_project = 'fineweb'
wandb_run_name = '124M'

n_layer = 12
n_head = 12  # config/arch_modern.py: 6
n_embd = 768
batch_size = 32
block_size = 1024
total_batch_size = 524288  # tokens; gradient_accumulation_steps follows from it

max_iters = 3250
warmup_iters = 250  # without config/arch_modern.py after it, this is a GPT-2

eval_interval = 250
eval_iters = 10485760 // (batch_size * block_size)  # 10.5 million tokens, as the source
log_interval = 10
