"""Checks a configuration as a whole, and lists what it would start."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deployments.cli.check import application, document, resources
from deployments.cli.check.arguments import arguments_of, check_arguments
from deployments.cli.check.findings import Finding, under
from deployments.cli.check.memory import ModelMemory, check_memory, sized
from deployments.cli.check.resources import DeploymentResources
from deployments.config.app_args import AppArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """Lists what one application would start, and the resources it takes."""

    application: str
    parts: tuple[DeploymentResources, ...]
    memory: ModelMemory | None  # of one replica

    @property
    def gpus(self) -> float:
        return sum(part.max_actors * part.num_gpus for part in self.parts)

    @property
    def cpus(self) -> float:
        return sum(part.max_actors * part.num_cpus for part in self.parts)

    def record(self) -> dict[str, Any]:
        """Returns the plan as values for JSON."""
        memory = self.memory._asdict() if self.memory else None
        parts = [asdict(part) for part in self.parts]
        return {"application": self.application, "parts": parts, "cpus": self.cpus, "gpus": self.gpus, "memory": memory}

    def lines(self) -> list[str]:
        """Renders the plan as text."""
        found = [f"{self.application}:"]
        for part in self.parts:
            count = (
                f"{part.min_actors}"
                if part.min_actors == part.max_actors
                else f"{part.min_actors} to {part.max_actors}"
            )
            found.append(f"  {part.name}: {count} x {part.num_cpus:g} CPUs, {part.num_gpus:g} GPUs")
        found.append(f"  together at most {self.cpus:g} logical CPUs, {self.gpus:g} GPUs")
        if self.memory is not None:
            found.append(f"  a replica on {self.memory.device}: {_weights(self.memory)}, {_pool(self.memory)}")
        return found


def _weights(memory: ModelMemory) -> str:
    return "weights drawn at start" if memory.weights is None else f"{sized(memory.weights)} of weights"


def _pool(memory: ModelMemory) -> str:
    if not memory.kv_of_token:
        return "no KV cache"
    each = f"{memory.kv_of_token:,} bytes a token"
    if memory.kv_pool is None:
        return f"a KV cache in the memory that is left ({each})"
    return f"{sized(memory.kv_pool)} of KV cache ({each})"


MIN_CPUS = 4  # that `assay serve` claims on a small machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Holds the findings in the order of the file, and a plan for each application."""

    findings: tuple[Finding, ...]
    plans: tuple[StartPlan, ...]

    @property
    def good(self) -> bool:
        return not any(one.level == "error" for one in self.findings)


def check(file: Path, *, with_model: bool = True) -> Report:
    """Checks a configuration.

    Args:
        file: a Serve config, or a RayService manifest.
        with_model: also checks config.json, tokenizer and templates, which must be on this machine.

    Raises:
        document.Unreadable: the file holds no configuration.
    """
    found = document.read(file)
    config = found.config
    schema = list(document.check_schema(config))
    findings = [*found.findings, *schema, *application.check_ports(config)]
    plans = []
    applications = config.get("applications")
    for index, one in enumerate(applications if isinstance(applications, list) else []):
        if isinstance(one, dict):
            where = under("applications", index)
            overrides = under(where, "deployments")
            known = not any(each.where.startswith(overrides) for each in schema)
            plan, more = _application(config, one, where, with_model, known)
            findings += more
            plans += [plan] if plan else []
    parts = [part for plan in plans for part in plan.parts]
    findings += resources.check_machine(parts, _here())
    return Report(findings=tuple(findings), plans=tuple(plans))


def _application(
    config: dict[str, Any], given: dict[str, Any], where: str, with_model: bool, known: bool
) -> tuple[StartPlan | None, list[Finding]]:
    """Checks one application. Unless the options of its deployments are `known`, nothing that depends on them is."""
    findings = list(application.check_path(given, where))
    if findings:
        return None, findings
    inside = under(where, "args")
    args, found = check_arguments(given.get("args") or {}, inside)
    if args is None or not known:
        return None, found
    deployed, findings = application.deployments(given, args, where)
    parts = [resources.resources_of(one) for one in deployed]
    findings += application.check_overrides(deployed, args)
    findings += application.check_reach(config, given, where)
    findings += application.check_timeout(config, args)
    findings += application.check_exposure(config, args, inside)
    findings += resources.check(parts[0], parts[1], args, inside)
    memory = None
    if with_model:
        memory, found = _model(args, inside, parts[1].min_actors)
        findings += found
    return StartPlan(application=str(given.get("name", "default")), parts=tuple(parts), memory=memory), findings


def _model(args: AppArgs, where: str, replicas: int) -> Any:
    from deployments.cli.check import model

    memory, findings = model.check(args, where)
    more: Iterator[Finding] = check_memory(memory, replicas, where) if memory else iter(())
    return memory, [*findings, *more]


def _here() -> resources.MachineResources:
    import torch

    return resources.MachineResources(cpus=max(MIN_CPUS, os.cpu_count() or 1), gpus=torch.cuda.device_count())


def errors_of(config: dict[str, Any]) -> list[Finding]:
    """Finds the errors that stop a Serve config from starting on this machine, or open it to others.

    Nothing is built. `check.model.errors_of` finds those of models and prompts, which takes torch.
    """
    findings = [*document.check_schema(config), *application.check_port(config)]
    for where, args, found in arguments_of(config):
        findings += found
        if args is not None:
            findings += application.check_exposure(config, args, where)
    return [one for one in findings if one.level == "error"]
