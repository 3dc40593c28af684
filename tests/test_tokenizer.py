"""Tokenizers give back the text, also from their states and files; strangers' files are read or refused."""

import json
import re
import sys

import numpy as np
import pytest
from conftest import TEXT, data_file

from configurator import InputError
from tokenizer import (
    GPT2_STATE, PATTERN, hugging_face_state, learn_bpe, make_tokenizer, read_tokenizer_files,
    same_tokenizer, token_bytes, write_tokenizer_files)

STRANGE = ("don't  stop\n\n\n   x\t\ty 12345678 ... ---\r\n  'll na\u00efve \u6f22\u5b57 \U0001f642 "
           "<|endoftext|> end \x1cz \u2003w")
BYTE = {'kind': 'byte'}


@pytest.fixture(scope='session')
def learned():
    """A BPE of 400 ids."""
    pytest.importorskip('tiktoken')
    pytest.importorskip('tokenizers')
    return learn_bpe(400, [TEXT])


@pytest.fixture
def gpt2(monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(data_file('tiktoken_cache')))
    pytest.importorskip('tiktoken')
    return make_tokenizer(GPT2_STATE)


def save_byte_level(path, special, **options):
    """Save a byte-level BPE of Hugging Face's, learned from TEXT, as a tokenizer.json at `path`."""
    tokenizers = pytest.importorskip('tokenizers')
    tokenizer = tokenizers.ByteLevelBPETokenizer(**options)
    tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=special)
    tokenizer._tokenizer.save(str(path))


# -----------------------------------------------------------------------------
# round trips


def check_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert len(tokenizer.token_bytes()) == tokenizer.n_vocab > ids.max()
    again = make_tokenizer(tokenizer.state())
    assert np.array_equal(again.encode(text), ids) and again.state() == tokenizer.state()


def test_bytes():
    tokenizer = make_tokenizer(BYTE)
    check_round_trip(tokenizer, STRANGE)
    assert tokenizer.end_of_text == 256 and tokenizer.stop_ids == [256]
    assert tokenizer.encode_prompt('a<|endoftext|>b') == [97, 256, 98]


def test_characters():
    tokenizer = make_tokenizer({'kind': 'char', 'chars': 'a\u00e9\u6f22\U0001f642'})
    check_round_trip(tokenizer, '\U0001f642\u00e9\u6f22aa')
    assert tokenizer.encode_prompt('\u00e9a') == [1, 0]
    with pytest.raises(InputError, match=r'U\+007A'):
        tokenizer.encode('az')
    assert tokenizer.decode([0, 99]) == 'a', 'an id of a padded vocabulary'


def test_a_learned_bpe(learned):
    check_round_trip(learned, STRANGE)
    assert learned.n_vocab <= 400 and learned.end_of_text == learned.n_vocab - 1
    assert len(learned.encode(TEXT)) < len(TEXT) / 2


def test_gpt2(gpt2):
    check_round_trip(gpt2, STRANGE)
    assert gpt2.n_vocab == 50257 and gpt2.end_of_text == 50256
    assert gpt2.encode_prompt('<|endoftext|>Hello') == [50256, 15496]


@pytest.mark.parametrize('prefix', [False, True])
def test_a_tokenizer_json(tmp_path, prefix):
    save_byte_level(tmp_path / 'tokenizer.json', ['<|endoftext|>'], add_prefix_space=prefix)
    tokenizer = make_tokenizer(hugging_face_state(tmp_path))
    text = STRANGE.replace('<|endoftext|>', '')
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()).lstrip() == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode()) + prefix
    assert tokenizer.end_of_text == 0 and tokenizer.stop_ids == [0]
    assert tokenizer.encode('<|endoftext|>').min() > 0 and 0 in tokenizer.encode_prompt('<|endoftext|>')


def test_numbers():
    tokenizer = make_tokenizer({'kind': 'ids', 'n_vocab': 40})
    assert tokenizer.encode_prompt('7 3\n39') == [7, 3, 39] and tokenizer.decode([7, 3]) == '7 3'
    assert tokenizer.n_vocab == 40 and not tokenizer.token_bytes().any()
    for text in ('40', 'a', '-1'):
        with pytest.raises(InputError):
            tokenizer.encode(text)


# -----------------------------------------------------------------------------
# states and files


def test_special_tokens_are_added_behind_the_others():
    byte = make_tokenizer({'kind': 'byte', 'added': ['<|user_start|>', '<|assistant_end|>']})
    assert byte.special == {'<|endoftext|>': 256, '<|user_start|>': 257, '<|assistant_end|>': 258}
    assert byte.stop_ids == [258, 256]
    char = make_tokenizer({'kind': 'char', 'chars': 'ab', 'added': ['<|bos|>', '<|user_start|>']})
    assert char.special == {'<|bos|>': 2, '<|user_start|>': 3} and char.end_of_text == 2


