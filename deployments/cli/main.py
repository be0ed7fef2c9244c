"""Runs `assay COMMAND ...`. Each command is a module with `add`, which declares it, and a function that runs it."""

import argparse
from collections.abc import Sequence

from deployments.cli import env, keys, models, pull, serve
from deployments.cli.bench import command as bench
from deployments.cli.check import command as check
from deployments.cli.score_files import command as score

COMMANDS = (serve, check, pull, models, score, bench, keys, env)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(prog="assay", description="Scores and samples from language models, exactly.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status. Wrong arguments end the process with status 2."""
    given = make_parser().parse_args(arguments)
    status: int = given.run(given)
    return status
