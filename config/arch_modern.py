# A network of 2025 in place of GPT-2's, with the recipe that trains it. Put it behind the config of any run:
#   python train.py config/train_gpt2.py config/arch_modern.py
#
# The network is nanochat's, NanoChatForCausalLM in transformers: RMSNorm without gains, rotary positions,
# normalized queries and keys, squared ReLU, an untied head, bounded logits.
#
# The recipe: Muon for the matrices inside the blocks, high learning rates for embedding and head, no warmup,
# and a learning rate that falls to zero over most of the run. The rates are those of modded-nanogpt's track
# 3, result 36, tuned there for 124M parameters and 524,288 tokens per iteration: a loss of 3.28 on FineWeb
# after 1.7 billion tokens instead of 10 (its README and logs; not measured by us). Different here: attention
# is scaled by 1/sqrt(head size), not 0.12; the loss is a mean, not a sum; Muon does 5 iterations, not 12;
# norms have no gains. Small batches want lower rates and less momentum: config/quickstart.py.
#
# On one H100, 65,536 tokens per iteration, 252 books of Gutenberg: validation loss 4.44 after 100 iterations,
# where gpt2 with AdamW has 4.45 after 500 (commit a170a90, dev/results.md)

arch = 'modern'
bias = False  # it has none
mlp_width = None  # 4 n_embd
if n_embd % 128 == 0:
    n_head = n_embd // 128  # heads of 128 channels; n_embd has to be set before this file

matrix_optimizer = 'muon'
matrix_lr = 0.025
momentum = 0.95
embedding_lr = 0.7
head_lr = 0.004
learning_rate = 0.004  # of vectors, of which modern has none: the rates above are what counts
weight_decay = 1e-3
matrix_weight_decay = 0.05
beta1 = 0.8
beta2 = 0.95
adam_eps = 1e-10  # the head starts at zero, and so do most gradients
grad_clip = 0.0

lr_schedule = 'wsd'
decay_fraction = 0.7
warmup_iters = 0
min_lr = 0.0
lr_decay_iters = None  # the end of the run, whatever its config says
