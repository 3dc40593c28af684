"""The network is nanoGPT's: the numbers that nanoGPT itself gave for the same weights (dev/record_nanogpt.py)
come out again."""

import copy
import math

import pytest
import record_nanogpt
import torch
import torch._dynamo.testing
from conftest import REPO
from torch.nn import functional as F

from model import GPT, PRESETS, GPTConfig, KVCache, sample_next
from support import cpu
from support.cpu import RMSNorm, scaled_dot_product_attention
from support.devices import peak_flops_of
from support.files import read_json

CPU = torch.device('cpu')

RECORD = read_json(REPO / 'tests' / 'reference' / 'nanogpt.json')


@pytest.mark.parametrize('shape', record_nanogpt.SHAPES)
def test_a_seed_gives_nanogpts_weights_and_those_its_logits_loss_and_gradients(shape):
    torch.manual_seed(0)
    got = record_nanogpt.measure(GPT(GPTConfig(**record_nanogpt.SHAPES[shape])))
    want = RECORD[shape]
    assert got['names'] == want['names'] and set(got['grads']) == set(want['grads'])
    for key in ('loss', 'logits', 'last'):
        torch.testing.assert_close(torch.tensor(got[key]), torch.tensor(want[key]), atol=1e-5, rtol=1e-5)
    for name in want['grads']:
        assert got['initial'][name] == pytest.approx(want['initial'][name])
        assert got['grads'][name] == pytest.approx(want['grads'][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize('arch', PRESETS)
def test_the_flop_count_is_that_of_the_matrix_products_and_attention(arch):
    # torch counts what really runs: its counter sees the matrix products and SDPA, forward and backward
    from torch.utils.flop_counter import FlopCounterMode
    net = GPT(GPTConfig(block_size=32, vocab_size=64, n_layer=2, n_head=4, n_embd=32, arch=arch, n_kv_head=1))
    first, *_, last = net.transformer.h
    last.mlp = first.mlp  # computed twice, as in ALBERT
    idx = torch.zeros(1, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        net(idx, idx)[1].backward()
    per_op = counter.get_flop_counts()['Global']
    products = sum(n for op, n in per_op.items() if 'scaled_dot' not in str(op) and 'flash' not in str(op))
    # the rest of our count is attention, 12 L C T per token
    assert net.flops_per_token() * 32 == products + 12 * 2 * 32 * 32 * 32


def test_gpt2_has_the_published_number_of_parameters_and_flops():
    sizes = dict(block_size=4096, vocab_size=32000, n_layer=32, n_head=32, n_embd=4096, mlp_width=11008)
    with torch.device('meta'):
        gpt2, net = GPT(GPTConfig(vocab_size=50257)), GPT(GPTConfig(bias=False))
        llama = GPT(GPTConfig(arch='llama', **sizes))
    assert gpt2.get_num_params(non_embedding=False) == 124439808  # GPT-2's, as Hugging Face counts it
    assert net.flops_per_token() == pytest.approx(0.855e9, rel=1e-3)
    assert llama.get_num_params(non_embedding=False) == 6738415616  # Llama 2 7B, as Hugging Face counts it
    assert llama.get_num_params() == 6738415616 - 32000 * 4096
    assert math.isnan(net.estimate_mfu(4, 0.5))
    assert net.estimate_mfu(4, 0.5, peak_flops=1e12) == pytest.approx(0.855 * 1024 * 4 / 500, rel=1e-3)


@pytest.mark.parametrize('name, peak', [
    ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA H100 PCIe', 756e12), ('NVIDIA RTX A4000', None)])
def test_a_gpu_s_peak_is_found_by_its_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: name)
    assert peak_flops_of(torch.device('cuda')) == peak and peak_flops_of(torch.device('cpu')) is None


def test_sampling_is_greedy_at_zero_and_keeps_to_top_k_top_p_and_the_vocabulary():
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0, 3.0]]).repeat(4000, 1)
    shares = torch.bincount(sample_next(logits, 1.0)[:, 0], minlength=5) / 4000
    torch.testing.assert_close(shares, torch.softmax(logits[0], 0), atol=0.03, rtol=0)
    for options, want in (
            (dict(temperature=0), {4}), (dict(temperature=1e-40), {4}), (dict(top_k=2), {4, 0}),
            (dict(top_k=99), {0, 1, 2, 3, 4}), (dict(top_p=0.5), {4}),  # the likeliest alone has 0.62
            (dict(top_p=0.7), {4, 0}), (dict(top_p=1e-9), {4})):
        assert set(sample_next(logits, **options)[:, 0].tolist()) == want, options
    assert sample_next(torch.zeros(500, 8), top_k=3).unique().numel() == 3  # ties do not keep more than k


def test_generate_keeps_the_prompt_crops_the_context_and_stops():
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=2, n_embd=16)).eval()
    idx = torch.randint(50, (3, 5))
    seen, generator = [], torch.Generator().manual_seed(1)
    out = net.generate(idx, 12, vocab_size=50, generator=generator, on_token=seen.append)
    again = net.generate(idx, 12, vocab_size=50, generator=generator.manual_seed(1))
    assert torch.equal(out, torch.cat((idx, *seen), dim=1)) and out.shape == (3, 17) and out.max() < 50
    assert torch.equal(out, again)
    assert net.generate(idx, 9, on_token=lambda ids: True).shape == (3, 6)
    greedy = net.generate(idx, 3, temperature=0)
    assert torch.equal(greedy[:, 6:7], net(greedy[:, :6], full_logits=False)[0].argmax(-1))
    first = net.generate(idx[:1], 1, temperature=0)[0, -1].item()
    assert net.generate(idx[:1], 9, temperature=0, stop=first).shape == (1, 6)


