"""Keeps processes that have imported what a replica needs, before Ray asks for one.

The imports of a replica take 4 to 10 s, where a warm start takes 20 to 40. `assay serve` starts as many processes as
there will be replicas on GPUs, and these import while Ray starts. Later one more waits for a replica that is replaced.
Ray starts such a replica's worker by `launcher`, which hands Ray's arguments, environment and files to a process that
waits, and that process becomes the worker. Where none waits, the launcher becomes an ordinary worker.

    assay serve --starts--> process: imports, waits on a socket
    Ray --starts--> launcher --arguments, environment, files--> process: runs Ray's worker

Gain: on 16 cores with an H200, a replica begins to load its model 2.1 to 2.5 s after its application is built, and 9.5
without. Switch: the environment variable ASSAY_STANDBY.
"""

import os
from typing import Any, Final

COUNT_VARIABLE: Final = "ASSAY_STANDBY"  # how many processes; by default one for each replica on a GPU
COMMAND_VARIABLE: Final = "ASSAY_STANDBY_COMMAND"  # what Ray starts in place of Python; `assay serve` sets it


def actor_options() -> dict[str, Any]:
    """Returns Ray's options of a replica that one of these processes may become; none where there are no processes."""
    command = os.environ.get(COMMAND_VARIABLE)
    return {} if command is None else {"runtime_env": {"py_executable": command}}
