"""
What a person can get wrong is one line that says what, where and what to do, status 2, and nothing is written or executed. One table, by
claim; some rows are no mistakes, and work. Overrides are in test_configurator.py, prepare.py's in test_prepare.py, sample.py's in test_sample.py.
"""

import builtins
import os
import pickle
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO, Evil, captured, is_refused, make_dataset, own_process

from configurator import plain, types_of
from support import checkpoint, devices, setup
from support.files import read_json, write_json
from support.parallel import Distributed
from support.help import names_at_top

TABLE, FILES = [], {}  # FILES: those of a run of six iterations, made once


def row(flags, *words, given=None, status=2, lines=1, writes=False):
    """With `flags` (and what given(place, monkeypatch) prepares in the test's folder, which may return more of them) train.py ends with
    `status` and says all `words`."""
    name = f'line {sys._getframe(1).f_lineno}: {flags}'
    TABLE.append(pytest.param(shlex.split(flags), words, given, status, lines, writes, id=name[:80]))


# -----------------------------------------------------------------------------
# training data

def data(damage):
    return lambda place, monkeypatch: [damage(place / 'data' / 'tiny', place)][1:]


def meta(**changes):
    def change(folder, place):
        write_json(f'{folder}/meta.json', {**read_json(folder / 'meta.json'), **changes})
    return data(change)


def ids(function):
    def change(folder, place):
        function(np.fromfile(folder / 'train.bin', dtype='<u2')).tofile(folder / 'train.bin')
    return data(change)


def raw(content, name='train.bin'):
    """A dataset as nanoGPT's, with this file."""
    def change(folder, place):
        (folder / 'meta.json').unlink()
        (folder / name).write_bytes(pickle.dumps(Evil(place / 'canary')) if content is Evil else content)
    return data(change)


def gone(name):
    return data(lambda folder, place: (folder / name).unlink())


def shrinks_early(place, monkeypatch):
    train_bin = place / 'data' / 'tiny' / 'train.bin'
    monkeypatch.setattr(setup, 'expectation', lambda run: os.truncate(train_bin, 10) or '')  # before anything is built


def shrinking(place, monkeypatch):
    train_bin = place / 'data' / 'tiny' / 'train.bin'
    monkeypatch.setattr(checkpoint, 'clear', lambda *args: os.truncate(train_bin, 1000))  # right before the first iteration


row('--dataset=nowhere', 'nowhere', 'there is: tiny', 'prepare.py nowhere --input', 'runs/quickstart.sh')
row('--dataset=../tiny', '--data_dir')
row('--data_dir=/etc/passwd', 'there is: none yet')
row('', 'prepare.py', given=gone('train.bin'))
row('', '50257', 'train.bin', given=raw(b'\xff\xff' * 1000))  # no meta.json: GPT-2's tokens, as in nanoGPT
row('', 'meta.json', 'prepare.py', given=raw(b'[' * 100_000, 'meta.json'))
row('', 'not finished', 'python prepare.py x', given=meta(unfinished=True, command='python prepare.py x'))
for changes in (dict(vocab_size=10**30), dict(tokenizer={'kind': 'char', 'chars': 'ab'}), dict(splits={'train': 5}), dict(dtype='float32')):
    row('', 'meta.json', given=meta(**changes))
row('', 'tokenizer', 'data/tiny', given=meta(tokenizer={'kind': 'tiktoken', 'name': 'x', 'ranks_file': '../../../etc/passwd'}))
row('', 'prepare.py', given=meta(splits={'train': {'tokens': 5}}))
row('', 'train.bin', 'prepare.py', given=meta(dtype='uint32'))
row('', 'train.bin', 'multiple of 2', given=raw(b'\0' * 1001))
row('', 'val.bin has 1 tokens', '--block_size', given=raw(b'\0\0', 'val.bin'))
row('--block_size=99999', 'block_size', 'train.bin', 'val.bin', lines=2)
row('', 'train.bin', 'not the', 'prepare.py', given=ids(lambda a: a[:-10]))
row('', 'train.bin', '5000', 'another tokenizer', given=ids(lambda a: np.where(a > 9, 5000, a).astype('<u2')))
row('', 'train.bin', 'became shorter', given=shrinks_early, writes=True)
row('', 'train.bin', 'became shorter', given=shrinking, writes=True)
row('', 'meta.pkl', 'Path', given=raw(Evil, 'meta.pkl'))
row('', 'meta.pkl', 'prepare.py', given=raw(pickle.dumps({'vocab_size': 10**12, 'itos': {}}), 'meta.pkl'))

# -----------------------------------------------------------------------------
# knobs

def processes(n):
    return lambda place, monkeypatch: monkeypatch.setattr(Distributed.__init__, '__defaults__', ('', 0, n, False))


