# What stands just before a token, without attention: embeddings of pairs of tokens, a short convolution
# before each MLP (model.py), and before the n_layer layers one that has no attention. Put it behind
# the recipe:
#   python train.py config/train_gpt2.py config/arch_modern.py config/arch_local.py
#
# On two CPU cores, with bytes, it learns sooner than config/arch_modern.py alone (dev/records/recipe.md). Not
# measured at 124M: there the sources report 9% fewer steps for hashed pairs of tokens (modded-nanogpt, record
# 62) and gains for the convolutions at 1.3B (https://arxiv.org/abs/2512.17351). Hugging Face has no such
# architecture: export.py says so.

arch = 'local'