def lively(arch, **args):
    """A net whose greedy text wanders: random weights wide enough that positions and context matter, the
    zeros of `modern` too."""
    torch.manual_seed(1)
    sizes = dict(block_size=16, vocab_size=40, n_layer=2, n_head=4, n_embd=32)
    net = GPT(GPTConfig(arch=arch, **{**sizes, **args})).eval()
    for name, p in net.named_parameters():
        if p.dim() > 1 or '.conv.' in name:
            torch.nn.init.normal_(p, std=0.02 if 'wte' in name and not net.config.tie else 0.3)
    return net


@pytest.mark.parametrize('arch', PRESETS)
def test_the_cache_changes_no_text_at_any_length_also_across_the_edge(arch):
    for block_size in (16, 1):
        net = lively(arch, n_kv_head=1, block_size=block_size)
        texts = set()
        for B in (1, 3):
            for T in (1, 15, 17):
                idx = torch.randint(40, (B, T), generator=torch.Generator().manual_seed(T))
                cached, plain = (net.generate(idx, 30, temperature=0, use_cache=on) for on in (True, False))
                assert cached.shape == (B, T + 30) and torch.equal(cached, plain), (block_size, B, T)
                texts.update(map(tuple, cached[:, T:].tolist()))
        if block_size > 1:  # texts that could differ
            assert len(texts) > 6 and max(len(set(text)) for text in texts) > 5


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
    idx = torch.randint(40, (2, 16))
    want = net(idx, full_logits=True)[0]
    for pieces in ([1] * 16, [5, 1, 4, 6]):
        cache = KVCache(net, 2, 16, static)
        got = [net(piece, full_logits=True, cache=cache.advance(piece.size(1)))[0]
               for piece in idx.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(got, dim=1), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('arch', PRESETS)
def test_a_compiled_step_is_compiled_once_and_changes_no_text(arch):
    torch._dynamo.reset()
    net = lively(arch, n_kv_head=2)
    idx = torch.randint(40, (2, 3))
    want = net.generate(idx, 40, temperature=0)
    counter = torch._dynamo.testing.CompileCounter()
    net.compile(backend=counter, fullgraph=True, dynamic=False)
    for _ in range(2):
        assert torch.equal(net.generate(idx, 40, temperature=0, static=True), want)
    assert counter.frame_count == 1


@pytest.mark.parametrize('arch', PRESETS)
def test_weights_for_inference_keep_the_function(arch):
    net = lively(arch, bias=True if arch == 'gpt2' else None)
    net.lm_head.__class__ = type('Edited', (torch.nn.Linear,), {'forward': lambda self, x: 3 * F.linear(x, self.weight)})
    idx = torch.randint(40, (2, 16))
    want = net(idx, full_logits=True)[0]
    exact = cpu.to_inference(copy.deepcopy(net), CPU, 'float32')
    torch.testing.assert_close(exact(idx, full_logits=True)[0], want, rtol=1e-4, atol=1e-5)
    cpu.to_inference(net, CPU, 'bfloat16')
    assert (net(idx, full_logits=True)[0].float() - want).norm() < 0.05 * want.norm()
    assert net.rope is None or net.rope.dtype == torch.float32  # rounded angles would be other positions
    assert net.generate(idx, 20, temperature=0).shape == (2, 36)


@pytest.mark.parametrize('arch', PRESETS)
def test_every_preset_begins_at_ln_v_learns_and_sees_no_future(arch):
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=16, vocab_size=50, n_layer=2, n_head=2, n_embd=32, arch=arch))
    idx = torch.randint(50, (4, 17))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = net(idx[:, :-1], idx[:, 1:])[1]
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(50), abs=0.2) and losses[-1] < 0.5
    changed = idx[:, :16].clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    a, b = net(idx[:, :16], full_logits=True)[0], net(changed, full_logits=True)[0]
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:])


