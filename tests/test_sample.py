"""sample.py: prompts, seeds, stop texts, text that is printed while it is generated, Ctrl-C."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import REPO, TEXT
from test_evaluation import learn, save_model, small_model

from flatgpt.tokenizer import make_tokenizer

DASHES = '\n---------------\n'
CHARS = ''.join(sorted(set(TEXT)))
# characters of one, two, three and four bytes; no byte twice
LINE = 'a\u00e9\u4e16\U0001f600b\n'


@pytest.fixture(scope='module')
def run_folder(tmp_path_factory):
    """Return the folder of a model of characters that has trained a little."""
    state = {'kind': 'char', 'chars': CHARS}
    net = small_model(len(CHARS))
    learn(net, make_tokenizer(state).encode(TEXT), 120, 16)
    return save_model(tmp_path_factory.mktemp('runs') / 'out', net, state)


def reciting_model(text):
    """Return a model of bytes that repeats `text`, in which no byte occurs twice."""
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
def sample(works, run_folder):
    """sample(flags) returns the texts that sample.py prints from the model of characters."""
    def run(*flags):
        result = works('sample.py', run_folder, '--device=cpu', '--dtype=float32', '--num_samples=2',
                       '--max_new_tokens=40', *flags)
        return result.out.split(DASHES)[:-1]
    return run


@pytest.fixture
def recite(works, reciter):
    """recite(flags) returns the texts that sample.py prints from the model that repeats LINE."""
    def run(*flags):
        return works('sample.py', reciter, '--device=cpu', '--temperature=0', *flags).out.split(DASHES)[:-1]
    return run


def test_a_seed_gives_the_same_text(sample):
    a, b = sample('--start=7 times')
    assert a.startswith('7 times') and len(a) == len('7 times') + 40 and a != b
    assert 'times' in a[7:] or 'is' in a[7:], 'it has learned something'
    assert sample('--start=7 times') == [a, b]
    assert sample('--start=7 times', '--seed=2') != [a, b]


def test_a_seed_gives_the_same_texts_however_long_they_take(sample, monkeypatch):
    # a stop text is looked for now and then; what is drawn after it must not change the texts that follow
    flags = ['--num_samples=4', '--batch_size=1', '--stop= ']
    texts = sample(*flags)
    monkeypatch.setattr(time, 'perf_counter', lambda: 0.0)  # each text continues to its last token
    assert sample(*flags) == texts


@pytest.mark.parametrize('flag', ['--temperature=0', '--top_k=1', '--top_p=1e-6'])
def test_flags_that_keep_only_the_most_likely_token_give_one_text(sample, flag):
    a, b = sample(flag)
    assert a == b and len(a) == 40


def test_backslash_n_is_a_new_line_and_a_byte_order_mark_is_ignored(recite, tmp_path):
    path = tmp_path / 'prompts.txt'
    path.write_bytes(b'\xef\xbb\xbfQ:\\na\r\n')
    other = tmp_path / 'prompt.txt'
    other.write_bytes(b'\xef\xbb\xbfQ:\r\na')
    for flag in [r'--start=Q:\na', f'--prompts={path}', f'--start=FILE:{other}']:
        assert recite(r'--stop=\n', '--num_samples=1', flag) == ['Q:\na' + LINE[1:-1]]


def test_prompts_of_a_file_give_the_same_texts_as_one_by_one(sample, tmp_path):
    (tmp_path / 'prompts.txt').write_text('7 times\r\n12 times 3 is\r\n\r\n5\r\n')
    flags = ['--temperature=0', '--max_new_tokens=50']  # far beyond block_size, which is 16
    texts = sample(*flags, f"--prompts={tmp_path / 'prompts.txt'}", '--batch_size=1')
    one_by_one = []
    for prompt in ['7 times', '12 times 3 is', '5']:
        one_by_one += sample(*flags, f'--start={prompt}')
    assert texts == one_by_one and len(set(texts)) == 3


@pytest.mark.parametrize('n_samples', [1, 2])
@pytest.mark.parametrize('stop', ['\U0001f600', 'b\na\u00e9'])
def test_the_stop_text_is_found_across_tokens_and_no_part_of_it_is_shown(recite, stop, n_samples):
    text = LINE * 4
    texts = recite(f'--num_samples={n_samples}', '--start=a', f'--stop={stop}',
                   f'--max_new_tokens={len(text.encode()) - 1}')
    assert texts == n_samples * [text.split(stop)[0]]


@pytest.mark.parametrize('flag', [
    '--temperature=-1', '--top_p=0', '--start=\u00e9', '--start=FILE:/nowhere', '--init_from=nowhere.pt',
    '--chat'])
def test_a_wrong_setting_is_one_line(script, run_folder, flag):
    result = script('sample.py', run_folder, '--device=cpu', flag)
    assert result.status == 2 and result.out == ''
    assert result.err.startswith('error: ') and result.err.count('\n') == 1, result.err


@pytest.mark.skipif(os.name == 'nt', reason='no Ctrl-C can be sent to one process alone')
def test_a_single_sample_is_printed_while_it_is_generated_and_ctrl_c_keeps_it(reciter):
    flags = ['--device=cpu', '--temperature=0', '--num_samples=1', '--start=a', '--max_new_tokens=1000000']
    process = subprocess.Popen([sys.executable, REPO / 'sample.py', reciter, *flags], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE,
                               # in the background of a shell, SIGINT is ignored
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    seen = b''
    while len(seen) < 500:
        part = process.stdout.read1(65536)  # long before the end
        assert part, process.stderr.read().decode()
        assert '\ufffd' not in part.decode(), 'whole characters'
        seen += part
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    text = (seen + rest).decode()
    assert process.returncode == 128 + signal.SIGINT and err == b'' and text.endswith(DASHES)
    text = text.removesuffix(DASHES).rstrip('\ufffd')
    assert (LINE * (len(text) // len(LINE) + 1)).startswith(text)
