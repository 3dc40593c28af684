"""Overrides: nanoGPT's flags and files work, friendlier ones do too, and what cannot be meant is explained."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO, own_process

import configurator
from support.help import knobs_of
from support.help import suggest
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


@pytest.mark.parametrize('args, expected', [
    (['--max_iters', '4'], dict(max_iters=4)), (['--min_lr', '-1e-3'], dict(min_lr=-1e-3)), (['--start', '-'], dict(start='-')),
    (['--start', 'a=b', '--seed', '3'], dict(start='a=b', seed=3)), (['--path', 'x.py'], dict(path='x.py')), (['--min_lr', 'None'], dict(min_lr=None)),
    (['--eval_only', 'True'], dict(eval_only=True)), (['--eval_only', '0'], dict(eval_only=False)), (['--compile', 'auto'], dict(compile='auto')),
    (['--eval_only', '--compile', 'false'], dict(eval_only=True, compile=False)), (['--eval_only', 'a.py'], dict(eval_only=True, max_iters=3)),
    (['--compile', 'a.py', '--seed', '7'], dict(compile=True, max_iters=3, seed=7)),
])
def test_a_value_may_stand_apart_from_its_knob(monkeypatch, tmp_path, args, expected):
    (tmp_path / 'a.py').write_text('max_iters = 3\n')
    monkeypatch.chdir(tmp_path)
    assert apply(monkeypatch, *args)[1] == expected


def test_a_switch_takes_no_word_that_may_be_a_dataset_or_a_run(monkeypatch, tmp_path):
    def given(positional, *args, **more):
        monkeypatch.setattr(sys, 'argv', ['script.py', *args])
        return configurator.configure({**BLOCK, **more}, positional=positional)[1]
    assert given('path', '--eval_only', 'mybook') == dict(eval_only=True, path='mybook')
    assert given('path', 'mybook', '--start', 'book.txt', '--eval_only', 'false') == dict(eval_only=False, path='mybook', start='book.txt')
    assert given('runs', 'a', '--eval_only', 'b', '--start', 'c', 'd', runs=[]) == dict(runs=['a', 'b', 'd'], eval_only=True, start='c')


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
    (['--max_iters', 'many'], '--max_iters=many', 'whole number'),
    (['--max_iters', '--compile'], '--max_iters', 'whole number'),
    (['--eval_only', 'maybe'], '--eval_only=maybe', 'True or False'),
    (['--lerning_rate', '1'], '--lerning_rate=1', '--learning_rate'),
    (['--max_iters'], '--max_iters', 'whole number'),
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
        apply(monkeypatch, '--max_steps', '1', '--seed=x', '--compile', '--eval_only', '3')
    assert capsys.readouterr().err.count('error: ') == 3


def test_flags_win_wherever_they_stand_and_config_files_see_them(monkeypatch, tmp_path):
    a, b = tmp_path / 'a.py', tmp_path / 'b.py'
    a.write_text("import time\n_half = 0.5\nmax_iters = 10\nlearning_rate = _half\nwandb_run_name = 'ft-' + str(max_iters)\n")
    b.write_text("max_iters = 2 * max_iters\n")
    assert apply(monkeypatch, str(a), str(b))[0]['max_iters'] == 20
    (tmp_path / 'c.py').write_text("min_lr = learning_rate / 10\n")
    for args in (['--learning_rate=7', tmp_path / 'c.py', b], [b, tmp_path / 'c.py', '--learning_rate=3', '--learning_rate=7']):
        script, given = apply(monkeypatch, *map(str, args))
        assert script['learning_rate'] == 7 and script['min_lr'] == 0.7 and script['max_iters'] == 200
        assert list(given)[-1] == 'learning_rate', 'in the order in which they count'
    script, given = apply(monkeypatch, '--max_iters=8', str(a))
    assert script['max_iters'] == 8 and script['wandb_run_name'] == 'ft-10' and script['learning_rate'] == 0.5


def test_a_config_that_repeats_a_default_counts_as_given(monkeypatch, tmp_path):
    (tmp_path / 'a.py').write_text('max_iters = 100\n')
    assert apply(monkeypatch, str(tmp_path / 'a.py'))[1] == {'max_iters': 100}


@pytest.mark.parametrize('content, expected', [
    ("from math import sqrt\nwidth = sqrt(16)\ndef rate(n):\n    return width / n\nlearning_rate = rate(4)\n", dict(learning_rate=1.0)),
    ("iters_max = 5\nmax_steps = 2 * iters_max\nmax_iters = max_steps\n", dict(max_iters=10)),  # others' names for it, put to use
    ("max_iter = 4\nmax_iters = max_iter\n", dict(max_iters=4)),
    ("for seed in range(3):\n    pass\n", dict(seed=2)),
    ("def small():\n    global max_iters\n    max_iters = 2\nsmall()\nglobals()['seed'] = 5\n", dict(max_iters=2, seed=5)),
    ("sizes = [1, 2]\nclass Size:\n    n = 3\nmax_iters = Size.n\n", dict(max_iters=3)),
])
def test_a_config_may_have_names_of_its_own(monkeypatch, tmp_path, capsys, content, expected):
    (tmp_path / 'a.py').write_text(content)
    assert apply(monkeypatch, str(tmp_path / 'a.py'))[1] == expected and 'note' not in capsys.readouterr().out


def test_what_a_config_leaves_unused_is_told(monkeypatch, tmp_path, capsys):
    (tmp_path / 'a.py').write_text("model_name = 'baby'\ncontext = 3\nmax_iters = 2\n")
    assert apply(monkeypatch, str(tmp_path / 'a.py'))[1] == dict(max_iters=2)
    assert 'model_name, context' in capsys.readouterr().out


@pytest.mark.parametrize('name', ['learning_rte', 'max_lr', 'max_steps', 'learning_rates', 'max_iter'])
def test_a_knob_misspelled_in_a_config_is_refused(monkeypatch, tmp_path, capsys, name):
    (tmp_path / 'a.py').write_text(f'{name} = 1\n')
    with pytest.raises(SystemExit):
        apply(monkeypatch, str(tmp_path / 'a.py'))
    assert f'({name}). did you mean --' in capsys.readouterr().err
    (tmp_path / 'a.py').write_text('learning_rte = 1\nmin_lr = learning_rte / 10\n')  # used, but to no effect on the knob
    with pytest.raises(SystemExit):
        apply(monkeypatch, str(tmp_path / 'a.py'))


@pytest.mark.parametrize('script, name, words', [
    ('train', 'embd_size', '--n_embd'), ('train', 'tokenizer_path', 'prepare.py'), ('prepare', 'tokenizer-path', '--tokenizer'),
    ('train', 'log_file', '--out_dir'), ('train', 'model_gen_multiplier', '--sample_interval'), ('train', 'core-metric-every', '--tasks_interval'),
    ('train', 'enable_compilation', '--compile'), ('train', 'ckpt_dir', '--out_dir'), ('train', 'dataset_dir', '--data_dir'),
    ('train', 'token_ckpt', '--save_interval'), ('train', 'load_ckpt', '--init_from'), ('train', 'training_tokens', '--budget'),
    ('train', 'warmup_iterations', '--warmup_iters'), ('train', 'max_seq_len', '--block_size'), ('train', 'eval_freq', '--eval_interval'),
    ('train', 'steps_per_epoch', '--budget'), ('train', 'resume-from-step', '--init_from'), ('train', 'sample-every', '--sample_interval'),
    ('train', 'logdir', '--out_dir'), ('train', 'theta', '--rope_theta'), ('train', 'vocab_size', "dataset's"), ('train', 'multiple_of', '--mlp_width'),
    ('train', 'n_heads', '--n_head'), ('train', 'grad_accum_steps', '--gradient_accumulation_steps'), ('train', 'eps', '--adam_eps'),
    ('train', 'use_prev_scheduler', '--init_from'),
])
def test_what_others_call_a_knob_leads_to_it(script, name, words):
    knobs = knobs_of(REPO / f'{script}.py')[0]
    found = suggest(name, knobs)
    assert words in found
    named = re.findall(r'--(\w+)', found)
    assert all(name in knobs or 'prepare.py' in found for name in named), found


THEIRS = """
from time import time  # a name that another module has
out_dir = 'out'
batch_size = 12
learning_rate = 6e-4
betas = (0.9, 0.95)
resume = None
compile = True
check = fail = 'mine'
config_keys = [k for k, v in globals().items() if not k.startswith('_') and isinstance(v, (int, float, bool, str))]
before = set(globals())
exec(open('configurator.py').read())
config = {k: globals()[k] for k in config_keys}
new = set(globals()) - before
"""


def exec_configurator(monkeypatch, tmp_path, *args, source=THEIRS):
    """The globals of somebody's script after it has run with these arguments."""
    (tmp_path / 'theirs.py').write_text(source)
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(sys, 'argv', [str(tmp_path / 'theirs.py'), *map(str, args)])
    monkeypatch.setattr(sys, 'path', list(sys.path))
    return runpy.run_path(str(tmp_path / 'theirs.py'), run_name='__main__')


