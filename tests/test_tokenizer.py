"""Tokenizers give back the text, also from their states and files; files of others are read or refused."""

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import TEXT, data_file

from configurator import InputError
from flatgpt.huggingface import tokenizer_state
from flatgpt.tokenizer import (
    GPT2_STATE, KINDS, learn_bpe, make_tokenizer, read_tokenizer_files, same_tokenizer, token_bytes,
    write_tokenizer_files)

STRANGE = ("don't  stop\n\n\n   x\t\ty 12345678 ... ---\r\n  'll na\u00efve \u6f22\u5b57 \U0001f642 "
           "<|endoftext|> end \x1cz \u2003w")
CHAR = {'kind': 'char', 'chars': ''.join(sorted(set(STRANGE)))}


def save_byte_level(path, special=('<s>', '</s>'), **options):
    """Save a byte-level BPE of Hugging Face's, learned from TEXT, as a tokenizer.json. Return its state."""
    tokenizers = pytest.importorskip('tokenizers')
    tokenizer = tokenizers.ByteLevelBPETokenizer(**options)
    tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=list(special))
    tokenizer.save(str(path))
    return tokenizer_state(path)


@pytest.fixture
def state_of(tmp_path, monkeypatch):
    """state_of(kind) is the state of a tokenizer that encodes STRANGE."""
    def state_of(kind):
        if kind == 'byte':
            return {'kind': 'byte'}
        if kind == 'char':
            return CHAR
        if kind == 'hf':
            return save_byte_level(tmp_path / 'tokenizer.json')
        pytest.importorskip('tiktoken')
        if kind == 'learned':
            pytest.importorskip('tokenizers')
            return learn_bpe(400, [TEXT]).state()
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(data_file('tiktoken_cache')))
        return make_tokenizer(GPT2_STATE).state()
    return state_of


@pytest.mark.parametrize('kind, end_of_text, stop_ids', [
    ('byte', 256, [256]), ('char', None, []), ('learned', 399, [399]), ('gpt2', 50256, [50256]),
    ('hf', 0, [1, 0])])
def test_a_tokenizer_gives_back_the_text_and_its_state_makes_it_again(state_of, kind, end_of_text, stop_ids):
    tokenizer = make_tokenizer(state_of(kind))
    ids = tokenizer.encode(STRANGE)
    assert tokenizer.decode(ids.tolist()) == STRANGE
    assert tokenizer.decode([*ids, 99_999]) == STRANGE, 'an id of a padded vocabulary'
    sizes = tokenizer.token_bytes()
    assert sizes[ids].sum() == len(STRANGE.encode()) and len(sizes) == tokenizer.n_vocab
    assert token_bytes(tokenizer.state(), tokenizer.n_vocab + 2).tolist() == [*sizes, 0, 0]
    again = make_tokenizer(tokenizer.state())
    assert np.array_equal(again.encode(STRANGE), ids) and again.state() == tokenizer.state()
    assert (tokenizer.end_of_text, tokenizer.stop_ids) == (end_of_text, stop_ids)
    for token, id in tokenizer.special.items():
        assert sizes[id] == 0 and id not in tokenizer.encode(token)
        assert tokenizer.encode_prompt(token + '12') == [id, *tokenizer.encode('12')]


def test_a_character_that_is_unknown_is_named():
    with pytest.raises(InputError, match=r'U\+0308.*NFC'):
        make_tokenizer(CHAR).encode('na\u0308')


def test_numbers():
    tokenizer = make_tokenizer({'kind': 'ids', 'n_vocab': 40})
    assert tokenizer.encode_prompt('7 3\n39') == [7, 3, 39] and tokenizer.decode([7, 3]) == '7 3'
    assert tokenizer.n_vocab == 40 and not tokenizer.token_bytes().any()
    for text in ('40', 'a', '-1'):
        with pytest.raises(InputError):
            tokenizer.encode(text)


def test_the_files_of_a_dataset_make_the_same_tokenizer(tmp_path, state_of):
    for kind in ('byte', 'learned', 'hf'):
        state = state_of(kind)
        meta = write_tokenizer_files(tmp_path, make_tokenizer(state), np.dtype('<u2'))
        meta = json.loads(json.dumps(meta))  # as it goes through meta.json
        assert read_tokenizer_files(tmp_path, meta) == state
    (tmp_path / 'tokenizer.json').write_bytes(b'{}')
    with pytest.raises(InputError):
        read_tokenizer_files(tmp_path, meta)


def test_a_run_that_is_too_long_for_a_regular_expression_is_encoded(state_of):
    text = 'word' + ' ' * 2_000_000 + 'word\n'
    tokenizer = make_tokenizer(state_of('learned'))
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


