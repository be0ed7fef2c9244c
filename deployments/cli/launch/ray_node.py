"""Starts Ray on this machine, more than once if need be.

Ray gives the raylet of a new node 30 s and raises a bare Exception after them. No option changes that. A machine that
is busy, or reads the files of Ray for the first time, takes longer.
"""

import contextlib
from collections.abc import Callable, Collection

import psutil

from deployments.cli.launch.listening_ports import process_name

TRIES = 3
TOO_LATE = "timed out during startup"  # in the message of Ray's exception
PROCESSES = ("gcs_server", "raylet")  # of a node; its others end with these


class NodeTooLate(RuntimeError):
    """Ray's node did not start in time, however often it was tried."""


def start(init: Callable[[], object]) -> None:
    """Calls `init`, a call of `ray.init` for a local cluster; again, without what it has left, if the node is too late.

    Raises NodeTooLate after TRIES of them. A node that this process has started before is left alone.
    """
    before = _node_processes()
    for _ in range(TRIES):
        try:
            init()
            return
        except Exception as error:
            if TOO_LATE not in str(error):
                raise
            _kill(_node_processes() - before)
    raise NodeTooLate(f"Ray's node did not start within 30 s, {TRIES} times: the machine is too busy or lacks memory.")


def _node_processes() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if process_name(child.pid) in PROCESSES}


def _kill(processes: Collection[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended just now
            process.kill()
    psutil.wait_procs(processes)
