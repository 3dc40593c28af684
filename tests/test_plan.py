"""What plan.py prints before a run starts is what it takes."""

import re
import time

import pytest
import torch
from conftest import REPO, torchrun

from support import devices, trial
from support.errors import first_line

LLAMA_70B = ['config/plan_llama_70b.py', '--data_dir=nowhere', '--world_size=512', '--gpu_memory=80']


GPUS = (REPO / 'docs' / 'gpus.md').read_text(encoding='utf-8')


def gb(text, what):
    return float(re.search(rf'{what} +([\d.,]+) GB', text)[1].replace(',', ''))


def test_a_plan_counts_parameters_and_leaves_nothing(script, tiny, tmp_path):
    result = script('plan.py', *tiny, '--n_embd=512', '--max_iters=36000', '--keep_checkpoints=4')
    assert result.status == 0 and not (tmp_path / 'out').exists() and 'iter 0' not in result.out, result.err
    n = int(re.search(r'([\d,]+) parameters', result.out)[1].replace(',', ''))
    assert gb(result.out, 'weights') == pytest.approx(4e-9 * n, abs=0.006)
    assert gb(result.out, 'optimizer') == pytest.approx(8e-9 * n, abs=0.006)
    assert gb(result.out, 'disk') == pytest.approx(12e-9 * n, abs=0.006) and 'for the 4 newest' in result.out
    assert '36,000 iterations' in result.out and 'fits' in result.out
    # a folder that holds a run is as it was
    assert script('train.py', *tiny).status == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / 'out').iterdir()}
    assert script('plan.py', *tiny).status == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / 'out').iterdir()} == before


@pytest.mark.parametrize('name', ['gpt2, dropout, bfloat16, adamw', 'modern, float32, muon, 16 tokens', 'llama, bfloat16, documents',
                                  'local, bfloat16, muon, checkpointing'])
def test_the_estimate_is_what_train_py_takes(name, monkeypatch):
    import plan_vs_real
    monkeypatch.setattr(plan_vs_real, 'SMALL', plan_vs_real.SMALL.replace('=256', '=128'))
    rows = plan_vs_real.table()
    assert name in rows, list(rows)
    assert plan_vs_real.compare(name, *rows[name]) < 0.03  # up to 0.1% was seen at the full size


def test_a_trial_is_three_iterations_of_train_py(tiny, tmp_path):
    done = torchrun(2, 'plan.py', *tiny, '--gradient_accumulation_steps=2', '--measure')
    assert done.status == 0, done.err
    assert re.search(r'^speed +[\d.]+ ms per iteration, [\d,]+ tokens/s', done.out, re.M)
    speeds = ', '.join(rf'\S+ GB/s at {mb} MB' for mb in ('0.25', '4', '25'))
    assert re.search(rf'^bandwidth {speeds}, all-reduced between 2 processes$', done.out, re.M), done.out
    assert done.out.count('speed ') == 1 and not (tmp_path / 'out').exists()


