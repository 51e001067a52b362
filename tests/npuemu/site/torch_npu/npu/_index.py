"""What the functions of torch.npu take as a device."""

import torch


def device_index(device=None):
    """The index of None (the current device), an int, "npu", "npu:1" or a torch.device."""
    if isinstance(device, int) and device >= 0:
        return device
    if device is None or isinstance(device, int):
        return torch.ops.npuemu.current_device()
    parsed = torch.device(device)
    if parsed.type != "npu":
        raise ValueError(f"Expected a npu device, but got: {parsed}")
    return torch.ops.npuemu.current_device() if parsed.index is None else parsed.index
