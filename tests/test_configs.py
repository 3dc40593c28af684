"""config/depth.py and config/arch_modern.py compute the numbers that their comments give."""

import pytest
from conftest import REPO, knobs_of


@pytest.fixture(autouse=True)
def in_repo(monkeypatch):
    monkeypatch.chdir(REPO)


DEPTHS = {  # computed by hand
    4: dict(n_embd=256, n_head=2, block_size=256, total_batch_size=2**15, batch_size=128, max_iters=1920),
    12: dict(n_embd=768, n_head=6, block_size=1024, total_batch_size=2**19, batch_size=32, max_iters=3240),
    24: dict(n_embd=1536, n_head=12, block_size=1024, total_batch_size=2**20, batch_size=8, max_iters=12960),
}
RATES = {
    4: dict(matrix_lr=0.025, embedding_lr=0.3031, head_lr=0.006928, momentum=0.9129,
            matrix_weight_decay=0.0125),
    12: dict(matrix_lr=0.025, embedding_lr=0.7, head_lr=0.004, momentum=0.95, matrix_weight_decay=0.05),
    24: dict(matrix_lr=0.03536, embedding_lr=0.7, head_lr=0.004, momentum=0.9565,
             matrix_weight_decay=0.008866),
}


@pytest.mark.parametrize('depth', DEPTHS)
def test_all_settings_follow_from_the_depth(capsys, depth):
    config = knobs_of('train.py', 'config/depth.py', f'--n_layer={depth}')
    assert {name: config[name] for name in DEPTHS[depth]} == DEPTHS[depth]
    for name, rate in RATES[depth].items():
        assert config[name] == pytest.approx(rate, rel=1e-3), name
    assert config['arch'] == 'modern' and config['matrix_optimizer'] == 'muon'
    assert 'note: ' not in capsys.readouterr().out


@pytest.mark.parametrize('depth', range(1, 33))
def test_micro_batches_divide_the_batch_of_every_depth_among_1_2_4_and_8_processes(
        monkeypatch, depth):
    for name in ['RANK', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT']:
        monkeypatch.setenv(name, '0')
    for n_processes in [1, 2, 4, 8]:
        monkeypatch.setenv('WORLD_SIZE', str(n_processes))
        config = knobs_of('train.py', 'config/depth.py', f'--n_layer={depth}')
        micro_batch = config['batch_size'] * config['block_size'] * n_processes
        assert config['total_batch_size'] % micro_batch == 0
        assert config['n_embd'] % 128 == 0


@pytest.mark.parametrize('flag, follows', [
    ('--max_tokens=2e6', dict(total_batch_size=2048, batch_size=8, max_iters=977, embedding_lr=0.07578)),
    ('--max_iters=4000', dict(max_tokens=None, total_batch_size=2**15, matrix_weight_decay=0.01016)),
    ('--total_batch_size=8192', dict(max_iters=7680, batch_size=32, momentum=0.8851, embedding_lr=0.1516)),
    ('--n_embd=512', dict(n_head=4, max_iters=1920, total_batch_size=2**17, head_lr=0.004899)),
    ('--block_size=512', dict(batch_size=64, max_iters=1920)),
    ('--batch_size=16', dict(total_batch_size=2**15, embedding_lr=0.3031)),
    ('--embedding_lr=0.1', dict(matrix_lr=0.025)),
    ('--matrix_weight_decay=0', dict(matrix_lr=0.025)),
    ('--dataset=pystdlib', dict(max_iters=1920)),
])
def test_a_flag_wins_over_the_depth_and_the_rest_follows_from_it(flag, follows):
    config = knobs_of('train.py', 'config/depth.py', '--n_layer=4', flag)
    name, _, text = flag[2:].partition('=')
    assert str(config[name]) == text or config[name] == float(text)
    for name, value in follows.items():
        assert config[name] == (value and pytest.approx(value, rel=1e-3)), name


def test_arch_modern_has_the_tuned_rates_at_the_tuned_size_and_lower_ones_for_xl():
    tuned = dict(matrix_lr=0.025, embedding_lr=0.7, head_lr=0.004, learning_rate=0.004, momentum=0.95,
                 weight_decay=1e-3, matrix_weight_decay=0.05, n_head=6)
    config = knobs_of('train.py', 'config/train_fineweb_124m.py', 'config/arch_modern.py')
    assert {name: config[name] for name in tuned} == tuned
    xl = knobs_of('train.py', 'config/train_gpt2_xl.py', 'config/arch_modern.py', '--max_iters=32500')
    assert xl['matrix_lr'] == 0.025
    assert xl['embedding_lr'] == pytest.approx(0.7 * 0.6928, rel=1e-3)
    assert xl['head_lr'] == pytest.approx(0.004 * 0.6928, rel=1e-3)
    assert xl['matrix_weight_decay'] == pytest.approx(0.005)
