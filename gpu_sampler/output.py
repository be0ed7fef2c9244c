"""Holds what the sampler returns: one typed value of arrays, with a row for each row of logits.

Shape legend: R rows, B requests, K draft steps, N the largest top-N of the batch, C the largest number of chosen ids.
"""

from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class RowFlag(IntFlag):
    """Flags what only the sampler can know of a row. The caller decides what fails (default: FAILED)."""

    BAD_VALUE = 1  # NaN or +inf among the logits, taken as -inf
    NO_TOKEN = 2  # no finite logit: token -1
    WIDE = 4  # more candidates than the sort holds
    REJECTION = 8  # drawn by rejection with membership
    NUCLEUS_SCAN = 16  # the exact nucleus was needed
    ZERO_RESIDUAL = 32  # verification: the residual had no weight and was replaced by p
    BAD_PROPOSAL = 64  # verification: q was 0 for its own draft


FAILED = RowFlag.BAD_VALUE | RowFlag.NO_TOKEN


class SampleOutput(NamedTuple):
    """Holds arrays of the backend's own kind: numpy on the CPU, tensors on the device (`Sampler.fetch` copies them)."""

    tokens: Any  # i32 [R], INVALID_TOKEN where there is none
    logprobs: Any | None  # f32 [R], of the sampled token; None if no row asked for any log-probability
    ranks: Any | None  # i32 [R], 1-based place of the sampled token in the total order
    top_ids: Any | None  # i32 [R, N], padded with INVALID_TOKEN beyond a row's own N
    top_logprobs: Any | None  # f32 [R, N], padded with -inf
    chosen_logprobs: Any | None  # f32 [R, C], in the order of logprob_token_ids, padded with -inf
    flags: Any  # u32 [R] (i32 on a device), RowFlag

    @property
    def reported(self) -> tuple[Any, ...]:
        """Returns kernel arguments: logprobs, ranks, top_ids, top_logprobs, N, chosen_logprobs, C (None, 0)."""
        top, chosen = self.top_ids, self.chosen_logprobs
        if top is None or chosen is None:
            return None, None, None, None, 0, None, 0
        return self.logprobs, self.ranks, top, self.top_logprobs, top.shape[1], chosen, chosen.shape[1]


class VerifyOutput(NamedTuple):
    """Holds the result of a verify step: for each request the accepted drafts and one token more.

    After the count of a request all is padding, and the flags are 0.
    """

    tokens: Any  # i32 [B, K + 1], INVALID_TOKEN after the count
    counts: Any  # i32 [B]: accepted drafts + 1
    logprobs: Any | None  # f32 [B, K + 1]; this and the next four as in SampleOutput
    ranks: Any | None  # i32 [B, K + 1]
    top_ids: Any | None  # i32 [B, K + 1, N]
    top_logprobs: Any | None  # f32 [B, K + 1, N]
    chosen_logprobs: Any | None  # f32 [B, K + 1, C]
    flags: Any  # u32 [B, K + 1] (i32 on a device), RowFlag

    @classmethod
    def of(cls, rows: SampleOutput, counts: Any, drafts: int) -> "VerifyOutput":
        """Returns views of the rows of all requests, which stand request by request."""
        shaped = [None if part is None else part.reshape(len(counts), drafts + 1, *part.shape[1:]) for part in rows]
        return cls(shaped[0], counts, *shaped[1:])

    def rows(self) -> SampleOutput:
        """Returns the rows as R = B (K + 1): views."""
        parts = (part for name, part in zip(self._fields, self, strict=True) if name != "counts")
        rows = self.tokens.shape[0] * self.tokens.shape[1]  # no -1: a part may have no columns
        return SampleOutput(*(None if part is None else part.reshape(rows, *part.shape[2:]) for part in parts))


