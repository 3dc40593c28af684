"""train.py does what it says: the same numbers whatever is logged, evaluated, sampled or saved."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    REPO, TEXT, TINY, assert_equal, char_dataset, load_checkpoint, losses_of, read_log, run_script)

import common
import dataset
from model import GPT, GPTConfig


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


def test_the_console_has_the_lines_that_scripts_look_for(works, tiny, out):
    result = works('train.py', *tiny)
    assert re.search(r'^step 3: train loss \d\.\d{4}, val loss \d\.\d{4}$', result.out, re.M)
    assert re.search(r'^iter 2: loss \d\.\d{4}, time \d+\.\d\dms, .* tok/s, .*epoch', result.out, re.M)
    rows = read_log(out)
    assert [row['iter'] for row in rows if row['loss']] == list('012345')
    assert [row['iter'] for row in rows if row['val_loss']] == ['0', '3', '6']
    assert [int(row['tokens']) for row in rows if row['loss']] == [64 * i for i in range(6)]


@pytest.mark.parametrize('extra', [
    ['--eval_interval=2', '--eval_iters=3'],
    ['--eval_interval=0', '--save_interval=0', '--log_interval=2'],
    ['--save_interval=1', '--keep_checkpoints=1', '--always_save_checkpoint=False'],
    ['--sample_interval=1', '--sample_tokens=20'],
])
def test_evaluating_sampling_saving_and_logging_change_nothing_that_is_learned(works, tiny, tmp_path, extra):
    works('train.py', *tiny, '--dropout=0.1', f"--out_dir={tmp_path / 'plain'}")
    works('train.py', *tiny, '--dropout=0.1', *extra)
    plain = load_checkpoint(tmp_path / 'plain', 'ckpt_00000006.pt')
    other = load_checkpoint(tmp_path / 'out', 'ckpt_00000006.pt')
    assert_equal(plain['model'], other['model'])
    assert_equal(plain['optimizer']['state'], other['optimizer']['state'])


def test_a_large_batch_and_many_small_ones_give_the_same_gradients(works, tiny, out):
    works('train.py', *tiny, '--grad_clip=0', '--batch_size=8')
    one = losses_of(out)
    weights = load_checkpoint(out)['model']
    result = works('train.py', *tiny, '--grad_clip=0', '--batch_size=2', '--total_batch_size=128',
                   '--overwrite')
    assert result.globals['grad_accum_steps'] == 4
    for (_, loss, _, norm), (_, loss_4, _, norm_4) in zip(one, losses_of(out)):
        assert float(loss_4) == pytest.approx(float(loss), abs=1e-5)
        assert float(norm_4) == pytest.approx(float(norm), rel=1e-4)
    torch.testing.assert_close(load_checkpoint(out)['model'], weights, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize('cut, flags', [
    (1, ['--dropout=0.1', '--gradient_accumulation_steps=2']),
    (4, ['--arch=modern', '--matrix_optimizer=muon', '--n_kv_head=1', '--dtype=bfloat16']),
    (3, ['--arch=llama', '--n_kv_head=1', '--lr_schedule=wsd']),
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


def test_a_run_learns(works, tiny):
    result = works('train.py', *tiny, '--max_iters=150', '--eval_interval=150', '--log_interval=50')
    step_0, step_150 = re.findall(r'val loss (\d\.\d+)', result.out)[:2]
    assert float(step_0) > 2.5 and float(step_150) < 1.7


def test_overfit_batch_sees_one_batch(works, tiny):
    result = works('train.py', *tiny, '--overfit_batch', '--max_iters=200', '--eval_interval=0',
                   '--log_interval=199')
    assert float(re.search(r'iter 199: loss (\d\.\d+)', result.out)[1]) < 0.2


def test_the_learning_rate_follows_the_schedule(works, tiny):
    def lrs(*args):
        flags = [*tiny, '--eval_only', '--learning_rate=1', '--warmup_iters=4', '--max_iters=20', *args]
        get_lr = works('train.py', *flags).globals['get_lr']
        return [get_lr(it) for it in range(24)]

    cosine = lrs()
    linear = lrs('--lr_schedule=linear', '--min_lr=0')
    constant = lrs('--lr_schedule=constant')
    wsd = lrs('--lr_schedule=wsd', '--decay_fraction=0.5')
    for schedule in (cosine, linear, constant, wsd):
        assert schedule[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    assert cosine[12] == pytest.approx(0.55) and cosine[20:] == [0.1] * 4
    assert linear[12] == pytest.approx(0.5) and linear[20:] == [0] * 4
    assert set(constant[4:]) == {1}
    assert wsd[10] == 1 and wsd[15] == pytest.approx(0.5) and wsd[20] == 0
    assert set(lrs('--decay_lr=False')) == {1}  # as in nanoGPT: no warmup either


@pytest.mark.parametrize('flags, iterations', [
    (['--max_tokens=300'], 5),
    (['--max_epochs=0.0015'], 2),
    (['--max_tokens=300', '--max_epochs=0.0015'], 2),
    (['--max_tokens=1e9', '--max_iters=3'], 3),
])
def test_the_earliest_budget_ends_the_run(works, tiny, flags, iterations):
    result = works('train.py', *tiny, '--eval_interval=0', *flags)
    assert result.globals['max_iters'] == iterations
    assert len(re.findall('^iter ', result.out, re.M)) == iterations


def test_a_dataset_without_val_trains_and_keeps_the_newest(works, tiny, tmp_path, out):
    folder = char_dataset(tmp_path / 'data', 'noval')
    (folder / 'noval' / 'val.bin').unlink()
    result = works('train.py', *tiny, '--dataset=noval', f'--data_dir={folder}',
                   '--always_save_checkpoint=False')
    assert 'val loss' not in result.out
    assert load_checkpoint(out)['iter_num'] == 6


def test_attention_can_stay_inside_documents(script, works, tiny, tmp_path):
    flags = [*tiny, '--document_mask']
    assert script('train.py', *flags).status == 2  # no token separates the documents
    folder = char_dataset(tmp_path / 'data')
    chars = sorted(set(TEXT))
    meta = {'vocab_size': len(chars), 'dtype': 'uint16', 'end_of_text': chars.index('\n'),
            'tokenizer': {'kind': 'char', 'chars': ''.join(chars)}, 'splits': {}}
    (folder / 'toy' / 'meta.json').write_text(json.dumps(meta))
    across = works('train.py', *tiny, f'--data_dir={folder}')
    inside = works('train.py', *flags, f'--data_dir={folder}', '--overwrite')
    assert across.out.count('step 6') == inside.out.count('step 6') == 1
    assert re.findall('step 6.*', across.out) != re.findall('step 6.*', inside.out)


def test_a_micro_batch_whose_targets_are_all_masked_trains_on(works, tiny, monkeypatch):
    batch = dataset.Tokens.batch

    def masked_batch(self, seed, numbers, block_size):
        x, y, doc_ids = batch(self, seed, numbers, block_size)
        return x, np.where(np.asarray(numbers)[0] % 8 == 4, -1, y), doc_ids  # every second micro-batch

    monkeypatch.setattr(dataset.Tokens, 'batch', masked_batch)
    result = works('train.py', *tiny, '--gradient_accumulation_steps=2')
    assert 'iter 5: loss nan' not in result.out


# -----------------------------------------------------------------------------
# what is kept


def test_checkpoints_are_numbered_pruned_and_linked(works, tiny, out):
    works('train.py', *tiny, '--max_iters=8', '--save_interval=2', '--eval_interval=4')
    assert names_in(out) == ['ckpt.pt', 'ckpt_00000006.pt', 'ckpt_00000008.pt', 'ckpt_best.pt']
    assert load_checkpoint(out)['iter_num'] == 8
    assert torch.serialization.get_unsafe_globals_in_checkpoint(str(out / 'ckpt.pt')) == []
    best = load_checkpoint(out, 'ckpt_best.pt')
    losses = {int(row['iter']): float(row['val_loss']) for row in read_log(out) if row['val_loss']}
    assert best['best_val_loss'] == pytest.approx(losses[best['iter_num']])
    assert best['best_val_loss'] == pytest.approx(min(losses[4], losses[8]))
    run = json.loads((out / 'run.json').read_text())
    assert run['outcome'] == 'done' and run['iterations'] == 8 and run['best_iter'] == best['iter_num']
    assert (out / 'report.md').exists()


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


def test_samples_are_printed_whole_and_kept_in_the_report(works, tiny, out):
    result = works('train.py', *tiny, '--sample_interval=6', '--sample_tokens=50')
    text = result.out.partition('samples after 6 iterations')[2]
    assert '---' in text and len(text) > 50
    assert '---' in (out / 'report.md').read_text()


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
    flags = [*tiny, f'--init_from={out}', f"--out_dir={tmp_path / 'tuned'}", '--auto_resume']
    first = works('train.py', *flags, '--max_iters=2')
    second = works('train.py', *flags, '--max_iters=4')
    assert 'iter 0:' in first.out and 'iter 0:' not in second.out and 'iter 2:' in second.out
    assert load_checkpoint(tmp_path / 'tuned')['iter_num'] == 4
    fresh = works('train.py', *tiny, f"--out_dir={tmp_path / 'fresh'}", '--auto_resume', '--max_iters=1')
    assert 'iter 0:' in fresh.out


def test_on_a_resume_what_was_given_holds_and_an_edited_default_counts(works, tiny, data_dir, tmp_path, out):
    works('train.py', *tiny, '--weight_decay=0.3')
    assert load_checkpoint(out)['optimizer']['param_groups'][0]['weight_decay'] == 0.3
    edited = tmp_path / 'train.py'
    edited.write_text((REPO / 'train.py').read_text().replace('grad_clip = 1.0', 'grad_clip = 0.5')
                      .replace('weight_decay = 1e-1', 'weight_decay = 0.7'))
    place = [f'--out_dir={out}', '--init_from=resume', '--device=cpu', f'--data_dir={data_dir}']
    result = works(edited, *place, '--max_iters=8', '--beta2=0.9', '--n_layer=5')
    assert result.globals['grad_clip'] == 0.5  # this file's
    assert result.globals['weight_decay'] == 0.3  # given then
    assert result.globals['beta2'] == 0.9  # given now
    assert result.globals['n_layer'] == 2  # the architecture is the checkpoint's
    for name in ('grad_clip', 'max_iters', 'beta2'):
        assert re.search(rf'^  {name}: .* -> ', result.out, re.M)
    again = works(edited, *place, '--max_iters=9')
    assert again.globals['beta2'] == 0.9  # given in between
    groups = load_checkpoint(out)['optimizer']['param_groups']
    assert groups[0]['weight_decay'] == 0.3 and groups[1]['weight_decay'] == 0
    assert tuple(groups[0]['betas']) == (0.9, 0.9)


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


def test_weights_start_a_run_with_a_smaller_context(works, tiny, tmp_path, out):
    works('train.py', *tiny)
    works('train.py', *tiny, f'--init_from={out}/ckpt.pt', f"--out_dir={tmp_path / 'new'}", '--block_size=8')
    assert load_checkpoint(tmp_path / 'new')['model_args']['block_size'] == 8


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(works, script, tiny, out):
    works('train.py', *tiny, '--save_interval=3')
    (out / 'ckpt_00000006.pt').write_bytes((out / 'ckpt_00000006.pt').read_bytes()[:5000])
    result = works('train.py', *tiny, '--init_from=resume', '--save_interval=3')
    assert 'ckpt_00000006.pt' in result.out and 'iter 3:' in result.out
    for path in out.glob('ckpt*.pt'):
        path.write_bytes(b'nothing')
    result = script('train.py', *tiny, '--init_from=resume')
    assert result.status == 2 and result.err.startswith('error: ')


def nanogpt_checkpoint(path, vocab_size):
    """A checkpoint as nanoGPT writes it: six keys, the compiled model's names, a loss that is a tensor."""
    args = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=False, vocab_size=vocab_size, dropout=0.0)
    torch.manual_seed(3)
    model = GPT(GPTConfig(**args))
    optimizer = model.configure_optimizers(0.3, 1e-3, (0.9, 0.97), 'cpu')
    idx = torch.randint(vocab_size, (2, 16))
    model(idx, idx)[1].backward()
    optimizer.step()
    config = dict(dataset='toy', gradient_accumulation_steps=1, batch_size=4, block_size=16, max_iters=3,
                  warmup_iters=1, backend='nccl', device='cuda', dtype='float16', compile=True,
                  weight_decay=0.3, beta2=0.97, learning_rate=1e-3, eval_interval=10, eval_iters=2,
                  init_from='scratch')
    weights = {'_orig_mod.' + name: p for name, p in model.state_dict().items()}
    torch.save({'model': weights, 'optimizer': optimizer.state_dict(), 'model_args': args, 'iter_num': 1,
                'best_val_loss': torch.tensor(3.2), 'config': config}, path)


