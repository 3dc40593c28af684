"""Overrides: nanoGPT's flags and files work, friendlier ones do too, and what cannot be meant is explained."""

import os
import re
import runpy
import shutil
import signal
import sys
import time

import pytest
from conftest import REPO, captured, own_process

import configurator
from support.help import names_at_top, suggest

BLOCK = dict(__name__='knobs', out_dir='out', max_iters=100, learning_rate=1e-3, compile='auto', eval_only=False, top_k=200,
             min_lr=None, start='\n', wandb_run_name='gpt2', seed=1337, path=None, runs=[],
             __annotations__={'compile': bool | str, 'top_k': int | None, 'min_lr': float, 'path': str})


def apply(monkeypatch, *args, positional=None):
    script = dict(BLOCK)
    monkeypatch.setattr(sys, 'argv', ['script.py', *map(str, args)])
    knobs, given = configurator.configure(script, positional)
    assert all(script[name] == knobs[name] for name in knobs)
    return given


@pytest.fixture
def config(tmp_path):
    """Writes a config file, returns its path."""
    def write(content, name='a.py'):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / name
    return write


def is_refused(capsys, *words, lines=1):
    err = capsys.readouterr().err
    assert err.startswith('error: ') and err.count('\n') == err.count('error: ') == lines and 'Traceback' not in err, err
    assert all(word in err for word in words), err


@pytest.mark.parametrize('arg, name, value', [
    ('--learning_rate=1', 'learning_rate', 1.0), ('--max_iters=1e5', 'max_iters', 100000), ('--max_iters=1_000', 'max_iters', 1000),
    ('--top_k=none', 'top_k', None), ('--start=123', 'start', '123'), ('--start=a=b', 'start', 'a=b'), ('--compile', 'compile', True),
    ('--compile=auto', 'compile', 'auto'), ('--eval_only=0', 'eval_only', False), ('--min_lr=0', 'min_lr', 0.0), ('--start=None', 'start', 'None'),
    ('--path=resume:~/x', 'path', 'resume:' + os.path.expanduser('~/x')), ('--start=~/x', 'start', '~/x'),
])
def test_a_flag_means_what_its_writer_meant(monkeypatch, arg, name, value):
    given = apply(monkeypatch, arg)
    assert given == {name: value} and type(given[name]) is type(value)


@pytest.mark.parametrize('args, expected', [
    ('--max_iters 4', dict(max_iters=4)), ('--min_lr -1e-3', dict(min_lr=-1e-3)), ('--start - --seed 3', dict(start='-', seed=3)),
    ('--path x.py', dict(path='x.py')), ('--compile auto', dict(compile='auto')), ('--eval_only a.py', dict(eval_only=True, max_iters=3)),
])
def test_a_value_may_stand_apart_from_its_knob(monkeypatch, config, args, expected):
    monkeypatch.chdir(config('max_iters = 3\n').parent)
    assert apply(monkeypatch, *args.split()) == expected


def test_a_switch_takes_no_word_that_may_be_a_dataset_or_a_run(monkeypatch):
    assert apply(monkeypatch, '--eval_only', 'mybook', positional='path') == dict(eval_only=True, path='mybook')
    assert apply(monkeypatch, 'a', '--eval_only', 'b', '--start', 'c', 'd', positional='runs') == dict(runs=['a', 'b', 'd'], eval_only=True, start='c')


@pytest.mark.parametrize('args, words', [
    ('--lerning_rate=1', '--learning_rate'), ('--learning-rate=1', '--learning_rate'), ('--ünknown=1', '--help'),
    ('--max_iters=1.5', 'whole number'), ('--learning_rate=nan', 'finite'), ('--seed=True', 'whole number'), ('--seed=1e30', '2**63'),
    ('--max_iters many', 'whole number'), ('--max_iters --compile', 'whole number'), ('--eval_only maybe', 'True or False'),
    ('max_iters=4', '--key=value'), ('--__name__=foo', '--help'), ('nowhere.py', f'looked in {os.getcwd()}'), ('tiny.cfg', 'neither a config file'),
    ('--path=\udcff', 'not UTF-8'),
])
def test_a_mistake_is_named_with_its_remedy(monkeypatch, capsys, args, words):
    with pytest.raises(SystemExit, match='^2$'):
        apply(monkeypatch, *args.split())
    is_refused(capsys, words)


