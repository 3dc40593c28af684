"""
What a person can get wrong is one line that says what, where and what to do, status 2, and nothing is written or executed.

The rows of the table of bad inputs: 1-13 overrides, 26-35 training data, 36-50 knobs, 51-52 the run's folder, 53-61 resuming. (14-25
are prepare.py's, 62-71 sample.py's.) A row may have several cases; some are no mistakes, and work.
"""

import builtins
import importlib
import importlib.util
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO, make_dataset

import dataset
from support import devices
from support.distributed import Distributed

TABLE, FILES = [], {}  # FILES: those of a run of six iterations, made once


def row(number, flags, *words, given=None, status=2, lines=1, writes=False, what=None):
    """A case of row `number`: with `flags` (and what given(place, monkeypatch) prepares in the test's folder, which may return more of them)
    train.py ends with `status` and says all `words`."""
    TABLE.append(pytest.param(shlex.split(flags), words, given, status, lines, writes, id=f'row {number}: {what or flags}'))


def is_one_line(result, *words, lines=1):
    assert result.status == 2, result.out + result.err
    assert result.err.startswith('error: ') and result.err.count('\n') == lines and 'Traceback' not in result.err, result.err
    for word in words:
        assert word in result.err, result.err


class Evil:
    """Unpickled by the ordinary reader, it makes the file `canary`."""
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


# -----------------------------------------------------------------------------
# 1-13: overrides, see test_configurator.py as well

def config(content, name='c.py'):
    def write(place, monkeypatch):
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return [place / name]
    return write


def elsewhere(place, monkeypatch):
    (place / 'elsewhere').mkdir()
    monkeypatch.chdir(place / 'elsewhere')


def config_folder(place, monkeypatch):
    (place / 'c.py').mkdir()
    return [place / 'c.py']


row(1, '--lerning_rate=1', 'lerning_rate', 'did you mean --learning_rate')
row(1, '--ünknown=1', '--help')
row(1, '--', '--help')
row(2, '', 'learning_rte', 'c.py', '--learning_rate', given=config('learning_rte = 1'), what='an unknown name in a config file')
row(2, '', 'done: 6', given=config('def helper(): pass'), status=0, what='a function in a config file')
row(3, '--learning_rate=1', 'schedule  cosine, 1 after', status=0)
row(4, '--wandb_run_name=a=b', status=0)
row(4, '--wandb_run_name=', status=0)
row(5, '--batch_size 3', '48 tokens per iteration', status=0)
row(6, '--compile False', status=0)
row(6, '--max_iters', 'whole number')
for flags, words in {'--batch_size=x': 'whole number', '--batch_size=1.5': 'whole number', '--batch_size=': 'whole number', '--learning_rate=': 'a number',
                     '--max_iters=99999999999999999999': 'below 2**63', '--eval_iters=1e30': 'below 2**63', f"--seed={'9' * 5000}": 'finite',
                     '--bias=maybe': 'True or False'}.items():
    row(7, flags, re.match('--(.*)=', flags)[1], words, what=flags[:40])
for content in ('batch_size = "4"', 'batch_size = [4]', 'batch_size = None', 'batch_size = lambda: 4', 'batch_size = 10**30', 'import numpy\nbatch_size = numpy.ones((9, 9))'):
    row(7, '', 'batch_size', 'c.py', 'whole number', given=config(content), what=content)
row(8, 'nowhere.py', 'nowhere.py', os.getcwd())
row(8, '', 'c.py', 'not found', given=config_folder, what='a folder for a config file')
row(8, 'tiny.cfg', 'neither a config file')
for content, words in {'batch_size = (': ':1', 'x = 1\nbatch_size = 1 / 0': ':2', 'import no_such_module': ':1', 'raise ValueError("one\\ntwo")': ':1', 'import sys; sys.exit(0)': ':1',
                       'batch_size = 4\0': 'c.py', 'def f(): f()\nf()': 'RecursionError', 'assert False': 'AssertionError', 'del batch_size': 'NameError'}.items():
    row(9, '', 'c.py', words, given=config(content), what=content)
row(10, '', 'utf-8', 'c.py', given=config(b'x = "\xff"\n'), what='a config file that is not UTF-8')
row(11, '--max_iters=7 --max_iters=4', 'done: 4 iterations', status=0)
row(12, '--seed=True', 'seed', 'whole number')
row(12, '', 'seed', 'whole number', given=config('seed = True'), what='seed = True')
row(13, 'config/quickstart.py --dataset=tiny --max_iters=0 --n_layer=1 --n_embd=32 --n_head=2 --block_size=16 --eval_iters=1', 'done', given=elsewhere, status=0)

# -----------------------------------------------------------------------------
# 26-35: training data

def data(damage):
    return lambda place, monkeypatch: [damage(place / 'data' / 'tiny', place)][1:]


def meta(**changes):
    def change(folder, place):
        old = json.loads((folder / 'meta.json').read_text())
        (folder / 'meta.json').write_text(json.dumps({**old, **changes}))
    return data(change)


def meta_text(text):
    return data(lambda folder, place: (folder / 'meta.json').write_bytes(text if isinstance(text, bytes) else text.encode()))


def ids(function, split='train', keep_meta=True):
    def change(folder, place):
        function(np.fromfile(folder / f'{split}.bin', dtype='<u2')).tofile(folder / f'{split}.bin')
        if not keep_meta:
            (folder / 'meta.json').unlink()
    return data(change)


