"""Finds the tokens of a row that a token head answers, and turns the numbers of steps into one score.

Shape legend: R rows, W answers of all rows, K numbers of an answer, S steps of a row.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from scoring.errors import ScoreCode, ScoringError
from scoring.normalize import Float64s
from scoring.row_builder import Int32s, ScoringRows, unshared

Aggregate = Literal["min", "last", "product"]
STEP_WIDTHS = (1, 2)  # numbers of a head that judges steps: one, or (bad, good)


def token_positions(rows: ScoringRows, mark: int | None, field: str) -> tuple[ScoringRows, Int32s]:
    """Finds the tokens that have answers: those that are marked, such as the ends of steps, or all.

    Args:
        rows: The rows.
        mark: Id of the token that ends a step or marks a choice; None: every token is answered.
        field: Name of the request's inputs, for errors.

    Returns:
        The rows, none of whose answered tokens is shared, and the places of those tokens in `ids`, i32 [W].

    Raises:
        ScoringError: A row has no such token.
    """
    if mark is None:
        rows = unshared(rows)
        return rows, np.arange(len(rows.ids), dtype=np.int32)
    steps = np.flatnonzero(rows.prefix == mark)
    rows = unshared(rows, int(steps[0]) if len(steps) else len(rows.prefix))
    positions = np.flatnonzero(rows.ids == mark).astype(np.int32)
    counts = np.diff(np.searchsorted(positions, rows.starts))
    if not counts.all():
        place = f"{field}[{rows.items[int(np.argmin(counts))]}]"
        message = f"`{place}` must hold the token {mark}, which the head reads, at least once. Given: none."
        raise ScoringError(ScoreCode.INVALID_VALUE, message, place)
    return rows, positions


def by_row(rows: ScoringRows, positions: Int32s, values: Float64s) -> Iterator[Float64s]:
    """Yields the answers [S, K] of each row, of those [W, K] of all rows."""
    edges = np.searchsorted(positions, rows.starts).tolist()
    return (values[first:last] for first, last in pairwise(edges))


def step_scores(values: Float64s) -> list[float]:
    """Returns the score of each step: the only number, or that of the second label, which means a good step."""
    scores: list[float] = values[:, -1].tolist()
    return scores


def aggregate(scores: Sequence[float], how: Aggregate) -> float:
    """Returns one score of a row from those of its steps."""
    if how == "min":
        return min(scores)
    return scores[-1] if how == "last" else float(np.prod(scores))
