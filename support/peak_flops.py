"""How many FLOP/s a GPU can make, for MFU."""

import re

import torch


def peak_flops_of(device):
    """FLOP/s of a device by the table below; None for one that it does not have."""
    if device.type != 'cuda':
        return None
    # 'NVIDIA H100 80GB HBM3' -> nvidia, h100, 80gb, hbm3
    words = set(re.split('[^a-z0-9]+', torch.cuda.get_device_name(device).lower()))
    if {'laptop', 'ti', 'super', 'd', 'max', 'mig'} & words:  # "RTX 4080 SUPER", "4090 D", Max-Q: other peaks
        return None
    return next((peak for key, peak in PEAK_FLOPS.items() if set(key.split()) <= words), None)


# Dense bfloat16 matrix products (float16 where there is no bfloat16), by the makers' data sheets. The first
# row whose words are all in the device's name counts. A float32 run is measured against the same number.
PEAK_FLOPS = {
    'gb300': 2.5e15, 'gb200': 2.5e15, 'b300': 2.25e15, 'b200': 2.25e15, 'b100': 1.75e15,
    'h200 nvl': 835e12, 'h200': 989e12, 'h100 pcie': 756e12, 'h100 nvl': 835e12, 'h100': 989e12,
    'h800': 989e12, 'h20': 148e12, 'gh200': 989e12, 'a100': 312e12, 'a800': 312e12, 'a10g': 70e12,
    'a40': 149.7e12, 'a30': 165e12, 'a10': 125e12, 'l40s': 362e12, 'l40': 181e12, 'l4': 121e12,
    'v100': 125e12, 't4': 65e12, 'rtx pro 6000': 503.8e12, 'rtx 5090': 209.5e12, 'rtx 4090': 165.2e12,
    'rtx 4080': 97.5e12, 'rtx 3090': 71.2e12, 'rtx 3080': 59.5e12, 'rtx 6000 ada': 364.2e12,
    'rtx a6000': 154.8e12,
    'mi355x': 2516e12, 'mi350x': 2307e12, 'mi325x': 1307e12, 'mi300x': 1307e12, 'mi250x': 191.5e12,
}
