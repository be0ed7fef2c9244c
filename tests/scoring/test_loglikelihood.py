"""Rows of continuations against the plainest way to make them, and weights against the formula."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scoring.errors import ScoreCode, ScoringError, ScoringLimits
from scoring.loglikelihood import (
    Continuations,
    LikelihoodRows,
    Normalization,
    build_likelihood_rows,
    continuation_scores,
    normalization_lengths,
)
from scoring.row_builder import PromptLimits, PromptSpec

BOUNDS = PromptLimits(
    vocab_size=1000, max_model_len=17, max_request_tokens=10_000, max_rows=99, max_cells=99, scoring=ScoringLimits()
)


def build(
    tokens: Any, lists: list[Any], per_item: bool = False, limits: PromptLimits = BOUNDS, **spec: Any
) -> LikelihoodRows:
    query, items = spec.pop("query", "is it"), spec.pop("items", [" a cat", " a dog", ""])
    continuations = Continuations(lists=lists if per_item else [lists], per_item=per_item)
    return build_likelihood_rows(tokens, query, items, PromptSpec(**spec), continuations, limits)


def rows_of(spans: LikelihoodRows) -> list[tuple[int, list[int], int]]:
    """(item, ids of the whole row, continuation tokens), by the rule of `Spans`. Also checks what an engine needs."""
    found, own = [], np.empty(0, np.int32)
    for row, item in enumerate(spans.items):
        shared, wanted = int(spans.shared[row]), int(spans.target_lengths[row])
        assert shared <= max(0, len(own) - 1)  # the last token of a row is not computed
        own = np.concatenate((own[:shared], spans.ids[spans.starts[row] : spans.starts[row + 1]]))
        assert shared + wanted < len(own)  # the token before the first wanted one is computed
        assert own[len(own) - wanted :].tolist() == spans.tokens[row]
        assert spans.lengths[row] == len(spans.prefix) + len(own)
        found.append((item, [*spans.prefix.tolist(), *own.tolist()], wanted))
    return found


def test_concat_puts_each_continuation_behind_each_item(tokens: Any) -> None:
    spans = build(tokens, [" yes", " not at all"])
    expected = []
    for item, text in enumerate((" a cat", " a dog", "")):
        for more in (" yes", " not at all"):
            tail = tokens.encode_spans(more).ids
            expected.append((item, [0, *tokens.encode_spans("is it" + text).ids, *tail], len(tail)))
    assert rows_of(spans) == expected


def test_a_list_an_item_and_token_ids(tokens: Any) -> None:
    spans = build(tokens, [[[5], [6, 7]], [[8]]], per_item=True, query=[1, 2], items=[[3], [4]])
    assert rows_of(spans) == [(0, [1, 2, 3, 5], 1), (0, [1, 2, 3, 6, 7], 2), (1, [1, 2, 4, 8], 1)]
    mixed = build(tokens, [[5]])  # ids behind text
    assert rows_of(mixed)[0] == (0, [0, *tokens.encode_spans("is it a cat").ids, 5], 1)


def test_contexts_are_computed_once(tokens: Any) -> None:
    context = list(range(1, 14))
    spans = build(tokens, [[100], [101, 102], [103]], query=context[:6], items=[context[6:], [*context[6:9], 50]])
    new = len(spans.prefix) + len(spans.ids) - len(spans.target_lengths)  # a row's last token is not computed
    # The whole first context; per further row its continuation; and the second item's one token of its own.
    assert new == 13 + (2 + 1) + 1 + (2 + 1)
    rows_of(spans)


def test_a_long_prefix_is_held_once_whatever_the_number_of_items(tokens: Any) -> None:
    limits = BOUNDS._replace(max_model_len=30_000, max_request_tokens=10**9, max_rows=9_999)
    items = [[item] for item in range(1_000)]
    tracemalloc.start()
    try:
        spans = build(tokens, [[5]], limits=limits, query=[1] * 20_000, items=items)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(spans.prefix) == 20_000 and len(spans.items) == 1_000
    assert peak < 5_000_000  # 80 MB with a copy of the prefix an item


def test_joint_takes_what_comes_after_the_common_beginning(tokens: Any) -> None:
    spans = build(tokens, ["s", "s are", " are"], items=[" a cat", " a dog"], seam="joint")
    for (item, ids, wanted), more in zip(rows_of(spans), ("s", "s are", " are") * 2, strict=True):
        text = "is it" + (" a cat", " a dog")[item]
        context, whole = ([0, *tokens.encode_spans(one).ids] for one in (text, text + more))
        same = next((i for i, (a, b) in enumerate(zip(context, whole, strict=False)) if a != b), len(context))
        assert ids == whole and wanted == len(whole) - same
    assert [wanted for _, _, wanted in rows_of(spans)] == [1, 2, 1] * 2  # "cats" replaces "cat"
    alone = build(tokens, ["s"], items=[" a cat"])
    assert rows_of(alone)[0][1] != rows_of(spans)[0][1]


def test_joint_without_a_token_before_the_continuation_fails_the_item(tokens: Any) -> None:
    spans = build(tokens, ["s"], query="", items=["cat", "! a"], seam="joint", add_special_tokens=False)
    assert set(spans.errors) == {0} and spans.errors[0].code is ScoreCode.INVALID_VALUE
    begun = build(tokens, ["s"], query="", items=["", "cat"], seam="joint")
    assert [ids[0] for _, ids, _ in rows_of(begun)] == [0, 0] and not begun.errors
    assert [wanted for _, _, wanted in rows_of(begun)] == [1, 1]


def test_items_are_cut_so_that_the_longest_continuation_fits(tokens: Any) -> None:
    ids = list(range(100, 105))
    spans = build(tokens, [[1], ids], query=[2, 3], items=[list(range(10, 40)), [4]])
    assert rows_of(spans)[1] == (0, [2, 3, *range(10, 20), *ids], 5)
    assert len(rows_of(spans)[1][1]) == 17
    assert spans.truncated == [20, 0]
    refused = build(tokens, [[1], ids], query=[2, 3], items=[list(range(10, 40)), [4]], truncate="error")
    assert refused.errors[0].code is ScoreCode.CONTEXT_LENGTH_EXCEEDED and set(refused.items) == {1}


@pytest.mark.parametrize(
    ("lists", "spec", "code", "field"),
    [
        ([[1], [1000]], {}, ScoreCode.INVALID_TOKEN_ID, "continuations[1]"),
        ([[1], [-1]], {}, ScoreCode.INVALID_TOKEN_ID, "continuations[1]"),
        ([[1], []], {}, ScoreCode.INVALID_VALUE, "continuations[1]"),
        ([[1] * 17], {}, ScoreCode.CONTEXT_LENGTH_EXCEEDED, "continuations"),
        ([[1] * 1025], {}, ScoreCode.INVALID_VALUE, "continuations[0]"),
        ([[1]], {"seam": "joint"}, ScoreCode.INVALID_VALUE, "seam"),
        (["a"], {"query": [1], "items": ["a"]}, ScoreCode.INVALID_VALUE, "items"),
    ],
)
def test_a_bad_request_is_refused_by_field(tokens: Any, lists: Any, spec: Any, code: ScoreCode, field: str) -> None:
    with pytest.raises(ScoringError) as error:
        build(tokens, lists, **spec)
    assert (error.value.code, error.value.field) == (code, field)


def test_a_joined_token_that_the_model_lacks_fails_its_item_only(tokens: Any) -> None:
    tokens.encode_batch(["it", "is?", "self", "itself"], add_special_tokens=False)
    limits = BOUNDS._replace(vocab_size=tokens.id("itself"))
    rows = build(tokens, ["self"], limits=limits, query="", items=["it", "is?"], seam="joint")
    assert list(rows.errors) == [0] and rows.errors[0].code is ScoreCode.INVALID_TOKEN_ID
    assert rows.errors[0].message.startswith("`items[0]` must be text without the tokens that the model lacks")
    assert rows.items == [1]


def test_costs_are_counted_before_rows_are_sent(tokens: Any) -> None:
    limits = BOUNDS._replace(max_request_tokens=30)
    build(tokens, [[5]] * 9, limits=limits, query=[1] * 6, items=[[2], [3]])
    with pytest.raises(ScoringError) as error:
        build(tokens, [[5]] * 13, limits=limits, query=[1] * 6, items=[[2], [3]])
    assert error.value.code is ScoreCode.REQUEST_TOO_LARGE
    few = BOUNDS._replace(scoring=ScoringLimits(max_joined_chars=40))
    with pytest.raises(ScoringError) as error:
        build(tokens, [" yes", " no"], limits=few, seam="joint")
    assert (error.value.code, error.value.field) == (ScoreCode.REQUEST_TOO_LARGE, "continuations")


texts = st.text(alphabet="ab c", min_size=1, max_size=6)


# The fixture is a vocabulary that only grows: examples may share it.
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    query=st.text(alphabet="ab c", max_size=6),
    items=st.lists(st.text(alphabet="ab c", max_size=6), min_size=1, max_size=4),
    more=st.lists(texts, min_size=1, max_size=4),
    joint=st.booleans(),
    item_first=st.booleans(),
)
def test_rows_are_whole_whatever_they_share(
    tokens: Any, query: str, items: list[str], more: list[str], joint: bool, item_first: bool
) -> None:
    limits = BOUNDS._replace(max_model_len=100)
    seam = "joint" if joint else "concat"
    spans = build(tokens, more, limits=limits, query=query, items=items, item_first=item_first, seam=seam)
    found = rows_of(spans)
    assert not spans.errors and [item for item, _, _ in found] == [i for i in range(len(items)) for _ in more]
    for (item, ids, wanted), text in zip(found, more * len(items), strict=True):
        pair = (items[item], query) if item_first else (query, items[item])
        parts = ["".join((*pair, text))] if joint else [*pair, text]
        assert ids == [0, *(token for part in parts for token in tokens.encode_spans(part).ids)]
        assert joint or wanted == len(tokens.encode_spans(text).ids)


# Weights.


def reported(*values: list[float]) -> list[Any]:
    return [np.array(row, np.float32) for row in values]


def test_weights_are_the_softmax_of_the_normalised_sums() -> None:
    values = reported([-1.5, -0.25], [-0.5], [-3.0, -2.0, -1.0])
    greedy = [np.array([True, True]), np.array([False]), np.array([True, False, True])]
    ids = [[1, 2], [3], [4, 5, 6]]
    kinds: list[tuple[Normalization, list[int]]] = [("none", [1, 1, 1]), ("tokens", [2, 1, 3]), ("bytes", [3, 2, 5])]
    for kind, by in kinds:
        assert normalization_lengths(kind, [" no", "é", " äb!"], ids) == by
        found = continuation_scores(values, greedy, ids, by)
        assert found is not None
        powers = [math.exp(total / size) for total, size in zip((-1.75, -0.5, -6.0), by, strict=True)]
        assert [one.weight for one in found] == pytest.approx([power / sum(powers) for power in powers], rel=1e-12)
        assert [one.logprob for one in found] == [-1.75, -0.5, -6.0]
        assert [one.is_greedy for one in found] == [True, False, False]
        assert [one.token_logprobs for one in found] == [row.tolist() for row in values]
        assert [one.token_ids for one in found] == ids


def test_a_long_unlikely_text_has_the_sum_of_its_tokens() -> None:
    """Only a token is clamped: 1,024 tokens at -12 are less likely than 1,000 of them."""
    values = reported([-12.0] * 1024, [-12.0] * 1000, [-np.inf, -1.0])
    yes = [np.ones(len(row), np.bool_) for row in values]
    found = continuation_scores(values, yes, [[1] * len(row) for row in values], [1] * 3)
    assert found is not None
    assert [one.logprob for one in found] == [-12288.0, -12000.0, -10000.0]
    assert [one.logprob for one in found] == [sum(one.token_logprobs) for one in found]


def test_bytes_of_token_ids_are_refused() -> None:
    with pytest.raises(ScoringError) as error:
        normalization_lengths("bytes", [[1], [2]], [[1], [2]])
    assert error.value.field == "normalization"


def test_what_is_impossible_is_clamped_and_all_impossible_is_no_answer() -> None:
    yes = [np.ones(1, np.bool_)] * 2
    found = continuation_scores(reported([-np.inf], [-1.0]), yes, [[1], [2]], [1, 1])
    assert found is not None
    assert [(one.logprob, one.weight) for one in found] == [(-9999.0, 0.0), (-1.0, 1.0)]
    assert found[0].token_logprobs == [-9999.0]
    assert continuation_scores(reported([-np.inf], [-np.inf]), yes, [[1], [2]], [1, 1]) is None
