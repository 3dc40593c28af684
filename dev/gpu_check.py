"""
Check the results on a GPU, in five minutes, then its speed, in thirteen.

    $ bash runs/gpu_check.sh --only=right                  # are the results right?
    $ bash runs/gpu_check.sh --only=fast --peer=NANOGPT    # how fast are they computed?
    $ bash runs/gpu_check.sh --only=losses,masks           # single checks
    $ bash runs/gpu_check.sh --only=right --tiny=True      # tiny networks on a CPU, to test this script

It needs the datasets shakespeare_char and gutenberg (GPT-2's tokens), which can be made on another machine:
    $ python prepare.py shakespeare_char; python prepare.py gutenberg --input=BOOKS.jsonl.gz --tokenizer=gpt2
The results are printed, with a table at the end, and written to gpu_check.txt in the folder $OUT, or in
out-gpu-check.
"""

import os
import sys

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)
from configurator import InputError, configure

# -----------------------------------------------------------------------------
only = 'right'  # 'fast'; names of checks, as 'losses,sampling_speed'
minutes: float = None  # checks that would not end by then are skipped. None: none
peer: str = None  # a checkout of nanoGPT to compare with
data_dir: str = None  # the folder of the datasets. None: data/
tiny = False  # tiny networks on a CPU
# -----------------------------------------------------------------------------
config, given = configure(globals())

import csv
import functools
import gc
import importlib.util
import statistics
import subprocess
import tempfile
import time
import traceback

import torch

from flatgpt.dataset import hash_seed
from flatgpt.processes import clip_grad_norm, environment, synchronize
from flatgpt.sampling import Sampler
from model import GPT, GPTConfig, attention, document_block_mask, document_mask
from optim import create_optimizer

START = time.perf_counter()
DEVICE = 'cpu' if tiny else 'cuda'
OUT = os.environ.get('OUT') or os.path.join(REPO, 'out-gpu-check')
os.makedirs(OUT, exist_ok=True)
data_dir = os.path.abspath(data_dir or os.path.join(REPO, 'data'))
rows = []  # [check, what, result]


def write(line):
    """Print a line, and append it to gpu_check.txt at once."""
    print(line, flush=True)
    with open(os.path.join(OUT, 'gpu_check.txt'), 'a') as f:
        f.write(line + '\n')


def report(check, what, result):
    """Write a row of the table, and keep it."""
    rows.append([check, what, result])
    write(f'[{time.perf_counter() - START:4.0f}s] {check}: {what}: {result}')


def network(n_layer, n_head, n_embd, block_size, vocab_size):
    """Return arguments of GPTConfig; with --tiny, those of a tiny network."""
    if tiny:
        n_layer, n_head, n_embd, block_size, vocab_size = 2, 2, 32, 32, min(vocab_size, 96)
    return {'n_layer': n_layer, 'n_head': n_head, 'n_embd': n_embd, 'block_size': block_size,
            'vocab_size': vocab_size}


SMALL = network(4, 4, 128, 128, 96)
BABY = network(6, 6, 384, 256, 65)
GPT2 = network(12, 12, 768, 1024, 50304)


