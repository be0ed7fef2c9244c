"""Runs the `assay` command: `python -m deployments.cli`."""

import sys

from deployments.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
