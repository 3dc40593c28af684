"""What to say and do after updates were skipped, and after a run has given up."""

import os

from support import checkpoint, commands


def skipped_note(run, n, in_a_row, it, loss, norm):
    """A line about n skipped updates, of which that of iteration `it` was the first."""
    return (f"note: the update of iteration {it} was skipped, its loss is {loss:.4g}, its gradient norm "
            f"{norm:.4g} ({n} skipped since the last line, {in_a_row} in a row). that iteration again: "
            f"{commands.replay(run, it)}")


def advice(run, first_bad):
    """A line about the last good checkpoint. first_bad: the iteration whose weights made the first loss or
    gradient that is not finite; a checkpoint of that iteration has the same weights."""
    out_dir = run.knobs['out_dir']
    newest = checkpoint.newest(out_dir)
    good = [path for path in checkpoint.numbered(out_dir) if iteration(path) < first_bad]
    if newest is None:
        return f"there is no checkpoint from before. start anew with smaller learning rates: {rates(run)}"
    if not good and newest in checkpoint.numbered(out_dir):
        return (f"{newest} has the weights that made the first of them. start anew with smaller learning "
                f"rates: {rates(run)}")
    path, place = newest, ['--init_from=resume', f'--out_dir={out_dir}']
    if good and good[-1] != newest:
        path, place = good[-1], [f'--init_from=resume:{good[-1]}', f'--out_dir={out_dir}-again']
    return (f"{path} is from before. to continue from there with smaller learning rates: "
            f"{commands.command(run, place)} {rates(run)}")


def iteration(path):
    return int(checkpoint.NUMBERED.fullmatch(os.path.basename(path))[1])


def rates(run):
    """Flags for a third of each learning rate that was set, and for clipping if there was none."""
    lrs = {'learning_rate': run.knobs['learning_rate'], **run.lrs}
    if run.asked['min_lr']:
        lrs['min_lr'] = run.asked['min_lr']
    flags = [f'--{name}={lr / 3:.2g}' for name, lr in lrs.items()]
    if run.knobs['grad_clip'] == 0:
        flags.append('--grad_clip=1')
    return ' '.join(flags)