def test_nanogpts_run_goes_on_as_it_is_and_its_sample_py_reads_ours(works, script, data_dir, out):
    out.mkdir()
    nanogpt_checkpoint(out / 'ckpt.pt', len(set(TEXT)))
    place = [f'--out_dir={out}', f'--data_dir={data_dir}', '--device=cpu', '--init_from=resume']
    result = works('train.py', *place)
    assert re.findall(r'^iter (\d)', result.out, re.M) == ['1', '2']
    assert result.globals['weight_decay'] == 0.3 and result.globals['dtype'] != 'float16'
    state = load_checkpoint(out)
    assert state['optimizer']['state'][0]['step'].item() == 3  # the old moments went on
    # what nanoGPT's sample.py looks for
    assert set(state['model_args']) == {'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size',
                                        'dropout'}
    assert {'model', 'config'} <= set(state) and state['config']['dataset'] == 'toy'


# -----------------------------------------------------------------------------
# when something is wrong


@pytest.mark.parametrize('flags', [
    ['--dataset=missing'], ['--init_from=resume'], ['--init_from=nowhere/ckpt.pt'], ['--batch_size=0'],
    ['--n_head=3'], ['--arch=local'], ['--lr_schedule=square'], ['--matrix_optimizer=muon'], ['--device=tpu'],
    ['--block_size=1000000'], ['--total_batch_size=100'], ['--tasks=nothing'], ['--dtype=int8'],
])
def test_what_a_person_gets_wrong_is_one_line_and_nothing_is_written(script, tiny, out, flags):
    result = script('train.py', *tiny, *flags)
    assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1, result.err
    assert not out.exists()


