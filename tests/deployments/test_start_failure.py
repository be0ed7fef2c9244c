"""A replica that cannot start: what Serve's status says of it, and /readyz of an ingress that lives beside it."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.start_failure import StartFailure, failure_of, parse
from engine.model.model_folder import BUILTIN
from tests.support.model_folders import LFS_POINTER

PATIENCE_S = 120.0


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("no traceback\nin it", StartFailure("StartFailed", "no traceback in it")),
        (
            "x\nTraceback (most recent call last):\n  File\nKeyError: 'a'\n\nDuring handling of the above:\n\n"
            "Traceback (most recent call last):\n  File\n    raise\nengine.model.BadCheckpoint: a: b\nsecond line\n",
            StartFailure("BadCheckpoint", "a: b"),
        ),
        ("Traceback (most recent call last):\n  File\nMemoryError\n", StartFailure("MemoryError", "")),
    ],
)
def test_the_reason_is_the_last_exception(message: str, found: StartFailure) -> None:
    assert parse(message) == found


@pytest.mark.full
def test_a_model_that_cannot_be_read_makes_readyz_failed_with_the_reason(
    cluster: Callable[..., str], tmp_path: Path
) -> None:
    """As a cluster sees it, where no `assay serve` checks the files before."""
    from ray import serve
    from ray.serve.context import _get_global_client

    from deployments.app import build
    from deployments.config.app_args import AppArgs

    folder = tmp_path / "model"
    shutil.copytree(BUILTIN, folder)
    (folder / "model.safetensors").write_text(LFS_POINTER)
    args: dict[str, Any] = {"model": {"path": str(folder), "device": "cpu"}, "health": {"period_s": 0.5}}
    with pytest.raises(RuntimeError):
        serve.run(build(AppArgs.model_validate(args)), name="broken", route_prefix="/broken")
    failure = failure_of(serve.status().applications["broken"])
    assert failure is not None and failure.reason == "BadCheckpoint"
    assert "git-lfs pointer" in str(failure) and "Traceback" not in str(failure)
    url = f"http://127.0.0.1:{_get_global_client().http_config.port}/broken"
    end = time.monotonic() + PATIENCE_S
    with httpx.Client(timeout=PATIENCE_S, trust_env=False) as http:
        while (found := http.get(url + "/readyz").json())["status"] == "starting":
            assert time.monotonic() < end
            time.sleep(0.1)
    assert (found["status"], found["reason"]) == ("failed", "BadCheckpoint")
    serve.delete("broken")
