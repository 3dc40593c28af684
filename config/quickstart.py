# The quick start: a small model of Python code, trained within four minutes on two CPU cores.
#
#   data     python prepare.py   (pystdlib: the source of Python's standard library, a BPE of 2,048 tokens)
#   launch   python train.py config/quickstart.py
#            for a better model: --max_iters=1400
#   batch    8 sequences x 256 tokens = 2,048 tokens per iteration; 450 iterations = 0.9 million tokens, a
#            quarter of the text
#   cost     74 s of training on two CPU cores with bfloat16, 119 s in float32 on AVX2; with evaluations and
#            samples 101 and 157 s (dev/results.md)
#   loss     validation 3.1236 nats per token, the mean of three seeds (standard deviation 0.0030);
#            1.5132 bits per byte. By iteration: docs/reading_logs.md, "quick start"

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
