"""A text of one's own: found, read in any encoding and format, given a tokenizer that fits; runs/mybook.sh."""

import gzip
import os
import pickle
import runpy
import sys
import zipfile

import numpy as np
import pytest
from conftest import REPO, TEXT, bytes_in, captured, is_refused, make_dataset, nanogpt_meta, own_process
from test_read_text import documents_in, ids_of

from dataset import Dataset
from support import choose_tokenizer, read_text
from support.files import write_json
from support.tokenizer import empty_prompt, make_tokenizer


# -----------------------------------------------------------------------------
# which files

def test_a_mixed_folder_tells_what_it_skips_and_reads_any_case(prepare, tmp_path):
    folder = tmp_path / 'in'
    (folder / '.git').mkdir(parents=True)
    (folder / '.git' / 'notes.txt').write_text('hidden')
    names = 'UPPER.TXT a.txt b.md plain.gz'.split()
    for name in names:
        content = f'{name} has it'.encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
    for name in ('photo.jpg', 'paper.pdf', 'table.csv'):
        (folder / name).write_bytes(b'\x89')
    result = prepare('mine', folder, '--val_fraction=0')
    assert result.status == 0 and 'reading 4 files, skipped 3: ' in result.out, result.err
    assert [text.split()[0] for text in documents_in(tmp_path, 'mine')] == names


def test_input_is_given_several_times_or_in_place_of_a_name(prepare, tmp_path):
    for name in ('a', 'b', 'c,d'):
        (tmp_path / f'{name}.v2.txt').write_text(f'{name} {TEXT[:900]}')
    a, b, c = (f"{tmp_path / name}.v2.txt" for name in ('a', 'b', 'c,d'))
    assert prepare('several', f'--input={a}', f'--input={b}', f'--input={c}', '--val_fraction=0').status == 0
    assert [text.split()[0] for text in documents_in(tmp_path, 'several')] == ['a', 'b', 'c,d']
    for source in (a, f'{tmp_path}/'):
        result = prepare(source)
        assert result.status == 0 and result.out.startswith('dataset '), result.err
    assert Dataset('a.v2', tmp_path / 'data').train.n > 500


# -----------------------------------------------------------------------------
# encodings

ENGLISH = '“Well,” he said, “it’s only the café’s naïve Übermut — don’t worry.” ' * 9 + 'A plain tale. ' * 200
FRENCH = 'L’été dernier, à la façon des élèves, nous avons mangé des crêpes où Noël fût fêté. ' * 20
POLISH = 'Zażółć gęślą jaźń, powiedział król do swojej żony, idąc łąką. ' * 20
RUSSIAN = 'Однажды играли в карты у конногвардейца Нарумова. Долгая зимняя ночь прошла незаметно. ' * 20


@pytest.mark.parametrize('text, encoding', [
    (ENGLISH, 'cp1252'), (ENGLISH[:18] * 60, 'cp1252'), (ENGLISH, 'mac_roman'), (ENGLISH, 'utf_16'), (ENGLISH, 'utf_16_le'),
    (FRENCH, 'cp1252'), (POLISH, 'cp1250'), (RUSSIAN, 'cp1251')])
def test_the_likely_encoding_is_named_and_read(prepare, tmp_path, text, encoding):
    assert read_text.likely_encoding(text.encode(encoding), 0) == encoding
    (tmp_path / 'a.txt').write_bytes(text.encode(encoding))
    result = prepare('mine', tmp_path / 'a.txt')
    assert f'is read as {encoding}' in result.out or encoding == 'utf_16'  # whose mark leaves no doubt
    assert result.status == 0 and documents_in(tmp_path, 'mine') == [text]


# -----------------------------------------------------------------------------
# pages and books

PAGE = """<!DOCTYPE html><html><head><title>No</title><style>p {}</style></head><body>
<h1>A   Title</h1><p>It&rsquo;s caf&eacute;,<br>two
lines.</p><script>var no = "<p>no</p>";</script><ul><li>one<li>two</ul><pre>  as
    it is</pre><p title="a > b"><svg id="a>b"/>soft&shy;ware <b title=">">bold</b>ly</p><svg></svg></body></html>"""
