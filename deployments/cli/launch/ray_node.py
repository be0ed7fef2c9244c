"""Starts Ray on this machine, more than once if need be.

Ray gives the raylet of a new node 30 s and raises a bare Exception after them. No option changes that. A machine that
is busy, or reads the files of Ray for the first time, takes longer.
"""

import contextlib
from collections.abc import Callable

import psutil

from deployments.cli.launch.listening_ports import process_name

TRIES = 3
TOO_LATE = "timed out during startup"  # in the message of Ray's exception
PROCESSES = ("gcs_server", "raylet")  # of a node; its others end with these


class NodeTooLate(RuntimeError):
    """Ray's node did not start in time, however often it was tried."""


def start(init: Callable[[], object]) -> None:
    """Calls `init`, a call of `ray.init` for a local cluster; again, without what it has left, if the node is too late.

    Raises NodeTooLate after TRIES of them. This process must not have a node of Ray yet.
    """
    for _ in range(TRIES):
        try:
            init()
            return
        except Exception as error:
            if TOO_LATE not in str(error):
                raise
            _kill_node()
    raise NodeTooLate(f"Ray's node did not start within 30 s, {TRIES} times: the machine is too busy or lacks memory.")


def _kill_node() -> None:
    left = [child for child in psutil.Process().children() if process_name(child.pid) in PROCESSES]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended just now
            child.kill()
    psutil.wait_procs(left)
