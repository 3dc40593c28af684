"""The network is nanoGPT's, its parts are what their names say, and its texts are those of the definition,
whatever makes them fast."""

import copy
import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import record_nanogpt
import torch
from conftest import REPO
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model import (
    GPT, PRESETS, GPTConfig, KVCache, apply_rotary_emb, attention, causal_mask, document_block_mask,
    document_mask, generate_text, positions_in_document, rope_table, sample_next)

RECORD = json.loads(record_nanogpt.REFERENCE.read_text())


def lively(arch, **args):
    """A network whose greedy text wanders: random weights wide enough that positions and context matter."""
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
# nanoGPT, and what is counted


@pytest.mark.parametrize('shape', record_nanogpt.SHAPES)
def test_a_seed_gives_nanogpts_weights_and_those_its_logits_loss_and_gradients(shape):
    torch.manual_seed(0)
    got = record_nanogpt.measure(GPT(GPTConfig(**record_nanogpt.SHAPES[shape])))
    want = RECORD[shape]
    assert got['names'] == want['names']
    assert set(got['grads']) == set(want['grads'])
    for key in ['loss', 'logits', 'last']:
        torch.testing.assert_close(torch.tensor(got[key]), torch.tensor(want[key]), atol=1e-5, rtol=1e-5)
    for name in want['grads']:
        assert got['initial'][name] == pytest.approx(want['initial'][name])
        assert got['grads'][name] == pytest.approx(want['grads'][name], rel=1e-4, abs=1e-6), name


def test_it_trains_as_nanogpt_does_with_nanogpts_call():
    net = GPT(GPTConfig(**record_nanogpt.SHAPES['bias']))
    optimizer = net.configure_optimizers(**record_nanogpt.ADAMW, device_type='cpu')
    assert record_nanogpt.train(net, optimizer) == pytest.approx(RECORD['curve'], rel=2e-4)


def test_model_and_optimizer_work_in_a_folder_of_their_own(tmp_path):
    for name in ['model.py', 'optim.py']:
        shutil.copy(REPO / name, tmp_path)
    code = ("import torch, model, optim\n"
            "net = model.GPT(model.GPTConfig(n_layer=1, n_embd=48, vocab_size=9))\n"
            "print(net.generate(torch.zeros(1, 1, dtype=torch.long), 5).shape)\n")
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == 'torch.Size([1, 6])\n', done.stderr