def test_exec_of_the_configurator_overrides_the_globals_as_nanogpts_does(monkeypatch, tmp_path, capsys):
    (tmp_path / 'c.py').write_text("from math import sqrt\nhalf = 8\nbatch_size = 2 * half\nout_dir = 'x'\n")
    found = exec_configurator(monkeypatch, tmp_path, tmp_path / 'c.py', '--out_dir=out-2', '--learning_rate=1', '--compile=False',
                              '--resume', 'a/b', '--check=theirs')
    assert found['config'] == dict(out_dir='out-2', batch_size=16, learning_rate=1.0, compile=False, check='theirs', fail='mine')
    assert found['resume'] == 'a/b' and type(found['learning_rate']) is float
    new = {name for name in found['new'] if not name.startswith('_')}
    assert new == {'before', 'config', 'sys', 'half', 'sqrt'} and found['time']() > 1e9  # nothing of ours
    out = capsys.readouterr().out
    assert 'Overriding config with' in out and 'Overriding: out_dir = out-2' in out
    assert exec_configurator(monkeypatch, tmp_path)['config']['batch_size'] == 12


@pytest.mark.parametrize('args, words', [
    (['--bathc_size=3'], '--batch_size'), (['--batch_size=x'], 'whole number'), (['nowhere.py'], 'not found'),
    (['--batch_size'], 'whole number'), (['--learning_rte=1', '--before=1'], 'learning_rate'),
])
def test_exec_of_the_configurator_explains_a_mistake(monkeypatch, tmp_path, capsys, args, words):
    with pytest.raises(SystemExit) as e:
        exec_configurator(monkeypatch, tmp_path, *args)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith('error: ') and words in err


