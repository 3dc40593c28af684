"""Comparing runs: answers that are known, of real runs and of made-up ones; what run.json records for it."""

import json
import math
import statistics
import subprocess

import pytest
from conftest import REPO, TINY, knobs_of

from configurator import InputError
from flatgpt import files
from flatgpt.compare import compare_runs, report, t_quantile
from plot import read_log


def compared(a, b, noise=None):
    """Compare two lists of folders. The report, which many branches write, must not fail."""
    logs_a = {str(folder): read_log(str(folder)) for folder in a}
    logs_b = {str(folder): read_log(str(folder)) for folder in b}
    result = compare_runs(logs_a, logs_b, noise)
    assert report(result)
    return result


# -----------------------------------------------------------------------------
# real runs


@pytest.fixture(scope='module')
def trained(works, data_dir, tmp_path_factory):
    """Return a function that trains for about a second and returns the folder, once for each arguments."""
    folders = {}

    def train(seed, max_iters=40, learning_rate=1e-2):
        key = seed, max_iters, learning_rate
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp('run') / 'out'
            works('train.py', *TINY, '--dataset=toy', f'--data_dir={data_dir}', f'--out_dir={folders[key]}',
                  f'--seed={seed}', f'--max_iters={max_iters}', f'--learning_rate={learning_rate}',
                  '--min_lr=0', '--eval_interval=0', '--eval_iters=20', '--log_interval=10')
        return folders[key]
    return train


def test_the_same_code_with_other_seeds_is_within_noise(trained):
    # these seeds are not among the one in twenty for which an interval of 95% is wrong
    result = compared([trained(1), trained(2), trained(3)], [trained(8), trained(9)])
    assert result['verdict'] == 'within noise'
    assert result['same_loss']['relation'] == 'same' and result['same_loss']['compute'] == 1


def test_half_the_learning_rate_is_worse(trained):
    base = [trained(1), trained(2), trained(3)]
    half = [trained(seed, learning_rate=5e-3) for seed in (1, 2, 3)]
    result = compared(base, half)
    assert result['verdict'] == 'worse'
    assert result['same_loss']['relation'] == 'more' and result['same_loss']['compute'] == 1
    assert compared(half, base)['verdict'] == 'better'


def test_twice_the_iterations_are_twice_the_compute(trained):
    base = [trained(1), trained(2), trained(3)]
    result = compared(base, [trained(1, max_iters=80)])
    assert result['used']['compute'] == result['used']['iter'] == 2
    assert result['verdict'] == 'better'
    assert result['same_loss']['relation'] == 'less' and result['same_loss']['compute'] == 2
    # and they buy what twice the iterations of the same code buy
    result = compared([*base, trained(1, max_iters=80)], [trained(2, max_iters=80)])
    assert result['used']['compute'] == 1
    assert result['same_loss']['compute'] == pytest.approx(1, abs=0.2)


def test_plot_prints_the_comparison_and_draws_it_if_asked(trained, works, script, tmp_path):
    pytest.importorskip('matplotlib')
    picture = tmp_path / 'c.png'
    out = works('plot.py', '--compare', trained(1), trained(2), '--versus', trained(8), f'--to={picture}').out
    assert picture.read_bytes().startswith(b'\x89PNG')
    loss = statistics.mean(read_log(str(trained(seed)))[-1]['val_loss'] for seed in (1, 2))
    assert f'{loss:.4f}' in out
    works('plot.py', '--compare', trained(1), trained(8))
    assert script('plot.py', '--compare', trained(1)).status == 2
    assert script('plot.py', '--compare', trained(1), tmp_path).status == 2


# -----------------------------------------------------------------------------
# made-up runs


CONFIG = knobs_of('train.py')['config']


