"""What a person can get wrong is one line that says what, where and what to do, status 2, and nothing is written."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_dataset

KNOBS = [  # flags, words that the line must have
    (['--dataset=nowhere'], ['nowhere', 'tiny', 'prepare.py nowhere --input', 'runs/quickstart.sh']),
    (['--dataset=pystdlib'], ['python prepare.py pystdlib']),
    (['--dataset=../tiny'], ['--data_dir']),
    (['--n_embd=30', '--n_head=4'], ['n_embd=30', '28', '32']),
    (['--block_size=0'], ['block_size', 'above 0']),
    (['--batch_size=0'], ['batch_size', 'above 0']),
    (['--n_layer=0'], ['n_layer']),
    (['--dropout=1'], ['dropout']),
    (['--dropout=-0.1'], ['dropout']),
    (['--learning_rate=-1'], ['learning_rate']),
    (['--learning_rate=inf'], ['learning_rate', 'finite']),
    (['--grad_clip=-1'], ['grad_clip']),
    (['--warmup_iters=6'], ['warmup_iters=6', 'lr_decay_iters=6', '--warmup_iters=']),
    (['--warmup_iters=50'], ['warmup_iters=50']),
    (['--min_lr=1'], ['min_lr', 'learning_rate', '--min_lr=0.001']),
    (['--eval_interval=-1'], ['eval_interval']),
    (['--log_interval=-1'], ['log_interval']),
    (['--eval_iters=-5'], ['eval_iters']),
    (['--max_iters=-1'], ['max_iters']),
    (['--seed=-1'], ['seed']),
    (['--beta2=1'], ['beta2']),
    (['--keep_checkpoints=0'], ['keep_checkpoints']),
    (['--init_from=scrath'], ['scrath', 'scratch', 'resume']),
    (['--init_from=gpt2-xl'], ['gpt2-xl', 'go online', 'folder']),
    (['--init_from=some where'], ['some where', 'OWNER/NAME']),
    (['--dtype=bf16'], ['bf16', 'bfloat16']),
    (['--dtype=float16'], ['float16', 'float32']),
    (['--lr_schedule=cosin'], ['cosin', 'linear', 'constant']),
    (['--matmul_precision=max'], ['max', 'highest']),
    (['--compile=maybe'], ['maybe', 'auto']),
    (['--device=gpu'], ['gpu', 'cuda']),
    (['--device=cuda'], ['--device=cpu']),
    (['--device=cuda:9'], ['cuda']),
    (['--device=mps'], ['mps', '--device=cpu']),
    (['--backend=nncl'], ['nncl', 'gloo']),
    (['--total_batch_size=100'], ['total_batch_size=100', '4 x 16 x 1 = 64', '64 or 128']),
    (['--total_batch_size=10'], ['64']),
    (['--max_tokens=100', '--max_epochs=1'], ['max_tokens', 'max_epochs', 'one']),
    (['--max_epochs=0'], ['max_epochs']),
    (['--block_size=99999'], ['block_size', 'train.bin', 'val.bin']),
    (['--init_from=resume'], ['no checkpoint', 'auto']),
]


def is_one_line(result, *words, lines=1):
    assert result.status == 2, result.out + result.err
    assert result.err.startswith('error: ') and result.err.count('\n') == lines and 'Traceback' not in result.err
    for word in words:
        assert word in result.err, result.err


@pytest.mark.parametrize('flags, words', KNOBS, ids=[' '.join(flags) for flags, _ in KNOBS])
def test_a_wrong_knob_is_named_with_its_remedy(script, tiny, tmp_path, flags, words):
    if 'cuda' in flags[0] and torch.cuda.is_available() or 'mps' in flags[0] and torch.backends.mps.is_available():
        pytest.skip('this machine has that device')
    before = sorted(tmp_path.rglob('*'))
    is_one_line(script('train.py', *tiny, *flags), *words, lines=2 if '99999' in flags[0] else 1)
    assert sorted(tmp_path.rglob('*')) == before, 'nothing is written'


def test_several_wrong_knobs_are_named_at_once(script, tiny):
    is_one_line(script('train.py', *tiny, '--batch_size=0', '--dropout=2', '--lr_schedule=x'), lines=3)


def damaged_folders():
    def cut(folder):
        (folder / 'train.bin').write_bytes((folder / 'train.bin').read_bytes()[:-10])

    def odd(folder):
        (folder / 'meta.json').unlink()
        (folder / 'train.bin').write_bytes(b'\0' * 1001)

    def empty(folder):
        (folder / 'meta.json').unlink()
        (folder / 'val.bin').write_bytes(b'')

    def meta_text(text):
        return lambda folder: (folder / 'meta.json').write_text(text)

    def large_id(folder):
        ids = np.fromfile(folder / 'train.bin', dtype='<u2')
        ids[len(ids) // 2:] = 5000
        ids.tofile(folder / 'train.bin')

    def no_train(folder):
        (folder / 'train.bin').unlink()
    return {'cut': (cut, ['train.bin', 'prepare.py']), 'odd': (odd, ['train.bin', 'multiple of 2']), 'empty': (empty, ['val.bin', 'empty']),
            'not json': (meta_text('{'), ['meta.json', 'prepare.py']), 'not a meta': (meta_text('[1]'), ['meta.json']),
            'unfinished': (meta_text(json.dumps({'unfinished': True, 'command': 'python prepare.py x'})), ['not finished', 'python prepare.py x']),
            'large id': (large_id, ['5000', 'train.bin']), 'no train.bin': (no_train, ['train.bin'])}


@pytest.mark.parametrize('kind', damaged_folders())
def test_a_damaged_dataset_is_named(script, tiny, tmp_path, kind):
    damage, words = damaged_folders()[kind]
    damage(tmp_path / 'data' / 'tiny')
    is_one_line(script('train.py', *tiny), *words)
    assert not (tmp_path / 'out').exists()


def test_a_file_that_shrinks_under_a_run_is_named(tmp_path, capsys):
    from dataset import Dataset
    folder = make_dataset(tmp_path)
    data = Dataset('tiny', tmp_path)
    (folder / 'train.bin').write_bytes((folder / 'train.bin').read_bytes()[:100])
    with pytest.raises(SystemExit) as e:
        data.train.windows([5000], 17)
    assert e.value.code == 2 and 'shorter' in capsys.readouterr().err


def test_an_out_dir_that_is_a_file_or_holds_a_run_is_not_touched(script, tiny, tmp_path):
    (tmp_path / 'file').write_text('x')
    is_one_line(script('train.py', *tiny, f"--out_dir={tmp_path / 'file'}"), 'file')
    script('train.py', *tiny)
    before = {p.name: p.read_bytes() for p in (tmp_path / 'out').iterdir()}
    is_one_line(script('train.py', *tiny), '--init_from=resume', '--overwrite', '--out_dir')
    assert {p.name: p.read_bytes() for p in (tmp_path / 'out').iterdir()} == before
    assert script('train.py', *tiny, '--overwrite').status == 0


def test_a_checkpoint_that_would_run_code_does_not(script, tiny, tmp_path):
    canary = tmp_path / 'canary'

    class Evil:
        def __reduce__(self):
            return (Path.touch, (canary,))
    (tmp_path / 'out').mkdir()
    for content in (Evil(), {'model': {}, 'model_args': Evil()}):
        torch.save(content, tmp_path / 'out' / 'ckpt.pt')
        is_one_line(script('train.py', *tiny, '--init_from=resume'), 'ckpt.pt', 'refused')
        is_one_line(script('sample.py', f"--out_dir={tmp_path / 'out'}", '--device=cpu'), 'refused')
    (tmp_path / 'out' / 'ckpt.pt').write_bytes(pickle.dumps(Evil()))
    is_one_line(script('sample.py', f"--out_dir={tmp_path / 'out'}", '--device=cpu'), 'ckpt.pt')
    assert not canary.exists()


def test_a_damaged_or_foreign_checkpoint_is_named(script, tiny, tmp_path):
    script('train.py', *tiny)
    path = tmp_path / 'out' / 'ckpt.pt'
    place = [f'--init_from={path}', '--device=cpu']
    content, state = path.read_bytes(), torch.load(path, weights_only=True)
    path.unlink()  # it is a link: the others shall stay as they are
    for cut in (0, 1, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        is_one_line(script('sample.py', *place), 'ckpt.pt')
    for change in (dict(n_layer=10**9), dict(n_layer='2'), dict(vocab_size=10**12), dict(evil=1), dict(n_embd=64)):
        torch.save({**state, 'model_args': {**state['model_args'], **change}}, path)
        is_one_line(script('sample.py', *place), 'ckpt.pt', list(change)[0])
    torch.save({'weights': torch.zeros(3)}, path)
    is_one_line(script('sample.py', *place), 'not a checkpoint')
    torch.save(state, path)
    assert script('sample.py', *place, '--num_samples=1', '--max_new_tokens=2').status == 0


def test_a_dataset_with_another_tokenizer_is_refused(script, tiny, tmp_path):
    script('train.py', *tiny)
    make_dataset(tmp_path / 'data', 'other', text='other characters, other ids! ' * 200)
    is_one_line(script('train.py', *tiny, '--init_from=resume', '--dataset=other', '--max_iters=9'), 'other', 'tokenizer')
    same_size = ''.join(chr(ord(c) + 200) if c.isalpha() else c for c in open(__file__, encoding='utf-8').read())
    make_dataset(tmp_path / 'data', 'third', text=same_size)
    is_one_line(script('train.py', *tiny, f"--init_from={tmp_path / 'out'}", f"--out_dir={tmp_path / 'new'}", '--dataset=third'), 'tokenizer')


def test_missing_packages_are_one_sentence(script, tiny, monkeypatch):
    import importlib.util
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name, *a: None if name == 'wandb' else real(name, *a))
    is_one_line(script('train.py', *tiny, '--wandb_log'), 'wandb', 'pip install wandb')


def test_an_old_torch_is_named(monkeypatch, capsys):
    import importlib
    import parallel
    monkeypatch.setattr(torch, '__version__', '2.8.0+cpu')
    with pytest.raises(SystemExit) as e:
        importlib.reload(parallel)
    assert e.value.code == 2 and '2.9' in capsys.readouterr().err
    monkeypatch.undo()
    importlib.reload(parallel)


def test_gpus_are_numbered_and_counted(monkeypatch, capsys):
    import parallel
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    assert parallel.choose_device('auto')[0] == parallel.choose_device('cuda')[0] == torch.device('cuda:0')
    assert parallel.choose_device('cuda:1')[0] == torch.device('cuda:1')
    assert parallel.choose_device('cuda', local_rank=1, many=True)[0] == torch.device('cuda:1')
    for args, words in [(('cuda:2',), ['cuda:2', '2 GPUs', '--device=cuda:1']), (('cuda', 3, True), ['2 GPUs', '--nproc_per_node=2'])]:
        with pytest.raises(SystemExit):
            parallel.choose_device(*args)
        err = capsys.readouterr().err
        assert all(word in err for word in words), err
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'Tesla T4')
    for capability, want in ((7, 5), 'float16'), ((8, 0), 'bfloat16'):
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device, c=capability: c)
        assert parallel.choose_dtype('auto', torch.device('cuda:0'))[0] == want
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (7, 5))
    with pytest.raises(SystemExit):
        parallel.choose_dtype('bfloat16', torch.device('cuda:0'))
    assert 'T4' in capsys.readouterr().err
