# An architecture of 2025 in place of GPT-2's, with its optimizer. Put it after the config of any run:
#   python train.py config/train_gpt2.py config/arch_modern.py
#
# The architecture is nanochat's, NanoChatForCausalLM in transformers: RMSNorm without gains, rotary
# positions, normalized queries and keys, squared ReLU, an untied head, bounded logits.
#
# The optimizer: Muon for the matrices inside the blocks, high learning rates for embedding and head, no
# warm-up, and a learning rate that falls to zero over most of the run. The rates are those of
# modded-nanogpt's track 3, result 36, tuned for 124M parameters and 3,250 iterations of 524,288 tokens: a
# loss of 3.28 on FineWeb after 1.7 instead of 10 billion tokens (its README and logs). Different here:
# attention is scaled by 1/sqrt(head size), not 0.12; the loss is a mean, not a sum; Muon does 5 iterations,
# not 12; norms have no gains.
#
# For other sizes, the rates follow from n_embd, the tokens per iteration and the number of iterations. Set
# these before this file, or by flags. The rules are nanochat's (scripts/base_train.py, and setup_optimizer in
# nanochat/gpt.py), except for batches below the tuned one:
#
#   width    AdamW's rates are proportional to n_embd^-0.5
#   larger   all rates are proportional to the square root of the batch
#   smaller  only the embedding's rate and the weight decay of the matrices fall with the batch; if all rates
#            do, small batches learn much less (dev/LOG.md). Muon's momentum averages over fewer iterations:
#            0.95 at 524,288 tokens, 0.85 at 2,048
#   decay    learning rate x decay x iterations, the share of a matrix that decays during the run, is the same
#            for longer and larger runs: with tokens in proportion to parameters, decay falls about as
#            1 / n_embd^2. It does not grow for shorter runs
#
# Expected loss: docs/reading_logs.md, "modern on FineWeb" and "modern with Muon on the same batches"

arch = 'modern'
bias = False
mlp_width = None  # 4 n_embd
if n_embd % 128 == 0:
    n_head = n_embd // 128  # heads of 128 channels

# the size of this run relative to the tuned one
_tokens_per_iter = max(1, total_batch_size or batch_size * block_size * gradient_accumulation_steps)
_n_iters = max_iters
if max_tokens:
    _n_iters = min(max_iters, max_tokens / _tokens_per_iter)
_batch = _tokens_per_iter / 524288
_growth = max(1, _batch) ** 0.5
_adamw = (n_embd / 768) ** -0.5

matrix_optimizer = 'muon'
matrix_lr = 0.025 * _growth
momentum = 1 - 0.05 * _batch**-0.2
embedding_lr = 0.7 * _adamw * _batch**0.5
head_lr = 0.004 * _adamw * _growth
learning_rate = head_lr  # of vectors, of which modern has none
weight_decay = 1e-3
matrix_weight_decay = 0.05 * min(_batch, 1 / _batch) ** 0.5 * min(1, 3250 / max(1, _n_iters))
beta1 = 0.8
beta2 = 0.95
adam_eps = 1e-10  # the head starts at zero, so most gradients do, too
grad_clip = 0.0

lr_schedule = 'wsd'
decay_fraction = 0.7
warmup_iters = 0
min_lr = 0.0
lr_decay_iters = None  # the end of the run, even if its config sets another one
