"""A real Prometheus over the real application: no panel and no rule is empty, and nearly none stands at 0."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from k8s.alerts import build as alerts
from k8s.alerts.objectives import records
from k8s.grafana import build, picture
from k8s.grafana.panels import Dashboard, Panel
from tests.prometheus.drive import ASSAY, SCRAPER, TOY, Drive, poison, ready
from tests.prometheus.server import Answer, Prometheus, Target, running

pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(600)]
DRIVE_S = 25.0
FILLED = {
    "$cluster": ".*",
    "$application": ".*",
    "$replica": ".*",
    "$route": ".*",
    "$__rate_interval": "8s",
    "$__range": "40s",
}
# Panels whose value is 0 here for a good reason; each still answers, with a number.
AT_REST = {
    "Steps that ran as a CUDA graph": "graphs are CUDA's",
    "Drafts from an unknown distribution": "the built-in draft always reports its distribution",
    "Streams continued elsewhere, by cause": "a toy's stream of some milliseconds is seldom met by the kill",
    "Wasted": "on the CPU each step is read before the next is launched",
}
SILENT = {"absent(assay_ready_replicas)": "says something only where nothing is there"}


class Watched(NamedTuple):
    """Prometheus after the drive, and when that was."""

    server: Prometheus
    start: float
    end: float

    def ask(self, expr: str) -> Answer:
        return self.server.over(filled(expr), self.start, self.end)


def name_of(dashboard: Dashboard) -> str:
    return dashboard.name


def filled(expr: str) -> str:
    for name, value in FILLED.items():
        expr = expr.replace(name, value)
    return expr


@pytest.fixture(scope="session")
def watched(
    cluster: Callable[..., str],
    toy_args: dict[str, Any],
    prometheus: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    own = {"health": {"period_s": 1.0, "timeout_s": 5.0}, "metrics": {"cache_s": 0.0}, "drain": toy_args["drain"]}
    assay, toys = cluster("assay", own | ASSAY), cluster("toys", toy_args | TOY)
    targets = [Target("assay", assay, SCRAPER), Target("toys", toys)]
    with running(prometheus, tmp_path_factory.mktemp("prometheus"), targets, alerts.HERE / "rules.yaml") as server:
        start = asyncio.run(_driven(server, assay, toys))
        yield Watched(server, start, time.time())


async def _driven(server: Prometheus, assay: str, toys: str) -> float:
    """When it began: with a request that kills both toys, then everything else together."""
    await asyncio.gather(ready(assay, 2), ready(toys, 2))
    await linked(server, 2)
    start = time.time()
    assert await poison(toys) == 422
    await ready(toys, 2)
    drive = Drive(assay, toys, DRIVE_S)
    await drive.run()
    print(f"answers by status: {dict(sorted(drive.answers.items()))}")
    await asyncio.sleep(2.5)  # the last scrape, and the rules after it
    return start


async def linked(server: Prometheus, links: int, within_s: float = 60) -> None:
    """Waits until Prometheus has seen so many links of the toys: what comes before its first sample is no increase."""
    expr = 'sum(assay_links{application="toys", deployment="Ingress"})'
    async with asyncio.timeout(within_s):
        while not any(points[-1][1] >= links for _, points in server.over(expr, time.time() - 2, time.time()).series):
            await asyncio.sleep(0.1)


def faults_of(panel: Panel, ask: Callable[[str], Answer]) -> list[str]:
    """Returns what is wrong with the panel: a query that fails, shows nothing, or stands at 0 without a reason."""
    answers = [(expr, ask(expr)) for expr in panel.queries.values()]
    found = [f"{panel.title}: {answer.fault}: {expr}" for expr, answer in answers if answer.fault is not None]
    if not found and panel.title not in AT_REST and not any(answer.moved for _, answer in answers):
        found = [f"{panel.title}: at 0 throughout"]
    return found


def test_every_target_is_scraped(watched: Watched) -> None:
    assert [target["health"] for target in watched.server.targets()] == ["up", "up"]


@pytest.mark.parametrize("dashboard", build.DASHBOARDS, ids=name_of)
def test_no_panel_is_empty(watched: Watched, dashboard: Dashboard) -> None:
    found = [fault for panel in dashboard.panels for fault in faults_of(panel, watched.ask)]
    assert not found, "\n".join(found)


def test_what_may_stand_at_0_is_a_panel() -> None:
    assert set(AT_REST) <= {panel.title for one in build.DASHBOARDS for panel in one.panels}


PLANTED = [  # in the first query of a panel
    ("assay_requests_total", "assay_request_total"),
    ("assay_requests_total", "assay_requests"),
    ('cluster=~"$cluster"', 'clusters=~"$cluster.+"'),
    ("rate(", "rates("),
    ("sum by (route)", "sum by (route"),
]


@pytest.mark.parametrize(("right", "wrong"), PLANTED)
def test_a_query_that_is_mistyped_is_caught(watched: Watched, right: str, wrong: str) -> None:
    (panel,) = (one for one in build.DASHBOARDS[0].panels if one.title == "Requests by route")
    assert right in next(iter(panel.queries.values())) and not faults_of(panel, watched.ask)
    assert faults_of(panel, lambda expr: watched.ask(expr.replace(right, wrong)))


def test_every_rule_has_an_answer(watched: Watched) -> None:
    values = [value for one in alerts.EVERY for value in one.values]
    asked = [*values, *(one.expr for one in records()), *(one.name for one in records())]
    answers = {expr: watched.ask(expr) for expr in asked}
    found = [f"{answer.fault}: {expr}" for expr, answer in answers.items() if answer.fault and expr not in SILENT]
    assert not found, "\n".join(found)
    assert all(answers[expr].error is None for expr in SILENT)


def test_prometheus_evaluates_every_rule(watched: Watched) -> None:
    rules = watched.server.rules()
    names = [one.name for one in alerts.EVERY] + [one.name for one in records()]
    assert sorted(rule["name"] for rule in rules) == sorted(names)
    assert [rule["lastError"] for rule in rules if rule["health"] != "ok"] == []


def test_pictures_of_the_panels(watched: Watched, tmp_path: Path) -> None:
    """Where ASSAY_PICTURES names a folder they stay there: docs/img are made so."""
    folder = Path(os.environ.get("ASSAY_PICTURES") or tmp_path)
    for dashboard in build.DASHBOARDS:
        drawn = picture.svg(dashboard, lambda expr: _series(watched, expr))
        assert drawn.count("<title>") == len(dashboard.panels) + 1
        (folder / f"dashboard-{dashboard.name}.svg").write_text(drawn, "utf-8")


def _series(watched: Watched, expr: str) -> Sequence[picture.Series]:
    start = watched.start
    found = watched.ask(expr).series
    return [picture.Series(labels, [(at - start, value) for at, value in points]) for labels, points in found]
