"""sample.py writes from the checkpoint alone."""

import shutil

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
    for args, words in [(['--temperature=-1'], ['temperature']), (['--top_k=0'], ['top_k']), (['--top_p=1.5'], ['top_p']), (['--num_samples=0'], ['num_samples']),
                        (['--max_new_tokens=-1'], ['max_new_tokens']), (['--start=é'], ['é', '--start']), (['--start=FILE:/nowhere'], ['/nowhere']),
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
    import subprocess, sys
    p = subprocess.Popen([sys.executable, str(REPO / 'sample.py'), trained[0], '--device=cpu', '--num_samples=50', '--max_new_tokens=40'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    p.stdout.close()
    assert 'Traceback' not in p.stderr.read()
    p.wait()
