"""train.py does what it says: the same numbers whatever is logged, evaluated, sampled or saved."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REPO, TEXT, TINY, assert_equal, char_dataset, load_checkpoint, losses_of, read_log

import benchmarks
import configurator
import files
import processes
import sampling
import dataset
import model


@pytest.fixture
def tiny(data_dir, tmp_path):
    """Flags of a run of a second in tmp_path/out."""
    return [*TINY, '--dataset=toy', f'--data_dir={data_dir}', f"--out_dir={tmp_path / 'out'}"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / 'out'


def names_in(folder):
    return sorted(path.name for path in folder.glob('ckpt*'))


# -----------------------------------------------------------------------------
# what is learned


def test_the_console_and_the_report_have_losses_and_samples(works, tiny, out):
    result = works('train.py', *tiny, '--sample_interval=6', '--sample_tokens=50')
    assert re.search(r'^step 3: train loss \d\.\d{4}, val loss \d\.\d{4}$', result.out, re.M)
    assert re.search(r'^iter 2: loss \d\.\d{4}, time \d+\.\d\dms, .* tok/s', result.out, re.M)
    samples = result.out.partition('samples after 6 iterations')[2]
    assert len(samples) > 50 and '---' in samples and '---' in (out / 'report.md').read_text()
    rows = read_log(out)
    assert [int(row['tokens']) for row in rows if row['loss']] == [64 * i for i in range(6)]
    assert [row['iter'] for row in rows if row['val_loss']] == ['0', '3', '6']


def test_the_line_and_log_csv_count_the_same_tokens_of_the_run_and_in_total(works, tiny, tmp_path, out):
    result = works('train.py', *tiny)
    assert 'fused AdamW' in result.out
    assert re.findall(r'^iter .*, (\S+) tokens, ', result.out, re.M) == ['0', '64', '128', '192', '256', '320']
    result = works('train.py', *tiny, f'--init_from={out}', f"--out_dir={tmp_path / 'tuned'}")
    found = re.findall(r'^iter .*, (\S+) tokens \((\S+) in total\), ', result.out, re.M)
    rows = [row for row in read_log(tmp_path / 'tuned') if row['loss']]
    assert found == [(row['tokens'], row['tokens_total']) for row in rows] and found[1] == ('64', '448')


def test_a_warmup_that_is_longer_than_the_run_is_noted(works, tiny):
    out = works('train.py', *tiny, '--warmup_iters=2000').out
    schedule = re.search('^schedule: .*', out, re.M)[0]
    assert '2,000' in schedule and '%' not in schedule and re.search('^note: .*warm-up', out, re.M)


def test_a_process_trains_alone_if_only_some_of_torchruns_variables_are_set(works, tiny, data_dir, out,
                                                                           monkeypatch):
    losses = []
    for name in ('HOME', 'WORLD_SIZE', 'RANK'):
        monkeypatch.setenv(name, '2')
        works('train.py', *tiny, '--overwrite')
        evaluated = works('eval.py', out, '--device=cpu', f'--data_dir={data_dir}')
        losses.append((losses_of(out), re.findall('loss .* bytes', evaluated.out)))
        monkeypatch.delenv(name)
    assert losses[0][1] and losses[0] == losses[1] == losses[2]


def test_torch_may_be_built_without_distributed(works, tiny, out, monkeypatch):
    # as such a build has it
    monkeypatch.setattr(torch.distributed, 'is_available', lambda: False)
    monkeypatch.delattr(torch.distributed, 'is_initialized')
    for name in ('device_mesh', 'fsdp'):
        monkeypatch.setitem(sys.modules, f'torch.distributed.{name}', None)
    for name in ('processes', 'checkpoint', 'evaluation', 'model'):
        monkeypatch.delitem(sys.modules, name, raising=False)
    works('train.py', *tiny)
    works('train.py', *tiny, '--init_from=resume', '--max_iters=7')
    works('sample.py', out, '--device=cpu', '--num_samples=1', '--max_new_tokens=5')


def test_evaluating_sampling_saving_and_logging_change_nothing_that_is_learned(works, tiny, tmp_path):
    often = ['--eval_interval=2', '--save_interval=1', '--keep_checkpoints=1', '--sample_interval=1']
    seldom = ['--eval_interval=0', '--save_interval=0', '--log_interval=0']
    works('train.py', *tiny, '--dropout=0.1', *often, f"--out_dir={tmp_path / 'often'}")
    works('train.py', *tiny, '--dropout=0.1', *seldom, f"--out_dir={tmp_path / 'seldom'}")
    one = load_checkpoint(tmp_path / 'often')
    other = load_checkpoint(tmp_path / 'seldom')
    assert_equal(one['model'], other['model'])
    assert_equal(one['optimizer']['state'], other['optimizer']['state'])


def test_a_large_batch_and_many_small_ones_give_the_same_gradients(works, tiny, tmp_path):
    flags = [*tiny, '--grad_clip=0', '--total_batch_size=128']
    one = works('train.py', *flags, '--batch_size=8', f"--out_dir={tmp_path / 'one'}")
    four = works('train.py', *flags, '--batch_size=2', f"--out_dir={tmp_path / 'four'}")
    assert (one.globals['grad_accum_steps'], four.globals['grad_accum_steps']) == (1, 4)
    for row, other in zip(losses_of(tmp_path / 'one'), losses_of(tmp_path / 'four'), strict=True):
        for number, other_number in zip(row, other):
            assert float(number) == pytest.approx(float(other_number), rel=1e-4)
    torch.testing.assert_close(load_checkpoint(tmp_path / 'one')['model'],
                               load_checkpoint(tmp_path / 'four')['model'], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize('cut, flags', [
    (1, ['--dropout=0.1', '--gradient_accumulation_steps=2']),
    (4, ['--arch=modern', '--matrix_optimizer=muon', '--n_kv_head=1', '--dtype=bfloat16']),
])
def test_a_resumed_run_ends_with_the_same_bits(works, tiny, tmp_path, cut, flags):
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    flags = [*tiny, *flags, '--lr_decay_iters=7']
    works('train.py', *flags, f'--out_dir={whole}', '--max_iters=7')
    works('train.py', *flags, f'--out_dir={parts}', f'--max_iters={cut}')
    works('train.py', *flags, f'--out_dir={parts}', '--max_iters=7', '--init_from=resume')
    one, other = load_checkpoint(whole), load_checkpoint(parts)
    assert other['iter_num'] == 7
    assert_equal(one['model'], other['model'])
    assert_equal(one['optimizer']['state'], other['optimizer']['state'])
    assert losses_of(whole) == losses_of(parts)


def test_overfit_batch_sees_one_batch(works, tiny):
    result = works('train.py', *tiny, '--overfit_batch', '--max_iters=200', '--eval_interval=0',
                   '--log_interval=199')
    assert float(re.search(r'iter 199: loss (\d\.\d+)', result.out)[1]) < 0.2


def test_the_learning_rate_follows_the_schedule(works, tiny):
    def lrs(*args):
        flags = [*tiny, '--eval_only', '--learning_rate=1', '--warmup_iters=4', '--max_iters=20', *args]
        get_lr = works('train.py', *flags).globals['get_lr']
        return [get_lr(it) for it in (0, 3, 10, 12, 15, 20, 23)]

    assert lrs()[:2] + lrs()[3:4] == pytest.approx([0.2, 0.8, 0.55]) and lrs()[-2:] == [0.1, 0.1]
    assert lrs('--lr_schedule=linear', '--min_lr=0')[3:] == pytest.approx([0.5, 5 / 16, 0, 0])
    assert lrs('--lr_schedule=constant') == pytest.approx([0.2, 0.8, 1, 1, 1, 1, 1])
    assert lrs('--lr_schedule=wsd') == pytest.approx([0.2, 0.8, 1, 0.8, 0.5, 0, 0])
    assert set(lrs('--decay_lr=False')) == {1}  # as in nanoGPT: no warmup either


def test_the_earliest_budget_ends_the_run(works, tiny):
    for flags, n in [(['--max_tokens=300'], 5), (['--max_tokens=300', '--max_epochs=0.0015'], 2)]:
        result = works('train.py', *tiny, '--overwrite', *flags)
        assert len(re.findall('^iter ', result.out, re.M)) == n


def test_a_dataset_without_val_trains_and_keeps_the_newest(works, tiny, tmp_path, out):
    folder = char_dataset(tmp_path / 'data', 'noval')
    (folder / 'noval' / 'val.bin').unlink()
    result = works('train.py', *tiny, '--dataset=noval', f'--data_dir={folder}',
                   '--always_save_checkpoint=False')
    assert 'val loss' not in result.out
    assert load_checkpoint(out)['iter_num'] == 6


def test_attention_can_stay_inside_documents(works, tiny, tmp_path):
    (tmp_path / 'lines.txt').write_text(TEXT.replace('\n', '<|endoftext|>'))
    works('prepare.py', tmp_path / 'lines.txt', '--tokenizer=byte', f'--data_dir={tmp_path}')
    flags = [*tiny, '--dataset=lines', f'--data_dir={tmp_path}', '--overwrite']
    results = [works('train.py', *flags, f'--document_mask={on}').out for on in (False, True)]
    across, inside = [re.findall(r'^step 6: .*', out, re.M) for out in results]
    assert len(across) == len(inside) == 1 and across != inside


def test_a_micro_batch_whose_targets_are_all_masked_trains_on(works, tiny, monkeypatch):
    batch = dataset.Tokens.batch

    def masked_batch(self, seed, numbers, block_size):
        x, y, doc_ids = batch(self, seed, numbers, block_size)
        return x, np.where(np.asarray(numbers)[0] % 8 == 4, -1, y), doc_ids  # every second micro-batch

    monkeypatch.setattr(dataset.Tokens, 'batch', masked_batch)
    works('train.py', *tiny, '--gradient_accumulation_steps=2')  # a loss of nan would be status 3


# -----------------------------------------------------------------------------
# what is kept


def test_checkpoints_are_numbered_pruned_and_linked(works, tiny, out):
    works('train.py', *tiny, '--max_iters=8', '--save_interval=2', '--eval_interval=4')
    assert names_in(out) == ['ckpt.pt', 'ckpt_00000006.pt', 'ckpt_00000008.pt', 'ckpt_best.pt']
    assert load_checkpoint(out)['iter_num'] == 8
    best = load_checkpoint(out, 'ckpt_best.pt')
    losses = {row['iter']: float(row['val_loss']) for row in read_log(out) if row['val_loss']}
    assert best['best_val_loss'] == losses[str(best['iter_num'])] == min(losses['4'], losses['8'])
    run = json.loads((out / 'run.json').read_text())
    assert run['outcome'] == 'done' and run['iterations'] == 8 and run['best_iter'] == best['iter_num']


def test_run_json_has_the_best_loss_at_each_save(works, tiny, out, monkeypatch):
    seen = []

    def print_and_read(text):
        if text.startswith('iter '):
            run = json.loads((out / 'run.json').read_text())
            seen.append((run.get('best_iter'), run.get('best_val_loss'), run['outcome']))

    monkeypatch.setattr(configurator, 'print0', print_and_read)
    works('train.py', *tiny)
    assert seen[2] == (None, None, None) and seen[3] == (3, pytest.approx(seen[3][1]), None)


def test_the_log_has_the_wall_clock_time_also_over_a_resume(works, tiny, out):
    works('train.py', *tiny)
    works('train.py', *tiny, '--init_from=resume', '--max_iters=8')
    rows = read_log(out)
    times = [float(row['wall_seconds']) for row in rows]
    assert times == sorted(times) and len(set(times)) == len(times)
    assert all(float(row['seconds']) < seconds for row, seconds in zip(rows, times))


def test_with_always_save_checkpoint_off_the_named_checkpoint_is_the_best(works, tiny, out):
    # a learning rate that soon does harm: the last is not the best
    works('train.py', *tiny, '--max_iters=40', '--eval_interval=4', '--learning_rate=0.3',
          '--warmup_iters=30', '--lr_schedule=constant', '--always_save_checkpoint=False')
    losses = {int(row['iter']): float(row['val_loss']) for row in read_log(out) if row['val_loss']}
    del losses[0]
    assert load_checkpoint(out)['iter_num'] == min(losses, key=losses.get) < 40
    assert names_in(out)[-2] == 'ckpt_00000040.pt'  # a resume takes the newest one


def test_eval_only_writes_nothing_and_never_trains(works, tiny, tmp_path, out):
    works('train.py', *tiny)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    result = works('train.py', *tiny, '--init_from=resume', '--eval_only', '--max_iters=99')
    assert 'step 6: train loss' in result.out and 'iter 6' not in result.out
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    works('train.py', *tiny, '--eval_only', f"--out_dir={tmp_path / 'new'}")
    assert not (tmp_path / 'new').exists()


# -----------------------------------------------------------------------------
# where a run starts


def test_no_run_is_overwritten_or_continued_unless_asked(script, works, tiny, out):
    works('train.py', *tiny)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = script('train.py', *tiny)
    assert again.status == 2 and again.err.startswith('error: ')
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    works('train.py', *tiny, '--overwrite', '--max_iters=2')
    assert load_checkpoint(out)['iter_num'] == 2


def test_auto_resume_continues_a_run_also_one_that_began_from_weights(works, tiny, tmp_path, out):
    works('train.py', *tiny)
    flags = [*tiny, f'--init_from={out}', f"--out_dir={tmp_path / 'tuned'}", '--auto_resume',
             '--block_size=8']
    first = works('train.py', *flags, '--max_iters=2')
    second = works('train.py', *flags, '--max_iters=4')
    assert 'iter 0:' in first.out and 'iter 0:' not in second.out and 'iter 2:' in second.out
    assert load_checkpoint(tmp_path / 'tuned')['model_args']['block_size'] == 8


def test_on_a_resume_what_was_given_holds_and_an_edited_default_counts(works, tiny, data_dir, tmp_path, out):
    works('train.py', *tiny, '--weight_decay=0.3')
    edited = tmp_path / 'train.py'
    edited.write_text((REPO / 'train.py').read_text().replace('grad_clip = 1.0', 'grad_clip = 0.5')
                      .replace('weight_decay = 1e-1', 'weight_decay = 0.7'))
    place = [f'--out_dir={out}', '--init_from=resume', '--device=cpu', f'--data_dir={data_dir}']
    result = works(edited, *place, '--max_iters=8', '--beta2=0.9', '--n_layer=5')
    assert result.globals['grad_clip'] == 0.5  # this file's
    assert result.globals['weight_decay'] == 0.3  # given then
    assert result.globals['beta2'] == 0.9  # given now
    assert result.globals['n_layer'] == 2  # the architecture is the checkpoint's
    assert re.search(r'^  grad_clip: .* -> ', result.out, re.M)
    again = works(edited, *place, '--max_iters=9')
    assert again.globals['beta2'] == 0.9  # given in between
    groups = load_checkpoint(out)['optimizer']['param_groups']
    assert [group['weight_decay'] for group in groups] == [0.3, 0]
    assert tuple(groups[0]['betas']) == (0.9, 0.9)


def test_knobs_of_an_edit_may_have_names_that_train_py_uses_for_something_else(works, tiny, tmp_path, out):
    works('train.py', *tiny)
    knobs = ['rank = 8', "data = 'x'", "ckpt = 'x'", 'lr = 5.0', 'timeout = 3', 'lock = 1', "state = 'x'"]
    edited = tmp_path / 'train.py'
    text = (REPO / 'train.py').read_text()
    edited.write_text(text.replace('# model\narch', '\n'.join([*knobs, '# model', 'arch'])))
    steps = []
    for path, name in [('train.py', 'a'), (edited, 'b')]:
        result = works(path, *tiny, f'--init_from={out}', f'--out_dir={tmp_path / name}')
        steps.append(re.findall('^step .*', result.out, re.M))
    assert len(steps[0]) == 3 and steps[0] == steps[1]


def test_edits_that_draw_from_random_or_numpy_are_repeatable(works, tiny, tmp_path):
    edited = tmp_path / 'train.py'
    text = (REPO / 'train.py').read_text()
    edited.write_text(text.replace('optimizer = create', 'drawn = random.random(), np.random.rand()\n'
                                   'optimizer = create'))
    drawn = [works(edited, *tiny, '--eval_only', f'--seed={seed}').globals['drawn'] for seed in (1, 1, 2**40)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_other_data_or_another_batch_end_a_resume(script, works, tiny, tmp_path, out):
    works('train.py', *tiny)
    assert script('train.py', *tiny, '--init_from=resume', '--max_iters=9', '--batch_size=2').status == 2
    other = char_dataset(tmp_path / 'other', text=TEXT[:-1000])
    assert script('train.py', *tiny, '--init_from=resume', '--max_iters=9', f'--data_dir={other}').status == 2
    works('train.py', *tiny, '--init_from=resume', '--max_iters=7', '--batch_size=2',
          '--gradient_accumulation_steps=2')


def test_resume_step_goes_on_from_a_named_checkpoint_and_keeps_the_later_ones_aside(works, tiny, out):
    works('train.py', *tiny, '--max_iters=6', '--save_interval=2', '--keep_checkpoints=0')
    works('train.py', *tiny, '--init_from=resume', '--resume_step=2', '--max_iters=4', '--save_interval=2',
          '--keep_checkpoints=0')
    names = names_in(out)
    assert 'ckpt_00000004.pt' in names and 'ckpt_00000006.pt' not in names
    assert any(name.endswith('.old') and '00000006' in name for name in names)
    assert [row['iter'] for row in read_log(out) if row['loss']] == list('0123')


def test_nanogpts_run_goes_on_as_it_is_and_it_reads_ours(works, tiny, data_dir, tmp_path, out):
    works('train.py', *tiny, '--max_iters=1', '--weight_decay=0.3')
    ours = load_checkpoint(out)
    # what nanoGPT writes and reads: six keys, seven arguments, a config of another machine
    theirs = {}
    for name in ('model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config'):
        theirs[name] = ours[name]
    assert set(ours['model_args']) == {'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size',
                                       'dropout'}
    theirs['config'].update(device='cuda', dtype='float16', compile=True, backend='nccl', max_iters=3)
    folder = tmp_path / 'nanogpt'
    folder.mkdir()
    torch.save(theirs, folder / 'ckpt.pt')
    result = works('train.py', f'--out_dir={folder}', f'--data_dir={data_dir}', '--device=cpu',
                   '--init_from=resume')
    assert re.findall(r'^iter (\d)', result.out, re.M) == ['1', '2']
    assert result.globals['weight_decay'] == 0.3 and result.globals['dtype'] != 'float16'
    assert load_checkpoint(folder)['optimizer']['state'][0]['step'].item() == 3  # the old moments went on


# -----------------------------------------------------------------------------
# when something is wrong


@pytest.mark.parametrize('flag', [
    '--dataset=missing', '--init_from=resume', '--batch_size=0', '--n_head=3', '--matrix_optimizer=muon',
    '--device=tpu', '--block_size=1000000', '--total_batch_size=100', '--tasks=nothing', '--document_mask',
])
def test_what_a_person_gets_wrong_is_one_line_and_nothing_is_written(script, tiny, out, flag):
    result = script('train.py', *tiny, flag)
    assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1, result.err
    assert not out.exists()


def test_nothing_that_windows_lacks_is_needed(works, tiny, tmp_path, out, monkeypatch):
    for path in REPO.glob('*.py'):
        monkeypatch.setitem(sys.modules, path.stem, None)  # so that it is put back behind this test
        del sys.modules[path.stem]  # imported again
    for name in ('fcntl', 'resource'):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ('SIGHUP', 'SIGPIPE', 'SIGUSR1'):
        monkeypatch.delattr(signal, name, raising=False)
    for name in ('sched_getaffinity', 'sysconf'):
        monkeypatch.delattr(os, name, raising=False)
    (tmp_path / 'text.txt').write_text(TEXT)
    works('prepare.py', tmp_path / 'text.txt', '--tokenizer=byte', f'--data_dir={tmp_path}')
    works('train.py', *tiny, '--dataset=text', f'--data_dir={tmp_path}')
    works('sample.py', out, '--device=cpu', '--max_new_tokens=9')
    works('eval.py', out, '--device=cpu', f'--data_dir={tmp_path}')


def test_a_run_that_diverges_ends_with_status_3_and_writes_nothing(script, works, tiny, out):
    works('train.py', *tiny, '--max_iters=2')
    before = names_in(out)
    # seen at a log line, at an evaluation, before a save
    for flags in ([], ['--log_interval=0'], ['--log_interval=0', '--eval_interval=0', '--save_interval=5']):
        result = script('train.py', *tiny, '--init_from=resume', '--max_iters=30', '--learning_rate=1e30',
                        *flags)
        assert result.status == 3, result.out
        assert names_in(out) == before


def test_under_float16_the_scaler_is_saved_and_skipped_updates_do_not_end_the_run(works, tiny, out,
                                                                                  monkeypatch):
    # train.py takes it on GPUs only
    monkeypatch.setattr(processes, "choose_dtype", lambda dtype, device: 'float16')
    works('train.py', *tiny, '--max_iters=4')
    state = load_checkpoint(out)
    assert state['scaler']['_growth_tracker'] == 4
    # a scale that makes the gradient infinite: the update is skipped, the scale halved
    state['scaler']['scale'] = 1e30
    torch.save(state, out / 'ckpt_00000004.pt')
    works('train.py', *tiny, '--init_from=resume', '--max_iters=6')
    assert load_checkpoint(out)['scaler']['scale'] == pytest.approx(0.25e30)


class Wandb(SimpleNamespace):
    """In place of the package: what was given to init() and log()."""

    def __init__(self):
        super().__init__(options=[], rows=[], metrics={}, error=None)

    def init(self, **options):
        self.options.append(options)
        if options['project'] == 'gone':
            raise ValueError('no such project')
        n_steps = 0
        if options['id']:
            n_steps = self.rows[-1][0] + 1
        return SimpleNamespace(id='abc', starting_step=n_steps, define_metric=self.define_metric,
                               log=self.log)

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def log(self, row, step):
        if self.error:
            raise self.error
        self.rows.append((step, row))


@pytest.fixture
def wandb(monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, 'wandb', module)
    return module


def test_wandb_gets_each_row_once_at_its_iteration_also_from_a_resume(works, tiny, wandb):
    works('train.py', *tiny, '--wandb_log')
    works('train.py', *tiny, '--wandb_log', '--init_from=resume', '--max_iters=8')
    assert [options['id'] for options in wandb.options] == [None, 'abc']
    assert wandb.metrics == {'iter': None, '*': 'iter'}
    for name, expected in [('val/loss', [0, 3, 6, 8]), ('iter/loss', [0, 1, 2, 3, 4, 5, 7])]:
        assert [step for step, row in wandb.rows if name in row] == expected
    assert all(step == row['iter'] for step, row in wandb.rows)
    # steps that wandb already has cannot be logged again: another run
    works('train.py', *tiny, '--wandb_log', '--init_from=resume', '--resume_step=6', '--max_iters=7')
    assert wandb.options[-1]['id'] is None


def test_a_failing_start_of_wandb_leaves_the_old_run(script, works, tiny, out, wandb):
    works('train.py', *tiny)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert script('train.py', *tiny, '--wandb_log', '--wandb_project=gone', '--overwrite').status == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_wandb_starts_after_the_folder_is_locked(script, tiny, wandb, monkeypatch):
    def lock_folder(*args, **options):
        sys.exit(2)

    monkeypatch.setattr(files, 'lock_folder', lock_folder)
    assert script('train.py', *tiny, '--wandb_log').status == 2
    assert wandb.options == []


def test_a_failure_of_wandb_while_training_is_one_note(works, tiny, wandb):
    wandb.error = ConnectionError('no route')
    assert works('train.py', *tiny, '--wandb_log').out.count('no route') == 1


@pytest.mark.parametrize('module', [None, ModuleType('wandb')])  # not installed; a folder that is called wandb
def test_without_the_package_wandb_a_line_says_how_to_install_it(script, tiny, monkeypatch, module):
    monkeypatch.setitem(sys.modules, 'wandb', module)
    result = script('train.py', *tiny, '--wandb_log')
    assert result.status == 2 and 'pip install wandb' in result.err and result.err.count('\n') == 1


def test_an_error_in_edited_code_keeps_its_traceback(script, tiny, monkeypatch):
    def forward(*args, **options):
        raise RuntimeError('out of memory')

    monkeypatch.setattr(model.GPT, 'forward', forward)
    with pytest.raises(RuntimeError, match='^out of memory$'):
        script('train.py', *tiny)


@pytest.mark.parametrize('module, function, flags', [
    (benchmarks, 'is_correct', ['--tasks=TASK', '--tasks_interval=3']),
    (sampling, 'generate_text', ['--sample_interval=3']),
])
def test_a_benchmark_or_sample_that_fails_is_a_note_and_the_weights_are_saved_before(
        works, tiny, out, tmp_path, monkeypatch, module, function, flags):
    task = tmp_path / 'task.jsonl'
    task.write_text('{"context": "2 times 3 is ", "continuation": "6"}')
    newest = []

    def fail(*args, **options):
        newest.append(max(out.glob('ckpt_0*.pt')).name)
        raise FloatingPointError('logits are not finite')

    monkeypatch.setattr(module, function, fail)
    flags = [flag.replace('TASK', str(task)) for flag in flags]
    result = works('train.py', *tiny, '--eval_interval=0', '--save_interval=3', *flags)
    assert newest == ['ckpt_00000003.pt', 'ckpt_00000006.pt']
    assert result.out.count('FloatingPointError: logits are not finite') == 2 and 'iter 5:' in result.out


def test_clocks_that_stand_still_end_no_run(works, tiny, monkeypatch):
    monkeypatch.setattr(time, 'time', lambda: 0.0)  # as one that is set back
    monkeypatch.setattr(time, 'perf_counter', lambda: 0.0)
    assert 'iter 5:' in works('train.py', *tiny).out


def test_max_minutes_end_a_run_whose_clock_is_set_back(works, tiny, out, monkeypatch):
    monkeypatch.setattr(time, 'time', lambda: 0.0)
    works('train.py', *tiny, '--max_iters=2000', '--eval_interval=0', '--log_interval=0',
          '--max_minutes=0.01')
    assert 0 < load_checkpoint(out)['iter_num'] < 2000


def test_a_run_whose_compiler_fails_goes_on_without_it(works, tiny, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError('no working triton')

    compile = torch.nn.Module.compile
    monkeypatch.setattr(processes, 'choose_compile', lambda compile, device: True)
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda block: compile(block, backend=broken))
    try:
        result = works('train.py', *tiny, '--compile=auto', '--sample_interval=6', '--sample_tokens=5')
    finally:
        torch.compiler.set_stance('default')
        torch.compiler.reset()
    assert 'no working triton' in result.out and 'samples after 6' in result.out
    assert result.globals['use_compile'] is False


def test_eval_only_compiles_nothing(works, tiny, monkeypatch):
    monkeypatch.setattr(processes, 'choose_compile', lambda compile, device: True)
    monkeypatch.setattr(torch.nn.Module, 'compile', None)
    works('train.py', *tiny, '--eval_only')


CONFIGS = sorted(path.name for path in (REPO / 'config').glob('*.py'))


@pytest.mark.parametrize('name', CONFIGS)
def test_a_short_trial_of_any_config_runs(works, tiny, name):
    sizes = [flag for flag in tiny if 'warmup' not in flag and 'learning_rate' not in flag]
    sizes += ['--max_iters=3', '--init_from=scratch', '--tasks=', '--sample_interval=0', '--eval_interval=0']
    works('train.py', Path('config') / name, *sizes, '--total_batch_size=64', '--wandb_log=False')