def test_a_run_that_diverges_ends_with_status_3_and_writes_nothing(script, works, tiny, out):
    works('train.py', *tiny, '--max_iters=2')
    before = names_in(out)
    for flags in ([], ['--log_interval=0'], ['--log_interval=0', '--eval_interval=0', '--save_interval=5']):
        result = script('train.py', *tiny, '--init_from=resume', '--max_iters=30', '--learning_rate=1e30',
                        *flags)
        assert result.status == 3, result.out
        assert names_in(out) == before
    fresh = script('train.py', *tiny, '--overwrite', '--learning_rate=1e30', '--max_iters=30')
    assert fresh.status == 3
    for name in names_in(out):
        for p in load_checkpoint(out, name)['model'].values():
            assert torch.isfinite(p).all()


def test_under_float16_the_scaler_is_saved_and_skipped_updates_do_not_end_the_run(works, tiny, out,
                                                                                  monkeypatch):
    # train.py takes it on GPUs only
    monkeypatch.setattr(common, 'choose_dtype', lambda dtype, device: 'float16')
    works('train.py', *tiny, '--max_iters=4')
    state = load_checkpoint(out)
    assert state['scaler']['_growth_tracker'] == 4
    result = works('train.py', *tiny, '--init_from=resume', '--max_iters=6')
    assert result.globals['scaler'].state_dict()['_growth_tracker'] == 6
    # a scale that makes the gradient infinite: the update is skipped, the scale halved
    state['scaler']['scale'] = 1e30
    torch.save(state, out / 'ckpt_00000006.pt')
    result = works('train.py', *tiny, '--init_from=resume', '--max_iters=8')
    assert result.globals['scaler'].get_scale() < 1e30


