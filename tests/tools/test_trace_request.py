"""The walk of a request: how long it is, and that nothing that runs for the request is missing from it."""

import asyncio
import contextlib
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools.trace_request import PACKAGES, REQUESTS, ROOT, FileVisit, Tracer, ValueClass, Walk, excess, report

pytestmark = pytest.mark.timeout(1300)  # two walks, in which each call of a function is noted
MAX_SCORE_FILES = 56
MAX_SCORE_CLASSES = 10
MAX_COMPLETION_FILES = 66

PLANTED = '''"""Adds what it is given.

More words.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel

from planted import unused


class Given(NamedTuple):
    """Holds the text. It is short."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    given: Given
    ids: object


@dataclass
class Filled:
    ids: object = None


class Item(BaseModel):
    text: str


class Body(BaseModel):
    items: list[Item]


class Size(NamedTuple):
    count: int


class _Own(NamedTuple):
    text: str


@dataclass
class Failed(Exception):
    text: str


BEFORE = Given("red chair")


def add(text):
    size, own, failed = Size(len(text)), _Own(text), Failed(text)
    filled = Filled()
    filled.ids = np.arange(size.count)
    return Tokens(Given(text), [x for x in filled.ids]), own, failed, filled


def parse(text):
    return Body.model_validate({"items": [{"text": text}]})


def wait():
    """Returns."""


def size(text):
    return Size(len(text))
'''
UNUSED = '"""Is imported and not called."""\n\n\nclass Body:\n    x = 1\n\n\ndef never():\n    return 1\n'
BODY = {"prompt": "red chair"}


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[ModuleType]:
    """A module of a package below `tmp_path` that is not imported elsewhere."""
    folder = tmp_path / "planted"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Holds planted modules."""\n')
    (folder / "adding.py").write_text(PLANTED)
    (folder / "unused.py").write_text(UNUSED)
    sys.path.insert(0, str(tmp_path))
    try:
        yield importlib.import_module("planted.adding")
    finally:
        sys.path.remove(str(tmp_path))
        for name in [name for name in sys.modules if name.partition(".")[0] == "planted"]:
            del sys.modules[name]


@pytest.fixture
def tracer(tmp_path: Path) -> Tracer:
    return Tracer(tmp_path, ("planted",))


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Walk]:
    """The walks of a score and a completion, each of a process of its own."""
    found = {}
    for name in ("score", "completion"):
        out = tmp_path_factory.mktemp("walks") / f"{name}.json"
        status, _, errors = run(name, "--json", str(out))
        assert status == 0, errors
        walk = json.loads(out.read_text())
        assert walk["request"] == name
        files = [FileVisit(**visit) for visit in walk["files"]]
        found[name] = Walk(files=files, value_classes=[ValueClass(**kind) for kind in walk["value_classes"]])
    return found


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status and outputs of the command."""
    command = [sys.executable, "-m", "tools.trace_request", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.full
def test_walks_are_no_longer_than_their_limits(walks: dict[str, Walk]) -> None:
    assert excess(walks["score"], MAX_SCORE_FILES, MAX_SCORE_CLASSES) == []
    assert excess(walks["completion"], MAX_COMPLETION_FILES, None) == []


@pytest.mark.full
@pytest.mark.parametrize("name", ["score", "completion"])
def test_a_walk_goes_through_every_room_from_http_to_the_model(walks: dict[str, Walk], name: str) -> None:
    rooms = [visit.room for visit in walks[name].files]
    order = ["deployments/api", "deployments/api/endpoints", "deployments/replica"]
    order += ["engine/scheduler", "engine/model", "engine/attention"]
    firsts = [rooms.index(room) for room in order]
    assert firsts == sorted(firsts)
    assert {visit.path.partition("/")[0] for visit in walks[name].files} >= {"deployments", "engine", "gpu_sampler"}
    assert len({visit.path for visit in walks[name].files}) == len(rooms)
    assert all((ROOT / visit.path).is_file() and visit.says for visit in walks[name].files)
    assert any(visit.path == "deployments/routing/replica_selection.py" for visit in walks[name].files)


def test_a_planted_call_is_found(tracer: Tracer, planted: Any) -> None:
    with tracer.recording(BODY):
        planted.add("red chair")
        planted.add("red chair")
    (visit,) = tracer.walk().files
    assert visit == FileVisit(path="planted/adding.py", says="Adds what it is given.", functions=["add"])


def test_only_what_is_called_while_recording_is_found(tracer: Tracer, planted: Any) -> None:
    planted.parse("red chair")
    with tracer.recording(BODY):
        importlib.reload(planted.unused)
    planted.parse("red chair")
    assert tracer.walk() == Walk(files=[], value_classes=[])
    with tracer.recording(BODY):
        planted.unused.never()
    assert [visit.path for visit in tracer.walk().files] == ["planted/unused.py"]


def test_planted_values_of_a_request_are_found(tracer: Tracer, planted: Any) -> None:
    """Not `Size`, which holds a number; nor `_Own`, which one file keeps; nor an exception."""
    with tracer.recording(BODY):
        planted.add("red chair")
        planted.add("red chair")
    found = tracer.walk().value_classes
    assert [(kind.name, kind.made) for kind in found] == [("Filled", 2), ("Given", 2), ("Tokens", 2)]
    assert found[1] == ValueClass(name="Given", path="planted/adding.py", says="Holds the text.", made=2)
    assert found[2].says == "(no docstring)"


def test_planted_models_inside_models_are_found(tracer: Tracer, planted: Any) -> None:
    with tracer.recording(BODY):
        planted.parse("red chair")
    assert [(kind.name, kind.made) for kind in tracer.walk().value_classes] == [("Body", 1), ("Item", 1)]


def test_values_without_the_request_are_not_found(tracer: Tracer, planted: Any) -> None:
    with tracer.recording(BODY):
        planted.parse("blue lamp")
        planted.size("red chair")
        assert planted.BEFORE.text == "red chair"
    assert tracer.walk().value_classes == []


async def test_other_threads_are_seen_from_their_first_call_for_the_request(tracer: Tracer, planted: Any) -> None:
    watched, woken, over = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        watched.set()
        while not over.wait(0.01):
            planted.wait()
            if woken.is_set():
                planted.unused.never()

    with tracer.watching_new_threads():
        thread = threading.Thread(target=work)
        thread.start()
    watched.wait()  # Python refuses two profile functions that are installed at the same moment
    try:
        await tracer.learn_idle()
        with tracer.recording(BODY):
            await tracer.until_quiet()
        assert tracer.walk().files == []
        with tracer.recording(BODY):
            woken.set()
            await asyncio.sleep(0.1)
            woken.clear()
        assert [visit.path for visit in tracer.walk().files] == ["planted/unused.py", "planted/adding.py"]
    finally:
        over.set()
        thread.join()


async def test_a_service_that_does_not_become_quiet_is_an_error(tmp_path: Path, planted: Any) -> None:
    tracer = Tracer(tmp_path, ("planted",), settle_s=0.3)

    async def work() -> None:
        while True:
            planted.wait()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(work())
    with tracer.recording(BODY), pytest.raises(TimeoutError):
        await tracer.until_quiet()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_limits_are_inclusive() -> None:
    walk = Walk(files=[FileVisit(path="engine/core.py", says="Runs.")], value_classes=[])
    assert excess(walk, 1, 0) == [] and excess(walk, None, None) == []
    assert excess(walk, 0, 0) == ["A walk may cross at most 0 files. Given: 1."]


@pytest.mark.full
def test_a_report_reads_in_order(walks: dict[str, Walk]) -> None:
    walk = walks["score"]
    lines = report("score", walk).splitlines()
    numbered = [line.split()[:2] for line in lines[: lines.index("Value classes")] if line[:5].strip(" .").isdigit()]
    assert numbered == [[f"{n}.", Path(visit.path).name] for n, visit in enumerate(walk.files, 1)]
    assert lines[-1].startswith(f"score: {len(walk.files)} files, ")
    assert "ReplicaServer.score" in report("score", walk, functions=True)


def test_every_package_that_ships_is_traced() -> None:
    shipped = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert shipped == set(PACKAGES)


@pytest.mark.full
def test_a_walk_that_is_too_long_fails_the_command() -> None:
    status, output, errors = run("stream", "--max-files", "3")
    assert status == 1 and f"stream: POST {REQUESTS['stream'].path}" in output
    assert "A walk may cross at most 3 files. Given: " in errors
