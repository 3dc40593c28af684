"""What to change after a run has run out of memory."""


def remedy(run):
    """Flags that make it fit, by the estimate of plan.py; else a smaller batch."""
    k = run.knobs
    try:
        from support import devices, planned_run
        from support.remedy import remedy
        setup = planned_run.memory_setup(run, devices.memory_of(run.dist.device))
        if not setup.fits():
            flags = remedy(setup)
            if flags.startswith(('--world_size', 'not more')):
                return ("no batch size fits. use a smaller --block_size, a smaller model, or more memory; "
                        "plan.py with the same flags tells how much")
            return f"by estimate this fits: {flags}"
    except Exception:  # an estimate takes memory, too; and a network may have been edited
        pass
    if k['batch_size'] == 1:
        more = '' if k['activation_checkpointing'] else '--activation_checkpointing, '
        return f"use {more}a smaller --block_size or a smaller model, or more memory"
    samples = k['batch_size'] * run.grad_accum_steps
    smaller = max(n for n in range(1, k['batch_size'] // 2 + 1) if samples % n == 0)
    return (f"the same tokens per iteration from micro-batches of {smaller} sequences: "
            f"--batch_size={smaller} --total_batch_size={run.tokens_per_iter}")
