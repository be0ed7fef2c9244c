"""A node that starts too late is ended and started again; other failures are raised."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.cli.launch import ray_node

TOO_LATE = Exception("The current node timed out during startup. This could happen because some of the raylet failed.")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """Three children: two are named as a node's are."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    started = {}
    for name in (*ray_node.PROCESSES, "other"):
        shutil.copy(sleep, tmp_path / name)
        started[name] = subprocess.Popen([tmp_path / name, "600"])
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def test_a_node_that_is_too_late_is_ended_before_the_next(processes: dict[str, "subprocess.Popen[bytes]"]) -> None:
    alive: list[list[str]] = []

    def init() -> None:
        alive.append([name for name, process in processes.items() if process.poll() is None])
        if len(alive) < ray_node.TRIES:
            raise TOO_LATE

    ray_node.start(init)
    assert alive == [[*ray_node.PROCESSES, "other"], ["other"], ["other"]]


@pytest.mark.parametrize(("raised", "expected", "calls"), [
    (TOO_LATE, ray_node.NodeTooLate, ray_node.TRIES),
    (ValueError("num_cpus"), ValueError, 1),
    (KeyboardInterrupt(), KeyboardInterrupt, 1),
])  # fmt: skip
def test_what_keeps_failing_is_raised(raised: BaseException, expected: type[BaseException], calls: int) -> None:
    called = []

    def init() -> None:
        called.append(1)
        raise raised

    with pytest.raises(expected):
        ray_node.start(init)
    assert len(called) == calls


def test_rays_own_words_are_those_that_are_looked_for() -> None:
    import ray

    assert ray_node.TOO_LATE in (Path(ray.__file__).parent / "_private" / "node.py").read_text("utf-8")