class VerifyWords(NamedTuple):
    """Holds a device's verify output in one buffer: the counts, then the rows' words."""

    counts: torch.Tensor  # i32 [B], where the buffer begins
    rows: "OutputWords"
    drafts: int

    @classmethod
    def empty(cls, requests: int, drafts: int, n_top: int | None, n_chosen: int, device: torch.device) -> "VerifyWords":
        rows, first = requests * (drafts + 1), -(-requests // 4) * 4
        words = torch.empty(first + sum(OutputWords.parts(rows, n_top, n_chosen)), dtype=torch.int32, device=device)
        return cls(words[:requests], OutputWords(words[first:], rows, n_top, n_chosen), drafts)

    @classmethod
    def of(cls, output: VerifyOutput) -> "VerifyWords":
        """The buffer that `split` made `output` of."""
        return cls(output.counts, OutputWords.of(output.rows()), output.tokens.shape[1] - 1)

    @property
    def words(self) -> torch.Tensor:
        """Returns the whole buffer."""
        first = -(-len(self.counts) // 4) * 4
        found: torch.Tensor = self.counts.as_strided((first + len(self.rows.words),), (1,))
        return found

    def on(self, words: torch.Tensor) -> "VerifyWords":
        """Returns the same parts of another buffer."""
        first = -(-len(self.counts) // 4) * 4
        return self._replace(counts=words[: len(self.counts)], rows=self.rows._replace(words=words[first:]))

    def split(self) -> VerifyOutput:
        return VerifyOutput.of(self.rows.split(), self.counts, self.drafts)


class Elsewhere(NamedTuple):
    """Lists rows that FlashInfer draws."""

    rows: npt.NDArray[np.int32]  # [P]
    top_k: npt.NDArray[np.int32]  # [P], 0 = off
    top_p: npt.NDArray[np.float32]  # [P], 1 = off

    @property
    def key(self) -> bytes:
        return b"".join(part.tobytes() for part in self)


class LaunchPlan(NamedTuple):
    """Says which branch each row takes and what a step launches: a pure function of the host's mirror of the state."""

    branches: tuple[tuple[str, Any], ...]  # (branch, row indices i64 [*])
    kernels: tuple[str, ...] = ()  # in order; empty on the CPU
    masked: bool = False  # some row has an allow mask
    lists: bool = True  # some row needs the first tokens of its order
    n_top: int | None = None  # N; None if no row asks for log-probabilities
    n_chosen: int = 0  # C
    elsewhere: Elsewhere | None = None


class OutputWords(NamedTuple):
    """Holds a device's output in one buffer, so that one copy brings all of it to the host.

    Each part begins at a multiple of 16 bytes: kernels are compiled for aligned pointers once, and not again for
    batches of odd sizes.
    """

    words: torch.Tensor  # i32, flat
    rows: int
    n_top: int | None
    n_chosen: int

    @classmethod
    def empty(cls, rows: int, n_top: int | None, n_chosen: int, device: torch.device) -> "OutputWords":
        parts = cls.parts(rows, n_top, n_chosen)
        return cls(torch.empty(sum(parts), dtype=torch.int32, device=device), rows, n_top, n_chosen)

    @classmethod
    def of(cls, output: SampleOutput) -> "OutputWords":
        """Returns the buffer that begins with the tokens of `output`, which `split` made."""
        rows, top, chosen = len(output.tokens), output.top_ids, output.chosen_logprobs
        n_top, n_chosen = (None, 0) if top is None or chosen is None else (top.shape[1], chosen.shape[1])
        words: torch.Tensor = output.tokens.as_strided((sum(cls.parts(rows, n_top, n_chosen)),), (1,))
        return cls(words, rows, n_top, n_chosen)

    @staticmethod
    def parts(rows: int, n_top: int | None, n_chosen: int) -> list[int]:
        """Returns the words of each part."""
        return [_aligned(rows * width) for width in _widths(n_top, n_chosen)]

    def split(self) -> SampleOutput:
        """Returns views of the buffer."""
        return _views(self.words, self.rows, self.n_top, self.n_chosen, torch.float32)

    def arrays(self) -> SampleOutput:
        """Returns `split` of a buffer on the host, in numpy."""
        return _views(self.words.numpy(), self.rows, self.n_top, self.n_chosen, np.float32)


def _aligned(words: int) -> int:
    return -(-words // 4) * 4


def _widths(n_top: int | None, n_chosen: int) -> tuple[int, ...]:
    """Returns words a row: tokens, flags; then ranks, log-probabilities, top ids, theirs, those of chosen ids."""
    return (1, 1) if n_top is None else (1, 1, 1, 1, n_top, n_top, n_chosen)


def _views(words: Any, rows: int, n_top: int | None, n_chosen: int, f32: Any) -> SampleOutput:
    """Returns the parts of a buffer: a tensor or an array, whose name for single floats is `f32`."""
    parts, start = [], 0
    for width in _widths(n_top, n_chosen):
        parts.append(words[start : start + rows * width])
        start += _aligned(rows * width)
    tokens, flags, *reported = parts
    if n_top is None:
        return SampleOutput(tokens, None, None, None, None, None, flags)
    ranks, logprobs, ids, top, chosen = reported
    return SampleOutput(
        tokens,
        logprobs.view(f32),
        ranks,
        ids.reshape(rows, n_top),
        top.view(f32).reshape(rows, n_top),
        chosen.view(f32).reshape(rows, n_chosen),
        flags,
    )
