"""Whoever comes from nanoGPT changes nothing: its config files and the habits of its forks, run as they are.

FLATGPT_PEER names a checkout of nanoGPT; then its own files are run, beside nanoGPT itself. Without it, files of the same form."""

import math
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO, captured, nanogpt_meta
from test_huggingface import hub, openai_like  # noqa: F401 (a fixture)
from torch.optim.optimizer import register_optimizer_step_pre_hook

PEER = os.environ.get('FLATGPT_PEER') and Path(os.environ['FLATGPT_PEER'])
needs_peer = pytest.mark.skipif(not PEER, reason='nanoGPT itself: FLATGPT_PEER names no checkout')
LIKE_NANOGPTS = {
    'train_char.py': "out_dir = 'out-char'\neval_interval = 250 # often\neval_iters = 200\nlog_interval = 10\nalways_save_checkpoint = False\n"
                     "wandb_log = False\nwandb_project = 'char'\nwandb_run_name = 'mini'\ndataset = 'shakespeare_char'\n"
                     "gradient_accumulation_steps = 1\nbatch_size = 64\nblock_size = 256\nn_layer = 6\nn_head = 6\nn_embd = 384\ndropout = 0.2\n"
                     "learning_rate = 1e-3\nmax_iters = 5000\nlr_decay_iters = 5000\nmin_lr = 1e-4\nbeta2 = 0.99\nwarmup_iters = 100\n",
    'train_owt.py': "wandb_log = True\nwandb_run_name='124M'\nbatch_size = 12\ngradient_accumulation_steps = 5 * 8\nmax_iters = 600000\n",
    'finetune.py': "import time\nout_dir = 'out-ft'\neval_interval = 5\neval_iters = 40\nwandb_log = False\nwandb_run_name = 'ft-' + str(time.time())\n"
                   "dataset = 'shakespeare'\ninit_from = 'gpt2-xl' # the largest\nalways_save_checkpoint = False\nbatch_size = 1\n"
                   "gradient_accumulation_steps = 32\nmax_iters = 20\nlearning_rate = 3e-5\ndecay_lr = False\n",
    **{f'eval_{name}.py': f"# n_layer=12\nbatch_size = 8\neval_iters = 500 # a good estimate\neval_only = True\nwandb_log = False\ninit_from = '{name}'\n"
       for name in ('gpt2', 'gpt2-xl')},
}
CONFIGS = {path.name: path.read_text() for path in sorted((PEER / 'config').glob('*.py'))} if PEER else LIKE_NANOGPTS
# nanoGPT's own values where a config sets none
DEFAULTS = dict(learning_rate=6e-4, max_iters=600000, warmup_iters=2000, lr_decay_iters=600000, min_lr=6e-5, decay_lr=True, init_from='scratch',
                eval_only=False, dataset='openwebtext')
TRAINS = [name for name in CONFIGS if not name.startswith('eval_')]
SMALL = ('--device=cpu --dtype=float32 --compile=False --wandb_log=False --batch_size=4 --block_size=32 --eval_iters=2 '
         '--log_interval=1 --gradient_accumulation_steps=2 --n_layer=1 --n_head=2 --n_embd=32 --dropout=0.0').split()
SHORT = ['--max_iters=16', '--eval_interval=8', '--learning_rate=1e-2']
SCHEDULE = ['--warmup_iters=4', '--lr_decay_iters=12', '--min_lr=1e-3']


def knobs_of(name):
    """What a config of nanoGPT's says, over nanoGPT's defaults."""
    scope = {}
    exec(CONFIGS[name], scope)
    return {**DEFAULTS, **scope}


CHAR = next(name for name in TRAINS if knobs_of(name)['dataset'] == 'shakespeare_char')


def nanogpts_lr(k, it):
    """Its get_lr, and that decay_lr=False leaves the warmup out as well."""
    if not k['decay_lr']:
        return k['learning_rate']
    if it < k['warmup_iters']:
        return k['learning_rate'] * (it + 1) / (k['warmup_iters'] + 1)
    if it > k['lr_decay_iters']:
        return k['min_lr']
    ratio = (it - k['warmup_iters']) / (k['lr_decay_iters'] - k['warmup_iters'])
    return k['min_lr'] + 0.5 * (1 + math.cos(math.pi * ratio)) * (k['learning_rate'] - k['min_lr'])


@pytest.fixture
def place(tmp_path):
    """A folder as a user of nanoGPT has it: its config files, and data that its prepare.py made."""
    (tmp_path / 'config').mkdir()
    for name, text in CONFIGS.items():
        (tmp_path / 'config' / name).write_text(text)
    text = ('To be, or not to be: that is the question.\n' * 200)[:8000]
    chars = sorted(set(text))
    ids = np.array([chars.index(c) for c in text], dtype=np.uint16)
    for name in ('openwebtext', 'shakespeare', 'shakespeare_char'):
        folder = tmp_path / 'data' / name
        folder.mkdir(parents=True)
        ids[:7000].tofile(folder / 'train.bin'), ids[7000:].tofile(folder / 'val.bin')
    (tmp_path / 'data' / 'shakespeare_char' / 'meta.pkl').write_bytes(pickle.dumps(nanogpt_meta(chars)))
    return tmp_path


@pytest.fixture
def ours(place, script):
    """ours('train_gpt2.py', *flags): runs that config with our train.py; the learning rates of its updates are in .lrs."""
    def run(name, *flags):
        used = []
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]['lr']))
        try:
            done = script('train.py', place / 'config' / name, f"--data_dir={place / 'data'}", f"--out_dir={place / 'ours'}", *flags)
        finally:
            handle.remove()
        done.lrs = used
        return done
    return run


