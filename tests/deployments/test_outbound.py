"""S13: the service calls no other host. No route makes a connection or looks up a name, whatever a request says."""

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

LINK = "http://169.254.169.254/latest/meta-data"
WATCHED = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind"}
WATCHED |= {"urllib.Request", "subprocess.Popen", "os.system", "ftplib.connect", "http.client.connect"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": LINK}),
    ("/detokenize", {"tokens": [1]}),
    ("/generative_scoring", {"query": LINK, "items": [LINK], "label_token_ids": [1]}),
    ("/generative_scoring", {"query": LINK, "items": [LINK], "continuations": [LINK]}),
    ("/v1/score", {"query": LINK, "items": LINK, "label_token_ids": [1]}),
    ("/v1/rerank", {"query": LINK, "documents": [{"text": LINK, "image": LINK, "url": LINK}]}),
    ("/v1/decisions", {"input": LINK, "questions": [{"type": "predicate", "instructions": LINK}]}),
    ("/v1/completions", {"prompt": LINK, "max_tokens": 2, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": LINK, "max_tokens": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LINK}], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": LINK}]}]}),
]
READ = ("/healthz", "/readyz", "/version", "/metrics", "/v1/models", "/tokenizer_info", "/openapi.json")
_seen: list[str] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event in WATCHED:
        _seen.append(f"{event} {arguments[1:]}")


sys.addaudithook(_hook)  # one cannot be taken away again: it listens only inside `watched`


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yields what this process's threads do to reach another host, while the block runs."""
    global _seen
    found: list[str] = []
    _seen = found
    try:
        yield found
    finally:
        _seen = None


@pytest.mark.risk(
    "S13",
    figure="0 calls out; the service answers in an empty network namespace and listens on 127.0.0.1 alone (Ray "
    "itself has 2 listeners on ::)",
)
async def test_no_route_reaches_out(replica_client: Callable[..., Any]) -> None:
    client = await replica_client(
        chat={"template_flags": []}, templates={"ask": {"prefix": "{{ query }}", "item": "{{ item }}", "suffix": "?",
                                                       "labels": ["y", "n"]}}, rerank={"template": "ask"},
    )  # fmt: skip
    statuses = []
    with watched() as found:
        for path, body in BODIES:
            statuses.append((await client.post(path, body)).status_code)
        for path in READ:
            statuses.append((await client.get(path)).status_code)
    assert not found
    assert statuses.count(200) >= len(READ) + 8 and max(statuses) < 500


@pytest.mark.risk("S13", planted=True)
@pytest.mark.parametrize(
    "fault",
    [
        lambda own: socket.getaddrinfo("localhost", 80),
        lambda own: own.connect(("127.0.0.1", 9)),
        lambda own: own.bind(("127.0.0.1", 0)),
    ],
)
def test_reaching_out_from_any_thread_would_be_seen(fault: Callable[[Any], Any]) -> None:
    with watched() as found, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        thread = threading.Thread(target=fault, args=(own,))
        thread.start()
        thread.join()
    assert len(found) == 1
