"""The loop does what it says: the same numbers whatever is logged, evaluated, split or interrupted."""

import pickle
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TEXT, is_refused, make_dataset, nanogpt_meta, rows, same, saved

import dataset
from model import GPT, GPTConfig
from optim import create_optimizer
from support import checkpoint, devices, files, load, resume, signals
from support.parallel import Distributed


def weights(folder, name='ckpt.pt'):
    return saved(folder, name)['model']


def test_the_console_and_the_log_say_what_scripts_look_for(works, tiny, tmp_path):
    result = works('train.py', *tiny, '--peak_flops=1e12')
    assert re.search(r'^step 3: train loss \d\.\d{4}, val loss \d\.\d{4}$', result.out, re.M)
    assert re.search(r'^iter 2: loss \d\.\d{4}, time \d+\.\d\dms, .*mfu .*lr .*grad norm .*tok/s, epoch', result.out, re.M)
    assert '64 tokens per iteration = 4 sequences x 16 tokens x 1 micro-batches x 1 process' in result.out and 'ln(' in result.out
    log = rows(tmp_path / 'out')
    assert [r['iter'] for r in log] == list('0123456') and [r['iter'] for r in log if r['val_loss']] == ['0', '3', '6']
    assert [int(r['tokens']) for r in log[:-1] if r['loss']] == [64 * i for i in range(6)]


def test_neither_evaluating_nor_logging_changes_the_training(works, tiny, out):
    want = works('train.py', *tiny, '--dropout=0.1').losses()
    reference = weights(out)
    for extra in (['--eval_interval=2', '--eval_iters=3'], ['--eval_interval=0', '--save_interval=0'],
                  ['--log_interval=2', '--save_interval=2', '--keep_checkpoints=1'], ['--always_save_checkpoint=False']):
        got = works('train.py', *tiny, '--dropout=0.1', '--overwrite', *extra).losses()
        assert all(want[i] == loss for i, loss in got.items()) and len(got) >= 3
        assert same(weights(out, sorted(p.name for p in out.glob('ckpt_0*'))[-1]), reference), extra


