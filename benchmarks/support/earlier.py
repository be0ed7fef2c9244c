"""Finds names in the sources of earlier commits, whose modules have other names."""

import importlib
from typing import Any


def first_of(*places: str) -> Any:
    """Returns the first of several `module:name` that exists.

    Names of earlier commits stand first. Where the project is installed in place, Python finds a module that the
    earlier commit lacks in the installed one, so a newer name is found beside any sources.
    """
    for place in places:
        module, name = place.split(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"None of {places} exists.")