def start(script, *flags, launcher=(), env=None):
    """Start a script, and return the process."""
    command = [sys.executable, *launcher, os.path.join(REPO, script), *flags]
    if tiny:
        command.append('--device=cpu')
    return subprocess.Popen(command, cwd=REPO, env={**os.environ, **(env or {})}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def start_training(folder, *flags, dataset='shakespeare_char', **options):
    flags = [f'--dataset={dataset}', f'--data_dir={data_dir}', f'--out_dir={folder}', '--log_interval=1',
             *flags]
    if tiny:
        flags.append('--compile=False')
    return start('train.py', *flags, **options)


def wait(process, name):
    """Return the output of a process when it ends. Report its notes and warnings; raise an error if it has
    failed."""
    output, _ = process.communicate()
    if process.returncode:
        command = ' '.join(process.args)
        raise RuntimeError(f"{command}\nended with status {process.returncode}\n{output[-2000:]}")
    for line in output.splitlines():
        if 'Warning' in line or 'warning:' in line or 'note:' in line:
            report('output', name, line.strip())
    return output


def losses_of(folder, column='loss'):
    with open(os.path.join(folder, 'log.csv'), newline='') as f:
        return [float(row[column]) for row in csv.DictReader(f) if row.get(column)]


def largest_difference(a, b):
    assert len(a) == len(b) > 0
    return max(abs(x - y) for x, y in zip(a, b))


def shape_flags(args):
    return [f'--{name}={args[name]}' for name in ('n_layer', 'n_head', 'n_embd', 'block_size')]


# -----------------------------------------------------------------------------
# are the results right?


def losses(work):
    """Compare twenty losses of each preset with those of a CPU in float32."""
    shape = [*shape_flags(SMALL), '--batch_size=8', '--gradient_accumulation_steps=2', '--max_iters=20',
             '--warmup_iters=5', '--eval_interval=0', '--eval_iters=2', '--save_interval=0']
    torchrun = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=1']
    no_compiler = {'CC': '/bin/false', 'CXX': '/bin/false'}
    for name in ('TRITON_CACHE_DIR', 'TORCHINDUCTOR_CACHE_DIR'):
        no_compiler[name] = os.path.join(work, name)
    # name: the largest difference that is allowed, the flags, and options of start()
    ways = {
        'cpu': (0, ['--device=cpu', '--dtype=float32', '--compile=False'], {}),
        'float32': (0.001, ['--dtype=float32', '--compile=False'], {}),
        'float32, compiled': (0.001, ['--dtype=float32'], {}),
        'bfloat16, compiled': (0.02, ['--dtype=bfloat16'], {}),
    }
    ways_of_gpt2 = {
        **ways,
        'bfloat16, checkpointing': (0.02, ['--dtype=bfloat16', '--activation_checkpointing=True'], {}),
        'bfloat16, torchrun': (0.02, ['--dtype=bfloat16'], {'launcher': torchrun}),
        'float32, no C compiler': (0.001, ['--dtype=float32'], {'env': no_compiler}),  # with a note
        'float16, compiled': (0.1, ['--dtype=float16'], {}),  # its scaler may skip the first updates
    }
    running = {}
    for arch in ('gpt2', 'llama', 'modern'):
        arch_flags = [f'--arch={arch}']
        if arch == 'modern':
            arch_flags.append('--matrix_optimizer=muon')
        for way, (_, flags, options) in (ways_of_gpt2 if arch == 'gpt2' else ways).items():
            folder = os.path.join(work, f'{arch} {way}')
            running[arch, way] = start_training(folder, *shape, *arch_flags, *flags, **options)
    for (arch, way), process in running.items():
        wait(process, f'{arch}, {way}')
    for arch, way in running:
        if way != 'cpu':
            theirs = losses_of(os.path.join(work, f'{arch} cpu'))
            ours = losses_of(os.path.join(work, f'{arch} {way}'))
            allowed = ways_of_gpt2[way][0]
            report('losses', f'{arch}, {way}: largest difference to a CPU (below {allowed:g})',
                   f'{largest_difference(ours, theirs):.6f}')


def random_model(arch, args, std=0.08, **others):
    """Return a network with larger weights than initially, so that its logits differ clearly."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(arch=arch, **args, **others))
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=std)
    return model.to(DEVICE).eval()


def sampling(work):
    """Compare greedy texts of the captured step with slow ones; test the distribution of the draws."""
    torch.set_float32_matmul_precision('highest')  # TF32 would decide some near ties differently
    for arch in ('gpt2', 'llama', 'modern'):
        model = random_model(arch, SMALL)
        idx = torch.randint(SMALL['vocab_size'], (3, 5), device=DEVICE)
        n = SMALL['block_size'] - 5
        reference = model.generate(idx, n, top_k=1)
        fast = Sampler(model, len(idx), 5 + n, temperature=0).generate(idx, n)
        same = (fast == reference).all(dim=1).sum().item()
        report('sampling', f'{arch}: greedy texts equal to those without a cache', f'{same} of {len(idx)}')
        n = 2 * SMALL['block_size'] + 44  # more than the context
        plain = Sampler(model, len(idx), 5 + n, temperature=0, capture=False).generate(idx, n)
        fast = Sampler(model, len(idx), 5 + n, temperature=0).generate(idx, n)
        same = (fast == plain).all(dim=1).sum().item()
        report('sampling', f'{arch}: long greedy texts equal to those without capturing',
               f'{same} of {len(idx)}')
    # the initial weights of modern's blocks add nothing, so the next token depends on the newest one alone:
    # one forward pass over all tokens gives all probabilities
    torch.manual_seed(1)
    model = GPT(GPTConfig(arch='modern', **SMALL)).to(DEVICE).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.1)
    V = SMALL['vocab_size']
    every_token = torch.arange(V, device=DEVICE)[:, None]
    for top_k in (None, 10):
        logits = model(every_token)[0][:, -1].float()  # (V, V)
        if top_k:
            smallest = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        probs = logits.softmax(dim=-1)
        idx = torch.zeros(512, 1, dtype=torch.long, device=DEVICE)
        text = Sampler(model, 512, 101, top_k=top_k).generate(idx, 100)
        counts = torch.zeros(V, V, device=DEVICE)
        counts.index_put_((text[:, :-1].flatten(), text[:, 1:].flatten()), torch.ones((), device=DEVICE),
                          accumulate=True)
        expected = counts.sum(dim=1, keepdim=True) * probs
        is_frequent = expected >= 10
        variance = (expected * (1 - probs)).clamp(min=1e-9)
        z_squared = ((counts - expected) ** 2 / variance)[is_frequent]
        outside = counts[probs == 0].sum().item()
        report('sampling', f'draws, top_k={top_k}: mean squared z (about 1); ids of probability 0 (0)',
               f'{z_squared.mean().item():.3f}; {outside:.0f}')
    # what the models above do not have: grouped queries, a context that is no multiple of 128, bfloat16
    args = {**SMALL, 'block_size': 40 if tiny else 200}
    model = random_model('llama', args, n_kv_head=SMALL['n_head'] // 2)
    idx = torch.randint(V, (3, 5), device=DEVICE)
    n = args['block_size'] + 44
    plain = Sampler(model, 3, 5 + n, top_p=0.9, capture=False).generate(idx, n, seed=1)
    fast = Sampler(model, 3, 5 + n, top_p=0.9, capture=True).generate(idx, n, seed=1)
    same = (fast == plain).all(dim=1).sum().item()
    report('sampling', 'grouped queries, top_p: texts equal to those without capturing', f'{same} of 3')
    for compile in (False, True):
        if tiny and compile:
            continue
        with torch.autocast(DEVICE, torch.bfloat16):
            sampler = Sampler(model, 3, 5 + n, top_p=0.9, capture=True, compile=compile)
            first, again, other = [sampler.generate(idx, n, seed=seed) for seed in (1, 1, 2)]
        same = [(texts == first).all(dim=1).sum().item() for texts in (again, other)]
        report('sampling', f'the same in bfloat16, compile={compile}: texts equal with one seed (3); with '
               'another (0)', f'{same[0]}; {same[1]}')


def samplers(work):
    """Make Samplers one after the other: each frees its memory, and can be captured whatever the garbage
    collector does."""
    model = GPT(GPTConfig(**SMALL)).to(DEVICE).eval()
    idx = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    n = 10 if tiny else 40
    memory = []
    gc.disable()
    for i in range(1, 2 * n + 1):
        sampler = Sampler(model, 1, SMALL['block_size'], capture=True)
        sampler.generate(idx, 20)
        if i in (3, n, 2 * n) and not tiny:
            allocated = torch.cuda.memory_allocated() / 1e6
            reserved = torch.cuda.memory_reserved() / 1e6
            memory.append(f'{allocated:.1f} and {reserved:.1f}')
    gc.enable()
    # torch 2.11 keeps a workspace of cuBLAS for each stream; torch.cuda.Stream() takes turns with 32 of them
    report('samplers', f'MB allocated and reserved after 3, {n} and {2 * n} Samplers (equal; with torch 2.11 '
           'the last two)', '; '.join(memory) or 'not measured')
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    for _ in range(n):
        sampler = Sampler(model, 1, SMALL['block_size'], capture=True)
        sampler.generate(idx, 20)
    gc.set_threshold(*threshold)
    report('samplers', 'Samplers that failed while the collector ran all the time', f'0 of {n}')


def resume(work):
    """Compare with a full run: half a run and its resume; a second one, which differs by rounding; one that
    evaluates and samples, from which sample.py and eval.py then read."""
    n = 6 if tiny else 40
    shape = [*shape_flags(BABY), '--batch_size=64', '--gradient_accumulation_steps=1', '--dropout=0.2',
             '--warmup_iters=5', f'--lr_decay_iters={n}', '--eval_interval=0', '--eval_iters=2']
    variants = {'full': [], 'again': [], 'half': [f'--max_iters={n // 2}'],
                'sampling': ['--sample_interval=5', '--eval_interval=10', '--sample_tokens=100']}
    running = {}
    for name, flags in variants.items():
        running[name] = start_training(os.path.join(work, name), *shape, f'--max_iters={n}', *flags)
    for name, process in running.items():
        wait(process, name)
    half = os.path.join(work, 'half')
    wait(start_training(half, *shape, f'--max_iters={n}', '--init_from=resume'), 'resume')
    full, again, resumed, sampled = [losses_of(os.path.join(work, name)) for name in variants]
    report('resume', f'largest difference over {n} iterations: a resume; a second full run; with samples',
           f'{largest_difference(resumed, full):.6f}; {largest_difference(again, full):.6f}; '
           f'{largest_difference(sampled, full):.6f}')
    folder = os.path.join(work, 'sampling')
    memory = losses_of(folder, 'memory_gb')
    report('resume', 'peak memory in GB after the second sample, and at the end (equal)',
           f'{memory[min(10, n - 1)]:.3f}; {memory[-1]:.3f}')
    flags = [f'--out_dir={folder}', f'--data_dir={data_dir}']
    wait(start('sample.py', *flags, f'--compile={not tiny}', '--num_samples=3', '--max_new_tokens=100'),
         'sample.py')
    output = wait(start('eval.py', *flags, '--eval_tokens=10000'), 'eval.py')
    report('resume', 'sample.py --compile=True and eval.py', f'status 0; {output.splitlines()[-1]}')


def documents(work):
    """Compare a run with document masks, compiled in a CUDA graph, with one that is not compiled."""
    if not os.path.exists(os.path.join(data_dir, 'gutenberg', 'train.bin')):
        report('documents', 'skipped', f'no dataset gutenberg in {data_dir}')
        return
    n = 2 if tiny else 20
    shape = [*shape_flags(BABY), '--batch_size=16', '--gradient_accumulation_steps=1', f'--max_iters={n}',
             '--warmup_iters=1', '--eval_interval=0', '--eval_iters=2', '--save_interval=0', '--arch=llama',
             '--dtype=bfloat16', '--document_mask=True']
    running = {'compiled': [], 'plain': ['--compile=False']}
    for name, flags in running.items():
        running[name] = start_training(os.path.join(work, name), *shape, *flags, dataset='gutenberg')
    for name, process in running.items():
        wait(process, f'documents, {name}')
    compiled, plain = [losses_of(os.path.join(work, name)) for name in running]
    report('documents', 'FlexAttention in a CUDA graph and not compiled: largest difference (below 0.02)',
           f'{largest_difference(compiled, plain):.6f}')


def bare_losses(args, mode, n, **others):
    """Return the losses of n steps with dropout."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**args, dropout=0.2, bias=False)).to(DEVICE)
    optimizer = adamw(model)
    if not tiny:
        model.compile(mode=mode)
    losses = []
    for it in range(n):
        generator = torch.Generator().manual_seed(it % 8)
        x = torch.randint(args['vocab_size'], (16, args['block_size']), generator=generator).to(DEVICE)
        torch.manual_seed(hash_seed(1, it))
        with torch.autocast(DEVICE, torch.bfloat16):
            _, loss = model(x, x, return_logits=False)
        loss.backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def graphs(work):
    """Compare mode='reduce-overhead' with a run without, and two runs without with each other."""
    n = 10 if tiny else 100
    plain = bare_losses(BABY, None, n)
    again = bare_losses(BABY, None, n)
    captured = bare_losses(BABY, 'reduce-overhead', n)
    report('graphs', f'largest difference over {n} steps with dropout: CUDA graphs; a second run without',
           f'{largest_difference(captured, plain):.6f}; {largest_difference(again, plain):.6f}')


def gradients(model, x, y, doc_ids=None):
    """Return the loss and a list of the gradients."""
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=False):
        _, loss = model(x, y, doc_ids, return_logits=False)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


