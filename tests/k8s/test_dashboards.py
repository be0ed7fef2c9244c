"""Tests that committed files are what the code makes, names in queries are our metrics, and panels lie side by side."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric

from deployments.auth.api_keys import NEEDS, ApiKey
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.observability.replica_metrics import ReplicaMetrics
from deployments.protocol import ModelCard
from engine.config import EngineConfig
from engine.engine import Engine
from k8s.alerts import build as alerts
from k8s.alerts.objectives import OBJECTIVES, records
from k8s.grafana import build
from k8s.grafana.panels import COLUMNS, VARIABLES, dashboard_json
from tests.support.toy_model import ToyModel

SUFFIXES = {
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
    "counter": ("_total",),
    "gauge": ("",),
}
FILLED_IN = {"__rate_interval", "__range"}  # by Grafana itself
FILES = build.files() | alerts.files()
BOARDS = [dashboard_json(one) for one in build.DASHBOARDS]


def families() -> tuple[Metric, ...]:
    """Returns the metrics of both kinds of process."""
    stats = Engine(ToyModel(num_slots=64), EngineConfig()).stats()
    card = ModelCard("toy", "toy", None, 300, 64, None, (), "raw_logprobs", {})
    return (*IngressMetrics().families(), *ReplicaMetrics().families(stats, card))


def unknown_metrics(expressions: list[str]) -> set[str]:
    """Names in them that no process tells, and no rule keeps."""
    known = {one.name for one in records()}
    known |= {family.name + suffix for family in families() for suffix in SUFFIXES[family.type]}
    return {name for expr in expressions for name in re.findall(r"\bassay[:_][\w:]+", expr)} - known


def expressions() -> list[str]:
    shown = [expr for one in build.DASHBOARDS for panel in one.panels for expr in panel.queries.values()]
    return [*shown, *(one.expr for one in alerts.EVERY), *(one.expr for one in records())]


@pytest.mark.parametrize("path", FILES, ids=lambda path: Path(str(path)).name)
def test_the_committed_file_is_what_the_code_makes(path: Path) -> None:
    assert path.read_text("utf-8") == FILES[path]


def test_no_other_dashboard_is_committed() -> None:
    assert set(build.HERE.glob("*.json")) == set(build.files())


def test_every_name_in_a_query_is_a_metric() -> None:
    assert len(expressions()) > 100
    assert unknown_metrics(expressions()) == set()


@pytest.mark.parametrize("planted", ["assay_request_total", "assay_requests", "assay_queued_tokens_total"])
def test_a_name_that_is_mistyped_is_found(planted: str) -> None:
    assert unknown_metrics([f"sum(rate({planted}[5m]))"]) == {planted}


def test_queries_about_scoring_select_every_route_that_scores_and_no_other() -> None:
    scores = ApiKey(name="a", digest=b"", scopes=frozenset(("score",)))
    generates = ApiKey(name="b", digest=b"", scopes=frozenset(("generate",)))
    routes = {route for route in NEEDS if scores.may(route) and not generates.may(route)}
    (slow,) = (one for one in OBJECTIVES if one.key == "scoring")
    (shown,) = (one for one in build.DASHBOARDS if one.name == "scoring")
    queries = [slow.bad, slow.all, *(expr for panel in shown.panels for expr in panel.queries.values())]
    selected = [set(found.split("|")) for expr in queries for found in re.findall(r'route=~"(/[^"]+)"', expr)]
    assert {"/score", "/classify", "/v1/reranking"} <= routes
    assert len(selected) > 3 and all(found == routes for found in selected)


def test_every_metric_is_on_a_dashboard() -> None:
    text = "\n".join(expressions())
    assert [family.name for family in families() if family.name not in text] == []


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: str(board["uid"]))
def test_panels_stand_side_by_side(board: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= COLUMNS for place in places)
    assert not [(one, other) for one, other in combinations(places, 2) if _overlap(one, other)]
    assert len({panel["id"] for panel in board["panels"]}) == len(places)


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    def meet(at: str, size: str) -> bool:
        return one[at] < other[at] + other[size] and other[at] < one[at] + one[size]

    return meet("x", "w") and meet("y", "h")


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: str(board["uid"]))
def test_every_variable_is_declared(board: dict[str, Any]) -> None:
    text = json.dumps(board)
    names = {one["name"] for one in VARIABLES}
    assert set(re.findall(r"\$\{?(\w+)", text.replace("$__all", ""))) <= names | FILLED_IN


def test_titles_and_names_of_dashboards_are_their_own() -> None:
    for one in build.DASHBOARDS:
        titles = [panel.title for panel in one.panels]
        assert len(set(titles)) == len(titles)
        assert all(panel.note.endswith((".", "!")) for panel in one.panels)
    assert len({one.name for one in alerts.EVERY}) == len(alerts.EVERY)