PAGE_TEXT = "A Title\n\nIt’s café,\ntwo lines.\n\none\ntwo\n\n  as\n    it is\n\nsoftware boldly\n"
CONTAINER = ('<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
             '<rootfile full-path="OPS/book.opf"/></rootfiles></container>')


def write_epub(path, chapters):
    items = ''.join(f'<item id="c{i}" href="c%20{i}.xhtml" media-type="application/xhtml+xml"/>'
                    for i in range(len(chapters)))
    order = ''.join(f'<itemref idref="c{i}"/>' * 2 for i in reversed(range(len(chapters))))
    with zipfile.ZipFile(path, 'w') as book:
        book.writestr('META-INF/container.xml', CONTAINER)
        book.writestr('OPS/book.opf', f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}'
                                      f'</manifest><spine>{order}</spine></package>')
        for i, chapter in enumerate(chapters):
            book.writestr(f'OPS/c {i}.xhtml', chapter)


def test_a_page_becomes_its_text(prepare, tmp_path):
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in' / 'a.HTML').write_bytes(PAGE.encode())
    (tmp_path / 'in' / 'b.htm.gz').write_bytes(gzip.compress(PAGE.encode()))
    latin = PAGE.replace('&eacute;', 'é').replace('<title>', '<meta charset="latin-1"><title>')
    (tmp_path / 'in' / 'c.html').write_bytes(latin.encode('latin-1'))
    result = prepare('mine', tmp_path / 'in', '--val_fraction=0')
    assert result.status == 0 and documents_in(tmp_path, 'mine') == [PAGE_TEXT] * 3, result.err


def test_a_book_is_read_in_its_order_or_refused_in_one_line(prepare, tmp_path):
    write_epub(tmp_path / 'fine.epub', ['<p>the end</p>', PAGE])
    write_epub(tmp_path / 'locked.epub', [os.urandom(10_000)])
    write_epub(tmp_path / 'empty.epub', [])
    (tmp_path / 'cut.epub').write_bytes((tmp_path / 'locked.epub').read_bytes()[:5000])
    result = prepare('mine', tmp_path / 'fine.epub', '--val_fraction=0')
    assert result.status == 0 and documents_in(tmp_path, 'mine') == [PAGE_TEXT + '\nthe end\n'], result.err
    for name, word in (('locked', 'not utf-8'), ('empty', 'too little text'), ('cut', 'not a zip')):
        is_refused(prepare('other', tmp_path / f'{name}.epub'), word)


# -----------------------------------------------------------------------------
# which tokenizer

def test_the_tokenizer_fits_the_size_and_says_why(capsys):
    def choice(size, path='a.txt'):
        name = choose_tokenizer.by_size([read_text.File(path, size, '')])
        line = capsys.readouterr().out
        assert f'tokenizer {name}, by the files' in line and '--tokenizer=' in line and line.count('\n') == 1
        return name

    sizes = [choice(size) for size in (1e5, 1e6, 5e6, 1e8, 1e10)]
    assert sizes[0] == 'byte' and sizes[-1] == 'gpt2' and len(set(sizes)) == 5
    assert choice(3e5, 'a.txt.gz') == choice(9e5)


