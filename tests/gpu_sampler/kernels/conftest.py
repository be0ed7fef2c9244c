"""Kernels compiled on a GPU, or interpreted: then in a process of their own, as Triton reads TRITON_INTERPRET=1 when it
is imported and all its kernels are interpreted from there on."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IGNORED = (  # numpy warns where a GPU says nothing; Triton 3.9, of what 3.6 needs for its fastest gather
    "ignore:(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning",
    r"ignore:tl\.reshape\(can_reorder=True\) is deprecated:UserWarning",
)
THEIR_SORT = pytest.StashKey[Any]()
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    if INTERPRETED and importlib.util.find_spec("triton") is not None:
        from tests.support.interpreter import hasten
        from tests.support.products import leave_blas

        config.stash[THEIR_SORT] = hasten()
        leave_blas()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            if INTERPRETED:
                item.add_marker(pytest.mark.filterwarnings(*IGNORED))
            elif not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU, and TRITON_INTERPRET=1 is not set"))


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.fixture
def their_sort(request: pytest.FixtureRequest) -> Any:
    """The interpreter's own `tl.sort`, for which ours stands in elsewhere."""
    if not INTERPRETED:
        pytest.skip("compiled kernels sort by the compiler's own")
    return request.config.stash[THEIR_SORT]
