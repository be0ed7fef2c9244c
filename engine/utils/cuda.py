"""DeviceLost: whether a device still works."""

import torch


class DeviceLost(RuntimeError):
    """Means that the device fails every call from now on. A model may raise it itself."""


def is_lost(device: torch.device, error: Exception) -> bool:
    """Tells whether the device is lost after `error`: a CUDA error is sticky if the next call meets it again."""
    if isinstance(error, DeviceLost):
        return True
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:  # of any type: the device did not answer
        return True
    return False