def relative_difference(a, b):
    """Return the maximum of |a - b| / |a| over the tensors."""
    return max(((x - y).norm() / x.norm().clamp(min=1e-12)).item() for x, y in zip(a, b))


def masks(work):
    """Compare compiled FlexAttention with the dense mask, and the loss by chunks with the plain one."""
    args = network(4, 8, 512, 512, 4096)
    torch.set_float32_matmul_precision('highest')
    model = random_model('llama', args, std=0.02, n_kv_head=2).train()
    B, T = 4, args['block_size']
    x = torch.randint(args['vocab_size'], (B, T), device=DEVICE)
    y = torch.randint(args['vocab_size'], (B, T), device=DEVICE)
    doc_ids = (torch.rand(B, T, device=DEVICE) < 0.02).cumsum(dim=1)
    dense = gradients(model, x, y, doc_ids)
    model.loss_chunk_size = 100
    by_chunks = gradients(model, x, y, doc_ids)
    model.loss_chunk_size = 0
    if not tiny:
        model.compile()
    flex = gradients(model, x, y, doc_ids)
    report('masks', 'FlexAttention and the dense mask: difference of loss; of gradients, relative',
           f'{abs(flex[0] - dense[0]):.2e}; {relative_difference(dense[1], flex[1]):.2e}')
    report('chunks', 'the loss by chunks and the plain one: difference of loss; of gradients, relative',
           f'{abs(by_chunks[0] - dense[0]):.2e}; {relative_difference(dense[1], by_chunks[1]):.2e}')


