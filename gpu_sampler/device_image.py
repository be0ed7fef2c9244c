"""DeviceImage: the sampling state of all slots as one buffer on a device, and the copy that brings what changed."""

import torch

from gpu_sampler.state import SamplingState


class DeviceImage:
    """Views of one i32 buffer: `table` [S, W], `entry_ids`, `entry_counts`, `entry_bias` (f32) [E], `masks` [M, V / 32];
    and of a step only `side_ids`, `side_raw`, `side_processed` [E]."""

    table: torch.Tensor
    entry_ids: torch.Tensor
    entry_counts: torch.Tensor
    entry_bias: torch.Tensor
    masks: torch.Tensor
    side_ids: torch.Tensor
    side_raw: torch.Tensor
    side_processed: torch.Tensor

    def __init__(self, state: SamplingState, device: torch.device | str) -> None:
        raise NotImplementedError

    def apply(self) -> None:
        raise NotImplementedError
