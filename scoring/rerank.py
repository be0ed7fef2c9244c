"""Ranking: which template asks whether a document suits a query, what a document's text is, and the order of scores.

Shape legend: N documents.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scoring.errors import ScoreCode, ScoringError
from scoring.normalize import LOWEST, Float64s
from scoring.templates import Template, TemplateRefused

AUTO = "qwen3_reranker"


class Ranked(NamedTuple):
    document: int  # its place in the request
    score: float


def rerank_template(templates: Mapping[str, Template], name: str | None) -> Template | None:
    """The template named `rerank.template`; None if none is named and the tokenizer has no place for the default one.

    Raises TemplateRefused if it has not two labels, of which the first says yes, or not both variables.
    """
    if name is None:
        return templates.get(AUTO)
    if name not in templates:
        raise TemplateRefused(f"`rerank.template` must be one of {', '.join(sorted(templates))}. Given: {name}.")
    found = templates[name]
    if len(found.labels) != 2 or "query" not in found.uses:
        raise TemplateRefused(
            f"`rerank.template` must have a query and two labels, the first of them for yes. Given: {name}, "
            f"with {len(found.labels)} labels."
        )
    lacking = found.uses - {"query", "item"} - found.defaults.keys()
    if lacking:
        raise TemplateRefused(f"`templates.{name}.defaults` must have `{min(lacking)}` for use as `rerank.template`.")
    return found


def document_text(document: str | Mapping[str, object], rank_fields: Sequence[str] | None, where: str) -> str:
    """The text that is ranked: a string as it is; of an object `text`, or the rank fields as `name: value` lines.

    Raises ScoringError naming the field under `where`.
    """
    if isinstance(document, str):
        return document
    if rank_fields is None:
        return _text(document, "text", where)
    return "\n".join(f"{name}: {_text(document, name, where)}" for name in rank_fields)


def _text(document: Mapping[str, object], name: str, where: str) -> str:
    value = document.get(name)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    # The name is the client's own text, so it is not repeated.
    field = f"{where}.text" if name == "text" else where
    what = "nothing" if name not in document else f"a {type(value).__name__}"
    raise ScoringError(
        ScoreCode.INVALID_VALUE, f"`{field}` must hold each ranked field as a string or a number. Given: {what}.", field
    )


def log_odds(label_logprobs: npt.NDArray[np.float32]) -> Float64s:
    """float64 [N] of float32 [N, 2]: `log p(yes) - log p(no)`, finite."""
    values = label_logprobs.astype(np.float64)
    with np.errstate(invalid="ignore"):  # both -inf: such rows have failed already
        return np.nan_to_num(values[:, 0] - values[:, 1], nan=0.0, posinf=-LOWEST, neginf=LOWEST)


def relevance(odds: Float64s) -> Float64s:
    """`p_yes / (p_yes + p_no)` of log-odds."""
    weights = np.exp(-np.abs(odds))
    return np.where(odds >= 0, 1.0, weights) / (1.0 + weights)


def ranked(scores: Float64s, most: int | None) -> list[Ranked]:
    """Best first, equal ones in the request's order; the first `most`, or all of them for None and 0."""
    order = np.argsort(-scores, kind="stable")
    if most:
        order = order[:most]
    return [Ranked(index, score) for index, score in zip(order.tolist(), scores[order].tolist(), strict=True)]
