"""A shorter context for a network that is there."""

import torch.nn as nn


def crop_block_size(model, block_size):
    assert block_size <= model.config.block_size
    model.config.block_size = block_size
    if model.config.positions == 'rope':
        model.rope = model.rope[:, :block_size].clone()
    if model.config.positions == 'learned':
        model.transformer.wpe.weight = nn.Parameter(model.transformer.wpe.weight[:block_size].clone())
        model.transformer.wpe.num_embeddings = block_size