@pytest.fixture
def made(tmp_path):
    """made(100, 2.5) writes the folder of a run of 100 iterations with this final loss, and returns it."""
    def make(iterations, loss, seed=None, bpb=None, diff='', config=None, **record):
        folder = tmp_path / f'run{len(list(tmp_path.iterdir()))}'
        folder.mkdir()
        seed = len(list(tmp_path.iterdir())) if seed is None else seed
        settings = {**CONFIG, 'seed': seed, 'max_iters': iterations, **(config or {})}
        start = {'command': 'train.py', 'commit': 'abc'}
        files.write_json(str(folder / 'run.json'), {
            'config': settings, 'outcome': 'done', 'iterations': iterations, 'max_iters': iterations,
            'flops_per_token': 1000, 'lr': 0, 'starts': [start], 'diff': diff, 'val_targets': 999,
            'dataset': {'name': 'x', 'train': {}, 'val': {'tokens': 1000, 'sha256': 'abc'}},
            'val_bytes': 4000, 'val_documents': 3, 'tokenizer': 'char', 'n_params': 10, 'dtype': 'float32',
            'compile': False, 'torch': '2', 'device': 'cpu', 'machine': 'm', 'processes': 1, 'threads': 1,
            **record})
        for it in range(0, iterations + 1, iterations // 2):  # the middle is worse than any end
            row = {'iter': it, 'tokens': 10 * it, 'seconds': 3 * it, 'val_bpb': bpb}
            row['val_loss'] = loss if it == iterations else 9.0
            files.append_row(str(folder / 'log.csv'), row)
        return folder
    return make


def test_runs_with_the_same_seeds_are_compared_in_pairs(made):
    a = [made(100, loss, seed) for seed, loss in enumerate((2.0, 2.5, 2.2))]
    b = [made(100, loss, seed) for seed, loss in enumerate((2.1, 2.62, 2.31))]
    result = compared(a, reversed(b))
    assert result['verdict'] == 'worse' and result['difference'] == pytest.approx(0.11)
    assert result['half_width'] == pytest.approx(4.303 * 0.01 / math.sqrt(3))
    assert compared(a, a)['verdict'] == 'within noise'


def test_with_other_seeds_the_standard_error_is_welchs(made):
    a = [made(100, loss) for loss in (2.0, 2.1, 2.3)]
    b = [made(100, loss) for loss in (2.5, 2.6)]
    result = compared(a, b)
    part_a = statistics.variance([2.0, 2.1, 2.3]) / 3
    part_b = statistics.variance([2.5, 2.6]) / 2
    assert result['difference'] == pytest.approx(2.55 - 6.4 / 3)
    assert result['error'] == pytest.approx(math.sqrt(part_a + part_b))
    degrees = (part_a + part_b) ** 2 / (part_a ** 2 / 2 + part_b ** 2)
    assert result['half_width'] == pytest.approx(t_quantile(degrees) * result['error'])
    assert t_quantile(7) == pytest.approx(2.365, abs=0.01)
    assert t_quantile(30) == pytest.approx(2.042, abs=0.01)


def test_a_single_run_has_the_noise_of_the_others_or_the_one_given_or_none(made):
    one = made(100, 2.0)
    other = made(100, 2.1)
    result = compared([one], [other])
    assert result['verdict'] == 'unknown' and result['same_loss']['relation'] is None
    assert compared([one], [other], noise=0.01)['verdict'] == 'worse'
    result = compared([one], [other], noise=0.1)
    assert result['verdict'] == 'within noise' and result['error'] == pytest.approx(0.1 * math.sqrt(2))
    result = compared([one], [made(100, 2.1), made(100, 2.3)])
    assert result['error'] == pytest.approx(math.sqrt(0.02) * math.sqrt(1 + 1 / 2))
    assert result['half_width'] == pytest.approx(12.706 * result['error'])


def law(compute):
    return 3 - 0.5 * math.log(compute)


def test_costs_of_the_same_loss_are_interpolated_between_the_ends_of_runs_of_several_lengths(made):
    ladder = [made(iterations, law(iterations)) for iterations in (100, 200, 400, 800)]
    # this code needs twice the iterations for each loss
    slow = [made(iterations, law(iterations / 2)) for iterations in (200, 600)]
    for result, costs in ((compared(ladder, slow[1:]), 2), (compared(slow[1:], ladder), 1 / 2)):
        assert result['same_loss']['relation'] == 'about' and result['same_loss']['factor'] is None
        for cost in ('compute', 'iter', 'seconds'):
            assert result['same_loss'][cost] == pytest.approx(costs)
    assert compared(ladder, slow)['same_loss']['compute'] == pytest.approx(2)
    # with seeds 1 and 2, B needs 2 * 1.1 and 2 / 1.1 times the compute
    ladder = [made(iterations, law(iterations), seed) for iterations in (100, 200) for seed in (1, 2)]
    slow = [made(300, law(150 / 1.1), seed=1), made(300, law(150 * 1.1), seed=2)]
    result = compared(ladder, slow)['same_loss']
    assert result['compute'] == pytest.approx(2)
    assert result['factor'] == pytest.approx(1.1 ** 12.706)


def test_outside_of_the_ends_there_are_only_bounds(made):
    ladder = [made(200, 2.0), made(400, 1.8)]
    result = compared([made(400, 2.1)], ladder, noise=0.01)['same_loss']
    assert (result['relation'], result['compute']) == ('less', 1 / 2)
    result = compared([made(400, 1.7)], ladder, noise=0.01)['same_loss']
    assert (result['relation'], result['compute']) == ('more', 1)


def test_nothing_is_said_about_costs_if_the_learning_rate_has_not_fallen(made):
    unfinished = made(200, 2.1, lr=CONFIG['learning_rate'] / 2)
    assert compared([made(100, 2.2), made(400, 2.0)], [unfinished])['same_loss'] is None


def test_bits_per_byte_are_compared_if_the_tokenizers_differ_and_the_text_is_the_same(made):
    other = {'name': 'y', 'train': {}, 'val': {'tokens': 500, 'sha256': 'def'}}
    result = compared([made(100, 2.0, bpb=1.5)], [made(100, 4.0, bpb=1.4, dataset=other, val_targets=499)])
    assert result['metric'] == 'val_bpb' and result['difference'] == pytest.approx(-0.1)
    # another text; not all of it
    for record in ({'val_bytes': 4001, 'val_targets': 499}, {'val_targets': 400}):
        with pytest.raises(InputError):
            compared([made(100, 2.0, bpb=1.5)], [made(100, 4.0, bpb=1.4, dataset=other, **record)])


def test_what_cannot_be_compared_is_an_input_error(made, tmp_path):
    a = made(100, 2.0)
    stopped = made(100, 2.0, max_iters=200, outcome='stopped')
    partly = made(100, 2.0, val_targets=500)  # evaluated on other sequences
    for b in (stopped, partly, tmp_path / 'nothing'):
        with pytest.raises(InputError):
            compared([a], [b])
    with pytest.raises(InputError):  # a repetition is no second seed
        compared([a], [made(100, 2.0, seed=7), made(100, 2.1, seed=7)])


def test_the_report_names_what_differs(made):
    diff = 'diff --git a/optim.py b/optim.py\n+momentum = 0.9\n'
    text = report(compared([made(100, 2.0)], [made(100, 2.1, diff=diff, config={'n_head': 17, 'mine': 3})]))
    differences = text.partition('differences')[2]
    for word in ('n_head', '17', 'mine', 'optim.py', 'seed'):
        assert word in differences
    assert 'n_layer' not in differences


# -----------------------------------------------------------------------------
# run.json


def git_repository(folder):
    def git(*arguments):
        command = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b', *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    git('init')
    return git


def test_the_uncommitted_diff_is_recorded_up_to_a_limit_with_the_names_of_new_files(tmp_path, monkeypatch):
    monkeypatch.setattr(files, '__file__', str(tmp_path / 'files.py'))
    monkeypatch.setenv('GIT_CEILING_DIRECTORIES', str(tmp_path.parent))
    assert files.uncommitted_diff() is None
    git = git_repository(tmp_path)
    assert files.uncommitted_diff() is None  # no commit yet
    (tmp_path / 'optim.py').write_text('momentum = 0.95\n')
    git('add', '.')
    git('commit', '-m', 'first')
    assert files.uncommitted_diff() == ''
    (tmp_path / 'optim.py').write_text('momentum = 0.85\n')
    git('add', '.')  # staged, but not committed
    (tmp_path / 'new.py').write_text('secret')
    diff = files.uncommitted_diff()
    assert '-momentum = 0.95\n+momentum = 0.85\n' in diff and 'new.py' in diff and 'secret' not in diff
    git('stash')
    (tmp_path / 'recorded').write_text(diff)
    git('apply', 'recorded')
    assert (tmp_path / 'optim.py').read_text() == 'momentum = 0.85\n'
    (tmp_path / 'optim.py').write_bytes(b'\xff\xe9 = 1\n' * 100_000)
    diff = files.uncommitted_diff()
    assert 65536 < len(diff) < 66000 and json.loads(json.dumps(diff)) == diff
    monkeypatch.setenv('PATH', str(tmp_path))  # git is not installed
    assert files.uncommitted_diff() is None and files.commit() is None


def test_run_json_records_what_a_comparison_rests_on(trained):
    record = files.read_json(str(trained(1) / 'run.json'))
    assert record['flops_per_token'] > 6 * 2 * 12 * 32 ** 2
    assert 0 <= record['lr'] < 0.01 * 0.01
    assert record['val_targets'] == 20 * 4 * 16
    assert record['diff'] == files.uncommitted_diff()
    assert (record['diff'] is None) == (not (REPO / '.git').exists())
