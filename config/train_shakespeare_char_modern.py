# The modern recipe on a small scale: 10M parameters on Shakespeare by characters. It differs from
# config/train_shakespeare_char.py in network, optimizer and schedule. The learning rates are those of
# config/arch_modern.py, most of them lowered for a batch of 16,384; not tuned on a GPU yet.
#
#   data     python prepare.py shakespeare_char            (1.1 MB, a download; or --input=FILE)
#   launch   python train.py config/train_shakespeare_char_modern.py
#   batch    64 sequences x 256 characters = 16,384 characters per iteration; 1,500 iterations = 25 epochs
#   cost     24 seconds on one H100, 30 more to compile (dev/records/gpu.md)
#   loss     1.4638 for validation at its best there, at iteration 750; then it overfits. nanoGPT's own
#            configuration reaches 1.4697 at its best (its README)

out_dir = 'out-shakespeare-char-modern'
dataset = 'shakespeare_char'

arch = 'modern'
bias = False
n_layer, n_head, n_embd = 6, 6, 384
batch_size = 64
block_size = 256
gradient_accumulation_steps = 1
dropout = 0.2

matrix_optimizer = 'muon'
matrix_lr = 0.01
matrix_weight_decay = 0.05
embedding_lr = 0.1
learning_rate = 0.004
weight_decay = 0.0
beta1, beta2 = 0.8, 0.95
adam_eps = 1e-10
grad_clip = 0.0

max_iters = 1500
lr_schedule = 'wsd'
decay_fraction = 0.6
warmup_iters = 0

eval_interval = 250  # often, because it overfits
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # only when the validation loss improves
