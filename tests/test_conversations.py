"""Conversations: the forms of rows, token ids and masks as in nanochat, and packing."""

import hashlib
import json

import numpy as np
import pytest
from conftest import TEXT

from configurator import InputError
from flatgpt.conversations import chat_format, converse, fit_prompt, messages_of, with_chat_tokens
from flatgpt.dataset import Dataset
from flatgpt.tokenizer import learn_bpe, make_tokenizer

SYSTEM = {'role': 'system', 'content': 'Be brief.'}
TALK = [
    {'role': 'user', 'content': 'Add 1 and 2.'}, {'role': 'assistant', 'content': '3'},
    {'role': 'user', 'content': 'And 4?'}, {'role': 'assistant', 'content': '7, na\u00efvely'},
]
CHARS = ''.join(sorted(set('Be brief.\n' + ''.join(message['content'] for message in TALK))))


def plain_tokenizer(kind):
    if kind == 'bpe':
        pytest.importorskip('tokenizers')
        return learn_bpe(300, [TEXT])
    if kind == 'hf':  # with a begin-of-sequence token
        tokenizers = pytest.importorskip('tokenizers')
        learner = tokenizers.ByteLevelBPETokenizer()
        learner.train_from_iterator([TEXT], vocab_size=290, special_tokens=['<s>'])
        return make_tokenizer({'kind': 'hf', 'json': learner.to_str(), 'config': '{"bos_token": "<s>"}'})
    return make_tokenizer({'kind': kind, 'chars': CHARS})


def chat_tokenizer(kind):
    return make_tokenizer(with_chat_tokens(plain_tokenizer(kind).state()))


# -----------------------------------------------------------------------------
# rows


def test_all_forms_of_rows_give_the_same_conversation():
    names = {'user': 'human', 'assistant': 'gpt'}
    sharegpt = [{'from': names[message['role']], 'value': message['content']} for message in TALK]
    parts = [{'type': 'text', 'text': 'Add 1 '}, {'type': 'text', 'text': 'and 2.'}]
    in_parts = [{'role': 'user', 'content': parts}, {**TALK[1], 'weight': 1, 'tool_calls': []}, *TALK[2:]]
    for row in [{'messages': [SYSTEM, *TALK]}, {'system': 'Be brief.', 'conversations': sharegpt},
                {'messages': [SYSTEM, *in_parts]}, [SYSTEM, *TALK]]:
        assert messages_of(row) == ([SYSTEM, *TALK], set())
    messages, _ = messages_of({'instruction': 'Add.', 'input': '1 and 2', 'output': '3'})
    assert messages == [{'role': 'user', 'content': 'Add.\n\n1 and 2'}, {'role': 'assistant', 'content': '3'}]


@pytest.mark.parametrize('row', [
    {}, 5, {'messages': TALK[1:]}, {'messages': [*TALK[:2], SYSTEM]}, {'instruction': 'Add.', 'output': 3},
    {'messages': [{'role': 'user', 'content': ' '}, TALK[1]]}, {'messages': TALK, 'history': ['a']},
    {'messages': [{'role': ['user'], 'content': 'a'}, TALK[1]]},
    {'messages': [TALK[0], {**TALK[1], 'tool_calls': [{'function': {'name': 'add'}}]}]},
    {'messages': [TALK[0], {**TALK[1], 'weight': 0.5}]},
    {'messages': [{'role': 'user', 'content': [{'type': 'image_url', 'text': 'a'}]}, TALK[1]]}])
def test_a_row_that_cannot_be_used_is_an_error(row):
    with pytest.raises(InputError):
        messages_of(row)


# -----------------------------------------------------------------------------
# tokens and mask


@pytest.mark.parametrize('kind', ['byte', 'char', 'bpe', 'hf'])
def test_the_mask_has_the_answers_and_the_tokens_that_end_them(kind):
    plain = plain_tokenizer(kind)
    tokenizer = chat_tokenizer(kind)
    chat = chat_format(tokenizer)
    ids, mask = chat.render([SYSTEM, *TALK])
    assert tokenizer.decode(ids[mask].tolist()) == '3<|assistant_end|>7, na\u00efvely<|assistant_end|>'
    bos = {'char': '<|bos|>', 'hf': '<s>'}.get(kind, '<|endoftext|>')
    text = tokenizer.decode(ids.tolist())
    assert text == (
        f'{bos}<|user_start|>Be brief.\n\nAdd 1 and 2.<|user_end|><|assistant_start|>3<|assistant_end|>'
        '<|user_start|>And 4?<|user_end|><|assistant_start|>7, na\u00efvely<|assistant_end|>')
    jinja2 = pytest.importorskip('jinja2')
    assert jinja2.Template(chat.template).render(messages=[SYSTEM, *TALK]) == text
    assert tokenizer.n_vocab == plain.n_vocab + (5 if kind == 'char' else 4)
    assert with_chat_tokens(tokenizer.state()) == tokenizer.state(), 'nothing is added twice'


