"""Reads the API key with which `assay score` and `assay bench` use a service."""

import os
from collections.abc import Mapping
from http import HTTPStatus

VARIABLE = "ASSAY_API_KEY"


def remedy(status: int) -> str:
    """Returns what to do about a service's answer: a sentence about the key for 401, nothing for others."""
    return f" Set {VARIABLE} to a valid key." if status == HTTPStatus.UNAUTHORIZED else ""


def api_key(variables: Mapping[str, str] = os.environ) -> str | None:
    """Returns the key, without the line end that a file or a Secret may put behind it; None if there is none.

    Raises:
        ValueError: It cannot be sent in a header. The message does not show it.
    """
    found = variables.get(VARIABLE, "").strip()
    if not (found.isascii() and found.isprintable()):
        raise ValueError(f"`{VARIABLE}` must be printable ASCII. Given: something else.")
    return found or None
