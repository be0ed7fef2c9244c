"""Checks the models of a configuration in a process of its own, while Ray starts.

Reading a model's files takes torch: seconds to import, and hundreds of megabytes that `assay serve` would keep.
"""

import multiprocessing
import signal
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from deployments.garbage_collection import paused


class ModelCheck:
    """Represents a check that has begun. `stop` ends it."""

    def __init__(self, config: dict[str, Any]) -> None:
        processes = multiprocessing.get_context("spawn")
        self._errors, errors = processes.Pipe(duplex=False)
        self._process = processes.Process(target=_send_errors, args=(config, errors), daemon=True)
        # The process inherits the mask: an interrupt of the terminal, which both get, is the parent's to act upon.
        resource_tracker.ensure_running()  # the first process starts it, which lifts the mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        errors.close()

    def errors(self) -> list[str]:
        """Waits for the end of the check and returns the errors that stop the configuration from starting."""
        try:
            found: list[str] = self._errors.recv()
        except EOFError:
            self._process.join()
            return [f"error: the check of the model ended with status {self._process.exitcode}."]
        self._process.join()  # else what is left of it stays for as long as the service
        return found

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()
        self._errors.close()


def _send_errors(config: dict[str, Any], errors: Connection) -> None:
    with paused():  # most of it is the import of torch and of the model library
        from deployments.cli.check import model

        errors.send([str(error) for error in model.errors_of(config)])
