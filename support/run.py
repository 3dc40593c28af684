"""The settled plan of a run."""

import dataclasses
import math
from types import SimpleNamespace

import torch

from dataset import Dataset
from model import GPTConfig
from support import checkpoint, devices
from support.evaluate import parse_eval_iters


# never taken from a checkpoint: paths, which may be a stranger's, and what belongs to this start
LAUNCH = ('out_dir', 'data_dir', 'wandb_log', 'device', 'dtype', 'compile', 'backend', 'ddp_timeout',
          'peak_flops', 'max_minutes', 'stop_val_loss', 'sample_prompts', 'shard')


@dataclasses.dataclass
class Run:
    """The settled plan of a run: what train.py and the files in support/ need to know besides the knobs."""
    knobs: dict  # settled: no 'auto', and None only where it means something
    kinds: dict  # {knob: its types}
    asked: dict  # as they were asked for; goes into checkpoints
    given: dict  # those that were set by a config file or a flag
    dist: object
    ckpt: dict = None  # the checkpoint to start from
    resuming: bool = False  # its run is continued
    branching: bool = False  # in another folder, as a run of its own
    changed: dict = dataclasses.field(default_factory=dict)  # {knob: (before, now)} that were given anew
    config: GPTConfig = None
    data: Dataset = None
    start_iter: int = 0
    best_val_loss: float = math.inf
    grad_accum_steps: int = 1  # micro-batches per iteration of one process
    tokens_per_iter: int = 0  # over all processes
    tokens_before: int = 0  # what the weights had seen when this run began
    samples_per_epoch: int = 1
    decay_start: int = 0  # iteration at which the learning rate begins to fall
    lrs: dict = dataclasses.field(default_factory=dict)  # the peaks that differ from learning_rate
    n_params: int = 0
    checkpoint_bytes: int = 0
    trained_on: dict = None  # what decides which samples an iteration sees
    environment: dict = None  # what the bits of a result depend on besides the knobs
    why: dict = None  # why a device, dtype, ... was chosen
    overview: list = None  # lines: dataset, model, batch, ...
    plan: str = ''  # the same with notes, for the console
    from_scratch: bool = True  # random weights

    @property
    def continues(self):
        """Whether out_dir's run is continued, rather than a new one begun."""
        return self.resuming and not self.branching

    @property
    def last_evaluation(self):
        """What the resumed checkpoint was found to be worth."""
        if not self.continues:
            return {}
        from support import resume
        return resume.last_evaluation(self.ckpt)

    @property
    def eval_windows(self):
        """How many windows of block_size tokens of each split an evaluation reads: {split: number}."""
        k = SimpleNamespace(**self.knobs)
        have = {split: tokens.n_windows(k.block_size) for split, tokens in self.data.splits.items()}
        batches, tokens = parse_eval_iters(k.eval_iters)
        wanted = batches * k.batch_size or have.get('val', have['train'])
        if tokens:
            wanted = max(1, tokens // k.block_size)
        return {split: min(wanted, n) for split, n in have.items()}

    def loss_divisor(self, it, micro_step):
        """What the mean loss of a micro-batch is divided by, so that they add up to the iteration's mean."""
        if not self.data.packed:
            return self.grad_accum_steps
        from support.masked_loss import loss_divisor
        return loss_divisor(self, it, micro_step)

    def loss_chunk_size(self, model):
        """Tokens at a time in the loss, if all logits would take much of the memory; else 0."""
        tokens, device = self.knobs['batch_size'] * self.knobs['block_size'], self.dist.device
        memory = devices.memory_of(device)
        size = devices.choose_loss_chunk_size(device, tokens, self.config.vocab_size, memory)
        if size:
            from support.chunked_loss import usable_on
            return size if usable_on(model, self.dist) else 0
        return 0

    def model_of_checkpoint(self):
        from support import resume
        return resume.model_of_checkpoint(self)

    def load_optimizer_state(self, optimizer, scaler):
        from support import resume
        resume.load_optimizer_state(self, optimizer, scaler)

    def state(self, it):
        """Its part of a checkpoint."""
        return {'tokenizer': self.data.tokenizer_state, 'trained_on': self.trained_on,
                'tokens': self.tokens_before + it * self.tokens_per_iter, 'environment': self.environment,
                'torch': str(torch.__version__), 'version': checkpoint.VERSION}
