"""Kernels compiled on a GPU, or interpreted: then in a process of their own, as Triton reads TRITON_INTERPRET=1 when it
is imported and all its kernels are interpreted from there on."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED or torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no GPU, and TRITON_INTERPRET=1 is not set"))


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
