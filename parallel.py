"""Where it runs: which device, with which arithmetic, in one process or in many. Scripts ask here and stay the same."""

import atexit
import gc
import importlib.util
import os
import re
import shutil
import signal
import sys
import threading
import time
from datetime import timedelta

import torch

import report
from configurator import fail, warn

CLEAR = '\r\033[K'  # what makes a terminal forget its last line
begin, parent = time.monotonic(), os.getppid()  # max_minutes counts from here: near enough to the start of the process
if tuple(int(n) for n in torch.__version__.split('+')[0].split('.')[:2]) < (2, 9):
    fail(f"torch {torch.__version__} is too old. flatgpt needs 2.9 or newer: pip install --upgrade torch")


class Processes:
    """This process among the others that `torchrun` started, or alone. rank, local_rank (on this machine), world_size,
    is_main (the one that prints and writes), device."""

    def __init__(self, device='auto', backend='auto', timeout=600):
        self.rank, self.local_rank, self.world_size, self.showing, self.sharded = 0, 0, 1, False, False
        self.many = 'RANK' in os.environ  # one process under torchrun counts as many: it is how people try it
        if self.many:
            try:
                self.rank, self.local_rank, self.world_size = (int(os.environ[k]) for k in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'))
            except (KeyError, ValueError):
                fail("RANK is set, but not LOCAL_RANK and WORLD_SIZE. launch with torchrun, or unset RANK")
        self.is_main = self.rank == 0
        self.device, self.why_device = choose_device(device, self.local_rank, self.many)
        if backend not in ('auto', 'nccl', 'gloo', 'mpi', 'ucc', 'xccl'):
            fail(f"no such backend ({backend}). use --backend=auto, nccl (GPUs) or gloo (CPUs)")
        if not 0 < timeout < 2**30:  # it is needed before the other knobs are looked at
            fail(f"ddp_timeout is out of range ({timeout}). use a number of seconds above 0 and below {2**30:,}")
        if self.device.type != 'cuda' and backend == 'nccl':
            backend = 'auto'  # nanoGPT's default, which its users spell out; it means GPUs and there are none here
        if self.many:
            import torch.distributed as dist
            # gloo beside nccl: what the hosts tell each other (any()) travels over CPU memory and waits for no GPU
            auto = 'cpu:gloo,cuda:nccl' if self.device.type == 'cuda' and dist.is_nccl_available() else 'gloo'  # Windows has no nccl
            if backend in ('mpi', 'ucc', 'xccl') and not dist.is_backend_available(backend):
                fail(f"backend={backend}, but this torch was built without it. use --backend=auto, nccl (GPUs) or gloo (CPUs)")
            timeout = timedelta(seconds=timeout)
            # torchrun's store outlives a restart: without a name of its own, a new process may read the address of a dead one. The launchers
            # of several machines count their restarts apart; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 does the same
            try:
                store, rank, world_size = next(dist.rendezvous('env://', timeout=timeout))
                if os.environ.get('LOCAL_WORLD_SIZE') == os.environ['WORLD_SIZE']:
                    store = dist.PrefixStore('attempt' + os.environ.get('TORCHELASTIC_RESTART_COUNT', '0'), store)
                dist.init_process_group(auto if backend in ('auto', 'nccl') else backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            except (ValueError, RuntimeError) as e:
                fail(f"the processes do not find each other ({str(e).strip().splitlines()[0][:160]}). launch with torchrun, see the top of train.py, "
                     f"each with node 0's address and number of nodes, within ddp_timeout={timeout.total_seconds():g} s; or unset RANK", everywhere=True)
            self.dist = dist
            # all that gloo says of a lost peer names its transport; NCCL's words reach us where it raises, its own thread ends the process (not tried)
            explain('gloo/transport|Connection (closed|reset) by peer|Timed out waiting|ncclRemoteError|NCCL.*(remote process|[Tt]imeout|timed out|aborted)', 'lost contact with the other processes',
                    "what ended first says why. to go on: the same line with --init_from=resume; torchrun's --max-restarts does it by itself, with --init_from=auto", 5)
            # who ends early, with one line, leaves the group first: gloo's threads would end some of such processes by an abort, with another status
            atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())

    def print(self, *words):
        if self.is_main:
            try:
                print(CLEAR * self.showing, end='')
                self.showing = False
                print(*words, flush=True)
            except OSError as e:  # a full disk or a closed pipe must not end a run; log.csv has the numbers
                sys.stdout = open(os.devnull, 'w')
                warn(f"standard output is gone ({e.strerror}), the run goes on without it")

    def live(self, text):
        """Show `text` as the last line of a terminal, until the next one is shown or something is printed; a pipe or a file gets nothing."""
        if self.is_main and sys.stdout.isatty():
            try:
                print(CLEAR + text[:shutil.get_terminal_size().columns - 1], end='', flush=True)
                self.showing = True
            except OSError:  # print() will tell
                pass

    def ticker(self, what, start=0, unit='batches'):
        """tick(done, n), to be called as work goes on from `start`: shows how far it is, five times a second at most."""
        begun = shown = time.monotonic()

        def tick(done, n):
            nonlocal shown
            if (now := time.monotonic()) > shown + 0.2:
                shown = now
                self.live(f"{what}: {done:,} of {n:,} {unit}, {done / n:.0%}, {report.duration((now - begun) * (n - done) / (done - start))} left")
        return tick

    def divide(self, steps, total_batch_size, batch_size, block_size):
        """(how many of an iteration's micro-batches are this process's, or a problem to report): `steps` micro-batches over all
        processes, or as many as make total_batch_size tokens."""
        n = self.world_size
        if total_batch_size:
            tokens = batch_size * block_size * n
            if total_batch_size % tokens == 0:
                return total_batch_size // tokens, None
            low = max(1, total_batch_size // tokens) * tokens
            return None, (f"total_batch_size={total_batch_size} is not a multiple of batch_size x block_size x processes = {batch_size} x "
                          f"{block_size} x {n} = {tokens}. nearest: {low} or {low + tokens}")
        if steps % n == 0:
            return steps // n, None
        low = max(1, steps // n) * n
        return None, (f"gradient_accumulation_steps={steps} counts over all processes and is not a multiple of their number {n}. "
                      f"nearest: {low} or {low + n}")

    def place(self, model, shard='none', shard_size=None, dtype='float32'):
        """Put `model`, whole on the CPU in every process, onto the device: with shard='full' only this process's share of it, so that
        before it computes, each block is gathered in `dtype`, and forgotten afterwards (FSDP, https://arxiv.org/abs/2304.11277)."""
        self.sharded = shard == 'full'
        if not self.sharded:
            return model.to(self.device)
        self.no_room = bool(self.any(no_room(4 * sum(p.numel() for p in model.parameters()), memory_of(self.device))))
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
        inside = shard_size or self.world_size  # neighbours in rank, which are one machine's
        mesh = (init_device_mesh(self.device.type, (self.world_size,)) if inside == self.world_size else
                init_device_mesh(self.device.type, (self.world_size // inside, inside), mesh_dim_names=('replicate', 'shard')))
        exact = dtype == 'float32' or (self.device.type == 'cpu' and model.config.norm == 'layernorm')  # which wants its gains in float32 there
        low = None if exact else getattr(torch, dtype)
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False))
        # embeddings and head stay in float32: what goes from block to block is as exact as in one process
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        register_fsdp_forward_method(model, 'generate')
        return model.to(self.device)

    def cannot_shard(self, shard, shard_size, deterministic):
        """Problems to report with train.py's knobs of these names."""
        n = self.world_size
        if shard != 'full':
            return [f"shard_size={shard_size} goes with --shard=full"] if shard_size else []
        if n == 1:
            return ["shard=full with one process: there is nobody to share with. launch with torchrun --nproc_per_node=N, or leave it out"]
        if deterministic:
            return ["deterministic=True with shard=full: its sums have no fixed order. leave one of them out"]
        if self.device.type == 'mps':
            return ["shard=full on mps. use --shard=none"]
        if shard_size and (n % shard_size or shard_size == 1):
            sizes = [size for size in range(2, n + 1) if n % size == 0]
            return [f"shard_size={shard_size} does not divide {n} processes into groups of two or more. use {', '.join(map(str, sizes))}"]
        return []

    def wrap(self, model, deterministic=False):
        """`model` with gradients averaged over the processes in backward; with `deterministic` TreeSum does that."""
        if not self.many or deterministic or self.sharded:
            return model
        from torch.nn.parallel import DistributedDataParallel
        # not to be sent around before every forward pass: the only buffer is a table, the same everywhere
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ['rope'])
        # the gradients lie in the buckets that are sent, not in a copy
        return DistributedDataParallel(model, device_ids=[self.device.index] if self.device.type == 'cuda' else None, gradient_as_bucket_view=True)

    def average_gradients(self, wrapped, now):
        """Whether the next forward and backward pass sends gradients, which it need not before the last micro-batch. To be called before both."""
        if self.sharded:  # what is not sent is kept whole; where that does not fit, each micro-batch's share is, for more sending
            wrapped.set_requires_gradient_sync(now or self.no_room)
        wrapped.require_backward_grad_sync = now

    def clip(self, model, max_norm):
        """The norm of the whole gradient, which is scaled down to max_norm."""
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return norm.full_tensor() if self.sharded else norm

    def gather(self, state, copy=False, known=None):
        """`state`, dicts and lists of tensors and plain values, as the main process can save it, with whole tensors on the CPU for shares;
        with `copy` all on the CPU, and its own. To be called by all; the others get a shell."""
        known = {} if known is None else known
        if isinstance(state, dict):
            return {name: self.gather(value, copy, known) for name, value in state.items()}
        if isinstance(state, (list, tuple)):
            return type(state)(self.gather(value, copy, known) for value in state)
        if not torch.is_tensor(state):
            return state
        if id(state) not in known:  # a tied one has two names
            divided = hasattr(state, 'full_tensor')
            whole = (state.full_tensor() if divided else state).detach()
            known[id(state)] = None if not self.is_main else whole.to('cpu', copy=copy and not divided) if copy or divided else whole
        return known[id(state)]

    def agree(self, facts):
        """End all processes with a line if `facts`, a dict of plain values, is not the same in all of them."""
        if not self.many:
            return
        everybody = [None] * self.world_size
        self.dist.all_gather_object(everybody, facts)
        for rank, theirs in enumerate(everybody):
            for name in facts:
                if theirs.get(name) != everybody[0].get(name):
                    fail(f"process {rank} has another {name} than process 0 ({theirs.get(name)}, there {everybody[0].get(name)}). start all of them with the same line, "
                         "the same config files and the same data")

    def sum(self, tensor):
        """`tensor`, summed over the processes, in place."""
        if self.many:
            self.dist.all_reduce(tensor)
        return tensor

    def any(self, number):
        """The largest `number` (an int) that a process has: what all of them then act on."""
        if not self.many:
            return number
        number = torch.tensor(int(number))
        self.dist.all_reduce(number, op=self.dist.ReduceOp.MAX)
        return number.item()

    def share(self, value):
        """The `value` that the main process has, a plain one."""
        if not self.many:
            return value
        values = [value]
        self.dist.broadcast_object_list(values, src=0, device=torch.device('cpu'))
        return values[0]

    def synchronize(self):
        """Wait until the device has done what it was told, so that a clock read next tells the truth."""
        if self.device.type in ('cuda', 'mps'):
            getattr(torch, self.device.type).synchronize()

    def memory(self):
        """Gigabytes that this process has taken at most: of the GPU's memory, or, on a CPU, of main memory. None where nobody counts."""
        if self.device.type == 'cuda':
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        if self.device.type == 'mps':
            return torch.mps.driver_allocated_memory() / 1e9
        if importlib.util.find_spec('resource') is None:  # Windows
            return None
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024) / 1e9

    def close(self):
        if self.many:
            gc.collect()  # DDP, if nobody refers to it any more, is a cycle
            self.dist.barrier()  # nobody leaves while another still talks
            self.dist.destroy_process_group()


    def environment(self, deterministic, **more):
        """What the bits of a result depend on besides the knobs; with `deterministic` the number of processes is not among it."""
        cpu = self.device.type == 'cpu'
        device = f"cpu ({torch.backends.cpu.get_cpu_capability()})" if cpu else torch.cuda.get_device_name(self.device) if self.device.type == 'cuda' else self.device.type
        return {'torch': str(torch.__version__), 'device': device, **({'threads': torch.get_num_threads()} if cpu else {}),
                **({} if deterministic else {'processes': self.world_size}), **more}


class Requests:
    """What is asked of a run while it trains. SIGTERM, SIGINT, SIGUSR1: save and stop; SIGUSR2: save and go on; max_minutes is up: stop;
    torchrun was killed: stop. A handler only takes a note, as it interrupts anything; the loop looks at it with asked()."""
    SAVE = 1

    def __init__(self, procs, max_minutes=None):
        self.procs, self.stop, self.save, self.agreed, self.first = procs, 0, False, 0, None
        self.parent = parent
        self.deadline = float('inf') if max_minutes is None else begin + 60 * max_minutes
        self.save_at, self.last, self.longest, self.writing = float('inf'), None, 0.0, 0.0
        for name in ('SIGINT', 'SIGTERM', 'SIGUSR1', 'SIGUSR2'):
            if hasattr(signal, name):  # Windows lacks the last two
                signal.signal(getattr(signal, name), self.on_save if name == 'SIGUSR2' else self.on_stop)

    def on_save(self, number, frame):
        self.save = True

    def on_stop(self, number, frame):
        # asked twice, it ends at once. But a cluster may signal torchrun and us together, and torchrun passes its own on
        if self.first and time.monotonic() > self.first + 2 * self.procs.many:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.stop, self.first = self.stop or 128 + number, self.first or time.monotonic()

    def asked(self):
        """The same in all processes: 0 (go on), SAVE, or the exit status to stop with, 128 + the signal's number; 256 more if it is the clock."""
        if self.agreed:
            return self.agreed
        now = time.monotonic()
        self.longest, self.last = max(self.longest, now - (self.last or now)), now
        if not self.stop and now + 2 * (self.longest + self.writing) > self.deadline:  # an iteration and the saving still have to end in time
            self.stop = 256 + 128 + signal.SIGTERM
        if not self.stop and self.procs.many and os.getppid() != self.parent:  # nobody would end us any more
            self.stop = 128 + signal.SIGTERM
        number = self.procs.any(int(self.stop or self.SAVE * (self.save or now > self.save_at)))
        self.agreed = number if number > self.SAVE else 0
        return number

    def saved(self, again_in=float('inf')):
        """A checkpoint was written, or should be tried again in some seconds."""
        self.save, self.save_at = False, time.monotonic() + again_in


class TreeSum:
    """Gradients and loss, added in an order that depends on the number of micro-batches alone: a binary tree over them, its lower part
    in each process, its upper part between the processes. So any power of two of processes ends with the same bits."""

    def __init__(self, procs, model):
        self.procs, self.params, self.parts = procs, [p for p in model.parameters() if p.requires_grad], []

    def add(self, loss):
        """Take over the gradients of a micro-batch, and its loss."""
        level, vector = 0, torch.cat([p.grad.reshape(-1) for p in self.params] + [loss.detach().reshape(1).to(self.params[0].dtype)])
        for p in self.params:
            p.grad = None
        while self.parts and self.parts[-1][0] == level:  # as a binary counter carries
            level, vector = level + 1, self.parts.pop()[1] + vector
        self.parts.append((level, vector))

    def finish(self):
        """Give every parameter its gradient, the mean over the processes; returns that of the loss."""
        (_, vector), = self.parts
        self.parts, n, distance = [], self.procs.world_size, 1
        while distance < n:
            other, received, dist = self.procs.rank ^ distance, torch.empty_like(vector), self.procs.dist
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, vector, other), dist.P2POp(dist.irecv, received, other)]):
                work.wait()
            vector, distance = vector + received, 2 * distance  # a + b is b + a to the bit, so both have the same
        vector /= n  # a power of two: exact
        for p, grad in zip(self.params, vector[:-1].split([p.numel() for p in self.params])):
            p.grad = grad.view_as(p)
        return vector[-1].clone()


