"""An optimizer's state from a checkpoint."""

import torch

OURS = ('AdamW', 'MuonAdamW')


def load_optimizer_state(optimizer, ckpt, tell=print):
    """Take over the state of a checkpoint. AdamW's and Muon's: the moments, but the options of this run
    (load_state_dict would silently bring back the old weight_decay, betas and fused). Any other optimizer:
    its own load_state_dict, all of it. The learning rate is set at every step anyway. Raises AssertionError
    and others if it does not fit."""
    state, now = ckpt['optimizer'], type(optimizer).__name__
    before = ckpt.get('optimizer_class', now if now in OURS else 'AdamW')
    count = lambda groups: sum(len(group['params']) for group in groups)
    n = count(optimizer.param_groups)
    assert count(state['param_groups']) == n, f"it has {count(state['param_groups'])} parameters, not {n}"
    if before != now and not (before in OURS and now in OURS):
        tell(f"note: the optimizer was {before} and is {now}: it starts without a state")
        return
    if now in OURS:
        state = state_with_our_options(optimizer, state)
    params = [p for group in optimizer.param_groups for p in group['params']]
    state = {**state, 'state': {i: sharded_like(params[i], moments) for i, moments in state['state'].items()}}
    optimizer.load_state_dict(state)
    # on a CPU these still are the mapped file, which is about to be replaced
    for moments in optimizer.state.values():
        for name, value in moments.items():
            if torch.is_tensor(value) and value.device.type == 'cpu':
                moments[name] = value.clone()


def state_with_our_options(optimizer, state):
    """The moments in `state` under the groups of this run."""
    # before loading, not after: by `fused` torch decides on which device a step counter has to be. The
    # parameters are counted through all groups, and their order is always the same, however they are divided
    # into groups
    groups = optimizer.state_dict()['param_groups']
    muon = {i for group in groups if group.get('muon') for i in group['params']}
    params = [p for group in optimizer.param_groups for p in group['params']]
    adam = ['exp_avg', 'exp_avg_sq']
    if any(group.get('amsgrad') for group in groups):
        adam.append('max_exp_avg_sq')
    kept = {}
    for i, moments in state['state'].items():
        if ('momentum_buffer' in moments) != (i in muon):
            continue  # a matrix that has changed its optimizer starts anew
        names = ['momentum_buffer'] if i in muon else adam
        shapes = {name: params[i].shape for name in names} | ({} if i in muon else {'step': ()})
        found = {name: torch.as_tensor(value).shape for name, value in moments.items()}
        # the fused update trusts the shapes: with others it would write beyond the end of a tensor
        assert found == shapes, f'the state of parameter {i} has another shape'
        finite = all(torch.isfinite(torch.as_tensor(value)).all() for value in moments.values())
        assert finite, f'the state of parameter {i} is not finite'
        kept[i] = moments
    return {'state': kept, 'param_groups': groups}


def sharded_like(p, moments):
    """Moments of a parameter as this process's shards of them, if the parameter is sharded; nothing is
    sent."""
    if not hasattr(p, 'to_local'):
        return moments
    from torch.distributed.tensor import distribute_tensor

    def shard(value):
        if not torch.is_tensor(value) or value.shape != p.shape:
            return value
        return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)

    return {name: shard(value) for name, value in moments.items()}
