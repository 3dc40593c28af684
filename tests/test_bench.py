"""bench.py times what it says, and finds the same greedy text in every contestant."""

import json

import pytest


def test_sampling_is_timed_and_the_texts_agree(script, tmp_path):
    result = script('bench.py', '--what=sample', '--sizes=baby,llama', '--tokens=5', '--rounds=2', '--device=cpu', '--dtype=bfloat16', f"--json_file={tmp_path / 'x.json'}")
    assert result.status == 0, result.err
    assert 'ANOTHER' not in result.out and result.out.count('the same') == 4 and 'on a GPU: not measured' in result.out
    record = json.loads((tmp_path / 'x.json').read_text())
    timed = [row for row in record['sample'] if 'contestant' in row]
    assert [(row['size'], row['contestant']) for row in timed] == [(size, way) for size in ('baby', 'llama') for way in ('ours, no cache', 'ours, float32', 'ours, bfloat16')]
    assert all(len(row['seconds_per_step']) == 2 and min(row['seconds_per_step']) > 0 for row in timed) and 'commit' in record['machine']
    caches = {row['size']: row for row in record['sample'] if 'cache_bytes' in row}
    assert caches['baby']['cache_bytes'] == 2 * 6 * 6 * 64 * 256 * 4 == 3 * caches['llama']['cache_bytes']  # llama: 2 of 6 heads are kept


def test_without_a_cache_long_texts_are_timed_in_slices_that_cover_them(script):
    bench = script('bench.py', '--sizes=baby', '--tokens=1', '--rounds=1', '--device=cpu').globals
    calls = []
    bench['per_token'](lambda idx, number: calls.append((tuple(idx.shape), number)), 3, 800, 4)
    assert calls == [((3, 100), 2), ((3, 300), 2), ((3, 500), 2), ((3, 700), 2)]
    net = bench['GPT'](bench['GPTConfig'](block_size=16, vocab_size=8, n_layer=1, n_head=1, n_embd=4, mlp_width=4, bias=False))
    weights = sum(p.numel() for name, p in net.named_parameters() if p.dim() > 1 and 'wpe' not in name)
    assert bench['bytes_per_step'](net, 1, 10, 4) == 4 * (weights + 2 * 4 * 10 / 2)


@pytest.mark.parametrize('flags, words', [
    (['--what=speed'], ['speed', 'sample']), (['--sizes=huge'], ['huge', '124M']), (['--peer=/nowhere'], ['/nowhere', '--peer']), (['--rounds=0'], ['rounds']),
    (['--tokens=-1'], ['tokens']), (['--dtype=int8'], ['int8', 'bfloat16']),
])
def test_bad_requests_are_one_line(script, flags, words):
    result = script('bench.py', '--device=cpu', *flags)
    assert result.status == 2 and result.err.startswith('error: ') and result.err.count('\n') == 1 and all(word in result.err for word in words), result.err