def make_deterministic(device):
    """The same bits for the same numbers, whatever the number of processes: torchrun gives each of several one thread, python all."""
    torch.set_num_threads(1)
    if device.type == 'cuda':
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def explain_out_of_memory(remedy):
    explain("can't allocate memory|not enough memory|out of memory", 'out of memory', remedy, 2)


def explain(pattern, what, remedy, status):
    """From now on an error in whose text `pattern` is found ends this process with one line and `status`."""
    def hook(kind, error, traceback, before=sys.excepthook):
        if not re.search(pattern, str(error)):
            return before(kind, error, traceback)
        reason = re.sub(r'^\[\S+\] ', '', str(error).strip().splitlines()[0])  # without the line of the source that gloo begins with
        print(f"error: {what} ({reason[:160]}). {remedy}", file=sys.stderr, flush=True)
        for thread in threading.enumerate():  # a checkpoint that is being written
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        os._exit(status)  # from here Python would make it 1
    sys.excepthook = hook


def choose_device(device, local_rank=0, many=False):
    """(torch.device, why) for 'auto', 'cpu', 'cuda', 'cuda:1', 'mps', ...; under torchrun each process takes a GPU of its own."""
    why = 'as asked'
    if device == 'auto':
        device, why = (('cuda', 'a GPU was found') if torch.cuda.is_available() else
                       ('mps', 'an Apple GPU was found') if torch.backends.mps.is_available() and not many else ('cpu', 'no GPU was found'))
    try:
        device = torch.device(device)
        if device.type not in ('cpu', 'cuda', 'mps'):  # torch knows the names of more than it was built for
            torch.zeros(1, device=device).item()
    except Exception:
        fail(f"no such device ({device}). use --device=auto, cpu, cuda, cuda:1 or mps")
    if device.type == 'cuda':
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = torch.device('cuda', local_rank if many else device.index or 0)  # torch.cuda.set_device wants a number
        if count == 0:
            fail("device=cuda, but torch finds no GPU. use --device=cpu, or install a torch built for your GPU's driver")
        if device.index >= count:
            fail(f"device=cuda:{device.index}, but this machine has {count} GPU{'s' * (count > 1)}. " +
                 (f"use --nproc_per_node={count}" if many else f"use --device=cuda:{count - 1} or less"), everywhere=True)
        torch.cuda.set_device(device)  # what asks for "the GPU" without a number shall mean this one
    if device.type == 'mps' and many:
        fail("device=mps under torchrun: processes cannot share an Apple GPU. use plain python, or --device=cpu")
    if device.type == 'mps' and not torch.backends.mps.is_available():
        fail("device=mps, but this is not a Mac with an Apple GPU. use --device=cpu")
    return device, why


