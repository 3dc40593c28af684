"""sample.py writes text from the checkpoint alone, while it is made, up to a text or Ctrl-C."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import REPO, TEXT
from test_evaluation import learn, save_model, small_model

from tokenizer import make_tokenizer

DASHES = '\n---------------\n'
CHARS = ''.join(sorted(set(TEXT)))
# characters of one, two, three and four bytes; no byte twice
LINE = 'a\u00e9\u4e16\U0001f600b\n'


@pytest.fixture(scope='module')
def run_folder(tmp_path_factory):
    """A model of characters that has learned a little."""
    state = {'kind': 'char', 'chars': CHARS}
    net = small_model(len(CHARS))
    learn(net, make_tokenizer(state).encode(TEXT), 120, 16)
    return save_model(tmp_path_factory.mktemp('runs') / 'out', net, state)


def reciting_model(text):
    """A model of bytes that recites `text`, in which no byte is twice: after each byte comes the next, after
    the last one the first."""
    ids = text.encode()
    net = small_model(257, n_layer=1, n_head=1, n_embd=270, tie=False)
    for name, p in net.named_parameters():
        torch.nn.init.constant_(p, 1 if '.ln_' in name else 0)
    with torch.no_grad():
        net.transformer.wte.weight[:, :257] = torch.eye(257)
        for i, byte in enumerate(ids):
            net.lm_head.weight[ids[(i + 1) % len(ids)], byte] = 1
    return net


@pytest.fixture(scope='module')
def reciter(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp('reciter') / 'out', reciting_model(LINE), {'kind': 'byte'})


@pytest.fixture
def trained(run_folder):
    return [run_folder, '--device=cpu', '--dtype=float32', '--num_samples=2', '--max_new_tokens=40']


@pytest.fixture
def greedy(reciter):
    return [reciter, '--device=cpu', '--temperature=0']


def samples(result):
    return result.out.split(DASHES)[:-1]


def test_the_checkpoint_alone_is_enough_and_a_seed_gives_the_same_text(works, trained):
    result = works('sample.py', *trained, '--start=7 times')
    a, b = samples(result)
    assert a.startswith('7 times') and len(a) == len('7 times') + 40 and a != b
    assert 'times' in a[7:] or 'is' in a[7:], 'it has learned something'
    assert works('sample.py', *trained, '--start=7 times').out == result.out
    assert works('sample.py', *trained, '--start=7 times', '--seed=2').out != result.out


def test_a_seed_gives_the_same_texts_however_long_they_take(works, trained, monkeypatch):
    """An end is looked for now and then; what was drawn behind it must not change the texts that follow."""
    flags = [*trained, '--num_samples=4', '--batch_size=1', '--stop= ']
    texts = works('sample.py', *flags).out
    monkeypatch.setattr(time, 'perf_counter', lambda: 0.0)  # each text continues to its last token
    assert works('sample.py', *flags).out == texts


@pytest.mark.parametrize('flag', ['--temperature=0', '--top_k=1', '--top_p=1e-6'])
def test_flags_that_leave_the_likeliest_token_alone_give_one_text(works, trained, flag):
    a, b = samples(works('sample.py', *trained, flag))
    assert a == b and len(a) == 40, 'without a prompt'


def test_backslash_n_is_a_new_line_and_a_byte_order_mark_is_no_text(works, greedy, tmp_path):
    flags = [*greedy, r'--stop=\n', '--num_samples=1']
    path = tmp_path / 'prompts.txt'
    path.write_text('Q:\\na\r\n', encoding='utf-8-sig')
    assert samples(works('sample.py', *flags, r'--start=Q:\na')) == ['Q:\na' + LINE[1:-1]]
    assert samples(works('sample.py', *flags, f'--prompts={path}')) == ['Q:\na' + LINE[1:-1]]
    path.write_bytes(b'\xef\xbb\xbfQ:\r\na')
    assert samples(works('sample.py', *flags, f'--start=FILE:{path}')) == ['Q:\na' + LINE[1:-1]]


def test_prompts_of_a_file_give_the_texts_that_they_give_one_by_one(works, trained, tmp_path):
    (tmp_path / 'prompts.txt').write_text('7 times\r\n12 times 3 is\r\n\r\n5\r\n')
    flags = [*trained, '--temperature=0', '--max_new_tokens=50']  # block_size is 16: far beyond it
    from_file = works('sample.py', *flags, f"--prompts={tmp_path / 'prompts.txt'}", '--batch_size=1')
    one_by_one = ''
    for prompt in ['7 times', '12 times 3 is', '5']:
        one_by_one += works('sample.py', *flags, f'--start={prompt}').out
    assert from_file.out == one_by_one and len(set(samples(from_file))) == 3


@pytest.mark.parametrize('stop', ['\U0001f600', 'b\na\u00e9'])
def test_the_stop_text_is_found_across_tokens_and_no_part_of_it_is_shown(works, greedy, stop):
    text = LINE * 4
    n_tokens = len(text.encode()) - 1
    for number in (1, 2):
        result = works('sample.py', *greedy, f'--num_samples={number}', '--start=a', f'--stop={stop}',
                       f'--max_new_tokens={n_tokens}')
        assert samples(result) == number * [text.split(stop)[0]]


@pytest.mark.parametrize('flag', [
    '--temperature=-1', '--top_p=0', '--start=\u00e9', '--start=FILE:/nowhere', '--init_from=nowhere.pt',
    '--chat'])
def test_mistakes_are_one_line(script, trained, flag):
    result = script('sample.py', *trained, flag)
    assert result.status == 2 and result.out == ''
    assert result.err.startswith('error: ') and result.err.count('\n') == 1, result.err


@pytest.mark.skipif(os.name == 'nt', reason='no Ctrl-C can be sent to one process alone')
def test_a_single_sample_appears_while_it_is_made_and_ctrl_c_keeps_it(greedy):
    flags = [*greedy, '--num_samples=1', '--start=a', '--max_new_tokens=1000000']
    process = subprocess.Popen([sys.executable, REPO / 'sample.py', *flags], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE,
                               # tests that run in the background of a shell would have it ignored
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    seen = b''
    while len(seen) < 500:
        part = process.stdout.read1(65536)  # far from its end, and yet:
        assert part, process.stderr.read().decode()
        assert '\ufffd' not in part.decode(), 'whole characters'
        seen += part
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    text = (seen + rest).decode()
    assert process.returncode == 128 + signal.SIGINT and err == b'' and text.endswith(DASHES)
    text = text.removesuffix(DASHES).rstrip('\ufffd')
    assert (LINE * (len(text) // len(LINE) + 1)).startswith(text)
