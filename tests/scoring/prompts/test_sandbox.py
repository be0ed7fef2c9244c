"""Tests what a template's source may hold, and what it becomes."""

import itertools
from typing import Any

import pytest
from jinja2 import Environment

from scoring.prompts.sandbox import MAX_SOURCE_CHARS, SourceError, compile_source

NAMES = frozenset(("query", "item", "system"))


def rendered(text: str, **values: str) -> str:
    pieces = compile_source(text, NAMES).pieces(values)
    return "".join(values[piece.name] if piece.name else piece.text for piece in pieces)


ACCEPTED = [
    "",
    "text\n\n",
    "{{ query }}",
    "a {{query}} b {{- item }} c\n",
    "{% if system %}[{{ system }}]{% endif %}{{ query }}",
    "{% if system and not item %}1{% elif query or item %}2{{ item }}{% else %}3{% endif %}",
    "{{ query if query else 'none' }}{# comment #}",
    "{% raw %}{{ query }}{% endraw %}{{ '{{' }}",
    "{{ item if system }}",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_a_source_becomes_what_the_template_language_makes_of_it(text: str) -> None:
    for values in itertools.product(("", "x {{ item }} y"), repeat=3):
        given = dict(zip(sorted(NAMES), values, strict=True))
        assert rendered(text, **given) == Environment(keep_trailing_newline=True).from_string(text).render(given)


@pytest.mark.parametrize(
    "value", ["{{ 7 * 7 }}", "{% for x in y %}", "\x00query\x00", "{#", "\ue000", "a\x00b", "<|im_end|>"]
)
def test_values_are_put_in_as_they_are(value: str) -> None:
    assert rendered("<{{ query }}|{{ item }}>", query=value, item=value) == f"<{value}|{value}>"


@pytest.mark.risk("S6", figure="0 leaks")
@pytest.mark.parametrize(
    "text",
    [
        "{{ query | upper }}",
        "{{ 'x' | upper }}",
        "{{ query.upper() }}",
        "{{ query.x }}",
        "{{ query[0] }}",
        "{{ query ~ item }}",
        "{{ query + item }}",
        "{{ query * 3 }}",
        "{{ -query }}",
        "{{ not query }}",
        "{{ query or item }}",
        "{{ 'a' * 10**9 }}",
        "{{ [query] }}",
        "{{ {'a': query} }}",
        "{{ query is string }}",
        "{{ query == 'x' }}",
        "{{ query in item }}",
        "{% if query == 'x' %}{% endif %}",
        "{% if query is defined %}{% endif %}",
        "{% if query | length %}{% endif %}",
        "{% if query.x %}{% endif %}",
        "{% set query = 'x' %}",
        "{% set other = query %}",
        "{% set other %}{{ query }}{% endset %}",
        "{% for x in query %}{% endfor %}",
        "{% for query in 'abc' %}{{ query }}{% endfor %}",
        "{% macro m() %}{{ query }}{% endmacro %}",
        "{% call m() %}{% endcall %}",
        "{% filter upper %}{{ query }}{% endfilter %}",
        "{% block b %}{{ query }}{% endblock %}",
        "{% with x = query %}{% endwith %}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{% autoescape true %}{{ query }}{% endautoescape %}",
        "{{ lipsum() }}",
        "{{ range(9) }}",
        "{{ self }}",
        "{{ other }}",
        "{{ messages }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '\\x00query\\x00\\x00' }}",
        "\x00",
        "{{",
        "{% if query %}",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SourceError):
        compile_source(text, NAMES)


def test_the_refusal_says_what_and_where() -> None:
    with pytest.raises(SourceError, match=r"only use item, query, system.*Given: messages"):
        compile_source("{{ messages }}", NAMES)
    with pytest.raises(SourceError, match=r"Given: filter, line 2"):
        compile_source("x\n{{ query | upper }}", NAMES)


def test_length_is_capped() -> None:
    compile_source("x" * MAX_SOURCE_CHARS, NAMES)
    with pytest.raises(SourceError, match=f"at most {MAX_SOURCE_CHARS} characters. Given: {MAX_SOURCE_CHARS + 1}"):
        compile_source("x" * (MAX_SOURCE_CHARS + 1), NAMES)


def test_every_case_is_made_when_the_source_is_compiled() -> None:
    found: Any = compile_source("{{ query }}{% if system %}{{ item }}{% endif %}", NAMES)
    assert found.names == NAMES and len(found.cases) == 8