def choose_dtype(dtype, device):
    """(name, why) of the dtype of matrix products; device None: on a GPU elsewhere. bfloat16 only where the hardware has it: elsewhere it is emulated, slower
    than float32, and torch.cuda.is_bf16_supported() says True all the same."""
    if dtype not in ('auto', 'float32', 'bfloat16', 'float16'):
        fail(f"no such dtype ({dtype}). use --dtype=auto, float32, bfloat16 or float16")
    if device is None:
        auto = ('bfloat16', 'as GPUs have it since 2020')
    elif device.type == 'cuda':
        has_bf16 = torch.cuda.get_device_capability(device)[0] >= 8
        if dtype == 'bfloat16' and not has_bf16:
            fail(f"dtype=bfloat16, but {torch.cuda.get_device_name(device)} lacks it. use --dtype=float16 or float32")
        auto = ('bfloat16', 'this GPU has it') if has_bf16 else ('float16', 'this GPU has no bfloat16')
    elif device.type == 'cpu':
        if dtype == 'float16':
            fail("dtype=float16, but CPUs only emulate it. use --dtype=float32 or bfloat16")
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        auto = ('bfloat16', 'this CPU has it') if has_bf16 else ('float32', 'this CPU has no bfloat16 instructions')
    else:
        if device.type == 'mps' and dtype != 'auto' and dtype != 'float32':
            fail(f"dtype={dtype}, but on Apple GPUs only float32 is right in every torch from 2.9 on. use --dtype=float32")  # pytorch issue 195910
        auto = ('float32', f'the safe one on {device.type}')
    return auto if dtype == 'auto' else (dtype, 'as asked')


