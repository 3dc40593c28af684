"""Which networks can be built: GPTConfig.problems()."""

import dataclasses
import reprlib

WORDS = {'norm': ('layernorm', 'rmsnorm', 'rmsnorm_plain'), 'positions': ('learned', 'rope'),
         'mlp': ('gelu', 'gelu_tanh', 'relu2', 'swiglu'), 'init': ('gpt2', 'modern')}
# a file may say anything, and even what has no weights takes time and memory to build
LARGEST = {'n_layer': 2**10, 'block_size': 2**23, 'vocab_size': 2**32, 'n_embd': 2**20, 'mlp_width': 2**24,
           'n_head': 2**20, 'n_kv_head': 2**20, 'near': 2**32, 'near_layers': 2**10}
FROM_ZERO = ('dropout', 'softcap', 'near', 'near_layers')
ABOVE_ZERO = {*LARGEST, 'norm_eps', 'rope_theta'}.difference(FROM_ZERO)


def config_problems(config, presets):
    """What cannot be built, or makes no sense, as lines `what (value). what to do`. The values may come from
    a file."""
    if config.arch not in presets:
        return [f"no such arch ({short(config.arch)}). use {', '.join(presets)}"]
    problems = []
    for field in dataclasses.fields(config):
        problems += field_problems(field, getattr(config, field.name))
    return problems or shape_problems(config) + part_problems(config)


def short(value):
    """What `value` looks like, in short: all of a nested list may take for ever."""
    return value if isinstance(value, str) else reprlib.repr(value)[:60]


def field_problems(field, value):
    name, kind = field.name, field.type
    if kind not in (bool, int, float, str) or (value is None and field.default is None):
        return []  # a field that was added to GPTConfig; the parts of a preset are never None here
    if type(value) is not kind and not (kind is float and type(value) is int):
        return [f"{name} is {short(value)}. use a value of the type {kind.__name__}"]
    if name in WORDS and value not in WORDS[name]:
        return [f"no such {name} ({value}). use {', '.join(WORDS[name])}"]
    if kind in (int, float):
        largest = LARGEST.get(name, 1e30)
        too_small = (name in ABOVE_ZERO and value <= 0) or (name in FROM_ZERO and value < 0)
        if too_small or not abs(value) < largest:
            below = f" and below {largest:,}" if name in LARGEST else ''
            above = '0 or more' if name in FROM_ZERO else 'a number above 0'
            return [f"{name} is out of range ({value}). use {above}{below}"]
    return []


def shape_problems(config):
    C, H, K = config.n_embd, config.n_head, config.n_kv_head
    problems = []
    if C % H:
        smaller, larger = C // H * H or H, C // H * H + H
        problems.append(f"n_embd={C} is not a multiple of n_head={H}. use --n_embd={smaller} or "
                        f"--n_embd={larger}")
    if H % K:
        divisor = max(k for k in range(1, min(H, K) + 1) if H % k == 0)
        problems.append(f"n_head={H} is not a multiple of n_kv_head={K}. use --n_kv_head={divisor}")
    return problems


def part_problems(config):
    problems = []
    if config.bias and config.norm != 'layernorm':
        problems.append(f"bias=True makes no sense here: neither {config.norm} nor the matrices of "
                        f"{config.arch} have biases. leave bias out")
    if config.positions == 'learned' and (config.rope_scaling != 'none' or config.rope_theta != 10000):
        problems.append("rope_theta and rope_scaling make no sense with learned positions. leave them out, "
                        "or use --positions=rope")
    if config.tie and config.init == 'modern':
        problems.append("init=modern starts the head at zero, and with tie=True the embedding is the same "
                        "matrix. use --tie=False, or another arch")
    if config.positions == 'rope' or config.rope_scaling != 'none':
        from support.rope_table import rope_problems
        problems += rope_problems(config)
    return problems
