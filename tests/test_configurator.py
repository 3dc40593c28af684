"""Knobs are set as in nanoGPT: config files, --key=value, exec(open('configurator.py').read())."""

import os
import re
import subprocess
import sys

import pytest
from conftest import REPO, run_script

import configurator
from configurator import InputError

KNOBS = dict(
    __name__='knobs', out_dir='out', max_iters=100, learning_rate=1e-3, compile='auto', eval_only=False,
    top_k=200, min_lr=None, start='\n', runs=[], betas=(0.9, 0.95), rates={'wte': 0.1}, widths=[64, 128],
    schedule=object(), __annotations__={'compile': bool | str, 'top_k': int | None, 'min_lr': float},
)


@pytest.fixture
def configure(monkeypatch):
    """configure('--max_iters=3') -> (config, given)."""
    def run(*args, positional=None, takes_configs=True):
        script = dict(KNOBS)
        monkeypatch.setattr(sys, 'argv', ['script.py', *map(str, args)])
        config, given = configurator.configure(script, positional, takes_configs)
        for name in config:
            assert script[name] == config[name]
        assert all(given[name] == config[name] for name in given)
        return config, given
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)  # restored at the end
    return run


@pytest.mark.parametrize('args, name, value', [
    ('--learning_rate=1', 'learning_rate', 1.0),
    ('--max_iters=1e5', 'max_iters', 100000),
    ('--top_k=none', 'top_k', None),
    ('--start=123', 'start', '123'),
    ('--start=a=b', 'start', 'a=b'),
    ('--eval_only=0', 'eval_only', False),
    ('--compile', 'compile', True),
    ('--min_lr -1e-3', 'min_lr', -1e-3),
    ('--betas=(0.5,0.6)', 'betas', (0.5, 0.6)),
    ("--rates={'wte':0.2}", 'rates', {'wte': 0.2}),
    ('--widths 32 64', 'widths', [32, 64]),
])
def test_a_flag_has_the_type_of_its_knob(configure, args, name, value):
    config, given = configure(*args.split())
    assert config[name] == value and type(config[name]) is type(value)
    assert set(given) == {name}


@pytest.mark.parametrize('arg', [
    '--max_iter=3', '--max_iters=1.5', '--max_iters', '--eval_only=maybe', '--out_dir', '--betas=0.5',
    '--widths=a', '--schedule=a', 'word'])
def test_an_argument_that_cannot_be_used_is_an_input_error(configure, arg):
    with pytest.raises(InputError):
        configure(arg)


def test_an_input_error_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as exit_info:
        configurator.print_exception(InputError, InputError('a is wrong. Use b.'), None)
    assert exit_info.value.code == 2 and capsys.readouterr().err == 'error: a is wrong. Use b.\n'
    configurator.print_exception(KeyError, KeyError('a'), None)  # any other one as Python prints it
    assert capsys.readouterr().err.startswith("KeyError: 'a'")


def test_all_unknown_flags_are_named_in_one_error(configure):
    with pytest.raises(InputError) as error:
        configure('--mini_batch_size', '32', '--max_lr=1', '--nonsense')
    for name in ['mini_batch_size', 'max_lr', 'learning_rate', 'nonsense']:
        assert name in str(error.value)


@pytest.mark.parametrize('flag', ['-max_iters=3', '\u2013max_iters=3', '\u2014max_iters', '\u2013-max_iters'])
def test_another_dash_in_place_of_two_hyphens_is_named(configure, flag):
    for args in [[flag], ['--runs', 'a', flag]]:
        for positional in [None, 'out_dir', 'runs']:
            with pytest.raises(InputError, match='two hyphens: --max_iters'):
                configure(*args, positional=positional)


