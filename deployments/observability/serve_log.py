"""Sends what our loggers are given to the log that Serve keeps of a process."""

import logging

LOGGERS = ("assay", "engine", "gpu_sampler")


def log_with_serve() -> None:
    """Sends what our own loggers are given to the log of this process, in the form that `logging_config` names.

    Python gives them to no file, drops their INFO, and writes the rest to the standard error.
    """
    for name in LOGGERS:
        ours = logging.getLogger(name)
        ours.parent = logging.getLogger("ray.serve")
        ours.setLevel(logging.NOTSET)  # forgets what each logger has found of its former parents' levels
