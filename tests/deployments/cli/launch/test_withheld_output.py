"""Output of a start is withheld until its model is known to be served, and lost if it is refused."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading
from deployments.cli.launch.withheld_output import WithheldOutput

class Refused(Exception):
    pass

try:
    with WithheldOutput(Refused) as output:
        print("output")
        thread = threading.Thread(target=lambda: print("of a thread", file=sys.stderr))
        thread.start()
        os.system("echo of a process")
        thread.join()
        {then}
except Exception as error:
    print("ended by", type(error).__name__)
print("behind")
"""


@pytest.mark.parametrize(
    ("then", "out", "errors"),
    [
        ("raise Refused", ["ended by Refused", "behind"], []),
        ("raise ValueError", ["output", "of a process", "ended by ValueError", "behind"], ["of a thread"]),
        ("pass", ["output", "of a process", "behind"], ["of a thread"]),
        (
            "output.release(); print('later'); raise Refused",
            ["output", "of a process", "later", "ended by Refused", "behind"],
            ["of a thread"],
        ),
    ],
)
def test_what_is_printed_and_what_is_lost(then: str, out: list[str], errors: list[str]) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(then=then)], capture_output=True, text=True, check=True
    )
    printed = found.stdout.splitlines()
    assert sorted(printed) == sorted(out) and printed[-1] == "behind"
    assert found.stderr.splitlines() == errors
