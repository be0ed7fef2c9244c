"""Defines panels, rows and dashboards, and renders the JSON that Grafana imports."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from k8s.grafana.promql import APP

COLUMNS = 24
SCHEMA = 39  # of the dashboard model, which Grafana 10.3 and newer read
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Kind = Literal["timeseries", "stat", "table"]
Unit = Literal["short", "s", "percentunit", "bytes", "reqps"]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Defines one panel. `note` explains it to a reader."""

    title: str
    unit: Unit
    queries: Mapping[str, str]  # PromQL by the legend of its series, with `{{label}}` in it; "": Grafana's own
    note: str
    kind: Kind = "timeseries"
    stacked: bool = False
    width: int = 8
    height: int = 8


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Groups panels below a title."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Defines a dashboard. `note` describes it."""

    name: str  # of its file
    title: str
    note: str
    rows: tuple[PanelRow, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


def variable(name: str, label: str, query: str) -> Json:
    """Returns a variable whose values are read from the metrics. At first all are chosen."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
    }


VARIABLES: list[Json] = [
    {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1},
    variable("cluster", "Cluster", "label_values(assay_build_info, cluster)"),
    variable("application", "Application", 'label_values(assay_build_info{cluster=~"$cluster"}, application)'),
    variable("replica", "Replica", f"label_values(assay_running_sequences{{{APP}}}, replica)"),
    variable("route", "Route", f"label_values(assay_requests_total{{{APP}}}, route)"),
]


def dashboard_json(dashboard: Dashboard) -> Json:
    """Returns the JSON that Grafana imports. It has no id, so that a second import replaces the first."""
    return {
        "uid": f"assay-{dashboard.name}",
        "title": f"Assay / {dashboard.title}",
        "description": dashboard.note,
        "tags": ["assay"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one cross-hair over all panels
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "links": [
            {
                "type": "dashboards",
                "tags": ["assay"],
                "title": "Assay",
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": VARIABLES},
        "panels": list(_panels(dashboard)),
    }


def _panels(dashboard: Dashboard) -> Iterator[Json]:
    """Places panels from left to right; a panel that does not fit begins a new line."""
    number, top = 1, 0
    for row in dashboard.rows:
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        number, top, left, tallest = number + 1, top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            yield _panel(panel, number, place)
            number, left, tallest = number + 1, left + panel.width, max(tallest, panel.height)
        top += tallest


def _panel(panel: Panel, number: int, place: Json) -> Json:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.note,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": _custom(panel)}, "overrides": []},
        "options": _options(panel),
        "targets": [_target(panel, index, *one) for index, one in enumerate(panel.queries.items())],
    }


def _target(panel: Panel, index: int, legend: str, expr: str) -> Json:
    now = panel.kind == "table"
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "expr": expr,
        "legendFormat": legend or "__auto",
        "range": not now,
        "instant": now,
        "format": "table" if now else "time_series",
    }


def _custom(panel: Panel) -> Json:
    if panel.kind != "timeseries":
        return {}
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 0,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }


def _options(panel: Panel) -> Json:
    match panel.kind:
        case "timeseries":
            legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        case "stat":
            values = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": values, "graphMode": "area", "colorMode": "none", "textMode": "auto"}
        case "table":
            return {"showHeader": True, "cellHeight": "sm"}
