"""A node that starts too late is ended and started again; other failures are raised."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments.cli.launch import ray_node

TOO_LATE = Exception("The current node timed out during startup. This could happen because some of the raylet failed.")


Processes = dict[str, "subprocess.Popen[bytes]"]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Callable[..., Processes]]:
    """`children(*names)` starts children of these names."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    started = list["subprocess.Popen[bytes]"]()

    def begin(*names: str) -> Processes:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        found = {name: subprocess.Popen([shutil.copy(sleep, folder / name), "600"]) for name in names}
        started.extend(found.values())
        return found

    yield begin
    for process in started:
        process.kill()
        process.wait()


def alive(processes: Processes) -> list[str]:
    return [name for name, process in processes.items() if process.poll() is None]


def test_a_node_that_is_too_late_is_ended_before_the_next_and_an_older_one_is_left_alone(
    children: Callable[..., Processes],
) -> None:
    """The process of a test run may have a node, the session's cluster."""
    older, calls, late = children(*ray_node.PROCESSES), [0], Processes()

    def init() -> None:
        calls[0] += 1
        if calls[0] == 1:
            late.update(children(*ray_node.PROCESSES, "other"))
            raise TOO_LATE
        assert alive(late) == ["other"]

    ray_node.start(init)
    assert calls == [2] and alive(older) == list(ray_node.PROCESSES)


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
