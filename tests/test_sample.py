"""sample.py writes from the checkpoint alone."""

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import REPO, TINY, make_dataset, own_process

import checkpoint


@pytest.fixture(scope='module')
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    make_dataset(folder / 'data')
    result = own_process('train.py', *TINY, '--dataset=tiny', f"--data_dir={folder / 'data'}", f"--out_dir={folder / 'out'}", '--max_iters=120',
                         '--eval_interval=0', '--batch_size=16', '--log_interval=0')
    assert result.status == 0, result.err
    shutil.rmtree(folder / 'data')  # nothing but the checkpoint is needed
    return folder / 'out'


@pytest.fixture
def trained(run_folder):
    return [f'--out_dir={run_folder}', '--device=cpu', '--num_samples=2', '--max_new_tokens=40']


def samples(result):
    return result.out.split('---------------\n')[:-1]


def test_the_checkpoint_alone_is_enough(script, trained):
    result = script('sample.py', *trained, '--start=7 times')
    assert result.status == 0, result.err
    a, b = samples(result)
    assert a.startswith('7 times') and len(a) == len('7 times') + 40 + 1 and a != b
    assert 'times' in a[7:] or 'is' in a[7:], 'it has learned something'
    assert script('sample.py', *trained, '--start=7 times').out == result.out, 'the same seed, the same text'
    assert script('sample.py', *trained, '--start=7 times', '--seed=2').out != result.out


def test_its_flags(script, trained, run_folder, tmp_path):
    trained = [*trained, '--dtype=float32']  # in bfloat16 two logits are often equal, and either may come first
    greedy = samples(script('sample.py', *trained, '--temperature=0', '--start=7'))
    assert greedy[0] == greedy[1]
    assert samples(script('sample.py', *trained, '--top_k=1', '--start=7')) == greedy
    assert samples(script('sample.py', *trained, '--top_p=1e-6', '--top_k=None', '--start=7')) == greedy
    (tmp_path / 'prompt.txt').write_text('8 times')
    assert samples(script('sample.py', *trained, f"--start=FILE:{tmp_path / 'prompt.txt'}"))[0].startswith('8 times')
    assert samples(script('sample.py', *trained, '--start='))[0].startswith('\n')
    stopped = samples(script('sample.py', *trained, '--temperature=0', '--start=7', '--stop=.'))[0]
    assert greedy[0].startswith(stopped.rstrip('\n')) and '.' not in stopped and len(stopped) < len(greedy[0])
    by_path = samples(script('sample.py', *trained, '--temperature=0', '--start=7', f"--init_from={run_folder / 'ckpt_best.pt'}"))
    assert by_path == greedy


def test_ids_of_the_padding_are_never_produced_and_end_of_text_stops(script, tmp_path):
    from model import GPT, GPTConfig
    torch.manual_seed(0)
    args = dict(n_layer=1, n_head=1, n_embd=16, block_size=64, bias=False, vocab_size=320, dropout=0.0)  # 257 bytes, padded
    torch.save({'model': GPT(GPTConfig(**args)).state_dict(), 'model_args': args, 'iter_num': 1, 'best_val_loss': 1.0, 'config': {},
                'tokenizer': {'kind': 'byte'}}, tmp_path / 'x.pt')
    place = [f"--init_from={tmp_path / 'x.pt'}", '--device=cpu', '--num_samples=8', '--max_new_tokens=100', '--temperature=5', '--top_k=None', '--start=a']
    result = script('sample.py', *place)
    assert result.status == 0 and len(samples(result)) == 8
    assert '<|endoftext|>' in result.out  # random weights produce it now and then among 800
    stopped = script('sample.py', *place, '--stop=<|endoftext|>')
    assert stopped.status == 0 and '<|endoftext|>' not in stopped.out and len(stopped.out) < len(result.out)
    assert checkpoint.load(str(tmp_path / 'x.pt'))[1].n_vocab == 257


