"""Reports a row: its total, the rank of its token, its first tokens and the ids that the request named.

    logprob(x) = (x - shift) / unit - ln(over)

`over` sums all tokens, or those that a processed list keeps: then tokens after key `last` have -inf.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu_sampler.kernels.common import id_of, key, raw_values, side_find, side_sum, value_of, values
from gpu_sampler.workspace import LIST

_LIST: tl.constexpr = tl.constexpr(LIST)
_CHOSEN: tl.constexpr = tl.constexpr(128)
_CHOSEN_SIDE: tl.constexpr = tl.constexpr(16)  # fewer where each is compared with a side list: most rows ask for few
_SIDE_AT_ONCE: tl.constexpr = tl.constexpr(256)


class ReportOutputs(NamedTuple):
    """Names the outputs of a step's log-probabilities, as `SampleOutput` describes them."""

    logprobs: Any
    ranks: Any
    top_ids: Any
    top_logprobs: Any
    n_columns: Any
    chosen_logprobs: Any
    c_columns: Any


class LogprobScale(NamedTuple):
    """Says how values of a row become log-probabilities."""

    shift: Any
    unit: Any
    log_over: Any
    last: Any  # key after which tokens have -inf; NO_KEY: none


@triton.jit
def total_of(row, m, s, best, scale):
    """Returns Z, the sum of exponentials of a row relative to `best`, from its group statistics, by a fixed tree."""
    total = tl.sum(tl.where(m > -float("inf"), s * tl.exp2((m - best) * scale), 0.0), axis=0)
    if row.side is not None:
        total += side_sum(row, best, scale)
    return total


@triton.jit
def rank_in_list(keys, count, need, value, token):
    """Returns (how many tokens of a list come before this one, whether no other token does).

    The list holds `count` keys i64 [LIST]; its first `need` keys are the first of the total order.
    """
    places = tl.arange(0, _LIST)
    ahead = tl.sum(((keys > key(value, token)) & (places < count)).to(tl.int32), axis=0)
    return ahead, ahead < tl.minimum(count, need)


@triton.jit
def value_of_token(row, token, BLOCK: tl.constexpr):
    """Returns a given token's raw value; -inf outside of [0, V) and where it is not finite."""
    value = raw_values(row.logits, token, (token >= 0) & (token < row.V))
    if row.side is not None:
        one = tl.zeros([1], tl.int32) + token
        value = tl.maximum(value, tl.max(side_find(row, one, BLOCK), axis=0))
    return value


@triton.jit
def store_top(r, keys, count, n_top, scaled, report):
    """Stores the first n_top tokens of the order, with -inf after key `last`, and padding after n_top."""
    places = tl.arange(0, _LIST)
    shown = (places < n_top) & (places < count)
    found = (value_of(keys) - scaled.shift) / scaled.unit - scaled.log_over
    at = r * report.n_columns + places
    tl.store(report.top_ids + at, tl.where(shown, id_of(keys), -1), mask=places < report.n_columns)
    found = tl.where(shown & (keys >= scaled.last), found, -float("inf"))
    tl.store(report.top_logprobs + at, found, mask=places < report.n_columns)


@triton.jit
def store_chosen(r, row, given, n_chosen, scaled, report):
    """Stores log-probabilities of the chosen ids; a row without any reads nothing."""
    BLOCK: tl.constexpr = _CHOSEN_SIDE if row.side is not None else _CHOSEN
    out = report.chosen_logprobs + r.to(tl.int64) * report.c_columns
    for first in range(0, report.c_columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.full([BLOCK], -float("inf"), tl.float32)
        if first < n_chosen:
            ids = tl.load(given + at, mask=at < n_chosen, other=-1)
            inside = (ids >= 0) & (ids < row.V)
            z = values(row, ids, inside)
            if row.side is not None:
                z = tl.maximum(z, side_find(row, ids, _SIDE_AT_ONCE))
            shows = inside & (z > -float("inf")) & (key(z, ids) >= scaled.last)
            found = tl.where(shows, (z - scaled.shift) / scaled.unit - scaled.log_over, -float("inf"))
        tl.store(out + at, found, mask=at < report.c_columns)


@triton.jit
def store_nothing(r, report):
    """Stores the padding of a row that reports nothing."""
    at = tl.arange(0, _LIST)
    tops = r * report.n_columns + at
    tl.store(report.top_ids + tops, -1, mask=at < report.n_columns)
    tl.store(report.top_logprobs + tops, -float("inf"), mask=at < report.n_columns)
    out = report.chosen_logprobs + r.to(tl.int64) * report.c_columns
    for first in range(0, report.c_columns, _LIST):
        tl.store(out + first + at, -float("inf"), mask=first + at < report.c_columns)
    tl.store(report.logprobs + r, -float("inf"))
    tl.store(report.ranks + r, 0)
