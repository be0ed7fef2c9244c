"""Report: everything that is found in a configuration, in the order of the file."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.checks import application, arguments, document, exposure, ports, resources, schema
from deployments.checks.finding import Finding, under
from deployments.checks.plan import Plan
from deployments.config import AppArgs

LEAST_CPUS = 4  # what `assay serve` claims on a small machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    findings: tuple[Finding, ...]
    plans: tuple[Plan, ...]

    @property
    def good(self) -> bool:
        return not any(one.level == "error" for one in self.findings)


def check(file: Path, *, with_model: bool = True) -> Report:
    """Raises document.Unreadable. `with_model`: config.json, tokenizer and templates too; where the model lies on
    another machine they cannot be looked at."""
    found = document.read(file)
    config = found.config
    findings = [*found.findings, *schema.check(config), *ports.check(config)]
    plans = []
    applications = config.get("applications")
    for index, one in enumerate(applications if isinstance(applications, list) else []):
        if isinstance(one, dict):
            plan, more = _application(config, one, under("applications", index), with_model)
            findings += more
            plans += [plan] if plan else []
    parts = [part for plan in plans for part in plan.parts]
    findings += resources.check_machine(parts, _here())
    return Report(findings=tuple(findings), plans=tuple(plans))


def _application(
    config: dict[str, Any], given: dict[str, Any], where: str, with_model: bool
) -> tuple[Plan | None, list[Finding]]:
    findings = list(application.check_path(given, where))
    if findings:
        return None, findings
    inside = under(where, "args")
    args, found = arguments.check(given.get("args") or {}, inside)
    if args is None:
        return None, found
    deployed, findings = application.deployments(given, args, where)
    parts = [resources.part_of(one) for one in deployed]
    findings += application.check_overrides(deployed, args)
    findings += application.check_timeout(config, args)
    findings += exposure.check(config, args, inside)
    findings += resources.check(parts[0], parts[1], args, inside)
    memory = None
    if with_model:
        memory, found = _model(args, inside, parts[1].least)
        findings += found
    return Plan(application=str(given.get("name", "default")), parts=tuple(parts), memory=memory), findings


def _model(args: AppArgs, where: str, replicas: int) -> Any:
    from deployments.checks import model

    memory, findings = model.check(args, where)
    more: Iterator[Finding] = model.check_memory(memory, replicas, where) if memory else iter(())
    return memory, [*findings, *more]


def _here() -> resources.Machine:
    import torch

    return resources.Machine(cpus=max(LEAST_CPUS, os.cpu_count() or 1), gpus=torch.cuda.device_count())


def errors_of(config: dict[str, Any]) -> list[Finding]:
    """What would keep a config from starting, or make it start open: as much as is told without building anything."""
    findings = list(schema.check(config))
    applications = config.get("applications")
    for index, one in enumerate(applications if isinstance(applications, list) else []):
        if isinstance(one, dict) and one.get("import_path") == application.IMPORT_PATH:
            where = under(under("applications", index), "args")
            args, found = arguments.check(one.get("args") or {}, where)
            findings += found
            findings += exposure.check(config, args, where) if args else ()
    return [one for one in findings if one.level == "error"]