@pytest.mark.parametrize('arch', ['gpt2', 'llama', 'modern'])
def test_the_flop_count_is_that_of_the_matrix_products_and_attention(arch):
    # torch counts what really runs: its counter sees the matrix products and SDPA, forward and backward
    from torch.utils.flop_counter import FlopCounterMode
    net = GPT(GPTConfig(block_size=32, vocab_size=64, n_layer=2, n_head=4, n_embd=32, arch=arch, n_kv_head=1))
    net.transformer.h[1].mlp = net.transformer.h[0].mlp  # computed twice, as in ALBERT
    idx = torch.zeros(1, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        net(idx, idx)[1].backward()
    products = 0
    for op, n in counter.get_flop_counts()['Global'].items():
        if 'scaled_dot' not in str(op) and 'flash' not in str(op):
            products += n
    # the rest of our count is attention, 12 L C T per token
    assert net.flops_per_token() * 32 == products + 12 * 2 * 32 * 32 * 32


def test_gpt2_and_llama_have_the_published_number_of_parameters_and_flops():
    sizes = dict(block_size=4096, vocab_size=32000, n_layer=32, n_head=32, n_embd=4096, mlp_width=11008)
    with torch.device('meta'):
        gpt2 = GPT(GPTConfig(vocab_size=50257))
        net = GPT(GPTConfig(bias=False))
        llama = GPT(GPTConfig(arch='llama', **sizes))
    assert gpt2.get_num_params(non_embedding=False) == 124439808  # GPT-2's, as Hugging Face counts it
    assert llama.get_num_params(non_embedding=False) == 6738415616  # Llama 2 7B, as Hugging Face counts it
    assert llama.get_num_params() == 6738415616 - 32000 * 4096
    assert net.flops_per_token() == pytest.approx(0.855e9, rel=1e-3)
    assert math.isnan(net.estimate_mfu(4, 0.5))
    assert net.estimate_mfu(4, 0.5, peak_flops=1e12) == pytest.approx(0.855 * 1024 * 4 / 500, rel=1e-3)


# -----------------------------------------------------------------------------
# settings


def test_an_arch_sets_the_parts_that_are_not_given_and_a_checkpoint_has_them_all():
    config = GPTConfig(arch='modern', softcap=0.0, n_kv_head=4)
    assert (config.norm, config.softcap, config.n_kv_head, config.tie) == ('rmsnorm_plain', 0.0, 4, False)
    assert GPTConfig(arch='llama', n_embd=512, n_head=8).mlp_width == 1408
    scaling = {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
               'original_max_position_embeddings': 64}
    for config in [config, GPTConfig(arch='llama', rope_scaling=scaling)]:
        assert GPTConfig(**config.model_args()) == config


def test_a_gpt2_of_ours_goes_into_nanogpts_config():
    assert set(GPTConfig(bias=False).model_args()) == set(record_nanogpt.SHAPES['bias'])
    assert GPTConfig(**GPTConfig(mlp='gelu_tanh').model_args()).mlp == 'gelu_tanh'


@pytest.mark.parametrize('args', [
    dict(arch='gpt3'), dict(n_head=5), dict(n_kv_head=5), dict(n_layer=0), dict(n_head=0),
    dict(block_size=-1),
    dict(arch='llama', n_embd=36, n_head=4), dict(arch='llama', bias=True), dict(arch='modern', tie=True),
    dict(norm='rmsnom', bias=False)])
def test_parts_that_make_no_sense_together_are_refused(args):
    with pytest.raises(ValueError):
        GPT(GPTConfig(**args))


def test_the_initialization_of_modern_keeps_its_rules():
    torch.manual_seed(0)
    config = GPTConfig(block_size=32, vocab_size=512, n_layer=8, n_head=4, n_embd=256, arch='modern')
    for name, p in GPT(config).named_parameters():
        want = 1 if 'wte' in name else 768 ** -0.5
        if name.endswith(('c_proj.weight', 'lm_head.weight')):
            want = 0
        assert p.std().item() == pytest.approx(want, rel=0.05), name


@pytest.mark.parametrize('arch', ['gpt2', 'llama'])
def test_cropping_keeps_the_function_of_short_inputs(arch):
    net = lively(arch, block_size=8)
    idx = torch.arange(4).view(1, 4)
    before = net(idx)[0]
    net.crop_block_size(4)
    assert torch.equal(net(idx)[0], before)
    with pytest.raises(AssertionError):
        net(torch.arange(5).view(1, 5))


# -----------------------------------------------------------------------------
# parts


@pytest.mark.parametrize('arch', PRESETS)
def test_every_preset_begins_at_ln_v_learns_and_sees_no_future(arch):
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_embd=32, arch=arch))
    idx = torch.randint(50, (4, 17))
    x, y = idx[:, :-1], idx[:, 1:]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = net(x, y)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(50), abs=0.2)
    assert losses[-1] < 0.5
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    a, b = net(x, y)[0], net(changed, y)[0]
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:])


def test_rotated_queries_and_keys_know_their_distance_and_nothing_else():
    rope = rope_table(GPTConfig(arch='llama', n_embd=32, n_head=2, block_size=64))
    q = torch.randn(1, 1, 1, 16).expand(1, 1, 64, 16)
    k = torch.randn(1, 1, 1, 16).expand(1, 1, 64, 16)
    scores = (apply_rotary_emb(q, rope) @ apply_rotary_emb(k, rope).mT)[0, 0]
    for distance in [0, 1, 7, 40]:
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), atol=1e-4, rtol=0)
    torch.testing.assert_close(apply_rotary_emb(q, rope).norm(dim=-1), q.norm(dim=-1))


