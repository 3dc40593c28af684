"""The update of each parameter is the one that its optimizer is known for: AdamW's and Muon's of torch."""

import copy
import functools
from types import SimpleNamespace

import pytest
import record_nanogpt
import torch
from conftest import same, saved
from test_model import RECORD

import optim
from model import GPT, GPTConfig
from support import guard as guarding
from optim import zeropower_via_newtonschulz
from support.parallel import Distributed
from support.resume import load_optimizer_state


def small(arch, **kwargs):
    torch.manual_seed(0)
    sizes = dict(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_kv_head=1, n_embd=32)
    net = GPT(GPTConfig(arch=arch, **{**sizes, **kwargs}))
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


def test_a_gpt2_has_nanogpts_two_groups_and_adamw_itself():
    optimizer = optim.create_optimizer(small('gpt2', n_kv_head=2), 1e-2, 0.1, (0.9, 0.95), 1e-8)
    decayed, others = optimizer.param_groups
    assert [p.dim() >= 2 for p in decayed['params']] == [True] * (2 + 8) and decayed['weight_decay'] == 0.1
    assert all(p.dim() < 2 for p in others['params']) and others['weight_decay'] == 0.0
    assert type(optimizer) is torch.optim.AdamW


def test_training_gives_the_losses_that_nanogpt_gave():
    # recorded by dev/record_nanogpt.py: nanoGPT's network, groups and AdamW, from the same weights, on the
    # same batches
    want = RECORD['curve']
    net = GPT(GPTConfig(**record_nanogpt.SHAPES['bias']))
    a = record_nanogpt.ADAMW
    got = record_nanogpt.train(net, optim.create_optimizer(net, a['learning_rate'], a['weight_decay'], a['betas'], 1e-8))
    assert want[0] > 4 and want[-1] < 0.7 * want[0] and len(want) == 40
    assert got == pytest.approx(want, rel=2e-4)


@pytest.mark.parametrize('arch', ['llama', 'modern'])
def test_muon_is_torchs_muon_on_the_matrices_of_the_blocks_and_adamw_on_the_rest(arch):
    net = small(arch)
    other = copy.deepcopy(net)
    optimizer = optim.create_optimizer(net, 1e-2, 0.1, (0.9, 0.95), 1e-8, 'muon', matrix_lr=0.03,
                                       embedding_lr=0.05, head_lr=0.004, matrix_weight_decay=0.2)
    hidden = [p for name, p in other.named_parameters() if p.dim() == 2 and name.startswith('transformer.h.')]
    assert len(hidden) == 2 * (7 if arch == 'llama' else 6)
    muon = torch.optim.Muon(hidden, lr=0.03, weight_decay=0.2, momentum=0.95)
    groups = [{'params': [other.transformer.wte.weight], 'lr': 0.05},
              {'params': [other.lm_head.weight], 'lr': 0.004}]
    if gains := [p for p in other.parameters() if p.dim() == 1]:
        groups.append({'params': gains, 'weight_decay': 0.0})
    adamw = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    before = copy.deepcopy(net)
    for seed in range(3):
        step(net, optimizer, seed), step(other, muon, seed), adamw.step()
    for (name, p), q, start in zip(net.named_parameters(), other.parameters(), before.parameters()):
        moved = (q - start).abs().max().item()
        tolerance = 0.03 if name.startswith('transformer.h.') else 1e-4  # bfloat16 inside
        assert moved > 0.003 and (p - q).abs().max().item() < tolerance * moved, name


@pytest.mark.parametrize('dtype, error', [('float32', 3e-6), ('bfloat16', 3e-2)])
def test_muon_works_in_the_dtype_of_the_run(dtype, error):
    net = small('llama')
    optimizer = optim.create_optimizer(net, 1e-2, 0.0, (0.9, 0.95), 1e-8, 'muon', matrix_lr=1.0, dtype=dtype)
    p = net.transformer.h[0].attn.c_q.weight
    before = p.detach().clone()
    step(net, optimizer, 0)
    assert error / 100 < (before - p - zeropower_via_newtonschulz(p.grad[None].double())[0]).abs().max().item() < error


def test_one_factor_moves_every_rate(works, tiny):
    result = works('train.py', *tiny, '--arch=modern', '--matrix_optimizer=muon', '--embedding_lr=0.3',
                   '--head_lr=0.002', '--matrix_lr=0.04', '--lr_schedule=wsd', '--decay_fraction=0.5',
                   '--max_iters=8', '--warmup_iters=1')
    optimizer, get_lr = result.globals['optimizer'], result.globals['get_lr']
    assert [get_lr(it) for it in range(9)] == pytest.approx([0.005, *[0.01] * 4, 0.0075, 0.005, 0.0025, 0.0])
    assert [group['lr'] for group in optimizer.param_groups] == pytest.approx(  # of the last update
        [0.3 / 4, 0.04 / 4, 0.002 / 4])


