"""Ports for services of tests."""

import random
import socket
from typing import Final

# Above those that the launcher draws for HAProxy, and below those that Linux gives to whoever asks for any, which a
# process of the cluster would take before the service does.
RANGE: Final = range(30_000, 32_700)


def free_port() -> int:
    """A port of this machine that is free now, drawn at random. OSError where there is none."""
    for port in random.SystemRandom().sample(RANGE, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"No free port among 100 of {RANGE}.")
