"""Two processes, with DDP or FSDP, train the same network as one process."""

import re
import subprocess
import sys

import pytest
from conftest import (
    REPO, TINY, assert_close_run, assert_equal, assert_same_run, load_checkpoint, run_processes)

pytestmark = pytest.mark.slow
FLAGS = {
    'gpt2': ['--dropout=0.1'],
    # with 3 layers and 37 rows, which two processes cannot divide equally
    'muon': ['--arch=modern', '--matrix_optimizer=muon', '--n_kv_head=1', '--n_layer=3', '--mlp_width=37'],
}


def flags_of(name, data_dir, out_dir):
    return [*TINY, *FLAGS[name], '--dataset=toy', f'--data_dir={data_dir}', f'--out_dir={out_dir}',
            '--gradient_accumulation_steps=4', '--save_interval=3', '--lr_decay_iters=6',
            '--sample_interval=3', '--sample_tokens=30']


def train_in_processes(*args, n=2):
    result = run_processes(n, 'train.py', *args)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope='module')
def two(data_dir, tmp_path_factory):
    """Return the folder of a run in two processes of each kind."""
    folders = {}
    for name in FLAGS:
        folders[name] = tmp_path_factory.mktemp('two') / 'out'
        train_in_processes(*flags_of(name, data_dir, folders[name]))
    return folders


@pytest.mark.parametrize('name', FLAGS)
def test_ddp_and_fsdp_train_as_one_process_which_can_resume_their_runs(works, data_dir, tmp_path, two, name):
    one = works('train.py', *flags_of(name, data_dir, tmp_path / 'one'))
    assert_close_run(two[name], tmp_path / 'one')
    flags = flags_of(name, data_dir, tmp_path / 'shards')
    fsdp = ['--shard=0', '--activation_checkpointing']
    printed = train_in_processes(*flags, *fsdp, '--max_iters=3')
    sample = printed.partition('---\n')[2].partition('\nreport: ')[0]
    assert len(sample) > 20 and sample in one.out
    train_in_processes(*flags, *fsdp, '--max_iters=5', '--init_from=resume')
    works('train.py', *flags, '--init_from=resume')
    assert_close_run(tmp_path / 'shards', tmp_path / 'one')


def test_four_processes_in_two_groups_that_share_a_model_train_as_one_process(works, data_dir, tmp_path):
    flags = [*flags_of('muon', data_dir, tmp_path / 'one'), '--n_layer=2', '--max_iters=3']
    one = works('train.py', *flags)
    printed = train_in_processes(*flags, f'--out_dir={tmp_path / "groups"}', '--shard=2', n=4)
    assert_close_run(tmp_path / 'groups', tmp_path / 'one')
    sample = printed.partition('---\n')[2].partition('\nreport: ')[0]
    assert len(sample) > 20 and sample in one.out


def test_two_processes_resume_to_the_bit(data_dir, tmp_path, two):
    flags = flags_of('muon', data_dir, tmp_path / 'out')
    train_in_processes(*flags, '--max_iters=3')
    train_in_processes(*flags, '--init_from=resume')
    assert_same_run(two['muon'], tmp_path / 'out')


@pytest.fixture
def edit(tmp_path, monkeypatch):
    """edit(code) lets each process that is started run this code first."""
    def write(code):
        (tmp_path / 'sitecustomize.py').write_text(code)
        monkeypatch.setenv('PYTHONPATH', f'{tmp_path}:{REPO}')
    return write


def test_fsdp_sends_gradients_once_an_iteration(data_dir, tmp_path, edit):
    edit("import atexit, os\n"
         "if os.environ.get('RANK') == '0':\n"
         "    import torch.distributed\n"
         "    calls = []\n"
         "    name = 'reduce_scatter_single'\n"
         "    if not hasattr(torch.distributed, name):\n"
         "        name = 'reduce_scatter_tensor'\n"  # older versions of torch
         "    reduce_scatter = getattr(torch.distributed, name)\n"
         "    def counting(*args, **options):\n"
         "        calls.append(1)\n"
         "        return reduce_scatter(*args, **options)\n"
         "    setattr(torch.distributed, name, counting)\n"
         "    atexit.register(lambda: print('sent', len(calls)))\n")
    result = run_processes(2, 'train.py', *flags_of('gpt2', data_dir, tmp_path / 'out'), '--max_iters=2',
                           '--eval_interval=0', '--shard=0')
    assert result.returncode == 0, result.stderr
    n_modules = 3  # two blocks, and the rest of the network
    assert f'sent {(1 + 2) * n_modules}\n' in result.stdout  # for the warm-up, for two iterations


def test_a_sharded_model_is_sampled_through_fsdps_hooks_also_after_an_evaluation(data_dir, tmp_path, edit):
    # on a GPU, they and what they send must not be captured
    edit("import os\n"
         "if os.environ.get('RANK') == '0':\n"
         "    from flatgpt import sampling\n"
         "    init = sampling.Sampler.__init__\n"
         "    def printing_init(self, model, *args, **options):\n"
         "        init(self, model, *args, **options)\n"
         "        print('through hooks', self.is_sharded and self.forward is model)\n"
         "    sampling.Sampler.__init__ = printing_init\n")
    printed = train_in_processes(*flags_of('gpt2', data_dir, tmp_path / 'out'), '--shard=0', '--max_iters=4',
                                 '--save_interval=0')
    assert 'through hooks True' in printed and 'through hooks False' not in printed


def test_a_compiler_that_fails_in_one_process_is_used_in_none(data_dir, tmp_path, edit, two):
    edit("import os\n"
         "if 'RANK' in os.environ:\n"
         "    import torch\n"
         "    from flatgpt import processes\n"
         "    processes.choose_compile = lambda compile, device: True\n"
         "    def backend(graph, inputs):\n"
         "        assert os.environ['RANK'] == '0', 'no compiler'\n"
         "        return graph\n"
         "    compile = torch.nn.Module.compile\n"
         "    torch.nn.Module.compile = lambda self: compile(self, backend=backend)\n")
    flags = flags_of('gpt2', data_dir, tmp_path / 'out')
    assert 'torch.compile failed' in train_in_processes(*flags, '--compile=auto', '--ddp_timeout=30')
    assert_equal(load_checkpoint(two['gpt2'])['model'], load_checkpoint(tmp_path / 'out')['model'])


def test_torchrun_restarts_a_killed_process_and_the_run_ends_with_the_same_bits(
        data_dir, tmp_path, edit, two):
    # the second process kills itself in the fifth iteration of the first attempt
    edit("import os\n"
         "if os.environ.get('RANK') == '1' and os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0':\n"
         "    from flatgpt import dataset\n"
         "    batch = dataset.Tokens.batch\n"
         "    def dying_batch(self, seed, numbers, block_size):\n"
         "        if numbers[0] >= 4 * 4 * 4:\n"
         "            os.kill(os.getpid(), 9)\n"
         "        return batch(self, seed, numbers, block_size)\n"
         "    dataset.Tokens.batch = dying_batch\n")
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
               '--max-restarts=1', str(REPO / 'train.py'), *flags_of('gpt2', data_dir, tmp_path / 'out')]
    result = subprocess.run([*command, '--auto_resume'], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r'^iter 3:', result.stdout, re.M)) == 2  # saved at 3, repeated
    assert_equal(load_checkpoint(two['gpt2'])['model'], load_checkpoint(tmp_path / 'out')['model'])