def environment(**variables):
    return lambda place, monkeypatch: [monkeypatch.setenv(*item) for item in variables.items()][:0]


def out_of_memory(text):
    def forward(*args, **how):
        raise RuntimeError(text)
    return lambda place, monkeypatch: monkeypatch.setattr('model.GPT.forward', forward)


for flags, *words in (
        ('--n_embd=30 --n_head=4', 'n_embd=30', '32'), ('--arch=llama --n_kv_head=3', 'n_kv_head=3', '--n_kv_head=1'),
        ('--n_layer=9999', 'n_layer', 'below 1,024'),
        ('--matrix_optimizer=muon', 'muon', '--arch=llama'), ('--block_size=1e12', 'block_size'), 
        ('--dropout=1', 'dropout'), ('--arch=gtp2', 'gtp2', 'llama'), ('--rope_scaling=llama3:nan:1:4:16 --arch=llama', 'llama3:FACTOR'),
        ('--warmup_iters=6', 'warmup_iters=6', 'lr_decay_iters=6', '--warmup_iters=0'),
        ('--init_from=scrath', 'no checkpoint in scrath', 'resume:PATH'), ('--init_from=gpt2-xl', 'gpt2-xl', 'go online', 'folder'),
        ('--lr_schedule=cosin', 'cosin', 'linear', 'constant'), ('--dtype=bf16', 'bf16', 'bfloat16'), ('--dtype=float16', 'float16', 'float32'),
        ('--device=cuda', '--device=auto'), ('--device=mps', 'mps', '--device=cpu'), ('--device=gpu', 'no such device', 'cuda:1'),
        ('--sample_tokens=1000000000000', 'sample_tokens', 'a million'), ('--total_batch_size=100', 'total_batch_size=100', '4 x 16 x 1 = 64', '64 or 128')):
    row(flags, *words)
for flag in ('beta2=1', 'budget=0tokens', 'budget=1e99epochs'):
    row(f'--{flag}', flag.split('=')[0], 'out of range')