def test_bad_requests_are_one_line(script, trained, tmp_path):
    (tmp_path / 'empty').write_text('\n\n')
    (tmp_path / 'latin').write_bytes(b'caf\xe9')
    (tmp_path / 'odd').write_text('7 times\n\u00e9\n')
    for args, words in [(['--temperature=-1'], ['temperature']), (['--top_k=0'], ['top_k']), (['--top_p=1.5'], ['top_p']), (['--num_samples=0'], ['num_samples']),
                        (['--max_new_tokens=-1'], ['max_new_tokens']), (['--start=é'], ['é', '--start']), (['--start=FILE:/nowhere'], ['/nowhere']),
                        (['--batch_size=0'], ['batch_size']), (['--num_samples=-1'], ['num_samples']), (['--max_new_tokens=0'], ['max_new_tokens']), (['--top_k=-5'], ['top_k']),
                        (['--top_p=0'], ['top_p']), (['--stop='], ['stop', 'empty']), (['--seed=-1'], ['seed']), (['--temperature=nan'], ['temperature', 'finite']),
                        (['--prompts=/nowhere'], ['/nowhere', '--prompts']), ([f"--prompts={tmp_path / 'empty'}"], ['no prompt', 'empty', 'line']),
                        ([f"--prompts={tmp_path / 'latin'}"], ['latin', 'UTF-8']), ([f"--prompts={tmp_path / 'odd'}"], ['é', '--prompts']), ([f'--start=FILE:{tmp_path}'], ['--start=FILE:']),
                        ([f"--prompts={tmp_path / 'odd'}", '--start=7'], ['two', '--prompts', '--start']), (['--dtype=float16'], ['float16', 'bfloat16']), (['--compile=maybe'], ['maybe', 'auto']),
                        (['--init_from=gpt2'], ['gpt2']), (['--init_from=nowhere.pt'], ['nowhere.pt']), (['--prompt=x'], ['--start'])]:
        result = script('sample.py', *trained, *args)
        assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1, (args, result.err)
        assert all(word in result.err for word in words), result.err
    result = script('sample.py', f"--out_dir={tmp_path / 'nothing'}", '--device=cpu')
    assert result.status == 2 and 'no checkpoint' in result.err


def test_it_does_not_guess_a_tokenizer(script, tmp_path):
    from model import GPT, GPTConfig
    args = dict(n_layer=1, n_head=1, n_embd=16, block_size=8, bias=False, vocab_size=23, dropout=0.0)
    for name in ('gone', '../../etc', '/etc'):
        torch.save({'model': GPT(GPTConfig(**args)).state_dict(), 'model_args': args, 'iter_num': 1, 'best_val_loss': 1.0, 'config': {'dataset': name}}, tmp_path / 'x.pt')
        result = script('sample.py', f"--init_from={tmp_path / 'x.pt'}", '--device=cpu')
        assert result.status == 2 and '--dataset' in result.err


