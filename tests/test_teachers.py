"""What helps where text is short: runs averaged, runs as teachers, noise in the input."""

import re

import numpy as np
import pytest
import torch
from conftest import TINY, is_refused, make_dataset

from model import load


@pytest.fixture
def runs(script, tmp_path):
    """Two tiny runs on the same dataset, by their folders; and what every call says about the data."""
    make_dataset(tmp_path)
    data = ['--dataset=tiny', f'--data_dir={tmp_path}']
    for seed in (1, 2):
        run = script('train.py', *TINY, *data, f'--seed={seed}', f"--out_dir={tmp_path / 'runs' / str(seed)}")
        assert run.status == 0, run.err
    return [str(tmp_path / 'runs' / '1'), str(tmp_path / 'runs' / '2')], data


def test_several_runs_predict_the_mean_of_their_probabilities(runs, script, tmp_path):
    (a, b), data = runs
    ids = torch.arange(8).view(1, 8)
    alone = [load(run)[0](ids, full_logits=True)[0].softmax(-1) for run in (a, b)]
    both = load(f'{a},{b}')[0]
    assert torch.allclose(both(ids, full_logits=True)[0].softmax(-1), sum(alone) / 2, atol=1e-6)
    # with a cache as without one, one run or two
    for model in (both, load(a)[0]):
        by_cache = model.generate(ids, 8, temperature=0)
        by_hand = ids
        for _ in range(8):
            by_hand = torch.cat([by_hand, model(by_hand)[0][:, -1].argmax(-1, keepdim=True)], 1)
        assert by_cache.tolist() == by_hand.tolist()
    # both ways to name them, and the loss that the mean has
    losses = {}
    for names in (a, b, f'{a},{b}', str(tmp_path / 'runs')):
        result = script('eval.py', f'--out_dir={names}', *data, '--sample_tokens=0')
        assert result.status == 0, result.err
        losses[names] = float(re.search(r'tiny/val: loss ([0-9.]+)', result.out)[1])
    one, other, mean, same = losses.values()
    assert mean == same < (one + other) / 2 - 1e-3  # Jensen


def test_a_teacher_counts_seven_to_three_and_the_printed_loss_is_the_text_s(runs, script, tmp_path):
    (a, b), data = runs
    taught = script('train.py', *TINY, *data, '--seed=3', f"--teacher={tmp_path / 'runs'}",
                    f'--out_dir={tmp_path}/s')
    assert taught.status == 0, taught.err
    untaught = script('train.py', *TINY, *data, '--seed=3', f'--out_dir={tmp_path}/u')
    assert taught.losses()[0] == untaught.losses()[0] and taught.losses()[5] != untaught.losses()[5]

    names = taught.globals
    model, x, y = names['model'], *names['get_batch'](0, 0)[:2]
    model.train()
    model.zero_grad()
    loss = model(x, y)[1]
    loss.backward()
    found = model.transformer.wte.weight.grad.clone()
    model.zero_grad()
    logits, text_loss = type(model).forward(model, x, y)
    mean = torch.stack([load(run)[0](x, full_logits=True)[0].softmax(-1) for run in (a, b)]).mean(0)
    soft = -(mean * logits.log_softmax(-1)).sum(-1).mean()
    (0.3 * text_loss + 0.7 * soft).backward()
    assert torch.equal(loss, text_loss)
    assert torch.allclose(found, model.transformer.wte.weight.grad, atol=1e-7)


def test_a_teacher_with_another_tokenizer_is_refused(runs, script, tmp_path):
    (a, _), _ = runs
    make_dataset(tmp_path, 'other', 'zyx ' * 3000)
    is_refused(script('train.py', *TINY, '--dataset=other', f'--data_dir={tmp_path}', f'--teacher={a}',
                      f'--out_dir={tmp_path}/s'), 'another tokenizer')


def test_noise_changes_its_share_of_the_input_and_nothing_else(runs, script, tmp_path):
    _, data = runs
    got = {}
    for noise in (0.0, 0.25):
        run = script('train.py', *TINY, *data, f'--token_noise={noise}', '--batch_size=64',
                     f'--out_dir={tmp_path}/{noise}')
        assert run.status == 0, run.err
        got[noise] = [run.globals['get_batch'](3, 0)[:2] for _ in range(2)]
    (x, y), (same_x, _) = got[0.25]
    clean_x, clean_y = got[0.0][0]
    assert torch.equal(x, same_x) and torch.equal(y, clean_y)
    chosen = np.asarray(clean_x)
    alike = (chosen.reshape(-1, 1) == chosen.reshape(1, -1)).mean()  # by chance a token becomes what it was
    assert float((x != clean_x).float().mean()) == pytest.approx(0.25 * (1 - alike), abs=0.04)
