"""Compares the answers of two checkouts of the service, byte for byte.

    python tools/compare_answers.py BASE NEW                           records both checkouts, then compares them
    python tools/compare_answers.py record CHECKOUT --out FILE.jsonl   records one
    python tools/compare_answers.py compare BASE.jsonl NEW.jsonl       compares two recordings

A recording starts the services of `tools/compare_answers_requests.py` one after the other, on the built-in CPU model
and a free port of 127.0.0.1, and sends every request by itself, so that batches and the prefix cache are the same each
time. Record both checkouts on one machine and in one Python environment.

Ids, times, measured durations and seeds that the server draws differ from run to run: `VOLATILE` lists their patterns.
Everything else counts: status, headers, digits, order of keys. Three kinds of answers are compared by what does not
depend on speed or on prose. Tokens that are ready together share an event of a stream, so the events of each choice are
joined first. On /metrics only names and labels count. In /openapi.json descriptions and titles do not count. A name
that the new checkout changes on purpose belongs in `RENAMED`, an answer in `ON_PURPOSE`: it is counted by its reason.
Floats within `ROUNDING` of each other are counted as well, one line an answer with the largest distance.

The exit status is 0 without differences, 1 with differences, 2 where a service does not start.
"""

import argparse
import base64
import contextlib
import http.client
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the file also runs as a script

from tools.compare_answers_requests import SERVICES, Request, build_requests  # noqa: E402

HOST = "127.0.0.1"
READY_S = 300.0
STOP_S = 90.0
ANSWER_S = 120.0
POLL_S = 0.25
MAX_SHOWN = 5  # differences of one answer that are printed
MAX_SHOWN_CHARS = 160
ROUNDING = 2e-5  # of a float and its counterpart, relative above 1: sums of float32 in another order
ROUNDED = " (rounding)"
COLUMN = re.compile(r".*\.columns\.\w+")  # base64 of float32
COMMAND_LINES = ("deployments/cli.py", "deployments/cli/__main__.py", "deployments/cli/main.py")

STEADY: dict[str, dict[str, Any]] = {
    "engine": {"step_s": 10.0, "decode_gap_s": 10.0},
    "health": {"period_s": 3600.0},
}
"""Configuration that keeps measured speed out of answers: steps are not cut by time, and no canary joins a batch."""

RENAMED_SETTINGS: dict[str, str] = {"engine.step_s": "engine.max_step_s"}
"""Settings of `STEADY` and `SERVICES` that the new checkout renames: {"section.field": "new_section.new_field"}.

A checkout that does not accept a configuration under base's names gets it under the new ones.
"""

RENAMED: dict[str, dict[str, str]] = {
    "/metrics": {
        "merge projections": "fuse projections",
        "assay_call_tasks": "assay_micro_batch_requests",
        "assay_failures": "assay_failed_requests",
        "assay_ready_replicas_wanted": "assay_required_replicas",
        "assay_live_requests": "assay_unfinished_requests",
        "assay_live_rows": "assay_running_sequences",
        "assay_step_rows": "assay_step_sequences",
        "assay_head_seconds": "assay_lm_head_seconds",
        "assay_plan_seconds": "assay_schedule_seconds",
        "assay_row_flags": "assay_sampler_flags",
        "assay_spec_runs": "assay_spec_drafts",
        "assay_spec_reached": "assay_spec_verified_tokens",
        "assay_spec_accepted": "assay_spec_accepted_tokens",
        "assay_spec_missing_q": "assay_spec_unknown_drafts",
    }
}
"""Names that the new checkout changes on purpose: {path: {base's name: new name}}.

Each is replaced as a whole word in the bodies of base's answers on that path. A metric's name stands without the
suffixes that Prometheus adds (`_total`, `_bucket`, ...). Example: {"/metrics": {"assay_call_tasks":
"assay_micro_batch_requests"}, "/openapi.json": {"ScoreRow": "ScoredItem"}}.
"""

