"""sample.py writes text from the checkpoint alone, while it is generated, up to a text or Ctrl-C."""

import contextlib
import os
import pty
import re
import shutil
import signal
import tempfile
import threading
import time

import pytest
import torch
from conftest import is_refused, make_dataset
from test_eval import save_checkpoint
from warm import Process

from dataset import Dataset
from model import GPT, GPTConfig, load
from support import samples as in_loop


@pytest.fixture(scope='module')
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    make_dataset(folder / 'data')
    save_checkpoint(folder / 'out', Dataset('tiny', f'{folder}/data'), 120)
    shutil.copy(folder / 'out' / 'ckpt.pt', folder / 'out' / 'ckpt_best.pt')
    shutil.rmtree(folder / 'data')  # nothing but the checkpoint is needed
    return folder / 'out'


def small_model(**sizes):
    return GPT(GPTConfig(**{'n_layer': 1, 'n_head': 1, 'n_embd': 16, 'block_size': 16, **sizes}))


def save_weights(path, net, **more):
    """A checkpoint with nanoGPT's keys, and `more`."""
    state = {'model': net.state_dict(), 'model_args': net.config.model_args(), 'iter_num': 1,
             'best_val_loss': 1.0, 'config': {}}
    torch.save({**state, **more}, path)


@pytest.fixture
def trained(run_folder):
    return [f'--out_dir={run_folder}', '--device=cpu', '--num_samples=2', '--max_new_tokens=40']


def samples(result):
    return result.out.split('---------------\n')[:-1]


def test_the_checkpoint_alone_is_enough(script, works, trained, run_folder):
    result = works('sample.py', *trained, '--dtype=float32', '--start=7 times')
    a, b = samples(result)
    assert a.startswith('7 times') and len(a) == len('7 times') + 40 + 1 and a != b
    assert 'times' in a[7:] or 'is' in a[7:], 'it has learned something'
    assert script('sample.py', str(run_folder), *trained[1:], '--dtype=float32', '--start=7 times').out == result.out
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert script('sample.py', *trained, '--dtype=float32', '--start=7 times').out == result.out, 'the same seed, the same text'
    assert torch.equal(torch.get_rng_state(), state), 'nothing else that is random is touched'
    assert script('sample.py', *trained, '--start=7 times', '--seed=2').out != result.out


def test_its_flags(script, trained, run_folder, tmp_path):
    trained = [*trained, '--dtype=float32']  # in bfloat16 two logits are often equal: either may come first
    greedy = samples(script('sample.py', *trained, '--temperature=0', '--start=7'))
    assert greedy[0] == greedy[1]
    assert samples(script('sample.py', *trained, '--top_k=1', '--start=7')) == greedy
    assert samples(script('sample.py', *trained, '--top_p=1e-6', '--top_k=None', '--start=7')) == greedy
    (tmp_path / 'prompt.txt').write_text('8 times')
    assert samples(script('sample.py', *trained, f"--start=FILE:{tmp_path / 'prompt.txt'}"))[0].startswith('8 times')
    assert samples(script('sample.py', *trained))[0].startswith('\n')
    stopped = samples(script('sample.py', *trained, '--temperature=0', '--start=7', '--stop=.'))[0]
    assert greedy[0].startswith(stopped.rstrip('\n')) and '.' not in stopped and len(stopped) < len(greedy[0])
    path = f"--init_from={run_folder / 'ckpt_best.pt'}"
    assert samples(script('sample.py', *trained, '--temperature=0', '--start=7', path)) == greedy


def test_ids_of_the_padding_are_never_produced_and_end_of_text_stops(script, tmp_path):
    torch.manual_seed(0)
    # 257 ids of bytes, padded to 320
    save_weights(tmp_path / 'x.pt', small_model(vocab_size=320), tokenizer={'kind': 'byte'})
    flags = [f"--init_from={tmp_path / 'x.pt'}", '--device=cpu', '--num_samples=8', '--max_new_tokens=100',
             '--temperature=5', '--top_k=None', '--start=a']
    result = script('sample.py', *flags)
    assert result.status == 0 and len(samples(result)) == 8
    # random weights produce it now and then among 800
    assert '<|endoftext|>' not in result.out and int(re.search('(\\d+) tokens', result.err)[1]) < 800
    assert load(f'{tmp_path}/x.pt')[1].n_vocab == 257


