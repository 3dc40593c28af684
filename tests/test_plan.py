"""What plan.py prints before a run starts is what it takes."""

import os
import re

import pytest
import torch
from conftest import REPO, is_refused
from torch.distributed._tools.mem_tracker import MemTracker
from warm import processes

from support import plan_memory

GPUS = (REPO / 'docs' / 'gpus.md').read_text(encoding='utf-8')
SMALL = ('--n_layer=3 --n_head=4 --n_embd=128 --block_size=128 --max_iters=2 --eval_interval=0 --eval_iters=1 '
         '--warmup_iters=0').split()
LLAMA_70B = 'config/plan_llama_70b.py --data_dir=nowhere --gpu_memory=80 --peak_flops=989e12'.split()


def gb(text, what):
    return float(re.search(rf'{what} +([\d.,]+) GB', text)[1].replace(',', ''))


class Tracker(MemTracker):
    """MemTracker, for training: the original refuses to see a module twice."""

    def _pre_fw_hook(self, module, inputs):
        self.memory_tracking.pop(module, None)
        super()._pre_fw_hook(module, inputs)


def test_a_plan_counts_parameters_and_leaves_nothing(works, tiny, tmp_path):
    result = works('plan.py', *tiny, '--n_embd=512', '--keep_checkpoints=4')
    assert os.listdir(tmp_path) == ['data']
    n = int(re.search(r'([\d,]+) parameters', result.out)[1].replace(',', ''))
    assert gb(result.out, 'weights') == pytest.approx(4e-9 * n, abs=0.006)
    assert gb(result.out, 'optimizer') == pytest.approx(8e-9 * n, abs=0.006)
    assert gb(result.out, 'disk') == pytest.approx(12e-9 * n, abs=0.006) and 'for the 4 newest' in result.out


@pytest.mark.parametrize('flags', ['--arch=gpt2 --dropout=0.1 --dtype=bfloat16', '--arch=llama --n_kv_head=2 --activation_checkpointing',
                                   '--arch=modern --dtype=bfloat16', '--arch=local --matrix_optimizer=muon'])
def test_the_estimate_is_what_train_py_takes(flags, tiny, works):
    flags = [*tiny, *SMALL, *flags.split()]
    plan = works('plan.py', *flags).globals
    estimate = sum(plan_memory.peak(plan['run'], plan['memory']).values())
    with Tracker() as tracker:
        works('train.py', *flags, '--always_save_checkpoint=False')
    assert estimate == pytest.approx(tracker.get_tracker_snapshot('peak')[torch.device('cpu')]['Total'], rel=0.1)


def test_a_trial_is_a_few_iterations_of_train_py(tiny, tmp_path):
    (status, err, out), _ = processes(2, 'plan.py', *tiny, '--gradient_accumulation_steps=2', '--measure')
    assert status == 0 and out.count('measured  0.') == 1, err
    assert os.listdir(tmp_path) == ['data']


def test_what_would_not_fit_is_not_tried(script, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_memory, 'trial', lambda *args: pytest.fail('it was tried'))
    result = script('plan.py', *tiny, '--batch_size=10000000', '--measure')
    is_refused(result, 'it would not fit, so it was not tried')
    assert 'does not fit' in result.out and re.search(r'^remedy +.*--activation_checkpointing', result.out, re.M)


def test_70b_is_planned_where_it_could_never_run(script):
    result = script('plan.py', *LLAMA_70B, '--world_size=512')
    assert '69,276,540,928 parameters' in result.out and 'so it fits' in result.out, result.err
    assert gb(result.out, 'weights') == pytest.approx(4 * 69.28 / 512, abs=0.02)
    assert re.search(r'1.868e\+18 FLOPs = 8.908e\+23 FLOPs\ntime +1,2\d\d.\d hours', result.out)
    assert 'does not fit' in script('plan.py', *LLAMA_70B, '--world_size=8').out


