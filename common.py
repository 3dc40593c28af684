"""
What the scripts share: the device and its arithmetic, the other processes, a first step, files that are
written whole, what a run prints and records of its surroundings. Functions with arguments and results;
alone, in one process, those that talk to others do nothing.
"""

import contextlib
import csv
import gc
import io
import json
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
    if device == 'cuda' or (device.startswith('cuda') and 'RANK' in os.environ):
        device = f'cuda:{local_rank}'
    try:
        torch.zeros(1, device=device)
        if device.startswith('cuda'):
            torch.cuda.set_device(device)  # what asks for "the GPU" without a number gets this one
    except (RuntimeError, AssertionError) as e:  # AssertionError: torch is built without CUDA
        error(f"this device does not work ({device}: {first_line(e)}). use --device=auto, cpu, cuda, cuda:1 "
              "or mps, and torchrun with --nproc_per_node=GPUS")
    return device


def has_bfloat16(device):
    """Whether the hardware has it. Elsewhere it is emulated, and slower than float32."""
    if device.startswith('cuda'):  # torch.cuda.is_bf16_supported() is True for emulation as well
        return torch.cuda.get_device_capability(device)[0] >= 8
    try:  # no public function tells
        return device == 'cpu' and (
            torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    except AttributeError:
        return False


def choose_dtype(dtype, device):
    """The dtype of matrix products, a name. 'auto': bfloat16 where the hardware has it."""
    fallback = 'float16' if device.startswith('cuda') else 'float32'
    if dtype == 'auto':
        return 'bfloat16' if has_bfloat16(device) else fallback
    usable = {
        'float32': True,
        'bfloat16': device == 'cpu' or has_bfloat16(device),
        'float16': device.startswith('cuda'),  # not on Apple GPUs: github.com/pytorch/pytorch/issues/195910
    }
    if dtype not in usable:
        error(f"no such dtype ({dtype}). use --dtype=auto, float32, bfloat16 or float16")
    if not usable[dtype]:
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
    if device != 'cpu':
        torch.accelerator.synchronize()


def name_of(device):
    if device.startswith('cuda'):
        return torch.cuda.get_device_name(device)
    if device == 'cpu':
        return f'cpu ({torch.backends.cpu.get_cpu_capability()})'
    return device


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
    """How many tokens' logits the loss holds at a time (model.loss_chunk_size); 0: all of them.

    Whole logits are a tenth faster, so they are cut only where they would take a third of the memory. The
    compiled loss keeps 4 bytes per logit (measured on an H100), the plain one logits, probabilities and
    gradient: 10.
    """
    if device.startswith('cuda'):
        memory = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, 'sysconf'):
        memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
        memory //= int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    else:  # Windows
        memory = 2**34
    bytes_per_logit = 4 if compiled else 10
    if bytes_per_logit * n_tokens * vocab_size < memory / 3:
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
    return all_reduce_sum(tensor.clone()) / int(os.environ.get('WORLD_SIZE', 1))


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
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
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
    """Run forward and backward on zeros and drop the gradients: compiling is not on the clock, and too large
    a batch shows at once.

    optional: if the compiler fails in any process, set the stance of all of them to 'force_eager' and return
    False; otherwise return True. Not covered: one process alone fails in backward or, with FSDP, in forward.
    The others then wait for it in a collective until their timeout ends the run.
    """
    x = torch.zeros(batch_size, block_size, dtype=torch.long, device=device)
    y = torch.zeros_like(x)
    doc_ids = torch.zeros_like(x) if with_doc_ids else None

    def forward():
        with ctx:
            return model(x, y, doc_ids, return_logits=False)[1]

    def backward():
        loss.backward()

    failed = False
    for step in (forward, backward):
        why = None
        try:
            loss = step()
        except torch.OutOfMemoryError as e:
            e.add_note("half the batch_size with twice the gradient_accumulation_steps trains the same in "
                       "less memory; so does --activation_checkpointing=True")
            raise
        except Exception as e:  # the compiler's failures have no common class
            if not optional:
                raise
            why = first_line(innermost(e))
        # agree before backward, where DDP's processes wait for each other's gradients
        failed = optional and all_reduce_any(why)
        if failed:
            break
    model.zero_grad(set_to_none=True)
    gc.collect()
    if failed:
        print0(f"note: torch.compile failed, so the model is not compiled ({why or 'in another process'})")
        torch.compiler.set_stance('force_eager')
        return False
    gc.freeze()  # the compiler leaves a million objects, which would be searched for garbage again
    return True


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
    if os.name == 'posix':  # flush the new name as well
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        with contextlib.suppress(OSError):  # not on each network mount
            os.fsync(folder)
        os.close(folder)


