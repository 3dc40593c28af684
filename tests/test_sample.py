"""sample.py writes text from the checkpoint alone, while it is made, up to a text or Ctrl-C."""

import os
import pickle
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import REPO, TEXT
from test_evaluation import learn, save_model, small_model

from chat import with_chat_tokens
from model import GPT
from tokenizer import make_tokenizer

DASHES = '\n---------------\n'
CHARS = ''.join(sorted(set(TEXT)))
# characters of one, two, three and four bytes; no byte twice
LINE = 'a\u00e9\u4e16\U0001f600b\n'


@pytest.fixture(autouse=True)
def pipes_as_before():
    """sample.py leaves SIGPIPE to the system, which these tests do not want."""
    handler = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, handler)


@pytest.fixture(scope='module')
def run_folder(tmp_path_factory):
    """A model of characters that has learned a little."""
    state = {'kind': 'char', 'chars': CHARS}
    net = small_model(len(CHARS))
    learn(net, make_tokenizer(state).encode(TEXT), 120, 16)
    return save_model(tmp_path_factory.mktemp('runs') / 'out', net, state)


def reciting_model(text, **sizes):
    """A model of bytes that recites `text`, in which no byte is twice: after each byte comes the next, after
    the last one the first."""
    ids = text.encode()
    net = small_model(n_layer=1, n_head=1, n_embd=270, tie=False, **{'vocab_size': 257, **sizes})
    for name, p in net.named_parameters():
        torch.nn.init.constant_(p, 1 if '.ln_' in name else 0)
    with torch.no_grad():
        net.transformer.wte.weight[:, :net.config.vocab_size] = torch.eye(net.config.vocab_size)
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


def test_the_checkpoint_alone_is_enough_and_a_seed_gives_the_same_text(works, trained, run_folder):
    result = works('sample.py', *trained, '--start=7 times')
    a, b = samples(result)
    assert a.startswith('7 times') and len(a) == len('7 times') + 40 and a != b
    assert 'times' in a[7:] or 'is' in a[7:], 'it has learned something'
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = works('sample.py', f'--out_dir={run_folder}', *trained[1:], '--start=7 times')
    assert again.out == result.out
    assert torch.equal(torch.get_rng_state(), state), 'the global generator is left alone'
    assert works('sample.py', *trained, '--start=7 times', '--seed=2').out != result.out


def test_its_flags(works, trained, run_folder, tmp_path):
    likeliest = samples(works('sample.py', *trained, '--temperature=0', '--start=7'))
    assert likeliest[0] == likeliest[1]
    assert samples(works('sample.py', *trained, '--top_k=1', '--start=7')) == likeliest
    assert samples(works('sample.py', *trained, '--top_p=1e-6', '--top_k=None', '--start=7')) == likeliest
    shutil.copy(run_folder / 'ckpt.pt', tmp_path / 'other.pt')
    path = f"--init_from={tmp_path / 'other.pt'}"
    assert samples(works('sample.py', *trained, '--temperature=0', '--start=7', path)) == likeliest
    assert len(samples(works('sample.py', *trained))[0]) == 40, 'without a prompt'
    stopped = samples(works('sample.py', *trained, '--temperature=0', '--start=7', '--stop=.'))[0]
    assert likeliest[0].startswith(stopped) and '.' not in stopped and len(stopped) < len(likeliest[0])


@pytest.mark.parametrize('content', [b'Q:\n7', '\ufeffQ:\n7'.encode(), 'Q:\r\n7'.encode(),
                                     'Q:\n7'.encode('utf-16')])
def test_a_prompt_from_a_file_is_its_text_without_the_byte_order_mark(content, works, greedy, tmp_path):
    (tmp_path / 'prompt.txt').write_bytes(content)
    result = works('sample.py', *greedy, f"--start=FILE:{tmp_path / 'prompt.txt'}", '--num_samples=1',
                   '--max_new_tokens=2')
    assert result.out.startswith('Q:\n7') and '\ufeff' not in result.out
    (tmp_path / 'prompts.txt').write_bytes(content)
    result = works('sample.py', *greedy, f"--prompts={tmp_path / 'prompts.txt'}", '--num_samples=1',
                   '--max_new_tokens=2')
    assert [text[:2] for text in samples(result)] == ['Q:', '7' + samples(result)[1][1]]


