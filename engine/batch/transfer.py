"""Moves arrays between the host and the model's device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.requests import Int32s


class ToHost:
    """Starts copying a tensor to the host; `result` waits for it. On the CPU it copies nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = tensor

    def result(self) -> npt.NDArray[Any]:
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array


def gathered(pieces: Sequence[Int32s], device: torch.device) -> torch.Tensor:
    """Returns all pieces as one i32 array, pinned for CUDA, where a freed block is kept until copies have read it."""
    host = torch.empty(sum(map(len, pieces)), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate(pieces, out=host.numpy())
    return host
