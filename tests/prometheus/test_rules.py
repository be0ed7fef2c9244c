"""promtool runs the committed rules over series: each alert fires where it must, says what it must, else is silent."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.alerts import build
from k8s.alerts.model import Alert
from tests.prometheus.cases import CASES, RUN, Case, Series

pytestmark = pytest.mark.prometheus
RULES = build.HERE / "rules.yaml"
ALERTS = {one.name: one for one in build.EVERY}
AFTER = f"{RUN}m"
Json = dict[str, Any]


def promtool_tests(promtool: Path, folder: Path, rules: Path, tests: list[Json]) -> list[str]:
    """Names of tests that failed; what promtool says is shown where it is not about a test."""
    file = folder / "tests.yaml"
    plan = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(plan, sort_keys=False), "utf-8")
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    told = done.stdout + done.stderr
    failed = [test["name"] for test in tests if f"name: {test['name']}," in told]
    assert (done.returncode == 0) == (not failed), told
    if failed:
        print(told)
    return failed


def case_of(alert: Alert, case: Case, given: Series, *, fires: bool) -> Json:
    annotations = {"summary": case.says, "runbook": f"docs/runbooks/alerts.md#{alert.name.lower()}"}
    found = {"exp_labels": {"severity": alert.severity, **case.labels}, "exp_annotations": annotations}
    return {
        "name": f"{alert.name} {'fires' if fires else 'is silent'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in given],
        "alert_rule_test": [
            {"eval_time": AFTER, "alertname": alert.name, "exp_alerts": [found] if fires else []},
        ],
    }


FIRES = [case_of(ALERTS[name], case, case.fires, fires=True) for name, case in CASES.items()]
SILENT = [case_of(ALERTS[name], case, case.silent, fires=False) for name, case in CASES.items()]


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == ALERTS.keys()


def test_the_rules_are_well_formed(promtool: Path) -> None:
    subprocess.run([promtool, "check", "rules", RULES], check=True)


def test_every_alert_fires_and_is_silent_as_its_case_says(promtool: Path, tmp_path: Path) -> None:
    assert promtool_tests(promtool, tmp_path, RULES, FIRES + SILENT) == []


@pytest.mark.parametrize(("change", "wrong"), [(" + 1e9", FIRES), (" - 1e9", SILENT)], ids=["never", "always"])
def test_a_limit_that_is_wrong_is_caught(promtool: Path, tmp_path: Path, change: str, wrong: list[Json]) -> None:
    """Planted faults: every alert that can no longer fire fails its one case, one that always fires the other."""
    planted = build.groups()
    for group in planted:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["expr"] = ALERTS[rule["alert"]].expr_with(change)
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": planted}), "utf-8")
    expected = {test["name"] for test in wrong} - {"AssayAbsent is silent"}  # there is nothing to be above a limit
    assert set(promtool_tests(promtool, tmp_path, rules, FIRES + SILENT)) == expected