@pytest.mark.parametrize('args, words', [
    ('--temperature=nan', 'finite'), ('--start=\u00e9', '\u00e9'), ('--start=FILE:/nowhere', '/nowhere'),
    ('--prompts=latin', 'UTF-8'), ('--prompts=odd', '\u00e9'), ('--init_from=nowhere.pt', 'nowhere.pt')])
def test_bad_requests_are_one_line(script, trained, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'latin').write_bytes(b'caf\xe9')
    (tmp_path / 'odd').write_text('7 times\n\u00e9\n')
    is_refused(script('sample.py', *trained, args), words)


def test_logits_that_are_not_finite_are_one_line_and_status_3(script, run_folder, tmp_path):
    state = torch.load(run_folder / 'ckpt.pt', weights_only=True)
    state['model'] = {name: p * 1e30 if p.dim() == 2 else p for name, p in state['model'].items()}
    torch.save(state, tmp_path / 'ckpt.pt')
    for flags in (['--num_samples=1'], ['--num_samples=3'], ['--num_samples=1', '--temperature=0']):
        result = script('sample.py', f'--out_dir={tmp_path}', '--device=cpu', '--dtype=float32', '--max_new_tokens=3', *flags)
        assert result.status == 3 and result.err.startswith('error: ') and result.err.count('\n') == 1, result.err
        assert 'not finite (in float32)' in result.err
    model, tokenizer = load(str(tmp_path))
    texts = in_loop.write(model, tokenizer, [('', [0])], 4, 1, 1, contextlib.nullcontext())
    assert 'not finite' in texts[0][1], 'a run goes on'


def test_it_does_not_guess_a_tokenizer(script, tmp_path):
    for name in ('gone', '../../etc'):
        save_weights(tmp_path / 'x.pt', small_model(vocab_size=23), config={'dataset': name})
        result = script('sample.py', f"--init_from={tmp_path / 'x.pt'}", '--device=cpu')
        assert result.status == 2 and 'dataset' in result.err


def test_prompts_of_a_file_give_the_greedy_texts_that_they_give_one_by_one(script, trained, tmp_path):
    prompts = ['7 times', '12 times 3 is', '8 times', '5', '', '31 times', '9 times', '12 times 4 is']
    (tmp_path / 'prompts.txt').write_text('\r\n'.join(prompts) + '\n')
    # block_size is 16: far beyond it
    greedy = [*trained[:3], '--dtype=float32', '--temperature=0', '--max_new_tokens=50']
    from_file = [*greedy, f"--prompts={tmp_path / 'prompts.txt'}"]
    together = samples(script('sample.py', *from_file))
    one_by_one = [text for prompt in prompts if prompt
                  for text in samples(script('sample.py', *greedy, f'--start={prompt}'))]
    assert together == one_by_one and len(together) == 14 and len(set(together)) == 7
    assert samples(script('sample.py', *from_file, '--batch_size=1')) == together


def test_too_little_memory_is_one_line(script, trained, monkeypatch):
    def generate(*args, **kwargs):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
    monkeypatch.setattr(GPT, 'generate', generate)
    is_refused(script('sample.py', *trained), 'not enough memory', '--batch_size')


# characters of one, two, three and four bytes, and the beginning of a terminal's command; no byte twice
LINE = 'a\u00e9\u4e16\U0001f600\x1b[b\n'


