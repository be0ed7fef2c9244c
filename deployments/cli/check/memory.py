"""Checks the memory of replicas."""

import os
from collections.abc import Iterator
from typing import NamedTuple

from deployments.cli.check.findings import Finding, under, warning


class ModelMemory(NamedTuple):
    """Holds the bytes that one replica needs, computed from config.json and the headers of the weights' files."""

    weights: int | None  # None for random weights
    kv_of_token: int
    kv_pool: int | None  # None: the memory that is left
    device: str


def check_memory(memory: ModelMemory, replicas: int, where: str) -> Iterator[Finding]:
    """Checks replicas on a CPU against the memory of this machine."""
    if memory.device != "cpu":
        return
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = replicas * ((memory.weights or 0) + (memory.kv_pool or 0))
    if wanted > here:
        yield warning(
            under(where, "engine.kv_slots"),
            f"{replicas} replicas take {sized(wanted)} for weights and KV cache, and this machine has {sized(here)}: "
            "lower it.",
        )


def sized(size: int) -> str:
    """Renders a number of bytes."""
    return f"{size / 2**30:,.3g} GiB" if size >= 2**30 else f"{size / 2**20:,.3g} MiB"
