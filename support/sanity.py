"""What the losses say about whether model and loop work at all."""


def first_loss_note(loss, expected, vocab_size):
    """For random weights whose first loss is not about ln(vocab_size)."""
    if loss < expected:
        return (f"note: the first loss is {loss:.2f}, far below ln({vocab_size}) = {expected:.2f}: random "
                "weights cannot know that much. does a position see the one it is to predict (the causal "
                "mask, the shift of the targets), or are the weights not random?")
    return (f"note: the first loss is {loss:.2f}, far above ln({vocab_size}) = {expected:.2f}: the network "
            "is sure of what it cannot know. are the initial weights too large (init, a changed layer), is "
            "a norm missing, or is vocab_size far above the ids that occur?")


def overfit_note(losses):
    """What overfit_batch has shown, by the losses of its iterations."""
    if not losses:
        return "overfit_batch: no finite loss was logged. model or loop is broken"
    first, last = losses[0], min(losses[-5:])
    if last < 0.1 * first:
        return (f"overfit_batch: the loss of one batch fell from {first:.3f} to {last:.4f}. model and loop "
                "learn")
    return (f"overfit_batch: the loss of one batch fell from {first:.3f} to {last:.3f} in {len(losses):,} "
            "logged iterations, not to nearly 0. give it more of them or a larger learning rate, and no "
            "dropout; if that does not help, model or loop is broken")