def test_all_mistakes_are_listed_at_once(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        apply(monkeypatch, '--max_steps', '1', '--seed=x', '--compile', '--eval_only', '3')
    is_refused(capsys, lines=3)


def test_flags_win_wherever_they_stand_and_config_files_see_them(monkeypatch, config):
    a = config("import time\n_half = 0.5\nmax_iters = 10\nlearning_rate = _half\nwandb_run_name = 'ft-' + str(max_iters)\n"
               "while max_iters < 10:\n    max_iters += 1\n")  # it ends, whatever the flag says
    b, c = config("max_iters = 2 * max_iters\n", 'b.py'), config("min_lr = learning_rate / 10\n", 'c.py')
    assert apply(monkeypatch, a, b)['max_iters'] == 20 and apply(monkeypatch, b, a)['max_iters'] == 10, 'the later file'
    given = apply(monkeypatch, '--learning_rate=7', c, b)
    assert given == dict(learning_rate=7, min_lr=0.7, max_iters=200) and list(given)[-1] == 'learning_rate', 'what counts most is last'
    assert apply(monkeypatch, '--max_iters=8', a) == dict(max_iters=8, wandb_run_name='ft-8', learning_rate=0.5)
    assert apply(monkeypatch, config('max_iters = 100\n')) == {'max_iters': 100}, 'a default that is repeated is given'


@pytest.mark.parametrize('content, expected', [
    ("from math import sqrt\nwidth = sqrt(16)\ndel sqrt\nlocals().update(height=2)\ndef rate(n):\n    return width / height / n\nlearning_rate = rate(2)\n", dict(learning_rate=1.0)),
    ("iters_max = 5\nmax_steps = 2 * iters_max\nmax_iters = max_steps\n", dict(max_iters=10)),  # others' names for it, put to use
    ("for seed in range(3):\n    pass\n", dict(seed=2)),
    ("def small():\n    global max_iters\n    max_iters = 2\nsmall()\nglobals()['seed'] = 5\n", dict(max_iters=2, seed=5)),
    ("sizes = [1, 2]\nclass Size:\n    n = 3\nmax_iters = Size.n\n", dict(max_iters=3)),
])
def test_a_config_may_have_names_of_its_own(monkeypatch, config, capsys, content, expected):
    assert apply(monkeypatch, config(content)) == expected and 'note' not in capsys.readouterr().out


def test_what_a_config_leaves_unused_is_told(monkeypatch, config, capsys):
    assert apply(monkeypatch, config("model_name = 'baby'\ncontext = 3\nmax_iters = 2\n")) == dict(max_iters=2)
    assert 'use itself: model_name, context\n' in capsys.readouterr().out


@pytest.mark.parametrize('content, words', [
    ('learning_rte = 1e-3\n', '(learning_rte). did you mean --learning_rate'),
    ('max_iters = "ten"\n', 'whole number'), ('learning_rate = float("inf")\n', 'finite'), ('import numpy\nseed = numpy.ones((9, 9))', 'whole number'),
    ('max_iters = (\n', ':1'), ('x = 1\nmax_iters = 1 / 0\n', ':2'), ('raise ValueError("one\\ntwo")', ':1'), ('import sys; sys.exit(0)', ':1'),
    (b'x = "\xff"\n', 'utf-8'),
])
def test_a_wrong_config_file_is_named_with_its_line(monkeypatch, config, capsys, content, words):
    with pytest.raises(SystemExit, match='^2$'):
        apply(monkeypatch, config(content))
    is_refused(capsys, 'a.py', words)


def test_a_mistyped_knob_is_named_and_a_far_one_is_not_guessed():
    knobs = configurator.plain(names_at_top(REPO / 'train.py'))
    assert suggest('n_heads', knobs) == 'did you mean --n_head?'
    assert 'did you mean' not in suggest('vocab_size', knobs)


# -----------------------------------------------------------------------------
# alone, and by exec

THEIRS = """
from time import time  # a name that another module has
out_dir = 'out'
batch_size = 12
learning_rate = 6e-4
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
    monkeypatch.setattr(sys, 'argv', [f'{tmp_path}/theirs.py', *map(str, args)])
    monkeypatch.setattr(sys, 'path', list(sys.path))
    return runpy.run_path(f'{tmp_path}/theirs.py', run_name='__main__')


def test_exec_of_the_configurator_overrides_the_globals_as_nanogpts_does(monkeypatch, tmp_path, config, capsys):
    file = config("from math import sqrt\nhalf = 8\nbatch_size = 2 * half\nout_dir = 'x'\n")
    found = exec_configurator(monkeypatch, tmp_path, '--out_dir=out-2', file, '--learning_rate=1', '--compile=False', '--resume', 'a/b', '--check=theirs')
    assert found['config'] == dict(out_dir='out-2', batch_size=16, learning_rate=1.0, compile=False, check='theirs', fail='mine')
    assert found['resume'] == 'a/b' and type(found['learning_rate']) is float
    new = {name for name in found['new'] if not name.startswith('_')}
    assert new == set('before config sys half sqrt'.split()) and found['time']() > 1e9  # nothing of ours
    out = capsys.readouterr().out
    assert f'Overriding config with {file}' in out and 'Overriding: out_dir = out-2' in out
    assert exec_configurator(monkeypatch, tmp_path)['config']['batch_size'] == 12
    with pytest.raises(SystemExit, match='^2$'):
        exec_configurator(monkeypatch, tmp_path, '--bathc_size=3', '--batch_size=x', 'nowhere.py', '--learning_rte=1')
    is_refused(capsys, '--batch_size?', 'whole number', 'not found', '--learning_rate?', lines=4)


def test_exec_of_the_configurator_works_in_a_function_and_in_a_notebook(monkeypatch, tmp_path):
    source = "x = 3\ndef main():\n    exec(open('configurator.py').read())\nmain()\n"
    assert exec_configurator(monkeypatch, tmp_path, '--x=4', source=source)['x'] == 4
    names = dict(__name__='__main__', x=3)  # a notebook has no file, and its kernel has arguments of its own
    for argv, x in ((['/x/ipykernel_launcher.py', '-f', '/x/kernel.json'], 3), (['train.py', '--x=5'], 5)):
        monkeypatch.setattr(sys, 'argv', argv)
        exec(open('configurator.py').read(), names)
        assert names['x'] == x and 'fail' not in names


def test_it_works_alone_in_an_empty_folder(tmp_path, config):
    shutil.copy(REPO / 'configurator.py', tmp_path)
    config('n = 2 * n\n', 'c.py')
    config('n = 3\nx = 0.5\nfrom configurator import configure\nknobs, given = configure(globals())\nprint(knobs, given)\n', 'script.py')
    config("n = 3\nx = 0.5\nexec(open('configurator.py').read())\nprint(n, x)\n", 'theirs.py')
    for script, args, status, said in (('script', '--x=2 c.py', 0, "{'n': 6, 'x': 2.0} {'n': 6, 'x': 2.0}"), ('theirs', 'c.py --x=2', 0, '6 2.0'),
                                       ('script', '--help', 2, 'error: unknown knob (--help). the script lists all')):
        done = captured([sys.executable, f'{script}.py', *args.split()], cwd=tmp_path)
        assert done.returncode == status and said in done.stdout + done.stderr and 'Traceback' not in done.stderr, done


# -----------------------------------------------------------------------------
# --help


@pytest.mark.parametrize('name', 'train.py sample.py prepare.py plan.py'.split())
def test_help_is_the_block_with_its_comments_and_needs_no_torch(name, tmp_path):
    t0 = time.time()
    done = captured([sys.executable, '-X', 'importtime', str(REPO / name), '--help'], cwd=tmp_path)
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


def test_help_has_the_values_of_a_config_and_may_be_about_a_word():
    out = own_process('train.py', 'config/quickstart.py', '--help', 'lr').out
    assert re.findall(r'--(\w+)=', out) == ('learning_rate matrix_lr embedding_lr head_lr lr_schedule decay_fraction '
                                             'decay_lr warmup_iters lr_decay_iters min_lr').split()
    assert re.search(r"--lr_schedule='wsd' .*\[default:\s+'cosine'\]", out, re.S)
    assert own_process('train.py', '--help', 'nothing').status == 2


@pytest.mark.parametrize('name, slow', [('train.py', 'torch'), ('plot.py', 'matplotlib')])
def test_ctrl_c_during_the_start_is_no_traceback(name, slow, tmp_path):
    (tmp_path / f'{slow}.py').write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n")
    (tmp_path / 'log.csv').write_text('iter,loss,tokens\n1,2,3\n2,1,6\n')
    result = own_process(name, *([tmp_path] if name == 'plot.py' else []), env={'PYTHONPATH': str(tmp_path)})
    assert result.status == -signal.SIGINT and not result.err, result.err
