"""Turns the queries and keys of a pointer head into a distribution over the marked tokens of each row.

The query of a row's last token meets the key of each marked token (Vinyals et al., Pointer Networks, 2015, with the
product of Luong et al., Effective Approaches to Attention-based Neural Machine Translation, 2015).

Shape legend: R rows, W answered tokens of all rows, D width of queries and keys, M marked tokens of a row.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from scoring.normalize import Float32s, Float64s
from scoring.row_builder import Int32s, ScoringRows


def with_last_tokens(rows: ScoringRows, positions: Int32s) -> Int32s:
    """Returns the places of marked tokens and of each row's last token, ascending, i32 [W].

    Args:
        rows: The rows, which begin with no shared prefix that holds a marked token.
        positions: The places of the marked tokens in `rows.ids`.
    """
    return np.union1d(positions, rows.starts[1:] - 1).astype(np.int32)


def pointer_scores(rows: ScoringRows, positions: Int32s, values: Float32s, mark: int) -> Iterator[Float64s]:
    """Yields the numbers [M] of each row's marked tokens, in their order and before a softmax.

    Args:
        rows: The rows.
        positions: The places that `with_last_tokens` has found, [W].
        values: The head's numbers of these places: queries, then keys, [W, 2 D].
        mark: Id of the marked tokens.
    """
    width = values.shape[1] // 2
    marked = rows.ids[positions] == mark
    edges = np.searchsorted(positions, rows.starts).tolist()
    for first, last in pairwise(edges):
        keys = values[first:last, width:][marked[first:last]].astype(np.float64)
        yield keys @ values[last - 1, :width].astype(np.float64)