@pytest.mark.parametrize('state', [
    None, {'kind': 'new'}, {'kind': 'tiktoken', 'name': 'nothing'}, {'kind': 'hf', 'json': '{}'},
    {'kind': 'tiktoken', 'name': 'x', 'pat_str': PATTERN, 'ranks': b'dGhl 256\n'}])
def test_a_damaged_state_is_one_line(state):
    with pytest.raises(InputError) as e:
        make_tokenizer(state)
    assert '\n' not in str(e.value)


def test_the_files_of_a_dataset_make_the_same_tokenizer(tmp_path, learned):
    save_byte_level(tmp_path / 'mine.json', ['<|endoftext|>'])
    theirs = make_tokenizer(hugging_face_state(tmp_path / 'mine.json'))
    for tokenizer in (make_tokenizer(BYTE), learned, theirs):
        meta = write_tokenizer_files(tmp_path, tokenizer, np.dtype('<u2'))
        meta = json.loads(json.dumps(meta))  # as it goes through meta.json
        assert read_tokenizer_files(tmp_path, meta) == tokenizer.state()
    (tmp_path / 'tokenizer.json').write_bytes(b'{}')
    with pytest.raises(InputError):
        read_tokenizer_files(tmp_path, meta)


# -----------------------------------------------------------------------------
# long and strange texts


def test_a_run_that_is_too_long_for_a_regular_expression_is_encoded(learned):
    text = 'word' + ' ' * 2_000_000 + 'word\n'
    assert learned.decode(learned.encode(text).tolist()) == text


def test_half_of_a_surrogate_pair_is_encoded_as_unknown(tmp_path, learned):
    save_byte_level(tmp_path / 'tokenizer.json', ['<s>'])
    for tokenizer in (make_tokenizer(BYTE), learned, make_tokenizer(hugging_face_state(tmp_path))):
        assert re.fullmatch('a.b', tokenizer.decode(tokenizer.encode('a\ud800b').tolist()))


@pytest.mark.parametrize('name', ['learned', 'gpt2'])
def test_a_text_may_be_cut_at_words(request, name):
    tokenizer = request.getfixturevalue(name)
    cut = re.split(r'(?<=[^\W\d_])(?=[ \n\r\t])', STRANGE)
    assert len(cut) > 3
    assert np.array_equal(np.concatenate([tokenizer.encode(part) for part in cut]), tokenizer.encode(STRANGE))


# -----------------------------------------------------------------------------
# files of others


@pytest.mark.parametrize('unknown', [None, '[UNK]'])
def test_characters_that_a_tokenizer_drops_have_no_bytes(tmp_path, unknown):
    tokenizers = pytest.importorskip('tokenizers')
    vocab = {char: i for i, char in enumerate('acehst\u2581')}  # the last is sentencepiece's mark for a space
    if unknown:
        vocab[unknown] = len(vocab)
    saved = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token=unknown))
    saved.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    saved.decoder = tokenizers.decoders.Metaspace()
    if unknown:
        saved.add_special_tokens([unknown])
    tokenizer = make_tokenizer({'kind': 'hf', 'json': saved.to_str()})
    text = 'the cat sat 123 \u00e9\u00e9, the hat'
    ids = tokenizer.encode(text)
    assert tokenizer.token_bytes()[ids].sum() == len(text) - 6 + 1, 'and the space before the first word'


def test_a_file_whose_decoder_is_set_after_loading_is_read_as_its_authors_use_it(tmp_path):
    """As SimpleLLaMA's: Tokenizer.from_file('bpe_8k.json'), then the decoder and <UNK>."""
    tokenizers = pytest.importorskip('tokenizers')
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=['<UNK>', '<SOS>', '<EOS>'],
                                             show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(tmp_path / 'bpe_8k.json'))
    ours = make_tokenizer(hugging_face_state(tmp_path / 'bpe_8k.json'))

    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / 'bpe_8k.json'))
    theirs.decoder = tokenizers.decoders.ByteLevel()
    theirs.model.unk_token = '<UNK>'
    text = '12 times 5 is {60}\u00e9\n'
    ids = ours.encode(text)
    assert ids.tolist() == theirs.encode(text).ids
    assert ours.decode(ids.tolist()) == theirs.decode(ids.tolist(), skip_special_tokens=False)
    assert ours.end_of_text == theirs.token_to_id('<SOS>') and ours.stop_ids == [2, 1], 'by their names'


def test_a_tokenizer_config_is_read(tmp_path):
    save_byte_level(tmp_path / 'tokenizer.json', ['<s>', '</s>'])
    plain = hugging_face_state(tmp_path)
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": {"content": "<s>"}}', encoding='utf-8-sig')
    (tmp_path / 'tokenizer.json').write_text(plain['json'], encoding='utf-8-sig')
    state = hugging_face_state(tmp_path)
    assert state['json'] == plain['json'], 'a byte order mark is no part of a file'
    assert make_tokenizer(plain).stop_ids == [1, 0] and make_tokenizer(state).stop_ids == [0]


