"""docs/middle_loop.py has the same losses on two processes, and resumes exactly."""

import re
from unittest.mock import patch

import pytest
import torch
from conftest import assert_equal, load_checkpoint, run_here, run_processes

SCRIPT = 'docs/middle_loop.py'
TINY = ['--max_iters=6', '--warmup_iters=2', '--eval_interval=3', '--eval_iters=2', '--block_size=16',
        '--n_embd=32', '--dropout=0.1']


@pytest.fixture(scope='module')
def whole_run(tmp_path_factory):
    """Return the folder and the output of a run without a stop."""
    out_dir = tmp_path_factory.mktemp('whole') / 'out'
    result = run_here(SCRIPT, *TINY, f'--out_dir={out_dir}')
    assert result.status == 0, result.err
    return out_dir, result.out


def losses_of(output):
    return [float(loss) for loss in re.findall(r'loss (\d+\.\d+)', output)]


def test_a_stopped_run_continues_to_the_same_bits(works, whole_run, out):
    clip = torch.nn.utils.clip_grad_norm_
    n_calls = 0

    def stop_at_the_fifth_update(*args):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 5:
            raise KeyboardInterrupt
        return clip(*args)

    with patch.object(torch.nn.utils, 'clip_grad_norm_', stop_at_the_fifth_update):
        with pytest.raises(KeyboardInterrupt):
            run_here(SCRIPT, *TINY, f'--out_dir={out}')
    assert load_checkpoint(out)['iter_num'] == 3
    works(SCRIPT, *TINY, f'--out_dir={out}', '--init_from=resume')
    resumed = load_checkpoint(out)
    whole = load_checkpoint(whole_run[0])
    for key in ['model', 'optimizer', 'iter_num']:
        assert_equal(resumed[key], whole[key])


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(whole_run, out):
    result = run_processes(2, SCRIPT, *TINY, f'--out_dir={out}')
    assert result.returncode == 0, result.stderr
    assert losses_of(result.stdout) == pytest.approx(losses_of(whole_run[1]), abs=2e-4)


def test_it_trains_on_a_dataset_folder_and_sample_py_reads_its_checkpoint(works, tmp_path, out):
    text = tmp_path / 'toy.txt'
    text.write_text('a quick brown fox. ' * 200)
    data = f'--data_dir={tmp_path}'
    works('prepare.py', 'toy', f'--input={text}', '--tokenizer=char', data)
    works(SCRIPT, *TINY, '--dataset=toy', data, f'--out_dir={out}')
    assert works('sample.py', out, data, '--num_samples=1', '--max_new_tokens=20', '--start=fox').out
