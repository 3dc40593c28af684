"""eval.py: the numbers of the functions in evaluation.py, on a checkpoint, in any number of processes."""

import pytest
import torch
from conftest import TEXT, char_dataset, run_processes
from test_benchmarks import write_tasks
from test_evaluation import PLAIN, save_model, small_model

from flatgpt import benchmarks, evaluation
from flatgpt.checkpoint import load
from flatgpt.dataset import Dataset
from flatgpt.files import read_json

ASCII = ''.join(map(chr, range(32, 127))) + '\n' + TEXT[:5000]  # all characters that the tasks have


@pytest.fixture
def folder(tmp_path):
    """A model in out/, its text and tasks in data/."""
    (tmp_path / 'data').mkdir()
    write_tasks(tmp_path / 'data')
    data = Dataset('toy', char_dataset(tmp_path / 'data', text=ASCII), 128)
    save_model(tmp_path / 'out', small_model(data.vocab_size, block_size=128), data.tokenizer_state)
    return tmp_path


@pytest.fixture
def flags(folder):
    return [folder / 'out', f"--data_dir={folder / 'data'}", '--device=cpu', '--dtype=float32']


def results(folder):
    return read_json(folder / 'out' / 'eval_00000007.json')


@pytest.mark.parametrize('n_processes', [1, 2])
def test_what_is_printed_and_written_is_what_the_functions_say(folder, flags, works, n_processes):
    args = ['eval.py', *flags, '--tasks=hellaswag,core', '--max_per_task=4', '--batch_size=1']
    if n_processes == 1:
        printed = works(*args).out
    else:
        printed = run_processes(n_processes, *args).stdout
    found = results(folder)
    model, tokenizer = load(str(folder / 'out'))
    split = Dataset('toy', folder / 'data', 128).val
    expected = evaluation.text_loss(model, split, 0, 1, PLAIN)
    assert {name: found[name] for name in expected} == expected, 'to the bit'
    assert found['tokens'] == split.n - 1 and found['iter'] == 7
    assert printed.count(f"{found['bpb']:.4f} ± {found['bpb_error']:.4f}") == 1
    tasks = benchmarks.load_tasks('hellaswag,core', 4, str(folder / 'data'), tokenizer)
    metrics, details = benchmarks.evaluate_tasks(model, tasks, tokenizer, PLAIN)
    assert found['tasks'] == details and found['core'] == metrics['core']
    assert found['sample'] in printed and 0 < len(found['sample']) <= 100


def test_a_checkpoint_of_nanogpt_is_judged_by_its_dataset(folder, flags, works):
    path = folder / 'out' / 'ckpt.pt'
    state = torch.load(path)
    state.pop('tokenizer')
    torch.save(state, path)
    works('eval.py', *flags, '--eval_tokens=256', '--split=train')
    assert results(folder)['bytes'] == results(folder)['tokens'] == 256


@pytest.mark.parametrize('flag', ['--split=test', '--dataset=other', '--init_from=gone'])
def test_mistakes_are_one_line(folder, flags, script, flag):
    char_dataset(folder / 'data', 'other', 'abcabc' * 100)
    result = script('eval.py', *flags, flag)
    assert result.status == 2 and result.err.count('\n') == 1, result.err
    assert not list((folder / 'out').glob('*.json'))
