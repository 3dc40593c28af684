"""train.py: the same numbers whatever is logged, evaluated, sampled or saved; one line per user error."""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch
from conftest import (
    REPO, TEXT, TINY, assert_close_run, assert_same_run, assert_same_weights, char_dataset, forget_modules,
    load_checkpoint, losses_of, read_log)

import configurator
from flatgpt import benchmarks, files, processes, sampling


@pytest.fixture(scope='module')
def run(works, data_dir, tmp_path_factory):
    """Return the folder (.folder) and the output (.out) of a finished run, which no test changes."""
    folder = tmp_path_factory.mktemp('run') / 'out'
    result = works('train.py', *TINY, '--dataset=toy', f'--data_dir={data_dir}', f'--out_dir={folder}',
                   '--eval_interval=2', '--weight_decay=0.3', '--sample_interval=6', '--sample_tokens=50')
    result.folder = folder
    return result


@pytest.fixture
def copied(run, out):
    """Return `out`, which contains a copy of the finished run."""
    return shutil.copytree(run.folder, out)


@pytest.fixture
def edit(tmp_path):
    """edit(old, new) writes a train.py with this change, and returns its path."""
    def write(old, new):
        source = (REPO / 'train.py').read_text()
        assert old in source
        path = tmp_path / 'train.py'
        path.write_text(source.replace(old, new))
        return path
    return write


def names_in(folder):
    return sorted(path.name for path in folder.glob('ckpt*'))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -----------------------------------------------------------------------------
# what a run prints and writes


def test_the_console_the_log_and_the_report_have_losses_tokens_and_samples(run):
    assert re.search(r'^step 2: train loss \d\.\d{4}, val loss \d\.\d{4}$', run.out, re.M)
    assert re.search(r'^iter 2: loss \d\.\d{4}, time \d+\.\d\dms, .* tok/s, 128 tokens, ', run.out, re.M)
    assert 'fused AdamW' in run.out
    samples = run.out.partition('samples after 6 iterations')[2]
    assert len(samples) > 50 and '---' in samples and '---' in (run.folder / 'report.md').read_text()
    rows = read_log(run.folder)
    assert [int(row['tokens']) for row in rows if row['loss']] == [64 * i for i in range(6)]
    assert [row['iter'] for row in rows if row['val_loss']] == ['0', '2', '4', '6']


def test_checkpoints_are_numbered_pruned_and_linked(run):
    assert names_in(run.folder) == ['ckpt.pt', 'ckpt_00000004.pt', 'ckpt_00000006.pt', 'ckpt_best.pt']
    assert load_checkpoint(run.folder)['iter_num'] == 6
    best = load_checkpoint(run.folder, 'ckpt_best.pt')
    losses = {row['iter']: float(row['val_loss']) for row in read_log(run.folder)[1:] if row['val_loss']}
    assert best['best_val_loss'] == losses[str(best['iter_num'])] == min(losses.values())
    record = json.loads((run.folder / 'run.json').read_text())
    assert record['outcome'] == 'done' and record['iterations'] == 6
    assert record['best_iter'] == best['iter_num']


def test_run_json_has_the_best_loss_at_each_save(train, out, monkeypatch):
    seen = []

    def print_and_read(text):
        if text.startswith('iter '):
            record = json.loads((out / 'run.json').read_text())
            seen.append((record['best_iter'], record['outcome']))

    monkeypatch.setattr(configurator, 'print0', print_and_read)
    train()
    assert seen[2] == (None, None) and seen[3] == (3, None)


