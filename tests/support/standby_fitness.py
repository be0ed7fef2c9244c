"""Tells whether a process that waits would still be fit after some code."""

import json
import os
import subprocess
import sys

from deployments.standby import process


def fit_after(code: str) -> bool:
    """Returns whether a new process is fit that has imported what a replica does, and run some code."""
    names = ", ".join(process.MODULES)
    program = f"import {names}, torch\n{code}\nfrom deployments.standby.process import is_fit\nprint(is_fit())"
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | process.COUNTS_WITHOUT_DRIVER,
        check=True,
        timeout=120,
        stdout=subprocess.PIPE,
        text=True,
    )
    return bool(json.loads(found.stdout.splitlines()[-1].lower()))
