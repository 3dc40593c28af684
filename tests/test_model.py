"""The default network is nanoGPT's; attention, the presets and the loss agree with their definitions."""

import json
import math
import shutil
import subprocess
import sys

import pytest
import record_nanogpt
import torch
from conftest import REPO, assert_equal

from model import (
    GPT, NANOGPT, PRESETS, GPTConfig, attention, causal_mask, document_block_mask, document_mask)
from optim import create_optimizer

RECORD = json.loads(record_nanogpt.REFERENCE.read_text())


def lively(arch, **args):
    """Return a network with large random weights, so that its greedy text depends on the context."""
    torch.manual_seed(1)
    sizes = dict(block_size=16, vocab_size=40, n_layer=2, n_head=4, n_embd=32)
    net = GPT(GPTConfig(arch=arch, **{**sizes, **args})).eval()
    for name, p in net.named_parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.02 if 'wte' in name and not net.config.tie else 0.3)
    return net


def random_ids(*shape, vocab_size=40, seed=1):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# -----------------------------------------------------------------------------
# nanoGPT's network, and its counts of FLOPs and parameters


@pytest.mark.parametrize('shape', record_nanogpt.SHAPES)
def test_initial_weights_logits_loss_and_gradients_are_nanogpts(shape):
    torch.manual_seed(0)
    got = record_nanogpt.measure(GPT(GPTConfig(**record_nanogpt.SHAPES[shape])))
    want = RECORD[shape]
    assert got['names'] == want['names']
    assert got['loss'] == pytest.approx(want['loss'], abs=1e-6)
    assert got['initial'] == pytest.approx(want['initial'])
    assert got['grads'] == pytest.approx(want['grads'], rel=1e-4, abs=1e-6)
    for key in ['logits', 'last']:
        torch.testing.assert_close(torch.tensor(got[key]), torch.tensor(want[key]), atol=1e-5, rtol=1e-5)


def test_it_trains_as_nanogpt_does():
    net = GPT(GPTConfig(**record_nanogpt.SHAPES['bias']))
    for optimizer in [net.configure_optimizers(**record_nanogpt.ADAMW, device_type='cpu'),
                      create_optimizer(net, **record_nanogpt.ADAMW, eps=1e-8)]:
        assert record_nanogpt.train(net, optimizer) == pytest.approx(RECORD['curve'], rel=2e-4)


def test_model_and_optim_work_when_they_are_copied_alone(tmp_path):
    for name in ['model.py', 'optim.py']:
        shutil.copy(REPO / name, tmp_path)
    code = ("import torch, model, optim\n"
            "net = model.GPT(model.GPTConfig(n_layer=1, n_embd=48, vocab_size=9))\n"
            "print(net.generate(torch.zeros(1, 1, dtype=torch.long), 5).shape)\n")
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == 'torch.Size([1, 6])\n', done.stderr


def test_generate_keeps_the_prompt_and_follows_the_seed_and_top_k():
    net = lively('gpt2', block_size=8)
    idx = random_ids(3, 5)
    texts = []
    for seed in [1, 1, 2]:
        torch.manual_seed(seed)
        texts.append(net.generate(idx, 12, temperature=0.9, top_k=7))
    assert torch.equal(texts[0][:, :5], idx) and texts[0].shape == (3, 17)
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    greedy = net.generate(idx, 12, top_k=1)
    for length in range(5, 17):  # also beyond block_size
        assert torch.equal(greedy[:, length], net(greedy[:, max(0, length - 8):length])[0][:, -1].argmax(-1))


def test_the_flop_count_is_that_of_the_matrix_products_and_attention():
    from torch.utils.flop_counter import FlopCounterMode
    net = lively('llama', block_size=32, n_kv_head=1)
    idx = torch.zeros(1, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        net(idx, idx)[1].backward()
    products = counter.get_flop_counts()['Global'][torch.ops.aten.mm]
    # attention is 12 L C T per token
    assert net.flops_per_token() * 32 == products + 12 * 2 * 32 * 32 * 32
    flops = net.flops_per_token() * 32 * 4  # of four sequences
    assert net.estimate_mfu(4, 0.5, peak_flops=1e12) == pytest.approx(flops / 0.5 / 1e12)


def test_gpt2_has_the_published_number_of_parameters():
    with torch.device('meta'):
        net = GPT(GPTConfig(vocab_size=50257))
    assert net.get_num_params(non_embedding=False) == 124439808  # as Hugging Face counts it
    assert net.get_num_params() == 124439808 - 1024 * 768


# -----------------------------------------------------------------------------
# settings


def test_model_args_give_the_config_back_and_are_nanogpts_for_gpt2():
    assert set(GPTConfig(bias=False).model_args()) == set(record_nanogpt.SHAPES['bias'])
    for config in [GPTConfig(mlp='gelu_tanh', n_kv_head=3), GPTConfig(arch='modern', softcap=0.0)]:
        assert GPTConfig(**config.model_args()) == config


def test_model_args_contain_what_an_edited_preset_changes(monkeypatch):
    monkeypatch.setitem(PRESETS, 'gpt2', dict(NANOGPT, mlp='relu2'))
    args = GPTConfig().model_args()
    monkeypatch.undo()
    assert GPTConfig(**args).mlp == 'relu2'


def test_the_initial_weights_of_modern_have_their_standard_deviations():
    torch.manual_seed(0)
    config = GPTConfig(block_size=32, vocab_size=512, n_layer=8, n_head=4, n_embd=256, arch='modern')
    for name, p in GPT(config).named_parameters():
        want = 1 if 'wte' in name else 768 ** -0.5
        if name.endswith(('c_proj.weight', 'lm_head.weight')):
            want = 0
        assert p.std().item() == pytest.approx(want, rel=0.05), name


# -----------------------------------------------------------------------------
# parts


@pytest.mark.parametrize('arch', PRESETS)
def test_every_preset_has_an_initial_loss_of_ln_v_and_is_causal(arch):
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=16, vocab_size=40, n_layer=2, n_head=2, n_embd=32, arch=arch))
    idx = random_ids(4, 16)
    assert net(idx, idx.flip(1))[1].item() == pytest.approx(math.log(40), abs=0.2)
    net = lively(arch)
    changed = idx.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 40
    a, b = net(idx, idx)[0], net(changed, idx)[0]
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:])


