"""The rotations of rotary position embeddings, and their scaling for longer contexts."""

import math

import torch

LARGEST_TABLE = 2**30  # numbers in the table of rotations: 4 GB


def rope_table(config):
    """cos and sin of the angle by which position t rotates pair i of a head's channels, (2, T, D/2)
    float32."""
    D = config.n_embd // config.n_head
    exponents = torch.arange(0, D, 2, dtype=torch.float32) / D
    inv_freq = 1.0 / config.rope_theta ** exponents  # (D/2)
    scaling = parse_rope_scaling(config.rope_scaling)
    if len(scaling) == 1:  # linear: squeeze the positions
        inv_freq = inv_freq / scaling[0]
    if len(scaling) == 4:  # llama3: only the low frequencies, with a smooth transition
        factor, low, high, original = scaling
        keep = ((original * inv_freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        inv_freq = (1 - keep) * inv_freq / factor + keep * inv_freq
    t = torch.arange(config.block_size, dtype=torch.float32)
    angles = torch.outer(t, inv_freq)  # (T, D/2)
    return torch.stack((angles.cos(), angles.sin()))


def parse_rope_scaling(text):
    """'none' -> [], 'linear:4' -> [4.0], 'llama3:8:1:4:8192' -> [8.0, 1.0, 4.0, 8192.0]; else ValueError."""
    kind, *numbers = text.split(':')
    numbers = [float(number) for number in numbers]
    length = {'none': 0, 'linear': 1, 'llama3': 4}.get(kind)
    if len(numbers) != length or not all(0 < number < math.inf for number in numbers):
        raise ValueError(text)
    if kind == 'llama3' and numbers[1] >= numbers[2]:
        raise ValueError(text)
    return numbers


def rope_problems(config):
    """What cannot be rotated, as a list of lines."""
    C, H, problems = config.n_embd, config.n_head, []
    if config.positions == 'rope' and C % H == 0 and C // H % 2:
        problems.append(f"rope rotates pairs of channels, and a head has {C // H}. use --n_embd={C + H}")
    if config.positions == 'rope' and config.block_size * C // H > LARGEST_TABLE:
        problems.append(f"rope's table for block_size={config.block_size} and heads of {C // H} channels is "
                        f"out of range. use --block_size={LARGEST_TABLE * H // C} or less, or more heads")
    try:
        parse_rope_scaling(config.rope_scaling)
    except ValueError:
        problems.append(f"no such rope_scaling ({config.rope_scaling}). use none, linear:FACTOR or "
                        "llama3:FACTOR:LOW:HIGH:ORIGINAL_BLOCK_SIZE")
    return problems
