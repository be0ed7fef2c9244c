"""Plan: what a configuration would start, and what that takes."""

from dataclasses import asdict, dataclass
from typing import Any

from deployments.checks.model import Memory, sized
from deployments.checks.resources import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Of one application."""

    application: str
    parts: tuple[Part, ...]
    memory: Memory | None  # of one replica

    @property
    def gpus(self) -> float:
        return sum(part.most * part.num_gpus for part in self.parts)

    @property
    def cpus(self) -> float:
        return sum(part.most * part.num_cpus for part in self.parts)

    def record(self) -> dict[str, Any]:
        memory = self.memory._asdict() if self.memory else None
        parts = [asdict(part) for part in self.parts]
        return {"application": self.application, "parts": parts, "cpus": self.cpus, "gpus": self.gpus, "memory": memory}

    def lines(self) -> list[str]:
        found = [f"{self.application}:"]
        for part in self.parts:
            count = f"{part.least}" if part.least == part.most else f"{part.least} to {part.most}"
            found.append(f"  {part.name}: {count} x {part.num_cpus:g} CPUs, {part.num_gpus:g} GPUs")
        found.append(f"  together at most {self.cpus:g} logical CPUs, {self.gpus:g} GPUs")
        if self.memory is not None:
            found.append(f"  a replica on {self.memory.device}: {_weights(self.memory)}, {_pool(self.memory)}")
        return found


def _weights(memory: Memory) -> str:
    return "weights drawn at start" if memory.weights is None else f"{sized(memory.weights)} of weights"


def _pool(memory: Memory) -> str:
    each = f"{memory.kv_of_token:,} bytes a token"
    if memory.kv_pool is None:
        return f"keys and values in the memory that is left ({each})"
    return f"{sized(memory.kv_pool)} of keys and values ({each})"
