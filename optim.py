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
    # before, not after: by the group's `fused` torch decides on which device a step counter has to be
    groups = [{**old, **{k: v for k, v in own.items() if k != 'params'}}
              for old, own in zip(state['param_groups'], optimizer.param_groups, strict=True)]
    optimizer.load_state_dict({**state, 'param_groups': groups})
    for moments in optimizer.state.values():  # on a CPU these still are the mapped file, which is about to be replaced
        moments.update({k: v.clone() for k, v in moments.items() if torch.is_tensor(v) and v.device.type == 'cpu'})
