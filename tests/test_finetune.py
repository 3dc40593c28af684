"""Finetuning: a model that is trained on text learns to answer from conversations."""

import json
import random

import pytest
from conftest import TINY, assert_close_run, assert_same_run, load_checkpoint

NETWORK = [
    '--arch=modern', '--n_layer=2', '--n_head=2', '--n_embd=64', '--block_size=64', '--batch_size=8',
    '--matrix_optimizer=muon', '--learning_rate=0.01', '--embedding_lr=0.1', '--momentum=0.85', '--beta1=0.8',
    '--adam_eps=1e-10', '--grad_clip=0', '--weight_decay=0', '--lr_schedule=wsd', '--warmup_iters=0',
]


def word(rng):
    return ''.join(rng.choice('abcdefgh') for _ in range(rng.randint(2, 4)))


@pytest.fixture(scope='module')
def chats(works, tmp_path_factory):
    """Return a folder with the datasets `text`, and `chats`, whose answers repeat a word of the question."""
    folder = tmp_path_factory.mktemp('chats')
    rng = random.Random(0)
    with open(folder / 'chats.jsonl', 'w') as f:
        for _ in range(2000):
            said = word(rng)
            row = {'messages': [{'role': 'user', 'content': f'say {said}'},
                                {'role': 'assistant', 'content': said}]}
            f.write(json.dumps(row) + '\n')
    (folder / 'text.txt').write_text(' '.join(word(rng) for _ in range(4000)))
    for args in ([folder / 'chats.jsonl', '--chat'], [folder / 'text.txt']):
        works('prepare.py', *args, '--tokenizer=byte', f'--data_dir={folder}')
    return folder


def test_a_finetuned_model_answers_new_questions(works, chats, tmp_path):
    flags = [*TINY, *NETWORK, f'--data_dir={chats}', '--eval_interval=0']
    works('train.py', *flags, '--dataset=text', '--max_iters=10', f"--out_dir={tmp_path / 'text'}")
    assert load_checkpoint(tmp_path / 'text')['model_args']['vocab_size'] == 257
    works('train.py', *flags, '--dataset=chats', '--max_iters=100', f"--out_dir={tmp_path / 'chat'}",
          f"--init_from={tmp_path / 'text'}")
    assert load_checkpoint(tmp_path / 'chat')['model_args']['vocab_size'] > 257  # the roles' ids
    rng = random.Random(1)
    words = [word(rng) for _ in range(50)]
    (tmp_path / 'questions.txt').write_text('\n'.join(f'say {said}' for said in words))
    result = works('sample.py', tmp_path / 'chat', '--chat', f"--prompts={tmp_path / 'questions.txt'}",
                   '--temperature=0', '--max_new_tokens=10', '--device=cpu')
    answers = result.out.split('\n')[:len(words)]
    n_right = sum(answer == said for answer, said in zip(answers, words))
    assert n_right >= 0.8 * len(words)


def test_all_starts_of_a_run_are_recorded(works, chats, tmp_path):
    out = tmp_path / 'out'
    flags = [*TINY, f'--data_dir={chats}', '--dataset=text', f'--out_dir={out}']
    works('train.py', *flags, '--max_iters=2')
    works('train.py', *flags, '--init_from=resume', '--max_iters=4')
    starts = json.loads((out / 'run.json').read_text())['starts']
    assert [start['from_iter'] for start in starts] == [0, 2]
    assert [start['init_from'] for start in starts] == ['scratch', 'resume']
    assert '--max_iters=4' in starts[1]['command'] and starts[0]['time'] <= starts[1]['time']
    ckpt = load_checkpoint(out)
    assert ckpt['starts'] == starts and ckpt['commit'] == starts[1]['commit']
    assert starts[0]['command'] in (out / 'report.md').read_text()
    (out / 'run.json').unlink()  # the checkpoint has them, too
    works('train.py', *flags, '--init_from=resume', '--max_iters=5')
    assert json.loads((out / 'run.json').read_text())['starts'][:2] == starts


def test_the_loss_is_the_mean_over_the_targets_of_all_micro_batches(works, chats, tmp_path):
    flags = [*TINY, f'--data_dir={chats}', '--dataset=chats', '--block_size=32']
    works('train.py', *flags, '--batch_size=8', f"--out_dir={tmp_path / 'one'}")
    works('train.py', *flags, '--batch_size=2', '--gradient_accumulation_steps=4', '--eval_iters=8',
          f"--out_dir={tmp_path / 'four'}")
    assert_close_run(tmp_path / 'one', tmp_path / 'four')


def test_a_resumed_finetuning_ends_with_the_same_bits(works, chats, tmp_path):
    flags = [*TINY, f'--data_dir={chats}', '--dataset=chats', '--lr_decay_iters=6', '--dropout=0.1']
    works('train.py', *flags, f"--out_dir={tmp_path / 'complete'}")
    works('train.py', *flags, f"--out_dir={tmp_path / 'parts'}", '--max_iters=2')
    works('train.py', *flags, f"--out_dir={tmp_path / 'parts'}", '--init_from=resume')
    assert_same_run(tmp_path / 'complete', tmp_path / 'parts')
