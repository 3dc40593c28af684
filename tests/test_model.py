"""The network is nanoGPT's: the numbers that nanoGPT itself gave for the same weights (dev/record_nanogpt.py) come out again."""

import importlib.util
import json
import os
import sys

import pytest
import record_nanogpt
import torch
from conftest import REPO

import model as ours
from model import GPT, GPTConfig, sample_next

RECORD = json.loads((REPO / 'tests' / 'reference' / 'nanogpt.json').read_text())


@pytest.mark.parametrize('shape', record_nanogpt.SHAPES)
def test_nanogpt_weights_give_nanogpt_logits_loss_and_gradients(shape):
    got = record_nanogpt.measure(GPT(GPTConfig(**record_nanogpt.SHAPES[shape])))
    want = RECORD[shape]
    assert got['names'] == want['names'] and set(got['grads']) == set(want['grads'])
    for key in ('loss', 'logits', 'last'):
        torch.testing.assert_close(torch.tensor(got[key]), torch.tensor(want[key]), atol=1e-5, rtol=1e-5)
    for name in want['grads']:
        assert got['grads'][name] == pytest.approx(want['grads'][name], rel=1e-4, abs=1e-6), name


def test_side_by_side_with_a_checkout_of_nanogpt():
    path = os.environ.get('FLATGPT_PEER')
    if not path:
        pytest.skip('FLATGPT_PEER names no checkout of nanoGPT')
    spec = importlib.util.spec_from_file_location('nanogpt_model', os.path.join(path, 'model.py'))
    sys.modules['nanogpt_model'] = theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    for shape in record_nanogpt.SHAPES.values():
        torch.manual_seed(0)
        a = theirs.GPT(theirs.GPTConfig(**shape))
        torch.manual_seed(0)
        b = GPT(GPTConfig(**shape))
        assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values())), 'the same seed, the same weights'
        idx, targets = record_nanogpt.tokens(b.config)
        (la, loss_a), (lb, loss_b) = a(idx, targets), b(idx, targets)
        loss_a.backward(), loss_b.backward()
        torch.testing.assert_close(la, lb, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(loss_a, loss_b, atol=1e-6, rtol=1e-6)
        for (name, p), q in zip(a.named_parameters(), b.parameters()):
            torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-6, msg=name)


def test_without_targets_the_last_position_is_answered_or_all_if_asked():
    net = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16)).eval()
    idx = torch.arange(6).view(1, 6)
    last, full, with_targets = net(idx)[0], net(idx, full_logits=True)[0], net(idx, idx)[0]
    assert last.shape == (1, 1, 11) and full.shape == (1, 6, 11)
    torch.testing.assert_close(full, with_targets)
    torch.testing.assert_close(last, full[:, -1:])


def test_a_position_sees_only_what_came_before():
    net = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=16)).eval()
    idx = torch.arange(8).view(1, 8)
    changed = idx.clone()
    changed[0, 5] = 10
    a, b = net(idx, full_logits=True)[0], net(changed, full_logits=True)[0]
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])


def test_cropping_keeps_the_function_of_short_inputs():
    net = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16)).eval()
    idx = torch.arange(4).view(1, 4)
    before = net(idx)[0]
    net.crop_block_size(4)
    torch.testing.assert_close(net(idx)[0], before)
    assert net.config.block_size == 4 and net.transformer.wpe.weight.shape == (4, 16)
    with pytest.raises(AssertionError):
        net(torch.arange(5).view(1, 5))


