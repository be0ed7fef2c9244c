"""Rows of a scoring request against the plainest way to make them."""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoring.errors import ScoreCode, ScoringError, ScoringLimits
from scoring.row_builder import LONG_HEAD, PromptLimits, PromptSpec, ScoringRows, build_rows, build_score_rows

BOUNDS = PromptLimits(
    vocab_size=1000, max_model_len=17, max_request_tokens=10_000, max_rows=99, max_cells=99, scoring=ScoringLimits()
)


def rows_of(rows: ScoringRows) -> dict[int, list[int]]:
    return {
        item: [*rows.prefix.tolist(), *rows.ids[rows.starts[i] : rows.starts[i + 1]].tolist()]
        for i, item in enumerate(rows.items)
    }


def build(tokens: Any, limits: PromptLimits = BOUNDS, **spec: Any) -> ScoringRows:
    return build_rows(tokens, spec.pop("query"), spec.pop("items"), PromptSpec(**spec), limits)


def test_concat_joins_ids_and_puts_one_bos_first(tokens: Any) -> None:
    rows = build(tokens, query="is it", items=["a cat", " a dog"])
    expected = {0: [0, *tokens.encode_spans("is it").ids, *tokens.encode_spans("a cat").ids]}
    expected[1] = [0, *tokens.encode_spans("is it").ids, *tokens.encode_spans(" a dog").ids]
    assert rows_of(rows) == expected


def test_joint_tokenises_the_joined_text(tokens: Any) -> None:
    rows = build(tokens, query="is it", items=["self", "!"], seam="joint")
    assert rows_of(rows)[0] == [0, *tokens.encode_spans("is itself").ids]
    concat = build(tokens, query="is it", items=["self", "!"])
    assert rows_of(concat)[0] != rows_of(rows)[0]


@pytest.mark.parametrize("seam", ["concat", "joint"])
def test_item_first_puts_bos_before_the_item_and_the_query_last(tokens: Any, seam: str) -> None:
    rows = build(tokens, query=" is it?", items=["a cat", "a dog"], item_first=True, seam=seam)
    assert rows_of(rows)[1] == [0, *tokens.encode_spans("a dog is it?").ids]
    assert rows.suffix == " is it?"


def test_the_prefix_is_the_longest_that_all_rows_share(tokens: Any) -> None:
    rows = build(tokens, query=[5, 6], items=[[7, 8, 1], [7, 8, 2], [7, 8, 2, 3]])
    assert rows.prefix.tolist() == [5, 6, 7, 8]
    assert rows.starts.tolist() == [0, 1, 2, 4]


WIDE = BOUNDS._replace(max_model_len=500)
LONG_QUERY = "is it a cat or a dog, and what does it do all day? " * 3


def score_rows(tokens: Any, query: Any, item: Any, **spec: Any) -> ScoringRows:
    """The rows of a request with one item, which are those of `build_rows`."""
    given = (tokens, query, [item], PromptSpec(**spec), WIDE)
    rows = build_score_rows(*given)
    assert rows_of(rows) == rows_of(build_rows(*given))
    return rows


@pytest.mark.parametrize("size", [LONG_HEAD - 1, LONG_HEAD])
def test_a_row_without_others_shares_a_long_query_and_else_all_but_its_last_token(tokens: Any, size: int) -> None:
    rows = score_rows(tokens, [5] * size, [7, 8, 9])
    assert rows.prefix.tolist() == ([5] * size if size >= LONG_HEAD else [5] * size + [7, 8])


@pytest.mark.parametrize("seam", ["concat", "joint"])
def test_texts_of_one_query_share_the_same_prefix_alone_and_together(tokens: Any, seam: Any) -> None:
    one, other = (score_rows(tokens, LONG_QUERY, item, seam=seam) for item in ("A cat.", "The dog."))
    both = build_score_rows(tokens, LONG_QUERY, ["A cat.", "The dog."], PromptSpec(seam=seam), WIDE)
    assert len(both.prefix) >= LONG_HEAD
    assert one.prefix.tolist() == other.prefix.tolist() == both.prefix.tolist()


@pytest.mark.parametrize("seam", ["concat", "joint"])
def test_a_row_that_begins_with_its_item_shares_all_but_its_last_token(tokens: Any, seam: str) -> None:
    rows = score_rows(tokens, LONG_QUERY, "A cat.", seam=seam, item_first=True)
    assert rows.starts.tolist() == [0, 1]


def test_an_empty_item_after_a_long_query_keeps_a_token(tokens: Any) -> None:
    assert score_rows(tokens, [5] * LONG_HEAD, []).starts.tolist() == [0, 1]