def test_a_dataset_is_replaced_only_if_asked(prepare, tmp_path):
    (tmp_path / 'book.txt').write_text(TEXT)
    source, path = tmp_path / 'book.txt', tmp_path / 'data' / 'mine' / 'train.bin'
    assert prepare('mine', source).status == 0
    before = path.read_bytes()
    is_refused(prepare('mine', source, '--tokenizer=char'), '--tokenizer=byte', '--overwrite')
    (tmp_path / 'latin.txt').write_bytes(b'caf\xe9\n')
    is_refused(prepare('mine', tmp_path / 'latin.txt', '--overwrite', '--encoding=utf-8'), 'not utf-8')
    assert path.read_bytes() == before and prepare('mine', source).status == 0
    assert prepare('mine', source, '--tokenizer=char', '--overwrite').status == 0
    # files that came from elsewhere, 17 GB of OpenWebText say
    (tmp_path / 'data' / 'mine' / 'meta.json').write_text('{')
    (tmp_path / 'data' / 'mine' / 'unfinished' / 'a folder').mkdir(parents=True)
    is_refused(prepare('mine', source), 'made elsewhere', '--overwrite')
    assert prepare('mine', source, '--overwrite').status == 0 and path.read_bytes() == before
    source.write_text(TEXT * 2)
    assert 'note: this replaces' in prepare('mine', source).out


def test_simplellamas_tokenizer_is_read_as_its_authors_use_it(prepare, tmp_path):
    """Its file has no decoder and no unk_token: both are set after loading."""
    tokenizers = pytest.importorskip('tokenizers')
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    special = ['<UNK>', '<SOS>', '<EOS>']
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tok.train_from_iterator([TEXT], trainer)
    tok.save(f'{tmp_path}/bpe_8k.json')
    (tmp_path / 'a.txt').write_text('12 times 5 is {60}é\n' * 100)
    result = prepare('mine', tmp_path / 'a.txt', f"--tokenizer={tmp_path / 'bpe_8k.json'}")
    assert "loses characters of the text: ['{', '}', 'é']" in result.out, result.err
    data = Dataset('mine', tmp_path / 'data')
    text = data.tokenizer().decode(ids_of(tmp_path, 'mine'))
    assert text.startswith('<SOS> 12 times 5 is <UNK>60<UNK><UNK><UNK>\n12 times'), 'é is two bytes'
    assert bytes_in(data) == len(text.replace('<UNK>', '')) - 5


# -----------------------------------------------------------------------------
# ids from elsewhere

def test_npy_shards_become_a_dataset(works, prepare, tmp_path, gpt2):
    ids = np.array(([gpt2.eot_token] + gpt2.encode_ordinary(TEXT)) * 2, dtype=np.uint16)
    (tmp_path / 'in').mkdir()
    for name, content in (('train_1', ids), ('train_2', ids[:1000].astype(np.int64)), ('val_0', ids[:500])):
        np.save(tmp_path / 'in' / f'edu_{name}.npy', content)
    works('prepare.py', 'mine', f"--input={tmp_path / 'in'}", f"--data_dir={tmp_path / 'data'}")
    data = Dataset('mine', tmp_path / 'data')
    assert ids_of(tmp_path, 'mine') == [*ids, *ids[:1000], *ids[:500]] and data.val.n == 500
    assert data.meta['splits']['train']['documents'] == 3
    for bad in (ids.reshape(2, -1), ids.astype(float), np.array([60_000] * 100)):
        np.save(tmp_path / 'bad.npy', bad)
        is_refused(prepare('other', tmp_path / 'bad.npy', '--tokenizer=gpt2'), 'row of token ids below 50257')


def test_nanogpts_command_works_in_any_folder_and_its_meta_pkl_is_our_meta_json(tmp_path):
    ignored = captured('git check-ignore data/foo/prepare.py data/shakespeare/prepare.py'.split(), cwd=REPO)
    assert ignored.stdout == ''
    for name in ('shakespeare_char', 'shakespeare', 'openwebtext'):
        assert f"'{name}'" in (REPO / 'data' / name / 'prepare.py').read_text()
    folder = tmp_path / 'data' / 'shakespeare_char'
    folder.mkdir(parents=True)
    (folder / 'input.txt').write_text(TEXT)  # in place of the download
    result = own_process('data/shakespeare_char/prepare.py', '--data_dir=data', cwd=tmp_path)
    assert result.status == 0 and 'train.py config/train_shakespeare_char.py' in result.out, result.err
    ours = Dataset('shakespeare_char', tmp_path / 'data').tokenizer_state
    assert pickle.loads((folder / 'meta.pkl').read_bytes()) == nanogpt_meta(sorted(set(TEXT)))
    (folder / 'meta.json').unlink()
    assert Dataset('shakespeare_char', tmp_path / 'data').tokenizer_state == ours