@pytest.mark.parametrize('kind', ['byte', 'learned', 'hf'])
def test_half_of_a_surrogate_pair_is_encoded_as_unknown(state_of, kind):
    tokenizer = make_tokenizer(state_of(kind))
    assert re.fullmatch('a.b', tokenizer.decode(tokenizer.encode('a\ud800b').tolist()))


# -----------------------------------------------------------------------------
# files of others


@pytest.mark.parametrize('unknown, is_special', [(None, False), ('[UNK]', False), ('[UNK]', True)])
def test_characters_that_a_tokenizer_drops_have_no_bytes(unknown, is_special):
    tokenizers = pytest.importorskip('tokenizers')
    vocab = {char: i for i, char in enumerate('acehst\u2581')}  # the last is sentencepiece's mark for a space
    if unknown:
        vocab[unknown] = len(vocab)
    saved = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token=unknown))
    saved.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    saved.decoder = tokenizers.decoders.Metaspace()
    if is_special:
        saved.add_special_tokens([unknown])
    tokenizer = make_tokenizer({'kind': 'hf', 'json': saved.to_str()})
    text = 'the cat sat 123 \u00e9\u00e9, the hat'
    ids = tokenizer.encode(text)
    assert tokenizer.token_bytes()[ids].sum() == len(text) - 6 + 1, 'and the space before the first word'


def test_a_file_whose_decoder_is_set_after_loading_is_read_as_its_authors_use_it(tmp_path):
    """As SimpleLLaMA's: Tokenizer.from_file('bpe_8k.json'), then the decoder and <UNK>."""
    tokenizers = pytest.importorskip('tokenizers')
    file = str(tmp_path / 'bpe_8k.json')
    saved = tokenizers.Tokenizer(tokenizers.models.BPE())
    saved.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=['<UNK>', '<SOS>', '<EOS>'])
    saved.train_from_iterator([TEXT], trainer)
    saved.save(file)
    ours = make_tokenizer(tokenizer_state(file))
    theirs = tokenizers.Tokenizer.from_file(file)
    theirs.decoder = tokenizers.decoders.ByteLevel()
    theirs.model.unk_token = '<UNK>'
    text = '12 times 5 is {60}\u00e9\n'
    ids = ours.encode(text).tolist()
    assert ids == theirs.encode(text).ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.end_of_text == theirs.token_to_id('<SOS>') and ours.stop_ids == [2, 1], 'by their names'


def test_the_files_next_to_a_tokenizer_name_the_tokens_that_end_a_text(tmp_path):
    plain = save_byte_level(tmp_path / 'tokenizer.json', ['<s>', '</s>', '<|eot_id|>'])
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": {"content": "<s>"}}', encoding='utf-8-sig')
    (tmp_path / 'tokenizer.json').write_text(plain['json'], encoding='utf-8-sig')
    assert tokenizer_state(tmp_path)['json'] == plain['json'], 'a byte order mark is no part of a file'
    for ends, expected in ([1, 2], [0, 1, 2]), (2, [0, 2]), (None, [0]):
        (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': ends}))
        assert make_tokenizer(tokenizer_state(tmp_path)).stop_ids == expected


@pytest.mark.parametrize('template', ['<s> $A', '$A </s>', '<s> $A </s>'])
def test_a_prompt_has_what_its_template_puts_first_and_no_end(state_of, template):
    tokenizers = pytest.importorskip('tokenizers')
    changed = tokenizers.Tokenizer.from_str(state_of('hf')['json'])
    changed.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[('<s>', 0), ('</s>', 1)])
    tokenizer = make_tokenizer({'kind': 'hf', 'json': changed.to_str()})
    first = [0] if template.startswith('<s>') else []
    ids = tokenizer.encode('12 times').tolist()
    assert tokenizer.encode_prompt('12 times') == first + ids
    assert tokenizer.encode_prompt('<s>12 times') == [0] + ids, 'once'
    assert tokenizer.encode_prompt('12 times</s>') == first + ids + [1], 'an end that the prompt has'
    assert tokenizer.encode_prompt('') == first or not first


