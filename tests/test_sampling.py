"""Fast generation gives the same texts as GPT.generate(), its definition."""

import gc
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from test_model import lively, random_ids
from torch.nn import functional as F

from flatgpt import sampling
from flatgpt.sampling import Sampler, generate_text, sample_next
from flatgpt.tokenizer import make_tokenizer
from model import GPT, PRESETS, GPTConfig


@pytest.fixture(params=[False, True])
def capture(request):
    """Return whether to run the step that is captured on a GPU, here as plain code."""
    return request.param


def test_sampling_is_greedy_at_zero_and_keeps_to_top_k_and_top_p():
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0, 3.0]]).repeat(2000, 1)  # the most likely token has 0.62
    for options, want in [(dict(temperature=0), {4}), (dict(top_k=2), {4, 0}), (dict(top_p=0.7), {4, 0}),
                          (dict(top_k=3, top_p=0.99), {4, 0, 1})]:
        assert set(sample_next(logits, **options)[:, 0].tolist()) == want, options
    assert sample_next(torch.zeros(500, 8), top_k=3).unique().numel() == 3  # also with ties


def test_an_id_of_probability_zero_is_not_drawn_if_the_noise_is_zero():
    logits = torch.tensor([[-1.0, 2.0, 1.0, 3.0, -torch.inf]])
    assert sample_next(logits, noise=torch.zeros(1, 5)).item() == 3
    assert sample_next(logits, top_p=0.7, noise=torch.zeros(1, 5)).item() in (3, 1)


def test_a_sampler_draws_each_token_independently_from_the_distribution(capture):
    # initialized blocks of modern add nothing, so that this network is a bigram model
    torch.manual_seed(0)
    net = GPT(GPTConfig(arch='modern', block_size=16, vocab_size=10, n_layer=1, n_head=1, n_embd=16)).eval()
    torch.nn.init.normal_(net.lm_head.weight, std=0.5)
    sampler = Sampler(net, 3000, 6, temperature=0.7, top_k=5, vocab_size=9, capture=capture)
    idx = sampler.generate(torch.zeros(3000, 1, dtype=torch.long), 5)
    logits = net(idx, idx)[0][:, :-1, :9] / 0.7
    probs = logits.masked_fill(logits < logits.topk(5).values[..., -1:], -math.inf).softmax(-1)  # (B, 5, 9)
    shares = F.one_hot(idx[:, 1:], 9).float().mean(dim=0)
    torch.testing.assert_close(shares, probs.mean(dim=0), atol=0.03, rtol=0)
    assert not torch.equal(shares[2], shares[3])


def test_a_sampler_keeps_the_prompt_draws_no_padding_and_follows_its_seed(capture):
    net = lively('gpt2', block_size=8)
    idx = random_ids(3, 5, vocab_size=30)
    sampler = Sampler(net, 3, 17, vocab_size=30, capture=capture)
    out = sampler.generate(idx, 12, seed=1)
    assert torch.equal(out[:, :5], idx) and out.max() < 30
    assert not torch.equal(out, sampler.generate(idx, 12, seed=2))
    assert torch.equal(out, sampler.generate(idx, 12, seed=1))
    torch.manual_seed(5)
    first = sampler.generate(idx, 12)
    assert not torch.equal(first, sampler.generate(idx, 12))
    torch.manual_seed(5)
    assert torch.equal(first, sampler.generate(idx, 12))


def test_more_ids_than_a_sampler_was_made_for_are_refused(capture):
    sampler = Sampler(lively('gpt2', block_size=256), 1, 100, capture=capture)
    with pytest.raises(AssertionError, match='max_length'):
        sampler.generate(random_ids(1, 100), 60)


def test_a_sampler_and_its_cache_are_freed_with_the_last_reference(capture):
    sampler = Sampler(lively('gpt2'), 1, 16, capture=capture)
    sampler.generate(random_ids(1, 4), 9)
    references = [weakref.ref(sampler), weakref.ref(sampler.cache)]
    gc.disable()
    try:
        del sampler
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_logits_that_are_not_finite_are_an_error(capture):
    net = lively('gpt2')
    with torch.no_grad():
        net.transformer.wpe.weight[7] = torch.nan
    seen = []
    with pytest.raises(FloatingPointError):
        Sampler(net, 1, 13, capture=capture).generate(random_ids(1, 4), 9, on_tokens=seen.append)
    assert len(seen) <= 4  # position 6 is the last one without NaN


@pytest.mark.parametrize('arch', PRESETS)
@pytest.mark.parametrize('block_size', [16, 1])
def test_cache_and_captured_step_give_generates_text_and_continue_from_half_of_a_full_context(
        arch, block_size, capture):
    net = lively(arch, block_size=block_size, n_kv_head=1)
    for B, T in [(1, 15), (3, 1), (3, 7), (2, 20)]:
        idx = random_ids(B, T, seed=T)
        seen = []
        sampler = Sampler(net, B, 60, temperature=0, capture=capture)
        out = sampler.generate(idx, 40, on_tokens=seen.append)
        assert torch.equal(torch.cat((idx, *seen), dim=1), out)
        assert block_size == 1 or len(out[:, T:].unique()) > 1  # else all texts are equal
        assert torch.equal(out[:, :16], net.generate(idx, max(0, 16 - T), top_k=1)[:, :16])
        start = max(0, T - block_size)
        for length in range(T, T + 40):
            if length - start > block_size:
                start = length - (block_size + 1) // 2
            assert torch.equal(out[:, length], net(out[:, start:length])[0][:, -1].argmax(-1)), length


# a tokenizer of letters, in which <|endoftext|> is 0
LETTERS = SimpleNamespace(
    n_vocab=27, end_of_text=0, stop_ids=[0], encode_prompt=lambda text: [ord(c) - 96 for c in text],
    decode=lambda ids: ''.join(chr(i + 96) if i else '<|endoftext|>' for i in ids))


def test_a_text_ends_before_end_of_text_or_a_stop_text(capture):
    net = lively('gpt2', vocab_size=64)
    sampler = Sampler(net, 1, 33, vocab_size=27, capture=capture)
    texts = []
    for seed in range(10):
        text = generate_text(net, LETTERS, 'abc', 30, seed=seed, sampler=sampler)
        stopped = generate_text(net, LETTERS, 'abc', 30, seed=seed, stop='k', sampler=sampler)
        assert text.startswith('abc') and 'endoftext' not in text
        assert stopped == 'abc' + text[3:].partition('k')[0]
        texts.append(text)
    lengths = [len(text) for text in texts]
    assert min(lengths) < 33 and max(lengths) == 33
    if not capture:  # as by the sampler that generate_text makes
        assert generate_text(net, LETTERS, 'abc', 30, seed=1) == texts[1]


# -----------------------------------------------------------------------------
# the samples of a training run


def test_the_gaps_between_samples_grow_and_follow_from_the_iteration():
    def steps(interval, growth):
        return [it for it in range(1, 1200) if sampling.next_sample_step(it, interval, growth) == it]
    assert steps(100, 1.5) == [100, 250, 475, 812]
    assert steps(300, 1.0) == steps(300, 0.5) == [300, 600, 900]


def test_only_prompts_that_the_tokenizer_can_encode_are_sampled():
    letters = make_tokenizer({'kind': 'char', 'chars': 'The '})
    assert sampling.prompts_for_samples(None, letters) == ['', 'The ']
