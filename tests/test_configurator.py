"""Overrides: nanoGPT's flags and files work, friendlier ones do too, and what cannot be meant is explained."""

import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO, own_process

import configurator
from support.resume import inherit

BLOCK = dict(__name__='knobs', out_dir='out', max_iters=100, learning_rate=1e-3, compile='auto', eval_only=False, top_k=200,
             min_lr=None, start='\n', wandb_run_name='gpt2', seed=1337, path=None,
             __annotations__={'compile': bool | str, 'top_k': int | None, 'min_lr': float, 'path': str})


def apply(monkeypatch, *args, **more):
    script = {**BLOCK, **more}
    monkeypatch.setattr(sys, 'argv', ['script.py', *args])
    knobs, given = configurator.configure(script)
    return script, given


@pytest.mark.parametrize('arg, name, value', [
    ('--learning_rate=1', 'learning_rate', 1.0), ('--max_iters=1e5', 'max_iters', 100000), ('--max_iters=1_000', 'max_iters', 1000),
    ('--top_k=None', 'top_k', None), ('--top_k=none', 'top_k', None), ('--start=123', 'start', '123'), ('--start=a=b', 'start', 'a=b'),
    ('--wandb_run_name=7', 'wandb_run_name', '7'), ('--compile=false', 'compile', False), ('--compile', 'compile', True),
    ('--compile=TRUE', 'compile', True), ('--compile=auto', 'compile', 'auto'), ('--eval_only', 'eval_only', True),
    ('--eval_only=0', 'eval_only', False), ('--min_lr=0', 'min_lr', 0.0), ('--min_lr=None', 'min_lr', None), ('--start=', 'start', ''),
    ('--start=None', 'start', 'None'), ('--path=x', 'path', 'x'), ('--learning_rate=6e-4', 'learning_rate', 6e-4),
])
def test_a_flag_means_what_its_writer_meant(monkeypatch, arg, name, value):
    script, given = apply(monkeypatch, arg)
    assert script[name] == value and type(script[name]) is type(value) and given == {name: value}


@pytest.mark.parametrize('args, what, remedy', [
    (['--lerning_rate=1'], '--lerning_rate', '--learning_rate'),
    (['--max_lr=1'], '--max_lr', '--learning_rate'),
    (['--max_steps=1'], '--max_steps', '--max_iters'),
    (['--learning-rate=1'], '--learning-rate', '--learning_rate'),
    (['--max_iters=x'], 'max_iters', 'whole number'),
    (['--max_iters=1.5'], 'max_iters', 'whole number'),
    (['--learning_rate=nan'], 'learning_rate', 'number'),
    (['--learning_rate=1e999'], 'learning_rate', 'finite'),
    (['--seed=True'], 'seed', 'whole number'),
    (['--max_iters', '4'], '--max_iters', '--max_iters=4'),
    (['--compile', 'False'], '--compile', '--compile=False'),
    (['--max_iters'], '--max_iters', '--max_iters='),
    (['-max_iters=4'], '-max_iters=4', '--max_iters=4'),
    (['max_iters=4'], 'max_iters=4', '--key=value'),
    (['--__name__=foo'], '--__name__', '--help'),
    (['nowhere.py'], 'nowhere.py', 'looked in'),
])
def test_a_mistake_is_named_with_its_remedy(monkeypatch, capsys, args, what, remedy):
    with pytest.raises(SystemExit) as e:
        apply(monkeypatch, *args)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith('error: ') and err.count('\n') == 1 and what in err and remedy in err


