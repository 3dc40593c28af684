"""What was promised still holds after the code was edited as people edit it: exact resumes, checkpoints that
can be read, equal processes, a loss that is the one you wrote."""

import re
import shutil

import pytest
import torch
from conftest import (
    TINY, assert_same_run, assert_same_weights, copy_code, forget_modules, load_checkpoint, losses_of,
    run_processes)


@pytest.fixture
def edited(works, data_dir, tmp_path, monkeypatch):
    """edited({'model.py': [(old, new)]}) copies the code with these changes, and returns a function that runs
    its train.py in this process: run('out', '--max_iters=7')."""
    def copy(changes):
        folder = tmp_path / 'code'
        if not folder.exists():
            folder.mkdir()
            copy_code(folder)
        for name, replacements in changes.items():
            text = (folder / name).read_text()
            for old, new in replacements:
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            (folder / name).write_text(text)
        forget_modules(monkeypatch)
        monkeypatch.syspath_prepend(folder)

        def run(out_dir, *flags, script='train.py'):
            out_dir = tmp_path / out_dir
            if script != 'train.py':
                return works(folder / script, out_dir, *flags)
            return works(folder / script, *TINY, '--dataset=toy', f'--data_dir={data_dir}',
                         f'--out_dir={out_dir}', *flags)

        run.folder = folder
        return run
    return copy


def assert_resumes_exactly(run, tmp_path, *flags):
    """Check that a run of 6 iterations, and one that was stopped after 3, have the same bits."""
    run('complete', *flags)
    run('stopped', *flags, '--max_iters=3', '--lr_decay_iters=6')
    run('stopped', *flags, '--max_iters=6', '--init_from=resume')
    assert_same_run(tmp_path / 'complete', tmp_path / 'stopped')


def sampled(run, out_dir='complete'):
    """Return what sample.py writes."""
    return run(out_dir, '--device=cpu', '--num_samples=1', '--max_new_tokens=9', script='sample.py').out


# -----------------------------------------------------------------------------
# the network


@pytest.mark.parametrize('mask', [
    "self.register_buffer('bias', torch.ones(T, T).tril()[None, None])",
    "self.register_buffer('mask', torch.full((T, T), -math.inf).triu(1))",
    'self.mask = torch.ones(T, T)',
])
def test_a_mask_of_any_kind_and_name_is_saved_resumed_and_sampled(edited, tmp_path, mask):
    run = edited({'model.py': [(
        '        self.resid_dropout = nn.Dropout(config.dropout)\n',
        '        self.resid_dropout = nn.Dropout(config.dropout)\n'
        f'        T = config.block_size\n        {mask}\n')]})
    assert_resumes_exactly(run, tmp_path)
    assert len(sampled(run)) > 9


@pytest.mark.parametrize('change', [
    'self.transformer.h[1].mlp = self.transformer.h[0].mlp',
    'self.transformer.h[1].mlp.c_fc.weight = self.transformer.h[0].mlp.c_fc.weight',
])
def test_what_the_network_shares_stays_shared(edited, tmp_path, change):
    run = edited({'model.py': [('        # not saved in checkpoints; on the CPU',
                                f'        {change}\n        # not saved in checkpoints; on the CPU')]})
    assert_resumes_exactly(run, tmp_path)
    weights = load_checkpoint(tmp_path / 'stopped')['model']
    assert torch.equal(weights['transformer.h.0.mlp.c_fc.weight'], weights['transformer.h.1.mlp.c_fc.weight'])
    assert sampled(run) == sampled(run, 'stopped')


HEAD = ('        # not saved in checkpoints; on the CPU',
        '        self.value_head = nn.Linear(config.n_embd, 1)\n'
        '        # not saved in checkpoints; on the CPU')


def test_weights_start_a_run_of_a_network_with_more_or_fewer_parts_but_do_not_resume_it(
        edited, script, tmp_path):
    run = edited({})
    run('base')
    run = edited({'model.py': [HEAD]})
    assert 'value_head' in run('more', f"--init_from={tmp_path / 'base'}", '--eval_only').out
    more = run('more', f"--init_from={tmp_path / 'base'}")
    base = run('x', f"--init_from={tmp_path / 'base'}", '--eval_only')
    assert re.search('^step 0: .*', base.out, re.M)[0] in more.out
    assert script(run.folder / 'train.py', f"--out_dir={tmp_path / 'base'}", '--init_from=resume').status == 2
    run = edited({'model.py': [HEAD[::-1]]})  # taken out again
    run('fewer', f"--init_from={tmp_path / 'more'}")
    assert script(run.folder / 'sample.py', tmp_path / 'more').status == 2