def raw(content, split='train'):
    def change(folder, place):
        (folder / 'meta.json').unlink()
        (folder / f'{split}.bin').write_bytes(content)
    return data(change)


def meta_pkl(content):
    def change(folder, place):
        (folder / 'meta.json').unlink()
        (folder / 'meta.pkl').write_bytes(content if isinstance(content, bytes) else pickle.dumps(Evil(place / 'canary') if content is Evil else content))
    return data(change)


def gone(name, folder_instead=False):
    def change(folder, place):
        (folder / name).unlink()
        if folder_instead:
            (folder / name).mkdir()
    return data(change)


def shrinking(place, monkeypatch):
    monkeypatch.setattr(dataset.Tokens, 'too_short', lambda self, block_size: os.truncate(self.path, 1000))


row(26, '--dataset=nowhere', 'nowhere', 'there is: tiny', 'prepare.py nowhere --input', 'runs/quickstart.sh')
row(26, '--dataset=pystdlib', 'python prepare.py pystdlib')
for name in ('../tiny', '/etc', '..', "''"):
    row(26, f'--dataset={name}', '--data_dir')
row(26, '--data_dir=/etc/passwd', 'there is none yet')
row(26, '', 'no train.bin', 'prepare.py', given=gone('train.bin'), what='no train.bin')
row(27, '', '50257', 'train.bin', given=raw(b'\xff\xff' * 1000), what='no meta.json: GPT-2 tokens, as in nanoGPT')
for text in ('{', '[1]', '', 'null', '"x"', '[' * 100_000, b'\xff\xfe{', '{"vocab_size": ' + '9' * 5000 + '}'):
    row(27, '', 'meta.json', 'prepare.py', given=meta_text(text), what=f'meta.json is {text[:20]!r}')
row(27, '', 'meta.json', given=gone('meta.json', folder_instead=True), what='meta.json is a folder')
row(27, '', 'not finished', 'python prepare.py x', given=meta(unfinished=True, command='python prepare.py x'), what='an unfinished dataset')
for vocab_size in (10**12, 10**30, -1, 0, 18.0, 1.5, '18', True, None, [18], 19, 1e400):
    row(27, '', 'meta.json', 'vocab_size', given=meta(vocab_size=vocab_size), what=f'vocab_size={vocab_size!r}')
for tokenizer in (None, [1], {}, {'kind': None}, {'kind': 'x'}, {'kind': ['char']}, {'kind': 'char'}, {'kind': 'char', 'chars': 5}, {'kind': 'char', 'chars': 'ab'}, {'kind': 'tiktoken'}, {'kind': 'hf', 'name': 5}):
    row(27, '', 'meta.json', given=meta(tokenizer=tokenizer), what=f'tokenizer={tokenizer}')
for path in ('../../../etc/passwd', '/etc/passwd', '', '..', 5, 'tokenizer.tiktoken'):
    row(27, '', "tokenizer's file", 'data/tiny', given=meta(tokenizer={'kind': 'tiktoken', 'name': 'x', 'ranks_file': path}), what=f'ranks_file={path!r}')
row(28, '', 'train.bin', 'not the', 'prepare.py', given=ids(lambda a: a[:-10]), what='a file that was cut')
for tokens in (5, -5, 64281.5, '64281', True, None, 10**300):
    row(28, '', 'prepare.py', given=meta(splits={'train': {'tokens': tokens}}), what=f'tokens={tokens!r:.10}')
for splits in ([], None, {'train': 5}, {'train': {}}):
    row(28, '', 'meta.json', given=meta(splits=splits), what=f'splits={splits}')