def short_flags(name):
    """Flags that shrink a training config; its schedule, where it has one, with it."""
    return [*SMALL, *SHORT, *(SCHEDULE if knobs_of(name)['decay_lr'] else [])]


@pytest.mark.parametrize('name', TRAINS)
def test_a_training_config_of_nanogpt_has_its_schedule_its_updates_and_learns(name, ours):
    k = knobs_of(name)
    done = ours(name, *SMALL, '--init_from=scratch', '--eval_only')
    assert done.status == 0, done.err
    its = [*range(0, 2500, 50), *range(0, k['max_iters'] + 50, max(1, k['max_iters'] // 200))]
    assert [done.globals['get_lr'](it) for it in its] == pytest.approx([nanogpts_lr(k, it) for it in its])
    done = ours(name, *short_flags(name), '--init_from=scratch')
    k.update(max_iters=16, learning_rate=1e-2, warmup_iters=4, lr_decay_iters=12, min_lr=1e-3)
    assert done.status == 0, done.err
    assert done.lrs == pytest.approx([nanogpts_lr(k, it) for it in range(16)])  # nanoGPT makes one update more
    losses = list(done.losses().values())
    assert len(losses) == 16 and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize('name', [name for name in CONFIGS if knobs_of(name)['init_from'].startswith('gpt2')])
def test_a_config_that_starts_from_openais_weights_does(name, ours, hub, place, gpt2):
    k = knobs_of(name)
    openai_like(hub.folder / 'openai-community' / k['init_from'])
    flags = '--device=cpu --dtype=float32 --eval_iters=2 --block_size=32 --gradient_accumulation_steps=2'.split()
    done = ours(name, *flags, *([] if k['eval_only'] else ['--max_iters=4', '--eval_interval=2']))
    assert done.status == 0 and 'openai-community' in ' '.join(path for _, path in hub.requests), done.err
    if k['eval_only']:
        assert not done.lrs and not (place / 'ours').exists() and 'step 0: train loss' in done.out
    else:
        assert done.lrs == pytest.approx([nanogpts_lr(k, it) for it in range(4)])
        assert 'step 4: train loss' in done.out


def test_the_calls_of_nanogpts_forks(ours, place, tmp_path):
    from model import GPT, MLP, Block, CausalSelfAttention, GPTConfig, LayerNorm, load
    assert ours(CHAR, *short_flags(CHAR), '--bias=True').status == 0
    ckpt = torch.load(place / 'ours' / 'ckpt.pt', map_location='cpu')
    assert set('model optimizer model_args iter_num best_val_loss config'.split()) <= set(ckpt)
    config = GPTConfig(**ckpt['model_args'])
    model = GPT(config)
    model.load_state_dict({key.removeprefix('_orig_mod.'): p for key, p in ckpt['model'].items()})
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    optimizer.load_state_dict(ckpt['optimizer'])
    assert [len(group['params']) for group in optimizer.param_groups] == [6, 10] and optimizer.param_groups[1]['weight_decay'] == 0
    model.eval()
    with torch.no_grad():
        y = model.generate(torch.zeros(2, 3, dtype=torch.long), 5, temperature=0.8, top_k=200)
    assert y.shape == (2, 8) and model.crop_block_size(16) is None and model.config.block_size == 16
    path = f'{place}/ours'
    again = GPT.from_pretrained(path, dict(dropout=0.1))
    assert again.config.dropout == 0.1 and again.config.block_size == 32
    with pytest.raises(AssertionError):
        GPT.from_pretrained(path, dict(n_head=1))
    # the parts, by nanoGPT's names and arguments
    x = torch.randn(2, 8, 32)
    for part in (Block(config), CausalSelfAttention(config), MLP(config), LayerNorm(32, bias=False)):
        assert part(x).shape == x.shape
    assert LayerNorm(32, bias=False).bias is None and type(model.transformer.h[0].ln_1) is LayerNorm
    # a text in, a text out
    net, tokenizer = load(path)
    text = net.generate('To be', max_new_tokens=20, temperature=0)
    assert text.startswith('To be') and len(text) == 25 and set(text) <= set(tokenizer.chars)
    with pytest.raises(TypeError, match='load'):
        model.generate('To be', 3)


@needs_peer
@pytest.mark.parametrize('their', ['train.py', 'sample.py'])
def test_nanogpts_own_scripts_run_on_our_model_and_configurator(their, ours, place):
    """As a fork does that takes model.py and configurator.py from here and keeps its scripts."""
    (place / their).write_text((PEER / their).read_text())
    os.symlink(REPO / 'configurator.py', place / 'configurator.py')
    flags = [f'config/{CHAR}', *short_flags(CHAR), '--out_dir=theirs']
    if their == 'sample.py':
        assert ours(CHAR, *short_flags(CHAR)).status == 0
        flags = ['--out_dir=ours', '--device=cpu', '--dtype=float32', '--num_samples=2', '--max_new_tokens=30', '--start=To be']
    done = captured([sys.executable, '-W', 'ignore', their, *flags], cwd=place, timeout=300,
                    env={**os.environ, 'PYTHONPATH': str(REPO)})
    assert done.returncode == 0, done.stderr
    if their == 'train.py':
        losses = [float(line.split('loss ')[1].split(',')[0]) for line in done.stdout.splitlines() if line.startswith('iter ')]
        assert len(losses) == 17 and losses[-1] < 0.9 * losses[0] and (place / 'theirs' / 'ckpt.pt').exists()
    else:
        assert done.stdout.count('To be') >= 2
