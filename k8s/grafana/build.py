"""Writes the dashboards beside this file: `python -m k8s.grafana.build`. A test compares them with its output."""

import json
from pathlib import Path

from k8s.grafana import replicas, sampling, scoring, service
from k8s.grafana.panels import Dashboard, dashboard_json

HERE = Path(__file__).parent
DASHBOARDS: tuple[Dashboard, ...] = (service.DASHBOARD, scoring.DASHBOARD, sampling.DASHBOARD, replicas.DASHBOARD)


def files() -> dict[Path, str]:
    """Returns the text of each generated file by path."""
    return {HERE / f"{one.name}.json": json.dumps(dashboard_json(one), indent=1) + "\n" for one in DASHBOARDS}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, "utf-8")