def write_whole(path, content):
    """Write `content` (bytes) to `path`, whole or not at all."""
    with replacing(path) as f:
        f.write(content)


def write_json(path, value):
    """Write a dict as JSON, whole or not at all. JSON has no nan and no infinity: they become null. A full
    disk is a warning; returns whether it was written."""
    plain = json.loads(json.dumps(value), parse_constant=lambda name: None)
    try:
        write_whole(path, json.dumps(plain, indent=1).encode())
    except OSError as e:
        print0(f"warning: {path} could not be written ({e.strerror})")
        return False
    return True


def check_not_lfs_pointer(path):
    """Raise ValueError if a file is what git leaves in its place when git-lfs is not installed."""
    with open(path, 'rb') as f:
        is_pointer = f.read(100).startswith(b'version https://git-lfs')
    if is_pointer:
        raise ValueError(f"{path} is a pointer of git-lfs, not the file itself. Download it: git lfs pull")


def read_json(path):
    """The dict in a JSON file; {} if there is none that can be read."""
    try:
        with open(path, encoding='utf-8-sig') as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_rows(path):
    """(columns, rows as dicts of texts) of a .csv file, if there is one; a row that was cut short is left
    out."""
    if not os.path.exists(path):
        return [], []
    with open(path, newline='', encoding='utf-8') as f:
        reader = csv.DictReader(f)
        rows = [row for row in reader if None not in row and None not in row.values()]
        return reader.fieldnames or [], rows


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
        if not set(row).issubset(columns):
            columns, rows = read_rows(path)
            write_rows(path, list(dict.fromkeys([*columns, *row])), [*rows, row])
            return
        size = os.path.getsize(path)
        try:
            with open(path, 'a', newline='', encoding='utf-8') as f:
                csv.DictWriter(f, columns, lineterminator='\n').writerow(row)
        except OSError:
            os.truncate(path, size)  # the next row would go on with the half one
            raise
    except OSError as e:
        print0(f"warning: {path} could not be written ({e.strerror}), the run goes on")


# -----------------------------------------------------------------------------
# what a run prints and records


def first_line(exception):
    """The first line of an exception's text that says something."""
    lines = str(exception).strip().splitlines()
    return lines[0][:300] if lines else type(exception).__name__


def innermost(exception):
    """Return the exception that the chain of `exception` began with: of torch.compile's, the cause."""
    while exception.__cause__ or exception.__context__:
        exception = exception.__cause__ or exception.__context__
    return exception


def environment(device):
    """What a result depends on besides the knobs, a dict: versions, machine, commit."""
    return {
        'command': shlex.join(sys.argv),
        'python': platform.python_version(),
        'torch': str(torch.__version__),
        'cuda': torch.version.cuda,
        'cudnn': torch.backends.cudnn.version(),  # 91900 is 9.19.0
        'machine': platform.node(),
        'system': platform.platform(),
        'device': name_of(device),
        'threads': torch.get_num_threads(),
        'processes': int(os.environ.get('WORLD_SIZE', 1)),
        'commit': commit(),
    }


def run_flags(out_dir, data_dir):
    """Return the flags, quoted for a shell, that name a run and the folder of its data, if one was given."""
    flags = f'--out_dir={shlex.quote(out_dir)}'
    if data_dir is not None:
        flags += f' --data_dir={shlex.quote(data_dir)}'
    return flags


def commit():
    """The commit of this code, with '-dirty' if a file was changed since; None outside of git."""
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip() or None
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