def test_scaled_frequencies_are_those_of_transformers():
    transformers = pytest.importorskip('transformers')
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    scaling = {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
               'original_max_position_embeddings': 64}
    rope = {'rope_type': 'llama3', 'rope_theta': 500.0, **scaling}
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=512,
                                      rope_theta=500.0, rope_scaling=rope)
    inv_freq, _ = ROPE_INIT_FUNCTIONS['llama3'](config, 'cpu')
    cos, sin = rope_table(GPTConfig(arch='llama', n_embd=128, n_head=2, block_size=512, rope_theta=500.0,
                                    rope_scaling=scaling))
    angles = torch.outer(torch.arange(512.0), inv_freq)
    torch.testing.assert_close(cos, angles.cos(), atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, angles.sin(), atol=1e-4, rtol=0)


def test_grouped_queries_share_their_keys_and_values():
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = causal_mask(torch.arange(9), 9)
    scores = q.view(2, 2, 2, 9, 8) @ k[:, :, None].mT / math.sqrt(8)
    want = (scores.masked_fill(~mask, -math.inf).softmax(-1) @ v[:, :, None]).view(2, 4, 9, 8)
    torch.testing.assert_close(attention(q, k, v, is_causal=True), want)
    torch.testing.assert_close(attention(q, k, v, mask), want)


@pytest.mark.parametrize('K', [4, 2])
@pytest.mark.parametrize('masked', [False, True])
def test_attention_in_bfloat16_on_a_cpu_is_torchs(K, masked):
    B, H, T, D = 3, 4, 24, 16
    mask = document_mask(random_ids(B, T, vocab_size=2).cumsum(1)) if masked else None
    found = []
    for attend, dtype in [(attention, torch.bfloat16), (F.scaled_dot_product_attention, torch.float32)]:
        torch.manual_seed(2)
        q, k, v = [torch.randn(B, n, T, D).to(dtype).requires_grad_() for n in [H, K, K]]
        options = {'enable_gqa': True} if attend is F.scaled_dot_product_attention else {}
        y = attend(q, k, v, mask, is_causal=not masked, **options)
        y.float().square().sum().backward()
        found.append([t.float() for t in [y, q.grad, k.grad, v.grad]])
    torch.testing.assert_close(*found, atol=0.15, rtol=0.05)


# -----------------------------------------------------------------------------
# documents


@pytest.mark.parametrize('arch', PRESETS)
def test_documents_in_one_window_do_not_see_each_other(arch):
    net = lively(arch)
    idx = random_ids(1, 16)
    doc_ids = torch.tensor([[4] * 5 + [9] * 8 + [2] * 3])
    together = net(idx, idx, doc_ids)[0]
    assert positions_in_document(doc_ids).tolist() == [[*range(5), *range(8), *range(3)]]
    for part in [slice(0, 5), slice(5, 13), slice(13, 16)]:
        alone = net(idx[:, part], idx[:, part])[0]
        torch.testing.assert_close(together[:, part], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
def test_flexattention_with_a_block_mask_is_attention_with_the_dense_one():
    doc_ids = random_ids(2, 200, vocab_size=2).cumsum(1) // 20
    q, k, v = torch.randn(2, 4, 200, 16), torch.randn(2, 2, 200, 16), torch.randn(2, 2, 200, 16)
    torch.testing.assert_close(attention(q, k, v, document_block_mask(doc_ids)),
                               attention(q, k, v, document_mask(doc_ids)))


def test_a_network_compiled_with_block_masks_is_one_graph_with_the_same_loss(monkeypatch):
    torch._dynamo.reset()
    net = lively('modern', n_kv_head=2, n_layer=1, n_embd=64)
    idx = random_ids(2, 16)
    doc_ids = random_ids(2, 16, vocab_size=2).cumsum(1)
    with torch.no_grad():
        want = net(idx, idx, doc_ids)[1]
        monkeypatch.setattr(GPT, 'uses_block_mask', lambda self, doc_ids: True)
        net.compile(backend='eager', fullgraph=True)
        torch.testing.assert_close(net(idx, idx, doc_ids)[1], want)


# -----------------------------------------------------------------------------
# the loss


def with_and_without(change, low=False, **args):
    """[(loss, {name: gradient})] of a network, before and after change(net)."""
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=32, vocab_size=101, n_layer=2, n_head=2, n_embd=32, **args)).train()
    for p in net.parameters():
        if not p.count_nonzero():
            torch.nn.init.normal_(p, std=0.1)
    idx = random_ids(3, 32, vocab_size=101)
    targets = idx.roll(-1, 1)
    targets[0, :5] = -1
    found = []
    for step in [lambda net: None, change]:
        step(net)
        net.zero_grad()
        torch.manual_seed(1)  # dropout's
        with torch.autocast('cpu', torch.bfloat16, enabled=low):
            _, loss = net(idx, targets, return_logits=False)
        (loss * 7).backward()
        found.append((loss.item(), {name: p.grad.clone() for name, p in net.named_parameters()}))
    return found


