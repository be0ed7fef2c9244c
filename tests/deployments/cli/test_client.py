"""Patience with a service: what is asked again, how long after, and when it is enough."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deployments.cli.score_files.client import GaveUp, Refusal, ServiceClient

BODY = {"items": ["a"]}
ERROR = {"error": {"code": "overloaded", "message": "Full.", "param": None}}


Patient = Callable[..., tuple[ServiceClient, list[float]]]


@pytest.fixture
def patient(service: Any) -> Iterator[Patient]:
    """A client that writes down how long it would have waited."""
    made: list[ServiceClient] = []

    def make(**options: Any) -> tuple[ServiceClient, list[float]]:
        waits: list[float] = []
        made.append(ServiceClient(**{"url": service.url, "sleep": waits.append} | options))
        return made[-1], waits

    yield make
    for one in made:
        one.close()


Answer = tuple[int, Any, dict[str, str]]


def answers(*found: Answer | None) -> Any:
    script = iter(found)
    return lambda body: next(script)


def test_an_answer_is_the_object(service: Any, patient: Patient) -> None:
    asked, waits = patient(api_key="secret")
    answer = asked.post("/generative_scoring", BODY)
    assert isinstance(answer, dict) and len(answer["data"]) == 1 and not waits
    [headers] = service.headers
    assert headers["authorization"] == "Bearer secret" and headers["path"] == "/generative_scoring"


def test_the_prefix_of_the_url_is_kept(service: Any, patient: Patient) -> None:
    patient(url=service.url + "/app/")[0].post("/generative_scoring", BODY)
    assert service.headers[0]["path"] == "/app/generative_scoring"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://host/?a=1",
        "http://host:80x",
        "http://host:99999",
        "http://a b",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--url"):
        ServiceClient(url)


def test_retry_after_is_obeyed_and_its_absence_means_longer_each_time(service: Any, patient: Patient) -> None:
    busy: Answer = (429, ERROR, {})
    service.script = answers(
        (429, ERROR, {"retry-after": "7"}), *[busy] * 3, (503, ERROR, {"retry-after": "900"}), None
    )
    asked, waits = patient(patience_s=1e9)
    assert isinstance(asked.post("/", BODY), dict)
    assert waits[0] == 7 and waits[4] == 120
    assert 0.5 <= waits[1] <= 1 and 1 <= waits[2] <= 2 and 2 <= waits[3] <= 4
    assert asked.retries == 5


def test_patience_ends(service: Any, patient: Patient) -> None:
    service.script = lambda body: (503, ERROR, {"retry-after": "20"})
    asked, waits = patient(patience_s=15)
    with pytest.raises(GaveUp, match=r"after 1 attempts \(503 overloaded"):
        asked.post("/", BODY)
    assert not waits


def error(code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"code": code, "message": "Words.", "param": param}}


@pytest.mark.parametrize(
    ("status", "body", "headers", "attempts"),
    [
        (422, error("invalid_value", "labels"), {}, 1),
        (401, error("invalid_api_key"), {}, 1),
        (404, b"Not Found", {}, 1),
        (500, error("internal_error"), {}, 3),
        (500, error("nonfinite_logits"), {"x-should-retry": "false"}, 1),
        (408, error("deadline_exceeded"), {"x-should-retry": "false"}, 1),
    ],
)
def test_a_refusal_is_final_when_it_can_only_come_again(
    service: Any, patient: Patient, status: int, body: Any, headers: dict[str, str], attempts: int
) -> None:
    service.script = lambda given: (status, body, headers)
    asked, waits = patient()
    answer = asked.post("/", BODY)
    assert isinstance(answer, Refusal)
    code = f"http_{status}" if isinstance(body, bytes) else body["error"]["code"]
    assert (answer.status, answer.code, len(waits)) == (status, code, attempts - 1)


def test_a_proxy_that_fails_is_asked_again(service: Any, patient: Patient) -> None:
    """Serve's own answer when an ingress dies."""
    service.script = answers(*[(500, b"Internal Server Error", {})] * 5, None)
    asked, waits = patient()
    assert isinstance(asked.post("/", BODY), dict) and len(waits) == 5


def test_an_answer_that_is_no_json_is_the_wrong_url(service: Any, patient: Patient) -> None:
    service.script = lambda body: (200, b"<html>", {})
    answer = patient()[0].post("/", BODY)
    assert isinstance(answer, Refusal) and "right URL" in answer.message


def test_a_service_that_is_not_there_yet_is_waited_for(service: Any, patient: Patient) -> None:
    """Nothing listens at first: the third wait is the last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def sleep(seconds: float) -> None:
        if asked.retries == 3:
            asked._url = service.url

    asked, _ = patient(url=f"http://127.0.0.1:{port}", sleep=sleep)
    assert isinstance(asked.post("/", BODY), dict)
    assert asked.retries == 3


def test_a_connection_that_the_server_closed_is_made_anew(service: Any, patient: Patient) -> None:
    service.script = lambda body: (200, {"data": []}, {"connection": "close"})
    asked, waits = patient()
    for _ in range(3):
        assert isinstance(asked.post("/", BODY), dict)
    assert not waits


def test_threads_have_connections_of_their_own(service: Any, patient: Patient) -> None:
    service.delay_s = 0.05
    asked, waits = patient()
    threads = [threading.Thread(target=asked.post, args=("/", BODY)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert service.most_at_once == 5 and not waits
