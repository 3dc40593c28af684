# GPT-2 124M on ten billion tokens of FineWeb-Edu, as in Karpathy's build-nanogpt and the walkthroughs of it.
#
#   data     python prepare.py fineweb_edu           (30 GB become 10 billion tokens)
#            python prepare.py hellaswag             (the benchmark)
#   launch   torchrun --standalone --nproc_per_node=8 train.py config/train_edu_124m.py
#   batch    32 sequences x 1,024 tokens x 2 micro-batches x 8 GPUs = 524,288 tokens per iteration, on fewer
#            GPUs as well; with less memory: --batch_size=16 --total_batch_size=524288
#   budget   5 x 19,073 iterations = 50 billion tokens, five epochs; one epoch: --max_iters=19073
#   cost     5.0e10 tokens x 0.855 GFLOP = 4.3e19 FLOP: 12 hours on 8 A100, 24 on 4, at 40% of their peak;
#            27 on one H100 at the 510,000 tokens/s of dev/records/gpu.md. Arithmetic, without evaluating
#   loss     to beat: OpenAI's GPT-2 of this size has a loss of 3.29 there, 0.294 on HellaSwag; GPT-3 of this
#            size has 0.337 (build-nanogpt). Not measured by us

out_dir = 'out-edu-124m'
dataset = 'fineweb_edu'
wandb_project = 'fineweb-edu'
wandb_run_name = 'gpt2-124M'

batch_size = 32  # with 64 the logits go through in pieces on 80 GB: docs/gpus.md
block_size = 1024
gradient_accumulation_steps = 2 * 8

max_iters = 5 * 19073
warmup_iters = 715
learning_rate = 1e-3
min_lr = 1e-4

eval_interval = sample_interval = tasks_interval = 250
eval_iters = 40
tasks = 'hellaswag'
save_interval = 5000
log_interval = 10