row(29, '', 'train.bin', 'multiple of 2', given=raw(b'\0' * 1001), what='an odd number of bytes')
row(30, '', 'val.bin', 'empty', given=raw(b'', 'val'), what='an empty val.bin')
row(30, '', 'train.bin', 'empty', given=raw(b''), what='an empty train.bin')
row(30, '', 'train.bin', given=gone('train.bin', folder_instead=True), what='train.bin is a folder')
row(31, '--block_size=99999', 'block_size', 'train.bin', 'val.bin', lines=2)
row(31, '', 'val.bin has 1 tokens', '--block_size', given=raw(b'\0\0', 'val'), what='one token')
row(32, '', 'train.bin', '5000', 'another tokenizer', given=ids(lambda a: np.where(np.arange(len(a)) < len(a) // 2, a, 5000).astype('<u2')), what='a token beyond the vocabulary')
row(33, '', 'meta.pkl', 'Path', given=meta_pkl(Evil), what='meta.pkl that would run code')
row(33, '', 'meta.pkl', 'os.system', given=meta_pkl(b'cos\nsystem\n(S"touch canary"\ntR.'), what='meta.pkl that calls os.system')
for content in (b'', b'x', [1], {'vocab_size': -1, 'itos': {}}, {'vocab_size': 0, 'itos': {}}, {'vocab_size': 10**12, 'itos': {}}, {'vocab_size': 1e400, 'itos': {}}, {'vocab_size': 1, 'itos': [5]}, {'vocab_size': 0}, {'vocab_size': 'x'}, {'itos': ['a']},
                b'\x80\x04\x8d' + (2**62).to_bytes(8, 'little'), b'Px\n.', b'\x80\x02\x82\x01.'):
    row(33, '', 'meta.pkl', 'prepare.py', given=meta_pkl(content), what=f'meta.pkl is {content}')
row(34, '', 'train.bin', 'became shorter', '--init_from=auto', given=shrinking, writes=True, what='a file that shrinks under a run')
row(35, '', 'train.bin', 'another tokenizer', given=ids(lambda a: a.astype('>u2')), what='big-endian tokens')
for dtype in ('float32', '>u2', ['uint16'], None):
    row(35, '', 'meta.json', 'dtype', given=meta(dtype=dtype), what=f'dtype={dtype!r}')
row(35, '', 'train.bin', 'multiple of 4', given=meta(dtype='uint32'), what="dtype='uint32' of uint16 tokens")

# -----------------------------------------------------------------------------
# 36-50: knobs

def processes(n):
    def pretend(place, monkeypatch):
        monkeypatch.setattr(Distributed, 'world_size', n)
    return pretend


def environment(**variables):
    def set(place, monkeypatch):
        for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    return set


def no_compiler(place, monkeypatch):
    def compile(model, **how):
        def call(*args):
            raise RuntimeError('InvalidCxxCompiler: No working C++ compiler found\nin your path')
        model._compiled_call_impl = call
    monkeypatch.setattr(torch.nn.Module, 'compile', compile)


row(36, '--n_embd=30 --n_head=4', 'n_embd=30', '28', '32')
row(36, '--arch=llama --n_kv_head=3', 'n_kv_head=3', '--n_kv_head=2')
row(36, '--arch=llama --n_embd=6', 'rope')
# these took minutes, or all memory
row(36, '--arch=llama --n_head=1000000000000000000 --n_kv_head=1000000000000', 'n_head', 'n_kv_head', 'below 1,048,576', lines=2)
row(36, '--n_layer=9999', 'n_layer', 'below 1,024')
row(36, '--arch=llama --block_size=8000000 --n_embd=4096 --n_head=1', "rope's table for block_size=8000000", '--block_size=262144')
row(36, '--matrix_optimizer=muon', 'muon', '--arch=llama')
row(37, '--block_size=0', 'block_size', 'above 0')
row(37, '--block_size=-16', 'block_size', 'above 0')
row(37, '--block_size=1e12', 'block_size')
row(38, '--batch_size=0', 'batch_size', 'above 0')
row(38, '--batch_size=100000000007', 'batch_size', '--gradient_accumulation_steps')
for flags in ('--n_layer=0', '--n_layer=-1', '--n_layer=1e9', '--n_head=0', '--n_embd=0', '--n_embd=1e11 --mlp_width=9', '--mlp_width=0', '--dropout=1', '--dropout=-0.1', '--dropout=nan', '--softcap=-1', '--norm_eps=0'):
    row(39, flags, re.match('--(.*?)=', flags)[1])
row(39, '--arch=gtp2', 'gtp2', 'llama')
row(39, '--rope_scaling=linear:nan --arch=llama', 'linear:FACTOR')
for flags in ('--learning_rate=inf', '--learning_rate=-inf', '--learning_rate=nan', '--learning_rate=1e999', '--matrix_lr=nan'):
    row(40, flags, flags.split('=')[0][2:], 'finite')
for flags in ('--learning_rate=-1', '--min_lr=-1', '--head_lr=-1', '--weight_decay=-1', '--adam_eps=0', '--beta2=1', '--beta1=-1'):
    row(40, flags, re.match('--(.*)=', flags)[1], 'out of range')
row(40, '--learning_rate=-0.0', status=0)
row(41, '--grad_clip=-1', 'grad_clip', '0 or more')
row(41, '--grad_clip=nan', 'grad_clip', 'finite')
row(42, '--warmup_iters=6', 'warmup_iters=6', 'lr_decay_iters=6', '--warmup_iters=0')
row(42, '--warmup_iters=50', 'warmup_iters=50')
row(42, '--lr_decay_iters=0', 'lr_decay_iters')
row(42, '--lr_decay_iters=2', 'lr_decay_iters=2')
row(42, '--decay_fraction=0', 'decay_fraction')
row(43, '--min_lr=1', 'note: min_lr=1 is above learning_rate=0.01', '--min_lr=0.001', 'done: 6', status=0)
row(44, '--eval_interval=0', 'step 6: ', 'done: 6', status=0)
row(44, '--log_interval=0', 'step 3: ', 'done: 6', status=0)
row(44, '--eval_iters=0', 'step 6: ', 'done: 6', status=0)
for flags in ('--eval_interval=-1', '--log_interval=-1', '--eval_iters=-5', "--eval_iters='0 tokens'", "--eval_iters='1e999 tokens'", '--eval_iters=many', '--save_interval=0'):
    row(44, flags, re.match('--(.*)=', flags)[1], 'out of range')
for flags in ('--max_iters=-1', '--budget=0tokens', '--budget=x', '--budget=3parsecs', '--budget=1e99epochs', '--max_minutes=0', '--sample_interval=2x0.5', '--sample_interval=x', '--seed=-1', '--warmup_iters=-1', '--keep_checkpoints=0', '--peak_flops=0'):
    row(45, flags, re.match('--(.*)=', flags)[1], 'out of range')
row(45, '--seed=9223372036854775808', 'seed', '2**63')
row(45, '--max_iters=-0', 'done: 0 iterations', status=0)
row(46, '--init_from=scrath', 'scrath', 'scratch', 'resume')
row(46, "--init_from=''", 'scratch')
row(46, '--init_from=gpt2-xl', 'gpt2-xl', 'go online', 'folder')
row(46, "--init_from='some where'", 'some where', 'OWNER/NAME')
row(46, '--lr_schedule=cosin', 'cosin', 'linear', 'constant')
row(46, '--matrix_optimizer=adam', 'adam', 'muon')
row(47, '--dtype=bf16', 'bf16', 'bfloat16')
row(47, '--dtype=float16', 'float16', 'float32')
row(47, "--dtype=''", 'bfloat16')
row(48, '--device=cuda', '--device=cpu')
row(48, '--device=cuda:9', 'cuda')
row(48, '--device=mps', 'mps', '--device=cpu')
for device in ('gpu', "''", 'cuda:-1', 'meta', 'vulkan', 'hip'):
    row(48, f'--device={device}', 'no such device', 'cuda:1')
row(48, '--backend=nncl', 'nncl', 'gloo')
row(48, '--ddp_timeout=0', 'ddp_timeout')
row(48, '--ddp_timeout=1e18', 'ddp_timeout')
row(48, '', 'RANK is set', 'torchrun', given=environment(RANK='0'), what='RANK alone')
row(48, '', 'MASTER_ADDR', 'torchrun', given=environment(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1'), what='no MASTER_ADDR')
row(49, '--gradient_accumulation_steps=6', 'gradient_accumulation_steps=6', 'number 4', '4 or 8', given=processes(4), what='6 micro-batches in 4 processes')
for flag in ('matrix_lr=3.5e38', 'learning_rate=1e90', 'weight_decay=1e15'):
    row(48, f'--{flag}', flag.split('=')[0], 'below 1e15')
row(48, '--sample_tokens=1000000000000', 'sample_tokens', 'a million')
row(49, '--gradient_accumulation_steps=1', '4 or 8', given=processes(4), what='1 micro-batch in 4 processes')
row(49, '--gradient_accumulation_steps=0', 'gradient_accumulation_steps', 'above 0')
row(49, '--total_batch_size=100', 'total_batch_size=100', '4 x 16 x 1 = 64', '64 or 128')
row(49, '--total_batch_size=10', '64')
row(49, '--total_batch_size=0', 'total_batch_size')
row(49, '--total_batch_size=640', '4 x 16 x 4 = 256', '512 or 768', given=processes(4), what='640 tokens in 4 processes')
row(49, '--deterministic --gradient_accumulation_steps=3', 'powers of two', '--gradient_accumulation_steps=2')
row(49, '--deterministic --gradient_accumulation_steps=9', 'powers of two', '3 processes', given=processes(3), what='deterministic in 3 processes')
row(50, '--compile=True', 'compile=True', 'C++ compiler', '--compile=False', given=no_compiler)
row(50, '--compile=maybe', 'maybe', 'auto')
row(50, '--compile=auto', 'done: 6', status=0)

# -----------------------------------------------------------------------------
# 51-52: the run's folder

def out_is_file(place, monkeypatch):
    (place / 'out').write_text('x')


def out_is_link(place, monkeypatch):
    (place / 'out').symlink_to('nowhere')


def unwritable(place, monkeypatch):  # whoever runs the tests may be allowed everything
    monkeypatch.setattr(os, 'access', lambda path, mode, **how: not mode & os.W_OK)


def unmakeable(place, monkeypatch):
    def refuse(path, *args, **how):
        raise PermissionError(13, 'Permission denied', str(path))
    monkeypatch.setattr(os, 'makedirs', refuse)


def full(place, monkeypatch):
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: type('', (), {'free': 1000}))


def locked(place, monkeypatch):
    def refuse(*args):
        raise BlockingIOError(11, 'Resource temporarily unavailable')
    trained(place)
    (place / 'out' / '.lock').touch()
    monkeypatch.setattr('fcntl.lockf', refuse)
    return ['--init_from=resume', '--max_iters=9']


def trained(place, monkeypatch=None, keep=lambda name: True):
    """The folder of a finished run."""
    (place / 'out').mkdir()
    for name, content in FILES.items():
        if keep(name):
            (place / 'out' / name).write_bytes(content)


row(51, '', 'out_dir', '--out_dir', given=out_is_file, what='out_dir is a file')
row(51, '--out_dir={place}/out/run', 'out_dir', '--out_dir', given=out_is_file, what='out_dir is below a file')
row(51, '', 'out_dir', '--out_dir', given=out_is_link, what='out_dir is a link to nothing')
row(51, "--out_dir=''", 'out_dir', '--out_dir')
row(51, '--out_dir=a\0b', 'out_dir', what='out_dir with a zero byte')
row(51, '--out_dir=/dev/null', 'out_dir')
row(51, '--out_dir=/dev/null/x', 'out_dir')
row(51, '', 'out_dir', 'written', given=unwritable, what='out_dir may not be written into')
row(51, '', 'out_dir', 'Permission denied', given=unmakeable, what='out_dir cannot be made')
row(51, '', 'too little space', 'make room', given=full, what='a full disk')
row(51, '', 'another run is writing into', given=locked, what='out_dir that another run writes into')
row(52, '', 'already holds a run', '--init_from=resume', '--overwrite', '--out_dir', given=trained, what='out_dir holds a run')
row(52, '--init_from={place}/out/ckpt.pt', 'already holds a run', given=trained, what='a new run from weights beside them')
row(52, '--init_from={place}/out --overwrite', 'would delete', given=trained, what='--overwrite of the weights to start from')
row(52, '--overwrite', 'done: 6', given=trained, status=0)

# -----------------------------------------------------------------------------
# 53-61: resuming

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


def weights(of=None):
    """The run, and flags for a new one from its weights."""
    def prepare(place, monkeypatch):
        (of or run())(place, monkeypatch)
        return [f"--init_from={place / 'out' / 'ckpt_00000006.pt'}", f"--out_dir={place / 'new'}"]
    return prepare


def both(first, second):
    return lambda place, monkeypatch: (second(place, monkeypatch) or []) + (first(place, monkeypatch) or [])


def edit(key, **changes):
    return lambda state: {**state, key: {**state[key], **changes}}


def moments(function):
    def change(state):
        for own in state['optimizer']['state'].values():
            function(own)
    return change


W = 'transformer.h.0.attn.c_attn.weight'
row(53, '--init_from=resume', 'no checkpoint', '--out_dir', 'auto')
row(53, '--init_from=auto', 'done: 6', status=0)
row(53, '--init_from={place}/data', 'no checkpoint in')
row(53, "--init_from=resume:", 'resume:PATH')
row(53, '--init_from=resume:{place}/nowhere', 'no checkpoint at', 'ckpt_00001000.pt')
row(53, '--init_from=auto:{place}/data', 'no checkpoint at')
row(53, '--init_from=resume:{place}/out', 'already holds a run', '--init_from=auto', '--overwrite', given=trained, what='resume:PATH into a run')
row(53, '--init_from=resume:{place}/out --overwrite', 'out_dir itself', given=trained, what='resume:PATH of the run itself')
for name, write in {'a folder': Path.mkdir, 'empty': Path.touch, 'a text': lambda p: p.write_text('hello world\n' * 100), 'bytes': lambda p: p.write_bytes(bytes(range(256)) * 9),
                    'another text': lambda p: p.write_text('root:x:0:0:root:/root:/bin/sh\ndaemon:x\n' * 30), 'a tar': lambda p: tarfile.open(p, 'w').close(),
                    'a zip': lambda p: zipfile.ZipFile(p, 'w').writestr('x', 'y'), 'an empty zip': lambda p: zipfile.ZipFile(p, 'w').close(), 'the start of a zip': lambda p: p.write_bytes(b'PK\3\4'),
                    'safetensors': lambda p: p.write_bytes((2).to_bytes(8, 'little') + b'{}'), 'truncated': lambda p: p.write_bytes(FILES['ckpt.pt'][:-100]),
                    'half': lambda p: p.write_bytes(FILES['ckpt.pt'][:len(FILES['ckpt.pt']) // 2]), 'one flipped bit': lambda p: p.write_bytes(flipped(FILES['ckpt.pt'], -60_000))}.items():
    row(54, '', 'no checkpoint in', 'is whole', 'ckpt.pt', '--overwrite', given=file(write), what=f'ckpt.pt is {name}')
row(54, '--init_from=auto', 'is whole', given=file(Path.touch), what='--init_from=auto with a damaged folder')
row(54, '--init_from={place}/out/ckpt.pt --out_dir={place}/new', 'ckpt.pt', 'damaged', given=lambda place, _: trained(place) or (place / 'out' / 'ckpt.pt').write_text('text') and None, what='weights from a text')
row(55, '--n_layer=3 --n_embd=64 --max_iters=7', 'n_layer=3 is ignored, the checkpoint has 2', 'n_embd=64 is ignored', 'done: 7', given=run(), status=0, what='--n_layer=3 of a run with 2')
row(55, '--block_size=32', '--block_size=16', given=weights(), what='--block_size=32 of learned 16')
row(55, '--dataset=other --max_iters=9', 'another tokenizer', given=both(run(), lambda place, _: make_dataset(place / 'data', 'other', text='other characters, other ids! ' * 200) and None), what='a dataset with another tokenizer')
row(56, '--batch_size=8', 'tokens per iteration', '--total_batch_size=64', '--allow_change', given=run(), what='another batch')
row(56, '', 'train.bin changed', '--allow_change', given=both(run(), both(meta(splits={}), ids(lambda a: a[:-10]))), what='other data')
row(56, '', 'train.bin changed', '--allow_change', given=both(run(), ids(lambda a: a[::-1])), what='other data of the same length')
row(56, '--max_iters=7', 'done: 7', given=both(run(lambda state: state['trained_on'].pop('train ids') and None), ids(lambda a: a[::-1])), status=0, what='the same from a checkpoint that did not look')
row(56, '--batch_size=8 --allow_change --max_iters=7', 'done: 7', given=run(), status=0, what='another batch, --allow_change')
row(57, '', 'this run is done: 6 of 6', '--max_iters=12', given=run(), status=0, what='a run that is done')
row(57, '--max_iters=4', 'this run is done: 6 of 4', given=run(), status=0, what='a run that is past its end')
for scaler in ({}, {'scale': 65536.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 0}):
    row(58, '--dtype=bfloat16 --max_iters=7', 'done: 7', given=run(scaler=scaler), status=0, what=f"to bfloat16 from {'float16' if scaler else 'float32'}")
row(59, '', 'newer flatgpt', 'update', given=run(version=2), what='version 2')
for version in (10**30, 'x', 1.5):
    row(59, '', 'ckpt_00000006.pt', given=run(version=version), what=f'version {version!r}')

# -----------------------------------------------------------------------------
# 60-61: what a file may say

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


row(60, '', 'refused', 'would run code', given=evil(lambda e: e), what='a checkpoint that runs code')
row(60, '', 'refused', given=evil(lambda e: {'model': {}, 'model_args': e}), what='code in model_args')
for protocol in (1, 2, 4):
    row(60, '', 'ckpt.pt', given=evil(lambda e: {'x': e}, raw=protocol), what=f'a pickle of protocol {protocol}')
for state in ([1], {}, torch.zeros(3), 'text', {'model': torch.zeros(3)}):
    row(60, '', 'not a checkpoint', given=file(lambda p, state=state: torch.save(state, p)), what=f'a checkpoint of {state!r:.20}')
for key in ('model', 'model_args', 'optimizer'):
    row(60, '', key if key != 'optimizer' else 'weights only', given=run(**{key: None}), what=f'no {key}')
for key in ('model', 'model_args', 'optimizer', 'scaler', 'config', 'iter_num', 'best_val_loss', 'tokenizer', 'evaluation', 'seconds', 'bad_steps', 'wandb_run_id', 'trained_on', 'environment'):
    row(60, '', 'ckpt_00000006.pt', given=run(**{key: [1]}), what=f'{key} is a list')
for number in (-3, 10**30, float('nan'), float('inf'), 'x', torch.tensor([3, 4])):
    row(60, '', 'not a checkpoint', given=run(iter_num=number), what=f'iter_num={number}')
row(60, '', 'holds iteration 99999999', 'ckpt_99999999.pt', given=run(iter_num=torch.tensor(99_999_999)), what='iter_num=tensor(99999999)')
row(60, '', 'holds iteration 5', 'ckpt_00000005.pt', given=run(lambda state: {**state, 'iter_num': 5}), what='a checkpoint with another number')
for content in (b'\xff\xfe', b'x,y\n1,2\n', b'iter\n' + b'1' * 200_000):
    row(60, '--max_iters=7', 'log.csv', 'move it away', given=run(log=content), writes=True, what=f'log.csv is {content[:9]}')
NESTED = [1]
for _ in range(60):  # all of it would be 2^60 words
    NESTED = [NESTED, NESTED]
for what, state in {'seconds': dict(seconds=NESTED), 'a tokenizer': dict(tokenizer={'kind': 'char', 'chars': {5: NESTED}}), 'model_args': dict(model_args={'n_embd': NESTED}),
                    'arch': dict(model_args={'arch': NESTED})}.items():
    row(60, '', 'ckpt_00000006.pt', given=run(**state), what=f'nested lists in {what}')
for tokenizer in ({'kind': 'x'}, {'kind': ['char']}, {'kind': 'char'}, {'kind': 'char', 'chars': 5}, {5: 6}):
    row(60, '', 'tokenizer', given=run(tokenizer=tokenizer), what=f'tokenizer={tokenizer}')
for tokenizer in ({'kind': 'byte'}, {'kind': 'char', 'chars': []}):
    row(60, '', 'another tokenizer', given=run(tokenizer=tokenizer), what=f'tokenizer={tokenizer}')
row(60, '', 'tokenizer', given=run(tokenizer={'kind': 'hf', 'name': 'x', 'json': '{'}), what='tokenizer.json is {')
for name, change in {'batch_size': 0, 'learning_rate': -1.0, 'seed': -1, 'dropout': 2.0, 'keep_checkpoints': 0}.items():
    row(60, '', name, given=run(edit('config', **{name: change})), what=f'config has {name}={change}')
row(60, '--max_iters=7', 'done: 7', given=run(edit('config', max_iters=None, learning_rate=float('nan'), lr_schedule='x', save=1, os='x', evil=1)), status=0, what='config has values of wrong types')
row(60, '--max_iters=7', 'done: 7', given=run(lambda s: s['config'].update({5: 6})), status=0, what='config has names that are no text')
for path in ('../decoy/tiny', 'decoy', '..', '.'):
    row(60, '', "dataset is a folder's name" if path != 'decoy' else 'no dataset decoy', given=decoy(edit('config', dataset=path)), what=f'config has dataset={path!r}')
row(60, '', "dataset is a folder's name", given=lambda place, monkeypatch: decoy(edit('config', dataset=str(place / 'decoy' / 'tiny')))(place, monkeypatch), what='config has a dataset with an absolute path')
row(60, '--max_iters=7', 'done: 7', given=decoy(edit('config', data_dir='decoy', out_dir='decoy', resume_from='decoy', init_from='decoy', overwrite=True, wandb_log=True)), status=0, what='config has data_dir, out_dir, resume_from')
for name, function in {'empty': lambda s: {}, 'without groups': lambda s: {**s, 'param_groups': []}, 'of another size': lambda s: {**s, 'param_groups': [{'params': [0]}]},
                       'with groups that are none': lambda s: {**s, 'param_groups': 'abc'}, 'without moments': lambda s: {'param_groups': s['param_groups']}, 'a list': lambda s: {**s, 'state': [1]},
                       'with another key': lambda s: {**s, 'state': {'x': s['state'][0]}}, 'with too many': lambda s: {**s, 'state': {**s['state'], 999: s['state'][0]}}}.items():
    row(60, '', "optimizer's state", '--init_from=', given=run(lambda state, f=function: {**state, 'optimizer': f(state['optimizer'])}), what=f'an optimizer state {name}')
for name, function in {'of another shape': lambda own: own.update(exp_avg=torch.zeros(3)), 'transposed': lambda own: own.update(exp_avg_sq=torch.zeros(own['exp_avg'].shape[::-1] + (1,))),
                       'that are text': lambda own: own.update(exp_avg='x'), 'not finite': lambda own: own['exp_avg'].fill_(float('nan')), 'missing': lambda own: own.pop('exp_avg_sq'),
                       'too many': lambda own: own.update(evil=torch.zeros(3)), 'sparse': lambda own: own.update(exp_avg=own['exp_avg'].to_sparse()), 'with many steps': lambda own: own.update(step=torch.zeros(5)),
                       'without steps': lambda own: own.update(step=None)}.items():
    row(60, '', "optimizer's state", '--init_from=', given=run(moments(function)), what=f'moments {name}')
for key, value in (('spent', [1]), ('spent', {'eval': 'x'}), ('spent', {'eval': float('nan')}), ('tokens', 'x'), ('tokens', 1.5), ('tokens', -1), ('tokens', 10**30), ('seconds', float('nan')),
                   ('seconds', 1e308), ('seconds', -1.0), ('bad_steps', 10**30), ('bad_steps', -1), ('evaluation', {'iter': [6]}), ('evaluation', {'iter': 6, 'names': 5, 'metrics': {}}),
                   ('evaluation', {'iter': 6, 'names': [['loss']], 'metrics': {}}), ('evaluation', {'iter': 6, 'names': ['loss'], 'metrics': [1]}), ('evaluation', {'iter': 6, 'names': ['loss'], 'metrics': {'val_loss': [1]}}),
                   ('evaluation', {'iter': 6, 'names': ['loss'], 'metrics': {5: 1.0}}), ('trained_on', {'train': [1]}), ('environment', {'torch': {}}), ('wandb_run_id', 'x' * 10**6)):
    row(60, '--max_iters=7', 'ckpt_00000006.pt', key, given=run(**{key: value}), what=f'{key} is {value!r:.60}')
row(60, '', "dataset is a folder's name", given=run(edit('config', dataset='a\0b')), what='a zero byte in the name of the dataset')
row(60, '--max_iters=7', 'sample_tokens', given=run(edit('config', sample_tokens=10**12)), what='sample_tokens in config is 10**12')
for key, value in (('evaluation', {'iter': 6}), ('trained_on', {}), ('environment', {5: 6}), ('evaluation', {'iter': 8})):
    row(60, '--max_iters=7', 'done: 7', given=run(**{key: value}), status=0, what=f'{key}={value}')
for change in (dict(n_layer=10**9), dict(n_layer='2'), dict(n_layer=2.0), dict(n_layer=True), dict(n_layer=0), dict(vocab_size=10**12), dict(evil=1), dict(n_embd=64), dict(n_embd=-32), dict(n_embd=float('nan')), dict(n_head=0),
               dict(n_head=3), dict(block_size=10**12), dict(block_size=32), dict(dropout='x'), dict(bias=1), dict(bias=True), dict(mlp_width=10**12), dict(mlp_width=64), dict(n_kv_head=10**30), dict(norm=['x']), dict(rope_scaling=5),
               dict(arch='llama'), dict(arch=[1]), dict(arch=None), dict(positions='rope'), dict(n_layer=torch.tensor(2)), dict(self=1)):
    row(61, '', 'ckpt_00000006.pt', given=weights(run(edit('model_args', **change))), what=f'model_args: {change}')
for name, function in {'of another shape': lambda p: torch.zeros(2, 2), 'that is text': lambda p: 'x', 'not finite': lambda p: p * float('nan'), 'of whole numbers': lambda p: p.long(), 'sparse': lambda p: p.to_sparse(),
                       'without memory': lambda p: p.to('meta'), 'complex': lambda p: p.to(torch.complex64), 'missing': None}.items():
    row(61, '', 'ckpt_00000006.pt', given=weights(run(lambda s, f=function: s['model'].update({W: f(s['model'][W])}) if f else s['model'].pop(W) is None)), what=f'a weight {name}')
row(61, '', 'ckpt_00000006.pt', given=weights(run(edit('model', **{'x.y': torch.zeros(2)}))), what='a weight too many')
row(61, '', 'ckpt_00000006.pt', given=weights(run(lambda s: s['model'].update({5: torch.zeros(2)}))), what='a weight without a name')
row(61, '', 'no plain tensor', given=weights(run(edit('model', **{'transformer.wte.weight': torch.zeros(1).expand(10**7, 10**5)}), edit('model_args', n_embd=10**5, vocab_size=10**7))), what='a weight larger than its file')

# -----------------------------------------------------------------------------


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1:]


def listing(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob('*')}


@pytest.fixture(autouse=True)
def files(script, tiny, tmp_path):
    if not FILES:
        assert script('train.py', *tiny).status == 0
        FILES.update({path.name: path.read_bytes() for path in (tmp_path / 'out').iterdir()})
        shutil.rmtree(tmp_path / 'out')


@pytest.mark.parametrize('flags, words, given, status, lines, writes', TABLE)
def test_bad_input(script, tiny, tmp_path, monkeypatch, flags, words, given, status, lines, writes):
    if any('cuda' in flag for flag in flags) and torch.cuda.is_available() or any('mps' in flag for flag in flags) and torch.backends.mps.is_available():
        pytest.skip('this machine has that device')
    flags = [str(flag).replace('{place}', str(tmp_path)) for flag in [*(given and given(tmp_path, monkeypatch) or []), *flags]]
    if '--init_from=resume' in flags and (tmp_path / 'out').exists():  # a run brings its own knobs
        tiny = ['--device=cpu', '--dtype=float32', '--compile=False', f"--data_dir={tmp_path / 'data'}", f"--out_dir={tmp_path / 'out'}"]
    before = listing(tmp_path)
    result = script('train.py', *tiny, *flags)
    if status == 2:
        is_one_line(result, *words, lines=lines)
        assert writes or listing(tmp_path) == before, 'nothing is written'
    assert result.status == status and 'Traceback' not in result.err, result.out + result.err
    for word in words:
        assert word in result.out + result.err
    assert not (tmp_path / 'canary').exists(), 'nothing is executed'


def test_the_table_has_every_row():
    assert {int(case.id.split(':')[0][4:]) for case in TABLE} == {*range(1, 14), *range(26, 62)}


def test_several_wrong_knobs_are_named_at_once(script, tiny):
    is_one_line(script('train.py', *tiny, '--batch_size=0', '--dropout=2', '--decay_fraction=0'), lines=3)


def test_overwrite_deletes_nothing_that_only_a_config_file_names(script, tiny, tmp_path):
    trained(tmp_path)
    (tmp_path / 'c.py').write_text(f"out_dir = {str(tmp_path / 'out')!r}\n")
    before = listing(tmp_path / 'out')
    result = script('train.py', *tiny, f"--out_dir={tmp_path / 'new'}", '--overwrite', tmp_path / 'c.py')
    assert result.status == 0 and listing(tmp_path / 'out') == before and (tmp_path / 'new' / 'ckpt.pt').exists()


def test_sampling_from_a_hostile_file_executes_and_opens_nothing(script, tmp_path, monkeypatch):
    for content in (lambda e: e, lambda e: {'model': {}, 'model_args': e}):
        evil(content)(tmp_path, monkeypatch)
        is_one_line(script('sample.py', f"--out_dir={tmp_path / 'out'}", '--device=cpu'), 'ckpt.pt', 'refused')
        shutil.rmtree(tmp_path / 'out')
    evil(lambda e: {'x': e}, raw=2)(tmp_path, monkeypatch)
    is_one_line(script('sample.py', f"--out_dir={tmp_path / 'out'}", '--device=cpu'), 'ckpt.pt')
    shutil.rmtree(tmp_path / 'out')
    for path in ('../decoy/tiny', str(tmp_path / 'decoy' / 'tiny')):  # with no tokenizer in the file, the dataset's name tells it
        with monkeypatch.context() as patch:
            decoy(edit('config', dataset=path), tokenizer=None)(tmp_path, patch)
            is_one_line(script('sample.py', f"--init_from={tmp_path / 'out' / 'ckpt_00000006.pt'}", '--device=cpu', f"--data_dir={tmp_path / 'data'}"), '--dataset=NAME')
        shutil.rmtree(tmp_path / 'out')
    assert not (tmp_path / 'canary').exists()


def test_missing_packages_are_one_sentence(script, tiny, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name, *a: None if name == 'wandb' else real(name, *a))
    is_one_line(script('train.py', *tiny, '--wandb_log'), 'wandb', 'pip install wandb')


def test_an_old_torch_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch, '__version__', '2.8.0+cpu')
    with pytest.raises(SystemExit) as e:
        importlib.reload(devices)
    assert e.value.code == 2 and '2.9' in capsys.readouterr().err
    monkeypatch.undo()
    importlib.reload(devices)


def test_gpus_are_numbered_and_counted(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    assert devices.choose_device('auto')[0] == devices.choose_device('cuda')[0] == torch.device('cuda:0')
    assert devices.choose_device('cuda:1')[0] == torch.device('cuda:1')
    assert devices.choose_device('cuda', local_rank=1, is_distributed=True)[0] == torch.device('cuda:1')
    for args, words in [(('cuda:2',), ['cuda:2', '2 GPU', '--device=cuda:1']), (('cuda', 3, True), ['2 GPU', '--nproc_per_node=2'])]:
        with pytest.raises(SystemExit):
            devices.choose_device(*args)
        err = capsys.readouterr().err
        assert all(word in err for word in words), err
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'Tesla T4')
    for capability, want in ((7, 5), 'float16'), ((8, 0), 'bfloat16'):
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device, c=capability: c)
        assert devices.choose_dtype('auto', torch.device('cuda:0'))[0] == want
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (7, 5))
    with pytest.raises(SystemExit):
        devices.choose_dtype('bfloat16', torch.device('cuda:0'))
    assert 'T4' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['train', 'sample', 'eval', 'plan'])
def test_a_missing_torch_is_one_line(name, tmp_path):
    (tmp_path / 'torch.py').write_text('raise ModuleNotFoundError("No module named \'torch\'", name="torch")')
    done = subprocess.run([sys.executable, REPO / f'{name}.py'], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': str(tmp_path)})
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert done.stderr.startswith(f'error: a package is missing in {sys.executable} (No module named \'torch\'). ')
    assert ('.venv/bin/activate' if (REPO / '.venv').exists() else 'pip install -r ') in done.stderr


def test_an_old_python_is_one_line(tmp_path):
    code = f'import sys; sys.path.insert(0, {str(REPO)!r}); sys.version_info = (3, 10, 4); import configurator'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 2 and re.fullmatch(r'error: this Python is too old \(.*\)\. use 3\.11 or newer\n', done.stderr)