def test_a_term_of_the_loss_counts_also_where_memory_is_small(edited, tmp_path):
    run = edited({'model.py': [('        return logits, loss\n\n    def att',
                                '        return logits, loss + x.square().mean()\n\n    def att')]})
    run('a')
    run = edited({'flatgpt/processes.py': [('    bytes_per_logit = 4',
                                            '    memory = 2**10\n    bytes_per_logit = 4')]})
    assert run('b').globals['model'].loss_chunk_size > 0
    losses = [[float(row[1]) for row in losses_of(tmp_path / name)] for name in 'ab']
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and losses[0][0] > 3.5


# -----------------------------------------------------------------------------
# random numbers


READ = '    x, y, doc_ids = data.train.batch(seed, range(first, first + batch_size), block_size)\n'
DRAWS = {
    'dropout of attention': ('model.activation_checkpointing = activation_checkpointing\n',
                             'model.activation_checkpointing = activation_checkpointing\n'
                             'for block in model.transformer.h:\n    block.attn.dropout = 0.3\n'),
    'batches by torch': (READ,
                         '    starts = torch.randint(data.train.n - block_size, (batch_size,)).numpy()\n'
                         '    x, y, doc_ids = data.train.read_sequences(starts, block_size)\n'),
    'batches by numpy': (READ,
                         '    starts = np.random.randint(data.train.n - block_size, size=batch_size)\n'
                         '    x, y, doc_ids = data.train.read_sequences(starts, block_size)\n'),
    'noise': ('    scaler.step(optimizer)\n',
              '    for p in model.parameters():\n        p.grad.add_(torch.randn_like(p.grad), alpha=0.1)\n'
              '    scaler.step(optimizer)\n'),
}


@pytest.mark.parametrize('kind', DRAWS)
def test_whatever_is_drawn_is_drawn_again_after_a_resume(edited, tmp_path, kind):
    run = edited({'train.py': [DRAWS[kind]]})
    assert_resumes_exactly(run, tmp_path)
    assert len({row[1] for row in losses_of(tmp_path / 'complete')}) == 6


@pytest.mark.slow
def test_noise_on_the_gradients_is_the_same_in_all_processes(edited, data_dir, tmp_path):
    run = edited({'train.py': [DRAWS['noise'], ('# the end: run.json, report.md, the last line\n',
                  "torch.save([p.detach() for p in model.parameters()], f'{out_dir}/rank{ddp_rank}.pt')\n")]})
    result = run_processes(2, run.folder / 'train.py', *TINY, '--dataset=toy', f'--data_dir={data_dir}',
                           f"--out_dir={tmp_path / 'out'}", '--dropout=0.1', '--total_batch_size=128')
    assert result.returncode == 0, result.stderr
    weights = [torch.load(tmp_path / 'out' / f'rank{rank}.pt') for rank in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(*weights))


@pytest.mark.parametrize('numbers', ['2 if it < 3 else 4', '4 if it < 3 else 2'])
def test_a_batch_that_grows_or_shrinks_reads_each_sample_once(edited, tmp_path, numbers):
    seen = tmp_path / 'seen.txt'
    run = edited({'train.py': [
        ('    stopwatch.start()\n    loss_sum =',
         f'    stopwatch.start()\n    grad_accum_steps = {numbers}\n    loss_sum ='),
        ('    divisor = grad_accum_steps\n',
         f'    print(*range(first, first + batch_size), file=open({str(seen)!r}, "a"))\n'
         '    divisor = grad_accum_steps\n')]})
    flags = ['--gradient_accumulation_steps=2', '--save_interval=2', '--eval_interval=0']
    run('a', *flags)
    complete = [int(word) for word in seen.read_text().split()]
    assert complete == list(range(18 * 4))
    seen.unlink()
    run('b', *flags, '--max_iters=4', '--lr_decay_iters=6')
    run('b', *flags, '--init_from=resume', '--lr_decay_iters=6')
    assert [int(word) for word in seen.read_text().split()] == complete
    assert_same_weights(tmp_path / 'a', tmp_path / 'b')


# -----------------------------------------------------------------------------
# checkpoints


def stored(value):
    last = "        'wandb_run_id': wandb_run_id,\n"
    return last, f"{last}        'mine': {value},\n"


