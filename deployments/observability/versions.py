"""Tells the versions of the packages that an answer depends on."""

import contextlib
import importlib.metadata
from collections.abc import Sequence


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of the packages that are installed, ours first."""
    found = {}
    for package in ("assay-serve", *packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package.removesuffix("-serve").removesuffix("-python")] = importlib.metadata.version(package)
    return found
