"""Attacks a running service for a bounded time: bad inputs, odd headers, and the costliest requests of every route.

`python -m tools.attack http://127.0.0.1:8000 [--seconds 120] [--key KEY] [--seed 1] [--out report.json]` prints a
report and ends with 1 if it found anything: an answer of 5xx that is no refusal, one that does not have the form of the
service's errors, a lost connection, another answer to the same question afterwards, beyond rounding, or a /healthz that
took too long.
It sends to this machine only, over at most `LANES` connections.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import json
import math
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

LANES = 8
MAX_REQUESTS = 20_000
MAX_SECONDS = 900.0
MAX_FINDINGS = 20
TIMEOUT_S = 120.0
HEALTH_S = 0.05  # between two looks at /healthz
SLOW_HEALTH_S = 2.0  # Serve gives a health check 5 s
REFUSED = frozenset((429, 503))
TOLERANCE = 0.03  # of log-probabilities: on a GPU in bfloat16 they differ by about 0.01 with the size of a step
SHARES = (0.5, 0.25, 0.25)  # of the time: bad inputs, headers, costly requests

MESSAGES = [{"role": "user", "content": "a red chair"}]
PREDICATE = {"type": "predicate", "instructions": "It is red.", "name": "red"}
GOOD: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a red chair", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/completions": {"prompt": "a red", "max_tokens": 4, "seed": 1, "logprobs": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4, "seed": 1},
    "/generative_scoring": {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [5]},
    "/rerank": {"query": "a", "texts": ["b", "c"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/v1/decisions": {"input": "a", "questions": [PREDICATE]},
    "/classify": {"input": "a"},
    "/v1/classify": {"input": "a"},
}
PROBE = ("/generative_scoring", GOOD["/generative_scoring"])
ODD: list[Any] = [
    None, True, 0, -1, 1e308, -0.0, 2**63, -(2**64), 0.1, "", "a" * 3000, "\u0000", "\U0001f600" * 50,
    "\u0301" * 500, "<|end|>", [], [[]], [None], [0] * 500, ["a"] * 500, [1, "a"], {}, {"a": {"b": []}}, {"type": "x"},
    [{}], [[1], ["a"]],
]  # fmt: skip
JUNK = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"a"',
    b"\xff\xfe",
    b'{"a":' * 100,
    b'{"prompt": 1e999}',
    b'{"prompt": NaN}',
    b"\xef\xbb\xbf{}",
)
HEADERS = (
    "x-request-id", "x-client-request-id", "x-session-id", "serve_multiplexed_model_id", "serve-multiplexed-model-id",
    "x-request-timeout-seconds", "x-request-disconnect-disabled", "traceparent", "tracestate", "authorization",
    "content-type", "content-encoding", "transfer-encoding", "content-length", "expect", "host", "connection", "cookie",
    "x-forwarded-for", "x-assay-strict", "accept", "accept-encoding", "upgrade", "range", "x-",
)  # fmt: skip
VALUES = (
    b"", b"a", b"caf\xe9", b"\xff\xfe", b"\xc3\x28", b"\xf0\x9f\x98\x80", b"0", b"-1", b"1e309", b"nan", b"9" * 400,
    b"a" * 30_000, b"a, b", b"chunked", b"gzip", b'"', b"a\tb", b"100-continue", b"h2c", b"bytes=0-1", b"Bearer ",
    b"close, keep-alive",
)  # fmt: skip


@dataclass
class Cost:
    """The dearest request of a route."""

    answered_per_byte: float = 0.0
    seconds_per_kilobyte: float = 0.0
    largest_answer: int = 0


@dataclass
class Report:
    """Holds the requests that were sent, and the findings."""

    requests: int = 0
    statuses: dict[str, dict[int, int]] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    health_longest_s: float = 0.0
    health_looks: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)

    def find(self, what: str) -> None:
        """Notes a finding. There may be many."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(what)

    def answered(self, route: str, status: int) -> None:
        """Counts an answer."""
        self.requests += 1
        counts = self.statuses.setdefault(route, {})
        counts[status] = counts.get(status, 0) + 1

    def json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def text(self) -> str:
        """Returns the report for a terminal."""
        lines = [f"{self.requests} requests in {self.seconds:.0f} s", "", "answers by route and status:"]
        for route, counts in sorted(self.statuses.items()):
            lines.append(f"  {route:24} " + ", ".join(f"{status}: {count}" for status, count in sorted(counts.items())))
        lines += ["", "a byte of a request, at most:"]
        for route, cost in sorted(self.costs.items(), key=lambda one: -one[1].answered_per_byte):
            lines.append(
                f"  {route:24} {cost.answered_per_byte:12,.1f} bytes of the answer, "
                f"{cost.seconds_per_kilobyte:8.3f} s a kilobyte, largest answer {cost.largest_answer:,} bytes"
            )
        lines += ["", f"/healthz: longest {1e3 * self.health_longest_s:.0f} ms of {self.health_looks}"]
        lines += ["", f"findings: {len(self.findings)}", *(f"  {one}" for one in self.findings)]
        return "\n".join(lines)