@pytest.mark.parametrize("items", [[[]], [[1], []], [[1, 2]], [[1], [1]], [[1], [1, 2]]])
def test_every_row_keeps_a_token_of_its_own(tokens: Any, items: list[list[int]]) -> None:
    rows = build(tokens, query=[5, 6], items=items)
    assert rows_of(rows) == {i: [5, 6, *item] for i, item in enumerate(items)}
    assert min(rows.starts[1:] - rows.starts[:-1]) >= 1


ids = st.lists(st.integers(0, 3), max_size=6)


@settings(max_examples=200, deadline=None)
@given(query=ids, items=st.lists(ids, min_size=1, max_size=9), first=st.booleans())
def test_rows_of_ids_are_query_and_item(query: list[int], items: list[list[int]], first: bool) -> None:
    expected = {i: item + query if first else query + item for i, item in enumerate(items) if query or item}
    rows = build_rows(None, query, items, PromptSpec(item_first=first), BOUNDS)  # type: ignore[arg-type]
    assert rows_of(rows) == expected
    assert set(rows.errors) == set(range(len(items))) - set(expected)
    if expected:
        common = [len(set(column)) == 1 for column in zip(*expected.values(), strict=False)]
        longest = common.index(False) if False in common else len(common)
        assert len(rows.prefix) == min(longest, min(map(len, expected.values())) - 1)