@pytest.mark.parametrize('arch', ['gpt2', 'llama'])
def test_cropping_keeps_the_function_of_short_inputs(arch):
    net = lively(arch, block_size=8)
    idx = torch.arange(4).view(1, 4)
    before = net(idx)[0]
    net.crop_block_size(4)
    assert torch.equal(net(idx)[0], before)
    with pytest.raises(AssertionError):
        net(torch.arange(5).view(1, 5))


def test_an_arch_sets_the_parts_that_are_not_given_and_a_checkpoint_has_them_all():
    config = GPTConfig(arch='modern', softcap=0.0, n_kv_head=4)
    assert (config.norm, config.softcap, config.n_kv_head, config.tie) == ('rmsnorm_plain', 0.0, 4, False)
    assert GPTConfig(arch='llama', n_embd=512).mlp_width == 1408
    assert None not in config.model_args().values() and GPTConfig(**config.model_args()) == config
    # a GPT-2 of ours goes into nanoGPT's GPTConfig
    assert set(GPTConfig(bias=False).model_args()) == set(record_nanogpt.SHAPES['bias'])
    assert GPTConfig(**GPTConfig(mlp='gelu_tanh').model_args()).mlp == 'gelu_tanh'


def test_a_local_checkpoint_from_before_its_near_layer_stays_what_it_was(tmp_path):
    before = lively('local', near_layers=0)
    args = before.config.model_args()
    assert args.pop('near_layers') == 0
    torch.save({'model': before.state_dict(), 'model_args': args}, tmp_path / 'ckpt.pt')
    after = GPT.from_pretrained(f'{tmp_path}/ckpt.pt').eval()
    assert after.config.near_layers == 0 and len(after.transformer.h) == 2
    idx = torch.randint(40, (2, 9))
    assert torch.equal(after(idx)[0], before(idx)[0])


def test_a_near_layer_sees_three_positions_and_no_further():
    net = lively('local', n_layer=1)
    assert [block.attn is None for block in net.transformer.h] == [True, False]
    seen = []
    net.transformer.h[0].register_forward_hook(lambda block, inputs, output: seen.append(output))
    idx = torch.randint(40, (1, 12))
    for changed in (idx, torch.cat((idx[:, :4] + 1, idx[:, 4:]), dim=1) % 40):
        net(changed)
    # of position 3 the pair of position 4 knows, and its convolution reaches as far as 7
    assert not torch.isclose(*seen).all(dim=-1)[0, :8].any() and torch.equal(seen[0][0, 8:], seen[1][0, 8:])


