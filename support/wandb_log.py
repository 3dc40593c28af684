"""The same rows as in log.csv, for Weights & Biases."""

import importlib.util

from configurator import fail, warn
from support.errors import first_line

# the losses have nanoGPT's names
NAMES = {'loss': 'train/batch_loss', 'train_loss': 'train/loss', 'val_loss': 'val/loss',
         'perplexity': 'val/perplexity', 'bpb': 'val/bpb', 'hellaswag': 'val/hellaswag', 'core': 'val/core'}
BEST = {'train_loss': 'min', 'val_loss': 'min', 'perplexity': 'min', 'bpb': 'min', 'hellaswag': 'max',
        'core': 'max'}


def wandb_problems():
    # the folder wandb/ that runs leave is no package
    if getattr(importlib.util.find_spec('wandb'), 'origin', None) is not None:
        return []
    return ["wandb_log=True, but wandb is not installed. pip install wandb, or leave it out: log.csv has "
            "the same numbers"]


class WandbLog:

    def __init__(self, knobs, run_id):
        import wandb
        try:
            self.run = wandb.init(project=knobs['wandb_project'], name=knobs['wandb_run_name'],
                                  config=knobs, id=run_id, resume='allow')
        except wandb.Error as e:
            fail(f"wandb does not start ({first_line(e)}). wandb login, WANDB_MODE=offline, or "
                 "leave wandb_log out", everywhere=True)
        self.id = self.run.id
        self.run.define_metric('*', step_metric='iter')
        for name, best in BEST.items():  # in its tables the best value, not the last
            self.run.define_metric(NAMES[name], step_metric='iter', summary=best)

    def log(self, row):
        self.tell(lambda run: run.log({NAMES.get(name, name): value for name, value in row.items()}))

    def end(self, **summary):
        """What wandb shows of the run in its tables."""
        self.tell(lambda run: run.summary.update(summary))

    def tell(self, function):
        """function(run), as long as wandb's own process lives."""
        if self.run is None:
            return
        try:
            function(self.run)
        except Exception as e:  # whatever it is: log.csv has the same numbers
            reason = first_line(e)
            warn(f"wandb is gone ({reason}), the run continues without it")
            self.run = None
