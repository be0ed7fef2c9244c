"""What plans of paged attention are made of: kinds of layers, sequences, and where the plans of captured steps live."""

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from engine.attention.interface import NO_WINDOW


class Kind(NamedTuple):
    """What a plan depends on. `dim` is the stored head dim; window and soft cap as in `attention`."""

    heads: int
    kv_heads: int
    dim: int
    window: int
    softcap: float
    scale: float

    @property
    def window_left(self) -> int:
        """FlashInfer counts the tokens left of a token, this engine counts the token too."""
        return self.window - 1 if self.window != NO_WINDOW else -1


class Sequences(NamedTuple):
    """What is planned for: S sequences of new tokens, and the pool slots that each attends to."""

    qo_indptr: torch.Tensor  # i32 [S + 1] on the host
    kv_indptr: torch.Tensor  # i32 [S + 1] on the host
    kv_indices: torch.Tensor  # i32 on the device
    causal: bool  # the new tokens are the last of what their sequence attends to


class GraphBuffers(NamedTuple):
    """Where the plans of captured steps live; shared by all row counts, since steps follow each other."""

    indptr: torch.Tensor  # i32 [most rows + 1]
    indices: torch.Tensor  # i32 [most attended tokens]
    last_page: torch.Tensor  # i32 [most rows]
    staging: int | None = None  # bytes that a plan may take, on the device and again on the host; None: 8 MiB

    @classmethod
    def of(cls, rows: int, attended: int, device: torch.device, staging: int | None = None) -> "GraphBuffers":
        ints = partial(torch.zeros, dtype=torch.int32, device=device)
        return cls(ints(rows + 1), ints(max(attended, rows)), ints(rows).fill_(1), staging)


class GraphDecoder(Protocol):
    """What attends in a captured step of single tokens: its plan lies where a replay reads it."""

    run: Any  # as a FlashInfer wrapper's

    def plan(self, kind: Kind, given: Sequences) -> None:
        """Takes what each sequence attends to."""
        ...

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """As `plan`, where the buffers hold all that is attended to already and the copies of the last plan have
        ended."""
        ...