def test_the_flop_count_is_that_of_the_matrix_products_and_attention():
    # torch counts what really runs: its counter sees the matrix products and SDPA, forward and backward
    from torch.utils.flop_counter import FlopCounterMode
    config = GPTConfig(block_size=32, vocab_size=64, n_layer=2, n_head=2, n_embd=32)
    net = GPT(config)
    idx = torch.zeros(1, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        net(idx, idx)[1].backward()
    per_op = counter.get_flop_counts()['Global']
    products = sum(n for op, n in per_op.items() if 'scaled_dot' not in str(op) and 'flash' not in str(op))
    # the rest of our count is attention, 12 L C T per token
    assert net.flops_per_token() * 32 == products + 12 * 2 * 32 * 32 * 32


def test_gpt2_has_the_published_number_of_parameters_and_flops():
    with torch.device('meta'):
        net = GPT(GPTConfig(vocab_size=50257))
    assert net.get_num_params(non_embedding=False) == 124439808  # GPT-2's, as Hugging Face counts it
    with torch.device('meta'):
        net = GPT(GPTConfig(bias=False))
    assert net.flops_per_token() == pytest.approx(0.855e9, rel=1e-3)


def test_mfu_is_the_share_of_the_named_peak(monkeypatch):
    net = GPT(GPTConfig(block_size=32, vocab_size=64, n_layer=1, n_head=2, n_embd=32))
    assert net.estimate_mfu(4, 0.5) is None  # no known peak for a CPU
    assert net.estimate_mfu(4, 0.5, peak_flops=1e9) == pytest.approx(net.flops_per_token() * 32 * 4 / 0.5 / 1e9)

    class OnGpu:
        device = torch.device('cuda')
    for name, peak in [('NVIDIA A100-SXM4-80GB', 312e12), ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA H100 PCIe', 756e12), ('NVIDIA H200', 989e12),
                       ('Tesla T4', 65e12), ('NVIDIA GeForce RTX 4090', 165.2e12), ('NVIDIA RTX A4000', None), ('NVIDIA A10G', 70e12)]:
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device, name=name: name)
        monkeypatch.setattr(net.lm_head, '_parameters', {'weight': OnGpu})
        monkeypatch.setattr(net, 'flops_per_token', lambda: 1e12)
        got = net.estimate_mfu(1, 1.0)
        assert got is None if peak is None else got == pytest.approx(32e12 / peak), name


def test_sampling_is_greedy_at_zero_and_keeps_to_top_k_top_p_and_the_vocabulary():
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0, 3.0]]).repeat(4000, 1)
    assert (sample_next(logits, 0) == 4).all()
    drawn = sample_next(logits, 1.0, generator=torch.Generator().manual_seed(1))
    shares = torch.bincount(drawn[:, 0], minlength=5) / 4000
    torch.testing.assert_close(shares, torch.softmax(logits[0], 0), atol=0.03, rtol=0)
    assert set(sample_next(logits, 1.0, top_k=2)[:, 0].tolist()) == {4, 0}
    assert set(sample_next(logits, 1.0, top_k=99)[:, 0].tolist()) <= set(range(5))
    assert set(sample_next(logits, 1.0, top_p=0.5)[:, 0].tolist()) == {4}  # the likeliest alone has 0.62
    assert set(sample_next(logits, 1.0, top_p=0.7)[:, 0].tolist()) == {4, 0}
    assert set(sample_next(logits, 1.0, top_p=1e-9)[:, 0].tolist()) == {4}
    tied = torch.zeros(500, 8)
    assert len(set(sample_next(tied, 1.0, top_k=3)[:, 0].tolist())) == 3  # ties do not keep more than k


def test_generate_keeps_the_prompt_crops_the_context_and_stops():
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=2, n_embd=16)).eval()
    idx = torch.randint(50, (3, 5))
    out = net.generate(idx, 12, temperature=1.0, vocab_size=50, generator=torch.Generator().manual_seed(1))
    assert out.shape == (3, 17) and torch.equal(out[:, :5], idx) and out.max() < 50
    again = net.generate(idx, 12, temperature=1.0, vocab_size=50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(out, again)
    greedy = net.generate(idx, 3, temperature=0)
    step = net(greedy[:, :6], full_logits=False)[0].argmax(-1)
    assert torch.equal(greedy[:, 6:7], step)
    first = net.generate(idx[:1], 1, temperature=0)[0, -1].item()
    assert net.generate(idx[:1], 9, temperature=0, stop=first).shape == (1, 6)
