"""Keeps the processes that wait, for `assay serve`."""

import logging
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any, Final

from deployments.standby import COMMAND_VARIABLE, COUNT_VARIABLE, launcher

log = logging.getLogger(__name__)

MODULE: Final = "deployments.standby.process"
MAX_COUNT: Final = 64
GPUS: Final = "/dev/nvidia[0-9]*"
THREADS_VARIABLE: Final = (
    "OMP_NUM_THREADS"  # torch reads it when it is imported; Ray sets it for a worker, by its cores
)


class StandbyPool:
    """Starts processes that wait. `stop` ends those that still do; the others are Ray's workers by then."""

    def __init__(self, folder: Path, count: int) -> None:
        """Starts `count` processes.

        Args:
            folder: One that only its owner can enter, for their sockets.
            count: 0: there are none, later neither.
        """
        self._folder = folder
        self._lock = threading.Lock()
        self._waiting = dict[int, subprocess.Popen[bytes]]()
        self._started = 0
        self._keeps_spare = self._stopped = False
        for _ in range(count):
            self._start()

    @property
    def variables(self) -> Mapping[str, str]:
        """Returns the variables that Ray's processes must find in their environment."""
        if not self._started:
            return {}
        command = (sys.executable, "-I", "-S", launcher.__file__, str(self._folder))
        return {COMMAND_VARIABLE: shlex.join(command)}

    def keep_spare(self) -> None:
        """From now on, one process waits for a replica that is replaced."""
        with self._lock:
            self._keeps_spare = self._started > 0
            self._replenish()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._waiting.values():
                process.terminate()

    def _replenish(self) -> None:
        if self._keeps_spare and not self._waiting and not self._stopped:
            self._start()

    def _start(self) -> None:
        number, self._started = self._started, self._started + 1
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(self._folder / f"{number:04}{launcher.SUFFIX}")],
            env={THREADS_VARIABLE: "1"} | os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,  # ends with this process
            stdout=subprocess.PIPE,  # ends when the process waits no more, with TAKEN if it becomes a worker
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt of the terminal is for `assay serve`
        )
        self._waiting[number] = process
        threading.Thread(target=self._follow, args=(number, process), daemon=True).start()

    def _follow(self, number: int, process: "subprocess.Popen[bytes]") -> None:
        """Waits until a process waits no more, then for its end: Ray would take one that is not reaped for alive."""
        with process:
            assert process.stdout is not None
            is_worker = process.stdout.read().endswith(launcher.TAKEN)
            with self._lock:
                del self._waiting[number]
                if is_worker:
                    self._replenish()
                elif not self._stopped:  # it was not fit, and the next would not be
                    log.warning("A process that waits has ended before a replica needed it: replicas start later.")


def wanted(config: Mapping[str, Any]) -> int:
    """Returns how many processes a Serve config has use for: one a replica on a GPU of this machine, unless
    ASSAY_STANDBY names a number. The config may be wrong, which is reported elsewhere.

    Raises:
        ValueError: ASSAY_STANDBY is no number in [0, 64].
    """
    named = os.environ.get(COUNT_VARIABLE)
    if named is not None:
        if not (named.isdecimal() and int(named) <= MAX_COUNT):
            raise ValueError(f"`{COUNT_VARIABLE}` must be in [0, {MAX_COUNT}]. Given: {named}.")
        return int(named)
    applications = config.get("applications")
    found = [_replicas(one) for one in applications] if isinstance(applications, list) else []
    return min(sum(found), len(glob(GPUS)))


def _replicas(application: object) -> int:
    """Returns the number of replicas that may be on GPUs and whose processes need nothing else than this one does."""
    given = application if isinstance(application, dict) else {}
    args = given.get("args")
    sections = args if isinstance(args, dict) else {}
    model, replica = (sections.get(name) for name in ("model", "replica"))
    if given.get("runtime_env") or (isinstance(model, dict) and model.get("device") == "cpu"):
        return 0
    count = replica.get("count", 1) if isinstance(replica, dict) else 1
    return count if isinstance(count, int) else 0
