"""What helps where text is short: runs as teachers, noise in the input."""

import copy

import numpy as np
import pytest
import torch
from conftest import TINY, is_refused, make_dataset

from model import load


@pytest.fixture
def train(works, tmp_path):
    """train('a', *flags) -> Result of a tiny run in the folder a."""
    make_dataset(tmp_path)
    data = ['--dataset=tiny', f'--data_dir={tmp_path}']
    return lambda name, *flags: works('train.py', *TINY, *data, f'--out_dir={tmp_path / name}', *flags)


def test_teachers_count_seven_to_three_and_the_printed_loss_is_the_text_s(train, tmp_path):
    train('a'), train('b', '--seed=2')
    teachers = [f'{tmp_path}/a', f'{tmp_path}/b']
    untaught, taught = train('untaught', '--seed=3'), train('taught', '--seed=3', f"--teacher={','.join(teachers)}")
    assert taught.losses()[0] == untaught.losses()[0] and taught.losses()[5] != untaught.losses()[5]

    model, x, y = copy.deepcopy(taught.globals['model']).train(), *taught.globals['get_batch'](0, 0)[:2]
    y = y.index_fill(0, torch.tensor(0), -1)
    padded = model.forward.args[1][0]  # as GPT-2's vocabulary may be, or not
    padded.lm_head.weight = torch.nn.Parameter(torch.nn.functional.pad(padded.lm_head.weight, (0, 0, 0, 9)))
    loss = model(x, y)[1]
    loss.backward()
    assert not model(x[:1], y[:1])[1]  # no targets, no loss
    found = model.transformer.wte.weight.grad.clone()
    model.zero_grad()
    logits, text_loss = type(model).forward(model, x, y)
    wanted = sum(load(teacher)[0](x, full_logits=True)[0].softmax(-1) for teacher in teachers) / 2
    (0.3 * text_loss - 0.7 * (wanted * logits.log_softmax(-1)).sum(-1)[1:].mean()).backward()
    assert torch.equal(loss, text_loss)
    assert torch.allclose(found, model.transformer.wte.weight.grad, atol=1e-7)


def test_a_teacher_with_another_tokenizer_is_refused(train, script, tmp_path):
    train('a')
    make_dataset(tmp_path, 'other', 'zyx ' * 3000)
    is_refused(script('train.py', *TINY, '--dataset=other', f'--data_dir={tmp_path}',
                      f'--teacher={tmp_path}/a', f'--out_dir={tmp_path}/s'), 'another tokenizer')


def test_noise_changes_its_share_of_the_input_and_nothing_else(train):
    got = {}
    for noise in (0.0, 0.25):
        run = train(str(noise), f'--token_noise={noise}', '--batch_size=64')
        got[noise] = [run.globals['get_batch'](3, 0)[:2] for _ in range(2)]
    (x, y), (same_x, _) = got[0.25]
    clean_x, clean_y = got[0.0][0]
    assert torch.equal(x, same_x) and torch.equal(y, clean_y)
    chosen = np.asarray(clean_x)
    alike = (chosen.reshape(-1, 1) == chosen.reshape(1, -1)).mean()  # by chance a token becomes what it was
    assert float((x != clean_x).float().mean()) == pytest.approx(0.25 * (1 - alike), abs=0.04)