VOLATILE = (
    (re.compile(r"\b((?:[a-z]+-)*[a-z]+)-[a-z2-7]{26}\b"), r"\1-ID"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "UUID"),
    (re.compile(r'"created":[1-9][0-9]{9}\b'), '"created":"TIME"'),
    (re.compile(r'"canary_age_s":[0-9.e+-]+'), '"canary_age_s":"SECONDS"'),
)
"""Patterns of what differs from run to run, and what stands in their place."""
DRAWN_SEED = re.compile(r'"seed":[0-9]+')  # in answers to requests without a seed of their own
OWN_SEED = re.compile(r'"seed": (?!null)')
EVENT = "data: "
KEEP_ALIVE = ": keep-alive"
VOLATILE_HEADERS = frozenset(("date", "content-length", "x-assay-queue-ms", "x-assay-compute-ms"))
PROSE = frozenset(("description", "title", "summary"))  # keys of /openapi.json
NAMED = frozenset(("properties", "schemas"))  # keys of /openapi.json whose objects have names of fields and schemas
NOTHING = "nothing"
SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?P<labels>\{.*\})? \S+")
STARTING = re.compile(r'route="/readyz".*status="503"')  # whether one is counted depends on the time of the start
PROCESS_LABEL = re.compile(r'\b(replica|pid|instance)="[^"]*"')


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Holds one request and what the service answered to it. `body` is a list of events where it is a stream."""

    service: str
    name: str
    path: str
    sent: str | None
    status: int
    headers: list[list[str]]
    body: str | list[str]


class Difference(NamedTuple):
    """Names one place at which two answers differ."""

    request: str
    where: str
    base: str
    new: str

    def __str__(self) -> str:
        return f"{self.request}\n  at {self.where}\n    base: {_short(self.base)}\n    new:  {_short(self.new)}"


class Change(NamedTuple):
    """Describes differences that the new checkout makes on purpose: the patterns must match their whole values."""

    why: str
    request: str = ".*"
    where: str = ".*"
    base: str = ".*"
    new: str = ".*"

    def covers(self, difference: Difference) -> bool:
        """Returns whether the difference is one of these."""
        return all(re.fullmatch(*pair, re.DOTALL) for pair in zip(self[1:], difference, strict=True))


UNSUPPORTED = r'"`[\w.\[\]]+` is not supported by this %s\. Leave it out\."'
ON_PURPOSE = (
    Change(
        "x-request-id is the id of body and logs", ".*", "headers", r"x-request-id: (UUID|\S+)", "x-request-id: req-ID"
    ),
    Change("the client's own id stands beside it", ".*", "headers", NOTHING, r"x-client-request-id: \S+"),
    Change(
        "a refusal names the route",
        where=r"body\.(error\.)?(message|detail|details\[0\]\.message)",
        base=UNSUPPORTED % "server",
        new=UNSUPPORTED % "route",
    ),
    Change(
        "an error of JSON tells its place",
        base=r'".* JSON in UTF-8, with finite numbers\."',
        new=r'".* JSON in UTF-8, with finite numbers: .+ at line \d+ column \d+\..*"',
    ),
    Change(
        "half a surrogate pair is named by its place",
        where=r"body\.error\.(param|details\[0\]\.param)",
        base="null",
        new='"prompt"',
    ),
    Change("a refused method names those that are taken", base='"This route takes .*"', new=r'"The method must be .*"'),
    Change("HEAD is taken where GET is", ".*", "headers", "allow: GET", "allow: GET, HEAD, OPTIONS"),
    Change("OPTIONS is taken", ".*", "headers", "allow: POST", "allow: POST, OPTIONS"),
    Change("OPTIONS is taken", ".* OPTIONS /healthz .*"),
    *(
        Change("HEAD is taken where GET is", r".* HEAD /v1/models .*", *difference)
        for difference in (
            ("status", "405", "200"),
            ("headers", "allow: GET", "x-request-id: req-ID"),
            ("headers", "x-request-id: UUID", NOTHING),
        )
    ),
    *(
        Change("a path may end in a slash", r".* GET /(v1/models|healthz)/ .*", *difference)
        for difference in (("status", "404", "200"), (r"body \(keys\)", "error, request_id"))
    ),
    Change("the id in the headers is shorter", ".* long header .*", new='"At most 32768 bytes of headers .*"'),
    Change("a model's name in a path is no field", base='"`model` must be .*"', new='"The model of this server is .*"'),
    Change(
        "CPU attention in blocks and a last layer of all rows sum in another order", where=r".*" + re.escape(ROUNDED)
    ),
    Change(
        "two equal documents change places by rounding",
        r"\[plain\] POST (/v\d)?/rerank #\d+",
        r"body\.results\[\d\]\.index",
        "[47]",
        "[47]",
    ),
    *(
        Change("a short stream shares one event", ".* POST /v1/.*completions stream .*", where)
        for where in (r"stream\.shapes \(length\)", r"stream\.shapes\[\d\]")
    ),
    Change("/score takes pairs too", ".* POST (/v1)?/score .*", r"body\.error\.(details\[0\]\.)?(message|param)"),
    Change("/score takes pairs too", ".* POST (/v1)?/score .*", r"body\.error\.details \(length\)"),
    Change(
        "messages may stand in place of items",
        r".* POST (/generative_scoring|(/v\d)?/rerank) .*",
        r"body\.error\.details \(length\)",
    ),
    Change("messages may stand in place of a query", ".* POST /rerank .*", base='"`query` must be a string.*"'),
    Change("a message may be a guard's context", where=r"body\.error\..*", new=".* 'tool' or 'context'.*"),
    Change(
        "documents may be parts of text",
        where=r"body\.(error\.)?(details\[0\]\.)?(message|detail)",
        base=".* parts or images .*",
    ),
    *(
        Change("a template's own names are its flags", ".* POST /v1/chat/completions .*", *difference)
        for difference in (
            (r"body\.error\.(details\[0\]\.)?message", '"`chat_template_kwargs` .*"', '"`chat_template_kwargs` .*"'),
            ("status", "200", "422"),
            (r"body \(keys\)", "id, object, created, model, choices, usage", "error, request_id"),
        )
    ),
    Change(
        "a limit of bytes is named",
        where=r"body\.(error\.)?(details\[0\]\.)?(message|detail)",
        base='"The body must be at most .*"',
        new=r'"The body must be at most .* \(`.*`\)\. .*"',
    ),
    Change("more limits", ".* GET /v1/models.*", r"body(\.data\[0\])?\.assay\.limits \(keys\)"),
    Change(
        "documents come back as the client's own service returns them",
        ".* POST (/v1)?/rerank.*",
        r"body\.results\[\d+\] \(keys\)",
        "index, relevance_score(, truncated)?",
        "index, relevance_score, document(, truncated)?",
    ),
    Change("items that failed are in a header too", ".*", "headers", new=r"x-assay-failed-items: .*"),
    Change("x-request-id is the id of body and logs", ".*", "headers", NOTHING, "x-request-id: req-ID"),
    Change("a refusal tells what was given", base=r'".* Given: given\."', new=r'".* Given: .*\."'),
    Change("the id names its route", where=r"body\.id", base='"score-ID"', new='"generative-scoring-ID"'),
    Change("new metrics", ".* GET /metrics .*", "series", NOTHING),
    Change("the document has new routes and fields", ".* GET /openapi.json .*", r"body\..*"),
    Change("a model tells its head and prompt", ".* GET /v1/models.*", r"body(\.data\[0\])?\.assay \(keys\)"),
    Change(
        "any 64-bit seed is honoured", ".* POST /v1/(chat/)?completions .*", r"body\.choices\[\d+\]\.seed", new="-1"
    ),
    *(
        Change("`max_tokens` of 0 is prefill alone", r".* POST /v1/(chat/)?completions .*", *difference)
        for difference in (
            ("status", "422", "200"),
            (r"body \(keys\)", "error, request_id", "id, object, created, model, choices, usage"),
            (r"body\.usage\.prompt_tokens_details\.cached_tokens", "0"),
            (r"body\.error\.(details\[0\]\.)?message", '".* integer >= 1\\. .*"', '".* integer >= 0\\. .*"'),
        )
    ),
)
"""Differences that are wanted. The first change that covers a difference counts it."""


class Number(str):
    """Holds a JSON number as it is written, so that digits are compared and not values."""


class NotServed(RuntimeError):
    """Says why a checkout's service does not start."""