def test_a_closed_pipe_is_no_traceback(trained, tmp_path):
    p = subprocess.Popen([sys.executable, str(REPO / 'sample.py'), trained[0], '--device=cpu', '--num_samples=50', '--max_new_tokens=40'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    p.stdout.close()
    assert 'Traceback' not in p.stderr.read()
    p.wait()


def test_prompts_of_a_file_give_the_greedy_texts_that_they_give_one_by_one(script, trained, tmp_path):
    prompts = ['7 times', '12 times 3 is', '8 times', '5', '', '31 times', '9 times', '12 times 4 is']
    (tmp_path / 'prompts.txt').write_text('\r\n'.join(prompts) + '\n')
    greedy = [*trained[:3], '--dtype=float32', '--temperature=0', '--max_new_tokens=50']  # block_size is 16: far across the edge
    together = samples(script('sample.py', *greedy, f"--prompts={tmp_path / 'prompts.txt'}"))
    one_by_one = sum((samples(script('sample.py', *greedy, f'--start={prompt}')) for prompt in prompts if prompt), [])
    assert together == one_by_one and len(together) == 14 and len(set(together)) == 7
    assert samples(script('sample.py', *greedy, f"--prompts={tmp_path / 'prompts.txt'}", '--batch_size=1')) == together
    stopped = samples(script('sample.py', *greedy, f"--prompts={tmp_path / 'prompts.txt'}", '--stop=.'))
    assert stopped == [prompt + text[len(prompt):].rstrip('\n').split('.')[0] + '\n' for prompt, text in zip([p for p in prompts if p for _ in 'ab'], together)]


def test_batches_hold_as_many_samples_as_asked_and_equal_lengths(script, trained, tmp_path, monkeypatch):
    from model import GPT
    shapes, generate = [], GPT.generate
    monkeypatch.setattr(GPT, 'generate', lambda self, idx, *args, **kwargs: (shapes.append(tuple(idx.shape)), generate(self, idx, *args, **kwargs))[1])
    (tmp_path / 'prompts.txt').write_text('777\n1\n888\n')
    script('sample.py', *trained, f"--prompts={tmp_path / 'prompts.txt'}", '--num_samples=3', '--batch_size=4')
    assert shapes == [(3, 1), (4, 3), (2, 3)]
    shapes.clear()
    script('sample.py', *trained, '--num_samples=10')
    assert shapes == [(10, 1)]


def test_bfloat16_is_chosen_where_it_is_faster(script, trained, monkeypatch):
    import parallel
    monkeypatch.setattr(parallel, 'choose_dtype', lambda dtype, device: ('bfloat16', '') if dtype == 'auto' else (dtype, ''))
    for flags, want in (([], 'bfloat16'), (['--num_samples=1'], 'float32'), (['--num_samples=1', '--dtype=bfloat16'], 'bfloat16'), (['--dtype=float32'], 'float32')):
        result = script('sample.py', *trained, *flags)
        assert result.status == 0 and result.globals['model'].transformer.wte.weight.dtype == getattr(torch, want), flags


def test_nothing_else_that_is_random_is_touched(script, trained):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = script('sample.py', *trained).out
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert script('sample.py', *trained).out == first


def test_too_little_memory_is_one_line(script, trained, monkeypatch):
    from model import GPT

    def generate(*args, **kwargs):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
    monkeypatch.setattr(GPT, 'generate', generate)
    result = script('sample.py', *trained)
    assert result.status == 2 and result.err.startswith('error: not enough memory') and '--batch_size' in result.err and result.err.count('\n') == 1


LINE = 'a\u00e9\u4e16\U0001f600\x1b[b\n'  # one, two, three and four bytes, and the beginning of a terminal's command; no byte twice


@pytest.fixture
def reciter(tmp_path):
    """A model of bytes that knows LINE by heart: after each byte comes the next one, whatever stood before."""
    from model import GPT, GPTConfig
    args = dict(n_layer=1, n_head=1, n_embd=260, block_size=16, bias=False, vocab_size=257, dropout=0.0, tie=False)
    net, ids = GPT(GPTConfig(**args)), LINE.encode()
    for name, p in net.named_parameters():
        torch.nn.init.ones_(p) if '.ln_' in name else torch.nn.init.zeros_(p)
    net.transformer.wte.weight.data[:257, :257] = torch.eye(257)
    for i, byte in enumerate(ids):
        net.lm_head.weight.data[ids[(i + 1) % len(ids)], byte] = 1
    torch.save({'model': net.state_dict(), 'model_args': args, 'iter_num': 1, 'best_val_loss': 1.0, 'config': {}, 'tokenizer': {'kind': 'byte'}}, tmp_path / 'x.pt')
    return [f"--init_from={tmp_path / 'x.pt'}", '--device=cpu', '--temperature=0']


def test_the_reciter_recites_and_a_character_is_never_cut_but_at_the_end(script, reciter):
    for number in ('--num_samples=1', '--num_samples=2'):  # as it is made, and in a batch
        for n in range(1, 40):
            text = (LINE.encode() * 5)[:n + 1].decode('utf-8', 'replace')
            assert samples(script('sample.py', *reciter, number, '--start=a', f'--max_new_tokens={n}')) == [text + '\n'] * int(number[-1])


@pytest.mark.parametrize('stop', ['\U0001f600', '\x1b[b', '\n', 'b\na\u00e9', 'not there', '\u4e16\U0001f600\x1b[b\na\u00e9\u4e16'])
def test_text_to_stop_at_is_found_across_tokens_and_no_part_of_it_is_shown(script, reciter, stop):
    text = LINE * 4
    cut = text.find(stop) if stop in text else len(text)
    for number in ('--num_samples=1', '--num_samples=2'):
        assert samples(script('sample.py', *reciter, number, '--start=a', f'--stop={stop}', f'--max_new_tokens={len(text.encode()) - 1}')) == [text[:cut] + '\n'] * int(number[-1])


def start(*args, **kwargs):
    return subprocess.Popen([sys.executable, str(REPO / 'sample.py'), *args], stderr=subprocess.PIPE, **kwargs)


def test_a_single_sample_appears_as_it_is_made_and_ctrl_c_ends_it(reciter):
    p = start(*reciter, '--num_samples=1', '--start=a', '--max_new_tokens=100000000', stdout=subprocess.PIPE)
    seen = b''
    while len(seen) < 2000:
        piece = os.read(p.stdout.fileno(), 65536)  # far from finished, and yet:
        assert piece.decode() and '\ufffd' not in piece.decode(), 'whole characters'
        seen += piece
    p.send_signal(signal.SIGINT)
    rest, err = p.communicate(timeout=60)
    text = (seen + rest).decode()
    assert text.endswith('\n---------------\n') and err == b'' and p.returncode == 128 + signal.SIGINT
    text = text.removesuffix('\n---------------\n')
    assert text.startswith(LINE * 100) and (LINE * (len(text) // len(LINE) + 1)).startswith(text.rstrip('\ufffd'))


def test_ctrl_c_prints_what_a_batch_has_made(script, reciter):
    def press():
        while getattr(signal.getsignal(signal.SIGINT), '__name__', '') != 'on_interrupt':
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=press)
    thread.start()
    result = script('sample.py', *reciter, '--start=a', '--num_samples=5', '--batch_size=3', '--max_new_tokens=100000000')
    thread.join()
    assert result.status == 128 + signal.SIGINT and result.err == ''
    made = samples(result)
    assert len(made) == 3 and len(set(made)) == 1 and made[0].startswith(LINE[:4]), 'the second batch never began'


def test_a_prompt_may_come_from_standard_input(script, reciter, trained):
    p = start(*reciter, '--num_samples=1', '--start=-', '--max_new_tokens=6', stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, err = p.communicate('x\ny a\n'.encode(), timeout=60)
    assert (p.returncode, err) == (0, b'') and out.decode() == 'x\ny a\u00e9\u4e16\ufffd\n---------------\n'
    p = start(*reciter, '--num_samples=1', '--start=-', stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, err = p.communicate(b'caf\xe9', timeout=60)
    assert p.returncode == 2 and err.startswith(b'error: standard input is not UTF-8') and err.count(b'\n') == 1


@pytest.mark.skipif(os.name == 'nt', reason='no pseudo-terminals')
def test_at_a_terminal_lines_are_answered_and_control_characters_are_escaped(reciter):
    import pty
    ours, theirs = pty.openpty()
    p = start(*reciter, '--num_samples=1', '--start=-', '--max_new_tokens=12', stdin=theirs, stdout=theirs)
    os.close(theirs)
    seen = b''

    def until(words, n=1):
        nonlocal seen
        end = time.time() + 60
        while seen.count(words.encode()) < n:
            assert time.time() < end and select.select([ours], [], [], 60)[0], seen
            seen += os.read(ours, 65536)
    until('> ')
    os.write(ours, b'x a\n')
    until('> ', 2)
    os.write(ours, b'b\n')
    until('> ', 3)
    assert seen.decode().count(r'\x1b') == 2 and b'\x1b' not in seen
    assert 'x a\u00e9\u4e16\U0001f600\\x1b[b' in seen.decode() and seen.decode().count('---------------') == 2
    os.write(ours, b'\x04')  # Ctrl-D
    assert p.wait(timeout=60) == 0 and p.stderr.read() == b''
    os.close(ours)


@pytest.mark.skipif(os.name == 'nt', reason='no pseudo-terminals')
def test_ctrl_c_at_a_terminal_ends_the_answer_and_asks_again(reciter):
    import pty
    ours, theirs = pty.openpty()
    p = start(*reciter, '--num_samples=1', '--start=-', '--max_new_tokens=100000000', stdin=theirs, stdout=theirs)
    os.close(theirs)
    seen = b''
    for line, words in ((None, b'> '), (b'a\n', b'a\xc3\xa9'), (None, b'[b\r\na'), ('interrupt', b'---------------\r\n> ')):
        if line == 'interrupt':
            p.send_signal(signal.SIGINT)
        elif line:
            os.write(ours, line)
        end = time.time() + 60
        while words not in seen:
            assert time.time() < end and select.select([ours], [], [], 60)[0], seen[-300:]
            seen += os.read(ours, 65536)
    os.write(ours, b'\x04')
    assert p.wait(timeout=60) in (0, 130) and p.stderr.read() == b''
    os.close(ours)
