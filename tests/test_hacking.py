"""Each diff in docs/hacking.md applies, changes a run, and the run can be resumed and sampled from."""

import re
import shutil
import subprocess

import pytest
from conftest import (
    REPO, TINY, assert_same_run, copy_code, forget_modules, load_checkpoint, losses_of, read_log)

PAGE = (REPO / 'docs' / 'hacking.md').read_text()
SECTIONS = re.findall(r'^## \d+\. (.*?)\n(.*?)```diff\n(.*?)^```', PAGE, re.M | re.S)


def results(out_dir):
    """Return the columns of log.csv, the losses and some weights of a run."""
    weights = load_checkpoint(out_dir)['model']
    return list(read_log(out_dir)[0]), losses_of(out_dir), weights['lm_head.weight'].tolist()


@pytest.fixture(scope='module')
def train(works, data_dir):
    """train(folder, out_dir) runs the train.py of a folder in this process."""
    def run(folder, out_dir, *flags):
        flags = [*flags, f'--data_dir={data_dir}', f'--out_dir={out_dir}']
        return works(folder / 'train.py', *TINY, '--dataset=toy', '--keep_checkpoints=0',
                     '--sample_interval=6', '--sample_tokens=30', *flags).out
    return run


@pytest.fixture(scope='module')
def plain_run(train, tmp_path_factory):
    """Return the folder of a run of the code without a diff."""
    out_dir = tmp_path_factory.mktemp('plain') / 'out'
    train(REPO, out_dir)
    return out_dir


@pytest.mark.slow
@pytest.mark.parametrize('title, text, diff', SECTIONS, ids=[title for title, _, _ in SECTIONS])
def test_a_diff_applies_and_its_run_resumes_to_the_bit_and_samples(
        train, plain_run, tmp_path, monkeypatch, title, text, diff):
    copy_code(tmp_path)
    subprocess.run(['git', 'init', '-q', tmp_path], check=True)
    applied = subprocess.run(['git', 'apply', '--recount', '-'], cwd=tmp_path, input=diff, text=True,
                             capture_output=True)
    assert applied.returncode == 0, applied.stderr

    named = re.search(r'`(--\w+=[^`]+)`', text)  # the first flags that the section names
    flags = named[1].split() if named else []
    if 'second_dataset' in text:
        flags = ['--second_dataset=toy']
    if 'lora_rank' in text:
        flags.append(f'--init_from={plain_run}')
    out_dir = tmp_path / 'out'
    with monkeypatch.context() as patch:
        forget_modules(patch)
        patch.syspath_prepend(tmp_path)
        assert 'samples after 6 iterations' in train(tmp_path, out_dir, *flags)
        assert results(out_dir) != results(plain_run)
        before = shutil.copytree(out_dir, tmp_path / 'before')
        printed = train(tmp_path, out_dir, '--init_from=resume', '--resume_step=3')
        assert 'samples after 6 iterations' in printed
        assert_same_run(out_dir, before)

    if 'lora_rank' in text:  # the checkpoint has the merged weights, which the code without the diff reads
        printed = train(REPO, tmp_path / 'merged', '--eval_only=True', f'--init_from={out_dir}')
        val_loss = float(re.search(r'^step 0: .*val loss (\S+)$', printed, re.M)[1])
        assert val_loss == pytest.approx(float(read_log(out_dir)[-1]['val_loss']), abs=1e-4)
