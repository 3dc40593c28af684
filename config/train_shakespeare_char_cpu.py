# A character-level GPT on Shakespeare for two CPU cores: modern with Muon, at the size that nanoGPT's README
# takes for a CPU, whose line ends at 1.90 after 2,000 iterations of 768 characters.
#
#   data     python prepare.py shakespeare_char   (1.1 MB, a download; or --input=FILE)
#   launch   python train.py config/train_shakespeare_char_cpu.py
#            as soon as possible below 1.88: --max_iters=180
#   batch    24 sequences x 64 characters = 1,536 characters per iteration; 1,400 iterations = 2.1 epochs
#   cost     about 75 ms an iteration on two CPU cores with bfloat16
#   loss     1.5545 over all of val.bin (at a170a90); with --max_iters=180 1.8202 after 14 s, where nanoGPT's
#            line has 1.908 after 81 s (dev/results.md)

out_dir = 'out-shakespeare-char-cpu'
dataset = 'shakespeare_char'

arch = 'modern'
n_layer = 4
n_head = 4
n_embd = 128
batch_size = 24
block_size = 64
gradient_accumulation_steps = 1

# the recipe of config/quickstart.py
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

max_iters = 1400
lr_schedule = 'wsd'
decay_fraction = 0.7
warmup_iters = 0

eval_interval = 200
eval_iters = 50
log_interval = 20