# Recording


def record(checkout: Path, out: Path) -> int:
    """Sends every request to the services of a checkout.

    Args:
        checkout: Root of a working tree of this repository.
        out: File that gets one JSON object a line: the commit, then one `Answer` for each request.

    Returns:
        The number of requests.

    Raises:
        NotServed: A service does not become ready.
    """
    requests = build_requests()
    with out.open("w", encoding="ascii") as file:
        print(json.dumps({"commit": _commit(checkout), "requests": len(requests)}), file=file)
        for service in SERVICES:
            own = [request for request in requests if request.service == service]
            with served(checkout, service) as port:
                for request in own:
                    print(json.dumps(asdict(send(port, request))), file=file, flush=True)
            print(f"{checkout.name}: {len(own)} requests to service {service!r}", file=sys.stderr)
    return len(requests)


def send(port: int, request: Request) -> Answer:
    """Sends one request over a connection of its own and reads the whole answer. Status 0 stands for a broken one."""
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_S)
    data = None if request.body is None else request.body.encode("utf-8", "surrogateescape")
    status, headers, streamed = 0, list[list[str]](), False
    with contextlib.closing(connection):
        try:
            connection.request(request.method, request.path, data, request.headers)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "surrogateescape")
            status, headers = response.status, [[name.lower(), value] for name, value in response.getheaders()]
            streamed = (response.getheader("content-type") or "").startswith("text/event-stream")
        except (OSError, http.client.HTTPException) as error:
            text = f"no answer: {type(error).__name__}"
    return Answer(
        service=request.service,
        name=request.name,
        path=request.path,
        sent=request.body,
        status=status,
        headers=headers,
        body=text.split("\n\n") if streamed else text,
    )