@pytest.mark.parametrize('template', [None, '<s> $A', '$A </s>', '<s> $A </s>'])
def test_a_prompt_has_what_its_template_puts_first_and_no_end(tmp_path, template):
    save_byte_level(tmp_path / 'tokenizer.json', ['<s>', '</s>'])
    state = hugging_face_state(tmp_path)
    plain = make_tokenizer(state)
    if template:
        from tokenizers import Tokenizer, processors
        changed = Tokenizer.from_str(state['json'])
        changed.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[('<s>', 0), ('</s>', 1)])
        state['json'] = changed.to_str()
    first = [0] if template and template.startswith('<s>') else []
    tokenizer = make_tokenizer(state)
    ids = plain.encode('12 times').tolist()
    assert tokenizer.encode_prompt('12 times') == first + ids
    assert tokenizer.encode_prompt('<s>12 times') == [0] + ids, 'once'
    assert tokenizer.encode_prompt('12 times</s>') == first + ids + [1], 'an end that the prompt has'
    if first:
        assert tokenizer.encode_prompt('') == [0]


def test_the_ends_of_a_generation_config_end_a_text(tmp_path):
    save_byte_level(tmp_path / 'tokenizer.json', ['<s>', '</s>', '<|eot_id|>'])
    data = tmp_path / 'data'
    data.mkdir()
    for ends, expected in ([1, 2], [1, 0, 2]), (2, [1, 0, 2]), (None, [1, 0]):
        (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': ends}))
        tokenizer = make_tokenizer(hugging_face_state(tmp_path))
        assert tokenizer.stop_ids == expected
        meta = json.loads(json.dumps(write_tokenizer_files(data, tokenizer, np.dtype('<u2'))))
        assert make_tokenizer(read_tokenizer_files(data, meta)).stop_ids == expected, 'of a dataset'


def test_files_of_other_formats_are_refused(tmp_path):
    (tmp_path / 'tokenizer.model').write_bytes(b'\x0a\x0e\x0a\x05<unk>')
    (tmp_path / 'vocab.json').write_text('{"a": 0}')
    pytest.importorskip('tokenizers')
    for path in (tmp_path, tmp_path / 'tokenizer.model', tmp_path / 'vocab.json'):
        with pytest.raises(InputError):
            make_tokenizer(hugging_face_state(path))


def test_a_text_that_cannot_be_encoded_is_an_input_error():
    pytest.importorskip('tokenizers')
    model = {'type': 'WordLevel', 'vocab': {'the': 0}, 'unk_token': '<unk>'}
    tokenizer = make_tokenizer({'kind': 'hf', 'json': json.dumps({'added_tokens': [], 'model': model})})
    with pytest.raises(InputError):
        tokenizer.encode('zebra')


@pytest.mark.parametrize('kind, package', [('tiktoken', 'tiktoken'), ('hf', 'tokenizers')])
def test_a_package_that_is_missing_is_named(monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f'pip install {package}'):
        make_tokenizer({'kind': kind, 'name': 'gpt2', 'json': '{}'})


# -----------------------------------------------------------------------------
# comparing


def test_token_bytes_of_a_state_are_as_many_as_the_ids_of_a_network(learned):
    sizes = token_bytes(learned.state(), 448)
    assert len(sizes) == 448 and sizes[:256].tolist() == [1] * 256 and not sizes[learned.n_vocab - 1:].any()


def test_tokenizers_with_the_same_vocabulary_are_the_same(gpt2, learned, tmp_path):
    full = gpt2.state()
    char = {'kind': 'char', 'chars': 'ab'}
    save_byte_level(tmp_path / 'a.json', ['<s>'])
    save_byte_level(tmp_path / 'b.json', ['<s>', '</s>'])
    hf = hugging_face_state(tmp_path / 'a.json')
    chat = {**char, 'added': ['<|bos|>']}
    for a, b in ((full, GPT2_STATE), (None, full), (hf, {**hf, 'name': 'another'}), (char, chat)):
        assert same_tokenizer(a, b) and same_tokenizer(b, a)
    for a, b in ((full, {**GPT2_STATE, 'name': 'r50k_base'}), (char, full), (full, learned.state()),
                 (char, {**char, 'chars': 'ac'}), (chat, {**char, 'added': ['<|endoftext|>']}),
                 (hf, hugging_face_state(tmp_path / 'b.json'))):
        assert not same_tokenizer(a, b) and not same_tokenizer(b, a)


@pytest.mark.parametrize('chars, text, words', [
    ('aU\u0308', '\u00dca', 'NFD'), ('a\u00dc', 'U\u0308a', 'NFC'), ('ab', 'a\u00dc', 'U+00DC')])
def test_an_unknown_character_is_named_with_the_form_that_is_known(chars, text, words):
    with pytest.raises(InputError, match=re.escape(words)):
        make_tokenizer({'kind': 'char', 'chars': chars}).encode(text)