def on_this_machine(url: str) -> str:
    """Returns the URL. Raises ValueError unless it names this machine by its loopback address."""
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return url.rstrip("/")
    raise ValueError(f"The URL must be on 127.0.0.1: this tool attacks. Given: {host or 'no host'}.")


class Attack:
    """Runs the phases one after another, with /healthz watched beside them."""

    def __init__(self, url: str, http: httpx.AsyncClient, key: str | None, rng: random.Random) -> None:
        self._url = on_this_machine(url)
        self._http = http
        self._key = key
        self._rng = rng
        self.report = Report()
        self._routes: dict[str, list[str]] = {}  # names of the fields of the bodies

    async def run(self, seconds: float) -> Report:
        """Attacks for so many seconds. Every phase ends with its share of them, or with `MAX_REQUESTS`."""
        began = time.monotonic()
        self._routes = await self._fields()
        before = await self._probe()
        watch = asyncio.create_task(self._watch())
        for phase, share in zip((self._bad_input, self._bad_headers, self._costly), SHARES, strict=True):
            await self._lanes(phase, share * seconds)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        if not alike(await self._probe(), before):
            self.report.find("the same question has another answer afterwards")
        if self.report.health_longest_s > SLOW_HEALTH_S:
            self.report.find(f"/healthz took {self.report.health_longest_s:.1f} s")
        self.report.seconds = time.monotonic() - began
        return self.report

    async def _lanes(self, phase: Callable[[], Awaitable[None]], seconds: float) -> None:
        end = time.monotonic() + seconds

        async def lane() -> None:
            while time.monotonic() < end and self.report.requests < MAX_REQUESTS:
                await phase()

        await asyncio.gather(*(lane() for _ in range(LANES)))

    async def _fields(self) -> dict[str, list[str]]:
        document = (await self._http.get("/openapi.json")).json()
        found = {}
        for path, methods in document["paths"].items():
            if "post" in methods and path in GOOD:
                content = methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                found[path] = sorted(document["components"]["schemas"][content.rsplit("/", 1)[1]]["properties"])
        return found

    async def _probe(self) -> Any:
        """The part of an answer that follows from the question, or its status on a server without this route."""
        answer = await self._http.post(PROBE[0], json=PROBE[1])
        if answer.status_code != 200:
            return answer.status_code
        return [(row["probabilities"], row["logprobs"]) for row in answer.json()["data"]]

    async def _watch(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=30, trust_env=False) as http:
            while True:
                began = time.monotonic()
                try:
                    await http.get("/healthz")
                except httpx.HTTPError as error:
                    self.report.find(f"/healthz: {type(error).__name__}")
                self.report.health_longest_s = max(self.report.health_longest_s, time.monotonic() - began)
                self.report.health_looks += 1
                await asyncio.sleep(HEALTH_S)

    # Bad inputs: good bodies with odd fields, and bytes that are no request.

    async def _bad_input(self) -> None:
        rng, path = self._rng, self._rng.choice(sorted(self._routes))
        if rng.random() < 0.2:
            data = rng.choice(JUNK)
        else:
            body = dict(GOOD[path])
            for name in rng.sample(self._routes[path], k=min(len(self._routes[path]), rng.randint(1, 3))):
                body[name] = rng.choice(ODD)
            data = json.dumps(body | ({"max_tokens": 4} if "max_tokens" in GOOD[path] else {})).encode()
        await self._post(path, data)

    async def _post(self, path: str, data: bytes) -> None:
        began = time.monotonic()
        try:
            answer = await self._http.post(path, content=data, headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            self.report.find(f"{path}: {type(error).__name__} for {data[:150]!r}")
            return
        size, seconds = len(answer.content), time.monotonic() - began
        self.report.answered(path, answer.status_code)
        cost = self.report.costs.setdefault(path, Cost())
        cost.largest_answer = max(cost.largest_answer, size)
        if len(data) > 20:  # bytes that are no request say nothing
            cost.answered_per_byte = max(cost.answered_per_byte, size / len(data))
            cost.seconds_per_kilobyte = max(cost.seconds_per_kilobyte, 1e3 * seconds / len(data))
        problem = problem_of(answer.status_code, answer.content)
        if problem:
            self.report.find(f"{path}: {problem} for {data[:150]!r}")

    # Headers, by a socket of our own: clients' libraries send no such bytes.

    async def _bad_headers(self) -> None:
        rng, parts = self._rng, urlsplit(self._url)
        name, value = rng.choice(HEADERS), rng.choice(VALUES)
        if rng.random() < 0.3:
            value = bytes(rng.choice([*range(32, 127), *range(128, 256)]) for _ in range(rng.randint(1, 60)))
        body = json.dumps(GOOD["/tokenize"]).encode()
        lines = {"host": b"x", "content-type": b"application/json", "content-length": str(len(body)).encode()}
        lines |= {"authorization": f"Bearer {self._key}".encode()} if self._key else {}
        lines |= {name + ("-" + str(rng.randint(0, 9)) if name == "x-" else ""): value, "connection": b"close"}
        head = b"".join(key.encode() + b": " + text + b"\r\n" for key, text in lines.items())
        answer = b""
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            try:
                writer.write(f"POST {parts.path}/tokenize HTTP/1.1\r\n".encode() + head + b"\r\n" + body)
                async with asyncio.timeout(10):
                    answer = await reader.read(65536)
            finally:
                writer.close()
        first = answer.split(b"\r\n", 1)[0].split(b" ")
        status = int(first[1]) if len(first) > 1 and first[1].isdigit() else 0
        self.report.answered("headers", status)
        if status >= 500 and status not in REFUSED:
            self.report.find(f"header {name}: {value[:60]!r} is answered with {status}")

    # Costly requests: little that asks for much, and much text that is dear to read.

    async def _costly(self) -> None:
        path, body = self._rng.choice(list(costly(sorted(self._routes))))
        await self._post(path, json.dumps(body, ensure_ascii=False).encode())


def problem_of(status: int, content: bytes) -> str | None:
    """Returns what is wrong with an answer: a failure, or an error that is not of the service's form."""
    if status >= 500 and status not in REFUSED:
        return f"status {status}"
    if status < 400:
        return None
    try:
        body = json.loads(content)
        return None if body["error"]["code"] and body["request_id"] else "an error without code or id"
    except (ValueError, KeyError, TypeError):
        return f"{status} that is no error of the service: {content[:80]!r}"


def alike(one: Any, other: Any) -> bool:
    """Says whether two answers are the same, their numbers but for what `engine.numerics: fast` allows."""
    match one, other:
        case list() | tuple(), list() | tuple():
            return len(one) == len(other) and all(map(alike, one, other))
        case float(), float():
            return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(one == other)


def costly(routes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the bodies of each route that cost most for their size."""
    texts = [unit * (200_000 // len(unit.encode())) for unit in ("a", " ", "\u0301", "\U0001f600", "a red chair ")]
    generation = {"n": 16, "max_tokens": 60, "logprobs": 20}
    chat = {"n": 16, "max_tokens": 60, "logprobs": True, "top_logprobs": 20}
    values: list[list[Any]] = [[0.5] * 500_000, [[]] * 500_000, ["a"] * 500_000]
    found: dict[str, list[dict[str, Any]]] = {
        "/tokenize": [{"prompt": text, "return_token_strs": True} for text in texts],
        "/detokenize": [{"tokens": [token] * 100_000} for token in (5, 300)],
        "/v1/completions": [{"prompt": "a", **generation}, {"prompt": "a", "stream": True, **generation}]
        + [{"prompt": text, "max_tokens": 1} for text in texts]
        + [{"prompt": "a", "max_tokens": 1, "user": user} for user in values],
        "/v1/chat/completions": [{"messages": MESSAGES, **chat}],
        "/generative_scoring": [
            {"query": "a", "items": ["a"] * 1000, "label_token_ids": list(range(50)), "layout": layout}
            for layout in ("rows", "columns", "packed")
        ],
        "/v1/score": [{"query": "a", "items": ["a"] * 1000, "label_token_ids": list(range(50))}],
        "/rerank": [{"query": "a", "texts": ["a"] * 1000, "return_text": True}],
        "/v1/decisions": [{"input": "a", "questions": [PREDICATE] * 50}],
    }
    return ((path, body) for path in routes for body in found.get(path, ()))


async def attack(url: str, seconds: float, key: str | None, seed: int) -> Report:
    """Attacks a service and returns the report. Raises ValueError for one that is not on this machine."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=on_this_machine(url), headers=headers, timeout=TIMEOUT_S, trust_env=False
    ) as http:
        return await Attack(url, http, key, random.Random(seed)).run(seconds)


def main() -> int:
    """Attacks as the arguments say, prints the report, and returns 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--key")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not 0 < given.seconds <= MAX_SECONDS:
        parser.error(f"--seconds must be in (0, {MAX_SECONDS:g}]. Given: {given.seconds:g}.")
    try:
        report = asyncio.run(attack(given.url, given.seconds, given.key, given.seed))
    except ValueError as error:
        parser.error(str(error))
    print(report.text())
    if given.out:
        given.out.write_text(report.json(), "utf-8")
    return int(bool(report.findings))


if __name__ == "__main__":
    sys.exit(main())