# -----------------------------------------------------------------------------
# how fast are they computed?


def adamw(model):
    return create_optimizer(model, learning_rate=6e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)


def muon(model):
    return create_optimizer(model, learning_rate=4e-3, weight_decay=0.0, betas=(0.8, 0.95), eps=1e-10,
                            matrix_optimizer='muon', embedding_lr=0.2, dtype='bfloat16')


def reset():
    """Free the GPU's memory, and reset its peak."""
    torch.compiler.reset()
    gc.collect()
    if not tiny:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_step(check, name, model, optimizer, B, doc_ids=None, mode=None):
    """Report milliseconds, tokens/s and peak memory of a compiled training step. Return the milliseconds."""
    T = model.config.block_size
    x = torch.randint(model.config.vocab_size, (B, T), device=DEVICE)
    y = torch.randint(model.config.vocab_size, (B, T), device=DEVICE)
    others = {}  # arguments that nanoGPT's forward() lacks
    if isinstance(model, GPT):
        others = {'doc_ids': doc_ids, 'return_logits': False}
    if not tiny:
        model.compile(mode=mode)

    def step():
        with torch.autocast(DEVICE, torch.bfloat16):
            _, loss = model(x, y, **others)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    n = 2 if tiny else 20
    for _ in range(n // 2 + 1):
        step()
    synchronize(DEVICE)
    t0 = time.perf_counter()
    for _ in range(n):
        step()
    synchronize(DEVICE)
    ms = 1000 * (time.perf_counter() - t0) / n
    peak = 0 if tiny else torch.cuda.max_memory_allocated() / 1e9
    report(check, name, f'{ms:.2f} ms, {B * T / ms * 1000:,.0f} tokens/s, {peak:.1f} GB')
    return ms


def nanogpt_model(args):
    spec = importlib.util.spec_from_file_location('nanogpt_model', os.path.join(peer, 'model.py'))
    module = importlib.util.module_from_spec(spec)
    sys.modules['nanogpt_model'] = module
    spec.loader.exec_module(module)
    return module.GPT(module.GPTConfig(**args, dropout=0.0, bias=False)).to(DEVICE)


def tokens_per_second(generate, idx, n):
    generate(idx, n)  # compiles
    synchronize(DEVICE)
    t0 = time.perf_counter()
    generate(idx, n)
    synchronize(DEVICE)
    return f'{len(idx) * n / (time.perf_counter() - t0):,.0f}'


def sampling_speed(work):
    """Report tokens per second with bfloat16 weights, after the step is captured."""
    n = 20 if tiny else 250
    for name, args in (('baby', BABY), ('124M', GPT2)):
        for B in (1, 32):
            idx = torch.zeros(B, 1, dtype=torch.long, device=DEVICE)
            results = []
            reset()
            if peer:
                generate = functools.partial(nanogpt_model(args).eval().generate, top_k=200)
                with torch.autocast(DEVICE, torch.bfloat16, enabled=not tiny):
                    results.append(f'nanoGPT, top_k=200: {tokens_per_second(generate, idx, n)}')
            model = GPT(GPTConfig(**args, bias=False)).to(DEVICE).eval()
            for p in model.parameters():
                p.data = p.data.bfloat16()
            for compile in (False, True):
                if tiny and compile:
                    continue
                for top_k in (None, 200):
                    sampler = Sampler(model, B, 1 + n, top_k=top_k, compile=compile)
                    speed = tokens_per_second(sampler.generate, idx, n)
                    results.append(f'compile={compile}, top_k={top_k}: {speed}')
            report('sampling_speed', f'{name}, {B} texts, tokens/s', '; '.join(results))


def shakespeare(work):
    """Train config/train_shakespeare_char.py, then write ten samples of 500 tokens."""
    folder = os.path.join(work, 'out-shakespeare')
    flags = ['--max_iters=6', '--eval_iters=2', '--batch_size=4'] if tiny else ['--log_interval=10']
    t0 = time.perf_counter()
    config_file = os.path.join(REPO, 'config/train_shakespeare_char.py')
    wait(start_training(folder, config_file, *flags), 'shakespeare')
    seconds = time.perf_counter() - t0
    with open(os.path.join(folder, 'log.csv'), newline='') as f:
        log = list(csv.DictReader(f))
    evaluations = [(float(row['val_loss']), float(row['seconds'])) for row in log if row.get('val_loss')]
    best, best_seconds = min(evaluations)
    reached = [at for loss, at in evaluations if loss <= 1.4697]
    ms = statistics.median(float(row['ms']) for row in log if row.get('ms'))
    report('shakespeare', 'ms per iteration; seconds of training; seconds in total',
           f'{ms:.2f}; {evaluations[-1][1]:.1f}; {seconds:.1f}')
    report('shakespeare', 'best loss; at second; 1.4697 at second',
           f'{best:.4f}; {best_seconds:.1f}; {reached[0] if reached else "never"}')
    t0 = time.perf_counter()
    wait(start('sample.py', f'--out_dir={folder}', '--num_samples=10',
               f'--max_new_tokens={10 if tiny else 500}'), 'sample.py')
    seconds = time.perf_counter() - t0
    t0 = time.perf_counter()
    subprocess.run([sys.executable, '-c', 'import torch, numpy'], check=True)
    report('shakespeare', 'sample.py, ten samples of 500 tokens: seconds in total; of which importing torch',
           f'{seconds:.1f}; {time.perf_counter() - t0:.1f}')


def baby_speed(work):
    """Time a small network's step without and with CUDA graphs."""
    B = 4 if tiny else 64
    for mode in (None, 'reduce-overhead'):
        reset()
        model = GPT(GPTConfig(**BABY, dropout=0.2, bias=False)).to(DEVICE)
        measure_step('baby_speed', f'baby, micro-batch {B}, mode={mode}', model, adamw(model), B, mode=mode)


def gpt2_speed(work):
    """Time GPT-2 124M and modern with Muon at micro-batches of 32 and 64, and larger networks."""
    for B in (32, 64):
        B = 2 if tiny else B
        reset()
        model = GPT(GPTConfig(**GPT2, bias=False)).to(DEVICE)
        measure_step('gpt2_speed', f'ours, 124M, micro-batch {B}', model, adamw(model), B)
        if peer:
            reset()
            model = nanogpt_model(GPT2)
            optimizer = torch.optim.AdamW(model.parameters(), 6e-4, (0.9, 0.95), fused=True)
            measure_step('gpt2_speed', f'nanoGPT, 124M, micro-batch {B}', model, optimizer, B)
        reset()
        model = GPT(GPTConfig(arch='modern', **GPT2)).to(DEVICE)
        measure_step('gpt2_speed', f'modern with Muon, 124M, micro-batch {B}', model, muon(model), B)
    for name, shape, B in (('350M', (24, 16, 1024), 24), ('1.5B', (48, 25, 1600), 8)):
        reset()
        B = 2 if tiny else B
        model = GPT(GPTConfig(**network(*shape, 1024, 50304), bias=False)).to(DEVICE)
        measure_step('gpt2_speed', f'ours, {name}, micro-batch {B}', model, adamw(model), B)


def mask_speed(work):
    """Time attention with masks, forward and backward, and a training step with documents."""
    B, H, K, T, D = 8, 16, 4, 1024, 64
    if tiny:
        B, H, K, T, D = 2, 4, 2, 64, 16
    doc_ids = (torch.rand(B, T, device=DEVICE) < 0.004).cumsum(dim=1)
    flex = attention if tiny else torch.compile(attention)
    make_block_mask = document_block_mask if tiny else torch.compile(document_block_mask)
    ways = {'causal': lambda q, k, v: attention(q, k, v, is_causal=True),
            'dense mask': lambda q, k, v: attention(q, k, v, document_mask(doc_ids)),
            'FlexAttention': lambda q, k, v: flex(q, k, v, make_block_mask(doc_ids))}
    for name, way in ways.items():
        if tiny and name == 'FlexAttention':
            continue
        reset()
        options = {'device': DEVICE, 'dtype': torch.bfloat16, 'requires_grad': True}
        q = torch.randn(B, H, T, D, **options)
        k = torch.randn(B, K, T, D, **options)
        v = torch.randn(B, K, T, D, **options)
        for i in range(25):
            if i == 5:
                synchronize(DEVICE)
                t0 = time.perf_counter()
            way(q, k, v).sum().backward()
        synchronize(DEVICE)
        ms = 1000 * (time.perf_counter() - t0) / 20
        peak = 0 if tiny else torch.cuda.max_memory_allocated() / 1e6
        report('mask_speed', f'{name}, {H} heads over {K}, {B} x {T}', f'{ms:.2f} ms, {peak:.0f} MB')
    B = 2 if tiny else 16
    times = []
    for doc_ids in (None, (torch.rand(B, GPT2['block_size'], device=DEVICE) < 0.004).cumsum(dim=1)):
        reset()
        model = GPT(GPTConfig(arch='llama', n_kv_head=1 if tiny else 4, **GPT2)).to(DEVICE)
        name = 'documents' if doc_ids is not None else 'causal'
        times.append(measure_step('mask_speed', f'a step of llama, 12 x 768, micro-batch {B}, {name}', model,
                                  adamw(model), B, doc_ids))
    report('mask_speed', 'a step with documents, times one without (at most 1.1)',
           f'{times[1] / times[0]:.3f}')


def bench(check, *flags):
    """Report the table of dev/bench.py."""
    process = start(os.path.join('dev', 'bench.py'), *flags, f'--out_dir={OUT}')
    for line in wait(process, check).splitlines():
        if line.startswith('|') and not line.startswith('|---'):
            report(check, 'bench.py', line)


def race(work):
    """Train 124M on books for ninety seconds each: nanoGPT, ours, modern with Muon."""
    flags = [f'--data_dir={data_dir}']
    if peer:
        flags.append(f'--peer={peer}')
    if tiny:
        flags.append('--max_iters=2')
    bench('race', '--what=race', *flags)


# each with the seconds that it takes on an H100: estimates
RIGHT = {losses: 70, sampling: 40, samplers: 20, resume: 60, documents: 30, graphs: 50, masks: 30}
FAST = {sampling_speed: 90, baby_speed: 50, shakespeare: 110, gpt2_speed: 60, mask_speed: 60, race: 420}


def main():
    checks = {check.__name__: (check, estimate) for check, estimate in (RIGHT | FAST).items()}
    halves = {'right': [check.__name__ for check in RIGHT], 'fast': [check.__name__ for check in FAST]}
    chosen = halves.get(only) or only.split(',')
    for name in chosen:
        if name not in checks:
            raise InputError(f"unknown check: {name}. Use right, fast, {', '.join(checks)}.")
    if not tiny and not torch.cuda.is_available():
        raise InputError("torch finds no GPU. Use --tiny=True to test this script on a CPU.")
    if not os.path.exists(os.path.join(data_dir, 'shakespeare_char', 'train.bin')):
        raise InputError(f"no dataset shakespeare_char in {data_dir}. Run: python prepare.py "
                         "shakespeare_char")
    here = environment('cpu' if tiny else 'cuda:0')
    report('machine', 'commit, torch, device, cuDNN',
           f"{here['commit']}, {here['torch']}, {here['device']}, {here.get('cudnn')}")
    for name in chosen:
        check, estimate = checks[name]
        if minutes and time.perf_counter() - START + estimate > 60 * minutes:
            report(name, 'skipped', 'no time')
            continue
        reset()
        torch.set_float32_matmul_precision('high')
        try:
            with tempfile.TemporaryDirectory() as work:
                check(work)
        except Exception as e:
            traceback.print_exc()
            report(name, 'FAILED', f'{type(e).__name__}: {str(e)[:500]}')
    write('\n| check | what | result |\n|---|---|---|')
    for row in rows:
        write('| ' + ' | '.join(row).replace('\n', ' ') + ' |')
    sys.exit(any(what == 'FAILED' for _, what, _ in rows))


main()