@pytest.mark.parametrize('dtype, error', [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize('K', [4, 2])
def test_attention_is_its_definition_also_with_grouped_queries(K, dtype, error):
    torch.manual_seed(2)
    q, k, v = [torch.randn(3, n, 24, 16).to(dtype) for n in [4, K, K]]
    mask = causal_mask(torch.arange(24), 24)
    scores = q.view(3, K, -1, 24, 16).float() @ k[:, :, None].float().mT / math.sqrt(16)
    want = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v[:, :, None].float()
    for y in [attention(q, k, v, is_causal=True), attention(q, k, v, mask)]:
        torch.testing.assert_close(y, want.view(3, 4, 24, 16), atol=error, rtol=error, check_dtype=False)


# -----------------------------------------------------------------------------
# documents


DOC_IDS = torch.tensor([[4] * 5 + [9] * 8 + [2] * 3, [7] * 16])


@pytest.mark.parametrize('arch', PRESETS)
def test_documents_in_one_sequence_do_not_attend_to_each_other(arch):
    net = lively(arch, n_embd=64)
    idx = random_ids(2, 16)
    together = net(idx, idx, DOC_IDS)[0]
    for row, start, end in [(0, 0, 5), (0, 5, 13), (0, 13, 16), (1, 0, 16)]:
        document = idx[row:row + 1, start:end]
        alone = net(document, document)[0]
        torch.testing.assert_close(together[row:row + 1, start:end], alone, atol=1e-5, rtol=1e-4)


def test_flex_attention_masks_documents_as_the_dense_mask_does():
    torch.manual_seed(3)
    q, k, v = [torch.randn(2, heads, 16, 16) for heads in [4, 2, 2]]
    with torch.no_grad():
        dense = attention(q, k, v, document_mask(DOC_IDS))
        torch.testing.assert_close(attention(q, k, v, document_block_mask(DOC_IDS)), dense)


# -----------------------------------------------------------------------------
# the loss


def loss_and_gradients(net, low=False, reduction='mean'):
    """Compute both on the same batch, some of whose targets are masked, with the same dropout each time."""
    idx = random_ids(3, 32)
    targets = idx.roll(-1, 1)
    targets[0, :5] = -1
    net.zero_grad()
    torch.manual_seed(1)
    with torch.autocast('cpu', torch.bfloat16, enabled=low):
        _, loss = net(idx, targets, reduction=reduction, return_logits=False)
    loss.sum().backward()
    return loss.detach(), {name: p.grad for name, p in net.named_parameters()}


# tied and untied, without softcap and with it
@pytest.mark.parametrize('arch, low, error', [
    ('gpt2', False, 2e-6), ('modern', False, 2e-6), ('modern', True, 2e-2)])
def test_the_loss_in_chunks_has_the_same_value_and_gradients(arch, low, error):
    net = lively(arch, block_size=32)
    loss, grads = loss_and_gradients(net, low)
    each, _ = loss_and_gradients(net, low, 'none')
    assert each.shape == (96,) and (each[:5] == 0).all()
    torch.testing.assert_close(each.sum() / 91, loss)
    net.loss_chunk_size = 7  # the last chunk is smaller
    in_chunks, grads_in_chunks = loss_and_gradients(net, low)
    torch.testing.assert_close(in_chunks, loss, atol=error, rtol=error)
    torch.testing.assert_close(loss_and_gradients(net, low, 'none')[0], each, atol=error, rtol=error)
    for name in grads:
        assert (grads[name] - grads_in_chunks[name]).norm() <= error * grads[name].norm(), name


def test_a_batch_without_targets_has_the_loss_zero_and_finite_gradients():
    net = lively('gpt2')
    idx = random_ids(1, 16)
    loss = net(idx, torch.full_like(idx, -1), return_logits=False)[1]
    loss.backward()
    assert loss == 0 and all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize('arch', ['gpt2', 'modern'])
def test_activation_checkpointing_changes_no_bit(arch):
    net = lively(arch, block_size=32, dropout=0.2).train()
    before = loss_and_gradients(net)
    net.activation_checkpointing = True
    assert_equal(loss_and_gradients(net), before)
