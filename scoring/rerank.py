"""Ranks documents: chooses the template, reads each document's text, and orders the scores.

Shape legend: N documents.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scoring.errors import refusal
from scoring.normalize import MIN_LOGPROB, Float64s, sigmoid
from scoring.prompts.templates import Template, TemplateRefused

MAX_LABELS = 2  # yes and no


class Ranked(NamedTuple):
    """Holds one document's score."""

    document: int  # its place in the request
    score: float


def rerank_template(templates: Mapping[str, Template], name: str) -> Template:
    """Returns the template that ranks documents.

    Args:
        templates: All compiled templates by name.
        name: The setting `rerank.template`.

    Raises:
        TemplateRefused: The named template lacks the query or a default, or has more than two labels (the first one
            means yes; the logit of a single one is the score). A model with a sequence head needs none.
    """
    if name not in templates:
        raise TemplateRefused(f"`rerank.template` must be one of {', '.join(sorted(templates))}. Given: {name}.")
    found = templates[name]
    if len(found.labels) > MAX_LABELS or "query" not in found.uses:
        raise TemplateRefused(
            f"`rerank.template` must have a query and two labels, the first of them for yes, or one label whose logit "
            "is the score, or none where the model has a sequence head. "
            f"Given: {name}, with {len(found.labels)} labels."
        )
    lacking = found.uses - {"query", "item"} - found.defaults.keys()
    if lacking:
        raise TemplateRefused(f"`templates.{name}.defaults` must have `{min(lacking)}` for use as `rerank.template`.")
    return found


def document_text(document: str | Mapping[str, object], rank_fields: Sequence[str] | None, where: str) -> str:
    """Returns the text to rank: a string as it is, or an object's ranked field.

    Several ranked fields become `name: value` lines.

    Args:
        document: A string, or an object of fields.
        rank_fields: Names of the fields to rank; None for `text` alone.
        where: The document's place in the request, for errors.

    Raises:
        ScoringError: A ranked field is missing, or is neither a string nor a number.
    """
    if isinstance(document, str):
        return document
    if rank_fields is None or len(rank_fields) == 1:
        return _text(document, rank_fields[0] if rank_fields else "text", where)
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
    raise refusal(field, f"hold each ranked field as a string or a number. Given: {what}.")


def log_odds(label_logprobs: npt.NDArray[np.float32]) -> Float64s:
    """Returns `log p(yes) - log p(no)`, finite, float64 [N], of log-probabilities float32 [N, 2]."""
    values = label_logprobs.astype(np.float64)
    with np.errstate(invalid="ignore"):  # both -inf: such rows have failed already
        return np.nan_to_num(values[:, 0] - values[:, 1], nan=0.0, posinf=-MIN_LOGPROB, neginf=MIN_LOGPROB)


def relevance(odds: Float64s) -> Float64s:
    """Returns `p_yes / (p_yes + p_no)` of log-odds, [N]."""
    return sigmoid(odds)


def ranked(scores: Float64s, raw: Float64s, top_n: int | None, failed: Collection[int] = ()) -> list[Ranked]:
    """Orders documents by raw score, best first, equal ones in the request's order.

    Args:
        scores: The score of each document, [N].
        raw: The same before its activation, [N]: a sigmoid gives 1 to all that are large.
        top_n: How many to return; None and 0 mean all.
        failed: Documents without a score, which are left out.
    """
    order = np.argsort(-raw, kind="stable")
    if failed:
        order = order[~np.isin(order, list(failed))]
    if top_n:
        order = order[:top_n]
    return [Ranked(index, score) for index, score in zip(order.tolist(), scores[order].tolist(), strict=True)]
