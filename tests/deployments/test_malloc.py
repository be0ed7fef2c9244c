"""What is left of large blocks once they are freed, in a process of its own."""

import subprocess
import sys

import pytest

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