def test_tokens_and_wall_clock_time_continue_over_a_resume_and_a_finetuning(train, run, copied, tmp_path):
    train('--init_from=resume', '--max_iters=8')
    rows = read_log(copied)
    times = [float(row['wall_seconds']) for row in rows]
    assert times == sorted(times) and len(set(times)) == len(times)
    assert all(float(row['seconds']) < seconds for row, seconds in zip(rows, times))
    assert all(row['tokens_total'] == row['tokens'] for row in rows)

    tuned = train(f'--init_from={run.folder}', f"--out_dir={tmp_path / 'tuned'}")
    found = re.findall(r'^iter .*, (\S+) tokens \((\S+) in total\), ', tuned.out, re.M)
    rows = [row for row in read_log(tmp_path / 'tuned') if row['loss']]
    assert found == [(row['tokens'], row['tokens_total']) for row in rows] and found[1] == ('64', '448')


def test_with_always_save_checkpoint_off_the_named_checkpoint_is_the_best(train, out):
    # the learning rate soon does harm, so that the last checkpoint is not the best
    train('--max_iters=40', '--eval_interval=4', '--learning_rate=0.3', '--warmup_iters=30',
          '--lr_schedule=constant', '--always_save_checkpoint=False')
    losses = {int(row['iter']): float(row['val_loss']) for row in read_log(out)[1:] if row['val_loss']}
    assert load_checkpoint(out)['iter_num'] == min(losses, key=losses.get) < 40
    assert 'ckpt_00000040.pt' in names_in(out)  # which a resume reads


def test_eval_only_compiles_nothing_trains_nothing_and_writes_nothing(train, run, out, monkeypatch):
    monkeypatch.setattr(processes, 'choose_compile', lambda compile, device: True)
    monkeypatch.setattr(torch.nn.Module, 'compile', None)
    before = contents(run.folder)
    result = train(f'--out_dir={run.folder}', '--init_from=resume', '--eval_only', '--max_iters=99')
    assert 'step 6: train loss' in result.out and 'iter 6' not in result.out
    assert contents(run.folder) == before
    train('--eval_only')
    assert not out.exists()


# -----------------------------------------------------------------------------
# what is learned


def test_evaluating_sampling_saving_and_logging_change_nothing_that_is_learned(train, tmp_path):
    often = ['--eval_interval=2', '--save_interval=1', '--keep_checkpoints=1', '--sample_interval=1']
    seldom = ['--eval_interval=0', '--save_interval=0', '--log_interval=0']
    train('--dropout=0.1', *often, f"--out_dir={tmp_path / 'often'}")
    train('--dropout=0.1', *seldom, f"--out_dir={tmp_path / 'seldom'}")
    assert_same_weights(tmp_path / 'often', tmp_path / 'seldom')


def test_a_large_batch_and_many_small_ones_give_the_same_gradients(train, tmp_path):
    for batch_size, n in [(8, 1), (2, 4)]:
        result = train('--grad_clip=0', '--total_batch_size=128', f'--batch_size={batch_size}',
                       f'--out_dir={tmp_path / str(n)}')
        assert result.globals['grad_accum_steps'] == n
    assert_close_run(tmp_path / '1', tmp_path / '4')


@pytest.mark.parametrize('cut, flags', [
    (1, ['--dropout=0.1', '--gradient_accumulation_steps=2']),
    (4, ['--arch=modern', '--matrix_optimizer=muon', '--n_kv_head=1', '--dtype=bfloat16']),
])
def test_a_resumed_run_ends_with_the_same_bits(train, out, tmp_path, cut, flags):
    flags = [*flags, '--lr_decay_iters=7']
    train(*flags, '--max_iters=7', f"--out_dir={tmp_path / 'complete'}")
    train(*flags, f'--max_iters={cut}')
    train(*flags, '--max_iters=7', '--init_from=resume')
    assert load_checkpoint(out)['iter_num'] == 7
    assert_same_run(tmp_path / 'complete', out)


def test_overfit_batch_trains_on_one_batch(train, out):
    train('--overfit_batch', '--max_iters=200', '--eval_interval=0', '--log_interval=199')
    assert float(losses_of(out)[-1][1]) < 0.2


