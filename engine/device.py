"""Whether a device still works after something on it raised."""

import torch


class DeviceLost(RuntimeError):
    """The device fails whatever is asked of it from now on. A model that knows may raise it itself."""


def is_lost(device: torch.device, error: Exception) -> bool:
    """A CUDA error is sticky if the next call meets it again: asking is exact, where its words are not."""
    if isinstance(error, DeviceLost):
        return True
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:  # whatever it is called: the device did not answer
        return True
    return False