@pytest.mark.parametrize('arch', ['gpt2', 'modern'])  # tied and untied, without softcap and with it
@pytest.mark.parametrize('low', [False, True])
def test_the_loss_by_chunks_is_the_loss(arch, low):
    # 96 targets: the last chunk is a smaller one
    (a, grads), (b, grads_) = with_and_without(lambda net: net.set_loss_chunk_size(7), low, arch=arch)
    assert a == pytest.approx(b, abs=2e-5 if low else 2e-6)
    for name in grads:
        error = (grads[name] - grads_[name]).norm()
        assert error <= (2e-2 if low else 2e-6) * grads[name].norm(), name


def test_each_reduction_is_the_same_by_chunks():
    net = lively('gpt2')
    idx = random_ids(3, 16)
    targets = idx.roll(-1, 1)
    targets[1, 4:] = -1
    for targets in [targets, torch.full_like(idx, -1)]:
        each = net(idx, targets, reduction='none')[1]
        assert each.shape == (48,) and (each[targets.view(-1) < 0] == 0).all()
        net.set_loss_chunk_size(5)
        torch.testing.assert_close(net(idx, targets, reduction='none', return_logits=False)[1], each)
        torch.testing.assert_close(net(idx, targets, reduction='sum', return_logits=False)[1], each.sum())
        mean = net(idx, targets, return_logits=False)[1]
        torch.testing.assert_close(mean, each.sum() / max(1, (targets >= 0).sum()))
        logits, loss = net(idx, targets)  # who wants the logits gets them
        assert logits.shape == (3, 16, 40)
        torch.testing.assert_close(loss, mean)
        net.set_loss_chunk_size(0)


def test_the_loss_by_chunks_never_holds_all_logits():
    V = 4001
    net = GPT(GPTConfig(block_size=256, vocab_size=V, n_layer=1, n_head=1, n_embd=16, arch='modern'))
    net.set_loss_chunk_size(64)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if torch.is_tensor(tensor):
                    sizes.append(tensor.numel())
            return out

    idx = random_ids(2, 256, vocab_size=V)
    with Sizes():
        net(idx, idx, return_logits=False)[1].backward()
    assert max(sizes) == 64 * V


@pytest.mark.parametrize('arch', PRESETS)
def test_activation_checkpointing_changes_no_bit(arch):
    (a, grads), (b, grads_) = with_and_without(
        lambda net: net.set_activation_checkpointing(True), arch=arch, dropout=0.2)
    assert a == b
    assert all(torch.equal(grads[name], grads_[name]) for name in grads)


