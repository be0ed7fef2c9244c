"""Turns the numbers of a sequence head into scores.

Shape legend: N items, R rows, K numbers of an answer.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from scoring.errors import NONFINITE
from scoring.normalize import Float32s, Float64s, ItemScores, by_item, sigmoid
from scoring.row_builder import Int32s, ScoringRows

Activation = Literal["none", "sigmoid", "softmax"]


def default_activation(width: int, problem_type: str | None) -> Activation:
    """Returns the activation that a classification head was trained with.

    It follows the losses of transformers: none for a regression, a sigmoid for labels that do not exclude each other,
    else a softmax, and a sigmoid for a single number.

    Args:
        width: K.
        problem_type: `problem_type` of the checkpoint's config.json.
    """
    if problem_type == "regression":
        return "none"
    return "sigmoid" if width == 1 or problem_type == "multi_label_classification" else "softmax"


def activate(values: npt.NDArray[np.floating], activation: Activation) -> Float64s:
    """Returns the activated numbers, [*, K], in float64."""
    numbers = values.astype(np.float64)
    if activation == "none":
        return numbers
    if activation == "sigmoid":
        return sigmoid(numbers)
    weights = np.exp(numbers - numbers.max(axis=-1, keepdims=True))
    softmax: Float64s = weights / weights.sum(axis=-1, keepdims=True)
    return softmax


def pooled_items(
    rows: ScoringRows, values: Float32s, status: npt.NDArray[np.uint8], cached: Int32s, activation: Activation
) -> ItemScores:
    """Scores the items of a request by the head's numbers of its rows.

    Args:
        rows: The rows that were computed, R of them for N items.
        values: The head's numbers, [R, K].
        status: 0 for each row that was computed without an error, [R].
        cached: Tokens of each row that were found in the prefix cache, [R].
        activation: Applied to the numbers.
    """
    ok = (status == 0) & np.isfinite(values).all(axis=1)
    scores = activate(np.where(ok[:, None], values, np.float32(0)), activation)
    return ItemScores(
        probabilities=by_item(rows, np.where(ok[:, None], scores, 0.0), np.float64),
        logprobs=None,
        label_mass=None,
        prompt_tokens=by_item(rows, np.array(rows.lengths(), np.int64), np.int64),
        cached_tokens=by_item(rows, cached, np.int64),
        truncated_tokens=np.array(rows.truncated, np.int64),
        errors=rows.errors | {rows.items[row]: NONFINITE for row in np.flatnonzero(~ok).tolist()},
    )