def test_the_learning_rate_follows_the_schedule(train):
    def lrs(*flags):
        result = train('--eval_only', '--learning_rate=1', '--warmup_iters=4', '--max_iters=20', *flags)
        return [result.globals['get_lr'](it) for it in (0, 3, 10, 12, 15, 20, 23)]

    assert lrs()[:2] + lrs()[3:4] == pytest.approx([0.2, 0.8, 0.55]) and lrs()[-2:] == [0.1, 0.1]
    assert lrs('--lr_schedule=linear', '--min_lr=0')[3:] == pytest.approx([0.5, 5 / 16, 0, 0])
    assert lrs('--lr_schedule=constant') == pytest.approx([0.2, 0.8, 1, 1, 1, 1, 1])
    assert lrs('--lr_schedule=wsd') == pytest.approx([0.2, 0.8, 1, 0.8, 0.5, 0, 0])
    assert set(lrs('--decay_lr=False')) == {1}  # as in nanoGPT: no warm-up either


def test_the_earliest_budget_ends_the_run_and_a_longer_warmup_is_noted(train):
    for flags, n_iters in [(['--max_tokens=300'], 5), (['--max_tokens=300', '--max_epochs=0.0015'], 2)]:
        result = train('--eval_only', '--warmup_iters=2000', *flags)
        assert result.globals['n_iters'] == n_iters
    assert re.search('^note: .*warm-up', result.out, re.M)


def test_a_dataset_without_val_trains_and_keeps_the_newest(train, tmp_path, out):
    folder = char_dataset(tmp_path, 'noval')
    (folder / 'noval' / 'val.bin').unlink()
    train('--dataset=noval', f'--data_dir={folder}', '--always_save_checkpoint=False')
    assert load_checkpoint(out)['iter_num'] == 6


def test_attention_can_stay_inside_documents(works, train, tmp_path):
    (tmp_path / 'lines.txt').write_text(TEXT.replace('\n', '<|endoftext|>'))
    works('prepare.py', tmp_path / 'lines.txt', '--tokenizer=byte', f'--data_dir={tmp_path}')
    losses = set()
    for on in (False, True):
        result = train('--dataset=lines', f'--data_dir={tmp_path}', '--max_iters=2', '--overwrite',
                       f'--document_mask={on}')
        losses.add(re.search('^step 2: .*', result.out, re.M)[0])
    assert len(losses) == 2


def test_edits_that_draw_from_random_or_numpy_are_repeatable(train, edit):
    edited = edit('optimizer = create', 'drawn = random.random(), np.random.rand()\noptimizer = create')
    results = [train('--eval_only', f'--seed={seed}', path=edited) for seed in (1, 1, 2**40)]
    drawn = [result.globals['drawn'] for result in results]
    assert drawn[0] == drawn[1] != drawn[2]


# -----------------------------------------------------------------------------
# where a run starts


def test_no_run_is_overwritten_or_continued_unless_asked(script, train, tiny, copied):
    before = contents(copied)
    assert script('train.py', *tiny).status == 2
    assert contents(copied) == before
    train('--overwrite', '--max_iters=2')
    assert load_checkpoint(copied)['iter_num'] == 2


def test_auto_resume_continues_a_run_also_one_that_began_from_weights(train, run, out):
    flags = [f'--init_from={run.folder}', '--auto_resume', '--block_size=8']
    first = train(*flags, '--max_iters=2')
    second = train(*flags, '--max_iters=4')
    assert 'iter 0:' in first.out and 'iter 0:' not in second.out and 'iter 2:' in second.out
    assert load_checkpoint(out)['model_args']['block_size'] == 8


