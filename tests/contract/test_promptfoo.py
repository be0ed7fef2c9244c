"""promptfoo 0.120, as a library of Node: an evaluation with one assertion that holds and one that does not."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def told(url: str, run_client: Callable[..., Any], messages: list[Any]) -> Any:
    return run_client("promptfoo", {"url": url, "messages": messages})


def test_what_is_judged_is_the_librarys_greedy_answer(told: Any, reference: Any, messages: Any) -> None:
    assert told["texts"] == [reference.reply(messages)] * 2
    assert sorted(told["passed"]) == [False, True]
    assert (told["stats"]["successes"], told["stats"]["failures"], told["stats"]["errors"]) == (1, 1, 0)
    assert told["stats"]["tokenUsage"]["completion"] > 2


def test_a_refusal_is_reported_with_its_field(told: Any) -> None:
    assert all("`temperature` must be" in error for error in told["refused"])