@pytest.mark.parametrize('low, high, exclude, inside, outside', [
    (0, None, None, [None, 0, 7], [-1]),
    (0, None, 0, [None, 0.1], [0, -1]),
    (0, 1, 0, [0.1, 1], [0, 1.1]),
    (0, 1, 1, [0, 0.9], [-0.1, 1]),
])
def test_a_range_has_its_ends_but_the_excluded_one(low, high, exclude, inside, outside):
    for value in inside:
        configurator.check_range({'knob': value}, ['knob'], low, high, exclude)
    for value in outside:
        with pytest.raises(InputError, match=f'knob .*{value}'):
            configurator.check_range({'knob': value}, ['knob'], low, high, exclude)


@pytest.mark.parametrize('wrong', ['max_lr', 'learning_rat'])
def test_a_mistyped_knob_and_another_trainers_name_lead_to_ours(wrong):
    assert 'learning_rate' in configurator.suggestion(wrong, KNOBS)


@pytest.mark.parametrize('name, ours', [
    ('enable_compilation', 'compile'), ('use_torch_compile', 'compile'), ('sample-every', 'sample_interval'),
    ('core_metric_every', 'tasks_interval'), ('grad_accum', 'gradient_accumulation_steps'),
    ('save_steps', 'save_interval'), ('bf16', 'dtype'), ('steps_per_epoch', 'max_iters'),
    ('tokenizer_path', 'dataset'), ('multiple_of', 'mlp_width'), ('eps', 'adam_eps'), ('depth', 'n_layer'),
    ('embd_size', 'n_embd'), ('eval_freq', 'eval_interval'), ('vocab_size', 'dataset'),
    ('theta', 'rope_theta'), ('log_file', 'out_dir'), ('use_prev_scheduler', 'resumed'),
    ('warmup_iterations', 'warmup_iters'),
])
def test_the_flags_of_other_trainers_lead_to_what_does_the_same(name, ours):
    block = (REPO / 'train.py').read_text().split('# ------')[1]
    knobs = re.findall(r'^(\w+)(?:: .*)? = ', block, re.M)
    assert re.search(fr'\b{ours}\b', configurator.suggestion(name, knobs))


def test_every_other_name_leads_to_a_knob_of_train_py():
    text = (REPO / 'train.py').read_text()
    for name in configurator.OTHER_NAMES.values():
        assert f'\n{name} = ' in text or f'\n{name}: ' in text, name


def test_flags_win_over_config_files_and_later_files_over_earlier(configure, tmp_path):
    first = tmp_path / 'a.py'
    first.write_text('max_iters = 1\nlearning_rate = 5\nout_dir = "a"\n')
    second = tmp_path / 'b.py'
    second.write_text('out_dir = "b"\n')
    config, given = configure('--max_iters=2', '--eval_only', first, second)  # a switch takes no file
    assert {name: config[name] for name in given} == {
        'max_iters': 2, 'learning_rate': 5.0, 'out_dir': 'b', 'eval_only': True}


def test_a_config_file_is_python_sees_the_knobs_and_counts_what_repeats_a_default(configure, tmp_path):
    (tmp_path / 'base.py').write_text('top_k = 200\n')
    path = tmp_path / 'a.py'
    path.write_text(f"import math\n_half = max_iters // 2\nmax_iters = math.ceil(_half)\neval_only = False\n"
                    f"globals().update(start='a')\nexec(open({str(tmp_path / 'base.py')!r}).read())\n")
    config, given = configure(path)
    assert (config['max_iters'], config['start']) == (50, 'a')
    assert set(given) == {'max_iters', 'eval_only', 'start', 'top_k'}


def test_a_config_file_computes_with_the_flags_whatever_stood_above(configure, tmp_path):
    path = tmp_path / 'a.py'
    path.write_text('max_iters = 1000\ntop_k = max_iters // 10\n')
    config, given = configure(path, '--max_iters=50')
    assert (config['max_iters'], config['top_k']) == (50, 5)
    assert set(given) == {'max_iters', 'top_k'}


