"""python -m support.check says what a naive edit of train.py or model.py breaks."""

import sys
from pathlib import Path

import pytest
from conftest import REPO
from harness import Child
from test_hacking import edited

from support import check

# {the promise that it breaks: an edit of train.py}
EDITS = {'a resume gives': ("    first = number * batch_size\n    x,",
                            "    import numpy as np\n    first = (np.random.randint(1000) + dist.rank) * batch_size\n    x,"),
         'two processes': ('batch_loss / loss_divisor(it, micro_step)', 'batch_loss / gradient_accumulation_steps'),
         'the learning rate': ('return learning_rate * (it + 1) / (warmup_iters + 1)',
                               'return learning_rate * it / warmup_iters')}
# it keeps them: an optimizer of one's own for the blocks alone
OWN = ('stop = Stop(', 'optimizer = torch.optim.SGD(model.transformer.h.parameters(), 0.1)\nstop = Stop(')
# attention near by, written for training alone: with a cache T is 1
NEAR = ("        causal = True if mask is None", """        if mask is None and T > 1:
            i = torch.arange(T)
            mask = (i[:, None] >= i) & (i[:, None] - i < 64)
        causal = True if mask is None""")


@pytest.mark.parametrize('is_edited', [False, True])
def test_naive_edits_are_caught(is_edited, tmp_path, monkeypatch, capsys):
    source, launch = (REPO / 'train.py').read_text(), check.train
    for before, after in EDITS.values() if is_edited else [OWN]:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    (tmp_path / 'train.py').write_text(source)

    def forked(flags, place, name, *more, processes=1):
        if name == 'one' and not is_edited:
            launch(flags, place, 'launched', *more)
        out = Path(place) / name
        child = Child(*check.TINY, f'--data_dir={place}', *more, out=out, ranks=processes,
                      sabotage=lambda: sys.argv.__setitem__(0, f'{tmp_path}/train.py'))
        assert child.wait() == 0, child.text()
        return out

    monkeypatch.setattr(check, 'train', forked)
    monkeypatch.setattr(sys, 'argv', ['check'])
    if is_edited:
        monkeypatch.setattr(check, 'GPT', edited(*NEAR).GPT)
    with pytest.raises(SystemExit) as ended:
        check.main()
    begins = [f'BROKEN {promise}' if is_edited else f'ok     {promise}' for promise in (*EDITS, 'a sample with')]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(map(str.startswith, lines, begins)) and ended.value.code == is_edited, lines
