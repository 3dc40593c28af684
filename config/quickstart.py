# The quick start: a model that writes something like Python after two to six minutes on two CPU cores.
#
#   data     python prepare.py                   (pystdlib: the source of Python's standard library, as bytes)
#   launch   python train.py config/quickstart.py
#   batch    16 sequences x 128 bytes = 2,048 tokens per iteration;
#            3,600 iterations = 7.4 million tokens, about 0.7 epochs
#   cost     2m18s to 3m12s on two CPU cores with bfloat16, 5m41s without
#   loss     1.0033 nats per byte for validation, 0.9945 (1.43 bits) over all of it; without bfloat16 1.0088
#            and 0.9994: dev/records/quickstart.md

out_dir = 'out-quickstart'
dataset = 'pystdlib'

# the network that learns soonest from so little text, and its recipe with learning rates for a small batch
arch = 'local'
n_layer = 1
n_head = 2
n_embd = 128
batch_size = 16
block_size = 128
gradient_accumulation_steps = 1

matrix_optimizer = 'muon'
momentum = 0.85
matrix_lr = 0.03
embedding_lr = 0.1
learning_rate = 0.01
weight_decay = 0.0
beta1, beta2 = 0.8, 0.95
adam_eps = 1e-10  # the head starts at zero, and so do most gradients
grad_clip = 0.0

max_iters = 3600
lr_schedule = 'wsd'
decay_fraction = 0.7
warmup_iters = 0

eval_interval = 200
eval_iters = 50
log_interval = 50
sample_interval = 1200  # and at the end: samples.md, and those of three in report.md