def choose_compile(wish, device):
    """(True or False, why). 'auto' compiles on GPUs if Triton and a C compiler are there."""
    if wish not in (True, False, 'auto'):
        fail(f"no such value of compile ({wish}). use --compile=auto, True or False")
    if wish != 'auto':
        return wish, 'as asked'
    if device.type != 'cuda':
        return False, f'it seldom pays on {device.type}'
    if importlib.util.find_spec('triton') is None:
        return False, 'Triton is not installed'
    if not (os.environ.get('CC') or shutil.which('gcc') or shutil.which('clang') or shutil.which('cc')):
        return False, 'no C compiler was found'
    return True, 'a GPU and Triton are there'


def choose_loss_rows(wish, device, tokens, vocab_size, memory=None):
    """Of how many tokens at a time the logits shall be made, 0 for all: 'auto' wants chunks where all of them, in float32 with their
    gradient, would take more than an eighth of the memory, the device's unless told."""
    rows = max(1, 2 ** (26 if device.type == 'cpu' else 28) // vocab_size)  # large enough that the weights' gradient is not added too often
    return rows if wish is True or (wish == 'auto' and 10 * tokens * vocab_size > (memory or memory_of(device)) / 8 and tokens > rows) else 0


def no_room(gradients, memory):
    """Whether so many bytes of whole gradients are too many to be kept between micro-batches."""
    return gradients > memory / 8


def memory_of(device):
    """Bytes of memory that the device has, or, of a CPU, the machine."""
    if device.type == 'cuda':
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == 'mps':
        return torch.mps.recommended_max_memory()
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') if hasattr(os, 'sysconf') else 2**34  # Windows does not tell


def compiled_parts(model):
    """What torch.compile compiles: all of it, or, where blocks are gathered before they compute, each of these."""
    return model.transformer.h if hasattr(model, 'set_requires_gradient_sync') else [model]


def uncompile(model, why):
    for part in compiled_parts(model):
        part._compiled_call_impl = None
    return f'note: compile is off after all, {why}'


def compile_model(model, step, wish, **options):
    """Compile `model` in place (it keeps its name, and its parameters theirs) and prove it by step(), a first call. Returns a note,
    or None if all is well: with wish 'auto' a failure means that the model runs eagerly, with True it is an error."""
    for part in compiled_parts(model):
        part.compile(**options)
    try:
        step()
    except Exception as e:  # the compiler's failures have no common class
        if isinstance(e, torch.OutOfMemoryError):
            raise
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
        if wish is True:
            fail(f"compile=True, but torch.compile failed ({type(e).__name__}: {reason}). install a C++ compiler "
                 "(apt install g++) and, for a GPU, Triton; or use --compile=False", everywhere=True)
        model.zero_grad(set_to_none=True)  # it may have failed half-way through backward
        return uncompile(model, f'torch.compile failed ({reason})')
