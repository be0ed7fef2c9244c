"""Turns the vectors of a pooled head into those of an answer.

Shape legend: R rows, H numbers of a vector, D numbers that are kept.
"""

import numpy as np
import numpy.typing as npt

from scoring.normalize import Float32s, Float64s

TINY = 1e-12  # the least length that a vector is divided by, as in torch


def cut_vectors(values: Float32s, dimensions: int | None, *, normalise: bool) -> Float32s:
    """Returns vectors cut to their first numbers, and of length 1 where `normalise` says so, f32 [R, D].

    Args:
        values: [R, H].
        dimensions: D, for models that were trained so (Kusupati et al., Matryoshka Representation Learning, 2022).
            None: H.
        normalise: Divides each vector by its length.
    """
    kept = values[:, :dimensions]
    return unit_vectors(kept).astype(np.float32) if normalise else np.ascontiguousarray(kept)


def unit_vectors(values: npt.NDArray[np.floating]) -> Float64s:
    """Returns vectors [R, H] divided by their lengths, in float64."""
    exact = values.astype(np.float64)
    units: Float64s = exact / np.maximum(np.linalg.norm(exact, axis=1, keepdims=True), TINY)
    return units


def cosines(first: npt.NDArray[np.floating], second: npt.NDArray[np.floating]) -> Float64s:
    """Returns the cosine of each pair of vectors, [R], of vectors [R, H] or [1, H] and [R, H]."""
    found: Float64s = (unit_vectors(first) * unit_vectors(second)).sum(axis=1)
    return found