def test_backslash_n_is_a_new_line_in_start_stop_and_prompts(works, greedy, tmp_path):
    result = works('sample.py', *greedy, r'--start=Q:\na', r'--stop=\n', '--num_samples=2')
    assert samples(result) == 2 * ['Q:\na' + LINE[1:-1]]
    (tmp_path / 'prompts.txt').write_text('Q:\\na\n')
    from_file = f"--prompts={tmp_path / 'prompts.txt'}"
    result = works('sample.py', *greedy, from_file, '--stop=b', '--num_samples=1')
    assert samples(result) == ['Q:\na' + LINE[1:-2]]


def test_prompts_of_a_file_give_the_texts_that_they_give_one_by_one(works, trained, tmp_path):
    prompts = ['7 times', '12 times 3 is', '8 times', '5', '', '31 times', '9 times']
    (tmp_path / 'prompts.txt').write_text('\r\n'.join(prompts) + '\n')
    greedy = [*trained, '--temperature=0', '--max_new_tokens=50']  # block_size is 16: far beyond it
    together = samples(works('sample.py', *greedy, f"--prompts={tmp_path / 'prompts.txt'}"))
    one_by_one = []
    for prompt in prompts:
        if prompt:
            one_by_one += samples(works('sample.py', *greedy, f'--start={prompt}'))
    assert together == one_by_one and len(together) == 12 and len(set(together)) == 6
    assert samples(works('sample.py', *greedy, f"--prompts={tmp_path / 'prompts.txt'}",
                         '--batch_size=1')) == together


@pytest.mark.parametrize('stop', ['\U0001f600', 'b\na\u00e9', 'not there'])
def test_the_stop_text_is_found_across_tokens_and_no_part_of_it_is_shown(works, greedy, stop):
    text = LINE * 4
    n_tokens = len(text.encode()) - 1
    for number in (1, 2):
        result = works('sample.py', *greedy, f'--num_samples={number}', '--start=a', f'--stop={stop}',
                       f'--max_new_tokens={n_tokens}')
        assert samples(result) == number * [text.split(stop)[0]]


def test_ids_of_the_padding_are_never_drawn_and_the_end_of_text_ends(works, tmp_path):
    # 257 ids of bytes, padded to 320
    save_model(tmp_path / 'out', small_model(320), {'kind': 'byte'})
    result = works('sample.py', tmp_path / 'out', '--device=cpu', '--num_samples=8', '--max_new_tokens=100',
                   '--temperature=5', '--top_k=None', '--start=a')
    lengths = [len(text) for text in samples(result)]
    assert len(lengths) == 8 and '<|endoftext|>' not in result.out
    assert min(lengths) < 90, 'random weights draw the end now and then among 800 ids'


def test_the_weights_have_the_dtype_that_was_asked_for(works, trained):
    for dtype in ('float32', 'bfloat16'):
        result = works('sample.py', *trained, f'--dtype={dtype}')
        assert {p.dtype for p in result.globals['model'].parameters()} == {getattr(torch, dtype)}


def test_a_checkpoint_of_nanogpt_takes_the_tokenizer_of_its_dataset(works, tmp_path, data_dir):
    save_model(tmp_path / 'out', small_model(len(CHARS)))  # config names the dataset `toy`
    flags = [tmp_path / 'out', '--device=cpu', '--num_samples=1', '--max_new_tokens=20', '--start=7 times']
    result = works('sample.py', *flags, f'--data_dir={data_dir}')
    assert samples(result)[0].startswith('7 times') and set(samples(result)[0]) <= set(TEXT)
    (tmp_path / 'named').mkdir()
    shutil.copytree(data_dir / 'toy', tmp_path / 'named' / 'other')
    again = works('sample.py', *flags, f"--data_dir={tmp_path / 'named'}", '--dataset=other')
    assert again.out == result.out


def test_a_conversation(works, tmp_path, monkeypatch):
    state = with_chat_tokens({'kind': 'byte'})
    tokenizer = make_tokenizer(state)
    net = reciting_model('xyz', vocab_size=tokenizer.n_vocab, block_size=64)
    with torch.no_grad():  # an answer begins with x, and ends after z
        net.lm_head.weight[ord('x'), tokenizer.special['<|assistant_start|>']] = 1
        net.lm_head.weight[:, ord('z')] = 0
        net.lm_head.weight[tokenizer.special['<|assistant_end|>'], ord('z')] = 1
    save_model(tmp_path / 'out', net, state)
    flags = [tmp_path / 'out', '--device=cpu', '--dtype=float32', '--temperature=0', '--chat',
             '--max_new_tokens=20']
    assert works('sample.py', *flags, '--start=hello').out == 'xyz\n'
    (tmp_path / 'questions.txt').write_text('one\ntwo\n')
    assert works('sample.py', *flags, f"--prompts={tmp_path / 'questions.txt'}").out == 'xyz\nxyz\n'
    lines = iter(['hello', 'and again', ''])
    monkeypatch.setattr('builtins.input', lambda prompt: next(lines, None) or stop_talking())

    def stop_talking():
        raise EOFError
    assert works('sample.py', *flags).out.count('xyz\n') == 2