def test_all_mistakes_are_listed_at_once(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        apply(monkeypatch, '--max_steps=1', '--seed=x', '--compile', 'False')
    assert capsys.readouterr().err.count('error: ') == 3


def test_config_files_and_flags_apply_in_order_and_the_last_one_wins(monkeypatch, tmp_path, capsys):
    a, b = tmp_path / 'a.py', tmp_path / 'b.py'
    a.write_text("import time\n_half = 0.5\nmax_iters = 10\nlearning_rate = _half\nwandb_run_name = 'ft-' + str(max_iters)\n")
    b.write_text("max_iters = 2 * max_iters\n")
    assert apply(monkeypatch, str(a), str(b))[0]['max_iters'] == 20
    assert apply(monkeypatch, '--max_iters=7', str(b))[0]['max_iters'] == 14
    script, given = apply(monkeypatch, str(a), '--max_iters=7', '--max_iters=8')
    assert script['max_iters'] == 8 and script['wandb_run_name'] == 'ft-10' and script['learning_rate'] == 0.5
    assert 'given twice' in capsys.readouterr().out


def test_a_config_that_repeats_a_default_counts_as_given(monkeypatch, tmp_path):
    (tmp_path / 'a.py').write_text('max_iters = 100\n')
    assert apply(monkeypatch, str(tmp_path / 'a.py'))[1] == {'max_iters': 100}


@pytest.mark.parametrize('content, what', [
    ('learning_rte = 1e-3\n', 'learning_rate'), ('max_iters = "ten"\n', 'whole number'), ('max_iters = (\n', ':1'),
    ('x = 1\nmax_iters = 1 / 0\n', ':2'), ('seed = True\n', 'whole number'), (b'# \xff\n', 'UTF-8'), ('learning_rate = float("inf")\n', 'finite'),
])
def test_a_wrong_config_file_is_named_with_its_line(monkeypatch, tmp_path, capsys, content, what):
    path = tmp_path / 'a.py'
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as e:
        apply(monkeypatch, str(path))
    err = capsys.readouterr().err
    assert e.value.code == 2 and 'a.py' in err and what in err and 'Traceback' not in err


def test_inherited_knobs_yield_to_given_ones(monkeypatch):
    script, given = apply(monkeypatch, '--learning_rate=2')
    knobs = {k: v for k, v in script.items() if not k.startswith('_')}
    kinds = configurator.types_of(script, knobs)
    changed = inherit(knobs, kinds, given, dict(learning_rate=1, max_iters=5, out_dir='x', nonsense=1, seed='bad'), never=['out_dir'])
    assert changed == {'learning_rate': (1.0, 2.0)}
    assert knobs['max_iters'] == 5 and knobs['out_dir'] == 'out' and knobs['seed'] == 1337


@pytest.mark.parametrize('name', ['train.py', 'sample.py', 'prepare.py', 'plan.py'])
def test_help_is_the_block_with_its_comments_and_needs_no_torch(name, tmp_path):
    t0 = time.time()
    done = subprocess.run([sys.executable, '-X', 'importtime', str(REPO / name), '--help'], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and 'usage: python ' + name in done.stdout
    assert ' torch' not in done.stderr and time.time() - t0 < 5
    block = (REPO / name).read_text().split('# ' + '-' * 77)[1].strip()
    knobs = done.stdout.split('\nusage: ')[1]
    told = ' '.join(knobs.split())
    for comment in re.findall('  # (.*)', block):
        assert comment in told
    for knob in re.findall(r'(?m)^(\w+)(?:: [^=]+)? = ', block):
        assert knob.startswith('_') or knobs.count(f'  --{knob}=') == 1, knob
    assert max(map(len, knobs.splitlines())) <= 80


def test_help_tells_the_values_of_a_config_and_only_what_is_asked_for(script, monkeypatch):
    monkeypatch.setenv('COLUMNS', '100')
    out = script('train.py', 'config/quickstart.py', '--seed=3', '--help').out
    assert re.search(r'--n_embd=128 +\[default: 768\]', out) and re.search(r'--seed=3 [^[]*\[default: 1337\]', out)
    assert '--weight_decay=0.0 ' in out and out.index('the essential ones') < out.index('--n_layer=2') < out.index('\nfiles\n')
    some = script('train.py', '--help', 'lr').out
    assert [re.match(r'  --(\w+)=', line)[1] for line in some.splitlines() if line.startswith('  --')][:4] == [
        'learning_rate', 'matrix_lr', 'embedding_lr', 'head_lr']
    assert '--n_layer' not in some and max(map(len, some.splitlines())) <= 100
    assert '--sample_prompts' in script('train.py', '--help', 'prompt').out, 'by its comment'
    result = script('train.py', '--help', 'zebra')
    assert result.status == 2 and result.err.startswith('error: no knob is about that (zebra). ') and result.err.count('\n') == 1
    assert script('train.py', '--help', '--lerning_rate=3').status == 2


@pytest.mark.parametrize('name, slow', [('train.py', 'torch'), ('eval.py', 'torch'), ('plot.py', 'matplotlib')])
def test_ctrl_c_during_the_start_is_no_traceback(name, slow, tmp_path):
    (tmp_path / f'{slow}.py').write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n")
    (tmp_path / 'log.csv').write_text('iter,loss,tokens\n1,2,3\n2,1,6\n')
    result = own_process(name, *([tmp_path] if name == 'plot.py' else []), env={'PYTHONPATH': str(tmp_path)})
    assert result.status == -signal.SIGINT and not result.err, result.err