def test_a_long_error_is_told_in_few_words():
    assert first_line("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                   "to allocate 24 bytes. Error code 12 (Cannot allocate memory)") == 'tried to allocate 24 bytes'
    assert first_line('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total') == 'tried to allocate 2.00 GiB'
    assert first_line('[../gloo/pair.cc:5] closed (by [1.2.3.4]:5)\nmore') == 'closed (by [1.2.3.4]:5)'
    cut = first_line('it broke (' + 'because ' * 40)
    assert len(cut) < 170 and cut.endswith('because ...)')


def test_what_would_not_fit_is_not_tried(script, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, 'run_trial', lambda *args: pytest.fail('it was tried'))
    result = script('plan.py', *tiny, '--batch_size=10000000', '--measure')
    assert result.status == 2 and 'it would not fit, so it was not tried' in result.err and result.err.count('\n') == 1
    assert 'does not fit' in result.out and re.search(r'^remedy +--', result.out, re.M) and not (tmp_path / 'out').exists()


def test_70b_is_planned_within_seconds_where_it_could_never_run(script, tmp_path):
    began = time.process_time()
    result = script('plan.py', *LLAMA_70B, '--peak_flops=989e12', f"--out_dir={tmp_path / 'out'}")
    assert result.status == 0 and time.process_time() - began < 15, result.err
    assert '69,276,540,928 parameters' in result.out and 'a vocabulary of 50,304' in result.out
    assert 'epochs' not in result.out and 'so it fits' in result.out and not (tmp_path / 'out').exists()
    assert gb(result.out, 'weights') == pytest.approx(4 * 69.28 / 512, abs=0.02)


def test_a_number_of_processes_beyond_all_is_answered_at_once(script, tiny):
    result = script('plan.py', *tiny, '--world_size=1000000000000', '--shard=7', '--gpu_memory=80')
    assert result.status == 2 and "--shard=0 (all), 2, 4, 5, 8" in result.err and len(result.err) < 1000, result.err


def test_what_does_not_fit_gets_flags_that_do(script):
    small = [*LLAMA_70B[:2], '--world_size=32', '--gpu_memory=80', '--activation_checkpointing=False']
    result = script('plan.py', *small)
    assert result.status == 0 and 'does not fit' in result.out, result.out
    remedy = re.search(r'^remedy +(.*)$', result.out, re.M)[1]
    assert '--activation_checkpointing' in remedy
    flags = re.match(r'((?:--\S+ )*)\(', remedy.split(', or ')[0] + ' (')
    again = script('plan.py', *small[:2], '--gpu_memory=80', *(flags[1].split() if flags else []),
                   *([] if 'world_size' in remedy else ['--world_size=32']))
    assert 'so it fits' in again.out, (remedy, again.out, again.err)


@pytest.mark.parametrize('flags, word', [
    (['--measure', '--world_size=8'], 'leave out --measure'), (['--world_size=0'], 'world_size is out of range'),
    (['--shard=0'], '--world_size=8'), (['--dataset=nowhere', '--budget=3 epochs'], "--budget='1e9 tokens'"),
])
def test_what_cannot_be_planned_is_one_line(script, tiny, flags, word):
    result = script('plan.py', *tiny, *flags)
    assert result.status == 2 and word in result.err and result.err.count('\n') == 1, result.err


def test_nothing_in_the_model_is_patched():
    for name in ('memory', 'gpu_on_cpu', 'estimate', 'planned_run'):
        assert 'mock' not in (REPO / 'support' / f'{name}.py').read_text()


# -----------------------------------------------------------------------------
# docs/gpus.md


def test_the_speeds_of_common_cards_follow_from_peak_and_mfu():
    from model import GPT, GPTConfig
    from support.devices import PEAK_FLOPS
    shakespeare = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65)
    with torch.device('meta'):
        flops = GPT(GPTConfig(vocab_size=50304)).flops_per_token()
        small = GPT(GPTConfig(**shakespeare)).flops_per_token()
    # evaluations: both splits, the forward pass alone
    whole = small * 16384 * (5000 + 21 * 2 * 200 / 3)
    rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in GPUS.splitlines()
            if line.endswith('| estimated |')]
    assert len(rows) == 12, 'each says whether it was measured'
    for name, peak, _, mfu, speed, _, small_mfu, minutes, _ in rows:
        word = re.sub('^rtx 3060.*|^apple.*', '', name.lower()).split(',')[0].removesuffix(' sxm')
        assert not word or PEAK_FLOPS[word] == float(peak) * 1e12, name
        per_second = float(peak) * 1e12 * float(mfu.strip('%')) / 100
        assert float(speed.replace(',', '')) == pytest.approx(per_second / flops, rel=0.02), name
        per_second = float(peak) * 1e12 * float(small_mfu.strip('%')) / 100
        assert float(minutes) == pytest.approx(whole / per_second / 60, rel=0.12), name


@pytest.mark.parametrize('card, memory', [('RTX 3060, 12 GB', 12), ('A100, 80 GB', 80)])
def test_the_micro_batches_of_common_cards_fit(script, card, memory):
    cells = re.search(rf'^\| {card} \|(.*)', GPUS, re.M)[1].split('|')
    flags = '--data_dir=nowhere', f'--gpu_memory={memory}', '--total_batch_size=491520'
    done = script('plan.py', 'config/train_gpt2.py', *flags, f'--batch_size={int(cells[1])}')
    assert ' fits. ' in ' '.join(done.out.split()), done.out + done.err


@pytest.mark.parametrize('name, memory', [('8gb', 8), ('24gb', 24)])
def test_a_weekend_fits_into_its_card(script, name, memory):
    config = REPO / 'config' / f'train_fineweb_edu_{name}.py'
    done = script('plan.py', config, 'config/arch_modern.py', '--data_dir=nowhere', f'--gpu_memory={memory}')
    taken = re.search(r'([\d.]+) GB by\s+#\s+plan.py', config.read_text())[1]
    said = ' '.join(done.out.split())
    assert f'of the {memory} GB of each GPU, so it fits' in said, said + done.err
    assert gb(done.out, 'memory') == pytest.approx(float(taken), abs=0.06)
    iterations, tokens = re.search(r'budget\s+([\d,]+) iterations = ([\d,]+) tokens', said).groups()
    assert f'{iterations} iterations' in config.read_text()
    assert float(tokens.replace(',', '')) < float(re.search(r'max_tokens=(\S+)', config.read_text())[1])
