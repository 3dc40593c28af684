"""What to say of a batch that cannot be divided among micro-batches and processes."""


def not_a_multiple(k, world_size):
    """k: the knobs. The nearest batches that can be divided."""
    if k.total_batch_size:
        tokens = k.batch_size * k.block_size * world_size
        low = max(1, k.total_batch_size // tokens) * tokens
        return (f"total_batch_size={k.total_batch_size} is not a multiple of batch_size x block_size x "
                f"processes = {k.batch_size} x {k.block_size} x {world_size} = {tokens}. nearest: "
                f"{low} or {low + tokens}")
    steps = k.gradient_accumulation_steps
    low = max(1, steps // world_size) * world_size
    return (f"gradient_accumulation_steps={steps} counts over all processes and is not a multiple of "
            f"their number {world_size}. nearest: {low} or {low + world_size}")


def no_powers_of_two(world_size, grad_accum_steps):
    steps = 2 ** ((world_size * grad_accum_steps).bit_length() - 1)
    return (f"deterministic=True adds pairwise and wants powers of two ({world_size} processes, "
            f"{grad_accum_steps} micro-batches in each). use 1, 2, 4, ... processes and "
            f"--gradient_accumulation_steps={steps}")