def test_a_resume_keeps_the_settings_that_were_given_and_uses_edited_defaults(works, edit, data_dir, copied):
    edited = edit('grad_clip = 1.0', 'grad_clip = 0.5')
    flags = [f'--out_dir={copied}', '--init_from=resume', '--device=cpu', f'--data_dir={data_dir}']
    result = works(edited, *flags, '--max_iters=8', '--beta2=0.9', '--n_layer=5')
    assert result.globals['grad_clip'] == 0.5  # the edited default
    assert result.globals['weight_decay'] == 0.3  # given at the start
    assert result.globals['beta2'] == 0.9  # given now
    assert result.globals['n_layer'] == 2  # the architecture is the checkpoint's
    assert re.search(r'^  grad_clip: .* -> ', result.out, re.M)
    again = works(edited, *flags, '--max_iters=9')
    assert again.globals['beta2'] == 0.9  # given in between
    groups = load_checkpoint(copied)['optimizer']['param_groups']
    assert [group['weight_decay'] for group in groups] == [0.3, 0]
    assert tuple(groups[0]['betas']) == (0.9, 0.9)


def test_added_settings_may_have_names_that_train_py_uses_for_something_else(train, edit, run, tmp_path):
    settings = ['rank = 8', "data = 'x'", "ckpt = 'x'", 'lr = 5.0', 'timeout = 3', 'lock = 1', "state = 'x'"]
    edited = edit('# model\narch', '\n'.join([*settings, '# model', 'arch']))
    for path, name in [('train.py', 'a'), (edited, 'b')]:
        train(f'--init_from={run.folder}', f'--out_dir={tmp_path / name}', path=path)
    assert_same_run(tmp_path / 'a', tmp_path / 'b')


def test_a_resume_needs_the_same_data_and_tokens_per_iteration(script, train, tiny, copied, tmp_path):
    other = char_dataset(tmp_path / 'other', text=TEXT[:-1000])
    for flag in ['--batch_size=2', f'--data_dir={other}']:
        assert script('train.py', *tiny, '--init_from=resume', '--max_iters=7', flag).status == 2
    train('--init_from=resume', '--max_iters=7', '--batch_size=2', '--gradient_accumulation_steps=2')


def test_resume_step_continues_from_that_checkpoint_and_renames_the_later_ones(train, copied):
    train('--init_from=resume', '--resume_step=4', '--max_iters=5')
    names = names_in(copied)
    assert 'ckpt_00000005.pt' in names and 'ckpt_00000006.pt' not in names
    assert any(name.endswith('.old') and '00000006' in name for name in names)
    assert [row['iter'] for row in read_log(copied) if row['loss']] == list('01234')


def test_a_run_of_nanogpt_is_resumed(works, data_dir, run, out):
    ours = load_checkpoint(run.folder)
    theirs = {}
    for name in ('model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config'):
        theirs[name] = ours[name]
    theirs['config'].update(device='cuda', dtype='float16', compile=True, backend='nccl', max_iters=8)
    out.mkdir()
    torch.save(theirs, out / 'ckpt.pt')
    result = works('train.py', f'--out_dir={out}', f'--data_dir={data_dir}', '--device=cpu',
                   '--init_from=resume')
    assert re.findall(r'^iter (\d)', result.out, re.M) == ['6', '7']
    assert result.globals['weight_decay'] == 0.3 and result.globals['dtype'] != 'float16'
    assert load_checkpoint(out)['optimizer']['state'][0]['step'].item() == 8  # its moments are used


# -----------------------------------------------------------------------------
# other machines


def test_a_platform_that_sets_world_size_alone_changes_no_number(
        works, train, run, data_dir, out, monkeypatch):
    flags = ['--device=cpu', f'--data_dir={data_dir}']
    evaluated = works('eval.py', run.folder, *flags)
    monkeypatch.setenv('WORLD_SIZE', '2')
    train('--weight_decay=0.3')
    assert losses_of(out) == losses_of(run.folder)
    assert re.findall('loss .* bytes', works('eval.py', out, *flags).out) == \
        re.findall('loss .* bytes', evaluated.out) != []