def test_a_large_batch_and_many_small_ones_give_the_same_gradients(works, tiny, out):
    norms, params = [], []
    for args in (['--batch_size=8', '--total_batch_size=1', '--gradient_accumulation_steps=1'], ['--batch_size=2', '--gradient_accumulation_steps=99', '--total_batch_size=128']):
        run = works('train.py', *tiny, '--overwrite', '--grad_clip=0', '--max_iters=4', *args)
        norms.append([float(r['grad_norm']) for r in rows(out)[:-1]])
        params.append(weights(out))
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert run.globals['gradient_accumulation_steps'] == 4  # as it follows, not the 99
    torch.testing.assert_close(params[1], params[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize('cut, arch, optimizer, dtype', [
    (1, 'gpt2', 'adamw', 'float32'), (4, 'local', 'muon', 'bfloat16')])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(works, tiny, tmp_path, cut, arch, optimizer, dtype):
    through, parts = tmp_path / 'through', tmp_path / 'parts'
    flags = [*tiny, '--dropout=0.1', '--max_iters=7', f'--arch={arch}', '--n_kv_head=1', f'--matrix_optimizer={optimizer}', f'--dtype={dtype}']
    works('train.py', *flags, f'--out_dir={through}')
    works('train.py', *flags, f'--out_dir={parts}', f'--max_iters={cut}', '--lr_decay_iters=7')
    result, _ = [works('train.py', '--init_from=resume', f'--out_dir={parts}', '--max_iters=7', '--device=cpu', f'--dtype={dtype}', f'--data_dir={tmp_path}/data') for _ in 'ab']
    assert f'after {cut} iterations' in result.out and f'max_iters: {cut} -> 7' in result.out
    a, b = (saved(p, 'ckpt_00000007.pt') for p in (through, parts))
    assert same(a['model'], b['model']) and same(a['optimizer']['state'], b['optimizer']['state'])
    apart_from_times = lambda folder: [(r['iter'], r['loss'], r['grad_norm'], r['lr'], r['tokens']) for r in rows(folder) if r['loss']]
    assert apart_from_times(through) == apart_from_times(parts)
    told = [r['iter'] for r in rows(parts) if r['val_loss']]
    assert len(set(told)) == len(told) and str(cut) in told, 'once, also at an old end, or of a run that is done'


def test_checkpoints_are_numbered_and_linked(works, tiny, out):
    works('train.py', *tiny, '--max_iters=8', '--save_interval=3', '--eval_interval=4')
    names = sorted(p.name for p in out.glob('ckpt*'))
    assert names == 'ckpt.pt ckpt_00000006.pt ckpt_00000008.pt ckpt_best.pt'.split(), 'the two newest'
    assert saved(out)['iter_num'] == 8
    assert torch.serialization.get_unsafe_globals_in_checkpoint(f'{out}/ckpt.pt') == []
    best = saved(out, 'ckpt_best.pt')
    vals = {int(r['iter']): float(r['val_loss']) for r in rows(out) if r['val_loss'] and r['iter'] != '0'}
    assert vals[best['iter_num']] == min(vals.values()) == pytest.approx(best['best_val_loss'])


def test_with_always_save_off_the_named_checkpoint_is_the_best(works, tiny, out):
    # a learning rate that soon does harm: the last is not the best
    works('train.py', *tiny, '--max_iters=40', '--eval_interval=4', '--learning_rate=0.3', '--warmup_iters=30', '--lr_schedule=constant', '--always_save_checkpoint=False')
    state, log = saved(out), rows(out)
    vals = {int(r['iter']): float(r['val_loss']) for r in log if r['val_loss'] and r['iter'] != '0'}
    assert state['iter_num'] == min(vals, key=vals.get) < 40 and state['best_val_loss'] == pytest.approx(min(vals.values()))
    assert load.read(checkpoint.newest(str(out)))['iter_num'] == 40, 'resume takes the newest one'
    works('train.py', *tiny, '--init_from=resume', '--max_iters=42', '--batch_size=2',
          '--gradient_accumulation_steps=2', '--eval_iters=4')
    assert saved(out)['best_val_loss'] == state['best_val_loss'], 'the same windows'
    done = works('train.py', *tiny, '--init_from=resume', '--max_iters=44', '--eval_iters=1')
    assert saved(out)['iter_num'] >= 40 and 'begins anew' in done.out, 'losses over other windows do not compare'


def test_eval_only_writes_nothing_and_never_trains(works, tiny, tmp_path, out):
    works('train.py', *tiny)
    contents = lambda: {p.name: p.read_bytes() for p in out.iterdir()}
    before = contents()
    result = works('train.py', *tiny, '--init_from=resume', '--eval_only', '--max_iters=99')
    assert not result.losses() and 'step 6: train loss' in result.out
    assert contents() == before
    works('train.py', *tiny, '--eval_only', f"--out_dir={tmp_path / 'new'}")
    assert not (tmp_path / 'new').exists()


def test_a_resume_needs_no_flags_and_flags_override_it(works, tiny, tmp_path, out):
    works('train.py', *tiny, '--beta2=0.9', '--dtype=bfloat16')
    place = [f"--out_dir={out}", f"--data_dir={tmp_path / 'data'}", '--init_from=resume', '--device=cpu']
    result = works('train.py', *place, '--max_iters=8', '--weight_decay=0.5', '--n_layer=5', '--block_size=8')
    assert 'weight_decay: 0.1 -> 0.5' in result.out and 'the checkpoint has 2' in result.out
    state = saved(out)
    groups = state['optimizer']['param_groups']
    assert groups[0]['weight_decay'] == 0.5 and groups[1]['weight_decay'] == 0 and groups[0]['betas'] == (0.9, 0.9)
    assert result.globals['dtype'] == 'bfloat16', 'the run has its own, on the same kind of device'
    assert state['config']['n_layer'] == 2 and state['config']['block_size'] == 16 and state['config']['batch_size'] == 4
    works('train.py', *place, '--max_iters=5', '--weight_decay=0.9')  # it is done: nothing is trained
    assert '"weight_decay": 0.5' in (out / 'run.json').read_text()


def test_weights_of_a_checkpoint_start_a_new_run(works, tiny, tmp_path, out, monkeypatch):
    works('train.py', *tiny)
    old = f'{out}/ckpt.pt'
    result = works('train.py', *tiny, f'--init_from={old}', f"--out_dir={tmp_path / 'new'}", '--block_size=8', '--eval_interval=1', '--max_iters=1', '--warmup_iters=0', '--learning_rate=1')
    assert 'iter 0:' in result.out
    new = saved(tmp_path / 'new', 'ckpt_best.pt')
    assert new['model_args']['block_size'] == 8 and new['best_val_loss'] == new['evaluation']['metrics']['val_loss']
    for start in ('auto:', ''):  # one line that begins and, started again, goes on
        for n in (1, 2):
            result = works('train.py', *tiny, f'--init_from={start}{old}', f"--out_dir={tmp_path / f'again{start}'}", f'--max_iters={n}', '--warmup_iters=0')
            assert list(result.losses()) == [n - 1]
        monkeypatch.setenv('TORCHELASTIC_MAX_RESTARTS', '3')
    monkeypatch.undo()
    result = works('train.py', *tiny, f"--init_from={out}", f"--out_dir={tmp_path / 'same'}", '--max_iters=0')
    assert f"val loss {float(rows(out)[-1]['val_loss']):.4f}" in result.out


def test_an_arch_composes_with_a_run_and_stays_with_its_checkpoint(works, tiny, tmp_path, out):
    result = works('train.py', 'config/train_gpt2.py', 'config/arch_llama.py', *tiny, '--max_iters=3', '--n_kv_head=1')
    assert 'model     llama, 2 layers' in result.out, result.err
    args = saved(out)['model_args']
    assert args['arch'] == 'llama' and args['n_kv_head'] == 1 and args['positions'] == 'rope'
    # rotary positions are no weights: a new run may have more of them, and squeeze them
    flags = [f"--init_from={out}", f"--out_dir={tmp_path / 'longer'}", '--block_size=32', '--rope_scaling=llama3:2:1:4:16']
    works('train.py', *tiny, *flags)
    args = saved(tmp_path / 'longer')['model_args']
    assert args['block_size'] == 32 and args['rope_scaling'] == 'llama3:2:1:4:16'


@pytest.mark.parametrize('budget, iterations', [
    # of 64,280 targets, 640.04; in whole windows of 16 it would be 639.96 of 64,272
    ('300 tokens', 5), ('0.009957 epochs', 11), ('0.001 tokens_per_param', 1)])
def test_budgets_in_tokens_epochs_and_tokens_per_parameter(works, tiny, budget, iterations):
    result = works('train.py', *tiny, f'--budget={budget}', '--warmup_iters=0', '--eval_interval=0')
    assert f'budget    {iterations} iterations' in result.out and len(result.losses()) == iterations


def test_a_dataset_without_val_trains_and_says_so(works, tiny, tmp_path):
    make_dataset(tmp_path / 'data', 'noval', val=False)
    result = works('train.py', *tiny, '--dataset=noval', '--always_save_checkpoint=False', '--save_interval=2')
    assert 'no val.bin' in result.out and 'val loss' not in result.out
    assert saved(tmp_path / 'out')['iter_num'] == 6, 'the newest, as there is no best'


def test_evaluation_is_the_loss_of_windows_spread_evenly(works, tiny, tmp_path):
    def evaluated(*flags, n=None):
        """(the loss found, the model's loss over n windows of 16, or all that there are)"""
        found = works('train.py', *tiny, '--eval_only', *flags).globals
        model, val = found['model'].eval(), found['data'].val
        ids, n_all = torch.tensor(val.windows([0], val.n)[0]), -(-(val.n - 1) // 16)
        begin = [16 * (i * n_all // (n or n_all)) for i in range(n or n_all)]
        parts = [ids[at:at + 17] for at in begin]  # the last one may be shorter
        with torch.no_grad():
            nats = [model(part[None, :-1], part[None, 1:])[1].item() * (len(part) - 1) for part in parts]
        return found['metrics']['val_loss'], sum(nats) / sum(len(part) - 1 for part in parts)
    make_dataset(tmp_path / 'data', 'small', TEXT[:6000] + TEXT[-3000:])
    for loss, want in (evaluated('--eval_iters=3', n=12),
                       evaluated('--eval_iters=0', '--dataset=small')):
        assert loss == pytest.approx(want, rel=1e-5)


def test_attention_can_stay_inside_documents(script, works, tiny, tmp_path):
    is_refused(script('train.py', *tiny, '--document_mask'), 'no token separates the documents', lines=2)
    path = tmp_path / 'data' / 'tiny' / 'meta.json'
    meta = files.read_json(path)
    separator = meta['tokenizer']['chars'].index('\n')  # a character may stand for it: lines are documents
    files.write_json(f'{path}', {**meta, 'end_of_text': separator})
    across = works('train.py', *tiny).globals['metrics']['val_loss']
    result = works('train.py', *tiny, '--document_mask', '--overwrite')
    assert abs(result.globals['metrics']['val_loss'] - across) > 1e-3
    assert 'begins anew' in works('train.py', *tiny, '--init_from=resume', '--document_mask=False').out
    # that each document is read as if it were alone is shown in test_chat.py
    x, _, documents = result.globals['data'].train.batch(1, range(8), 16)
    assert np.array_equal(np.diff(documents) != 0, x[:, 1:] == separator)


def test_a_best_found_right_after_a_resume_is_saved(works, tiny, out):
    # as after a Ctrl-C at an evaluation: saved, but not evaluated
    works('train.py', *tiny, '--max_iters=3', '--lr_decay_iters=6')
    path = out / 'ckpt_00000003.pt'
    state = torch.load(path, weights_only=True)
    for name in ('ckpt.pt', 'ckpt_best.pt'):
        (out / name).unlink()
    torch.save({**state, 'evaluation': {}, 'best_val_loss': 99.0}, path)
    works('train.py', *tiny, '--init_from=resume', '--max_iters=6', '--learning_rate=0.9', '--min_lr=0.9')
    assert saved(out, 'ckpt_best.pt')['iter_num'] == 3


def test_weights_alone_are_not_resumed_but_start_a_run(works, tiny, tmp_path):
    works('train.py', *tiny)
    state = torch.load(tmp_path / 'out' / 'ckpt.pt', weights_only=True)
    del state['optimizer'], state['model_args']['dropout'], state['model_args']['bias']  # and as old as nanoGPT's first ones
    (tmp_path / 'bare').mkdir()
    torch.save(state, tmp_path / 'bare' / 'ckpt.pt')
    works('train.py', *tiny, f"--out_dir={tmp_path / 'new'}", f"--init_from={tmp_path / 'bare'}")


def test_one_budget_replaces_another_on_resume(tiny, tmp_path, works):
    (tmp_path / 'long.py').write_text("budget = '128 tokens'\n")
    flags = [flag for flag in tiny if not flag.startswith('--max_iters')]
    short = works('train.py', *flags, '--max_iters=1', tmp_path / 'long.py', '--warmup_iters=0')
    assert 'budget    1 iterations' in short.out, 'a flag is given after the file'
    works('train.py', *flags, tmp_path / 'long.py', '--warmup_iters=0', '--total_batch_size=64', '--overwrite')
    place = [f"--out_dir={tmp_path / 'out'}", f"--data_dir={tmp_path / 'data'}", '--init_from=resume', '--device=cpu', '--dtype=float32']
    for flags, n in (([], 2), (['--max_iters=4'], 4), (['--max_iters=9', '--budget=384 tokens'], 6)):
        out = works('train.py', *place, *flags).out
        assert f'budget    {n} iterations' in out and ('max_iters: ' in out) == (n == 4)
    result = works('train.py', *place, '--max_iters=99', '--gradient_accumulation_steps=2', '--eval_only')
    assert '128 tokens per iteration' in result.out


def test_the_learning_rate_follows_the_schedule(works, tiny):
    def lrs(*args):
        get_lr = works('train.py', *tiny, '--eval_only', '--learning_rate=1', '--warmup_iters=4', '--max_iters=20', *args).globals['get_lr']
        return [get_lr(it) for it in range(24)]
    cosine, linear, constant = lrs(), lrs('--lr_schedule=linear', '--min_lr=0'), lrs('--lr_schedule=constant')
    assert cosine[:4] == linear[:4] == constant[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert cosine[4] == linear[4] == 1 and set(constant[4:]) == {1}
    assert cosine[12] == pytest.approx(0.55) and linear[12] == pytest.approx(0.5)
    assert cosine[20:] == [0.1] * 4 and linear[20:] == [0] * 4
    assert set(lrs('--decay_lr=False')) == {1}, "as in nanoGPT: no decay, and no warmup either"


def nanogpt_checkpoint(path, vocab_size):
    """A checkpoint as nanoGPT writes it: six keys, the compiled model's names, a loss that is a tensor."""
    args = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=False, vocab_size=vocab_size, dropout=0.0)
    torch.manual_seed(3)
    model = GPT(GPTConfig(**args))
    optimizer = create_optimizer(model, 1e-3, 0.3, (0.9, 0.97), 1e-4)
    idx = torch.randint(vocab_size, (2, 16))
    model(idx, idx)[1].backward()
    optimizer.step()
    state = optimizer.state_dict()
    for group in state['param_groups']:
        group['fused'] = None
    # the last two: of flags of its own resume, which keeps what its optimizer had
    config = dict(dataset='old', gradient_accumulation_steps=1, batch_size=4, block_size=16, max_iters=3,
                  warmup_iters=1, backend='nccl', device='cuda', dtype='float16', compile=True, weight_decay=9.0, beta2=0.5)
    torch.save({'model': {'_orig_mod.' + k: v for k, v in model.state_dict().items()}, 'optimizer': state, 'model_args': args, 'iter_num': 1,
                'best_val_loss': torch.tensor(3.2), 'config': config}, path)
    return model


def test_nanogpts_own_files_work_as_they_are(works, script, tmp_path, out, capsys):
    folder = make_dataset(tmp_path / 'data', 'old')
    meta = files.read_json(folder / 'meta.json')
    (folder / 'meta.json').unlink()
    chars = meta['tokenizer']['chars']
    (folder / 'meta.pkl').write_bytes(pickle.dumps(nanogpt_meta(chars)))
    out.mkdir()
    model = nanogpt_checkpoint(out / 'ckpt.pt', len(chars))
    theirs = (out / 'ckpt.pt').read_bytes()
    place = [f'--out_dir={out}', f"--data_dir={tmp_path / 'data'}", '--device=cpu']
    loaded, tokenizer = load.model_and_tokenizer(GPT, str(out), data_dir=f'{tmp_path}/data')
    assert same(loaded.state_dict(), model.state_dict()) and tokenizer.decode(tokenizer.encode_prompt('3 times')) == '3 times'
    is_refused(script('train.py', '--init_from=resume', *place, '--batch_size=1'), 'tokens per iteration changed')
    result = works('train.py', '--init_from=resume', *place)  # dtype float16 and compile of the old machine are not taken over
    assert list(result.losses()) == [1, 2], result.err
    assert [result.globals[name] for name in ('weight_decay', 'beta2', 'adam_eps')] == [0.3, 0.97, 1e-4]
    assert saved(out)['optimizer']['state'][0]['step'].item() == 3, 'the old moments went on'
    assert 'is kept as' in result.out and (out / 'ckpt_original_00000001.pt').read_bytes() == theirs
    resume.load_optimizer_state(result.globals['optimizer'], {'optimizer': torch.optim.SGD(model.parameters()).state_dict()}, print)
    assert 'another and is AdamW: it starts without a state' in capsys.readouterr().out, "a fork's"
    # and nanoGPT's sample.py finds what it looks for in ours
    raw = torch.load(out / 'ckpt.pt', weights_only=True)
    assert set(raw['model_args']) == set('n_layer n_head n_embd block_size bias vocab_size dropout'.split()) and raw['config']['dataset'] == 'old'


def test_float16_has_its_scaler_in_the_checkpoint(tiny, tmp_path, monkeypatch, works):
    monkeypatch.setattr(devices, 'choose_dtype', lambda dtype, device: ('float16', 'for the test'))  # on a CPU train.py refuses it
    works('train.py', *tiny, '--max_iters=4')
    state = saved(tmp_path / 'out')
    assert state['scaler']['_growth_tracker'] == 4 and state['scaler']['scale'] > 1
    result = works('train.py', *tiny, '--init_from=resume', '--max_iters=6')
    assert result.globals['scaler'].state_dict()['_growth_tracker'] == 6


def test_wandb_gets_nanogpts_keys_under_one_id_and_may_die(works, tiny, out, monkeypatch):
    logged, ids, totals = [], [], {}

    class Run:
        id, summary, define_metric = 'abc', totals, lambda self, *args, **options: None

        def log(self, row):
            logged.append(row)
            if len(logged) == 10:
                raise ConnectionResetError

    fake = SimpleNamespace(init=lambda **options: ids.append(options['id']) or Run())
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    result = works('train.py', *tiny, '--wandb_log=True')
    assert set('iter train/loss val/loss lr grad_norm bpb memory_gb'.split()) <= {key for row in logged for key in row}
    assert totals['outcome'] == 'done'
    result = works('train.py', *tiny, '--wandb_log=True', '--init_from=resume', '--max_iters=12')
    assert 'done: 12' in result.out and len(logged) == 10
    assert ids == [None, 'abc'] and result.err.count('warning: wandb is gone (') == result.err.count('\n') == 1


def test_the_clock_leaves_room_for_an_iteration(monkeypatch):
    now = [signals.started]
    monkeypatch.setattr(signals.time, 'monotonic', lambda: now[0])
    monkeypatch.setattr(signals.signal, 'signal', lambda *args: None)
    stop = signals.Stop(Distributed('cpu'), max_minutes=10)
    seen = []
    for seconds in (100, 160, 220, 280, 340, 400, 460, 520):  # iterations of a minute
        now[0] = signals.started + seconds
        seen.append(stop.poll())
    assert seen.index('stop') == 7 and stop.reason() == 'max_minutes' and not any(seen[:7])  # 520 + 2 * 60 is after 600
    monkeypatch.setenv('TORCHELASTIC_MAX_RESTARTS', '3')
    assert stop.exit_status() == 0
    monkeypatch.setattr(signals, 'parent', -1)
    stop = signals.Stop(SimpleNamespace(is_distributed=True, all_reduce_max=int))
    assert stop.poll() == 'stop' and stop.exit_status() == 254, 'torchrun was killed: others have to start again'


def test_a_micro_batch_whose_targets_are_all_masked_trains_on(works, tiny, monkeypatch):
    real = dataset.Tokens.batch

    def masked(self, seed, numbers, block_size):
        x, y = real(self, seed, numbers, block_size)
        return x, np.where(np.asarray(numbers)[0] % 8 == 4, -1, y)  # every second micro-batch of four
    monkeypatch.setattr(dataset.Tokens, 'batch', masked)
    for flags in ([], ['--arch=modern', '--n_layer=1']):
        result = works('train.py', *tiny, '--gradient_accumulation_steps=2', '--overwrite', *flags)
        assert 'finite' not in result.out + result.err and 0 < result.losses()[5] < 3, result.out