row('--batch_size=0 --dropout=2 --decay_fraction=-1', 'batch_size', 'dropout', 'decay_fraction', lines=3)
row('', 'MASTER_ADDR', 'torchrun', given=environment(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1'))
for steps, same in ((1, '--batch_size=1 --total_batch_size=64'), (6, '--batch_size=3 --total_batch_size=384')):
    row(f'--gradient_accumulation_steps={steps}', f'gradient_accumulation_steps={steps}', 'number 4', same, given=processes(4))
row('--total_batch_size=650', '4 x 16 x 4 = 256', '512 or 768', given=processes(4))
for text in ('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total\nof', "DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 GiB"):
    row('', 'out of memory (', 'half the --batch_size with twice', given=out_of_memory(text), writes=True)

# -----------------------------------------------------------------------------
# the run's folder

def out_is_file(place, monkeypatch):
    (place / 'out').write_text('x')


def full(place, monkeypatch):
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: type('', (), {'free': 1000}))


def trained(place, monkeypatch=None, keep=lambda name: True):
    """The folder of a finished run."""
    (place / 'out').mkdir()
    for name, content in FILES.items():
        if keep(name):
            (place / 'out' / name).write_bytes(content)


for flags, given in (('', out_is_file), ('--out_dir={place}/out/run', out_is_file), ('--out_dir=/dev/null', None)):
    row(flags, 'out_dir', 'written', '--out_dir', given=given)
row('--keep_checkpoints=0', 'too little space', 'free; 1 checkpoints, the best', 'make room', given=full)
row('', 'already holds a run', '--init_from=resume', '--overwrite', '--out_dir', given=trained)
row('--overwrite', 'done: 6', given=trained, status=0)

# -----------------------------------------------------------------------------
# resuming

def run(*edits, log=None, **changes):
    """A run whose only checkpoint was changed: `edits` are functions of its state, `changes` new values of its keys; None removes one.
    log: what its log.csv holds."""
    def write(place, monkeypatch):
        trained(place, keep=lambda name: name == 'ckpt_00000006.pt')
        if log is not None:
            (place / 'out' / 'log.csv').write_bytes(log)
        path = place / 'out' / 'ckpt_00000006.pt'
        state = {**torch.load(path, weights_only=True), **changes}
        for edit in edits:
            state = edit(state) or state
        torch.save({name: value for name, value in state.items() if value is not None}, path)
        return ['--init_from=resume']
    return write


def decoy(*edits, **changes):
    """The same, and in another folder the same dataset, of which nothing shall be opened."""
    def write(place, monkeypatch):
        make_dataset(place / 'decoy')
        real = open

        def spy(path, *args, **how):
            assert 'decoy' not in str(path)
            return real(path, *args, **how)
        monkeypatch.setattr(builtins, 'open', spy)
        monkeypatch.chdir(place)
        return run(*edits, **changes)(place, monkeypatch)
    return write


def file(write):
    """A run whose only checkpoint is what write(path) made."""
    def prepare(place, monkeypatch):
        (place / 'out').mkdir()
        write(place / 'out' / 'ckpt.pt')
        return ['--init_from=resume']
    return prepare


def weights(*edits):
    """The run, and flags for a new one from its weights."""
    def prepare(place, monkeypatch):
        run(*edits)(place, monkeypatch)
        return [f"--init_from={place / 'out' / 'ckpt_00000006.pt'}", f"--out_dir={place / 'new'}"]
    return prepare


def both(first, second):
    return lambda place, monkeypatch: (second(place, monkeypatch) or []) + (first(place, monkeypatch) or [])


def edit(key, **changes):
    return lambda state: {**state, key: {**state[key], **changes}}


row('--init_from=resume', 'no checkpoint', '--out_dir', 'auto')
row('--init_from=auto', 'done: 6', status=0)
row("--init_from=resume:", 'resume:PATH')
row('--init_from=resume:{place}/nowhere', 'no checkpoint in', 'ckpt_00001000.pt')
row('--init_from=auto:{place}/data', 'no checkpoint in')
row('--init_from=resume:{place}/out --overwrite', 'out_dir itself', given=trained)
for write in (Path.mkdir, Path.touch, lambda p: p.write_bytes(FILES['ckpt.pt'][:-100])):
    row('', 'no checkpoint in', 'is whole', 'ckpt.pt', '--overwrite', given=file(write))
row('--n_layer=3 --n_embd=64 --max_iters=7', 'n_layer=3 is ignored, the checkpoint has 2', 'n_embd=64 is ignored', 'done: 7', given=run(), status=0)
row('--block_size=32', '--block_size=16', given=weights())
row('--dataset=other --max_iters=9', 'another tokenizer', given=both(run(), lambda place, _: make_dataset(place / 'data', 'other', text='other characters, other ids! ' * 200) and None))
row('--batch_size=8', 'tokens per iteration', '--total_batch_size=64', '--init_from=resume:', given=run())
row('--batch_size=8 --init_from=resume:{place}/out --out_dir={place}/b --max_iters=7', 'done: 7', given=run(), status=0)
row('', 'train.bin changed', '--init_from=resume:', given=both(run(), ids(lambda a: a[::-1])))
row('', 'this run is done: 6 of 6', '--max_iters=12', given=run(), status=0)
row('--dtype=bfloat16 --max_iters=7', 'done: 7', given=run(scaler={'scale': 65536.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 0}), status=0)
row('', 'newer flatgpt', 'update', given=run(version=2))

# -----------------------------------------------------------------------------
# what a file may say

def evil(of, raw=False):
    def write(place, monkeypatch):
        (place / 'out').mkdir()
        content = of(Evil(place / 'canary'))
        if raw:
            (place / 'out' / 'ckpt.pt').write_bytes(pickle.dumps(content, protocol=raw))
        else:
            torch.save(content, place / 'out' / 'ckpt.pt')
        return ['--init_from=resume']
    return write


W = 'transformer.h.0.attn.c_attn.weight'
row('', 'refused', 'would run code', given=evil(lambda e: e))
row('', 'refused', given=evil(lambda e: {'model': {}, 'model_args': e}))
row('', 'ckpt.pt', given=evil(lambda e: {'x': e}, raw=2))
row('', 'not a checkpoint', given=file(lambda p: torch.save({'model': torch.zeros(3)}, p)))
row('', 'weights only', given=run(optimizer=None))
row('--max_iters=7', 'log.csv', 'move it away', given=run(log=b'\xff\xfe'), writes=True)
row('', given=run(tokenizer={'kind': 'hf', 'name': 'x', 'json': '{'}))
for name, change in {'batch_size': 0, 'sample_tokens': 10**12}.items():
    row('--max_iters=7', name, given=run(edit('config', **{name: change})))
row('--max_iters=7', 'done: 7', given=run(edit('config', max_iters=None, learning_rate=float('nan'), lr_schedule='x', save=1, os='x', evil=1), lambda s: s['config'].update({5: 6})), status=0)
row('', "dataset is a folder's name", given=decoy(edit('config', dataset='../decoy/tiny')))
row('', 'no dataset decoy', given=decoy(edit('config', dataset='decoy')))
row('--max_iters=7', 'done: 7', given=decoy(edit('config', data_dir='decoy', out_dir='decoy', init_from='decoy', overwrite=True, wandb_log=True)), status=0)
for change in (lambda s: s['optimizer'].clear(), lambda s: s['optimizer']['state'][0].update(exp_avg=torch.zeros(3))):
    row('', "optimizer's state", '--init_from=', given=run(change))
for change in (dict(n_layer='2'), dict(evil=1), dict(n_embd=64)):
    row('', 'ckpt_00000006.pt', given=weights(edit('model_args', **change)))
for change in (lambda p: 'x', lambda p: p * float('nan'), torch.Tensor.to_sparse):
    row('', 'ckpt_00000006.pt', given=weights(lambda s, f=change: s['model'].update({W: f(s['model'][W])})))
for change in (lambda s: s['model'].pop(W) is None, edit('model', **{'x.y': torch.zeros(2)})):
    row('', 'ckpt_00000006.pt', given=weights(change))

# -----------------------------------------------------------------------------


def listing(folder):
    """What is in a folder; not the lock of a run, which says nothing."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob('*') if path.name != '.lock'}


@pytest.fixture(autouse=True)
def files(script, tiny, tmp_path):
    if not FILES:
        assert script('train.py', *tiny).status == 0
        FILES.update({path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()})
        shutil.rmtree(tmp_path / 'out')


@pytest.mark.parametrize('flags, words, given, status, lines, writes', TABLE)
def test_bad_input(script, tiny, tmp_path, monkeypatch, flags, words, given, status, lines, writes):
    if any('mps' in flag for flag in flags) and torch.backends.mps.is_available():
        pytest.skip('this machine has that device')
    flags = [str(flag).replace('{place}', str(tmp_path)) for flag in [*(given and given(tmp_path, monkeypatch) or []), *flags]]
    if '--init_from=resume' in flags and (tmp_path / 'out').exists():  # a run brings its own knobs
        tiny = ['--device=cpu', '--dtype=float32', '--compile=False', f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}"]
    before = listing(tmp_path)
    result = script('train.py', *tiny, *flags)
    if status == 2:
        is_refused(result, *words, lines=lines)
        assert writes or listing(tmp_path) == before, 'nothing is written'
    assert result.status == status and 'Traceback' not in result.err, result.out + result.err
    for word in words:
        assert word in result.out + result.err
    assert not (tmp_path / 'canary').exists(), 'nothing is executed'


KNOBS = names_at_top(REPO / 'train.py')


@pytest.mark.parametrize('name', [name for name, kinds in types_of(KNOBS, plain(KNOBS)).items() if {int, float} & set(kinds)])
def test_a_number_of_0_or_less_is_a_run_or_one_line(script, tiny, name):
    for value in (0, -1):
        result = script('train.py', *tiny, '--overwrite', f'--{name}={value}')
        if result.status:
            is_refused(result, name)
        else:
            assert 'done: ' in result.out


def test_sampling_from_a_hostile_file_opens_nothing(script, tmp_path, monkeypatch):
    # with no tokenizer in the file, the dataset's name tells it
    decoy(edit('config', dataset='../decoy/tiny'), tokenizer=None)(tmp_path, monkeypatch)
    is_refused(script('sample.py', f"--init_from={tmp_path / 'out' / 'ckpt_00000006.pt'}", '--device=cpu', f"--data_dir={tmp_path / 'data'}"), '../decoy/tiny', '--data_dir=PATH')


def test_gpus_are_numbered_and_counted(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    assert devices.choose_device('cuda', local_rank=1, is_distributed=True)[0] == torch.device('cuda:1')
    for args, words in [(('cuda:2',), ['cuda:2', '2 GPU']), (('cuda', 3, True), ['2 GPU', '--nproc_per_node=2'])]:
        with pytest.raises(SystemExit):
            devices.choose_device(*args)
        err = capsys.readouterr().err
        assert all(word in err for word in words), err
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'Tesla T4')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (7, 5))
    assert devices.choose_dtype('auto', torch.device('cuda:0'))[0] == 'float16'
    with pytest.raises(SystemExit):
        devices.choose_dtype('bfloat16', torch.device('cuda:0'))
    assert 'T4' in capsys.readouterr().err


@pytest.mark.parametrize('name', 'train.py sample.py eval.py plan.py'.split())
def test_a_missing_torch_is_refused(name, tmp_path):
    (tmp_path / 'torch.py').write_text('raise ModuleNotFoundError("No module named \'torch\'", name="torch")')
    result = own_process(name, cwd=tmp_path, env={'PYTHONPATH': str(tmp_path)})
    is_refused(result, f'error: a package is missing in {sys.executable} (No module named \'torch\'). ', 'pip install -r ')


def test_an_old_python_is_refused():
    code = f'import sys; sys.path.insert(0, {str(REPO)!r}); sys.version_info = (3, 10, 4); import configurator'
    done = captured([sys.executable, '-c', code])
    assert done.returncode == 2 and re.fullmatch(r'error: this Python is too old \(.*\)\. use 3\.11 or newer\n', done.stderr)
