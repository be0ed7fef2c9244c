"""Reads why an application cannot start from the status that Serve's controller keeps."""

import re
from typing import NamedTuple

from ray.serve.schema import ApplicationStatusOverview

FAILED = "DEPLOY_FAILED"  # Serve starts nothing again until the next deploy
TRACEBACK = "Traceback (most recent call last):\n"
_RAISED = re.compile(r"(?:\w+\.)*(\w+)(?:: (.*))?")


class StartFailure(NamedTuple):
    """Says why Serve has given up a start."""

    reason: str  # the exception's class, such as BadCheckpoint
    message: str

    def __str__(self) -> str:
        return self.message or self.reason


def failure_of(application: ApplicationStatusOverview) -> StartFailure | None:
    """Returns why an application has failed to start; None while it starts or runs."""
    if application.status != FAILED:
        return None
    messages = [one.message for one in application.deployments.values() if one.status == FAILED]
    return parse([*messages, application.message][0])


def parse(message: str) -> StartFailure:
    """Returns the exception of the last traceback in a status message, or the message itself if there is none."""
    _, found, text = message.rpartition(TRACEBACK)
    lines = [line for line in text.splitlines() if line and not line[0].isspace()]
    raised = _RAISED.fullmatch(lines[0]) if found and lines else None
    if raised is None:
        return StartFailure("StartFailed", " ".join(message.split()))
    return StartFailure(raised[1], raised[2] or "")