def test_a_config_file_sets_any_plain_value_and_no_other(configure, tmp_path):
    path = tmp_path / 'a.py'
    path.write_text("import os\nbetas = (0.5, 0.6)\nrates = {'wte': 1}\n")
    config, given = configure(path)
    assert config['betas'] == (0.5, 0.6) and config['rates'] == {'wte': 1}
    assert set(given) == {'betas', 'rates'}
    path.write_text('schedule = 3\n')
    with pytest.raises(InputError, match='schedule'):
        configure(path)


@pytest.mark.parametrize('content', [
    b'max_iters = "many"\n', b'max_iter = 3\n', b'max_iters = = 3\n', 'out_dir = "a"'.encode('utf-16')])
def test_a_config_file_that_cannot_be_used_is_an_input_error(configure, tmp_path, content):
    path = tmp_path / 'a.py'
    path.write_bytes(content)
    with pytest.raises(InputError, match='a.py'):
        configure(path)


def test_bare_words_go_to_the_positional_knob(configure):
    assert configure('a', positional='out_dir')[0]['out_dir'] == 'a'
    assert configure('a', 'b', positional='runs')[0]['runs'] == ['a', 'b']


def test_a_list_takes_the_words_up_to_the_next_flag(configure):
    for args in [['--runs', 'a', 'b'], ['--runs=a', 'b'], ['--runs', 'a', '--runs', 'b']]:
        config, given = configure('c', *args, '--max_iters=3', positional='out_dir')
        assert config['runs'] == ['a', 'b'] and config['out_dir'] == 'c' and config['max_iters'] == 3
    with pytest.raises(InputError, match='--runs'):  # where several files go
        configure('a', 'b', positional='out_dir')


@pytest.mark.parametrize('positional', ['out_dir', 'runs'])
def test_a_word_for_the_positional_knob_is_not_executed_without_config_files(configure, tmp_path, positional):
    path = tmp_path / 'game.py'
    path.write_text('max_iters = 1\nraise SystemExit\n')
    config, given = configure(path, positional=positional, takes_configs=False)
    assert str(path) in config[positional] and set(given) == {positional}


def test_a_tilde_is_the_home_folder_but_in_a_prompt(configure, monkeypatch, tmp_path):
    monkeypatch.setenv('HOME', '/home/me')
    monkeypatch.setenv('USERPROFILE', '/home/me')
    path = tmp_path / 'a.py'
    path.write_text("compile = '~/b'\n")
    config, given = configure(path, '--out_dir=~/a', '--runs', '~', 'a~/b', 'hellaswag,~/mine', '--start=~/c')
    assert (config['out_dir'], config['compile'], config['start']) == ('/home/me/a', '/home/me/b', '~/c')
    assert config['runs'] == ['/home/me', 'a~/b', 'hellaswag,/home/me/mine']
    assert configure('--start=FILE:~/c')[0]['start'] == 'FILE:/home/me/c'


def test_nanogpts_exec_works(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(
        "batch_size = 12\ndtype = 'float32'\n"
        "config_keys = [k for k, v in globals().items()\n"
        "               if not k.startswith('_') and isinstance(v, (int, float, str))]\n"
        "exec(open('configurator.py').read())\n"
        "config = {k: globals()[k] for k in config_keys}\n"
        "print(config)\n")
    (tmp_path / 'configurator.py').write_text((REPO / 'configurator.py').read_text())
    (tmp_path / 'c.py').write_text("dtype = 'float16'\n")
    command = [sys.executable, 'script.py', 'c.py', '--batch_size=3']
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "{'batch_size': 3, 'dtype': 'float16'}\n", result.stderr


def test_help_prints_the_knobs_without_importing_torch():
    result = run_script('train.py', '--help')
    assert result.returncode == 0
    assert 'learning_rate = 6e-4  # peak' in result.stdout


def test_help_ends_quietly_where_nobody_reads_it():
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, REPO / 'train.py', '--help']
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    assert result.stderr == b''