@pytest.mark.parametrize('flags, word', [
    (['--measure', '--world_size=8'], 'leave out --measure'), (['--world_size=0'], 'world_size is out of range'),
    (['--shard=3'], 'does not divide 1'), (['--dataset=nowhere', '--budget=3 epochs'], "'1e9 tokens'"),
    ('--world_size=1000 --gradient_accumulation_steps=1000 --shard=7 --gpu_memory=80'.split(), '--shard=0 (all of them) or a divisor of 1000')])
def test_what_cannot_be_planned_is_one_line(script, tiny, flags, word):
    is_refused(script('plan.py', *tiny, *flags), word)


# -----------------------------------------------------------------------------
# docs/gpus.md


@pytest.mark.parametrize('card, memory', [('RTX 3060, 12 GB', 12), ('A100, 80 GB', 80)])
def test_the_micro_batches_of_common_cards_fit(script, card, memory):
    cells = re.search(rf'^\| {card} \|(.*)', GPUS, re.M)[1].split('|')
    flags = '--data_dir=nowhere', f'--gpu_memory={memory}', '--total_batch_size=491520'
    done = script('plan.py', 'config/train_gpt2.py', *flags, f'--batch_size={int(cells[1])}')
    assert 'so it fits' in done.out, done.out + done.err


@pytest.mark.parametrize('name, memory', [('8gb', 8), ('24gb', 24)])
def test_a_weekend_fits_into_its_card(script, name, memory):
    config = REPO / 'config' / f'train_fineweb_edu_{name}.py'
    done = script('plan.py', config, 'config/arch_modern.py', '--data_dir=nowhere', f'--gpu_memory={memory}')
    taken = re.search(r'([\d.]+) GB by\s+#\s+plan.py', config.read_text())[1]
    assert f'of the {memory} GB of each GPU, so it fits' in done.out, done.out + done.err
    assert gb(done.out, 'memory') == pytest.approx(float(taken), abs=0.06)
    assert re.search(r'budget\s+([\d,]+ iterations)', done.out)[1] in config.read_text()


# -----------------------------------------------------------------------------
# every line that launches train.py, in the pages, the configs and the scripts

LAUNCH = re.compile(r'((?:python|torchrun|bash runs/multinode\.sh|sbatch|NPROC=\d+ bash)[^`#|]*?(?:train\.py|slurm\.sbatch|multinode\.sh \S+ \d+))([^`#|)]*)')


def launches():
    """{(arguments of train.py, processes)}"""
    found = set()
    for path in [REPO / 'README.md', REPO / 'train.py', *(REPO / 'docs').glob('*.md'), *(REPO / 'config').glob('*.py'), *(REPO / 'runs').iterdir()]:
        for launcher, args in LAUNCH.findall(re.sub(r'\\\n#?', '', path.read_text(encoding='utf-8'))):
            number = lambda pattern, default: int((re.search(pattern, launcher) or [0, default])[1])
            nodes = number(r'nodes=(\d+)', 1) * number(r'multinode\.sh \S+ (\d+)', 1)
            n = nodes * number(r'(?:nproc_per_node|NPROC)=(\d+)', 1 if 'train.py' in launcher else 8)
            args = tuple(arg for arg in args.split('\n')[0].split() if re.fullmatch(r'config/\S+|--\w+(=[^"$\']+)?', arg) and 'init_from' not in arg)
            if any(arg.startswith('config/') for arg in args) and 'config/mybook.py' not in args:  # which measures its book
                found.add((args, n))
    return sorted(found)


@pytest.mark.parametrize('args, n', launches(), ids=str)
def test_every_launch_line_can_be_settled(works, args, n):
    elsewhere = ['--data_dir=nowhere', '--init_from=scratch', f'--world_size={n}']
    if 'config/finetune_chat.py' in args:  # its length is in epochs, of a dataset that is not here
        elsewhere.append('--budget=1e8 tokens')
    result = works('plan.py', *args, *elsewhere)
    assert f' x {n} process' in result.out, result.err
