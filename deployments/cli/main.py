"""assay COMMAND ...: the command line. A command is a file of `deployments.commands` with `add` and its own `run`."""

import argparse
import sys
from collections.abc import Sequence

from deployments.cli import env, keys, serve
from deployments.cli.bench import command as bench
from deployments.cli.check import command as check
from deployments.cli.score_files import command as score

COMMANDS = (serve, check, score, bench, keys, env)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; argparse ends the process itself with 2 where the arguments are wrong."""
    parser = argparse.ArgumentParser(prog="assay", description="Scores and samples from language models, exactly.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    given = parser.parse_args(arguments)
    status: int = given.run(given)
    return status


if __name__ == "__main__":
    sys.exit(main())
