"""Needs: which launches a step is made of, from what the host's mirror says of its rows' slots."""

from collections.abc import Iterator
from enum import IntFlag
from typing import Final

from gpu_sampler.output import LaunchPlan
from gpu_sampler.reference.sample import branch
from gpu_sampler.reference.select import CANDIDATES
from gpu_sampler.state import SamplingState, SlotFlag


class Need(IntFlag):
    """What a slot's rows need beside `row_stats` and `select`."""

    SIDE = 1
    JUDGE = 2
    SETTLE = 4
    REPORT = 8
    RANK = 16
    COUNT = 32
    MASK = 64
    ELSEWHERE = 128
    LIST = 256


# What the rows of a warm-up need: together with nothing at all, every variant that a kernel has.
LISTED: Final = Need.JUDGE | Need.SETTLE | Need.RANK
PATCHED: Final = LISTED | Need.SIDE | Need.REPORT | Need.COUNT
MASKED: Final = PATCHED | Need.MASK


def needs(state: SamplingState, slot: int, processed: bool) -> Need:
    """A function of the slot's own numbers."""
    flags, route = SlotFlag(int(state.flags[slot])), branch(state, slot)
    found = Need(0)
    if flags & SlotFlag.HAS_OVERLAY:
        found |= Need.SIDE
    if flags & SlotFlag.HAS_MASK:
        found |= Need.MASK
    if flags & (SlotFlag.COUNTS | SlotFlag.HAS_BAD_WORDS):
        found |= Need.COUNT
    judged = route == "nucleus" and state.top_p[slot] < 1
    if judged:
        found |= Need.JUDGE
    if route == "nucleus" or (route == "candidates" and state.top_k[slot] > CANDIDATES):
        found |= Need.SETTLE
    if route in ("nucleus", "candidates") or state.n_top[slot] > 0:
        found |= Need.LIST
    if flags & SlotFlag.WANTS_LOGPROBS:
        moved = bool(flags & (SlotFlag.HAS_OVERLAY | SlotFlag.HAS_MASK))
        if moved and not processed:
            found |= Need.REPORT | Need.RANK
        if route == "plain" or (route == "nucleus" and not judged):
            found |= Need.RANK
    return found


def kernels_of(need: Need, *, apart: bool = False) -> tuple[str, ...]:
    """The launches of a step whose rows together need `need`. `apart`: what is reported is not drawn by `select`."""
    apart = apart or Need.ELSEWHERE in need
    together = Need.REPORT in need and not apart
    steps = (
        (Need.SIDE in need, "patch_rows"),
        (True, "row_stats"),
        (True, "select_with_report" if together else "select"),
        (Need.ELSEWHERE in need, "flashinfer"),
        (Need.JUDGE in need, "judge_draws"),
        (Need.SETTLE in need, "settle"),
        (Need.REPORT in need and apart, "report"),
        (Need.RANK in need, "rank_drawn"),
        (Need.COUNT in need, "count_tokens"),
    )
    return tuple(name for wanted, name in steps if wanted)


def warm_up_plans(*wanted: Need, apart: bool = False) -> Iterator[LaunchPlan]:
    """A step of rows that need each of these, without and with log-probabilities; `apart` as in `kernels_of`."""
    for need in wanted:
        for n_top in (None, 1):
            kernels = kernels_of(need if n_top is not None else need & ~(Need.RANK | Need.REPORT), apart=apart)
            yield LaunchPlan((), kernels, masked=Need.MASK in need, lists=bool(need), n_top=n_top)
