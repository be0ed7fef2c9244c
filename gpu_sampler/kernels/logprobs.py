"""Reports a row: its total, the rank of its token, its first tokens and the ids that the request named.

    logprob(x) = (x - shift) / unit - ln(over)

`over` sums all tokens, or those that a processed list keeps: then tokens after key `last` have -inf.
"""

import triton
import triton.language as tl

from gpu_sampler.kernels.common import id_of, key, side_find, side_sum, value_of, values
from gpu_sampler.workspace import LIST

_LIST: tl.constexpr = tl.constexpr(LIST)
_CHOSEN: tl.constexpr = tl.constexpr(128)
_CHOSEN_SIDE: tl.constexpr = tl.constexpr(16)  # fewer where each is compared with a side list: most rows ask for few
_SIDE_AT_ONCE: tl.constexpr = tl.constexpr(256)


@triton.jit
def total_of(m, s, side, length, best, scale, SIDE: tl.constexpr):
    """Returns Z, the sum of exponentials of a row relative to `best`, from its group statistics, by a fixed tree."""
    total = tl.sum(tl.where(m > -float("inf"), s * tl.exp2((m - best) * scale), 0.0), axis=0)
    if SIDE:
        total += side_sum(side, length, best, scale)
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
def value_of_token(row, ids_side, side, length, token, V, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a given token's raw value; -inf outside of [0, V) and where it is not finite."""
    z = tl.load(row + token, mask=(token >= 0) & (token < V), other=-float("inf")).to(tl.float32)
    value = tl.where(z < float("inf"), z, -float("inf"))
    if SIDE:
        one = tl.zeros([1], tl.int32) + token
        value = tl.maximum(value, tl.max(side_find(ids_side, side, length, one, BLOCK), axis=0))
    return value


@triton.jit
def store_top(r, keys, count, n_top, last, shift, unit, log_over, top_ids, top_logprobs, n_columns):
    """Stores the first n_top tokens of the order, with -inf after key `last`, and padding after n_top."""
    places = tl.arange(0, _LIST)
    shown = (places < n_top) & (places < count)
    logprobs = tl.where(shown & (keys >= last), (value_of(keys) - shift) / unit - log_over, -float("inf"))
    at = r * n_columns + places
    tl.store(top_ids + at, tl.where(shown, id_of(keys), -1), mask=places < n_columns)
    tl.store(top_logprobs + at, logprobs, mask=places < n_columns)


@triton.jit
def store_chosen(
    row, side_ids, side, length, masks, mask_row, mask_words, given, n_chosen, last, shift, unit, log_over,
    out, c_columns, V, SIDE: tl.constexpr,
):  # fmt: skip
    """Stores log-probabilities of the chosen ids; a row without any reads nothing."""
    BLOCK: tl.constexpr = _CHOSEN_SIDE if SIDE else _CHOSEN
    for first in range(0, c_columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.full([BLOCK], -float("inf"), tl.float32)
        if first < n_chosen:
            ids = tl.load(given + at, mask=at < n_chosen, other=-1)
            inside = (ids >= 0) & (ids < V)
            z = values(row, ids, inside, masks, mask_row, mask_words)
            if SIDE:
                z = tl.maximum(z, side_find(side_ids, side, length, ids, _SIDE_AT_ONCE))
            shows = inside & (z > -float("inf")) & (key(z, ids) >= last)
            found = tl.where(shows, (z - shift) / unit - log_over, -float("inf"))
        tl.store(out + at, found, mask=at < c_columns)


@triton.jit
def store_nothing(r, top_ids, top_logprobs, n_columns, chosen_logprobs, c_columns, logprobs, ranks):
    """Stores the padding of a row that reports nothing."""
    at = tl.arange(0, _LIST)
    tl.store(top_ids + r * n_columns + at, -1, mask=at < n_columns)
    tl.store(top_logprobs + r * n_columns + at, -float("inf"), mask=at < n_columns)
    for first in range(0, c_columns, _LIST):
        tl.store(chosen_logprobs + r.to(tl.int64) * c_columns + first + at, -float("inf"), mask=first + at < c_columns)
    tl.store(logprobs + r, -float("inf"))
    tl.store(ranks + r, 0)