def test_numpy_values_in_a_checkpoint_become_tensors_and_numbers(edited, tmp_path):
    run = edited({'train.py': [stored("[np.random.get_state(), {'x': np.float32(0.5)}]")]})
    run('complete')
    (name, keys, *_), numbers = load_checkpoint(tmp_path / 'complete')['mine']
    assert name == 'MT19937' and keys.shape == (624,) and numbers == {'x': 0.5}
    run('complete', '--init_from=resume', '--max_iters=7')


@pytest.mark.parametrize('value', ["__import__('pathlib').Path('a')", 'lambda: 0', '[{1: data}]'])
def test_a_value_that_could_not_be_read_ends_the_start_and_is_named(
        edited, script, tmp_path, data_dir, value):
    run = edited({'train.py': [stored(value)]})
    result = script(run.folder / 'train.py', *TINY, '--dataset=toy', f'--data_dir={data_dir}',
                    f"--out_dir={tmp_path / 'out'}")
    assert result.status == 2 and 'mine' in result.err and result.err.count('\n') == 1
    assert not (tmp_path / 'out').exists()


# -----------------------------------------------------------------------------
# the optimizer


def optimizer_is(code):
    return 'if resuming:\n    # the moments only', f'{code}\nif resuming:\n    # the moments only'


ADAFACTOR = """
optimizer = torch.optim.Adafactor(model.named_parameters(), lr=learning_rate)
optimizer.param_groups[0]['lr_scale'] = 1.0"""
AVERAGED = """
class Averaged(torch.optim.Optimizer):

    def __init__(self, params, lr):
        super().__init__(params, {'lr': lr, 'k': 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group['k'] += 1
            group['calls'] = group.get('calls', 0) + 1
            for p in group['params']:
                self.state[p].setdefault('z', p.clone()).sub_(p.grad, alpha=group['lr'])
                p.lerp_(self.state[p]['z'], 1 / group['k'] / group['calls'])


optimizer = Averaged(model.named_parameters(), lr=learning_rate)
optimizer.param_groups[0]['lr_scale'] = 1.0"""
LION = AVERAGED.replace('Averaged', 'Lion').replace("'z'", "'exp_avg'")


@pytest.mark.parametrize('code', [ADAFACTOR, AVERAGED], ids=['Adafactor', 'a count in the group'])
def test_an_optimizer_of_your_own_is_resumed_exactly(edited, tmp_path, code):
    assert_resumes_exactly(edited({'train.py': [optimizer_is(code)]}), tmp_path)


def test_the_state_of_another_optimizer_is_not_used(edited, tmp_path):
    edited({'train.py': [optimizer_is(LION)]})('out')
    run = edited({'train.py': [optimizer_is(LION)[::-1]]})
    printed = run('out', '--init_from=resume', '--max_iters=8').out
    assert re.search(r'^note: \d+ parameters start without moments', printed, re.M) and 'iter 7:' in printed


# -----------------------------------------------------------------------------
# settings


def test_a_setting_that_is_deleted_takes_only_the_lines_that_use_it(edited, tmp_path):
    run = edited({'train.py': [
        ('document_mask = False  # keep attention inside documents; always on for conversations\n', ''),
        (', seed, document_mask)', ', seed)'),
        ('document_mask or data.train.masked', 'data.train.masked')]})
    assert_resumes_exactly(run, tmp_path)


# -----------------------------------------------------------------------------
# a run's folder


def test_a_run_that_ends_before_its_first_update_can_be_resumed(edited, tmp_path):
    run = edited({})
    run('complete')
    run('stopped', '--max_minutes=1e-9')
    assert load_checkpoint(tmp_path / 'stopped')['iter_num'] == 0
    run('stopped', '--init_from=resume')
    assert_same_run(tmp_path / 'complete', tmp_path / 'stopped')


def test_a_newer_checkpoint_that_was_copied_in_is_the_one_that_is_resumed(edited, tmp_path):
    run = edited({})
    run('here', '--max_iters=3', '--lr_decay_iters=9')
    shutil.copytree(tmp_path / 'here', tmp_path / 'elsewhere')
    run('elsewhere', '--init_from=resume', '--max_iters=6')
    (tmp_path / 'here' / 'ckpt.pt').unlink()
    shutil.copy(tmp_path / 'elsewhere' / 'ckpt.pt', tmp_path / 'here')
    printed = run('here', '--init_from=resume', '--max_iters=8').out
    assert re.search(r'^resuming from \S+ckpt\.pt, after 6 iterations', printed, re.M)
    assert re.search(r'^note: .*ckpt\.pt', printed, re.M)