def test_files_of_other_formats_and_damaged_states_are_refused_in_one_line(tmp_path):
    pytest.importorskip('tokenizers')
    (tmp_path / 'tokenizer.model').write_bytes(b'\x0a\x0e\x0a\x05<unk>\xff')
    (tmp_path / 'vocab.json').write_text('{"a": 0}')
    for path in (tmp_path, tmp_path / 'tokenizer.model', tmp_path / 'vocab.json'):
        with pytest.raises(InputError, match='^.*$'):
            tokenizer_state(path)
    (tmp_path / 'tokenizer.json').write_text('{"model": {}}')
    for damage in ('{bad', 'version https://git-lfs.github.com/spec/v1'):
        (tmp_path / 'tokenizer_config.json').write_text(damage)
        with pytest.raises(InputError, match='^.*tokenizer_config.json.*$'):
            tokenizer_state(tmp_path)
    for content in ({'model': {}, 'added_tokens': [5]}, {'model': {}, 'added_tokens': [{'content': 'a'}]}):
        (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
        with pytest.raises(InputError, match='^.*tokenizer.json.*$'):
            tokenizer_state(tmp_path)
    for state in (None, {'kind': 'new'}, {'kind': 'tiktoken', 'name': 'x'}, {'kind': 'hf', 'json': '{}'}):
        with pytest.raises(InputError, match='^.*$'):
            make_tokenizer(state)


def changed_rank(ranks, line, id):
    lines = ranks.splitlines()
    lines[line] = lines[line].split()[0] + b' %d' % id
    return b'\n'.join(lines)


def test_ranks_are_0_to_n_1_each_once_and_other_sizes_are_refused_at_once(state_of):
    learned = state_of('learned')
    ranks = learned['ranks']
    damaged = [changed_rank(ranks, 5, 7), changed_rank(ranks, 5, -1), changed_rank(ranks, 398, 2**32 - 1),
               ranks.split(b'\n', 1)[1], ranks.replace(b'IQ==', b'ISEhISE='), b'']
    states = [{**learned, 'ranks': content} for content in damaged]
    states += [{**learned, 'pat_str': '((\x1b[2J'}, {**learned, 'special_tokens': {'<x>': 2**40}}]
    states += [{'kind': 'ids', 'n_vocab': n} for n in (2**31, 0, 1.5, '\x1b[2J')]
    for state in states:
        with pytest.raises(InputError) as e:
            make_tokenizer(state)
        assert str(e.value).isprintable(), 'no escape sequences or newlines'
    between = {**learned, 'ranks': changed_rank(ranks, 398, 399), 'special_tokens': {'<|endoftext|>': 398}}
    assert make_tokenizer(between).n_vocab == 400, 'as in p50k_base'


def test_a_panic_of_a_package_is_an_input_error_and_ctrl_c_is_not(monkeypatch, state_of):
    class PanicException(BaseException):
        """As that of packages in Rust."""

    learned = state_of('learned')
    for error, expected in [(PanicException('oh\x1b'), InputError), (KeyboardInterrupt(), KeyboardInterrupt)]:
        def fail(*args, **kwargs):
            raise error
        tokenizer = make_tokenizer(learned)
        tokenizer.encoding = SimpleNamespace(encode_to_numpy=fail)
        with pytest.raises(expected) as e:
            tokenizer.encode('text')
        assert str(e.value).isprintable()
        with monkeypatch.context() as patch, pytest.raises(expected):
            patch.setitem(KINDS, 'byte', fail)
            make_tokenizer({'kind': 'byte'})


def test_added_tokens_stand_for_their_own_letters(state_of):
    tokenizers = pytest.importorskip('tokenizers')
    learner = tokenizers.ByteLevelBPETokenizer()
    learner.train_from_iterator(['12 times'], vocab_size=260)
    learner.add_tokens(['\u00e9\u00a1'])  # in a byte-level vocabulary, also two bytes
    tokenizer = make_tokenizer({'kind': 'hf', 'json': learner.to_str()})
    assert tokenizer.token_bytes()[learner.token_to_id('\u00e9\u00a1')] == 4


def test_a_text_that_cannot_be_encoded_is_an_input_error():
    pytest.importorskip('tokenizers')
    model = {'type': 'WordLevel', 'vocab': {'the': 0}, 'unk_token': '<unk>'}
    tokenizer = make_tokenizer({'kind': 'hf', 'json': json.dumps({'added_tokens': [], 'model': model})})
    with pytest.raises(InputError):
        tokenizer.encode('zebra')


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'tiktoken', None)
    with pytest.raises(InputError, match='pip install tiktoken'):
        make_tokenizer(GPT2_STATE)


def test_tokenizers_with_the_same_vocabulary_are_the_same(state_of, tmp_path):
    gpt2 = state_of('gpt2')
    hf = state_of('hf')
    chat = {**CHAR, 'added': ['<|bos|>']}
    for a, b in ((gpt2, GPT2_STATE), (None, gpt2), (hf, {**hf, 'name': 'another'}), (CHAR, chat)):
        assert same_tokenizer(a, b) and same_tokenizer(b, a)
    for a, b in ((gpt2, {**GPT2_STATE, 'name': 'r50k_base'}), (CHAR, gpt2), (gpt2, state_of('learned')),
                 (CHAR, {**CHAR, 'chars': 'ac'}), (chat, {**CHAR, 'added': ['<|endoftext|>']}),
                 (hf, save_byte_level(tmp_path / 'b.json', ['<s>', '<|eot_id|>']))):
        assert not same_tokenizer(a, b) and not same_tokenizer(b, a)
