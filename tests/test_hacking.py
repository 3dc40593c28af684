"""Each diff of docs/hacking.md applies to the code as it is, and its network trains and writes."""

import re
import shutil
import subprocess

import pytest
from conftest import REPO, TINY, run_script

PAGE = (REPO / 'docs' / 'hacking.md').read_text()
SECTIONS = re.findall(r'^## \d+\. (.*?)\n(.*?)```diff\n(.*?)^```', PAGE, re.M | re.S)


@pytest.mark.slow
@pytest.mark.parametrize('title, text, diff', SECTIONS, ids=[title for title, _, _ in SECTIONS])
def test_the_diff_applies_and_trains(data_dir, tmp_path, title, text, diff):
    for path in REPO.glob('*.py'):
        shutil.copy(path, tmp_path)
    subprocess.run(['git', 'init', '-q', tmp_path], check=True)
    applied = subprocess.run(['git', 'apply', '--recount', '-'], cwd=tmp_path, input=diff, text=True,
                             capture_output=True)
    assert applied.returncode == 0, applied.stderr
    flags = re.findall(r'`(--\w+=[^`]+)`', text)[:1]
    if 'second_dataset' in text:
        flags = ['--second_dataset=toy']
    result = run_script(tmp_path / 'train.py', *TINY, *flags, '--dataset=toy', f'--data_dir={data_dir}',
                        f"--out_dir={tmp_path / 'out'}", '--sample_interval=6', '--sample_tokens=30')
    assert result.returncode == 0, result.stderr
    assert 'samples after 6 iterations' in result.stdout
