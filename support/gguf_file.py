"""
A GGUF file: one file with weights, sizes and tokenizer, which llama.cpp and what is built on it open.
"""

import numpy as np

from support.gguf_model import arch_of, sizes, tensors
from support.gguf_tokenizer import vocabulary

FILE_TYPES = {'f32': 0, 'f16': 1, 'q8_0': 7, 'bf16': 32}  # llama.cpp's LLAMA_FTYPE_*
GELU_NOTE = ("note: llama.cpp's GPT-2 computes the tanh approximation of GELU, this network the exact one "
             "(mlp=gelu): the logits differ by about 1e-3. train with --mlp=gelu_tanh to avoid it")


def write(path, weights, config, tokenizer_state, dtype, name):
    """Write a model (our weights, its GPTConfig, its tokenizer's state) to `path` and read it back. dtype: of
    the matrices; vectors and learned positions stay float32, as with llama.cpp's own converter. ValueError if
    llama.cpp has no such network or tokenizer, or if the file does not hold what was meant."""
    import gguf
    arch = arch_of(config)
    keys = {**sizes(config, arch), 'general.name': name, 'general.file_type': FILE_TYPES[dtype],
            **vocabulary(tokenizer_state, config.vocab_size)}
    if dtype == 'q8_0':
        keys['general.quantization_version'] = gguf.GGML_QUANT_VERSION
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        if key != 'general.architecture':  # the writer has put it there
            writer.add_key_value(key, value, value_type(gguf, value))
    meant = {}
    for tensor_name, p in tensors(weights, config, arch):
        kind, p = tensor_type(gguf, tensor_name, p, dtype), p.contiguous().numpy()
        meant[tensor_name] = (kind, p)
        with np.errstate(over='ignore'):  # compare() tells of numbers that are too large
            writer.add_tensor(tensor_name, gguf.quants.quantize(p, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    compare(gguf, path, keys, meant)
    return arch


def value_type(gguf, value):
    """Its type of a key's value: llama.cpp wants unsigned numbers."""
    if isinstance(value, int) and not isinstance(value, bool):
        return gguf.GGUFValueType.UINT32
    return gguf.GGUFValueType.get_type(value)


def tensor_type(gguf, name, p, dtype):
    """Its type of a tensor. A quantized row has blocks of 32 numbers; another one stays float16."""
    if p.dim() == 1 or name.startswith('position_embd'):
        return gguf.GGMLQuantizationType.F32
    if dtype == 'q8_0' and p.shape[1] % 32:
        return gguf.GGMLQuantizationType.F16
    return gguf.GGMLQuantizationType[dtype.upper()]


def compare(gguf, path, keys, meant):
    """Raise ValueError if the file `path` does not say `keys` or does not hold the tensors {name: (type,
    float32 array)}, up to what their type rounds away."""
    reader = gguf.GGUFReader(path)
    for key, value in keys.items():
        found = reader.fields[key].contents()
        if found != (np.float32(value) if isinstance(value, float) else value):
            raise ValueError(f"{key} came out different in {path}. please report this")
    found = {tensor.name: tensor for tensor in reader.tensors}
    if found.keys() != meant.keys():
        raise ValueError(f"{path} has other tensors than were written. please report this")
    for name, (kind, p) in meant.items():
        back = gguf.quants.dequantize(found[name].data, found[name].tensor_type)
        if found[name].tensor_type != kind or back.shape != p.shape:
            raise ValueError(f"{name} came out in another form in {path}. please report this")
        if not np.isfinite(back).all():
            raise ValueError(f"{name} has numbers that are too large for {kind.name}. use --gguf_dtype=bf16")
        if (np.abs(back - p) > largest_error(kind.name, p)).any():
            raise ValueError(f"{name} came out different in {path}. please report this")


def largest_error(kind, p):
    """What rounding to a type may change, for each number of p."""
    if kind == 'F32':
        return np.zeros_like(p)
    if kind == 'Q8_0':  # each 32 numbers are whole multiples, up to 127, of a float16
        blocks = np.abs(p).reshape(-1, 32)
        step = blocks.max(axis=1, keepdims=True) / 127
        # small ones are subnormal in float16, with steps of 2**-24
        return (0.51 * step + blocks * 2**-11 + 127 * 2**-25 + 1e-7).reshape(p.shape)
    digits = {'F16': 11, 'BF16': 8}[kind]
    return np.abs(p) * 2.0**-digits + (2**-25 if kind == 'F16' else 0)  # the last: below float16's range