@pytest.mark.parametrize('arch, saves_memory', [('gpt2', True), ('modern', False)])
def test_a_training_step_is_one_graph_and_an_evaluation_another(arch, saves_memory):
    from torch._dynamo.testing import CompileCounterWithBackend
    torch._dynamo.reset()
    net = lively(arch, n_layer=1, dropout=0.1)
    net.set_activation_checkpointing(saves_memory)
    net.set_loss_chunk_size(7 if saves_memory else 0)
    counter = CompileCounterWithBackend('aot_eager')
    net.compile(backend=counter, fullgraph=True)
    idx = random_ids(2, 16)
    graphs = []
    for training in [True, True, False, True, False]:
        net.train(training)
        with torch.set_grad_enabled(training), torch.autocast('cpu', torch.bfloat16):
            logits, loss = net(idx, idx, reduction='mean' if training else 'none', return_logits=False)
        assert logits is None
        if training:
            loss.backward()
        graphs.append(counter.frame_count)
    assert graphs == [1, 1, 2, 2, 2]


# -----------------------------------------------------------------------------
# generating


def test_sampling_is_greedy_at_zero_and_keeps_to_top_k_top_p_and_the_probabilities():
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0, 3.0]]).repeat(4000, 1)
    for temperature in [1.0, 2.0]:
        shares = torch.bincount(sample_next(logits, temperature)[:, 0], minlength=5) / 4000
        torch.testing.assert_close(shares, torch.softmax(logits[0] / temperature, 0), atol=0.03, rtol=0)
    for options, want in [
            (dict(temperature=0), {4}), (dict(temperature=1e-40), {4}), (dict(top_k=2), {4, 0}),
            (dict(top_k=99), {0, 1, 2, 3, 4}), (dict(top_k=0), {0, 1, 2, 3, 4}),
            (dict(top_p=1.0), {0, 1, 2, 3, 4}), (dict(top_p=0.5), {4}),  # the likeliest alone has 0.62
            (dict(top_p=0.7), {4, 0}), (dict(top_p=1e-9), {4}), (dict(top_k=3, top_p=0.99), {4, 0, 1})]:
        assert set(sample_next(logits, **options)[:, 0].tolist()) == want, options
    assert sample_next(torch.zeros(500, 8), top_k=3).unique().numel() == 3  # ties do not keep more than k


def test_generate_keeps_the_prompt_crops_the_context_and_stops():
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=2, n_embd=16)).eval()
    idx = torch.randint(50, (3, 5))
    seen = []
    generator = torch.Generator().manual_seed(1)
    out = net.generate(idx, 12, vocab_size=50, generator=generator, on_tokens=seen.append)
    again = net.generate(idx, 12, vocab_size=50, generator=generator.manual_seed(1))
    assert torch.equal(out, torch.cat((idx, *seen), dim=1))
    assert out.shape == (3, 17) and out.max() < 50
    assert torch.equal(out, again)
    assert net.generate(idx, 0).shape == (3, 5)
    assert net.generate(idx, 9, on_tokens=lambda ids: True).shape == (3, 6)
    greedy = net.generate(idx, 3, temperature=0)
    assert torch.equal(greedy[:, 6:7], net(greedy[:, :6])[0].argmax(-1))
    first = net.generate(idx[:1], 1, temperature=0)[0, -1].item()
    assert net.generate(idx[:1], 9, temperature=0, stop_ids=[first, 63]).shape == (1, 6)


def test_generate_ends_when_the_last_row_has_stopped():
    net = lively('gpt2')
    idx = random_ids(3, 4)
    plain = net.generate(idx, 40, temperature=0)[:, 4:]
    for stop in range(0, 40, 2):
        lengths = [row.tolist().index(stop) + 1 if stop in row else 40 for row in plain]
        out = net.generate(idx, 40, temperature=0, stop_ids=[stop])
        assert torch.equal(out[:, 4:], plain[:, :max(lengths)])


def test_logits_that_are_not_finite_end_a_text():
    net = lively('gpt2')
    with torch.no_grad():
        net.transformer.wpe.weight[7] = torch.nan
    seen = []
    with pytest.raises(FloatingPointError):
        net.generate(random_ids(1, 4), 9, on_tokens=seen.append)
    assert len(seen) == 4  # up to the one that is drawn at position 6


