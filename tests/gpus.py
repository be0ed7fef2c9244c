"""A plugin of pytest (`-p tests.gpus`): each worker of pytest-xdist has one of the machine's GPUs to itself.

Worker gwN sees GPU N modulo their count, and fails its tests where it sees another number of them than one. `-n auto`
is ten workers a GPU, as far as there are cores: such tests mostly compile. Outcomes are kept as they come
(`--outcomes`), and what has passed need not run again (`--resume`). At the end one line tells all, and only if every
test passed is the exit status 0: a test that was skipped has shown nothing about the GPU.
"""

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

from engine.utils.cpu import cores  # which imports no torch
from tests.outcomes import Outcome, Outcomes, Word, digest_of, passed_in

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
WORKER: Final = "PYTEST_XDIST_WORKER"  # gw0, gw1, ...; only in workers
DRIVER: Final = Path("/proc/driver/nvidia/gpus")
WORKERS_A_GPU: Final = 10
SPARE_CORES: Final = 4
LISTING_S: Final = 60.0
LEFT_OUT: Final = "left_out"
PASSED: Final = pytest.StashKey[frozenset[str]]()  # before, and on the same sources
RANKS: Final[dict[Word, int]] = {"passed": 0, "skipped": 1, "failed": 2}


def gpus() -> list[str]:
    """Returns the names of CUDA_VISIBLE_DEVICES: those that it allows, or all that the driver lists."""
    allowed = os.environ.get(VISIBLE)
    if allowed is not None:
        return [name for name in allowed.split(",") if name]
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LISTING_S, check=False)
        count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    else:
        count = len(list(DRIVER.iterdir())) if DRIVER.is_dir() else 0
    return [str(n) for n in range(count)]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpus")
    group.addoption("--outcomes", type=Path, metavar="FILE", help="adds the outcome of each test as it ends")
    group.addoption("--resume", type=Path, metavar="FILE", help="leaves out what passed by it, from the same sources")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any conftest: torch reads the variable once. Workers inherit the list from who starts them."""
    found = gpus()
    if not found:
        raise pytest.UsageError("Tests on GPUs need a GPU. Found by nvidia-smi or its driver: none.")
    worker = os.environ.get(WORKER)
    os.environ[VISIBLE] = ",".join(found) if worker is None else found[int(worker.removeprefix("gw")) % len(found)]


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return max(1, min(WORKERS_A_GPU * len(gpus()), cores() - SPARE_CORES))


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)
    if given is not None:
        config.stash[PASSED] = frozenset(given[LEFT_OUT])
        return
    if not config.getoption("numprocesses", None):
        raise pytest.UsageError(
            "-p tests.gpus hands GPUs to workers. Expected -n auto or a number of them, given: none."
        )
    sources = digest_of(config.rootpath)
    resumed: Path | None = config.getoption("resume")
    try:
        config.stash[PASSED] = passed_in(resumed, sources) if resumed else frozenset()
    except OSError as error:
        raise pytest.UsageError(f"--resume must name a file of outcomes. Given: {resumed} ({error}).") from error
    config.pluginmanager.register(Run(config, sources))


@pytest.hookimpl(trylast=True)  # of what -m and -k have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = config.stash[PASSED]
    left_out = [item for item in items if item.nodeid in passed]
    if left_out:
        items[:] = [item for item in items if item.nodeid not in passed]
        config.hook.pytest_deselected(items=left_out)
    getattr(config, "workeroutput", {})[LEFT_OUT] = len(left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch = sys.modules.get("torch")
    if WORKER in os.environ and torch is not None and (seen := torch.cuda.device_count()) != 1:
        pytest.fail(f"{os.environ[WORKER]} sees {seen} GPUs, expected GPU {os.environ[VISIBLE]} alone", pytrace=False)


class Run:
    """Holds what the process that starts the workers hears of their tests."""

    def __init__(self, config: pytest.Config, sources: str) -> None:
        path: Path | None = config.getoption("outcomes")
        self._file = Outcomes(path, sources) if path else None
        self._passed = config.stash[PASSED]
        self._started = time.perf_counter()
        self._tests: set[str] = set()
        self._going: dict[str, Outcome] = {}
        self._done: dict[str, Outcome] = {}
        self._unread: set[str] = set()  # files that cannot be imported
        self._before = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker does not read the file itself: one that replaces another must find the same tests."""
        node.workerinput[LEFT_OUT] = sorted(self._passed)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._tests.update(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._before = max(self._before, getattr(node, "workeroutput", {}).get(LEFT_OUT, 0))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._unread.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        now = _outcome(report)
        was = self._going.pop(now.test, now._replace(outcome="passed", seconds=0.0, reason=""))
        worse = now if RANKS[now.outcome] > RANKS[was.outcome] else was
        told = worse._replace(seconds=round(was.seconds + now.seconds, 3))
        if report.when in ("setup", "call"):
            self._going[told.test] = told
            return
        self._done[told.test] = told  # after its tear-down, or the crash of its worker
        if self._file is not None:
            self._file.add(told)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # below all that pytest has to say
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
        result = yield
        if self._file is not None:
            self._file.close()
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._before and not self._unread:
            session.exitstatus = pytest.ExitCode.OK
        elif exitstatus == pytest.ExitCode.OK and self._not_passed():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._tell(session.config.pluginmanager.get_plugin("terminalreporter"))
        return result

    def _tell(self, terminal: Any) -> None:
        """Why tests were skipped, and the line that tells all."""
        for reason, times in Counter(one.reason for one in self._done.values() if one.outcome == "skipped").items():
            terminal.write_line(f"{times} skipped: {reason}")
        count = Counter(one.outcome for one in self._done.values())
        parts = [f"{count[word]} {word}" for word in RANKS] + [f"{len(self._missing())} not run"]
        if self._before:
            parts.insert(1, f"{self._before} had passed before")
        if self._unread:
            parts.append(f"{len(self._unread)} files not read")
        seconds = time.perf_counter() - self._started
        terminal.write_line(f"On GPU {os.environ[VISIBLE]}: {', '.join(parts)}; {seconds:.1f} s")

    def _missing(self) -> set[str]:
        return self._tests - self._done.keys()

    def _not_passed(self) -> bool:
        return bool(self._missing() or any(one.outcome != "passed" for one in self._done.values()))


def _outcome(report: pytest.TestReport) -> Outcome:
    """Outcome of one phase."""
    reason, told = "", report.longrepr
    if isinstance(told, tuple | list):
        reason = str(told[-1]).removeprefix("Skipped: ")
    elif report.outcome != "passed":
        crash = getattr(told, "reprcrash", None)
        lines = (crash.message if crash is not None else str(told)).splitlines()
        reason = lines[0] if lines else ""
    return Outcome(report.nodeid, report.outcome, report.duration, str(getattr(report, "worker_id", "")), reason)
