# nanoGPT's README reaches 1.4697 in three minutes on an A100, with 10.7 million parameters and 256 characters
# of context. This smaller network with the same context gets near it on a laptop, below it with a teacher:
# --teacher=out-shakespeare-char-laptop --seed=1 --max_iters=1300 --out_dir=out-taught
#
#   data     python prepare.py shakespeare_char            (1.1 MB, a download; or --input=FILE)
#   launch   python train.py config/train_shakespeare_char_laptop.py
#   batch    8 sequences x 256 characters = 2,048 characters per iteration; 1.8 epochs
#   cost     100 seconds on two CPU cores with bfloat16, 220 to 440 without
#   loss     over all of val.bin, in bfloat16: 1.4654, and 1.4764 by the worst of eight seeds; with a teacher
#            1.4230 on one thread, 1.4274 on two: dev/records/recipe_laptop.md

out_dir = 'out-shakespeare-char-laptop'
dataset = 'shakespeare_char'

arch = 'local'
norm = 'layernorm'  # has a fast kernel on a CPU
qk_norm = False  # such norms took more time than they gave here (2026-11-22; not measured again)
bias = False
n_layer, n_head, n_embd = 2, 2, 192
batch_size = 8
block_size = 256
gradient_accumulation_steps = 1

matrix_optimizer = 'muon'
momentum = 0.85
matrix_lr = 0.03
embedding_lr = 0.1
learning_rate = 0.01
weight_decay = 0.1  # of embeddings and head: the table of pairs can learn the text by heart
matrix_weight_decay = 0.0
beta1, beta2 = 0.8, 0.95
adam_eps = 1e-10
grad_clip = 0.0

max_iters = 870
lr_schedule = 'wsd'
decay_fraction = 0.9
warmup_iters = 0

eval_interval = 0  # at the end, over all of val.bin
eval_iters = 0
log_interval = 20
