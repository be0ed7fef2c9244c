"""Twin of `residual`: the token behind a rejected draft, from max(P p - q, 0), in float64.

As in `select`, a row that all tokens stay in is drawn in two levels, one number a group of 128 ids and then one a token
of it; tokens of the overlay and of a proposal that names its ids stand outside of their groups. A row of which a filter
keeps a part is drawn with one number a kept token. The numbers are the residual's own: those that drafted or accepted
would make what they decided likelier.
"""

import numpy as np

from gpu_sampler.reference.order import Int64s
from gpu_sampler.reference.philox import Purpose, gumbel, words
from gpu_sampler.reference.row_stats import GROUP, Float64s
from gpu_sampler.reference.select import Row


def residual(p_V: Float64s, q_V: Float64s, weight: float = 1.0) -> Float64s:
    """[V], not normalised: max(P p - q, 0). `weight` is P, which is 1 but in block verification."""
    return np.maximum(weight * p_V - q_V, 0.0)


def draw_residual(weights_V: Float64s, row: Row, singles: Int64s, *, listed: bool) -> int:
    """The token, by the seed, position and branch of `row`. Some weight is positive. `listed`: a filter keeps a part of
    the row."""
    with np.errstate(divide="ignore"):
        logs_V = np.log(weights_V)
    if listed:
        ids = np.flatnonzero(weights_V > 0)
        return int(ids[(logs_V[ids] + _noise(row, ids, Purpose.RESID_TOKEN)).argmax()])
    grouped = _grouped(weights_V, singles)
    with np.errstate(divide="ignore"):
        scores = np.log(grouped.sum(axis=1)) + _noise(row, np.arange(len(grouped)), Purpose.RESID_GROUP)
        group = int(scores.argmax())
        inside = np.log(grouped[group])
    ids = group * GROUP + np.arange(GROUP)
    token = int(ids[(inside + _noise(row, ids, Purpose.RESID_TOKEN)).argmax()])
    if len(singles):
        alone = logs_V[singles] + _noise(row, singles, Purpose.RESID_TOKEN)
        if alone.max() > scores.max():
            token = int(singles[alone == alone.max()].min())
    return token


def _grouped(weights_V: Float64s, singles: Int64s) -> Float64s:
    """[G, 128] without the singles; the last group filled up with 0."""
    others = np.zeros(-(-len(weights_V) // GROUP) * GROUP)
    others[: len(weights_V)] = weights_V
    others[singles] = 0.0
    return others.reshape(-1, GROUP)


def _noise(row: Row, ids: Int64s, purpose: Purpose) -> Float64s:
    return gumbel(words(row.seed, ids, row.position, purpose, 0, row.branch)).astype(np.float64)
