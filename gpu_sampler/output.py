"""What the sampler gives back: one typed value of arrays, a row of them per row of logits.

Shape legend: R rows, N the largest top-N of the batch, C the largest number of chosen ids of the batch.
"""

from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class RowFlag(IntFlag):
    """What only the sampler can know of a row. A flag is no error yet: the caller decides (default: the row fails)."""

    BAD_VALUE = 1  # NaN or +inf among the logits, taken as -inf
    NO_TOKEN = 2  # no finite logit: token -1
    WIDE = 4  # more candidates than the sort holds
    REJECTION = 8  # drawn by rejection with membership
    NUCLEUS_SCAN = 16  # the exact nucleus was needed
    ZERO_RESIDUAL = 32  # verification: the residual had no weight and was replaced by p
    BAD_PROPOSAL = 64  # verification: q was 0 for its own draft


FAILED = RowFlag.BAD_VALUE | RowFlag.NO_TOKEN


class SampleOutput(NamedTuple):
    """Arrays of the backend's own kind: numpy on the CPU, tensors on the device (`Sampler.fetch` brings them)."""

    tokens: Any  # i32 [R], INVALID_TOKEN where there is none
    logprobs: Any | None  # f32 [R], of the sampled token; None if no row asked for any log-probability
    ranks: Any | None  # i32 [R], 1-based place of the sampled token in the total order
    top_ids: Any | None  # i32 [R, N], padded with INVALID_TOKEN beyond a row's own N
    top_logprobs: Any | None  # f32 [R, N], padded with -inf
    chosen_logprobs: Any | None  # f32 [R, C], in the order of logprob_token_ids, padded with -inf
    flags: Any  # u32 [R] (i32 on a device), RowFlag


class Elsewhere(NamedTuple):
    """Rows that FlashInfer draws."""

    rows: npt.NDArray[np.int32]  # [P]
    top_k: npt.NDArray[np.int32]  # [P], 0 = off
    top_p: npt.NDArray[np.float32]  # [P], 1 = off

    @property
    def key(self) -> bytes:
        return b"".join(part.tobytes() for part in self)


class LaunchPlan(NamedTuple):
    """Which branch each row takes and what is launched for them: a pure function of the host's mirror; tests assert it
    and metrics count it."""

    branches: tuple[tuple[str, Any], ...]  # (branch, row indices i64 [*])
    kernels: tuple[str, ...] = ()  # in order; empty on the CPU
    masked: bool = False  # some row has an allow mask
    n_top: int | None = None  # N; None if no row asks for log-probabilities
    n_chosen: int = 0  # C
    elsewhere: Elsewhere | None = None


class OutputWords(NamedTuple):
    """A device's output in one buffer, so that one copy brings all of it to the host."""

    words: torch.Tensor  # i32, flat
    rows: int
    n_top: int | None
    n_chosen: int

    @classmethod
    def empty(cls, rows: int, n_top: int | None, n_chosen: int, device: torch.device) -> "OutputWords":
        columns = 2 if n_top is None else 4 + 2 * n_top + n_chosen
        return cls(torch.empty(rows * columns, dtype=torch.int32, device=device), rows, n_top, n_chosen)

    @classmethod
    def of(cls, output: SampleOutput) -> "OutputWords":
        """The buffer that begins with the tokens of `output`, which `split` made."""
        rows = len(output.tokens)
        top, chosen = output.top_ids, output.chosen_logprobs
        columns = 2 if top is None or chosen is None else 4 + 2 * top.shape[1] + chosen.shape[1]
        words: torch.Tensor = output.tokens.as_strided((rows * columns,), (1,))
        if top is None or chosen is None:
            return cls(words, rows, None, 0)
        return cls(words, rows, top.shape[1], chosen.shape[1])

    def split(self) -> SampleOutput:
        """Views of the buffer."""
        if self.n_top is None:
            tokens, flags = self.words.view(2, self.rows)
            return SampleOutput(tokens, None, None, None, None, None, flags)
        sizes = [self.rows] * 4 + [self.rows * self.n_top] * 2 + [self.rows * self.n_chosen]
        tokens, flags, ranks, logprobs, top_ids, top_logprobs, chosen = torch.split(self.words, sizes)
        return SampleOutput(
            tokens,
            logprobs.view(torch.float32),
            ranks,
            top_ids.view(self.rows, self.n_top),
            top_logprobs.view(torch.float32).view(self.rows, self.n_top),
            chosen.view(torch.float32).view(self.rows, self.n_chosen),
            flags,
        )