def test_a_decay_starts_from_a_kept_checkpoint_into_a_new_folder(works, script, tiny, tmp_path, out):
    flags = [*tiny, '--arch=llama', '--matrix_optimizer=muon', '--lr_schedule=wsd', '--decay_fraction=0.5',
             '--keep_checkpoints=9', '--save_interval=2', '--warmup_iters=0']
    works('train.py', *flags, '--max_iters=8')
    files = set(out.iterdir())
    # the flat part of a long run, and the decay of a shorter one from the middle of it, make the shorter run
    # to the bit
    short, branch = tmp_path / 'short', tmp_path / 'branch'
    works('train.py', *flags, '--max_iters=4', f'--out_dir={short}')
    here = [f'--out_dir={branch}', f"--data_dir={tmp_path / 'data'}", '--device=cpu', '--dtype=float32']
    stopped = ['train.py', '--max_iters=4', f"--init_from=resume:{out / 'ckpt_00000002.pt'}", '--max_minutes=1e-6', *here]
    assert 'nothing saved' in script(*stopped, '--eval_only').out
    script(*stopped)
    assert 'after 2 iterations' in works('train.py', '--max_iters=4', '--init_from=resume', *here).out
    assert same(*(saved(folder, 'ckpt_00000004.pt')['model'] for folder in (short, branch)))
    assert set(out.iterdir()) == files, 'the other run is as it was'
    # the branch is a run of its own
    assert 'after 4 iterations' in works('train.py', '--init_from=resume', '--max_iters=5', *here).out


def test_moments_survive_other_groups_and_are_dropped_where_the_optimizer_changes():
    net = small('llama')
    make = functools.partial(optim.create_optimizer, net, 1e-2, 0.1, (0.9, 0.95), 1e-8)
    one = make()
    step(net, one, 0)
    moments = {name: one.state[p]['exp_avg'].clone() for name, p in net.named_parameters()}
    two = make(embedding_lr=0.1, head_lr=0.2)
    load_optimizer_state(two, {'optimizer': one.state_dict()}, print)
    assert all(torch.equal(two.state[p]['exp_avg'], moments[name]) for name, p in net.named_parameters())
    assert [group['lr'] for group in two.param_groups] == [0.1, 1e-2, 0.2, 1e-2]
    muon, notes = make('muon'), []
    load_optimizer_state(muon, {'optimizer': two.state_dict()}, notes.append)
    assert not muon.state and len(notes) == 1


@pytest.mark.parametrize('arch, optimizer', [('gpt2', 'adamw'), ('modern', 'muon')])
def test_the_guard_skips_what_is_not_finite_and_nothing_else(arch, optimizer, monkeypatch):
    net = small(arch, n_kv_head=2)
    other = copy.deepcopy(net)
    guarded, plain = (optim.create_optimizer(n, 1e-2, 0.1, (0.9, 0.95), 1e-8, optimizer)
                      for n in (net, other))
    monkeypatch.setattr(guarding.Guard, 'max_in_a_row', 3)
    run = SimpleNamespace(resuming=False, ckpt=None)
    guard = guarding.Guard(guarded, torch.amp.GradScaler('cpu', enabled=False), None, Distributed('cpu'), run)
    fine, nan, inf = torch.tensor([1.0, float('nan'), float('inf')])

    def bits():
        return copy.deepcopy((net.state_dict(), guarded.state_dict()['state']))

    def guarded_step(it, loss, norm):
        fill_gradients(net, seed=it)
        if not torch.isfinite(norm):
            for p in net.parameters():
                p.grad.fill_(norm)
        guard.step(it, loss, norm)

    pairs = [(fine, fine), (fine, nan), (nan, fine), (fine, fine), (fine, inf), (inf, inf), (fine, fine)]
    for it, (loss, norm) in enumerate(pairs):
        before = bits()
        guarded_step(it, loss, norm)
        if torch.isfinite(loss + norm):
            step(other, plain, seed=it)
        else:
            assert same(bits(), before)
        if it == 2:
            assert str(guard.skipped()) == '(2, 2, 1, 1.0, nan)'
    assert str(guard.skipped()) == '(2, 0, 4, 1.0, inf)' and guard.skipped()[0] == 0
    for p, q in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)  # the guard's factors round once more
    # after too many in a row nothing moves any more, whenever somebody looks
    before = bits()
    for it in range(10, 14):
        guarded_step(it, fine, nan if it < 13 else fine)
    assert guard.skipped()[1] == 4 and same(bits(), before)