def test_exec_of_the_configurator_works_in_a_function_and_in_a_notebook(monkeypatch, tmp_path):
    source = "x = 3\ndef main():\n    exec(open('configurator.py').read())\nmain()\n"
    assert exec_configurator(monkeypatch, tmp_path, '--x=4', source=source)['x'] == 4
    names = dict(__name__='__main__', x=3)  # a notebook has no file, and its kernel has arguments of its own
    monkeypatch.setattr(sys, 'argv', ['/x/ipykernel_launcher.py', '-f', '/x/kernel.json'])
    exec(open('configurator.py').read(), names)
    assert names['x'] == 3 and 'fail' not in names
    monkeypatch.setattr(sys, 'argv', ['train.py', '--x=5'])
    exec(open('configurator.py').read(), names)
    assert names['x'] == 5


@pytest.mark.parametrize('content, what', [
    ('learning_rte = 1e-3\n', 'learning_rate'), ('max_iters = "ten"\n', 'whole number'), ('max_iters = (\n', ':1'),
    ('x = 1\nmax_iters = 1 / 0\n', ':2'), ('seed = True\n', 'whole number'), (b'x = "\xff"\n', 'utf-8'), ('learning_rate = float("inf")\n', 'finite'),
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
    out = script('train.py', 'config/quickstart.py', '--seed', '3', '--help').out
    assert re.search(r'--n_embd=128 +\[default: 768\]', out) and re.search(r'--seed=3 [^[]*\[default: 1337\]', out)
    assert '--weight_decay=0.0 ' in out and out.index('the essential ones') < out.index('--n_layer=1') < out.index('\nfiles\n')
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
