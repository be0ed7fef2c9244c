"""What the sampler gives back: one typed value of arrays, a row of them per row of logits.

Shape legend: R rows, N the largest top-N of the batch, C the largest number of chosen ids of the batch.
"""

from enum import IntFlag
from typing import Any, NamedTuple


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
    flags: Any  # u32 [R], RowFlag


class LaunchPlan(NamedTuple):
    """Which branch each row takes: a pure function of the host's mirror; tests assert it and metrics count it."""

    branches: tuple[tuple[str, Any], ...]  # (branch, row indices i64 [*])
