"""
Which parameter is trained by what: AdamW for everything, as in nanoGPT; or Muon for the matrices inside the
blocks (support/muon.py) and AdamW for the rest: embeddings, head, norms, biases. train.py takes any other
torch optimizer as well.
"""

import torch

from support.devices import has_bfloat16

MUON_LR = 0.02  # Keller Jordan's; in a unit of its own, not AdamW's


def role_of(name, p):
    """What kind of parameter it is, by its name in a GPT."""
    if p.dim() < 2:
        return 'vector'
    if name.startswith('transformer.h.'):
        return 'matrix'
    return 'head' if name == 'lm_head.weight' else 'embedding'


def create_optimizer(model, learning_rate, weight_decay, betas, eps, matrix_optimizer='adamw', matrix_lr=None,
                     embedding_lr=None, head_lr=None, matrix_weight_decay=None, momentum=0.95,
                     dtype='bfloat16'):
    """One optimizer for all parameters of a GPT. Learning rates that are None are learning_rate (MUON_LR for
    Muon); weight decay is for what has two dimensions or more. group['lr_scale'] is a group's share of
    learning_rate. dtype: that of matrix products; with 'float32' Muon's are float32 as well."""
    muon = matrix_optimizer == 'muon'
    if muon and matrix_lr is None:
        matrix_lr = MUON_LR
    lrs = {'embedding': embedding_lr, 'matrix': matrix_lr, 'head': head_lr, 'vector': None}
    decays = {'embedding': weight_decay, 'matrix': matrix_weight_decay, 'head': weight_decay, 'vector': 0.0}
    if matrix_weight_decay is None:
        decays['matrix'] = weight_decay
    params = {role: [] for role in lrs}
    for name, p in model.named_parameters():
        params[role_of(name, p)].append(p)
    groups = []
    for role in lrs:
        lr = learning_rate if lrs[role] is None else lrs[role]
        options = {'lr': lr, 'lr_scale': lr / learning_rate if learning_rate else 0.0,
                   'weight_decay': decays[role], 'muon': muon and role == 'matrix'}
        # the same options as the group before: one group. So a GPT-2 has nanoGPT's two, in its order
        if groups and role != 'vector' and options.items() <= groups[-1].items():
            groups[-1]['params'] += params[role]
        elif params[role]:
            groups.append({'params': params[role], **options, 'momentum': momentum})
    # fused: one kernel for all tensors; on a CPU, too, it saves the memory traffic of a dozen small steps
    device = model.lm_head.weight.device
    kind = torch.optim.AdamW
    if muon:
        from support.muon import MuonAdamW as kind
    optimizer = kind(groups, lr=learning_rate, betas=betas, eps=eps, fused=device.type in ('cuda', 'cpu'))
    if muon and dtype != 'float32' and has_bfloat16(device):
        optimizer.dtype = torch.bfloat16
    return optimizer


def to_local(tensor):
    """This process's part of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor
