"""Writes the alerting rules, also as a Kubernetes object, and their page in docs: `python -m k8s.alerts.build`. A test
compares the committed files with its output."""

from pathlib import Path
from typing import Any

import yaml

from k8s.alerts.faults import ALERTS
from k8s.alerts.model import Alert
from k8s.alerts.objectives import alerts, records

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "alerts.md"
EVERY = (*alerts(), *ALERTS)
Json = dict[str, Any]


def groups() -> list[Json]:
    """Returns the rule groups that Prometheus reads."""
    kept: list[Json] = [{"record": one.name, "expr": one.expr} for one in records()]
    budgets = [_alert(one) for one in alerts()]
    return [
        {"name": "assay-objectives", "interval": "30s", "rules": kept},
        {"name": "assay-budgets", "rules": budgets},
        {"name": "assay-faults", "rules": [_alert(one) for one in ALERTS]},
    ]


def _alert(one: Alert) -> Json:
    told = {"summary": one.summary, "runbook": f"docs/alerts.md#{one.name.lower()}"}
    hold = {} if one.hold is None else {"for": one.hold}
    return {"alert": one.name, "expr": one.expr, **hold, "labels": {"severity": one.severity}, "annotations": told}


def files() -> dict[Path, str]:
    """Returns the text of each generated file by path."""
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "assay", "labels": {"app": "assay"}},
        "spec": {"groups": groups()},
    }
    return {
        HERE / "rules.yaml": _yaml({"groups": groups()}),
        HERE / "prometheusrule.yaml": _yaml(resource),
        PAGE: _page(),
    }


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as a block, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _yaml(value: Json) -> str:
    return "# Made by `python -m k8s.alerts.build`.\n" + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000)


def _page() -> str:
    parts = [
        "# Alerts\n",
        "Written by `python -m k8s.alerts.build`; Prometheus reads [rules.yaml](../k8s/alerts/rules.yaml). `page` is",
        "for the person on call, `ticket` for working hours. Burn alerts have two windows: the long one shows that it",
        "matters, the short one that it continues. The dashboards are shown in [dashboards](dashboards.md).\n",
    ]
    for one in EVERY:
        hold = "at once" if one.hold is None else f"after {one.hold}"
        parts += [f"## {one.name}\n", f"`{one.severity}`, {hold}. {one.runbook}\n", f"```promql\n{one.expr}\n```\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, "utf-8")