def test_an_answer_of_weight_0_is_not_trained_on():
    tokenizer = chat_tokenizer('byte')
    messages, _ = messages_of([TALK[0], {**TALK[1], 'weight': 0}, TALK[2], {**TALK[3], 'weight': 1}])
    ids, mask = chat_format(tokenizer).render(messages)
    assert tokenizer.decode(ids[mask].tolist()) == '7, na\u00efvely<|assistant_end|>'


def test_role_tokens_have_fixed_ids_and_their_names_in_a_message_are_text():
    chat = chat_format(chat_tokenizer('byte'))
    messages = [{'role': 'user', 'content': 'Hi<|user_end|>'}, {'role': 'assistant', 'content': 'ho'}]
    ids, mask = chat.render(messages)
    assert ids.tolist() == [256, 257, *b'Hi<|user_end|>', 258, 259, *b'ho', 260]
    assert mask.tolist() == [False] * 18 + [True] * 3
    assert chat.stop_ids == [260, 256]
    assert chat_format(make_tokenizer({'kind': 'byte'})) is None


# -----------------------------------------------------------------------------
# packing

LENGTHS = [5, 9, 3, 12, 7, 7, 2, 30, 4, 6]


@pytest.fixture
def talks(tmp_path):
    """A folder with the dataset `talks`: ten conversations of bytes; half of each is trained on."""
    folder = tmp_path / 'talks'
    folder.mkdir()
    ids = np.concatenate([np.arange(n) + 10 * i for i, n in enumerate(LENGTHS)])
    mask = np.concatenate([np.arange(n) >= n // 2 for n in LENGTHS])
    mask[sum(LENGTHS[:8]):sum(LENGTHS[:9])] = False  # the ninth has no targets
    bits = np.packbits(mask, bitorder='little').tobytes()
    starts = np.cumsum([0, *LENGTHS[:-1]]).astype('<u8').tobytes()
    (folder / 'train.bin').write_bytes(ids.astype('<u2').tobytes())
    (folder / 'train.mask').write_bytes(bits)
    (folder / 'train.starts').write_bytes(starts)
    entry = {'tokens': len(ids), 'mask_sha256': hashlib.sha256(bits + starts).hexdigest()}
    meta = {'tokenizer': {'kind': 'byte'}, 'vocab_size': 257, 'chat': '', 'splits': {'train': entry}}
    (folder / 'meta.json').write_text(json.dumps(meta))
    return tmp_path


def test_conversations_are_packed_as_in_earlier_versions(talks):
    train = Dataset('talks', talks, 16, 3).train
    sequences, n_targets = train.packing(16)
    assert sequences == [[7], [3, 9], [1, 5, 2], [4, 0, 6]] and n_targets.tolist() == [2, 9, 11, 8]
    assert train.sequence_indices(3, range(8), 16).tolist() == [0, 2, 3, 1, 0, 3, 2, 1]


def test_an_epoch_has_each_conversation_once_and_the_counted_targets(talks):
    train = Dataset('talks', talks, 32, 3).train
    n = train.tokens_per_epoch(32) // 32
    x, y, doc_ids = train.batch(5, range(n), 32)
    # without the last token of each, and without the conversation that has no targets
    assert (doc_ids >= 0).sum() == sum(LENGTHS) - 4 - 9
    assert (y >= 0).sum() == train.mask.sum() == train.count_targets(5, range(n), 32)
    assert np.array_equal(y[y >= 0], x[y >= 0] + 1), 'of the same conversation, whose ids count upwards'


def test_conversations_without_an_answer_in_the_context_are_an_error(talks):
    train = Dataset('talks', talks).train
    train.mask = np.zeros_like(train.mask)
    with pytest.raises(InputError, match='no conversation'):
        train.packing(16)


@pytest.mark.parametrize('name', ['train.mask', 'train.starts'])
def test_a_mask_of_other_conversations_is_an_error(talks, name):
    path = talks / 'talks' / name
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(InputError, match=name):
        Dataset('talks', talks)
    path.unlink()
    with pytest.raises(InputError, match=name):
        Dataset('talks', talks)


# -----------------------------------------------------------------------------
# a conversation at the terminal


def test_a_prompt_drops_the_oldest_questions_with_their_answers():
    chat = chat_format(chat_tokenizer('byte'))
    ids, kept = fit_prompt(chat, [*TALK, TALK[0]], 50)
    assert kept == [*TALK[2:], TALK[0]]
    assert ids == chat.render(kept, add_generation_prompt=True)[0].tolist() and ids[-1] == 259
    with pytest.raises(InputError):
        fit_prompt(chat, TALK[:1], 10)


def test_a_conversation_at_the_terminal_contains_the_earlier_messages(monkeypatch):
    tokenizer = chat_tokenizer('byte')
    lines = iter(['One?', '', 'x' * 200, 'Two?'])
    prompts = []

    def type_line(prompt):
        for line in lines:
            return line
        raise EOFError

    def reply(ids):
        prompts.append(tokenizer.decode(ids))
        return 'Yes'

    monkeypatch.setattr('builtins.input', type_line)
    converse(chat_format(tokenizer), reply, 100)
    assert len(prompts) == 2
    assert 'One?' in prompts[1] and '<|assistant_start|>Yes<|assistant_end|>' in prompts[1]
