"""What is left of large blocks once they are freed, in a process of its own."""

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest

from deployments import malloc
from deployments.malloc import TrimAfterLarge
from deployments.proxy_middleware import ProxyMiddleware
from tests.deployments.auth.conftest import ask

SCRIPT = """
import psutil, sys
from deployments.malloc import give_back_memory
if sys.argv[1] == "bounded":
    give_back_memory()
own = psutil.Process()
start = own.memory_info().rss
bytearray(30_000_000)  # its end raises glibc's threshold
small = []
for _ in range(40):
    large = bytearray(5_000_000)
    small.append(bytes(2_000))  # stays, behind the large one
    del large
kept = [(bytearray(5_000_000), bytes(2_000)) for _ in range(40)]
kept = [small for _, small in kept]
print((own.memory_info().rss - start) // 1_000_000)
"""
BOUND_MB = 20


def left_mb(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")


@pytest.mark.risk("R13")
@pytest.mark.risk("R18")
def test_freed_blocks_go_back_to_the_system() -> None:
    assert left_mb("bounded") < BOUND_MB


@pytest.mark.risk("R13", planted=True)
@pytest.mark.risk("R18", planted=True)
def test_as_glibc_comes_they_would_stay() -> None:
    assert left_mb("as it comes") > 5 * BOUND_MB


SMALL_BLOCKS = """
import asyncio, psutil, sys
from deployments.malloc import TrimAfterLarge, give_back_memory
give_back_memory()
own = psutil.Process()
start = own.memory_info().rss

async def run():
    texts = [bytes(2_000) for _ in range(100_000)]
    last = texts[-1]  # stays, behind all others
    texts.clear()
    if sys.argv[1] == "trimmed":
        TrimAfterLarge(0.01).ended()
        await asyncio.sleep(0.05)  # then it has begun, and the loop's end waits for it
    return last

last = asyncio.run(run())
print((own.memory_info().rss - start) // 1_000_000)
"""


def left_of_small_blocks(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SMALL_BLOCKS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.risk("R18")
def test_small_blocks_go_back_a_moment_after_a_large_request() -> None:
    assert left_of_small_blocks("trimmed") < BOUND_MB


@pytest.mark.risk("R18", planted=True)
def test_without_trimming_they_would_stay() -> None:
    assert left_of_small_blocks("as it comes") > 5 * BOUND_MB


CYCLES = """
import asyncio, psutil, sys
from deployments.malloc import TrimAfterLarge, give_back_memory
give_back_memory()
own = psutil.Process()
start = own.memory_info().rss

async def run():
    for _ in range(10):
        cycle = [b"x" * 20_000_000]
        cycle.append(cycle)
    del cycle
    TrimAfterLarge(0.01, collect=sys.argv[1] == "collected").ended()
    await asyncio.sleep(0.05)

asyncio.run(run())
print((own.memory_info().rss - start) // 1_000_000)
"""


def left_in_cycles(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", CYCLES, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.risk("R18")
def test_what_a_cycle_holds_goes_a_moment_after_a_large_request() -> None:
    assert left_in_cycles("collected") < BOUND_MB


@pytest.mark.risk("R18", planted=True)
def test_without_a_look_for_garbage_it_would_stay() -> None:
    assert left_in_cycles("as it comes") > 5 * BOUND_MB


@pytest.mark.risk("R18")
@pytest.mark.parametrize(("chars", "large"), [(100, False), (20_000, True)])
async def test_a_small_request_with_a_large_answer_is_large(
    app: Any, chars: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting: list[bool] = []
    monkeypatch.setattr(TrimAfterLarge, "ended", lambda memory: collecting.append(memory._collect))
    body = {"prompt": "a" * chars, "return_token_strs": True}
    found = await ask(ProxyMiddleware(app), "POST", "/tokenize", body=body)
    assert found.status == 200 and (len(found.body) > 2 * malloc.LARGE_BYTES) is large
    assert collecting == ([False, True] if large else [])  # the application's own, then the proxy's


@pytest.mark.risk("R18")
async def test_work_that_outlives_its_request_is_followed_by_a_trim(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, go_on = asyncio.Event(), threading.Event()
    monkeypatch.setattr(TrimAfterLarge, "ended", lambda memory: ended.set())
    request = asyncio.create_task(app.handler.in_thread(go_on.wait))
    await asyncio.sleep(0.01)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert not ended.is_set()
    go_on.set()
    await asyncio.wait_for(ended.wait(), 5)


class Made:
    """An object that a weak reference can name."""


@pytest.mark.risk("R18")
async def test_an_error_in_a_thread_leaves_nothing_of_what_the_thread_made(app: Any) -> None:
    made: list[weakref.ref[Made]] = []

    def fail() -> None:
        local = Made()
        made.append(weakref.ref(local))
        raise ValueError(local)

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await app.handler.in_thread(fail)
        await asyncio.sleep(0.05)  # the thread's own last references
        assert made[0]() is None
    finally:
        gc.enable()


async def test_it_trims_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    trims = list[None]()
    monkeypatch.setattr(malloc, "trim", lambda: trims.append(None))
    memory = TrimAfterLarge(0.01)
    for _ in range(10):
        memory.ended()
    while not trims:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.03)
    assert len(trims) == 1
