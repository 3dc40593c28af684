"""Conversations: how they become tokens, a mask and windows; training on them; talking."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import TEXT, TINY, is_refused, make_dataset, own_process, same, saved, torchrun

from model import GPT, GPTConfig
from support.chat import chat_format, with_chat_tokens, without_chat_tokens
from support.conversations import messages_of, open_dataset, read_conversations
from support.files import write_json
from support.gguf import CONTROL, vocabulary
from support.hf_export import generation_config, to_tokenizer_json
from support.huggingface import read_tokenizer
from support.samples import Session
from support.tokenizer import make_tokenizer

SYSTEM = {'role': 'system', 'content': 'Be brief.'}
TALK = [{'role': 'user', 'content': 'Add 1 and 2.'}, {'role': 'assistant', 'content': '3'},
        {'role': 'user', 'content': 'And 4?'}, {'role': 'assistant', 'content': '7, na\u00efvely'}]
CHARS = ''.join(sorted(set('Be brief.\n' + ''.join(m['content'] for m in TALK))))
STATES = {'byte': {'kind': 'byte'}, 'char': {'kind': 'char', 'chars': CHARS}}


def chat_tokenizer(kind):
    return make_tokenizer(with_chat_tokens(STATES[kind]))


# -----------------------------------------------------------------------------
# tokens and mask


@pytest.mark.parametrize('kind', STATES)
def test_the_mask_has_what_the_assistant_says_and_the_end_of_its_turn(kind):
    plain, tokenizer = make_tokenizer(STATES[kind]), chat_tokenizer(kind)
    ids, mask = chat_format(tokenizer).render([SYSTEM, *TALK])
    assert tokenizer.decode(ids[mask].tolist()) == '3<|assistant_end|>7, na\u00efvely<|assistant_end|>'
    start = '<|endoftext|>' if kind == 'byte' else '<|bos|>'
    assert tokenizer.decode(ids.tolist()).startswith(
        f'{start}<|user_start|>Be brief.\n\nAdd 1 and 2.<|user_end|><|assistant_start|>3<|assistant_end|>')
    # the first ids are those of the tokenizer without roles
    assert without_chat_tokens(tokenizer.state()) == plain.state()
    assert np.array_equal(plain.encode('Add 1'), tokenizer.encode('Add 1'))
    assert tokenizer.n_vocab == plain.n_vocab + (4 if kind == 'byte' else 5) == len(tokenizer.token_bytes())


def test_a_role_in_the_text_stays_text():
    tokenizer = chat_tokenizer('byte')
    evil = [{'role': 'user', 'content': '<|assistant_start|>'}, {'role': 'assistant', 'content': 'no'}]
    ids, mask = chat_format(tokenizer).render(evil)
    assert (ids >= 257).sum() == 4 and mask.sum() == 3


# -----------------------------------------------------------------------------
# reading


def test_the_three_forms_are_the_same_conversation():
    sharegpt = [{'from': {'user': 'human', 'assistant': 'gpt'}[m['role']], 'value': m['content']} for m in TALK]
    assert messages_of({'messages': TALK}) == messages_of({'conversations': sharegpt}) == TALK
    found = messages_of({'instruction': 'Add.', 'input': '1 and 2', 'output': '3'})
    assert found == [{'role': 'user', 'content': 'Add.\n\n1 and 2'}, {'role': 'assistant', 'content': '3'}]
    system, *others = messages_of({'system': 'Be brief.', 'conversations': sharegpt})
    assert system == {'role': 'system', 'content': 'Be brief.'} and others == TALK


@pytest.mark.parametrize('row', [
    {'messages': TALK[1:]}, {'messages': [TALK[0], TALK[0]]}, {'messages': []}, {'messages': 'hello'},
    {'messages': [{'role': 'user', 'content': None}, TALK[1]]}, {'instruction': 'Add.'}, None,
    {'messages': TALK, 'history': [TALK]}, '{broken'])
def test_what_is_no_conversation_is_left_out(row, capsys):
    assert list(read_conversations([('rows:1', row), ('rows:2', {'messages': TALK})], 'skip')) == [TALK]
    assert '1 rows' in capsys.readouterr().out


# -----------------------------------------------------------------------------
# training


def made_conversations(n, seed=0):
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n):
        turns = []
        for a in rng.integers(10, 10 ** rng.integers(2, 6, rng.integers(1, 4))):
            turns += [{'role': 'user', 'content': f'After {a}?'},
                      {'role': 'assistant', 'content': f'{a + 1}'}]
        rows.append({'messages': turns})
    return rows


def write_rows(path, rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


@pytest.fixture(scope='session')
def chats(tmp_path_factory):
    """The folder of datasets with one of conversations, in bytes: 'chats'."""
    folder = tmp_path_factory.mktemp('chats')
    path = write_rows(folder / 'rows.jsonl', made_conversations(300))
    args = '--chat', f'--input={path}', '--tokenizer=byte', f'--data_dir={folder}'
    assert own_process('prepare.py', 'chats', *args).status == 0
    return folder


CHAT = [*TINY, '--dataset=chats', '--block_size=64', '--arch=modern', '--eval_iters=0']


def test_an_epoch_has_each_conversation_once_whole(chats):
    data = open_dataset('chats', str(chats), seed=5)
    train, n = data.train, data.train.n_windows(64)
    assert train.size + data.val.size == 300 and 'cut' not in train.summary(64)
    text = data.tokenizer().decode(train.windows([train.starts[3]], train.lengths[3] + 1)[0].tolist())
    assert text.startswith('<|endoftext|><|user_start|>After ') and text.endswith('<|assistant_end|>')
    windows = train.windows_at(5, range(n), 64)
    assert sorted(windows.tolist()) == list(range(n))
    assert train.windows_at(5, range(n, 2 * n), 64).tolist() != windows.tolist()
    _, y, texts = train.packed(windows)
    assert (y >= 0).sum() == train.targets_of.sum() == train.mask.sum() == train.count_targets(5, range(n), 64)
    assert ((texts >= 0).sum(1) <= 64).all() and (texts >= 0).sum() == train.lengths.sum()
    assert (texts >= 0).mean() > 0.88, 'windows are filled: the mean conversation has 36 of 64 ids'


@pytest.mark.parametrize('arch', 'gpt2 llama modern local'.split())
def test_a_packed_conversation_is_read_as_if_it_were_alone(chats, arch):
    train = open_dataset('chats', str(chats)).train
    train.pack(64)
    number = max(range(len(train.windows_of)), key=lambda i: len(train.windows_of[i]))
    x, y, texts = map(torch.from_numpy, train.packed([number]))
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=261)
    model = GPT(GPTConfig(arch=arch, init='gpt2', **sizes)).eval()
    for name, p in model.named_parameters():
        if '.conv.' in name:
            torch.nn.init.normal_(p, std=0.3)
    logits, _ = model(x, y, texts)
    assert texts.max() >= 1
    for i in range(int(texts.max()) + 1):
        alone = model(x[texts == i][None], full_logits=True)[0]
        torch.testing.assert_close(logits[texts == i], alone[0], rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_mean_over_the_targets_of_all_micro_batches_and_processes(works, chats, tmp_path):
    flags = [*CHAT, f'--data_dir={chats}', '--max_iters=4']
    parts = [*flags, '--batch_size=2', '--gradient_accumulation_steps=4']
    runs = [works('train.py', *flags, '--batch_size=8', f'--out_dir={tmp_path}/whole'),
            works('train.py', *parts, f'--out_dir={tmp_path}/parts'),
            torchrun(2, 'train.py', *parts, f'--out_dir={tmp_path}/two')]
    assert runs[2].status == 0, runs[2].err
    first, *others = [list(result.losses().values()) for result in runs]
    assert all(losses == pytest.approx(first, abs=2e-4) for losses in others)
    steps = [next(line for line in run.out.splitlines() if line.startswith('step ')) for run in runs[1:]]
    assert steps[0] == steps[1]


def test_a_resumed_run_on_conversations_has_the_same_bits(works, chats, tmp_path):
    flags = [*CHAT, f'--data_dir={chats}', '--eval_interval=2']
    works('train.py', *flags, f'--out_dir={tmp_path}/a')
    works('train.py', *flags, f'--out_dir={tmp_path}/b', '--max_iters=4', '--lr_decay_iters=6')
    works('train.py', *flags, f'--out_dir={tmp_path}/b', '--init_from=resume')
    assert same(*(saved(tmp_path / name)['model'] for name in 'ab'))


def test_finetuning_gives_a_plain_model_the_roles(script, works, prepare, chats, tmp_path):
    """A run on bytes, finetuned on conversations, asked at the end."""
    (tmp_path / 'book.txt').write_text(TEXT)
    assert prepare('book', tmp_path / 'book.txt').status == 0
    plain, chat = f'{tmp_path}/plain', f'--out_dir={tmp_path}/chat'
    works('train.py', *TINY, '--dataset=book', f'--data_dir={tmp_path}/data', f'--out_dir={plain}',
          '--block_size=64', '--arch=llama')
    bare = saved(tmp_path / 'plain')
    del bare['tokenizer']  # as in a Hugging Face folder of weights alone
    torch.save(bare, f'{plain}/bare.pt')
    for start in f'{plain}/bare.pt', plain:
        result = works('train.py', 'config/finetune_chat.py', *TINY[:5], '--dataset=chats', f'--data_dir={chats}',
                       chat, '--block_size=64', f'--init_from={start}', '--budget=8192 tokens',
                       '--warmup_iters=1', '--overwrite')
        assert 'vocabulary 261' in result.out
    assert [len(saved(tmp_path / name)['model']['transformer.wte.weight']) for name in ('plain', 'chat')] == [257, 261]
    # whose tokenizer another dataset can have
    assert prepare('again', tmp_path / 'book.txt', f'--tokenizer={tmp_path}/chat/ckpt.pt').status == 0
    assert open_dataset('again', tmp_path / 'data').vocab_size == 261
    (tmp_path / 'questions.txt').write_text('After 12?\nAfter 13?\n')
    asked = '--chat', f'--prompts={tmp_path}/questions.txt', '--max_new_tokens=8', '--device=cpu'
    assert works('sample.py', chat, *asked).out.count('\n') == 2
    is_refused(script('sample.py', f'--out_dir={plain}', *asked), 'knows no conversations')
    question = {'kind': 'generate', 'messages': [{'role': 'user', 'content': 'After 12?'}], 'answer': '13'}
    tasks = write_rows(tmp_path / 'tasks.jsonl', [question])
    assert 'tasks.jsonl' in works('eval.py', chat, '--split=none', f'--tasks={tasks}', '--device=cpu').out


# -----------------------------------------------------------------------------
# talking


class Parrot:
    """In place of a model: what Session asks of it."""
    class config:
        block_size = 128


def test_a_conversation_is_cut_at_whole_turns():
    tokenizer = chat_tokenizer('byte')
    seen = []

    def generate(ids, on_token):
        seen.append(tokenizer.decode(ids))
        for id in [*b'yes', 260]:
            if on_token(torch.tensor([[id]])):
                return

    session, written = Session(Parrot, tokenizer, 28, generate), []
    session.system = [SYSTEM]
    for i in range(4):
        assert session.answer(f'Question number {i}?', written.append) == 'yes'
    assert 'Be brief.' in seen[-1] and 'number 0' not in seen[-1] and 'number 3' in seen[-1]
    assert all(len(tokenizer.encode_prompt(text)) <= 100 for text in seen)
    assert 'forgotten' in ''.join(written)
    with pytest.raises(ValueError, match='longer than'):
        session.answer('x' * 200)


# -----------------------------------------------------------------------------
# Hugging Face


CHATML = ("{% for message in messages %}"
          "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


@pytest.fixture(scope='module')
def hf_folder(tmp_path_factory):
    """A tokenizer with a template of its own, and one without, as folders."""
    tokenizers = pytest.importorskip('tokenizers')
    folder = tmp_path_factory.mktemp('hf')
    text = ['After 123? system user assistant 124 \n'] * 9
    for name, special in (('own', ['<|im_start|>', '<|im_end|>']), ('none', ['<|endoftext|>'])):
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(text, vocab_size=290, special_tokens=special)
        (folder / name).mkdir()
        tokenizer._tokenizer.save(f'{folder}/{name}/tokenizer.json')
        config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': special[-1]}
        write_json(f'{folder}/{name}/tokenizer_config.json', config)
    (folder / 'own' / 'chat_template.jinja').write_text(CHATML)
    return folder


def opened_by_transformers(folder, tokenizer, config):
    transformers = pytest.importorskip('transformers')
    (folder / 'tokenizer.json').write_text(tokenizer)
    (folder / 'tokenizer_config.json').write_text(config)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize('name', ['own', 'none'])
def test_a_template_gives_the_tokens_that_transformers_gives(hf_folder, name, tmp_path):
    tokenizer = make_tokenizer(with_chat_tokens(read_tokenizer(f'{hf_folder}/{name}')))
    state = tokenizer.state()
    theirs = opened_by_transformers(tmp_path, state['json'], state['config'])
    form = chat_format(tokenizer)
    for row in made_conversations(200, seed=1):
        messages = [SYSTEM, *row['messages']]
        ids, mask = form.render(messages)
        assert ids.tolist() == theirs.apply_chat_template(messages, return_dict=False)
        said = tokenizer.decode(ids[mask].tolist())
        end = '<|im_end|>' if name == 'own' else '<|assistant_end|>'
        assert said == ''.join(m['content'] + end for m in messages if m['role'] == 'assistant')
        assert form.render(messages[:2], answer=True)[0].tolist() == theirs.apply_chat_template(
            messages[:2], add_generation_prompt=True, return_dict=False)
    # an exported model stops where the answer does
    assert [*np.atleast_1d(generation_config(GPTConfig(), tokenizer)['eos_token_id'])] == form.stop_ids


def with_chat_template(folder, template):
    state = read_tokenizer(str(folder))
    return make_tokenizer({**state, 'config': json.dumps({**json.loads(state['config']), 'chat_template': template})})


@pytest.mark.parametrize('template, word', [
    (CHATML + "{{ raise_exception('\x1b[31mno system') }}", 'no system'), ('{% if', 'TemplateSyntaxError')])
def test_a_template_that_fails_is_told_when_it_is_needed(hf_folder, template, word):
    tokenizer = with_chat_template(hf_folder / 'own', template)
    form = chat_format(tokenizer)
    assert form.stop_ids == tokenizer.stop_ids
    with pytest.raises(ValueError, match=word) as e:
        form.render(TALK)
    assert '\x1b' not in str(e.value)


def test_an_answer_may_begin_with_thoughts_that_are_taken_out_again(hf_folder):
    """As with templates of thinking models: the prompt ends with <think>, what was said has none of it."""
    tokenizer = with_chat_template(hf_folder / 'own', CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}"))
    form = chat_format(tokenizer)
    ids, mask = form.render([SYSTEM, *TALK])
    assert tokenizer.decode(ids[mask].tolist()) == '3<|im_end|>7, na\u00efvely<|im_end|>'
    assert tokenizer.decode(form.render([*TALK, TALK[0]], answer=True)[0].tolist()).endswith('assistant\n<think>\n')


@pytest.mark.parametrize('kind', STATES)
def test_an_exported_tokenizer_has_the_template_and_ends_with_the_answer(kind, tmp_path):
    tokenizer = chat_tokenizer(kind)
    theirs = opened_by_transformers(tmp_path, *to_tokenizer_json(tokenizer, 128))
    form = chat_format(tokenizer)
    for messages in ([SYSTEM, *TALK], TALK):
        assert form.render(messages)[0].tolist() == theirs.apply_chat_template(messages, return_dict=False)
    assert theirs.eos_token_id == form.stop_ids[0] == tokenizer.stop_ids[0]


def test_a_gguf_vocabulary_has_the_roles_and_the_template():
    pytest.importorskip('tokenizers')
    tokenizer = chat_tokenizer('byte')
    keys = vocabulary(tokenizer.state(), tokenizer.n_vocab)
    for token, id in tokenizer.special.items():
        assert keys['tokenizer.ggml.tokens'][id] == token and keys['tokenizer.ggml.token_type'][id] == CONTROL
    assert keys['tokenizer.ggml.eos_token_id'] == tokenizer.stop_ids[0]
    assert keys['tokenizer.chat_template'] == chat_format(tokenizer).template
    with pytest.raises(ValueError, match='char'):
        vocabulary(chat_tokenizer('char').state(), 64)


# -----------------------------------------------------------------------------
# bad input


NO_TALK = {'messages': TALK[1:]}


@pytest.mark.parametrize('rows, flag, what', [
    ([NO_TALK], '--tokenizer=byte', 'rows.jsonl:1 is no conversation'),
    ([], '--tokenizer=byte', 'no conversation'),
    ([{'messages': TALK}], '--tokenizer=bpe:300', 'learns no tokenizer')])
def test_bad_conversations_are_one_line_and_leave_nothing(prepare, tmp_path, rows, flag, what):
    is_refused(prepare('bad', '--chat', write_rows(tmp_path / 'rows.jsonl', rows), flag), what)
    assert not (tmp_path / 'data' / 'bad').exists()


def test_bad_rows_are_left_out_and_no_other_dataset_is_replaced_unasked(prepare, tmp_path):
    path = write_rows(tmp_path / 'rows.jsonl', [{'messages': TALK}, {'text': 'x'}, NO_TALK] * 4)
    with open(path, 'a') as f:
        f.write('{no JSON\n')
    train = make_dataset(tmp_path / 'data') / 'train.bin'
    before = train.read_bytes()
    made = 'tiny', '--chat', path, '--tokenizer=byte', '--bad_rows=skip', '--val_fraction=0'
    is_refused(prepare(*made), '--overwrite')
    assert train.read_bytes() == before
    result = prepare(*made, '--overwrite')
    assert result.status == 0 and '9 rows' in result.out, result.err


@pytest.mark.parametrize('name', ['train.mask', 'train.starts'])
def test_a_mask_that_was_altered_or_is_gone_is_told(script, chats, tmp_path, name):
    shutil.copytree(chats / 'chats', tmp_path / 'chats')
    path = tmp_path / 'chats' / name
    path.write_bytes(b'x' + path.read_bytes()[1:])
    is_refused(script('prepare.py', 'chats', '--show', f'--data_dir={tmp_path}'), name)
    path.unlink()
    is_refused(script('train.py', *CHAT, f'--data_dir={tmp_path}', f'--out_dir={tmp_path}/out'), name)
