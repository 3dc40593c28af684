"""The update of each parameter is the one that its optimizer is known for: AdamW's and Muon's of torch. The
division among processes and a checkpoint change nothing in it."""

import copy
import functools
import math

import pytest
import record_nanogpt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import assert_equal
from test_model import RECORD

from model import GPT, GPTConfig
from optim import MuonAdamW, create_optimizer, load_moments, zeropower_via_newtonschulz

OPTIONS = dict(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)


def small(arch, **args):
    torch.manual_seed(0)
    sizes = dict(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_kv_head=1, n_embd=32)
    net = GPT(GPTConfig(arch=arch, **{**sizes, **args}))
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return net


def fill_gradients(net, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * torch.rand((), generator=generator)


def step(net, optimizer, seed):
    fill_gradients(net, seed)
    optimizer.step()


def is_matrix_of_a_block(name, p):
    return p.dim() == 2 and name.startswith('transformer.h.')


def test_a_gpt2_has_nanogpts_two_groups_and_adamw_itself():
    optimizer = create_optimizer(small('gpt2', n_kv_head=2), **OPTIONS)
    decayed, others = optimizer.param_groups
    assert [p.dim() >= 2 for p in decayed['params']] == [True] * (2 + 8)
    assert decayed['weight_decay'] == 0.1
    assert all(p.dim() < 2 for p in others['params'])
    assert others['weight_decay'] == 0.0
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_each_parameter_that_learns_is_in_one_group(optimizer):
    net = small('llama')
    net.lm_head.weight.requires_grad = False
    optimizer = create_optimizer(net, matrix_optimizer=optimizer, embedding_lr=0.3, **OPTIONS)
    found = [p for group in optimizer.param_groups for p in group['params']]
    assert len(found) == len(set(found))
    assert set(found) == set(net.parameters()) - {net.lm_head.weight}


def test_training_gives_the_losses_that_nanogpt_gave():
    # recorded by record_nanogpt.py: nanoGPT's network, groups and AdamW, from the same weights and batches
    net = GPT(GPTConfig(**record_nanogpt.SHAPES['bias']))
    got = record_nanogpt.train(net, create_optimizer(net, **record_nanogpt.ADAMW, eps=1e-8))
    want = RECORD['curve']
    assert want[0] > 4 and want[-1] < 0.7 * want[0] and len(want) == 40
    assert got == pytest.approx(want, rel=2e-4)


@pytest.mark.parametrize('arch', ['llama', 'modern'])
def test_muon_is_torchs_muon_on_the_matrices_of_the_blocks_and_adamw_on_the_rest(arch):
    net = small(arch)
    other = copy.deepcopy(net)
    optimizer = create_optimizer(net, matrix_optimizer='muon', matrix_lr=0.03, embedding_lr=0.05,
                                 head_lr=0.004, matrix_weight_decay=0.2, **OPTIONS)
    matrices = [p for name, p in other.named_parameters() if is_matrix_of_a_block(name, p)]
    assert len(matrices) == 2 * (7 if arch == 'llama' else 6)
    muon = torch.optim.Muon(matrices, lr=0.03, weight_decay=0.2, momentum=0.95)
    groups = [{'params': [other.transformer.wte.weight], 'lr': 0.05},
              {'params': [other.lm_head.weight], 'lr': 0.004}]
    gains = [p for p in other.parameters() if p.dim() == 1]
    if gains:
        groups.append({'params': gains, 'weight_decay': 0.0})
    adamw = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    before = copy.deepcopy(net)
    for seed in range(3):
        step(net, optimizer, seed)
        step(other, muon, seed)
        adamw.step()
    for (name, p), q, start in zip(net.named_parameters(), other.parameters(), before.parameters()):
        moved = (q - start).abs().max().item()
        tolerance = 0.03 if name.startswith('transformer.h.') else 1e-4  # torch's works in bfloat16
        assert moved > 0.003, name
        assert (p - q).abs().max().item() < tolerance * moved, name


@pytest.mark.parametrize('dtype, error', [('float32', 3e-6), ('bfloat16', 3e-2)])
def test_muons_update_is_its_formula_in_the_dtype_of_the_run(dtype, error):
    net = small('llama')
    optimizer = create_optimizer(net, matrix_optimizer='muon', matrix_lr=0.5, momentum=0.9, dtype=dtype,
                                 matrix_weight_decay=0.2, **{**OPTIONS, 'weight_decay': 0.0})
    for p in [net.transformer.h[0].attn.c_k.weight, net.transformer.h[1].mlp.c_fc.weight]:
        assert p.size(0) != p.size(1)
    want = {name: p.detach().double() for name, p in net.named_parameters()}
    buffers = {}
    for seed in range(2):
        step(net, optimizer, seed)
        for name, p in net.named_parameters():
            if is_matrix_of_a_block(name, p):
                grad = p.grad.double()
                buffers[name] = 0.9 * buffers.get(name, 0.0) + 0.1 * grad
                ahead = 0.9 * buffers[name] + 0.1 * grad
                update = zeropower_via_newtonschulz(ahead[None])[0]
                scale = math.sqrt(max(1, p.size(0) / p.size(1)))
                want[name] = want[name] * (1 - 0.5 * 0.2) - 0.5 * scale * update
    worst = max((net.get_parameter(name) - want[name]).abs().max().item() for name in buffers)
    assert error / 1000 < worst < error


@pytest.mark.parametrize('shape', [(2, 16, 16), (3, 8, 40), (1, 40, 8)])
def test_newton_schulz_keeps_the_directions_and_evens_out_the_singular_values(shape):
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    X = zeropower_via_newtonschulz(G)
    assert X.shape == shape
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    kept = U.mT @ X @ Vh.mT  # in the basis of G's singular vectors: diagonal again
    values = kept.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(kept, torch.diag_embed(values), atol=1e-4, rtol=0)
    assert ((values > 0.6) & (values < 1.25))[S > 0.01 * S.amax()].all()


def test_one_factor_moves_every_rate():
    net = small('modern')
    optimizer = create_optimizer(net, matrix_optimizer='muon', embedding_lr=0.3, head_lr=0.002, **OPTIONS)
    assert [group['lr_scale'] for group in optimizer.param_groups] == pytest.approx([30, 2, 0.2])
    before = copy.deepcopy(net.state_dict())
    for group in optimizer.param_groups:  # as train.py sets them, AdamW's and Muon's
        group['lr'] = 0.0 * group['lr_scale']
    step(net, optimizer, 0)
    assert all(torch.equal(p, before[name]) for name, p in net.state_dict().items())


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_a_gradscaler_skips_what_is_not_finite_and_nothing_else(optimizer):
    net = small('llama')
    other = copy.deepcopy(net)
    scaled = create_optimizer(net, matrix_optimizer=optimizer, **OPTIONS)
    plain = create_optimizer(other, matrix_optimizer=optimizer, **OPTIONS)
    scaler = torch.amp.GradScaler('cpu', init_scale=4.0, growth_interval=2)
    scales = []
    for seed, bad in enumerate([False, True, True, False, False]):
        scaler.scale(torch.zeros(()))
        fill_gradients(net, seed)
        for p in net.parameters():
            p.grad *= scaler.get_scale()
        if bad:
            net.lm_head.weight.grad[0, 0] = torch.inf
        before = copy.deepcopy((net.state_dict(), scaled.state_dict()['state']))
        scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
        scales.append(scaler.get_scale())
        if bad:
            assert_equal((net.state_dict(), scaled.state_dict()['state']), before)
        else:
            step(other, plain, seed)
    assert scales == [4.0, 2.0, 1.0, 1.0, 2.0]
    for p, q in zip(net.parameters(), other.parameters()):
        assert torch.equal(p, q)


# -----------------------------------------------------------------------------
# a checkpoint


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_moments_survive_other_groups_and_options_stay_the_new_ones(optimizer):
    net = small('llama')
    make = functools.partial(create_optimizer, net, matrix_optimizer=optimizer)
    one = make(**OPTIONS)
    step(net, one, 0)
    state = copy.deepcopy(one.state_dict())
    two = make(learning_rate=1e-2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-9, embedding_lr=0.1,
               head_lr=0.2)
    load_moments(two, state)
    for p in net.parameters():
        assert two.state[p].keys() == one.state[p].keys()
        for name, value in one.state[p].items():
            assert torch.equal(two.state[p][name], value)
    rates = [group['lr'] for group in two.param_groups]
    assert rates == [0.1, 0.02 if optimizer == 'muon' else 1e-2, 0.2, 1e-2]
    assert two.param_groups[0]['weight_decay'] == 0.3
    assert two.param_groups[0]['betas'] == (0.8, 0.9)
    # copies: what was read may be a mapped file
    step(net, two, 1)
    for i, moments in state['state'].items():
        for name, value in moments.items():
            assert torch.equal(value, one.state_dict()['state'][i][name])


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.parametrize('loaded_by', [load_moments, torch.optim.Optimizer.load_state_dict])
def test_a_state_continues_the_run_to_the_bit(optimizer, loaded_by):
    net = small('modern')
    make = functools.partial(create_optimizer, matrix_optimizer=optimizer, **OPTIONS)
    one = make(net)
    for seed in range(2):
        step(net, one, seed)
    other = copy.deepcopy(net)
    two = make(other)
    loaded_by(two, copy.deepcopy(one.state_dict()))
    for seed in range(2, 4):
        for group in [*one.param_groups, *two.param_groups]:
            group['lr'] = 0.004 * group['lr_scale']
        step(net, one, seed)
        step(other, two, seed)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters()))


