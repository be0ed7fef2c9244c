"""Ports for services of tests."""

from typing import Final

from deployments.cli.launch.ray_env import free_ports

# Above those that the launcher draws for HAProxy and those at which ingresses listen in fast mode, and below those that
# Linux gives to a process that asks for any: a process of the cluster would take the port before the service does.
RANGE: Final = range(31_001, 32_700)


def free_port() -> int:
    """A port of this machine that is free now."""
    return int(free_ports(1, RANGE)[0])
