"""Arrays on their way from the model's device to the host, and label scores made of logits."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.jobs import Float32s


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


def label_rows(logits: torch.Tensor, labels: npt.NDArray[np.int64], full: bool) -> torch.Tensor:
    """float32 [R, L] log-probabilities of the columns `labels` of logits [R, V]: under the whole row's softmax if
    `full`, else under the labels' own. A row with a NaN, with +inf or without any finite logit is NaN throughout."""
    columns = torch.from_numpy(labels).to(logits.device, non_blocking=True)
    wanted = logits[:, columns]
    row = logits if full else wanted
    if logits.device.type == "cpu":
        # numpy sums each row by itself whatever the number of rows, so that a row's floats do not depend on the others
        return torch.from_numpy(_label_rows(row.double().numpy(), wanted.double().numpy()))
    lse = torch.logsumexp(row.float(), dim=1, keepdim=True)
    return torch.where(torch.isfinite(lse), wanted.float() - lse, torch.nan)


def _label_rows(row: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> Float32s:
    with np.errstate(invalid="ignore", divide="ignore"):
        peak = row.max(axis=1, keepdims=True)
        lse = peak + np.log(np.exp(row - peak).sum(axis=1, keepdims=True))
        return np.where(np.isfinite(lse), wanted - lse, np.nan).astype(np.float32)
