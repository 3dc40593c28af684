"""Config files and flags: nanoGPT's syntax, types, errors, and which one wins."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import REPO, knobs_of

import configurator
from configurator import InputError

KNOBS = dict(
    __name__='knobs', out_dir='out', max_iters=100, learning_rate=1e-3, compile='auto', eval_only=False,
    top_k=200, offset=None, start='\n', runs=[], betas=(0.9, 0.95), rates={'wte': 0.1}, widths=[64, 128],
    schedule=object(), __annotations__={'compile': bool | str, 'top_k': int | None, 'offset': float},
)
# settings with the types that Python can write
TYPED = '''
from typing import Any, Dict, Literal, Optional, Union
mode: Literal['fast', 'exact'] = 'fast'
level: Literal[1, 2] | Literal['auto', None] = None
widths: list[int] = None
names: tuple[str, ...] = ('a',)
rates: Dict[str, float] = {}
rate: Optional[float] = 0.1
when: Union[int, bool] = 3
steps: 'int | None' = 5
anything: Any = 1
unknown: 'NotImported' = 1.5
'''


@pytest.fixture
def configure(monkeypatch):
    """configure('--max_iters=3') returns (config, given)."""
    def run(*args, script=KNOBS, **options):
        monkeypatch.setattr(sys, 'argv', ['script.py', *map(str, args)])
        return configurator.configure(dict(script), **options)
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)  # restored at the end
    return run


# -----------------------------------------------------------------------------
# flags


@pytest.mark.parametrize('args, given', [
    ('--learning_rate=1', {'learning_rate': 1.0}),
    ('--max_iters=1e5', {'max_iters': 100000}),
    ('--top_k=none', {'top_k': None}),
    ('--start=123', {'start': '123'}),
    ('--start=a=b', {'start': 'a=b'}),
    ('--eval_only=0', {'eval_only': False}),
    ('--eval_only 0', {'eval_only': False}),
    ('--eval_only=False --eval_only', {'eval_only': True}),
    ('--compile', {'compile': True}),
    ('--offset -1e-3', {'offset': -1e-3}),
    ('--betas=(0.5,0.6)', {'betas': (0.5, 0.6)}),
    ("--rates={'wte':0.2}", {'rates': {'wte': 0.2}}),
    ('--widths 32 64 --widths=7', {'widths': [32, 64, 7]}),
])
def test_a_flag_has_the_type_of_its_default(configure, args, given):
    assert repr(configure(*args.split())[1]) == repr(given)


@pytest.mark.parametrize('arg', [
    '--max_iters=1.5', '--max_iters', '--eval_only=maybe', '--betas=0.5', '--widths=a', '--schedule=a',
    'word', '-max_iters=3', '\u2014max_iters'])
def test_a_flag_without_a_valid_value_is_refused(configure, arg):
    with pytest.raises(InputError):
        configure(arg)


def test_a_wrong_dash_after_a_list_is_not_one_of_its_values(configure):
    with pytest.raises(InputError, match='two hyphens'):
        configure('--runs', 'a', '-max_iters=3')


def test_all_unknown_flags_are_named_in_one_error(configure):
    with pytest.raises(InputError) as e:
        configure('--mini_batch_size', '32', '--max_lr=1', '--nonsense')
    for name in ['mini_batch_size', 'max_lr', 'learning_rate', 'nonsense']:
        assert name in str(e.value)


def test_an_input_error_is_printed_as_one_line_with_status_2_and_others_as_by_python(capsys):
    with pytest.raises(SystemExit) as exit_info:
        configurator.print_exception(InputError, InputError('a is wrong. Use b.'), None)
    assert exit_info.value.code == 2 and capsys.readouterr().err == 'error: a is wrong. Use b.\n'
    configurator.print_exception(KeyError, KeyError('a'), None)
    assert capsys.readouterr().err.startswith("KeyError: 'a'")


def test_mistyped_names_and_those_of_other_trainers_lead_to_settings_of_train_py():
    knobs = knobs_of('train.py')['config']
    names = {**configurator.OTHER_NAMES, **configurator.ELSEWHERE, 'learning_rat': 'learning_rate',
             'warmup_iterations': 'warmup_iters', 'sample-every': 'sample_interval'}
    for name, answer in names.items():
        assert answer in configurator.suggestion(name, knobs)


@pytest.mark.parametrize('first_line', ['', 'from __future__ import annotations'])
def test_a_type_may_have_any_spelling_and_a_literal_restricts_the_values(configure, first_line):
    script = {'__name__': 'typed'}
    exec(compile(first_line + TYPED, 'typed.py', 'exec', dont_inherit=True), script)
    flags = {
        'mode': ['exact', 'other', 'None'], 'level': ['2', '3', '1.5'], 'widths': ['64', '6.5'],
        'names': ["('b','c')", 'b'], 'rates': ["{'wte':0.5}", '5'], 'rate': ['2', 'much'],
        'when': ['True', 'often'], 'steps': ['None', '1.5'], 'anything': ['2', 'x'], 'unknown': ['2.5', 'x']}
    given = configure(*[f'--{name}={texts[0]}' for name, texts in flags.items()], script=script)[1]
    assert repr(given) == repr({
        'mode': 'exact', 'level': 2, 'widths': [64], 'names': ('b', 'c'), 'rates': {'wte': 0.5}, 'rate': 2.0,
        'when': True, 'steps': None, 'anything': 2, 'unknown': 2.5})
    for name, texts in flags.items():
        for text in texts[1:]:
            with pytest.raises(InputError, match=name):
                configure(f'--{name}={text}', script=script)


# -----------------------------------------------------------------------------
# positional arguments and lists


def test_words_set_the_positional_setting_and_extend_lists(configure):
    for args in [['--runs', 'a', 'b'], ['--runs=a', 'b'], ['--runs', 'a', '--runs', 'b']]:
        config, given = configure('c', *args, '--max_iters=3', positional='out_dir')
        assert given == {'out_dir': 'c', 'runs': ['a', 'b'], 'max_iters': 3}
    assert configure('a', 'b', positional='runs')[1] == {'runs': ['a', 'b']}
    with pytest.raises(InputError):
        configure('a', 'b', positional='out_dir')


def test_a_tilde_is_the_home_folder_except_in_a_prompt(configure, monkeypatch, tmp_path):
    monkeypatch.setenv('HOME', '/home/me')
    monkeypatch.setenv('USERPROFILE', '/home/me')
    path = tmp_path / 'a.py'
    path.write_text("compile = '~/b'\n")
    config, _ = configure(path, '--out_dir=~/a', '--runs', '~', 'a~/b', 'hellaswag,~/mine', '--start=~/c')
    assert (config['out_dir'], config['compile'], config['start']) == ('/home/me/a', '/home/me/b', '~/c')
    assert config['runs'] == ['/home/me', 'a~/b', 'hellaswag,/home/me/mine']
    assert configure('--start=FILE:~/c')[0]['start'] == 'FILE:/home/me/c'


@pytest.mark.parametrize('script, flag', [
    ('train.py', '--out_dir=s3://bucket/run'), ('train.py', '--init_from=https://x.org/ckpt.pt'),
    ('train.py', '--tasks=hellaswag,gs://bucket/mine.jsonl'), ('sample.py', '--start=FILE:s3://bucket/a.txt'),
    ('eval.py', '--data_dir=gs://bucket/data'), ('export.py', '--to=s3://bucket/hf'),
    ('prepare.py', '--input=https://x.org/a.txt'), ('plot.py', 's3://bucket/run')])
def test_an_address_is_refused_wherever_a_path_is_expected(script, flag):
    with pytest.raises(InputError, match='://'):
        knobs_of(script, flag)


def test_texts_hub_names_and_drive_letters_are_not_addresses():
    assert knobs_of('sample.py', '--start=see https://x.org')['start'] == 'see https://x.org'
    assert knobs_of('prepare.py', '--input=hf:a/b/*.txt')['input'] == ['hf:a/b/*.txt']
    assert knobs_of('train.py', '--out_dir=C://out')['out_dir'] == 'C://out'


# -----------------------------------------------------------------------------
# ranges


def test_the_table_of_ranges_needs_no_setting_and_takes_new_ones(configure, monkeypatch):
    configurator.check_ranges({})
    configurator.check_ranges({'top_k': None, 'batch_size': 'auto'})
    monkeypatch.setattr(configurator, 'RANGES', [*configurator.RANGES, (-1, 1, 1, ['offset'])])
    for value in [-1, 0.5]:
        assert configure(f'--offset={value}')[1] == {'offset': value}
    for value in [-2, 1, 2]:
        with pytest.raises(InputError, match='offset'):
            configure(f'--offset={value}')


def test_a_default_out_of_range_is_refused(script, tmp_path):
    source = (REPO / 'train.py').read_text().replace('\nbeta2 = 0.95\n', '\nbeta2 = 1.5\n')
    (tmp_path / 'train.py').write_text(source)
    result = script(tmp_path / 'train.py', f"--out_dir={tmp_path / 'out'}")
    assert result.status == 2 and 'beta2' in result.err


# -----------------------------------------------------------------------------
# config files


def test_flags_win_over_config_files_and_later_files_over_earlier_ones(configure, tmp_path):
    first = tmp_path / 'a.py'
    first.write_text('max_iters = 1000\ntop_k = max_iters // 10\nlearning_rate = 5\nout_dir = "a"\n')
    second = tmp_path / 'b.py'
    second.write_text('out_dir = "b"\n')
    # a flag without a value does not take the file as its value
    _, given = configure('--max_iters=50', '--eval_only', first, second)
    want = {'max_iters': 50, 'top_k': 5, 'learning_rate': 5.0, 'out_dir': 'b', 'eval_only': True}
    assert given == want


def test_a_config_file_is_python_and_may_repeat_a_default(configure, tmp_path):
    (tmp_path / 'base.py').write_text('top_k = 200\n')
    path = tmp_path / 'a.py'
    path.write_text(f"import math\n_half = max_iters // 2\nmax_iters = math.ceil(_half)\neval_only = False\n"
                    f"globals().update(start='a')\nbetas = (0.5, 0.6)\nrates = {{'wte': 1}}\n"
                    f"exec(open({str(tmp_path / 'base.py')!r}).read())\n")
    assert configure(path)[1] == {'max_iters': 50, 'eval_only': False, 'start': 'a', 'betas': (0.5, 0.6),
                                  'rates': {'wte': 1}, 'top_k': 200}


@pytest.mark.parametrize('content', [
    b'max_iters = "many"\n', b'max_iter = 3\n', b'max_iters = = 3\n', b'max_iters = 1 / 0\n',
    b'import numpy\nmax_iters = numpy.array([1, 2])\n', 'out_dir = "a"'.encode('utf-16')])
def test_a_config_file_that_cannot_be_used_is_refused(configure, tmp_path, content):
    path = tmp_path / 'a.py'
    path.write_bytes(content)
    with pytest.raises(InputError, match='a.py'):
        configure(path)


def test_values_of_numpy_and_pathlib_become_pythons(configure, tmp_path):
    path = tmp_path / 'a.py'
    path.write_text("import numpy as np\nfrom pathlib import PurePosixPath\n"
                    "out_dir = PurePosixPath('a') / 'b'\nruns = [PurePosixPath('c')]\n"
                    "max_iters = np.int64(20)\nlearning_rate = 1e-3 * np.sqrt(4)\ntop_k = np.float32(5)\n"
                    "eval_only = np.bool_(True)\nrates = {'wte': np.float64(2)}\n"
                    "widths = np.arange(2)\nbetas = np.array([0.5, 0.75])\n")
    assert repr(configure(path)[1]) == repr({
        'out_dir': 'a/b', 'runs': ['c'], 'max_iters': 20, 'learning_rate': 0.002, 'top_k': 5,
        'eval_only': True, 'rates': {'wte': 2.0}, 'widths': [0, 1], 'betas': (0.5, 0.75)})


def test_all_scripts_but_prepare_py_execute_config_files(configure, tmp_path):
    path = tmp_path / 'game.py'
    path.write_text("out_dir = 'from the file'\n")
    for positional in ['out_dir', 'runs']:
        config, given = configure(path, positional=positional, takes_configs=False)
        assert given.keys() == {positional} and str(path) in config[positional]
    for script in ['train.py', 'sample.py', 'eval.py']:
        assert knobs_of(script, path)['out_dir'] == 'from the file'


# -----------------------------------------------------------------------------
# scripts


def test_nanogpts_way_to_execute_configurator_py_works(tmp_path):
    (tmp_path / 'script.py').write_text(
        "batch_size = 12\ndtype = 'float32'\n"
        "config_keys = [k for k, v in globals().items()\n"
        "               if not k.startswith('_') and isinstance(v, (int, float, str))]\n"
        "exec(open('configurator.py').read())\n"
        "config = {k: globals()[k] for k in config_keys}\n"
        "print(config)\n")
    shutil.copy(REPO / 'configurator.py', tmp_path)
    (tmp_path / 'c.py').write_text("dtype = 'float16'\n")
    command = [sys.executable, 'script.py', 'c.py', '--batch_size=3']
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "{'batch_size': 3, 'dtype': 'float16'}\n", result.stderr


def test_help_prints_the_settings_without_torch_and_ignores_a_closed_pipe():
    command = [sys.executable, '-X', 'importtime', REPO / 'train.py', '--help']
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and '\nlearning_rate = 6e-4  # ' in result.stdout
    assert 'torch' not in result.stderr and 'numpy' not in result.stderr
    read_end, write_end = os.pipe()
    os.close(read_end)
    del command[1:3]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    assert result.stderr == b''