@contextlib.contextmanager
def served(checkout: Path, service: str) -> Iterator[int]:
    """Runs a service of the checkout and yields its port once it is ready. It is interrupted in the end."""
    with tempfile.TemporaryDirectory(prefix="assay-answers-") as name:
        folder = Path(name)
        config, port = write_config(checkout, SERVICES[service], folder)
        log = folder / "log.txt"
        with log.open("w", encoding="utf-8") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", command_module(checkout), "serve", str(config)],
                cwd=checkout,
                env=_environment(checkout),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt of this process is passed on below
            )
        try:
            _wait(process, port, log)
            yield port
        finally:
            _stop(process)


def write_config(checkout: Path, sections: Mapping[str, Mapping[str, Any]], folder: Path) -> tuple[Path, int]:
    """Writes the checkout's CPU configuration with a free port and more sections. Returns the file and the port."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
    file = folder / "config.yaml"
    for names in ({}, RENAMED_SETTINGS):
        config = yaml.safe_load((checkout / "deployments" / "configs" / "cpu.yaml").read_text("utf-8"))
        config["http_options"] |= {"host": HOST, "port": port}
        args = config["applications"][0]["args"]
        for name, value in _settings(sections):
            section, field = names.get(name, name).split(".")
            args.setdefault(section, {})[field] = value
        file.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
        if not RENAMED_SETTINGS or _accepts(checkout, file):
            break
    return file, port


def _settings(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    for part in (STEADY, sections):
        for section, fields in part.items():
            yield from ((f"{section}.{field}", value) for field, value in fields.items())


def _accepts(checkout: Path, config: Path) -> bool:
    """Says whether the checkout finds no error in a configuration."""
    command = [sys.executable, "-m", command_module(checkout), "check", str(config)]
    return subprocess.run(command, cwd=checkout, env=_environment(checkout), capture_output=True).returncode == 0


def command_module(checkout: Path) -> str:
    """Returns the module of the command line, wherever the checkout has it."""
    for file in COMMAND_LINES:
        if (checkout / file).is_file():
            return file.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    raise NotServed(f"{checkout} must have one of {', '.join(COMMAND_LINES)}. Given: none of them.")


def _environment(checkout: Path) -> dict[str, str]:
    """Returns an environment in which every process of Ray imports the checkout's own code, and writes none into it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ASSAY_", "PYTHON"))}
    return kept | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}


