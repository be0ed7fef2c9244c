"""Pydantic AI 2.68: an agent's text answers, plain and streamed, and its errors."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def told(url: str, run_client: Callable[..., Any], messages: list[Any]) -> Any:
    return run_client("pydantic_agent", {"url": url, "messages": messages})


def test_texts_and_streams_are_the_librarys_greedy_answer(told: Any, reference: Any, messages: Any) -> None:
    assert told["plain"] == "".join(told["parts"]) == reference.reply(messages)
    assert len(told["parts"]) > 1 and min(told["tokens"]) > 0


@pytest.mark.parametrize(
    ("name", "kind", "status"),
    [("model", "ModelNotFoundError", 404), ("temperature", "ModelRequestRejectedError", 422)],
)
def test_errors_are_the_clients_own(told: Any, name: str, kind: str, status: int) -> None:
    assert told["errors"][name] == {"kind": kind, "status": status}
