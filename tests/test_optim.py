"""Each parameter is updated as its optimizer is known for, AdamW's or torch's own Muon. The division among
processes and a checkpoint change nothing."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import assert_equal

from checkpoint import load_moments
from configurator import InputError
from model import GPT, GPTConfig
from optim import create_optimizer

OPTIONS = dict(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)


def small(arch, **args):
    torch.manual_seed(0)
    sizes = dict(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_kv_head=1, n_embd=32)
    net = GPT(GPTConfig(arch=arch, **{**sizes, **args}))
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return net


def step(net, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * torch.rand((), generator=generator)
    optimizer.step()


def test_muon_is_torchs_muon_on_the_matrices_of_the_blocks_and_adamw_on_the_rest():
    net = small('llama')
    other = copy.deepcopy(net)
    before = copy.deepcopy(net)
    optimizer = create_optimizer(net, matrix_optimizer='muon', matrix_lr=0.03, embedding_lr=0.05,
                                 head_lr=0.004, matrix_weight_decay=0.2, **OPTIONS)
    matrices = [p for p in other.transformer.h.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(matrices, lr=0.03, weight_decay=0.2, momentum=0.95)
    groups = [{'params': [other.transformer.wte.weight], 'lr': 0.05},
              {'params': [other.lm_head.weight], 'lr': 0.004},
              {'params': [p for p in other.parameters() if p.dim() == 1], 'weight_decay': 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    for seed in range(3):
        for group in optimizer.param_groups:
            group['lr'] = OPTIONS['learning_rate'] * group['lr_scale']  # as train.py does
        step(net, optimizer, seed)
        step(other, muon, seed)
        adamw.step()
    for (name, p), q, start in zip(net.named_parameters(), other.parameters(), before.parameters()):
        moved = (q - start).abs().max().item()
        tolerance = 0.03 if name.startswith('transformer.h.') else 1e-4  # torch's works in bfloat16
        assert moved > 0.003, name
        assert (p - q).abs().max().item() < tolerance * moved, name


def test_a_gradscaler_skips_what_is_not_finite_and_nothing_else():
    net = small('llama')
    other = copy.deepcopy(net)
    scaled = create_optimizer(net, matrix_optimizer='muon', **OPTIONS)
    plain = create_optimizer(other, matrix_optimizer='muon', **OPTIONS)
    scaler = torch.amp.GradScaler('cpu', init_scale=4.0)
    for seed, bad in enumerate([False, True, False]):
        if not bad:
            step(other, plain, seed)
        scale = scaler.scale(torch.tensor(1.0))
        for p, q in zip(net.parameters(), other.parameters()):
            p.grad = q.grad * scale
        if bad:
            net.lm_head.weight.grad[0, 0] = torch.inf
        scaler.step(scaled)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert_equal(net.state_dict(), other.state_dict())


# -----------------------------------------------------------------------------
# the state in a checkpoint


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_moments_continue_a_run_to_the_bit_with_the_options_of_now(optimizer):
    net = small('modern')
    one = create_optimizer(net, matrix_optimizer=optimizer, **OPTIONS)
    step(net, one, 0)
    state = one.state_dict()
    before = copy.deepcopy(state['state'])
    other = copy.deepcopy(net)
    two = create_optimizer(other, matrix_optimizer=optimizer, **{**OPTIONS, 'weight_decay': 0.3})
    assert load_moments(two, state) == 0
    for ours, theirs in zip(one.param_groups, two.param_groups):
        ours['weight_decay'] = theirs['weight_decay']
    step(other, two, 1)
    assert_equal(state['state'], before)  # copies, as what was read may be a mapped file
    step(net, one, 1)
    assert_equal(net.state_dict(), other.state_dict())


def test_nanogpts_optimizer_has_the_same_two_groups():
    net = small('gpt2', n_kv_head=2)
    theirs = net.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    step(net, theirs, 0)
    ours = create_optimizer(net, **OPTIONS)
    assert load_moments(ours, theirs.state_dict()) == 0
    for p in net.parameters():
        assert_equal(ours.state[p], theirs.state[p])
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize('now', ['adamw', 'muon'])
def test_moments_are_found_by_name_and_the_parameters_without_are_counted(now):
    net = small('llama')
    first, second = net.transformer.h
    first.requires_grad_(False)
    before = create_optimizer(net, **OPTIONS)
    step(net, before, 0)
    first.requires_grad_(True)
    second.requires_grad_(False)
    optimizer = create_optimizer(net, matrix_optimizer=now, **OPTIONS)
    assert load_moments(optimizer, before.state_dict()) == len(list(first.parameters()))
    assert not any(optimizer.state[p] for p in first.parameters())
    assert_equal(optimizer.state[net.lm_head.weight], before.state[net.lm_head.weight])

    second.requires_grad_(True)  # Muon starts without AdamW's moments
    optimizer = create_optimizer(net, matrix_optimizer=now, **OPTIONS)
    load_moments(optimizer, before.state_dict())
    assert bool(optimizer.state[second.mlp.c_fc.weight]) == (now == 'adamw')
    step(net, optimizer, 1)


def test_moments_of_another_shape_are_refused():
    net = small('llama')
    optimizer = create_optimizer(net, **OPTIONS)
    step(net, optimizer, 0)
    other = create_optimizer(small('llama', vocab_size=51), **OPTIONS)
    with pytest.raises(InputError):
        load_moments(other, optimizer.state_dict())


# -----------------------------------------------------------------------------
# several processes


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor


def train_in_a_process(rank, folder, sharded):
    """Three steps, then three with the moments of the first ones, and a text."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    dist.init_process_group('gloo', init_method=f'file://{folder}/store-{sharded}', rank=rank, world_size=2)
    # of 3 layers and of 37 rows, the two processes have different numbers
    net = small('llama', n_layer=3, mlp_width=37)
    if sharded:
        for block in net.transformer.h:
            fully_shard(block)
        fully_shard(net, reshard_after_forward=False)
        register_fsdp_forward_method(net, 'generate')
    net.activation_checkpointing = sharded
    optimizer = create_optimizer(net, matrix_optimizer='muon', **OPTIONS)
    for it in range(6):
        if it == 3:
            state = optimizer.state_dict()
            for moments in state['state'].values():
                for name in moments:
                    moments[name] = full(moments[name]).clone()
            optimizer = create_optimizer(net, matrix_optimizer='muon', **OPTIONS)
            load_moments(optimizer, state)
        train_step(net, optimizer, it, slice(2 * rank, 2 * rank + 2), average=not sharded)
    weights = {name: full(p).detach() for name, p in net.named_parameters()}
    text = net.eval().generate(torch.arange(5)[None], 30, top_k=1)
    if rank == 0:
        torch.save((weights, text), f'{folder}/{sharded}.pt')
    dist.barrier()
    dist.destroy_process_group()


def train_step(net, optimizer, it, rows, average=False):
    ids = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(it))[rows]
    net(ids[:, :-1], ids[:, 1:], return_logits=False)[1].backward()
    if average:  # as DDP does
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize('sharded', [False, True])
def test_two_processes_that_divide_muons_work_train_what_one_does(sharded, tmp_path):
    mp.spawn(train_in_a_process, (str(tmp_path), sharded), nprocs=2)
    weights, text = torch.load(tmp_path / f'{sharded}.pt', weights_only=True)
    net = small('llama', n_layer=3, mlp_width=37)
    optimizer = create_optimizer(net, matrix_optimizer='muon', **OPTIONS)
    for it in range(6):
        train_step(net, optimizer, it, slice(4))
    for name, p in net.named_parameters():
        torch.testing.assert_close(weights[name], p.detach(), atol=2e-6, rtol=0)
    assert torch.equal(text, net.eval().generate(torch.arange(5)[None], 30, top_k=1))