def _wait(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(HOST, port, timeout=5)
            with contextlib.closing(connection):
                connection.request("GET", "/readyz")
                if connection.getresponse().status == 200:
                    return
        time.sleep(POLL_S)
    raise NotServed("The service is not ready. The end of its log:\n" + log.read_text("utf-8", "replace")[-4000:])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Interrupts the service, which ends its own Ray processes; kills it where that takes too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _commit(checkout: Path) -> str:
    """Returns the checkout's commit, with a `+` where files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")


# Comparing


def read(file: Path) -> list[Answer]:
    """Reads the answers of a recording."""
    _, *lines = file.read_text("ascii").splitlines()
    return [Answer(**json.loads(line)) for line in lines]


def compare(
    base: Iterable[Answer], new: Iterable[Answer], renamed: Mapping[str, Mapping[str, str]] = RENAMED
) -> list[Difference]:
    """Returns every difference that is not volatile, in the order of base's requests. `renamed`: as `RENAMED`."""
    before, after = ({_title(answer): answer for answer in answers} for answers in (base, new))
    found: list[Difference] = []
    for title in [*before, *(title for title in after if title not in before)]:
        one, other = before.get(title), after.get(title)
        if one is None or other is None:
            recorded = ("recorded" if answer else "not recorded" for answer in (one, other))
            found.append(Difference(title, "request", *recorded))
        elif one.sent != other.sent:
            found.append(Difference(title, "body of the request", str(one.sent), str(other.sent)))
        else:
            found += _differences(title, one, other, renamed.get(one.path, {}))
    return found


def _differences(title: str, base: Answer, new: Answer, names: Mapping[str, str]) -> list[Difference]:
    found = [] if base.status == new.status else [Difference(title, "status", str(base.status), str(new.status))]
    found += _compare_headers(title, _headers(base), _headers(new))
    if base.path == "/metrics" and base.status == new.status == 200:
        before, after = _series(_renamed(_text(base), names)), _series(_text(new))
        found += [Difference(title, "series", one, NOTHING) for one in sorted(before - after)]
        return found + [Difference(title, "series", NOTHING, one) for one in sorted(after - before)]
    if isinstance(base.body, list) and isinstance(new.body, list):
        streams = _joined([_renamed(event, names) for event in _steady_events(base)]), _joined(_steady_events(new))
        return found + _places(title, "stream", *streams)
    if base.path == "/openapi.json" and base.status == new.status == 200:
        schemas = (_without_prose(_decoded(text)) for text in (_renamed(_text(base), names), _text(new)))
        return found + _places(title, "body", *schemas)
    return found + _compare_texts(title, _renamed(_steady_text(base), names), _steady_text(new))


def _compare_headers(title: str, base: list[str], new: list[str]) -> list[Difference]:
    gone, came = ([header for header in one if header not in other] for one, other in ((base, new), (new, base)))
    if not gone and not came and base != new:
        return [Difference(title, "order of headers", ", ".join(base), ", ".join(new))]
    return [Difference(title, "headers", *pair) for pair in zip_longest(gone, came, fillvalue=NOTHING)]


def _compare_texts(title: str, base: str, new: str) -> list[Difference]:
    """Returns where two bodies differ: at paths of JSON values, or else at the first character."""
    if base == new:
        return []
    with contextlib.suppress(ValueError):
        found = _places(title, "body", _decoded(base), _decoded(new))
        if found:
            return found
    at = next((at for at, pair in enumerate(zip(base, new, strict=False)) if pair[0] != pair[1]), len(base))
    start = max(0, at - 40)
    return [Difference(title, f"body, character {at}", base[start:], new[start:])]


def _places(title: str, where: str, base: Any, new: Any) -> list[Difference]:
    found, rounded, largest = [], 0, 0.0
    for path, *values in _walk(base, new, ""):
        distance = _distance(path, *values)
        if distance <= ROUNDING:
            rounded, largest = rounded + 1, max(largest, distance)
        else:
            found.append(Difference(title, f"{where}{path}", *values))
    return found + ([Difference(title, where + ROUNDED, f"{rounded} values", f"{largest:.1e}")] if rounded else [])


def _distance(path: str, base: str, new: str) -> float:
    """Returns how far two floats or columns of floats are apart, relative above 1; infinity for all other values."""
    try:
        pairs = list(zip(_floats(path, base), _floats(path, new), strict=True))
    except ValueError:
        return math.inf
    unlike = [pair for pair in pairs if pair[0] != pair[1] and not all(map(math.isnan, pair))]
    if not all(math.isfinite(value) for pair in unlike for value in pair):
        return math.inf
    return max((abs(one - other) / max(1.0, abs(one)) for one, other in unlike), default=math.inf)


def _floats(path: str, shown: str) -> tuple[float, ...]:
    """Reads a float, or a column of them. Raises ValueError for anything else."""
    if COLUMN.fullmatch(path) and shown.startswith('"'):
        data = base64.b64decode(json.loads(shown), validate=True)
        return struct.unpack(f"<{len(data) // 4}f", data[: len(data) // 4 * 4])
    if not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?", shown) or shown.lstrip("-").isdigit():
        raise ValueError(shown)
    return (float(shown),)


def _walk(base: Any, new: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Yields (path, base's value, new value) for each place at which two JSON values differ."""
    if isinstance(base, dict) and isinstance(new, dict):
        if list(base) != list(new):
            yield f"{path} (keys)", ", ".join(base), ", ".join(new)
        for key in base:
            if key in new:
                yield from _walk(base[key], new[key], f"{path}.{key}")
    elif isinstance(base, list) and isinstance(new, list):
        if len(base) != len(new):
            yield f"{path} (length)", str(len(base)), str(len(new))
        for index, pair in enumerate(zip(base, new, strict=False)):
            yield from _walk(*pair, f"{path}[{index}]")
    elif base != new or type(base) is not type(new):
        yield path, _shown(base), _shown(new)


# Shared by two runs


def _text(answer: Answer) -> str:
    return answer.body if isinstance(answer.body, str) else "\n\n".join(answer.body)


def _steady_text(answer: Answer) -> str:
    return _steady(_text(answer), drawn=not OWN_SEED.search(answer.sent or ""))


def _steady_events(answer: Answer) -> list[str]:
    return _steady_text(answer).split("\n\n")


def _steady(text: str, *, drawn: bool = False) -> str:
    """Replaces what differs from run to run. `drawn`: seeds too."""
    for pattern, word in VOLATILE:
        text = pattern.sub(word, text)
    return DRAWN_SEED.sub('"seed":"DRAWN"', text) if drawn else text


def _headers(answer: Answer) -> list[str]:
    return [f"{name}: {_steady(value)}" for name, value in answer.headers if name not in VOLATILE_HEADERS]


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9])", names[name], text)
    return text


def _joined(events: Iterable[str]) -> dict[str, Any]:
    """Joins the events of each choice of a stream: how many tokens share an event depends on speed alone.

    Returns:
        `choices`: by index, each choice with its texts and lists concatenated. `heads`: by index, the fields beside the
        choices in the choice's last event. `others`: events without choices, in order. `shapes`: the keys of events.
    """
    choices: dict[str, Any] = {}
    heads: dict[str, Any] = {}
    others: list[Any] = []
    shapes: set[str] = set()
    for event in events:
        body: Any = event
        with contextlib.suppress(ValueError):
            body = _decoded(event.removeprefix(EVENT))
        if not isinstance(body, dict) or not body.get("choices"):
            others += [] if body == KEEP_ALIVE else [body]
            continue
        for choice in body["choices"]:
            index = choice.get("index", NOTHING)
            choices[index] = _merged(choices.get(index), choice)
            heads[index] = {key: value for key, value in body.items() if key != "choices"}
            shapes.add(" ".join([*body, ":", *choice, ":", *choice.get("delta", ())]))
    by_index = [{index: part[index] for index in sorted(part)} for part in (choices, heads)]
    return {"choices": by_index[0], "heads": by_index[1], "others": others, "shapes": sorted(shapes)}


def _merged(one: Any, other: Any) -> Any:
    """Joins two parts of a choice: texts and lists one after the other, of other values the last that is not null."""
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {key: _merged(one.get(key), value) for key, value in other.items()}
    if isinstance(one, list) or (isinstance(one, str) and not isinstance(one, Number)):
        return one + other
    return other


def _without_prose(node: Any, *, named: bool = False) -> Any:
    """Drops descriptions and titles, and sorts keys. `named`: the keys of `node` name fields, and are no keywords."""
    if isinstance(node, dict):
        kept = sorted(key for key in node if named or key not in PROSE)
        return {key: _without_prose(node[key], named=key in NAMED and not named) for key in kept}
    return [_without_prose(entry) for entry in node] if isinstance(node, list) else node


def _series(text: str) -> set[str]:
    """Returns the names, labels and types of a scrape, without values and without labels of single processes."""
    found = {line for line in text.splitlines() if line.startswith("# TYPE ")}
    for line in text.splitlines():
        sample = SAMPLE.fullmatch(line)
        if sample and not STARTING.search(line):
            found.add(sample["name"] + PROCESS_LABEL.sub(r'\1="ANY"', sample["labels"] or ""))
    return found


def _decoded(text: str) -> Any:
    return json.loads(text, parse_float=Number, parse_int=Number)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Number) else json.dumps(value)


def _title(answer: Answer) -> str:
    return f"[{answer.service}] {answer.name}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text)} characters)"


# The command


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    try:
        match arguments:
            case ["record", *rest]:
                parser = argparse.ArgumentParser(prog="compare_answers.py record")
                parser.add_argument("checkout", type=Path)
                parser.add_argument("--out", type=Path, required=True)
                given = parser.parse_args(rest)
                print(f"{record(given.checkout.resolve(), given.out)} answers recorded in {given.out}")
                return 0
            case ["compare", *rest]:
                parser = argparse.ArgumentParser(prog="compare_answers.py compare")
                parser.add_argument("base", type=Path)
                parser.add_argument("new", type=Path)
                given = parser.parse_args(rest)
                return report(given.base, given.new)
        parser = argparse.ArgumentParser(
            prog="compare_answers.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("base", type=Path, metavar="BASE")
        parser.add_argument("new", type=Path, metavar="NEW")
        given = parser.parse_args(arguments)
        with tempfile.TemporaryDirectory(prefix="assay-answers-") as folder:
            files = Path(folder, "base.jsonl"), Path(folder, "new.jsonl")
            for checkout, file in zip((given.base, given.new), files, strict=True):
                record(checkout.resolve(), file)
            return report(*files)
    except NotServed as error:
        print(error, file=sys.stderr)
        return 2


def report(base: Path, new: Path) -> int:
    """Prints the differences of two recordings. Returns 1 if there are any that are not on purpose, else 0."""
    answers = read(base), read(new)
    found, wanted, shown = [], Counter[str](), Counter[str]()
    for difference in compare(*answers):
        why = next((change.why for change in ON_PURPOSE if change.covers(difference)), None)
        if why is None:
            found.append(difference)
            shown[difference.request] += 1
            if shown[difference.request] <= MAX_SHOWN:
                print(difference)
        else:
            wanted[why] += 1
    for why, count in wanted.items():
        print(f"on purpose: {why}: {count}")
    requests = len({difference.request for difference in found})
    print(f"{len(answers[0])} and {len(answers[1])} answers: {len(found)} differences in {requests} of them")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
