"""A larger vocabulary for a model that is trained already."""

import torch


@torch.no_grad()
def grow_vocabulary(model, vocab_size, seed=0):
    """Give embedding and head rows for the ids up to vocab_size. A new row is the mean of the old ones and a
    little noise, so that new tokens begin as likely as the average one, and apart from each other."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.transformer.wte.weight is model.lm_head.weight
    for module in [model.lm_head] if tied else [model.lm_head, model.transformer.wte]:
        old = module.weight
        new = old.mean(0, keepdim=True).repeat(vocab_size - old.size(0), 1)
        noise = torch.randn(new.shape, generator=generator) * old.std() * 0.1
        module.weight = torch.nn.Parameter(torch.cat((old, new + noise.to(new.dtype))))
    if tied:
        model.transformer.wte.weight = model.lm_head.weight
    model.transformer.wte.num_embeddings = model.lm_head.out_features = vocab_size
    model.config.vocab_size = vocab_size