@pytest.fixture
def captured(monkeypatch):
    """generate() takes the step that is captured on a GPU, and runs it as it is written."""
    def use(on):
        monkeypatch.setattr(GPT, 'can_capture', lambda self, max_new_tokens: on)
    use(True)
    return use


@pytest.mark.parametrize('arch', PRESETS)
@pytest.mark.parametrize('block_size', [16, 1])
def test_cache_and_captured_step_change_no_text_also_across_the_edge(arch, block_size, captured):
    net = lively(arch, n_kv_head=1, block_size=block_size)
    texts = set()
    for B in [1, 3]:
        for T in [1, 15, 17]:
            idx = random_ids(B, T, seed=T)
            captured(False)
            plain = net.generate(idx, 40, temperature=0, use_cache=False)
            assert torch.equal(net.generate(idx, 40, temperature=0), plain), (B, T)
            captured(True)
            seen = []
            assert torch.equal(net.generate(idx, 40, temperature=0, on_tokens=seen.append), plain), (B, T)
            assert torch.equal(torch.cat((idx, *seen), dim=1), plain)
            assert len(seen) < 20 or block_size == 1  # they come several at a time
            texts.update(map(tuple, plain[:, T:].tolist()))
    if block_size > 1:  # texts that could differ
        assert len(texts) > 6
        assert max(len(set(text)) for text in texts) > 5


@pytest.mark.parametrize('arch', PRESETS)
def test_a_window_that_is_full_goes_on_from_its_last_half(arch):
    net = lively(arch)
    idx = torch.arange(20).view(1, 20)
    out = net.generate(idx, 14, temperature=0)[0]
    # text so far: where the window begins
    for length, start in {20: 4, **dict.fromkeys(range(21, 30), 13), 30: 22, 33: 22}.items():
        assert out[length] == net(out[None, start:length])[0].argmax(), length
    # up to block_size nothing is forgotten: nanoGPT's definition
    short = net.generate(idx[:, :3], 13, temperature=0)
    for t in range(3, 16):
        assert short[0, t] == net(short[:, :t])[0].argmax()


