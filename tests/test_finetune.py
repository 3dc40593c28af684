"""Finetuning on conversations: a model of text becomes one that answers."""

import json
import random

import pytest
import torch
from conftest import TINY, assert_equal, load_checkpoint, losses_of, run_script

NETWORK = [
    '--arch=modern', '--n_layer=2', '--n_head=2', '--n_embd=64', '--block_size=64', '--batch_size=8',
    '--matrix_optimizer=muon', '--learning_rate=0.01', '--embedding_lr=0.1', '--momentum=0.85', '--beta1=0.8',
    '--adam_eps=1e-10', '--grad_clip=0', '--weight_decay=0', '--lr_schedule=wsd', '--warmup_iters=0',
]


def word(rng):
    return ''.join(rng.choice('abcdefgh') for _ in range(rng.randint(2, 4)))


@pytest.fixture(scope='module')
def chats(tmp_path_factory):
    """Return a folder with the dataset `chats`, whose answers repeat a word of the question, and `text`."""
    folder = tmp_path_factory.mktemp('chats')
    rng = random.Random(0)
    with open(folder / 'chats.jsonl', 'w') as f:
        for _ in range(2000):
            said = word(rng)
            row = {'messages': [{'role': 'user', 'content': f'say {said}'},
                                {'role': 'assistant', 'content': said}]}
            f.write(json.dumps(row) + '\n')
    (folder / 'text.txt').write_text(' '.join(word(rng) for _ in range(4000)))
    for args in (['chats.jsonl', '--chat'], ['text.txt']):
        result = run_script('prepare.py', *args, '--tokenizer=byte', '--data_dir=data', cwd=folder)
        assert result.returncode == 0, result.stderr
    return folder / 'data'


def test_a_finetuned_model_answers_new_questions(works, chats, tmp_path):
    flags = [*TINY, *NETWORK, f'--data_dir={chats}', '--eval_interval=0']
    works('train.py', *flags, '--dataset=text', '--max_iters=10', f"--out_dir={tmp_path / 'text'}")
    assert load_checkpoint(tmp_path / 'text')['model_args']['vocab_size'] == 257
    works('train.py', *flags, '--dataset=chats', '--max_iters=150', f"--out_dir={tmp_path / 'chat'}",
          f"--init_from={tmp_path / 'text'}")
    assert load_checkpoint(tmp_path / 'chat')['model_args']['vocab_size'] > 257  # the roles' ids
    rng = random.Random(1)
    words = [word(rng) for _ in range(50)]
    (tmp_path / 'questions.txt').write_text('\n'.join(f'say {said}' for said in words))
    result = works('sample.py', tmp_path / 'chat', '--chat', f"--prompts={tmp_path / 'questions.txt'}",
                   '--temperature=0', '--max_new_tokens=10', '--device=cpu')
    answers = result.out.split('\n')[:len(words)]
    n_right = sum(answer == said for answer, said in zip(answers, words))
    assert n_right >= 0.9 * len(words)


def test_all_starts_of_a_run_are_recorded(works, chats, tmp_path):
    flags = [*TINY, f'--data_dir={chats}', '--dataset=text', '--max_iters=2']
    works('train.py', *flags, f"--out_dir={tmp_path / 'a'}")
    out = tmp_path / 'b'
    works('train.py', *flags, f'--out_dir={out}', f"--init_from={tmp_path / 'a'}")
    works('train.py', *flags, f'--out_dir={out}', '--init_from=resume', '--max_iters=4')
    starts = json.loads((out / 'run.json').read_text())['starts']
    assert [start['from_iter'] for start in starts] == [0, 2]
    assert [start['init_from'] for start in starts] == [str(tmp_path / 'a'), 'resume']
    assert '--max_iters=4' in starts[1]['command'] and starts[0]['time'] <= starts[1]['time']
    ckpt = load_checkpoint(out)
    assert ckpt['starts'] == starts and ckpt['commit'] == starts[1]['commit']
    assert starts[0]['command'] in (out / 'report.md').read_text()
    (out / 'run.json').unlink()  # they are in the checkpoint as well
    works('train.py', *flags, f'--out_dir={out}', '--init_from=resume', '--max_iters=5')
    assert json.loads((out / 'run.json').read_text())['starts'][:2] == starts


def test_the_loss_is_the_mean_over_the_targets_of_all_micro_batches(works, chats, tmp_path):
    flags = [*TINY, f'--data_dir={chats}', '--dataset=chats', '--block_size=32']
    works('train.py', *flags, '--batch_size=8', f"--out_dir={tmp_path / 'one'}")
    works('train.py', *flags, '--batch_size=2', '--gradient_accumulation_steps=4', '--eval_iters=8',
          f"--out_dir={tmp_path / 'four'}")
    for row, other in zip(losses_of(tmp_path / 'one'), losses_of(tmp_path / 'four'), strict=True):
        assert float(row[1]) == pytest.approx(float(other[1]), abs=1e-5)
    torch.testing.assert_close(load_checkpoint(tmp_path / 'one')['model'],
                               load_checkpoint(tmp_path / 'four')['model'], atol=1e-4, rtol=1e-3)


def test_a_resumed_finetuning_ends_with_the_same_bits(works, chats, tmp_path):
    flags = [*TINY, f'--data_dir={chats}', '--dataset=chats', '--lr_decay_iters=6', '--dropout=0.1']
    works('train.py', *flags, f"--out_dir={tmp_path / 'whole'}")
    works('train.py', *flags, f"--out_dir={tmp_path / 'parts'}", '--max_iters=2')
    works('train.py', *flags, f"--out_dir={tmp_path / 'parts'}", '--init_from=resume')
    assert_equal(load_checkpoint(tmp_path / 'whole')['model'], load_checkpoint(tmp_path / 'parts')['model'])
    assert losses_of(tmp_path / 'whole') == losses_of(tmp_path / 'parts')
