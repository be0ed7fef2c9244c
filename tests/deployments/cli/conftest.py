"""A service that scores by a formula, over a real socket, and says what it was asked."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

Script = Callable[[dict[str, Any]], tuple[int, Any, dict[str, str]] | None]


def score_of(query: Any, item: Any) -> float:
    text = f"{query}|{item}"
    return (sum(map(ord, text)) * 7919 + len(text)) % 10_007 / 10_007


def items_of(body: dict[str, Any]) -> list[Any]:
    found: list[Any] = body["documents" if "documents" in body else "items"]
    return found


class FakeService:
    """`script` may answer a body itself: status, object, headers; `delay_s` is for every answer."""

    def __init__(self) -> None:
        self.script: Script = lambda body: None
        self.delay_s = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def items_asked(self) -> int:
        return sum(len(items_of(body)) for body in self.bodies)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        scripted = self.script(body)
        return (200, self._answer(path, body), {}) if scripted is None else scripted

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        scores = [score_of(body.get("query"), item) for item in items_of(body)]
        tokens, cached = 10 * len(scores), 4 * len(scores)
        usage = {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
        match path:
            case "/rerank":
                best_first = sorted(range(len(scores)), key=lambda index: -scores[index])
                results = [{"index": index, "relevance_score": scores[index]} for index in best_first]
                return {"results": results, "meta": {"tokens": {"input_tokens": tokens}, "cached_tokens": cached}}
            case "/v1/score":
                rows = [[score, 1 - score] for score in scores]
                return {"scores": rows, "truncated": [False] * len(rows), "usage": usage}
            case _:
                return {"data": [self._row(score) for score in scores], "usage": usage}

    @staticmethod
    def _row(score: float) -> dict[str, Any]:
        return {
            "index": 0, "object": "score", "score": score, "probabilities": [score, 1 - score],
            "logprobs": [-1.0, -2.0], "label_mass": 0.5, "prompt_tokens": 10, "cached_tokens": 4,
            "truncated": False, "truncated_tokens": 0, "error": None,
        }  # fmt: skip

    def _handler(service: "FakeService") -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                service._connections.append(self.connection)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with service._lock:
                    service.bodies.append(body)
                    service.headers.append({**self.headers, "path": self.path})
                    service._at_once += 1
                    service.most_at_once = max(service.most_at_once, service._at_once)
                time.sleep(service.delay_s)
                status, found, headers = service.answer(self.path, body)
                with service._lock:
                    service._at_once -= 1
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                for name, value in (headers | {"content-length": str(len(data))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: object) -> None: ...

        return Handler


@pytest.fixture
def service() -> Iterator[FakeService]:
    with closing(FakeService()) as service:
        yield service


@pytest.fixture
def make_input(tmp_path: Path) -> Callable[..., Path]:
    """`count` records, ten to a query."""

    def make(count: int, name: str = "input.jsonl") -> Path:
        path = tmp_path / name
        records = ({"id": f"r{i}", "query": f"query {i // 10}", "item": f"item {i}"} for i in range(count))
        path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
        return path

    return make


@pytest.fixture(name="score_of")
def score_of_fixture() -> Callable[[Any, Any], float]:
    return score_of
