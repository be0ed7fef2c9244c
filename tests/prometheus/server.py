"""A Prometheus on loopback that scrapes every second, and what it answers."""

import contextlib
import json
import math
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from tests.support.ports import free_port

Json = dict[str, Any]
START_S = 240.0
POINTS = 60  # of a range


class Target(NamedTuple):
    """An application to scrape."""

    name: str
    url: str
    key: str | None = None


class Answer(NamedTuple):
    """The result of one query. `error` is Prometheus's own word on a query that it does not take."""

    series: list[tuple[dict[str, str], list[tuple[float, float]]]]
    error: str | None

    @property
    def fault(self) -> str | None:
        """Why a panel would show nothing, None where it shows something. Nothing over nothing is no number."""
        if self.error is not None:
            return self.error
        if not self.series:
            return "empty"
        finite = [value for _, points in self.series for _, value in points if math.isfinite(value)]
        return None if finite else "not a number throughout"

    @property
    def moved(self) -> bool:
        """Whether any value of it was not 0."""
        return any(value != 0 and math.isfinite(value) for _, points in self.series for _, value in points)


class Prometheus:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._http.get("/-/ready").status_code == 200
        return False

    def over(self, expr: str, start: float, end: float) -> Answer:
        """At `POINTS` times from `start` to `end`."""
        step = max(1.0, (end - start) / POINTS)
        given = {"query": expr, "start": start, "end": end, "step": step}
        return _answer(self._http.post("/api/v1/query_range", data=given).json())

    def targets(self) -> list[Json]:
        found: list[Json] = self._http.get("/api/v1/targets").json()["data"]["activeTargets"]
        return found

    def rules(self) -> list[Json]:
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


def _answer(body: Json) -> Answer:
    if body["status"] != "success":
        return Answer([], f"{body['errorType']}: {body['error']}")
    found = [
        (one["metric"], [(float(at), float(value)) for at, value in one["values"]]) for one in body["data"]["result"]
    ]
    return Answer(found, None)


@contextlib.contextmanager
def running(binary: Path, folder: Path, targets: Sequence[Target], rules: Path) -> Iterator[Prometheus]:
    """With file discovery; the rules are evaluated each second, and kept where they are."""
    port = free_port()
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(_config(folder, targets, rules)), "utf-8")
    command = [
        str(binary),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        server = Prometheus(f"http://127.0.0.1:{port}")
        try:
            end = time.monotonic() + START_S
            while not server.ready():
                assert process.poll() is None and time.monotonic() < end, (folder / "prometheus.log").read_text()
                time.sleep(0.1)
            yield server
        finally:
            server.close()
            process.terminate()


def _config(folder: Path, targets: Sequence[Target], rules: Path) -> Json:
    quick = yaml.safe_load(rules.read_text("utf-8"))
    for group in quick["groups"]:
        group.pop("interval", None)
    (folder / "rules.yaml").write_text(yaml.safe_dump(quick), "utf-8")
    jobs = []
    for target in targets:
        address, _, path = target.url.removeprefix("http://").partition("/")
        found = folder / f"{target.name}.json"
        found.write_text(json.dumps([{"targets": [address], "labels": {"cluster": "c", "application": target.name}}]))
        job: Json = {
            "job_name": target.name,
            "metrics_path": f"/{path}/metrics",
            "file_sd_configs": [{"files": [str(found)]}],
        }
        jobs.append(job if target.key is None else job | {"authorization": {"credentials": target.key}})
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": jobs,
    }