@pytest.mark.parametrize('flag', [
    '--temperature=-1', '--top_k=0', '--top_p=0', '--num_samples=0', '--start=\u00e9',
    '--start=FILE:/nowhere', '--prompts=latin', '--prompts=odd', '--init_from=nowhere.pt', '--chat',
    '--dataset=gone'])
def test_mistakes_are_one_line(script, trained, tmp_path, monkeypatch, flag):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'latin').write_bytes(b'caf\xe9')
    (tmp_path / 'odd').write_text('7 times\n\u00e9\n', encoding='utf-8')
    result = script('sample.py', *trained, flag)
    assert result.status == 2 and result.out == ''
    assert result.err.startswith('error: ') and result.err.count('\n') == 1, result.err


def test_logits_that_are_not_finite_are_one_line_and_status_3(script, run_folder, tmp_path):
    state = torch.load(run_folder / 'ckpt.pt', weights_only=True)
    for name, p in state['model'].items():
        if p.dim() == 2:
            state['model'][name] = p * 1e30
    torch.save(state, tmp_path / 'ckpt.pt')
    for number in (1, 3):
        result = script('sample.py', tmp_path, '--device=cpu', '--dtype=float32', f'--num_samples={number}')
        assert result.status == 3 and result.err.startswith('error: ') and result.err.count('\n') == 1


def started(*args, **env):
    """sample.py in a process of its own, its output a pipe."""
    return subprocess.Popen([sys.executable, str(REPO / 'sample.py'), *map(str, args)], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **env})


def test_a_single_sample_appears_while_it_is_made_and_ctrl_c_keeps_it(greedy):
    process = started(*greedy, '--num_samples=1', '--start=a', '--max_new_tokens=100000000')
    seen = b''
    while len(seen) < 2000:
        part = process.stdout.read1(65536)  # far from its end, and yet:
        assert part, process.stderr.read().decode()
        assert '\ufffd' not in part.decode(), 'whole characters'
        seen += part
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    text = (seen + rest).decode()
    assert process.returncode == 128 + signal.SIGINT and err == b'' and text.endswith(DASHES)
    text = text.removesuffix(DASHES).rstrip('\ufffd')
    assert len(text) > 1000 and (LINE * (len(text) // len(LINE) + 1)).startswith(text)


def test_ctrl_c_keeps_what_a_batch_has_made(script, greedy, monkeypatch):
    calls = []
    forward = GPT.forward

    def press(self, idx, **kwargs):  # Ctrl-C at the tenth token
        calls.append(idx)
        if len(calls) == 10:
            signal.raise_signal(signal.SIGINT)
        return forward(self, idx, **kwargs)
    monkeypatch.setattr(GPT, 'forward', press)
    result = script('sample.py', *greedy, '--start=a', '--num_samples=5', '--batch_size=3')
    assert result.status == 128 + signal.SIGINT and result.err == ''
    made = samples(result)
    assert len(made) == 3, 'the second batch never began'
    assert set(made) == {'a' + (LINE * 2).encode()[1:11].decode('utf-8', 'replace')}


def test_a_prompt_may_come_from_standard_input_on_a_console_of_cp1252(greedy):
    flags = ['--num_samples=1', '--start=-', '--max_new_tokens=5']
    process = started(*greedy, *flags, PYTHONIOENCODING='cp1252')
    out, err = process.communicate('x\ny a\n'.encode(), timeout=60)
    assert process.returncode == 0, err
    text = 'a\u00e9\u4e16'.encode('cp1252', 'backslashreplace')
    assert out == b'x\ny ' + text + DASHES.encode()


def test_a_meta_pkl_that_would_run_code_is_refused(script, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'canary'),)
    save_model(tmp_path / 'out', small_model(len(CHARS)))
    (tmp_path / 'data' / 'toy').mkdir(parents=True)
    (tmp_path / 'data' / 'toy' / 'meta.pkl').write_bytes(pickle.dumps(Evil()))
    result = script('sample.py', tmp_path / 'out', '--device=cpu', f"--data_dir={tmp_path / 'data'}")
    assert result.status == 2 and not (tmp_path / 'canary').exists()
