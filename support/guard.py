"""Updates whose loss or gradient is not finite are skipped; after ten in a row the run gives up."""

import torch

from configurator import say
from optim import to_local
from support.checkpoint import NUMBERED, command_line, numbered, replay_line


class Guard:
    """Makes the updates. The device decides whether one is skipped, so the host need not wait; what was
    skipped is kept there until report()."""
    max_in_a_row = 10

    def __init__(self, optimizer, scaler, stop, dist, run):
        self.optimizer, self.scaler, self.stop, self.dist, self.run = optimizer, scaler, stop, dist, run
        self.it = -1  # of the last step
        # knobs that are changed on a resume may be the cure: they get all ten attempts
        in_a_row = run.ckpt.get('bad_steps', 0) if run.resuming else 0
        self.in_a_row = torch.tensor(float(in_a_row), device=dist.device)
        # how many since the report; iteration, loss, norm of the first
        self.seen = torch.zeros(4, device=dist.device)

    def step(self, it, loss, norm):
        """The update of iteration `it`, whose loss and gradient norm (0-dim tensors) are the same in all
        processes."""
        self.it = it
        bad = ~torch.isfinite(loss + norm) | (self.in_a_row >= self.max_in_a_row)
        if self.optimizer.defaults.get('fused'):
            # torch's fused optimizers, and Muon, skip what has this set
            self.optimizer.found_inf = bad.float()
            self.optimizer.step()
        elif not bad.item():
            self.optimizer.step()
        if self.scaler.is_enabled():  # float16: skipping is normal while it looks for its scale
            self.scaler.update()
            bad &= self.scaler._get_scale_async() < 1  # get_scale() would wait for the device
        self.in_a_row = (self.in_a_row + 1) * bad
        first = torch.stack([self.seen[0], torch.full_like(norm, it), loss, norm])
        self.seen = torch.where(bad & (self.seen[0] == 0), first, self.seen)
        self.seen[0] += bad

    def skipped(self):
        """(how many were skipped since the last call, how many in a row until now, iteration, loss and
        gradient norm of the first). Waits for the device."""
        (n, it, loss, norm), in_a_row = self.seen.tolist(), int(self.in_a_row)
        self.seen.zero_()
        return int(n), in_a_row, int(it), loss, norm

    def report(self):
        """Print which updates were skipped, and how to see the first of them again; give up if it does not
        end."""
        n, in_a_row, it, loss, norm = self.skipped()
        if n:
            self.dist.print(f"note: the update of iteration {it} was skipped, its loss is {loss:.4g}, its "
                            f"gradient norm {norm:.4g} ({n} skipped since the last line, {in_a_row} in a "
                            f"row). that iteration again: {replay_line(self.run, it)}")
        if in_a_row >= self.max_in_a_row and not self.stop.gave_up:  # told once
            self.give_up(f"{in_a_row} updates in a row were skipped, as their loss or gradient is not finite")

    def check_weights(self):
        """Give up if a weight is not finite: it must not take the place of a good checkpoint."""
        params = [to_local(p) for group in self.optimizer.param_groups for p in group['params']]
        if self.dist.all_reduce_max(not all(torch.isfinite(p).all() for p in params)):
            self.give_up("the weights are not finite")

    def give_up(self, why):
        if self.dist.is_main:
            say(f"error: {why}. {advice(self.run, self.it + 1 - int(self.in_a_row))}")
        self.stop.gave_up = why

    def state(self):
        return {'bad_steps': int(self.in_a_row)}


def advice(run, first_bad):
    """A line about the last good checkpoint. first_bad: the iteration whose weights made the first loss or
    gradient that is not finite; a checkpoint of that iteration has the same weights."""
    rates = {'learning_rate': run.knobs['learning_rate'], **run.lrs}
    smaller = ' '.join(f'--{name}={lr / 3:.2g}' for name, lr in rates.items())
    good = [path for path in numbered(run.knobs['out_dir']) if int(NUMBERED.search(path)[1]) < first_bad]
    if not good:
        return f"no checkpoint is from before. start anew with smaller learning rates: {smaller}"
    place = [f'--init_from=resume:{good[-1]}', f"--out_dir={run.knobs['out_dir']}-again"]
    return (f"{good[-1]} is from before. to continue from there with smaller learning rates: "
            f"{command_line(run, place)} {smaller}")
