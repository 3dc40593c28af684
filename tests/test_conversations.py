"""Conversations: their forms, their tokens and masks, as nanochat has them."""

import pytest
from conftest import TEXT

from conversations import chat_format, converse, fit_prompt, messages_of, unread_keys, with_chat_tokens
from tokenizer import learn_bpe, make_tokenizer

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


def test_the_forms_that_people_have_are_the_same_conversation():
    names = {'user': 'human', 'assistant': 'gpt'}
    sharegpt = [{'from': names[message['role']], 'value': message['content']} for message in TALK]
    assert messages_of(TALK) == TALK, "a row of nanochat's"
    assert messages_of({'messages': [SYSTEM, *TALK]}) == [SYSTEM, *TALK]
    assert messages_of({'system': 'Be brief.', 'conversations': sharegpt}) == [SYSTEM, *TALK]
    alpaca = {'instruction': 'Add.', 'input': '1 and 2', 'output': '3'}
    answer = {'role': 'assistant', 'content': '3'}
    assert messages_of(alpaca) == [{'role': 'user', 'content': 'Add.\n\n1 and 2'}, answer]
    parts = [{'type': 'text', 'text': 'Add 1 '}, {'type': 'text', 'text': 'and 2.'}]
    listed = [{'role': 'user', 'content': parts}, {**TALK[1], 'weight': 1, 'tool_calls': []}, *TALK[2:]]
    assert messages_of({'messages': listed}) == TALK


@pytest.mark.parametrize('row', [
    {'messages': TALK[1:]}, {'messages': 'hello'}, {}, 5, [],
    {'messages': [{'role': 'user', 'content': ' '}, TALK[1]]},
    {'messages': [*TALK[:2], SYSTEM]}, {'instruction': 'Add.', 'output': 3},
    {'messages': TALK, 'history': ['a']}, {'messages': [{'role': ['user'], 'content': 'a'}, TALK[1]]},
    {'messages': [TALK[0], {**TALK[1], 'tool_calls': [{'function': {'name': 'add'}}]}]},
    {'messages': [TALK[0], {**TALK[1], 'function_call': {'name': 'add'}}]},
    {'messages': [TALK[0], {**TALK[1], 'weight': 0.5}]},
    {'messages': [{'role': 'user', 'content': [{'type': 'image_url', 'text': 'a'}]}, TALK[1]]},
    {'messages': [{'role': 'user', 'content': [{'type': 'text'}]}, TALK[1]]}])
def test_what_is_no_conversation_is_told(row):
    with pytest.raises(ValueError):
        messages_of(row)


# -----------------------------------------------------------------------------
# tokens and mask


@pytest.mark.parametrize('kind', ['byte', 'char', 'bpe', 'hf'])
def test_the_mask_has_what_the_assistant_says_and_the_end_of_its_turn(kind):
    plain = plain_tokenizer(kind)
    tokenizer = chat_tokenizer(kind)
    form = chat_format(tokenizer)
    ids, mask = form.render([SYSTEM, *TALK])
    assert tokenizer.decode(ids[mask].tolist()) == '3<|assistant_end|>7, na\u00efvely<|assistant_end|>'
    begin = {'char': '<|bos|>', 'hf': '<s>'}.get(kind, '<|endoftext|>')
    text = tokenizer.decode(ids.tolist())
    assert text == (
        f'{begin}<|user_start|>Be brief.\n\nAdd 1 and 2.<|user_end|><|assistant_start|>3<|assistant_end|>'
        '<|user_start|>And 4?<|user_end|><|assistant_start|>7, na\u00efvely<|assistant_end|>')
    jinja2 = pytest.importorskip('jinja2')
    assert jinja2.Template(form.template).render(messages=[SYSTEM, *TALK]) == text
    assert tokenizer.n_vocab == plain.n_vocab + (5 if kind == 'char' else 4)
    assert with_chat_tokens(tokenizer.state()) == tokenizer.state(), 'once is enough'


def test_an_answer_of_weight_0_is_not_learned():
    tokenizer = chat_tokenizer('byte')
    rated = [TALK[0], {**TALK[1], 'weight': 0}, TALK[2], {**TALK[3], 'weight': 1}]
    ids, mask = chat_format(tokenizer).render(messages_of({'messages': rated}))
    assert ids.tolist() == chat_format(tokenizer).render(TALK)[0].tolist()
    assert tokenizer.decode(ids[mask].tolist()) == '7, na\u00efvely<|assistant_end|>'


def test_keys_that_are_not_read_are_found():
    message = {**TALK[1], 'reasoning_content': 'Hm.', 'name': None}
    assert unread_keys({'messages': [TALK[0], message], 'tools': [{}]}) == {'reasoning_content', 'tools'}


def test_the_ids_are_those_of_earlier_versions():
    tokenizer = chat_tokenizer('byte')
    # a role in the text stays text
    messages = [{'role': 'user', 'content': 'Hi<|user_end|>'}, {'role': 'assistant', 'content': 'ho'}]
    ids, mask = chat_format(tokenizer).render(messages)
    assert ids.tolist() == [256, 257, *b'Hi<|user_end|>', 258, 259, *b'ho', 260]
    assert mask.tolist() == [False] * 18 + [True] * 3
    assert chat_format(tokenizer).stop_ids == [260, 256]
    assert chat_format(make_tokenizer({'kind': 'byte'})) is None


# -----------------------------------------------------------------------------
# a conversation


def test_a_prompt_is_cut_at_whole_turns():
    chat = chat_format(chat_tokenizer('byte'))
    messages = [*TALK, *TALK, TALK[0]]
    ids, kept = fit_prompt(chat, messages, 60)
    assert len(ids) <= 60 and kept == messages[4:]
    assert ids == chat.render(kept, answer=True)[0].tolist() and ids[-1] == 259
    with pytest.raises(ValueError):
        fit_prompt(chat, TALK[:1], 10)


def test_a_conversation_at_the_terminal_remembers_what_was_said(monkeypatch):
    tokenizer = chat_tokenizer('byte')
    lines = iter(['One?', '', 'x' * 200, 'Two?'])

    def type_line(prompt):
        for line in lines:
            return line
        raise EOFError

    prompts = []

    def reply(ids):
        prompts.append(tokenizer.decode(ids))
        return 'Yes'

    monkeypatch.setattr('builtins.input', type_line)
    converse(chat_format(tokenizer), reply, 100)
    assert len(prompts) == 2
    assert 'One?' in prompts[1] and '<|assistant_start|>Yes<|assistant_end|>' in prompts[1]
