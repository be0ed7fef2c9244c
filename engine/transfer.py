"""Arrays on their way from the model's device to the host."""

from typing import Any

import numpy.typing as npt
import torch


class ToHost:
    """Starts copying a tensor; `result` waits for it. On the CPU there is nothing to wait for."""

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
