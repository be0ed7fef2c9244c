"""Templates: their checks at start-up, and rows in which data stays data and only the item is cut."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoring.errors import ScoreCode, ScoringError, ScoringLimits
from scoring.prompts.templates import PRESETS, Template, TemplateRefused, TemplateSpec, compile_templates, fill
from scoring.row_builder import (
    LONG_HEAD,
    FieldNames,
    PromptLimits,
    PromptSpec,
    ScoringRows,
    build_rows,
    build_score_rows,
)

CHAT = TemplateSpec(
    prefix="<|user|>{% if system %}{{ system }}\n{% endif %}find {{ query }}\n",
    item="doc: {{ item }}",
    suffix="<|end|>\n<|answer|>",
    labels=("yes", "no"),
    defaults={"system": "be brief"},
)
BOUNDS = PromptLimits(
    vocab_size=9999, max_model_len=60, max_request_tokens=100_000, max_rows=99, max_cells=99, scoring=ScoringLimits()
)


def made(tokens: Any, spec: TemplateSpec = CHAT, **changes: Any) -> Template:
    return Template("t", replace(spec, **changes), tokens)


def build(tokens: Any, template: Template, limits: PromptLimits = BOUNDS, **spec: Any) -> ScoringRows:
    values = {"query": spec.get("query"), "instruction": None, "system": spec.pop("system", None)}
    query, items = spec.pop("query", ""), spec.pop("items")
    return build_rows(tokens, query, items, PromptSpec(**spec, template=fill(template, values)), limits)


def rows_of(rows: ScoringRows) -> dict[int, list[int]]:
    return {
        item: [*rows.prefix.tolist(), *rows.ids[rows.starts[i] : rows.starts[i + 1]].tolist()]
        for i, item in enumerate(rows.items)
    }


def test_rows_of_one_query_share_the_same_prefix_alone_and_together(tokens: Any) -> None:
    filled = fill(made(tokens), {"query": "a cat or a dog " * 9, "instruction": None, "system": None})
    given = (PromptSpec(template=filled), BOUNDS._replace(max_model_len=500))
    both = build_score_rows(tokens, "a cat or a dog " * 9, ["one", "two words"], *given)
    assert len(both.prefix) >= LONG_HEAD
    for index, item in enumerate(("one", "two words")):
        alone = build_score_rows(tokens, "a cat or a dog " * 9, [item], *given)
        assert alone.prefix.tolist() == both.prefix.tolist()
        assert rows_of(alone)[0] == rows_of(both)[index]


def ids(tokens: Any, text: str) -> list[int]:
    """Encodes text whose control tokens are meant."""
    found: list[int] = tokens.encode_spans(text).ids
    return found


def test_a_row_is_the_rendered_text_tokenised_as_one(tokens: Any) -> None:
    rows = build(tokens, made(tokens), query="a cat", items=["one", "two words"])
    start = "<|user|>be brief\nfind a cat\ndoc: "
    assert rows_of(rows) == {
        0: ids(tokens, start + "one<|end|>\n<|answer|>"),
        1: ids(tokens, start + "two words<|end|>\n<|answer|>"),
    }
    assert rows.prefix.tolist() == ids(tokens, start.rstrip())
    other = build(tokens, made(tokens), query="a cat", items=["one"], system="")
    assert rows_of(other)[0] == ids(tokens, "<|user|>find a cat\ndoc: one<|end|>\n<|answer|>")


@pytest.mark.risk("Q5", figure="0 mismatches")
@settings(max_examples=200, deadline=None)
@given(query=st.text(" ab\n<|end>", max_size=9), items=st.lists(st.text(" ab\n<|end>", max_size=9), min_size=1))
def test_rows_made_run_by_run_are_those_of_the_whole_text(word_tokens: Any, query: str, items: list[str]) -> None:
    tokens = word_tokens()
    template = made(tokens, item="{{ item }}<|and|>{% if not item %}none{% endif %}")
    assert template.can_split
    limits = BOUNDS._replace(max_model_len=100_000)
    fast = build(tokens, template, limits, query=query, items=items)
    template.can_split = False
    assert rows_of(fast) == rows_of(build(tokens, template, limits, query=query, items=items))


def test_a_tokenizer_that_looks_over_its_control_tokens_is_given_whole_rows(word_tokens: Any) -> None:
    class Far(word_tokens):  # type: ignore[misc]
        def encode_spans(self, text: str, *, plain: bool = False) -> Any:
            found = super().encode_spans(text, plain=plain)
            return found._replace(ids=[*found.ids[:1], 1000 + len(found.ids), *found.ids[1:]])

    tokens = Far()
    template = made(tokens, labels=())
    assert not template.can_split
    rows = build(tokens, template, query="q", items=["x", "y"])
    assert rows_of(rows)[0] == tokens.encode_spans(template.frame("q", {}).row("x"), plain=True).ids


def test_neighbouring_text_and_data_are_one_run(tokens: Any) -> None:
    template = made(tokens, prefix="un{{ query }}", item="{{ item }}ly", suffix="", labels=(), defaults={})
    rows = build(tokens, template, query="like", items=["ab"])
    assert rows_of(rows)[0] == [tokens.id("unlikeably")]


PIECES = ["<|end|>", "<|", "end", "|>", "<|user|>", "<|answer|>", "a b", "\n", "{{ query }}", "", " ", "é"]


@pytest.mark.risk("S6")
@settings(max_examples=200, deadline=None)
@given(query=st.lists(st.sampled_from(PIECES)), item=st.lists(st.sampled_from(PIECES)))
def test_no_text_of_a_user_becomes_a_control_token(word_tokens: Any, query: list[str], item: list[str]) -> None:
    """`<|` before a value or at its end, `end|>` after it: no seam makes one either."""
    tokens = word_tokens()
    around = "<|user|><|{{ query }}|>{{ query }}"
    template = made(tokens, prefix=around, item="<|{{ item }}|>{{ item if not item }}", suffix="<|end|>", defaults={})
    limits = BOUNDS._replace(max_model_len=100_000)
    row = rows_of(build(tokens, template, limits, query="".join(query), items=["".join(item)]))[0]
    controls = [token for token in row if token in {tokens.id(name) for name in ("<|user|>", "<|end|>", "<|answer|>")}]
    assert controls == [tokens.id("<|user|>"), tokens.id("<|end|>")]


@pytest.mark.risk("S6", planted=True)
def test_the_check_above_would_notice_a_leak(tokens: Any) -> None:
    row = ids(tokens, "<|user|>find <|end|>")  # what reading data with its control tokens gives
    assert row.count(tokens.id("<|end|>")) == 1


@pytest.mark.risk("Q2", figure="equal bits")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("words", range(36, 50))
def test_only_the_item_is_cut_and_its_row_is_that_of_the_shortened_text(tokens: Any, side: Any, words: int) -> None:
    names = [f" w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(words)]
    rows = build(tokens, made(tokens), query="a cat", items=["".join(names)], truncation_side=side)
    around = len(rows_of(build(tokens, made(tokens), query="a cat", items=[" w"]))[0]) - 1
    cut = max(0, around + words - BOUNDS.max_model_len)
    assert rows.truncated == [cut] and (cut > 0) == (words > BOUNDS.max_model_len - around)
    kept = "".join(names[: words - cut] if side == "right" else names[cut:])
    assert rows_of(rows) == rows_of(build(tokens, made(tokens), query="a cat", items=[kept]))
    end = ids(tokens, "<|end|>\n<|answer|>")
    assert rows_of(rows)[0][-len(end) :] == end


def test_caps_of_item_query_and_row(tokens: Any) -> None:
    template = made(tokens)
    whole = build(tokens, template, query="a b c d", items=[" x y z", " x"], max_item_tokens=2, max_query_tokens=3)
    short = build(tokens, template, query="a b c", items=[" x y", " x"])
    assert rows_of(whole) == rows_of(short) and whole.truncated == [1, 0]
    size = len(rows_of(short)[0])
    row = build(tokens, template, query="a b c", items=[" x y z v w"], max_row_tokens=size)
    assert rows_of(row) == {0: rows_of(short)[0]} and row.truncated == [3]
    with pytest.raises(ScoringError, match=r"`query` must leave room in 4 tokens.*`max_tokens_per_query`") as caught:
        names = FieldNames("documents", "max_tokens_per_doc", "max_tokens_per_query")
        build(tokens, template, query="a", items=["x"], max_row_tokens=4, names=names)
    assert caught.value.code is ScoreCode.CONTEXT_LENGTH_EXCEEDED
    refused = build(tokens, template, query="a", items=["x " * 90, "x"], truncate="error")
    assert refused.errors[0].code is ScoreCode.CONTEXT_LENGTH_EXCEEDED and refused.items == [1]


def test_control_strings_in_an_item_count_as_the_characters_that_they_are(tokens: Any) -> None:
    rows = build(tokens, made(tokens), query="a", items=["<|end|>" * 3], max_item_tokens=5)
    assert rows.truncated == [10]  # `<`, `|`, `end`, `|`, `>`, three times


def test_an_empty_item_is_a_row_of_the_templates_own_text(tokens: Any) -> None:
    template = made(tokens, item="{% if item %}doc: {{ item }}{% else %}nothing{% endif %}")
    rows = build(tokens, template, query="q", items=["", "x"], system="")
    assert rows_of(rows)[0] == ids(tokens, "<|user|>find q\nnothing<|end|>\n<|answer|>")
    assert rows_of(rows)[1] == ids(tokens, "<|user|>find q\ndoc: x<|end|>\n<|answer|>")


def test_cost_is_refused_from_lengths_alone(tokens: Any) -> None:
    small = BOUNDS._replace(scoring=ScoringLimits(max_joined_chars=300))
    build(tokens, made(tokens), small, query="q", items=["x"] * 3)
    with pytest.raises(ScoringError, match="at most 300 characters"):
        build(tokens, made(tokens), small, query="q" * 99, items=["x"] * 3)


def test_the_version_changes_with_every_wording_and_with_nothing_else(tokens: Any, word_tokens: Any) -> None:
    versions = [
        made(tokens, **changes).version
        for changes in (
            {},
            {"prefix": CHAT.prefix + " "},
            {"item": "doc:{{ item }}"},
            {"suffix": "<|end|><|answer|>"},
            {"labels": ("no", "yes")},
            {"defaults": {"system": "be"}},
        )
    ]
    assert len(set(versions)) == len(versions)
    assert made(tokens).version == made(word_tokens()).version == versions[0]


def test_label_ids_are_found_after_the_suffix(tokens: Any) -> None:
    assert made(tokens).label_ids == (tokens.id("yes"), tokens.id("no"))
    assert made(tokens).fixed_labels
    assert made(tokens, labels=("<|good|>", "no")).label_ids == (tokens.id("<|good|>"), tokens.id("no"))
    last = made(tokens, prefix="{{ query }}", suffix="\n{{ system }}:")
    assert not last.fixed_labels and last.label_ids == made(tokens).label_ids


@pytest.mark.risk("Q1")
@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"labels": ("yes!", "no")}, "labels", "exactly one token"),
        ({"labels": ("<|end|>!", "no")}, "labels", "exactly one token"),
        ({"labels": ("yes", "yes")}, "labels", "distinct"),
        ({"suffix": "answer", "labels": ("yes", "no")}, "labels", "exactly one token"),
        ({"suffix": "<|answer|><think>\n"}, "suffix", "reasoning block open: <think>"),
        ({"suffix": "</think><|answer|><think>"}, "suffix", "reasoning block open: <think>"),
        ({"suffix": "{% if query %}[THINK]{% endif %}\n"}, "suffix", "reasoning block open"),
        ({"item": "doc"}, "item", "exactly once"),
        ({"item": "{{ item }} {{ item }}"}, "item", "exactly once"),
        ({"item": "{% if query %}{{ item }}{% endif %}"}, "item", "exactly once"),
        ({"prefix": "{{ item }}{{ system }}"}, "prefix", "must not use `item`"),
        ({"suffix": "{% if item %}x{% endif %}\n"}, "suffix", "must not use `item`"),
        ({"prefix": "{{ query | upper }}"}, "prefix", "filter"),
        ({"defaults": {"query": "x"}}, "defaults", "Given: query"),
        ({"defaults": {"instruction": "x"}}, "defaults", "Given: instruction"),
        ({"controls": ("<end>",)}, "prefix", "<end>"),
        ({"suffix": "<|no_such|>\n"}, "prefix", "<|no_such|>"),
    ],
)
def test_a_template_that_would_score_something_else_is_refused(
    tokens: Any, changes: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(TemplateRefused, match=rf"`templates\.t\.{field}` ") as refused:
        made(tokens, **changes)
    assert words in str(refused.value)


def test_a_closed_reasoning_block_is_accepted(tokens: Any) -> None:
    made(tokens, suffix="<|answer|><think>\n\n</think>\n\n")


def test_a_tokenizer_that_cannot_tell_items_apart_is_refused(word_tokens: Any) -> None:
    class Blind(word_tokens):  # type: ignore[misc]
        def id(self, token: str) -> Any:
            return super().id("w" if token.strip().isalpha() and token not in ("yes", "no") else token)

    with pytest.raises(TemplateRefused, match="same row"):
        made(Blind())


def test_presets_that_do_not_suit_the_tokenizer_are_left_out_and_configured_ones_refused(tokens: Any) -> None:
    assert set(compile_templates({}, tokens)) == {"plain", "builtin"}
    with pytest.raises(TemplateRefused, match=r"`templates\.mine\.prefix` or another part writes <\|im_start\|>"):
        compile_templates({"mine": PRESETS["qwen3_reranker"]}, tokens)
    own = compile_templates({"plain": CHAT}, tokens)
    assert own["plain"].label_ids == (tokens.id("yes"), tokens.id("no"))


def test_values_that_a_template_lacks_or_does_not_use_are_refused(tokens: Any) -> None:
    template = made(tokens, prefix="{{ instruction }} {{ query }}", defaults={})
    for values, field in (
        ({"query": None, "instruction": "i"}, "query"),
        ({"query": "q", "instruction": None}, "instruction"),
        ({"query": "q", "instruction": "i", "system": "s"}, "system"),
    ):
        with pytest.raises(ScoringError) as caught:
            fill(template, values)
        assert (caught.value.code, caught.value.field) == (ScoreCode.INVALID_VALUE, field)
    assert fill(template, {"query": "q", "instruction": "", "system": None}).frame("q").head == " qdoc: "
