"""Parameters are updated as by torch's AdamW and Muon; moments of a checkpoint are found by name."""

import copy

import pytest
import torch
from conftest import assert_equal

from configurator import InputError
from flatgpt.checkpoint import load_optimizer
from model import GPT, GPTConfig
from optim import MuonAdamW, create_optimizer, zeropower_via_newtonschulz

OPTIONS = dict(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)


def small(arch, **args):
    torch.manual_seed(0)
    sizes = dict(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_kv_head=1, n_embd=32)
    net = GPT(GPTConfig(arch=arch, **{**sizes, **args}))
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return net


def step(net, optimizer, seed):
    """Make an update with random gradients."""
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
        tolerance = 0.03 if name.startswith('transformer.h.') else 1e-4  # torch's Muon computes in bfloat16
        assert moved > 0.003, name
        assert (p - q).abs().max().item() < tolerance * moved, name


def newtonschulz_of_torch(G, steps=5):
    """Return the result of torch.optim.Muon's iteration for a wide matrix, in its own dtype."""
    X = G / G.norm()
    for _ in range(steps):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


@pytest.mark.parametrize('rank', [48, 2])
def test_the_newton_schulz_iteration_on_the_small_square_is_the_iteration(rank):
    torch.manual_seed(0)
    G = torch.randn(2, 48, rank) @ torch.randn(2, rank, 192)
    G += 1e-4 * torch.randn(2, 48, 192)  # small singular values, of which the square has the squares
    expected = torch.stack([newtonschulz_of_torch(matrix) for matrix in G.double()])
    for orthogonal in (zeropower_via_newtonschulz(G), zeropower_via_newtonschulz(G.mT).mT):
        assert (orthogonal - expected).abs().max() < 1e-3 * expected.abs().max()


def test_a_gradscaler_skips_updates_that_are_not_finite_and_no_others():
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


def restore(optimizer, before, name=None):
    """Restore what the optimizer `before` has saved. Return the number of parameters without state."""
    state = {'path': 'x', 'optimizer': before.state_dict(), 'optimizer_class': name or type(before).__name__}
    return load_optimizer(optimizer, state)


def test_nanogpts_moments_are_copied_and_ours_can_be_read_by_it():
    net = small('gpt2', n_kv_head=2)
    theirs = net.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    step(net, theirs, 0)
    ours = create_optimizer(net, **OPTIONS)
    assert restore(ours, theirs) == 0
    for p in net.parameters():
        assert_equal(ours.state[p], theirs.state[p])
        assert ours.state[p]['exp_avg'] is not theirs.state[p]['exp_avg']  # which may be in a mapped file
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize('kind', ['adamw', 'muon'])
def test_moments_are_found_by_name_and_parameters_without_moments_are_counted(kind):
    net = small('llama')
    first, second = net.transformer.h
    first.requires_grad_(False)
    before = create_optimizer(net, matrix_optimizer=kind, **OPTIONS)
    step(net, before, 0)
    first.requires_grad_(True)
    second.requires_grad_(False)
    optimizer = create_optimizer(net, matrix_optimizer=kind, **OPTIONS)
    assert restore(optimizer, before) == len(list(first.parameters()))
    assert not any(optimizer.state[p] for p in first.parameters())
    assert_equal(optimizer.state[net.lm_head.weight], before.state[net.lm_head.weight])
    step(net, optimizer, 1)


def test_the_state_of_another_class_is_not_used_and_the_settings_are_this_runs():
    net = small('llama')
    before = create_optimizer(net, **OPTIONS)
    step(net, before, 0)
    other = create_optimizer(net, matrix_optimizer='muon', **OPTIONS)
    assert restore(other, before) == len(list(net.parameters())) and not other.state
    step(net, other, 1)
    again = create_optimizer(net, **{**OPTIONS, 'learning_rate': 0.5, 'betas': (0.5, 0.6)})
    assert restore(again, before) == 0
    assert again.param_groups[0]['lr'] == 0.5 and again.param_groups[0]['betas'] == (0.5, 0.6)
    step(net, again, 1)


def with_value(state, name, value):
    """Return an optimizer's state in which the first moment called `name` is another value."""
    entry = next(entry for entry in state['state'].values() if name in entry)
    entry[name] = value
    return state


@pytest.mark.parametrize('name, value', [
    ('exp_avg', torch.zeros(())), ('exp_avg_sq', torch.zeros(3)), ('step', torch.zeros(2)), ('exp_avg', 'x'),
    ('momentum_buffer', torch.zeros(()))])
def test_moments_that_do_not_fit_are_refused(name, value):
    net = small('llama')
    optimizer = create_optimizer(net, matrix_optimizer='muon', **OPTIONS)
    step(net, optimizer, 0)
    state = with_value(optimizer.state_dict(), name, value)
    with pytest.raises(InputError):
        load_optimizer(optimizer, {'path': 'x', 'optimizer': state, 'optimizer_class': 'MuonAdamW'})


@pytest.mark.parametrize('state', [
    {'state': 5, 'param_groups': [{'params': [0]}]}, {'param_groups': [3]}, {'state': {}}])
def test_a_damaged_state_is_one_error(state):
    net = small('llama')
    with pytest.raises(InputError):
        load_optimizer(create_optimizer(net, **OPTIONS),
                       {'path': 'x', 'optimizer': state, 'optimizer_class': None})


def test_muon_updates_matrices_that_are_stacked_in_one_parameter_one_by_one():
    torch.manual_seed(0)
    stacked = torch.nn.Parameter(torch.randn(4, 6, 3))
    single = [torch.nn.Parameter(matrix.clone()) for matrix in stacked.detach()]
    stacked.grad = torch.randn(4, 6, 3)
    for p, grad in zip(single, stacked.grad):
        p.grad = grad.clone()
    options = {'lr': 0.1, 'weight_decay': 0.1, 'momentum': 0.9, 'muon': True}
    for params in [[stacked], single]:
        MuonAdamW([{'params': params, **options}], 0.1, (0.9, 0.95), 1e-8).step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in single]))
