"""Debian's Prometheus and its promtool, over what we made. Run by `make dashboards`, which fetches them."""

import os
import shutil
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True: ignored, unless the marker that was asked for is ours."""
    return True if str(config.getoption("markexpr")) != "prometheus" else None


def _tool(name: str) -> Path:
    found = shutil.which(name, path=os.environ.get("ASSAY_PROMETHEUS")) or shutil.which(name)
    assert found is not None, f"{name} is not installed, and not in the folder ASSAY_PROMETHEUS: run `make dashboards`"
    return Path(found)


@pytest.fixture(scope="session")
def promtool() -> Path:
    return _tool("promtool")


@pytest.fixture(scope="session")
def prometheus() -> Path:
    return _tool("prometheus")
