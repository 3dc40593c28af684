# A character-level GPT on Shakespeare for two CPU cores: the fastest way we know, in seconds, to the loss of
# nanoGPT's README line for a CPU (1.88), and far below it. Parts were chosen by the clock: LayerNorm has a
# fast kernel on a CPU, and norms on queries and keys cost more time than they saved here (2026-11-22; not
# measured again). transformers has no such network; --arch=modern --n_layer=2 --norm=rmsnorm_plain
# --qk_norm=True can be exported, and learns more slowly.
#
#   data     python prepare.py shakespeare_char            (1.1 MB, a download; or --input=FILE)
#   launch   python train.py config/train_shakespeare_char_cpu.py
#            as quickly as possible to 1.88: add --n_embd=128 --max_iters=130 --matrix_lr=0.04
#   batch    24 sequences x 64 characters = 1,536 characters per iteration; 1,400 iterations = 2.1 epochs
#   cost     84 seconds on two CPU cores with bfloat16, three minutes without
#   loss     1.52 at the end over all of val.bin; in a hurry 1.88 after 4 seconds, with bfloat16:
#            dev/records/race_shakespeare.md

out_dir = 'out-shakespeare-char-cpu'
dataset = 'shakespeare_char'

arch = 'local'
norm = 'layernorm'
qk_norm = False
bias = False
n_layer, n_head, n_embd = 1, 2, 192
batch_size = 24
block_size = 64
gradient_accumulation_steps = 1

matrix_optimizer = 'muon'
momentum = 0.85
matrix_lr = 0.03
embedding_lr = 0.1
learning_rate = 0.01
weight_decay = 0.1  # of embeddings and head
matrix_weight_decay = 0.0
beta1, beta2 = 0.8, 0.95
adam_eps = 1e-10
grad_clip = 0.0

max_iters = 1400
lr_schedule = 'wsd'
decay_fraction = 0.7
warmup_iters = 0

eval_interval = 200
eval_iters = 50
log_interval = 20