@pytest.mark.parametrize('args, word', [
    (dict(arch='gpt3'), 'gpt2, llama, modern, local'), (dict(n_head=5), 'n_embd=768'),
    (dict(n_kv_head=5), '--n_kv_head=1'), (dict(arch='llama', n_embd=36, n_head=4), '--n_embd=40'),
    (dict(arch='llama', rope_scaling='yarn:2'), 'llama3:'), (dict(arch='modern', tie=True), '--tie=False'),
])
def test_parts_that_make_no_sense_together_are_refused_with_the_reason(args, word):
    assert any(word in problem for problem in GPTConfig(**args).problems())
    with pytest.raises(ValueError):
        GPT(GPTConfig(**args))


def test_the_initialisation_of_modern_keeps_its_rules():
    torch.manual_seed(0)
    config = GPTConfig(block_size=32, vocab_size=512, n_layer=8, n_head=4, n_embd=256, arch='modern')
    for name, p in GPT(config).named_parameters():
        want = 1 if 'wte' in name else 768 ** -0.5
        if name.endswith(('c_proj.weight', 'lm_head.weight')):
            want = 0
        assert p.std().item() == pytest.approx(want, rel=0.05), name


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_our_rmsnorm_is_torchs(dtype):
    torch.manual_seed(0)
    norms = RMSNorm(24, eps=1e-5), torch.nn.RMSNorm(24, eps=1e-5)
    weight, x, grad = torch.randn(24), torch.randn(5, 7, 24).to(dtype), torch.randn(5, 7, 24)
    tolerance = dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else dict(atol=0.05, rtol=0.02)
    found = []
    for norm in norms:
        norm.weight.data, a = weight, x.clone().requires_grad_()
        y = norm(a).float()
        y.backward(grad.to(dtype).float())
        found.append((y, a.grad, norm.weight.grad))
    torch.testing.assert_close(*found, **tolerance)


def test_an_attention_and_norms_of_yours_are_not_replaced_by_ours():
    def mine(*args, **kwargs):
        raise RuntimeError('mine')
    net = GPT(GPTConfig(block_size=8, vocab_size=8, n_layer=1, n_head=1, n_embd=8))
    net.transformer.h[0].attn.scaled_dot_product_attention = mine
    net.norms = torch.nn.ModuleList([torch.nn.RMSNorm((4, 8), 1e-5), torch.nn.RMSNorm(8)])
    cpu.faster(net)
    assert {type(norm) for norm in net.norms} == {torch.nn.RMSNorm}
    with pytest.raises(RuntimeError, match='mine'):
        net(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize('kind', ['causal', 'mask', 'mask of texts'])
@pytest.mark.parametrize('K', [4, 2])
def test_attention_in_bfloat16_on_a_cpu_is_torchs(kind, K):
    B, H, T, D = 3, 4, 24, 16
    texts = torch.arange(T).div(torch.tensor([[7], [24], [1]]), rounding_mode='floor')
    mask = {'causal': None, 'mask': torch.ones(T, T, dtype=torch.bool).tril(),
            'mask of texts': GPT.attention_mask(None, torch.arange(T), T, texts)}[kind]
    found = []
    for attend, dtype in ((scaled_dot_product_attention, torch.bfloat16),
                          (F.scaled_dot_product_attention, torch.float32)):
        torch.manual_seed(2)
        q, k, v = (torch.randn(B, n, T, D).to(dtype).requires_grad_() for n in (H, K, K))
        y = attend(q, k, v, mask, is_causal=kind == 'causal', enable_gqa=K < H)
        y.float().square().sum().backward()
        found.append([t.float() for t in (y, q.grad, k.grad, v.grad)])
    torch.testing.assert_close(*found, atol=0.15, rtol=0.05)
