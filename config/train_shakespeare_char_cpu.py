# A character-level GPT on Shakespeare for two CPU cores: modern with Muon, in the size of the CPU example of
# nanoGPT's README.
#
#   data     python prepare.py shakespeare_char   (1.1 MB, a download; or --input=FILE)
#   launch   python train.py config/train_shakespeare_char_cpu.py
#            to get below nanoGPT's 1.88 as soon as possible: --n_layer=2 --max_iters=200
#            for a better model: --max_iters=1400
#   batch    24 sequences x 64 characters = 1,536 characters per iteration; 1,000 iterations = 1.5 epochs
#   cost     about 75 ms per iteration on two CPU cores with bfloat16
#   loss     validation 1.5609, the mean of three seeds (standard deviation 0.0050); with --max_iters=1400
#            1.533; with --n_layer=2 --max_iters=200 1.8483 after 11 s, where the whole of nanoGPT's run takes
#            96 s (dev/results.md). By iteration: docs/reading_logs.md, "Shakespeare on a CPU"

out_dir = 'out-shakespeare-char-cpu'
dataset = 'shakespeare_char'

arch = 'modern'
n_layer = 4
n_head = 4
n_embd = 128
batch_size = 24
block_size = 64
gradient_accumulation_steps = 1

# as in config/quickstart.py
matrix_optimizer = 'muon'
matrix_lr = 0.03
momentum = 0.85
embedding_lr = 0.1
learning_rate = 0.01
weight_decay = 0.0
beta1 = 0.8
beta2 = 0.95
adam_eps = 1e-10
grad_clip = 0.0

max_iters = 1000
lr_schedule = 'wsd'
decay_fraction = 0.7
warmup_iters = 0

eval_interval = 200
eval_iters = 50
log_interval = 20
