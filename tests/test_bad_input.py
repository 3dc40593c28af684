"""Some 300 damaged inputs: each is used, or refused in one line with status 2, and no file goes."""

import collections
import copy
import json
import os
import random

import pytest
import torch
from conftest import TINY, char_dataset

import checkpoint
import configurator
import prepare
from dataset import Dataset
from model import GPT, GPTConfig
from tokenizer import hugging_face_state, make_tokenizer

WRONG_VALUES = [None, -1, 0, 'x', [], {}, 2**70, 1.5, True]


def damaged(content, seed):
    """Versions of a file's content, bytes."""
    rng = random.Random(seed)
    yield from [b'', content[:1], content[:len(content) // 2], content[:-1], content[::-1]]
    yield from [content + content, b'\xef\xbb\xbf' + content, bytes(len(content)), b'\x80' + content]
    yield content.decode('latin-1').encode('utf-16')
    for _ in range(12):
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 20])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        yield bytes(changed)


def wrong(value, seed, most):
    """Copies of a value of dicts and lists, in each of which one place holds something else, or nothing."""
    places = []

    def walk(part, path):
        items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else []
        for key, inner in list(items)[:40]:
            places.append(path + [key])
            walk(inner, path + [key])

    walk(value, [])
    rng = random.Random(seed)
    for _ in range(most):
        changed = copy.deepcopy(value)
        *path, last = rng.choice(places)
        parent = changed
        for key in path:
            parent = parent[key]
        if isinstance(parent, dict) and rng.random() < 0.2:
            del parent[last]
        else:
            parent[last] = rng.choice(WRONG_VALUES)
        yield changed


def state_of(folder):
    files = [path for path in folder.rglob('*') if path.is_file() and path.name != '.lock']
    return {path: path.read_bytes() for path in files}


def try_all(path, contents, use, capsys):
    """Write each of the contents to the file, and use it."""
    n_refused = 0
    n = 0
    for content in contents:
        path.write_bytes(content)
        before = state_of(path.parent)
        try:
            use()
        except ValueError as e:
            n_refused += 1
            assert str(e) and '\n' not in str(e).strip()
        except SystemExit as e:
            n_refused += 1
            err = capsys.readouterr().err
            assert e.code == 2 and err.startswith('error: ') and err.count('\n') == 1
        assert state_of(path.parent) == before
        n += 1
    assert 0 < n_refused <= n


def test_damaged_datasets(tmp_path, capsys):
    folder = char_dataset(tmp_path) / 'toy'
    chars = sorted(set('0123456789 times.\n'))
    meta = {'vocab_size': len(chars), 'dtype': 'uint16', 'end_of_text': None, 'checksums': {},
            'tokenizer': {'kind': 'char', 'chars': ''.join(chars)}, 'source': 'here', 'command': 'none',
            'splits': {}}
    for split in ('train', 'val'):
        n_tokens = os.path.getsize(folder / f'{split}.bin') // 2
        meta['splits'][split] = {'tokens': n_tokens, 'bytes': 5, 'documents': 1, 'sha256': 'a'}

    def use():
        data = Dataset('toy', tmp_path, 16)
        data.train.batch(1, range(4), 16)
        data.tokenizer.decode([0, 1])

    try_all(folder / 'meta.json', damaged(json.dumps(meta).encode(), 1), use, capsys)
    try_all(folder / 'meta.json', (json.dumps(m).encode() for m in wrong(meta, 2, 60)), use, capsys)
    (folder / 'meta.json').unlink()
    try_all(folder / 'meta.pkl', damaged((folder / 'meta.pkl').read_bytes(), 3), use, capsys)
    char_dataset(tmp_path, 'again')
    (folder / 'meta.pkl').write_bytes((tmp_path / 'again' / 'meta.pkl').read_bytes())
    try_all(folder / 'train.bin', damaged((folder / 'train.bin').read_bytes(), 4), use, capsys)
    (folder / 'train.bin').unlink()
    (folder / 'train.bin').mkdir()
    with pytest.raises(SystemExit):
        use()


