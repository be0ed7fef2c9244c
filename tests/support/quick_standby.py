"""python -m tests.support.quick_standby SOCKET MODULE...: a process that waits, with few imports."""

import sys
from pathlib import Path

from deployments.standby import process

if __name__ == "__main__":
    process.main(Path(sys.argv[1]), ("torch", *sys.argv[2:]))
