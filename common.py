"""
What the scripts share: the device and its arithmetic, the other processes, a first step, files that are
written whole, what a run prints and records of its surroundings. Functions with arguments and results;
alone, in one process, those that talk to others do nothing.
"""

import contextlib
import csv
import errno
import gc
import io
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from configurator import error

if torch.__version__ < '2.9.0a0':
    error(f"torch {torch.__version__} is too old. flatgpt needs 2.9 or newer: pip install --upgrade torch")

# -----------------------------------------------------------------------------
# the device


def choose_device(device, local_rank=0):
    """'cpu', 'mps' or 'cuda:0' for 'auto' and the like. Under torchrun each process takes its own GPU."""
    if device == 'auto':
        device = 'cpu'
        if torch.backends.mps.is_available() and 'RANK' not in os.environ:
            device = 'mps'
        if torch.cuda.is_available():
            device = 'cuda'
    if not re.fullmatch(r'cpu|mps|cuda(:\d+)?', device):
        error(f"no such device ({device}). use --device=auto, cpu, cuda, cuda:1 or mps")
    if device == 'mps' and ('RANK' in os.environ or not torch.backends.mps.is_available()):
        error("device=mps is for one process on a Mac with an Apple GPU. use --device=cpu")
    if device.startswith('cuda'):
        index = int(device.partition(':')[2] or 0)
        if 'RANK' in os.environ:
            index = local_rank
        count = torch.cuda.device_count()
        if index >= count:
            error(f"torch finds {count} GPUs here (device=cuda:{index}). use --device=auto, torchrun with "
                  "--nproc_per_node=GPUS, or a torch that is built for the GPU's driver")
        device = f'cuda:{index}'
        torch.cuda.set_device(device)  # what asks for "the GPU" without a number gets this one
    return device


def has_bfloat16(device):
    """Whether the hardware has it. Elsewhere it is emulated, and slower than float32."""
    if device.startswith('cuda'):  # torch.cuda.is_bf16_supported() is True for emulation as well
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device == 'cpu':
        try:  # no public function tells
            return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        except AttributeError:
            return False
    return False


def choose_dtype(dtype, device):
    """The dtype of matrix products, a name. 'auto': bfloat16 where the hardware has it."""
    if dtype not in ('auto', 'float32', 'bfloat16', 'float16'):
        error(f"no such dtype ({dtype}). use --dtype=auto, float32, bfloat16 or float16")
    fallback = 'float16' if device.startswith('cuda') else 'float32'
    if dtype == 'auto':
        return 'bfloat16' if has_bfloat16(device) else fallback
    usable = ['float32']  # on Apple GPUs no more: https://github.com/pytorch/pytorch/issues/195910
    if device == 'cpu' or has_bfloat16(device):
        usable.append('bfloat16')
    if device.startswith('cuda'):
        usable.append('float16')
    if dtype not in usable:
        print0(f"note: {name_of(device)} has no {dtype}, {fallback} is used")
        return fallback
    return dtype


def choose_compile(compile, device):
    """Whether to call torch.compile. 'auto': on GPUs; on a CPU it seldom pays."""
    if compile not in (True, False, 'auto'):
        error(f"no such value of compile ({compile}). use --compile=auto, True or False")
    if compile == 'auto':
        return device.startswith('cuda')
    return compile


def autocast(device, dtype):
    """A context in which matrix products are made in `dtype`, a name."""
    if dtype == 'float32':
        return contextlib.nullcontext()
    return torch.autocast(device.partition(':')[0], getattr(torch, dtype))


def synchronize(device):
    """Wait until the device has done its work, so that a clock read next is right."""
    if device.startswith('cuda'):
        torch.cuda.synchronize(device)
    if device == 'mps':
        torch.mps.synchronize()


def name_of(device):
    if device.startswith('cuda'):
        return torch.cuda.get_device_name(device)
    if device == 'cpu':
        return f'cpu ({torch.backends.cpu.get_cpu_capability()})'
    return device


def memory_of(device):
    """Bytes of memory of the device; of a CPU this process's share of the machine's."""
    if device.startswith('cuda'):
        return torch.cuda.get_device_properties(device).total_memory
    if device == 'mps':
        return torch.mps.recommended_max_memory()
    if not hasattr(os, 'sysconf'):  # Windows
        return 2**34
    total = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return total // int(os.environ.get('LOCAL_WORLD_SIZE', 1))


