# The quick start: a small model of Python code, trained in about five minutes on two CPU cores.
#
#   data     python prepare.py   (pystdlib: the source of Python's standard library, as bytes)
#   launch   python train.py config/quickstart.py
#   batch    8 sequences x 256 bytes = 2,048 bytes per iteration; 1,400 iterations = 2.9 million bytes, a
#            quarter of the text
#   cost     4m33s of training on two CPU cores with bfloat16 (dev/results.md); without bfloat16, 1.0 s per
#            iteration, 23 minutes in all
#   loss     validation 1.0544 nats per byte; 1.0476 over all of val.bin, 1.511 bits per byte. By iteration
#            and seed: docs/reading_logs.md, "quick start"

out_dir = 'out-quickstart'
dataset = 'pystdlib'

arch = 'modern'
n_layer = 3
n_head = 4
n_embd = 192
batch_size = 8
block_size = 256
gradient_accumulation_steps = 1

# as in config/arch_modern.py, with rates tuned by hand for this small batch
matrix_optimizer = 'muon'
matrix_lr = 0.03
momentum = 0.85  # 0.95 averages over 20 iterations, too many for a run of about a thousand
embedding_lr = 0.1
learning_rate = 0.01
weight_decay = 0.0
beta1 = 0.8
beta2 = 0.95
adam_eps = 1e-10  # the head starts at zero, so most gradients do, too
grad_clip = 0.0

max_iters = 450
lr_schedule = 'wsd'
decay_fraction = 0.7
warmup_iters = 0

eval_interval = 150
eval_iters = 50
log_interval = 10
sample_interval = 150