@pytest.mark.parametrize('arch', PRESETS)
@pytest.mark.parametrize('static', [False, True])
def test_a_cached_pass_gives_the_logits_of_the_whole_one_in_pieces_of_any_size(arch, static):
    net = lively(arch, n_kv_head=2)
    idx = random_ids(2, 16)
    want = net(idx, idx)[0]
    cache = KVCache(net, 2, 16, static)
    for pieces in [[1] * 16, [5, 1, 4, 6]]:
        cache.reset()
        got = [net(piece, piece, cache=cache)[0] for piece in idx.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(got, dim=1), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('sampling', [{}, dict(temperature=0.7, top_k=5), dict(top_p=0.8)])
def test_the_captured_step_draws_from_the_distribution(sampling, captured):
    net = lively('llama', vocab_size=10, n_layer=1)
    B = 6000
    idx = torch.full((B, 3), 4)
    out = net.generate(idx, 3, vocab_size=9, generator=torch.Generator().manual_seed(5), **sampling)
    # what comes after the pair drawn most often: the third new id was drawn by a captured step
    pairs, counts = out[:, 3:5].unique(dim=0, return_counts=True)
    pair = pairs[counts.argmax()]
    third = out[(out[:, 3:5] == pair).all(dim=1), 5]
    logits = net(torch.cat((idx[0], pair))[None])[0][0, -1, :9]
    want = torch.softmax(logits / sampling.get('temperature', 1.0), dim=0)
    ordered, ids = want.sort(descending=True)
    keep = torch.arange(9) < sampling.get('top_k', 9)
    if 'top_p' in sampling:
        keep &= ordered.cumsum(0) - ordered <= sampling['top_p']
    want[ids[~keep]] = 0
    shares = torch.bincount(third, minlength=9) / len(third)
    assert len(third) > 400
    torch.testing.assert_close(shares, want / want.sum(), atol=3 / math.sqrt(len(third)), rtol=0)


def test_a_captured_step_is_kept_for_the_same_shape_and_follows_seeds_stop_ids_and_weights(captured):
    net = lively('modern')
    idx = random_ids(2, 4)
    generator = torch.Generator().manual_seed(3)
    first = net.generate(idx, 50, generator=generator)
    step = net.captured
    then = net.generate(idx, 50, generator=generator)
    assert torch.equal(net.generate(idx, 50, generator=generator.manual_seed(3)), first)
    assert not torch.equal(first, then)
    assert net.captured is step
    net.generate(idx, 50, top_k=2)
    assert net.captured is not step
    plain = net.generate(idx, 50, temperature=0)
    for stop in range(0, 40, 5):
        ended = net.generate(idx, 50, temperature=0, stop_ids=[stop])
        captured(False)
        assert torch.equal(ended, net.generate(idx, 50, temperature=0, stop_ids=[stop]))
        captured(True)
    step = net.captured
    net.lm_head.weight = torch.nn.Parameter(-net.lm_head.weight.detach())  # lies elsewhere
    assert not torch.equal(net.generate(idx, 50, temperature=0), plain)
    assert net.captured is not step
    with torch.inference_mode():
        net.generate(idx, 50, temperature=0)
    assert copy.deepcopy(net).captured is None
    assert net.generate(idx, 50, temperature=0).shape == (2, 54)  # in another mode than the one before


@pytest.mark.parametrize('arch', ['gpt2', 'modern'])
def test_a_captured_step_can_be_compiled_as_one_graph(arch, captured):
    torch._dynamo.reset()
    net = lively(arch, n_kv_head=2)
    idx = random_ids(2, 3)
    want = net.generate(idx, 12, temperature=0)
    step = net.captured
    next_ids = torch.compile(step.next_ids, backend='eager', fullgraph=True, dynamic=False)
    step.cache.reset()
    with torch.no_grad():
        net.forward(idx, cache=step.cache)
        step.ids[:, 3] = want[:, 3]
        for _ in range(11):
            step.step(net, next_ids)
    assert torch.equal(step.ids[:, 4:15], want[:, 4:])


@pytest.mark.parametrize('arch', PRESETS)
def test_weights_in_bfloat16_keep_the_function(arch):
    net = lively(arch)
    idx = random_ids(2, 16)
    want = net(idx, idx)[0]
    for p in net.parameters():  # not the table of rotations: rounded angles would be other positions
        p.data = p.data.bfloat16()
    assert (net(idx, idx)[0].float() - want).norm() < 0.05 * want.norm()
    assert net.generate(idx, 20, temperature=0).shape == (2, 36)


# a tokenizer of letters: <|endoftext|> is 0
LETTERS = SimpleNamespace(
    n_vocab=27, end_of_text=0, stop_ids=[0], encode_prompt=lambda text: [ord(c) - 96 for c in text],
    decode=lambda ids: ''.join(chr(i + 96) if i else '<|endoftext|>' for i in ids))


def test_a_text_is_continued_up_to_its_end_or_to_a_stop_text():
    net = lively('gpt2', vocab_size=64)
    texts = [generate_text(net, LETTERS, 'abc', 30, seed=seed) for seed in range(20)]
    assert texts[3] == generate_text(net, LETTERS, 'abc', 30, seed=3)
    assert len(set(texts)) > 10
    assert all(text.startswith('abc') and 'endoftext' not in text for text in texts)
    assert min(map(len, texts)) < 33 and max(map(len, texts)) == 33
    longest = max(texts, key=len)
    stop = longest[10:12]
    seed = texts.index(longest)
    assert generate_text(net, LETTERS, 'abc', 30, seed=seed, stop=stop) == longest[:longest.index(stop, 3)]
    assert generate_text(net, LETTERS, '', 5, temperature=0).isalpha()
