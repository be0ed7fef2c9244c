"""Columns of a scoring answer, a value an item, and the three layouts made of them."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.protocol import ScoreReply
from scoring.errors import NONFINITE, ItemError
from scoring.normalize import Scores
from scoring.row_builder import Rows

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """N items in request order; values of failed items are meaningless, `errors` names them."""

    probabilities: npt.NDArray[np.float64]  # [N, L]
    logprobs: npt.NDArray[np.float64] | None  # [N, L]
    label_mass: npt.NDArray[np.float64] | None  # [N]
    prompt_tokens: Ints  # [N]
    cached_tokens: Ints  # [N]
    truncated_tokens: Ints  # [N]
    errors: dict[int, ItemError]

    @classmethod
    def none(cls) -> "Columns":
        """Of no items."""
        ints, floats = np.zeros(0, np.int64), np.zeros((0, 0), np.float64)
        return cls(
            probabilities=floats,
            logprobs=None,
            label_mass=None,
            prompt_tokens=ints,
            cached_tokens=ints,
            truncated_tokens=ints,
            errors={},
        )

    def usage(self) -> dict[str, Any]:
        return usage(int(self.prompt_tokens.sum()), int(self.cached_tokens.sum()))

    def rows(self) -> list[dict[str, Any]]:
        count = len(self.prompt_tokens)
        nothing: list[Any] = [None] * count
        found = zip(
            self.probabilities.tolist(),
            nothing if self.logprobs is None else self.logprobs.tolist(),
            nothing if self.label_mass is None else self.label_mass.tolist(),
            self.prompt_tokens.tolist(),
            self.cached_tokens.tolist(),
            self.truncated_tokens.tolist(),
            strict=True,
        )
        return [self._row(index, *values) for index, values in enumerate(found)]

    def _row(
        self, index: int, probabilities: list[float], logprobs: Any, mass: Any, prompt: int, cached: int, cut: int
    ) -> dict[str, Any]:
        error = self.errors.get(index)
        return {
            "index": index,
            "object": "score",
            "score": None if error else probabilities[0],
            "probabilities": None if error else probabilities,
            "logprobs": None if error else logprobs,
            "label_mass": None if error else mass,
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "truncated": cut > 0,
            "truncated_tokens": cut,
            "error": None if error is None else error._asdict(),
        }

    def columns(self) -> dict[str, Any]:
        return {
            "score": self._floats(self.probabilities[:, 0]),
            "probabilities": self._floats(self.probabilities),
            "logprobs": None if self.logprobs is None else self._floats(self.logprobs),
            "label_mass": None if self.label_mass is None else self._floats(self.label_mass),
            "prompt_tokens": self.prompt_tokens.tolist(),
            "cached_tokens": self.cached_tokens.tolist(),
            "truncated_tokens": self.truncated_tokens.tolist(),
            "error": self._errors(),
        }

    def packed(self) -> dict[str, Any]:
        return {
            "score": self._pack(self.probabilities[:, 0]),
            "probabilities": self._pack(self.probabilities),
            "logprobs": None if self.logprobs is None else self._pack(self.logprobs),
            "label_mass": None if self.label_mass is None else self._pack(self.label_mass),
            "prompt_tokens": _base64(self.prompt_tokens, "<i4"),
            "cached_tokens": _base64(self.cached_tokens, "<i4"),
            "truncated_tokens": _base64(self.truncated_tokens, "<i4"),
            "error": self._errors(),
        }

    def _floats(self, values: npt.NDArray[np.float64]) -> list[Any]:
        found: list[Any] = values.tolist()
        for index in self.errors:
            found[index] = None
        return found

    def _pack(self, values: npt.NDArray[np.float64]) -> str:
        values = values.copy()
        values[list(self.errors)] = np.nan
        return _base64(values, "<f4")

    def _errors(self) -> dict[str, dict[str, Any]]:
        return {str(index): error._asdict() for index, error in sorted(self.errors.items())}


def spread(rows: Rows, found: Scores, reply: ScoreReply) -> Columns:
    """Values of rows at the places of their items."""
    count, labels = len(rows.truncated), found.probabilities.shape[1]
    at = np.array(rows.items, np.intp)

    def place(values: npt.NDArray[Any], shape: tuple[int, ...], dtype: type) -> npt.NDArray[Any]:
        out: npt.NDArray[Any] = np.zeros(shape, dtype)
        out[at] = values
        return out

    errors = dict(rows.errors)
    for row in np.flatnonzero(~found.ok).tolist():
        errors[rows.items[row]] = NONFINITE
    return Columns(
        probabilities=place(found.probabilities, (count, labels), np.float64),
        logprobs=None if found.logprobs is None else place(found.logprobs, (count, labels), np.float64),
        label_mass=None if found.label_mass is None else place(found.label_mass, (count,), np.float64),
        prompt_tokens=place(np.array(rows.lengths(), np.int64), (count,), np.int64),
        cached_tokens=place(reply.cached, (count,), np.int64),
        truncated_tokens=np.array(rows.truncated, np.int64),
        errors=errors,
    )


def usage(prompt: int, cached: int) -> dict[str, Any]:
    """Tokens of all rows, and how many of them had to be computed."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 0,
        "total_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": cached},
        "computed_tokens": prompt - cached,
    }


def _base64(values: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")
