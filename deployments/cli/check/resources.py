"""Checks replicas, CPUs and GPUs: what Ray would wait for forever, or reserve and not use."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ray.serve.config import AutoscalingConfig

from deployments.cli.check.application import DeploymentOptions
from deployments.cli.check.findings import Finding, error, under, warning
from deployments.config.app_args import AppArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentResources:
    """Holds how many actors a deployment has and what Ray reserves for each."""

    name: str
    min_actors: int
    max_actors: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineResources:
    """Holds what this machine offers Ray. CPUs are logical: `assay serve` claims at least four."""

    cpus: int
    gpus: int


def resources_of(deployed: DeploymentOptions) -> DeploymentResources:
    """Derives the resources from a deployment's options."""
    actor: dict[str, Any] = {**deployed.options["ray_actor_options"], **(deployed.option("ray_actor_options") or {})}
    scaling, count = deployed.option("autoscaling_config"), deployed.option("num_replicas")
    if count == "auto":
        scaling = {**AutoscalingConfig.default().model_dump(), **(scaling or {})}
    fewest = largest = count if isinstance(count, int) else 1
    if isinstance(scaling, dict):
        fewest, largest = int(scaling.get("min_replicas", 1)), int(scaling.get("max_replicas", 1))
    return DeploymentResources(
        name=deployed.name,
        min_actors=fewest,
        max_actors=largest,
        num_cpus=float(actor.get("num_cpus") or 0),
        num_gpus=float(actor.get("num_gpus") or 0),
    )


def check(ingress: DeploymentResources, replica: DeploymentResources, args: AppArgs, where: str) -> Iterator[Finding]:
    """Checks the resources against `args`, whose path is `where`."""
    yield from _gpus(ingress, replica, args, where)
    need = args.health.min_replicas
    if need > replica.max_actors:
        yield error(
            under(where, "health.min_replicas"),
            f"There are {replica.max_actors} replicas at most, so /readyz would never answer 200: lower it, or raise "
            f"replica.count. Given: {need}.",
        )
    if args.limits.get("max_items", 1 << 40) < args.fanout.min_items:
        yield warning(
            under(where, "fanout.min_items"),
            f"No request may have so many items (limits.max_items is {args.limits['max_items']}): none is ever split"
            f". Given: {args.fanout.min_items}.",
        )


def _gpus(ingress: DeploymentResources, replica: DeploymentResources, args: AppArgs, where: str) -> Iterator[Finding]:
    option, gpus = under(where, "replica.num_gpus"), replica.num_gpus
    if ingress.num_gpus:
        yield error(under(where, "ingress.num_gpus"), f"An ingress uses no GPU: set 0. Given: {ingress.num_gpus:g}.")
    if args.model.device == "cuda" and not gpus:
        yield error(
            option, "Ray shows a replica only the GPUs that it reserves: set 1 with model.device cuda. Given: 0."
        )
    if args.model.device == "cpu" and gpus:
        yield error(option, f"model.device is cpu, so the GPU would be reserved and idle: set 0. Given: {gpus:g}.")
    if gpus > 1:
        more = f" and replica.count {int(replica.max_actors * gpus)}" if gpus == int(gpus) else ""
        yield error(option, f"A replica runs on one GPU; the others would be idle: set 1{more}. Given: {gpus:g}.")


def check_machine(parts: list[DeploymentResources], machine: MachineResources) -> Iterator[Finding]:
    """Checks the resources against this machine; a cluster may have more."""
    cpus = sum(part.min_actors * part.num_cpus for part in parts)
    gpus = sum(part.min_actors * part.num_gpus for part in parts)
    if gpus > machine.gpus:
        yield warning("", f"It needs {gpus:g} GPUs and this machine has {machine.gpus}: here Ray would wait forever.")
    if cpus > machine.cpus:
        yield warning(
            "", f"It needs {cpus:g} logical CPUs and `assay serve` has {machine.cpus} here: Ray would wait forever."
        )