def test_nothing_is_needed_that_windows_or_a_torch_without_distributed_lacks(
        works, train, tmp_path, out, monkeypatch):
    forget_modules(monkeypatch)
    for name in ('fcntl', 'resource', 'torch.distributed.device_mesh', 'torch.distributed.fsdp'):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, 'msvcrt', MagicMock())  # Windows has this instead of fcntl
    for name in ('SIGHUP', 'SIGPIPE', 'SIGUSR1'):
        monkeypatch.delattr(signal, name, raising=False)
    for name in ('sched_getaffinity', 'sysconf'):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(torch.distributed, 'is_available', lambda: False)
    monkeypatch.delattr(torch.distributed, 'is_initialized')
    (tmp_path / 'text.txt').write_text(TEXT)
    works('prepare.py', tmp_path / 'text.txt', '--tokenizer=byte', f'--data_dir={tmp_path}')
    train('--dataset=text', f'--data_dir={tmp_path}')
    works('sample.py', out, '--device=cpu', '--max_new_tokens=9')
    works('eval.py', out, '--device=cpu', f'--data_dir={tmp_path}')


def test_clocks_that_stand_still_end_no_run(train, monkeypatch):
    monkeypatch.setattr(time, 'perf_counter', lambda: 0.0)
    assert 'iter 5:' in train().out


def test_max_minutes_end_a_run_also_if_the_system_clock_is_set_back(train, out, monkeypatch):
    monkeypatch.setattr(time, 'time', lambda: 0.0)
    train('--max_iters=2000', '--eval_interval=0', '--log_interval=0', '--max_minutes=0.01')
    assert 0 < load_checkpoint(out)['iter_num'] < 2000


def test_a_run_whose_compiler_fails_continues_without_it(train, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError('no working triton')

    compile = torch.nn.Module.compile
    monkeypatch.setattr(processes, 'choose_compile', lambda compile, device: True)
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda block: compile(block, backend=broken))
    try:
        result = train('--compile=auto', '--sample_interval=6', '--sample_tokens=5')
    finally:
        torch.compiler.set_stance('default')
        torch.compiler.reset()
    assert 'no working triton' in result.out and 'samples after 6' in result.out
    assert result.globals['use_compile'] is False


# -----------------------------------------------------------------------------
# when something is wrong


@pytest.mark.parametrize('flag', [
    '--dataset=missing', '--init_from=resume', '--batch_size=0', '--n_head=3', '--matrix_optimizer=muon',
    '--device=tpu', '--dropout=1', '--block_size=1000000', '--total_batch_size=100', '--tasks=nothing',
    '--document_mask',
])
def test_a_wrong_setting_is_one_line_and_nothing_is_written(script, tiny, out, flag):
    result = script('train.py', *tiny, flag)
    assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1, result.err
    assert not out.exists()


# noticed at a log line, at an evaluation, before a save
@pytest.mark.parametrize('flags', [
    [], ['--log_interval=0'], ['--log_interval=0', '--eval_interval=0', '--save_interval=5']])
def test_a_run_that_diverges_ends_with_status_3_and_saves_nothing(script, tiny, copied, flags):
    before = names_in(copied)
    result = script('train.py', *tiny, '--init_from=resume', '--max_iters=30', '--learning_rate=1e30', *flags)
    assert result.status == 3, result.out
    assert names_in(copied) == before


def test_float16_has_a_scaler_that_is_saved_and_skips_updates(train, out, monkeypatch):
    monkeypatch.setattr(processes, 'choose_dtype', lambda dtype, device: 'float16')  # otherwise for GPUs only
    train('--max_iters=4')
    state = load_checkpoint(out)
    assert state['scaler']['_growth_tracker'] == 4
    state['scaler']['scale'] = 1e30  # the gradient is infinite: the update is skipped, the scale halved
    torch.save(state, out / 'ckpt_00000004.pt')
    train('--init_from=resume', '--max_iters=6')
    assert load_checkpoint(out)['scaler']['scale'] == pytest.approx(0.25e30)


@pytest.mark.parametrize('module, function, flag', [
    (benchmarks, 'is_correct', '--tasks_interval=3'), (sampling, 'generate_text', '--sample_interval=3')])