def test_a_text_starts_with_what_the_vocabulary_has():
    for chars, begin in (('\n a', [0]), (' ab', [0]), ('ba', [0]), ('!\n', [1])):
        assert empty_prompt(make_tokenizer({'kind': 'char', 'chars': chars})) == begin
    assert empty_prompt(make_tokenizer({'kind': 'byte'})) == [256]


# -----------------------------------------------------------------------------
# commands

def test_no_checkpoint_lists_the_runs_that_are_there(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(('out-old', 'out-new', 'empty')):
        (tmp_path / name).mkdir()
        if name != 'empty':
            (tmp_path / name / 'ckpt.pt').write_bytes(b'')
            os.utime(tmp_path / name / 'ckpt.pt', (i, i))
    for name, *args in (('sample.py',), ('sample.py', '--out_dir=empty'), ('eval.py',),
                        ('train.py', 'config/quickstart.py', '--init_from=resume')):  # that file is found
        is_refused(script(name, *args), 'there is: out-new, out-old')


def asked_by_mybook(tmp_path, *args):
    """What runs/mybook.sh asks of a python that only writes down its arguments."""
    (tmp_path / 'repo' / 'runs').mkdir(parents=True, exist_ok=True)
    for name in ('mybook.sh', 'venv.sh'):
        (tmp_path / 'repo' / 'runs' / name).write_bytes((REPO / 'runs' / name).read_bytes())
    (tmp_path / 'repo' / '.venv' / 'bin').mkdir(parents=True, exist_ok=True)
    (tmp_path / 'repo' / '.venv' / 'bin' / 'activate').write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    fake = tmp_path / 'repo' / '.venv' / 'bin' / 'python'
    fake.write_text('''#!/bin/sh
for word; do
  printf "%s|" "$word" | tr '\\n' '~'
  case $1$word in train.py--out_dir=*)
    touch "${word#*=}/ckpt.pt"
    loss=$(wc -l < asked)  # each network is worse than the one before
    case $word in *better*) ;; *) loss=$((100 - loss)) ;; esac
    printf "iter,val_loss\\n9,$loss\\n" > "${word#*=}/log.csv"
  esac
done >> asked
echo >> asked
case "$*" in
  -c*long) echo 270 ;;
  -c*ngram*) echo 1.50 ;;
  -c*val_loss*) PYTHONPATH=REPO exec PYTHON "$@" ;;
esac
'''.replace('REPO', f'{REPO}').replace('PYTHON ', f'{sys.executable} '))
    fake.chmod(0o755)
    asked = tmp_path / 'repo' / 'asked'
    asked.unlink(missing_ok=True)
    done = captured(['bash', tmp_path / 'repo' / 'runs' / 'mybook.sh', *args], cwd=tmp_path)
    lines = asked.read_text().splitlines() if asked.exists() else []
    return done, [line.split('|')[:-1] for line in lines if '.py|' in line]


def test_mybook_sh_hands_each_flag_to_its_script(tmp_path):
    done, asked = asked_by_mybook(tmp_path, 'my book.txt', '/x/b.epub', '', '--tokenizer=char', '--n_layer=4',
                                  '--data_dir=d', '--minutes=3')
    assert done.returncode == 0, done.stderr
    out_dir = f"--out_dir={tmp_path / 'repo' / 'out-my book'}"
    train = ['train.py', '--dataset=my book', f'--data_dir={tmp_path}/d', 'config/mybook.py']
    assert [[word for word in words if '--max_minutes' not in word] for words in asked] == [
        ['prepare.py', 'my book', f'--input={tmp_path}/my book.txt', '--input=/x/b.epub',
         '--tokenizer=char', f'--data_dir={tmp_path}/d'],
        [*train, out_dir, '--seed=1337', '--init_from=auto', '--n_layer=4'],
        *[[*train, out_dir, f'--seed={1337 + n}', '--init_from=auto', '--teacher='
           + ','.join(f'{out_dir[10:]}/teachers/{i}' for i in range(1, n + 1)), '--n_layer=4'] for n in (1, 2, 3)],
        ['eval.py', out_dir, f'--data_dir={tmp_path}/d', '--sample_tokens=0'],
        ['sample.py', out_dir, '--start=~', '--num_samples=3', '--max_new_tokens=300']]
    assert 'out-my book/report.md' in done.stdout
    assert '红楼梦 三国志 a=b dash overwrite hidden book.v2'.split() == [
        asked_by_mybook(tmp_path, path, '--minutes=1')[1][0][1] for path in
        '红楼梦.txt 三国志.txt.gz a=b.txt ./-dash.txt ./--overwrite.txt .hidden.txt book.v2.epub'.split()]
    done, asked = asked_by_mybook(tmp_path, '')
    assert done.returncode == 2 and done.stderr.startswith('error: ') and not asked
    done, asked = asked_by_mybook(tmp_path, '--help')
    assert done.returncode == 0 and '--name=NAME' in done.stdout and not asked
    assert max(map(len, done.stdout.splitlines())) < 81 and 'set -' not in done.stdout
    assert len(asked_by_mybook(tmp_path, 'long.txt')[1]) == 4  # too little is left for one that it teaches
    done, asked = asked_by_mybook(tmp_path, 'better.txt')
    assert all(words[1].endswith('teachers/1') for words in asked[-2:]) and 'better than that' in done.stdout


def test_the_config_of_a_book_fits_its_size(script, tmp_path):
    is_refused(script('train.py', f'--data_dir={tmp_path}', 'config/mybook.py', '--dataset=absent'), 'python prepare.py absent')
    rows = []
    for size in (20_000, 300_000, 1_000_000, 5_000_000, 10**9):
        folder = make_dataset(tmp_path, f'{size}', val=False)
        os.truncate(folder / 'train.bin', size)
        write_json(f'{folder}/meta.json', {
            'vocab_size': 60_000, 'splits': {'train': {'tokens': size // 2, 'bytes': size}}})
        known = dict(dataset=f'{size}', data_dir=str(tmp_path), init_from='scratch', max_iters=9,
                     _flags={'max_iters': 9}, max_minutes=None)
        rows.append(runpy.run_path(str(REPO / 'config' / 'mybook.py'), init_globals=known))
        rows[-1]['epochs'] = rows[-1]['_best'] * 2048 / (size // 2)
    assert all(a['n_embd'] <= b['n_embd'] for a, b in zip(rows[2:], rows[3:]))  # before them bytes
    assert rows[1]['epochs'] <= 25 and rows[-1]['epochs'] <= 2 and rows[0]['token_noise'] > rows[1]['token_noise'] > 0 == rows[2]['token_noise']


def test_a_book_is_trained_and_its_report_written(script, tmp_path):
    (tmp_path / 'book.txt').write_text(TEXT)
    result = script('prepare.py', f'{tmp_path}/book.txt', f"--data_dir={tmp_path / 'data'}")
    assert result.status == 0 and "tokenizer byte, by the files' 0.07 MB, " in result.out, result.err
    assert f"train.py --dataset=book --data_dir={tmp_path / 'data'} config/mybook.py" in result.out
    result = script('train.py', '--dataset=book', f"--data_dir={tmp_path / 'data'}", 'config/mybook.py',
                    f"--out_dir={tmp_path / 'out'}", '--max_iters=4', '--n_layer=1', '--n_embd=32', '--n_head=2',
                    '--eval_iters=1', '--sample_tokens=5', '--sample_interval=2', '--device=cpu', '--batch_size=2')
    assert result.status == 0 and ' MB of text in 6' in result.out and 'noise 0.05' in result.out, result.err
    assert 'Best validation loss' in (tmp_path / 'out' / 'report.md').read_text()
    assert (tmp_path / 'out' / 'samples.md').exists()