@pytest.mark.parametrize("seam", ["concat", "joint"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("words", range(8, 20))
def test_only_the_item_is_cut_and_its_row_is_that_of_the_shortened_text(
    tokens: Any, seam: str, side: str, first: bool, words: int
) -> None:
    query, names = " is it good?", [f" w{chr(97 + i)}" for i in range(words)]
    item = "".join(names)
    rows = build(tokens, query=query, items=[item], seam=seam, item_first=first, truncation_side=side)
    whole = 1 + words + 4
    cut = max(0, whole - BOUNDS.max_model_len)
    kept = "".join(names[: words - cut] if side == "right" else names[cut:])
    short = build(tokens, query=query, items=[kept], seam=seam, item_first=first)
    assert rows_of(rows) == rows_of(short)
    assert rows.truncated == [cut]
    question = tokens.encode_spans(query).ids
    row = rows_of(rows)[0]
    assert row[-len(question) :] == question if first else row[1 : 1 + len(question)] == question


def test_max_item_tokens_cuts_earlier(tokens: Any) -> None:
    for seam in ("concat", "joint"):
        rows = build(tokens, query="q", items=[" a b c", " a b c d e"], max_item_tokens=3, seam=seam)
        assert rows_of(rows)[0] == rows_of(rows)[1]
        assert rows.truncated == [0, 2]


def test_max_query_tokens_cuts_the_query_and_nothing_else_does(tokens: Any) -> None:
    rows = build(tokens, query="a b c d", items=[" x"], max_query_tokens=2)
    assert rows_of(rows)[0] == [0, *tokens.encode_spans("a b x").ids]
    with pytest.raises(ScoringError) as caught:
        build(tokens, query=" a" * 18, items=["x"])
    assert (caught.value.code, caught.value.field) == (ScoreCode.CONTEXT_LENGTH_EXCEEDED, "query")
    with pytest.raises(ScoringError, match="`query`"):
        build(tokens, query=" a" * 18, items=["x"], seam="joint")


def test_an_item_whose_special_tokens_do_not_fit_fails(tokens: Any) -> None:
    rows = build(tokens, query=" a" * 17, items=[" b", ""], item_first=True)
    assert not rows.items and {error.code for error in rows.errors.values()} == {ScoreCode.CONTEXT_LENGTH_EXCEEDED}
    assert "`items[0]` must be at most 0 tokens (the model's context). Given: 2." in rows.errors[0].message
    rows = build(tokens, query=" a" * 17, items=[" b"], item_first=True, add_special_tokens=False)
    assert rows_of(rows) == {0: tokens.encode_spans(" a" * 17).ids}


def test_truncate_error_fails_the_item_and_not_its_neighbours(tokens: Any) -> None:
    for seam in ("concat", "joint"):
        rows = build(tokens, query="q", items=[" a" * 17, " a"], truncate="error", seam=seam)
        assert rows.errors[0].code is ScoreCode.CONTEXT_LENGTH_EXCEEDED
        assert rows.items == [1]


def test_a_bad_id_fails_its_item_only(tokens: Any) -> None:
    rows = build(tokens, query=[1], items=[[2], [1000], [-1], [2**70], [999]])
    assert rows.items == [0, 4]
    assert {error.code for error in rows.errors.values()} == {ScoreCode.INVALID_TOKEN_ID}
    with pytest.raises(ScoringError, match=r"\[0, 1000\). Given: 1000"):
        build(tokens, query=[1000], items=[[1]])


@pytest.mark.parametrize("spec", [{}, {"seam": "joint"}, {"item_first": True}, {"max_item_tokens": 2}])
def test_a_text_that_is_no_unicode_fails_its_item_only(tokens: Any, spec: dict[str, Any]) -> None:
    rows = build(tokens, query="is it", items=["a cat", "half \ud83d", "", "\U0001f600"], **spec)
    clean = build(tokens, query="is it", items=["a cat", "", "", "\U0001f600"], **spec)
    assert rows_of(rows) == {item: row for item, row in rows_of(clean).items() if item != 1}
    assert [(item, error.code) for item, error in rows.errors.items()] == [(1, ScoreCode.INVALID_VALUE)]
    assert "half \ud83d" not in rows.errors[1].message


def test_query_and_items_are_of_one_kind(tokens: Any) -> None:
    with pytest.raises(ScoringError, match="same kind"):
        build(tokens, query="q", items=[[1]])


def test_cost_is_refused_from_lengths_alone(tokens: Any) -> None:
    small = PromptLimits(
        vocab_size=9,
        max_model_len=17,
        max_request_tokens=20,
        max_rows=99,
        max_cells=99,
        scoring=ScoringLimits(max_joined_chars=50),
    )
    build(tokens, small, query=[1] * 10, items=[[1, 2]] * 5)  # 10 shared and 10 own tokens
    with pytest.raises(ScoringError, match=r"at most 20 tokens together\. Given: 22"):
        build(tokens, small, query=[1] * 10, items=[[1, 2]] * 6)
    with pytest.raises(ScoringError, match="at most 20 tokens together"):
        build(tokens, small, query=[1] * 10, items=[[1, 2]] * 2, item_first=True)
    build(tokens, small, query="q" * 9, items=["a"] * 5, seam="joint")
    with pytest.raises(ScoringError, match=r"at most 50 characters\. Given: 60"):
        build(tokens, small, query="q" * 9, items=["a"] * 6, seam="joint")


def test_an_empty_prompt_is_bos_or_an_error(tokens: Any) -> None:
    for seam in ("concat", "joint"):
        assert rows_of(build(tokens, query="", items=[""], seam=seam)) == {0: [0]}
        rows = build(tokens, query="", items=[""], seam=seam, add_special_tokens=False)
        assert rows.errors[0].code is ScoreCode.INVALID_VALUE


@pytest.mark.parametrize("first", [True, False])
def test_a_refusal_allocates_nothing_a_row(first: bool) -> None:
    """A hundred thousand query tokens before each of 4,096 items would be gigabytes."""
    limits = PromptLimits(
        vocab_size=9,
        max_model_len=200_000,
        max_request_tokens=100_000,
        max_rows=99,
        max_cells=99,
        scoring=ScoringLimits(),
    )
    query, items, spec = [1] * 100_000, [[1]] * 4096, PromptSpec(item_first=first)
    tracemalloc.start()
    try:
        with pytest.raises(ScoringError, match="at most 100000 tokens together"):
            build_rows(None, query, items, spec, limits)  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_ids_of_a_text_that_the_model_lacks_are_the_errors_of_their_items(tokens: Any) -> None:
    """A tokenizer may have more ids than the model."""
    lacks = max(tokens.encode_batch(["a cat?", "zebra"], add_special_tokens=False)[1])
    limits = BOUNDS._replace(vocab_size=lacks)
    rows = build(tokens, limits, query="a", items=["a cat", "zebra", "a"], add_special_tokens=False)
    assert rows.items == [0, 2] and list(rows.errors) == [1]
    error = rows.errors[1]
    assert error.code is ScoreCode.INVALID_TOKEN_ID
    assert error.message.startswith("`items[1]` must be text") and f"gives it id {lacks}" in error.message
    specs: list[dict[str, Any]] = [{}, {"item_first": True}, {"seam": "joint"}, {"seam": "joint", "item_first": True}]
    for spec in specs:
        with pytest.raises(ScoringError) as raised:
            build(tokens, limits, query="zebra", items=["?"], add_special_tokens=False, **spec)
        assert raised.value.field == "query" and f"gives it id {lacks}" in raised.value.message