def test_wandb_gets_the_rows_under_one_id_and_a_failing_init_leaves_the_old_run(script, works, tiny, out,
                                                                                monkeypatch):
    rows, ids = [], []

    def init(**options):
        ids.append(options['id'])
        return SimpleNamespace(id='abc')

    monkeypatch.setitem(sys.modules, 'wandb', SimpleNamespace(init=init, log=rows.append))
    works('train.py', *tiny, '--wandb_log=True')
    assert {'iter', 'train/loss', 'val/loss', 'lr'} <= {name for row in rows for name in row}
    works('train.py', *tiny, '--wandb_log=True', '--init_from=resume', '--max_iters=8')
    assert ids == [None, 'abc']

    def failing_init(**options):
        raise ValueError('no such project')

    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setitem(sys.modules, 'wandb', SimpleNamespace(init=failing_init))
    result = script('train.py', *tiny, '--wandb_log=True', '--overwrite')
    assert result.status == 2 and result.err.startswith('error: ')
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_an_error_in_edited_code_keeps_its_traceback(tiny, tmp_path):
    for name in os.listdir(REPO):
        if name.endswith('.py'):
            (tmp_path / name).write_text((REPO / name).read_text())
    text = (tmp_path / 'model.py').read_text()
    first_line = '        B, T = idx.shape\n'
    assert first_line in text
    broken = first_line + "        raise RuntimeError('out of memory')\n"
    (tmp_path / 'model.py').write_text(text.replace(first_line, broken))
    result = run_script(tmp_path / 'train.py', *tiny)
    assert result.returncode == 1
    assert 'Traceback' in result.stderr and 'model.py' in result.stderr


CONFIGS = sorted(path.name for path in (REPO / 'config').glob('*.py'))


@pytest.mark.parametrize('name', CONFIGS)
def test_a_short_trial_of_any_config_runs(works, tiny, name):
    sizes = [flag for flag in tiny if 'warmup' not in flag and 'learning_rate' not in flag]
    sizes += ['--max_iters=3', '--init_from=scratch', '--tasks=', '--sample_interval=0', '--eval_interval=0']
    works('train.py', Path('config') / name, *sizes, '--total_batch_size=64', '--wandb_log=False')
