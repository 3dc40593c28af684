"""Losses and bits per byte, compared with computations target by target."""

import contextlib
import copy
import math

import numpy as np
import pytest
import torch
from conftest import TEXT, char_dataset
from torch.nn import functional as F

from flatgpt import evaluation
from flatgpt.dataset import Dataset
from flatgpt.processes import warm_up
from model import GPT, GPTConfig

PLAIN = contextlib.nullcontext()  # no autocast


def learn(net, ids, n_steps, T):
    """Train on sequences of T + 1 ids."""
    ids = torch.tensor(np.asarray(ids).astype('int64'))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(n_steps):
        x = torch.stack([ids[s:s + T + 1] for s in torch.randint(len(ids) - T, (8,))])
        net(x[:, :-1], x[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()


def save_model(folder, net, tokenizer_state=None, **more):
    """folder/ckpt.pt with nanoGPT's keys and, if it is given, a tokenizer."""
    folder.mkdir(exist_ok=True)
    state = {'model': net.state_dict(), 'model_args': net.config.model_args(), 'iter_num': 7,
             'best_val_loss': 1.0, 'config': {'dataset': 'toy'}, **more}
    if tokenizer_state:
        state['tokenizer'] = tokenizer_state
    torch.save(state, folder / 'ckpt.pt')
    return folder


def small_model(vocab_size, **sizes):
    torch.manual_seed(1)
    defaults = {'block_size': 16, 'n_layer': 2, 'n_head': 2, 'n_embd': 32}
    return GPT(GPTConfig(**{**defaults, 'vocab_size': vocab_size, **sizes})).eval()


# -----------------------------------------------------------------------------
# the loss of a text


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """Characters, some of which have two bytes."""
    folder = tmp_path_factory.mktemp('accents')
    return Dataset('toy', char_dataset(folder, text=TEXT[:9000].replace('is', '\u00e9\u00e9')), 16)


def test_the_loss_and_bits_per_byte_are_those_of_all_targets_one_by_one(data):
    net = small_model(data.vocab_size)
    split = copy.copy(data.val)
    # as if 0, a new line, were no text
    split.token_bytes = split.token_bytes * (np.arange(data.vocab_size) > 0)
    ids = torch.from_numpy(split.read([0], split.n)[0])
    nats = []
    for start in range(0, len(ids) - 1, 16):  # the last sequence is shorter
        part = ids[start:start + 17]
        logits = net(part[None, :-1], part[None, 1:])[0][0]
        nats.append(F.cross_entropy(logits, part[1:], reduction='none'))
    nats = torch.cat(nats)
    text = data.tokenizer.decode(ids[1:].tolist()).replace('\n', '')
    bits = nats[ids[1:] > 0].sum().item() / math.log(2)
    for batch_size in (1, 7, 1000):
        found = evaluation.text_loss(net, split, 0, batch_size, PLAIN)
        assert found['tokens'] == len(nats) and found['bytes'] == len(text.encode()) > len(text)
        assert found['loss'] == pytest.approx(nats.mean().item(), rel=1e-5)
        assert found['bpb'] == pytest.approx(bits / found['bytes'], rel=1e-5)
    split.token_bytes = 0 * split.token_bytes
    assert evaluation.text_loss(net, split, 0, 7, PLAIN)['bpb'] is None


def test_the_standard_error_is_the_spread_over_other_sequences():
    torch.manual_seed(0)
    nats = torch.rand(200, 40).double()
    found = [evaluation.ratio_of_sums(row, torch.full((40,), 16.0)) for row in nats]
    losses, errors = np.array(found).T
    assert np.std(losses) == pytest.approx(np.mean(errors), rel=0.15)


def test_all_processes_have_the_same_number_of_batches_and_share_the_work():
    shares = [list(evaluation.share_of_range(7, (rank, rank, 3))) for rank in range(3)]
    assert [len(share) for share in shares] == [3, 3, 3], 'FSDP needs all of them each time'
    assert sorted(i for i, is_repeat in sum(shares, []) if not is_repeat) == list(range(7))


def test_where_the_compiler_has_failed_the_model_is_evaluated_eagerly(data):
    def broken(graph, inputs):
        raise RuntimeError('no working triton')

    net = small_model(data.vocab_size)
    want = evaluation.text_loss(net, data.val, 32, 4, PLAIN)
    net.train()
    net.compile(backend=broken)
    try:
        assert not warm_up(net, 2, 16, False, PLAIN, 'cpu', optional=True)
        assert evaluation.text_loss(net.eval(), data.val, 32, 4, PLAIN) == want
        assert net(torch.zeros(1, 4, dtype=torch.long))[0].isfinite().all()
    finally:
        torch.compiler.set_stance('default')
        torch.compiler.reset()