@pytest.fixture
def reciter(tmp_path):
    """A model of bytes that knows LINE by heart: after each byte comes the next, whatever stood before."""
    net, ids = small_model(n_embd=260, vocab_size=257, tie=False), LINE.encode()
    for name, p in net.named_parameters():
        torch.nn.init.constant_(p, 1 if '.ln_' in name else 0)
    net.transformer.wte.weight.data[:257, :257] = torch.eye(257)
    for i, byte in enumerate(ids):
        net.lm_head.weight.data[ids[(i + 1) % len(ids)], byte] = 1
    save_weights(tmp_path / 'x.pt', net, tokenizer={'kind': 'byte'})
    return [f"--init_from={tmp_path / 'x.pt'}", '--device=cpu', '--temperature=0']


@pytest.mark.parametrize('stop', ['\U0001f600', 'b\na\u00e9', 'not there'])
def test_text_to_stop_at_is_found_across_tokens_and_no_part_of_it_is_shown(script, reciter, stop):
    text = LINE * 4
    for number in (1, 2):
        flags = [f'--num_samples={number}', '--start=a', f'--stop={stop}']
        result = script('sample.py', *reciter, *flags, f'--max_new_tokens={len(text.encode()) - 1}')
        assert samples(result) == [text.split(stop)[0] + '\n'] * number


def test_a_single_sample_appears_as_it_is_made_and_ctrl_c_ends_it(reciter):
    p = Process('sample.py', *reciter, '--num_samples=1', '--start=a', '--max_new_tokens=100000000')
    seen = b''
    while len(seen) < 2000:
        piece = p.stdout.read(65536)  # far from finished, and yet:
        assert piece.decode() and '\ufffd' not in piece.decode(), 'whole characters'
        seen += piece
    p.interrupt()
    text = (seen + p.stdout.read()).decode()
    assert p.wait() == (128 + signal.SIGINT, '') and text.endswith('\n---------------\n')
    text = text.removesuffix('\n---------------\n')
    assert text.startswith(LINE * 100)
    assert (LINE * (len(text) // len(LINE) + 1)).startswith(text.rstrip('\ufffd'))


def test_ctrl_c_prints_what_a_batch_has_made(script, reciter):
    def press():
        while getattr(signal.getsignal(signal.SIGINT), '__name__', '') != 'on_interrupt':
            time.sleep(0.01)
        time.sleep(0.5)
        signal.raise_signal(signal.SIGINT)
    thread = threading.Thread(target=press)
    thread.start()
    result = script('sample.py', *reciter, '--start=a', '--num_samples=5', '--batch_size=3',
                    '--max_new_tokens=100000000')
    thread.join()
    assert result.status == 128 + signal.SIGINT and result.err == ''
    made = samples(result)
    assert len(made) == 3, 'the second batch never began'
    assert len(set(made)) == 1 and made[0].startswith(LINE[:4])


def test_a_prompt_may_come_from_standard_input(script, reciter):
    def with_stdin(content, *flags):
        before = os.dup(0)
        with tempfile.TemporaryFile() as f:
            f.write(content)
            f.seek(0)
            os.dup2(f.fileno(), 0)
            try:
                return script('sample.py', *reciter, '--num_samples=1', '--start=-', *flags)
            finally:
                os.dup2(before, 0)
                os.close(before)
    result = with_stdin('x\ny a\n'.encode(), '--max_new_tokens=6')
    assert result.status == 0 and re.search(r'x.pt: 6 tokens, .* per second, [\d.]+ GB/s of weights read\n', result.err)
    assert result.out == 'x\ny a\u00e9\u4e16\ufffd\n---------------\n'
    is_refused(with_stdin(b'caf\xe9'), 'no prompt in - (')


def test_a_terminal_is_told_no_control_characters(reciter):
    fd, theirs = pty.openpty()
    process = Process('sample.py', *reciter, '--num_samples=1', '--start=a', '--max_new_tokens=20', terminal=theirs)
    assert process.wait()[0] == 0
    seen = os.read(fd, 65536)
    assert 'a\u00e9\u4e16\U0001f600\\x1b[b'.encode() in seen and b'\x1b' not in seen
    os.close(fd), os.close(theirs)