def test_weights_are_saved_before_a_benchmark_or_sample_whose_failure_is_a_note(
        train, out, tmp_path, monkeypatch, module, function, flag):
    newest = []

    def fail(*args, **options):
        newest.append(max(out.glob('ckpt_0*.pt')).name)
        raise FloatingPointError('logits are not finite')

    monkeypatch.setattr(module, function, fail)
    task = tmp_path / 'task.jsonl'
    task.write_text('{"context": "2 times 3 is ", "continuation": "6"}')
    tasks = str(task) if 'tasks' in flag else ''
    result = train('--eval_interval=0', '--save_interval=3', flag, f'--tasks={tasks}')
    assert newest == ['ckpt_00000003.pt', 'ckpt_00000006.pt']
    assert result.out.count('FloatingPointError: logits are not finite') == 2 and 'iter 5:' in result.out


# -----------------------------------------------------------------------------
# Weights & Biases


@pytest.fixture
def wandb(monkeypatch):
    """Return a package that records the calls of init(), and of the methods of the run that it returns."""
    module = MagicMock()
    module.init.return_value.id = 'abc'
    module.init.return_value.starting_step = 0
    monkeypatch.setitem(sys.modules, 'wandb', module)
    return module


def test_wandb_gets_each_row_once_at_its_iteration_also_from_a_resume(train, wandb):
    run = wandb.init.return_value
    train('--wandb_log')
    run.starting_step = run.log.call_args.kwargs['step'] + 1
    train('--wandb_log', '--init_from=resume', '--max_iters=8')
    run.define_metric.assert_called_with('*', step_metric='iter')
    rows = [call.args[0] for call in run.log.call_args_list]
    assert [call.kwargs['step'] for call in run.log.call_args_list] == [row['iter'] for row in rows]
    assert [row['iter'] for row in rows if 'val/loss' in row] == [0, 3, 6, 8]
    assert [row['iter'] for row in rows if 'iter/loss' in row] == [0, 1, 2, 3, 4, 5, 7]
    # steps that wandb already has cannot be logged again, so an earlier checkpoint starts another run
    train('--wandb_log', '--init_from=resume', '--resume_step=6', '--max_iters=7')
    assert [call.kwargs['id'] for call in wandb.init.call_args_list] == [None, 'abc', None]


def test_a_wandb_that_does_not_start_is_an_error_and_the_old_run_stays(script, tiny, copied, wandb):
    before = contents(copied)
    wandb.init.side_effect = ValueError('no such project')
    assert script('train.py', *tiny, '--wandb_log', '--overwrite').status == 2
    assert contents(copied) == before


def test_wandb_starts_after_the_folder_is_locked(script, tiny, wandb, monkeypatch):
    monkeypatch.setattr(files, 'lock_folder', lambda *args: sys.exit(2))
    assert script('train.py', *tiny, '--wandb_log').status == 2
    assert not wandb.init.called


def test_a_failure_of_wandb_during_training_is_one_note(train, wandb):
    wandb.init.return_value.log.side_effect = ConnectionError('no route')
    assert train('--wandb_log').out.count('no route') == 1


@pytest.mark.parametrize('module', [None, ModuleType('wandb')])  # not installed; a folder called wandb
def test_if_wandb_is_not_installed_the_error_says_how(script, tiny, monkeypatch, module):
    monkeypatch.setitem(sys.modules, 'wandb', module)
    result = script('train.py', *tiny, '--wandb_log')
    assert result.status == 2 and 'pip install wandb' in result.err and result.err.count('\n') == 1


# -----------------------------------------------------------------------------
# config/


@pytest.mark.parametrize('name', sorted(path.name for path in (REPO / 'config').glob('*.py')))
def test_a_short_trial_of_any_config_runs(works, tiny, name):
    sizes = [flag for flag in tiny if 'warmup' not in flag and 'learning_rate' not in flag]
    sizes += ['--max_iters=3', '--init_from=scratch', '--tasks=', '--sample_interval=0', '--eval_interval=0']
    works('train.py', Path('config') / name, *sizes, '--total_batch_size=64', '--wandb_log=False')
