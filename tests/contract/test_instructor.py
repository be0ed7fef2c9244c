"""Instructor 1.17 in its text modes. Its other modes need constraints on the text, which are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def told(url: str, run_client: Callable[..., Any], messages: list[Any]) -> Any:
    return run_client("instructor_text", {"url": url, "messages": messages})


def test_a_text_is_the_librarys_greedy_answer(told: Any, reference: Any, messages: Any) -> None:
    assert told["text"] == reference.reply(messages)


def test_a_text_without_json_fails_in_the_client_and_not_at_the_service(told: Any) -> None:
    """The built-in model has never seen JSON, so the request is served and its text cannot be read."""
    assert told["MD_JSON"]["written"] and "json_invalid" in told["MD_JSON"]["error"]


def test_a_mode_with_constraints_is_refused_by_the_fields_name(told: Any) -> None:
    assert told["JSON"]["written"] is None and "`response_format`" in told["JSON"]["error"]