def test_moments_are_dropped_where_the_optimizer_changes():
    net = small('llama')
    adamw = create_optimizer(net, **OPTIONS)
    step(net, adamw, 0)
    muon = create_optimizer(net, matrix_optimizer='muon', **OPTIONS)
    load_moments(muon, adamw.state_dict())
    for name, p in net.named_parameters():
        if is_matrix_of_a_block(name, p):
            assert not muon.state[p]
        else:
            assert torch.equal(muon.state[p]['exp_avg'], adamw.state[p]['exp_avg'])
    step(net, muon, 1)
    step(net, adamw, 1)
    load_moments(adamw, muon.state_dict())


def test_a_state_that_does_not_fit_is_refused():
    net = small('llama')
    optimizer = create_optimizer(net, **OPTIONS)
    step(net, optimizer, 0)
    for other in [small('llama', n_layer=1), small('llama', vocab_size=51)]:
        with pytest.raises(ValueError):
            load_moments(create_optimizer(other, **OPTIONS), optimizer.state_dict())


# -----------------------------------------------------------------------------
# many processes


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor


def train_in_a_process(rank, folder, sharded):
    """Three steps, then three with the moments of the first ones, and a text."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    dist.init_process_group('gloo', init_method=f'file://{folder}/store-{sharded}', rank=rank, world_size=2)
    # three layers: two processes have not the same number of matrices. 36 channels: nor of rows
    net = small('llama', n_layer=3, n_embd=36)
    if sharded:
        for block in net.transformer.h:
            fully_shard(block)
        fully_shard(net, reshard_after_forward=False)
        register_fsdp_forward_method(net, 'generate')
    net.set_activation_checkpointing(sharded)
    make = functools.partial(create_optimizer, net, matrix_optimizer='muon', replicas=1 if sharded else 2,
                             **OPTIONS)
    optimizer = make()
    for it in range(6):
        if it == 3:
            state = optimizer.state_dict()
            for moments in state['state'].values():
                for name in moments:
                    moments[name] = whole(moments[name]).clone()
            optimizer = make()
            load_moments(optimizer, state)
        train_step(net, optimizer, it, slice(2 * rank, 2 * rank + 2))
    weights = {name: whole(p).detach() for name, p in net.named_parameters()}
    text = net.eval().generate(torch.arange(5)[None], 30, temperature=0)
    if rank == 0:
        torch.save((weights, text), f'{folder}/{sharded}.pt')
    dist.barrier()
    dist.destroy_process_group()


def train_step(net, optimizer, it, rows):
    ids = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(it))[rows]
    net(ids[:, :-1], ids[:, 1:], return_logits=False)[1].backward()
    if dist.is_initialized() and isinstance(optimizer, MuonAdamW) and optimizer.replicas > 1:
        for p in net.parameters():  # as DDP does
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize('sharded', [False, True])
def test_two_processes_that_divide_muons_work_train_what_one_does(sharded, tmp_path):
    mp.spawn(train_in_a_process, (str(tmp_path), sharded), nprocs=2)
    weights, text = torch.load(tmp_path / f'{sharded}.pt', weights_only=True)
    net = small('llama', n_layer=3, n_embd=36)
    optimizer = create_optimizer(net, matrix_optimizer='muon', **OPTIONS)
    for it in range(6):
        train_step(net, optimizer, it, slice(4))
    for name, p in net.named_parameters():
        torch.testing.assert_close(weights[name], p.detach(), atol=2e-6, rtol=0)
    assert torch.equal(text, net.eval().generate(torch.arange(5)[None], 30, temperature=0))
