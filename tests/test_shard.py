"""Sharded training has the losses, the checkpoints and the samples of one process; what saves memory changes
nothing else."""

import functools
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY, own_process, same
from harness import PLACE, train
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig
from support.devices import chunked_loss


def test_every_layout_has_the_losses_of_one_process_and_resumes_exactly():
    """Exactly: with FSDP and Muon, each tensor of the model and of the optimizer has the bits of a run that
    was not interrupted."""
    done = own_process('tests/faults/layouts.py', '--quick')
    assert done.status == 0, done.out[-2000:] + done.err[-2000:]
    assert 'All are the same up to rounding.' in done.out and done.out.count('hybrid') == 1
    assert '- modern, Muon, FSDP, 2: the same' in done.out


def with_and_without(config, change, low=False):
    """[(loss, {name: gradient})] of a network, before and after change(net)."""
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=32, vocab_size=101, n_layer=2, n_head=2, n_embd=32, **config)).train()
    for p in net.parameters():
        if not p.count_nonzero():
            torch.nn.init.normal_(p, std=0.1)
    idx = torch.randint(101, (3, 32))
    targets = idx.roll(-1, 1)
    targets[0, :5] = -1
    found = []
    for step in (lambda net: None, change):
        step(net)
        net.zero_grad()
        torch.manual_seed(1)  # dropout's
        with torch.autocast('cpu', torch.bfloat16, enabled=low):
            loss = net(idx, targets)[1]
        (loss * 7).backward()
        found.append((loss.item(), {name: p.grad.clone() for name, p in net.named_parameters()}))
    return found, net, (idx, targets)


def is_close(found, loss, gradient):
    (a, grads), (b, grads_) = found
    assert a == pytest.approx(b, abs=loss)
    for name in grads:
        assert (grads[name] - grads_[name]).norm() <= gradient * grads[name].norm(), name


# tied and untied, without softcap and with it
@pytest.mark.parametrize('arch', ['gpt2', 'modern'])
def test_the_chunked_loss_is_the_loss(arch):
    def chunked(net):
        net.loss = functools.partial(chunked_loss, net, 7)  # 96 targets: the last chunk is a smaller one
    found, net, (idx, targets) = with_and_without(dict(arch=arch), chunked)
    is_close(found, 2e-6, 2e-6)
    is_close(with_and_without(dict(arch=arch), chunked, low=True)[0], 2e-5, 2e-2)
    with torch.no_grad():
        each = net(idx, targets, reduction='none')[1]
        mean = net(idx, targets)[1]
        del net.loss
        torch.testing.assert_close(each, net(idx, targets, reduction='none')[1])
        torch.testing.assert_close(mean, net(idx, targets)[1])


def test_the_chunked_loss_never_holds_all_logits():
    V, largest = 4001, []
    net = GPT(GPTConfig(block_size=256, vocab_size=V, n_layer=1, n_head=1, n_embd=16, arch='modern'))
    net.loss = functools.partial(chunked_loss, net, 64)

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            outs = out if isinstance(out, (tuple, list)) else [out]
            largest.extend(t.numel() for t in outs if torch.is_tensor(t))
            return out
    idx = torch.randint(V, (2, 256))
    with Sizes():
        net(idx, idx)[1].backward()
    assert max(largest) == 64 * V


@pytest.mark.parametrize('arch', ['gpt2', 'local'])
def test_activation_checkpointing_changes_no_bit(arch):
    def less(net):
        for block in net.transformer.h:
            block.activation_checkpointing = True
    (a, grads), (b, grads_) = with_and_without(dict(arch=arch, dropout=0.2), less)[0]
    assert a == b and same(grads, grads_)


@pytest.mark.parametrize('ranks, flag, says', [
    (1, '--shard=3', 'does not divide 1'),
    (2, '--shard=3', 'shard=3 does not divide 2 processes'),
    (2, 'mine.py', 'process 1 has another learning_rate than process 0 (2.0, there 1.0). start all of them'),
    (2, 'edited.py', 'process 1 has another code of train.py than process 0 (1, there 0). start all of them')])
def test_what_processes_cannot_do_together_is_one_line(tmp_path, monkeypatch, ranks, flag, says):
    monkeypatch.chdir(tmp_path)
    Path('mine.py').write_text("import os\nlearning_rate = 1.0 + int(os.environ.get('RANK', 0))\n")
    Path('edited.py').write_text("import os\nfrom support import setup\nsetup.sha256_of = lambda path: os.environ['RANK']")
    child = train(flag, base=[*PLACE, '--dataset=tiny', '--gradient_accumulation_steps=2'], ranks=ranks,
                  out=tmp_path / 'out', expect=2)
    line, = re.findall('^error: .*', child.text(), re.M)
    assert says in line and child.statuses == [2] * ranks and not child.out.exists()


def test_a_sharded_checkpoint_has_one_copy_of_tied_weights():
    flags = [*TINY, *PLACE, '--dataset=tiny', '--gradient_accumulation_steps=2', '--max_iters=2',
             '--warmup_iters=0']
    sizes = [(train(*flags, *shard, base=(), ranks=2).out / 'ckpt.pt').stat().st_size
             for shard in ([], ['--shard=0'])]
    assert abs(sizes[0] - sizes[1]) < 4096
