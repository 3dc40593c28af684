# The quick start: a model that writes something like Python after two to three minutes on two CPU cores.
#
#   data     python prepare.py                   (pystdlib: the source of this Python's standard library, as bytes)
#   launch   python train.py config/quickstart.py
#   batch    8 sequences x 128 bytes = 1,024 tokens per iteration; 4,000 iterations = 4.1 million tokens, 0.37 epochs
#   cost     two to three minutes on two CPU cores
#   loss     1.34 nats per byte (1.94 bits) for validation, measured: dev/records/quickstart.md

out_dir = 'out-quickstart'
dataset = 'pystdlib'

batch_size = 8
block_size = 128
gradient_accumulation_steps = 1

n_layer = 2
n_head = 4
n_embd = 128

learning_rate = 6e-3  # ten times GPT-2's: so small a model takes it, and there are few steps to make
lr_schedule = 'linear'
min_lr = 0.0
warmup_iters = 100
max_iters = 4000
beta2 = 0.99  # few tokens in an iteration: average over more of them

eval_interval = 200
eval_iters = 50
log_interval = 50