def peak_memory(device):
    """Gigabytes that this process has used at most; None where nobody counts."""
    if device.startswith('cuda'):
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device == 'mps':
        return torch.mps.driver_allocated_memory() / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 1e9 if sys.platform == 'darwin' else used / 1e6  # bytes there, KiB elsewhere


def loss_chunk_size(device, n_tokens, vocab_size, compiled):
    """How many tokens' logits the loss holds at a time (GPT.set_loss_chunk_size); 0: all of them.

    Whole logits are a tenth faster, so they are cut only where they would take a third of the memory. The
    compiled loss keeps 4 bytes per logit (measured on an H100), the plain one logits, probabilities and
    gradient: 10.
    """
    bytes_per_logit = 4 if compiled else 10
    if bytes_per_logit * n_tokens * vocab_size < memory_of(device) / 3:
        return 0
    logits_at_once = 2**26 if device == 'cpu' else 2**28
    return min(n_tokens, max(1, logits_at_once // vocab_size))


# Dense bfloat16 matrix products in FLOP/s (float16 where there is no bfloat16), by the makers' data sheets.
# The first row whose words are all in the device's name counts. A float32 run is measured against the same
# number.
PEAK_FLOPS = {
    'b300': 2.25e15,
    'b200': 2.25e15,
    'h200 nvl': 835e12,
    'h200': 989e12,
    'h100 pcie': 756e12,
    'h100 nvl': 835e12,
    'h100': 989e12,
    'h800': 989e12,
    'gh200': 989e12,
    'a100': 312e12,
    'a800': 312e12,
    'a40': 149.7e12,
    'a10': 125e12,
    'l40s': 362e12,
    'l4': 121e12,
    'v100': 125e12,
    't4': 65e12,
    'rtx 5090': 209.5e12,
    'rtx 4090': 165.2e12,
    'rtx 3090': 71.2e12,
    'rtx a6000': 154.8e12,
    'mi300x': 1307e12,
}


def peak_flops_of(device):
    """FLOP/s of a GPU by the table above; None for one that it does not have."""
    if not device.startswith('cuda'):
        return None
    # 'NVIDIA H100 80GB HBM3' -> nvidia, h100, 80gb, hbm3
    words = set(re.split('[^a-z0-9]+', torch.cuda.get_device_name(device).lower()))
    if words & {'laptop', 'ti', 'super', 'd', 'max', 'mig'}:  # variants with other peaks: "4090 D"
        return None
    for key, peak in PEAK_FLOPS.items():
        if words.issuperset(key.split()):
            return peak
    return None


# -----------------------------------------------------------------------------
# the other processes


def choose_backend(backend, device):
    """For torch.distributed. gloo stands beside nccl: numbers of the hosts travel over CPU memory and wait
    for no GPU. nccl is nanoGPT's default, which its users spell out: on CPUs it is taken for gloo."""
    if backend not in ('auto', 'nccl', 'gloo'):
        error(f"no such backend ({backend}). use --backend=auto, nccl (GPUs) or gloo (CPUs)")
    if backend != 'gloo' and device.startswith('cuda') and torch.distributed.is_nccl_available():
        return 'cpu:gloo,cuda:nccl'
    return 'gloo'


def attempt_store(timeout):
    """The store at which torchrun's processes meet, with a name for each restart: it outlives a restart,
    and a new process may otherwise read the address of a dead one. Several machines count their restarts
    apart."""
    store, _, _ = next(torch.distributed.rendezvous('env://', timeout=timeout))
    if os.environ.get('LOCAL_WORLD_SIZE') == os.environ['WORLD_SIZE']:
        attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
        store = torch.distributed.PrefixStore(f'attempt{attempt}', store)
    return store


def print0(text):
    """Print in the first process. A closed pipe or a full disk does not end the run."""
    if os.environ.get('RANK', '0') != '0':
        return
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, 'w')  # at its end Python would try again, and change the exit status


def all_reduce_any(flag):
    """Whether `flag` is true in any process. Over gloo: no wait for a GPU."""
    if not torch.distributed.is_initialized():
        return bool(flag)
    number = torch.tensor(int(bool(flag)))
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
    return number.item() > 0


def all_reduce_sum(tensor):
    """`tensor`, summed over the processes, in place."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(tensor)
    return tensor


def mean_over_processes(tensor):
    """A new tensor."""
    if not torch.distributed.is_initialized():
        return tensor.clone()
    return all_reduce_sum(tensor.clone()) / torch.distributed.get_world_size()


def check_same(facts):
    """error() if the dict of plain values `facts` differs between processes."""
    if not torch.distributed.is_initialized():
        return
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, facts)
    for rank, theirs in enumerate(everyone):
        for name in facts:
            if theirs[name] != everyone[0][name]:
                error(f"{name} is {theirs[name]} in process {rank} and {everyone[0][name]} in process 0. "
                      "start all of them with the same command, config files and data")


def all_finite(tensors):
    """Whether all numbers of the tensors are finite, in all processes. Waits for the device once."""
    finite = []
    for tensor in tensors:
        if hasattr(tensor, 'to_local'):  # FSDP's DTensor
            tensor = tensor.to_local()
        finite.append(torch.isfinite(tensor.detach()).all())
    return not all_reduce_any(not torch.stack(finite).all().item())


def clip_grad_norm(model, max_norm):
    """The norm of the whole gradient, 0-dim, which is then scaled down to max_norm; 0: it is only
    measured."""
    if max_norm > 0:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    else:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
    if hasattr(norm, 'full_tensor'):
        norm = norm.full_tensor()
    return norm


def full_state_dict(state):
    """The dict `state` as the first process can save it: whole tensors on the CPU, None in the others. A
    tensor that stands in it twice stays one. All processes call it, as they gather what FSDP has
    divided."""
    found = {}  # id of a tensor: what became of it

    def gather(value):
        if isinstance(value, dict):
            return {name: gather(part) for name, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [gather(part) for part in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in found:
            whole = value.full_tensor() if hasattr(value, 'full_tensor') else value
            is_first = os.environ.get('RANK', '0') == '0'
            found[id(value)] = whole.detach().cpu() if is_first else None
        return found[id(value)]

    return gather(state)


def shard_model(model, shard, dtype, device):
    """FSDP (https://arxiv.org/abs/2304.11277) in place, of a model that is whole on the CPU: weights,
    gradients and optimizer state are divided among `shard` processes, neighbours in rank; a block is
    gathered in `dtype` before it computes. With fewer sharers than processes there are copies of that
    (hybrid)."""
    if dtype == 'float16':
        error("dtype=float16 does not work with shard: its gradients cannot be scaled. use --dtype=bfloat16")
    world_size = torch.distributed.get_world_size()
    device_type = device.partition(':')[0]
    mesh = init_device_mesh(device_type, (world_size // shard, shard), mesh_dim_names=('replicate', 'shard'))
    if shard == world_size:
        mesh = mesh['shard']
    # on a CPU LayerNorm wants its gains in float32
    exact = dtype == 'float32' or (device == 'cpu' and model.config.norm == 'layernorm')
    policy = MixedPrecisionPolicy(None if exact else getattr(torch, dtype), torch.float32,
                                  cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # embeddings and head stay in float32: the residual stream is as exact as in one process
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(model, 'generate')


def warm_up(model, batch_size, block_size, with_doc_ids, ctx, device, optional):
    """Forward and backward on zeros, whose gradients are dropped: compiling is not on the clock, and too
    large a batch shows at once. optional: where the compiler fails in one of them, all processes go on
    without it. Returns whether all is well."""
    x = torch.zeros(batch_size, block_size, dtype=torch.long, device=device)
    y = torch.zeros(batch_size, block_size, dtype=torch.long, device=device)
    doc_ids = torch.zeros(batch_size, block_size, dtype=torch.long, device=device) if with_doc_ids else None
    failure = None
    try:
        with ctx:
            loss = model(x, y, doc_ids, return_logits=False)[1]
        loss.backward()
    except torch.OutOfMemoryError as e:
        e.add_note("half the batch_size with twice the gradient_accumulation_steps trains the same in less "
                   "memory; so does --activation_checkpointing=True")
        raise
    except Exception as e:  # the compiler's failures have no common class
        if not optional:
            raise
        failure = f'{type(e).__name__}: {first_line(e)}'
    model.zero_grad(set_to_none=True)
    failed = optional and all_reduce_any(failure is not None)
    if failed:
        why = failure or 'in another process'
        print0(f"note: torch.compile failed, so the model is not compiled ({why})")
        torch.compiler.set_stance('force_eager')
    gc.collect()
    if not failed:  # the compiler leaves a million objects, which would be searched for garbage again
        gc.freeze()
    return not failed


# -----------------------------------------------------------------------------
# files


@contextlib.contextmanager
def replacing(path):
    """A binary file, open for writing, that takes the place of `path` once this block has written it,
    flushed to the disk; it is removed if the block fails. So `path` is whole at every instant."""
    temporary = path + '.tmp'
    if os.path.lexists(temporary):
        os.remove(temporary)  # which may be a link to anywhere
    try:
        with open(temporary, 'xb') as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.lexists(temporary):
            os.remove(temporary)
        raise
    sync_folder(os.path.dirname(os.path.abspath(path)))


def sync_folder(folder):
    """Flush the names in a folder to the disk. Network mounts may answer EINVAL or EBADF, which databases
    ignore as well."""
    if not hasattr(os, 'O_DIRECTORY'):  # Windows
        return
    fd = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(fd)


def write_whole(path, content):
    """Write `content` (bytes) to `path`, whole or not at all."""
    with replacing(path) as f:
        f.write(content)


def write_json(path, value):
    """Write a dict as JSON, whole or not at all. JSON has no nan and no infinity: they become null. A full
    disk is a warning; returns whether it was written."""
    plain = json.loads(json.dumps(value), parse_constant=lambda name: None)
    try:
        write_whole(path, json.dumps(plain, indent=1, ensure_ascii=False).encode('utf-8', 'backslashreplace'))
    except OSError as e:
        print0(f"warning: {path} could not be written ({e.strerror})")
        return False
    return True


def read_json(path):
    """The dict in a JSON file; {} if there is none that can be read."""
    try:
        with open(path, encoding='utf-8-sig') as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_rows(path):
    """(columns, rows as dicts of texts) of a .csv file; a row that was cut short is left out."""
    with open(path, newline='', encoding='utf-8') as f:
        reader = csv.DictReader(f)
        rows = []
        for row in reader:
            if None not in row and None not in row.values():
                rows.append(row)
        return list(reader.fieldnames or []), rows


def write_rows(path, columns, rows):
    """Write a .csv file anew, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


def append_row(path, row):
    """Add a row ({column: number}) to a .csv file, whose columns grow where the row has new ones. A full
    disk is a warning."""
    try:
        columns = []
        if os.path.exists(path):
            with open(path, newline='', encoding='utf-8') as f:
                columns = next(csv.reader(f), [])
        new_columns = [name for name in row if name not in columns]
        if new_columns:
            rows = read_rows(path)[1] if columns else []
            write_rows(path, columns + new_columns, [*rows, row])
            return
        line = io.StringIO()
        csv.DictWriter(line, columns, lineterminator='\n').writerow(row)
        size = os.path.getsize(path)
        try:
            with open(path, 'ab') as f:
                f.write(line.getvalue().encode())
        except OSError:
            os.truncate(path, size)  # no half rows
            raise
    except OSError as e:
        print0(f"warning: {path} could not be written ({e.strerror}), the run goes on")


# -----------------------------------------------------------------------------
# what a run prints and records


def first_line(exception):
    """The first line of an exception's text that says something."""
    lines = [line.strip() for line in str(exception).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(exception).__name__


def environment(device):
    """What a result depends on besides the knobs, a dict: versions, machine, commit."""
    found = {
        'command': shlex.join(sys.argv),
        'python': platform.python_version(),
        'torch': str(torch.__version__),
        'machine': platform.node(),
        'system': platform.platform(),
        'device': name_of(device),
        'processes': int(os.environ.get('WORLD_SIZE', 1)),
        'commit': commit(),
    }
    if device == 'cpu':
        found['threads'] = torch.get_num_threads()
    if device.startswith('cuda'):
        found['cuda'] = torch.version.cuda
        found['cudnn'] = torch.backends.cudnn.version()  # 91900 is 9.19.0
    return found


def commit():
    """The commit of this code, with '-dirty' if a file was changed since; None outside of git."""
    command = ['git', '-C', os.path.dirname(os.path.abspath(__file__)), 'describe', '--always', '--dirty',
               '--abbrev=40', '--exclude=*']
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # no git here
        return None


def format_duration(seconds):
    """'45s', '12m05s', '3h20m'"""
    seconds = round(seconds)
    if seconds < 60:
        return f'{seconds}s'
    if seconds < 3600:
        return f'{seconds // 60}m{seconds % 60:02}s'
    return f'{seconds // 3600}h{seconds % 3600 // 60:02}m'


def format_count(n):
    """950, 33.1K, 25.0M, 45.0B"""
    for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'K')):
        if n >= size:
            return f'{n / size:.1f}{letter}'
    return str(n)


def print_plan(config, given, data, model, n_params, device, dtype, compiled, grad_accum_steps, world_size,
               max_iters, lr_decay_iters, min_lr):
    """What was overridden, then a line each on the dataset, the model, the batch, the budget, the schedule
    and the system, and the loss of a guess."""
    block_size = model.config.block_size
    batch_size = config['batch_size']
    overrides = [f"{name}={config[name]}" for name in config if name in given]
    print0(f"overrides: {', '.join(overrides) or 'none'}")

    tokens_per_iter = batch_size * block_size * grad_accum_steps * world_size
    tokens_per_epoch = data.train.n_targets(block_size)
    validation = data.val.summary(block_size) if data.val else 'none, so no best checkpoint'
    iterations_per_epoch = tokens_per_epoch / tokens_per_iter
    print0(f"dataset: {data.name}, {data.train.summary(block_size)}, {iterations_per_epoch:,.1f} iterations "
           f"per epoch; validation: {validation}")

    network = model.config
    shape = f"n_layer {network.n_layer}, n_head {network.n_head}, n_embd {network.n_embd}"
    if network.n_kv_head != network.n_head:
        shape += f", n_kv_head {network.n_kv_head}"
    print0(f"model: {network.arch}, {shape}, block_size {block_size}, vocab_size {network.vocab_size}: "
           f"{n_params:,} parameters, {model.flops_per_token() / 1e6:,.1f} MFLOPs per token")

    print0(f"batch: {tokens_per_iter:,} tokens per iteration = {batch_size} sequences x {block_size} tokens "
           f"x {grad_accum_steps} micro-batches x {world_size} processes")

    tokens = max_iters * tokens_per_iter
    epochs = tokens / tokens_per_epoch
    print0(f"budget: {max_iters:,} iterations = {format_count(tokens)} tokens = {epochs:.2f} epochs = "
           f"{tokens / n_params:.1f} tokens per parameter")

    peaks = f"learning_rate {config['learning_rate']:g}"
    for name in ('matrix_lr', 'embedding_lr', 'head_lr'):
        if config[name] is not None:
            peaks += f", {name} {config[name]:g}"
    schedule = f"constant, {peaks}"
    if config['decay_lr']:
        warmup = config['warmup_iters']
        schedule = (f"{config['lr_schedule']}, {peaks}, warm-up {warmup:,} iterations "
                    f"({warmup / max(1, max_iters):.1%} of the run)")
        if config['lr_schedule'] != 'constant':
            schedule += f", {min_lr:g} at iteration {lr_decay_iters:,}"
    print0(f"schedule: {schedule}")

    print0(f"system: {name_of(device)} ({device}), {dtype}, compile {'on' if compiled else 'off'}, "
           f"torch {torch.__version__}")
    cudnn = torch.backends.cudnn.version() if device.startswith('cuda') else None
    if cudnn and cudnn <= 91500 and torch.cuda.get_device_capability(device)[0] == 9:
        print0(f"note: cuDNN {cudnn} is not newer than 9.15.0, so attention is a third slower on this GPU "
               "than with a newer one, which a newer torch brings")
    print0(f"a guess has the loss ln({network.vocab_size}) = {math.log(network.vocab_size):.2f}")