def test_damaged_checkpoints(tmp_path, capsys):
    model = GPT(GPTConfig(block_size=16, vocab_size=18, n_layer=1, n_head=2, n_embd=8, bias=False))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    state = {
        'model': model.state_dict(), 'optimizer': optimizer.state_dict(),
        'model_args': model.config.model_args(), 'iter_num': 2, 'best_val_loss': 3.0,
        'config': {'batch_size': 4, 'dataset': 'toy', 'learning_rate': 0.1},
        'given': ['batch_size'], 'tokenizer': {'kind': 'char', 'chars': '\n .0123456789eimst'}, 'scaler': {},
        'data': {'name': 'toy', 'train': {'tokens': 100, 'sha256': 'a'}}, 'tokens_per_iter': 64,
        'train_seconds': 1.0}
    path = tmp_path / 'ckpt.pt'
    torch.save(state, path)

    def use():
        ckpt = checkpoint.read(str(path))
        checkpoint.build_model(ckpt)
        make_tokenizer(checkpoint.tokenizer_state_of(ckpt))

    use()
    try_all(path, damaged(path.read_bytes(), 5), use, capsys)

    def files():
        plain = {name: value for name, value in state.items() if name != 'model'}
        for changed in wrong(plain, 6, 60):
            torch.save({**changed, 'model': state['model']}, path)
            yield path.read_bytes()

    try_all(path, files(), use, capsys)


def test_damaged_config_files(tmp_path, capsys):
    content = b"# a config\nimport math\nbatch_size = 4\nlearning_rate = 1e-3\nout_dir = 'out'\nn = math.pi\n"
    knobs = {'batch_size': 1, 'learning_rate': 0.1, 'out_dir': 'x'}
    kinds = configurator.kinds_of({}, knobs)
    path = tmp_path / 'a.py'
    try_all(path, damaged(content, 7), lambda: configurator.run_config(str(path), knobs, kinds), capsys)


def test_damaged_texts_and_tokenizers(tmp_path, capsys):
    rows = ''
    for i in range(20):
        rows += json.dumps({'text': f'caf\u00e9 number {i}.'}, ensure_ascii=False) + '\n'
    path = tmp_path / 'a.jsonl'
    part = prepare.Part(str(path))
    try_all(path, damaged(rows.encode(), 8),
            lambda: list(prepare.read_documents(part, 'text', collections.Counter())), capsys)
    text = tmp_path / 'a.txt'
    part = prepare.Part(str(text))
    try_all(text, damaged('caf\u00e9 <|endoftext|> na\u00efve'.encode(), 9),
            lambda: list(prepare.read_documents(part, 'text', collections.Counter())), capsys)

    tokenizers = pytest.importorskip('tokenizers')
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    learned.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=['<s>'], show_progress=False)
    learned.train_from_iterator([rows], trainer)
    path = tmp_path / 'tokenizer.json'

    def use():
        tok = make_tokenizer(hugging_face_state(path))
        tok.decode(tok.encode('caf\u00e9 number 3').tolist())

    content = learned.to_str()
    try_all(path, damaged(content.encode(), 10), use, capsys)
    try_all(path, (json.dumps(v).encode() for v in wrong(json.loads(content), 11, 40)), use, capsys)


def test_through_the_scripts(script, tmp_path):
    folder = char_dataset(tmp_path / 'data')
    (folder / 'toy' / 'meta.json').write_text('{"vocab_size": "many"}')
    out = tmp_path / 'out'
    out.mkdir()
    (out / 'ckpt.pt').write_bytes(b'PK\x03\x04 and nothing behind it')
    (tmp_path / 'bad.jsonl').write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / 'latin.txt').write_bytes('caf\u00e9'.encode('latin-1'))
    (tmp_path / 'config.py').write_text('batch_size = [\n')
    (tmp_path / 'tokenizer.json').write_text('{}')
    commands = [
        ['train.py', *TINY, '--dataset=toy', f'--data_dir={folder}', f"--out_dir={tmp_path / 'new'}"],
        ['train.py', *TINY, '--init_from=resume', f'--out_dir={out}'],
        ['train.py', str(tmp_path / 'config.py')],
        ['sample.py', str(out)],
        ['eval.py', str(out)],
        ['export.py', f'--out_dir={out}', f"--to={tmp_path / 'exported'}"],
        ['prepare.py', str(tmp_path / 'bad.jsonl'), '--tokenizer=byte', f'--data_dir={folder}'],
        ['prepare.py', str(tmp_path / 'latin.txt'), '--tokenizer=byte', f'--data_dir={folder}'],
        ['prepare.py', 'mine', f"--input={tmp_path / 'config.py'}", f'--data_dir={folder}',
         f"--tokenizer={tmp_path / 'tokenizer.json'}"],
        ['plot.py', str(out)],
    ]
    before = state_of(tmp_path)
    for name, *args in commands:
        result = script(name, *args)
        assert result.status == 2, (name, args, result.err)
        assert result.err.startswith('error: ') and result.err.count('\n') == 1, result.err
    assert state_of(tmp_path) == before
