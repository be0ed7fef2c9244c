"""Order, scores and texts of a ranking."""

import math
from typing import Any

import numpy as np
import pytest

from scoring.errors import ScoringError
from scoring.prompts.templates import PRESETS, Template, TemplateRefused, TemplateSpec
from scoring.rerank import Ranked, document_text, log_odds, ranked, relevance, rerank_template


def test_the_order_is_by_score_and_then_by_place() -> None:
    scores = np.array([0.5, 0.9, 0.5, 0.1, 0.9])
    whole = [Ranked(1, 0.9), Ranked(4, 0.9), Ranked(0, 0.5), Ranked(2, 0.5), Ranked(3, 0.1)]
    assert ranked(scores, scores, None) == whole
    assert ranked(scores, scores, 0) == ranked(scores, scores, 17) == whole
    assert ranked(scores, scores, 2) == whole[:2]


def test_relevance_is_the_share_of_yes_and_its_raw_form_the_log_odds() -> None:
    pairs = [(-0.1, -2.4), (-30.0, -0.0), (-0.0, -40.0), (-3.0, -3.0), (-900.0, -0.0), (-1.0, -0.5)]
    odds = log_odds(np.array(pairs, np.float32))
    for (yes, no), odd, score in zip(np.array(pairs, np.float32).tolist(), odds, relevance(odds), strict=True):
        assert odd == yes - no
        assert score == pytest.approx(math.exp(yes) / (math.exp(yes) + math.exp(no)), rel=1e-12)


def test_no_weight_on_a_label_gives_finite_numbers() -> None:
    odds = log_odds(np.array([[-np.inf, 0], [0, -np.inf], [-np.inf, -np.inf]], np.float32))
    assert odds.tolist() == [-9999.0, 9999.0, 0.0]
    assert relevance(odds).tolist() == [0.0, 1.0, 0.5]


def test_the_text_of_a_document() -> None:
    document = {"title": "T", "text": "x", "year": 1999, "tags": ["a"], "none": None}
    assert document_text("plain", ["title"], "documents[0]") == "plain"
    assert document_text(document, None, "documents[0]") == "x"
    assert document_text(document, ["text"], "documents[0]") == "x"  # Cohere's own default, spelt out
    assert document_text(document, ["title"], "documents[0]") == "T"
    assert document_text(document, ["year", "title"], "documents[0]") == "year: 1999\ntitle: T"
    for names in (["tags"], ["none"], ["missing"], ["text", "other"]):
        with pytest.raises(ScoringError) as caught:
            document_text(document, names, "documents[3]")
        assert caught.value.field == "documents[3]" and "a string or a number" in caught.value.message
        assert not any(name in caught.value.message for name in names if name != "text")
    with pytest.raises(ScoringError) as caught:
        document_text({"title": "T"}, None, "documents[3]")
    assert caught.value.field == "documents[3].text"


def test_the_template_of_a_ranking(tokens: Any) -> None:
    good = Template("good", PRESETS["builtin"], tokens)
    templates = {
        "good": good,
        "plain": Template("plain", PRESETS["plain"], tokens),
        "one": Template("one", TemplateSpec(prefix="{{ query }}", suffix=":", labels=("yes",)), tokens),
        "three": Template("three", TemplateSpec(prefix="{{ query }}", suffix=":", labels=("a", "b", "c")), tokens),
        "blind": Template("blind", TemplateSpec(suffix=":", labels=("yes", "no")), tokens),
        "open": Template("open", TemplateSpec(prefix="{{ query }}{{ system }}", suffix=":", labels=("a", "b")), tokens),
    }
    assert rerank_template(templates, "good") is good
    assert rerank_template(templates, "plain") is templates["plain"]  # for a sequence head, which needs no labels
    assert rerank_template(templates, "one") is templates["one"]  # its logit is the score
    for name in ("three", "blind", "open", "missing"):
        with pytest.raises(TemplateRefused, match=r"rerank\.template"):
            rerank_template(templates, name)
