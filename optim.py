"""Which parameter is trained by what."""

import torch


def create_optimizer(model, learning_rate, weight_decay, betas, eps):
    """AdamW with weight decay on what has two dimensions or more (matrices, embeddings), none on biases and norms."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{'params': [p for p in params if p.dim() >= 2], 'weight_decay': weight_decay},
              {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}]
    # fused: one kernel for all tensors; on a CPU it also saves the memory traffic of a dozen small steps
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=params[0].device.type in ('cuda', 'cpu'))


def load_optimizer_state(optimizer, state):
    """Take over the moments of a checkpoint but keep the options of this run: load_state_dict would silently bring back
    the old weight_decay, betas and fused. (The learning rate is set at every step anyway.)"""
    options = [{k: v for k, v in group.items() if k != 'params'} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, options):
        group.update(own)
