"""Runs `assay COMMAND ...`. Each command is a module with `add`, which declares it, and a function that runs it."""

import argparse
import os
import select
import sys
from collections.abc import Sequence

from deployments.cli import env, keys, models, pull, serve, warm
from deployments.cli.bench import command as bench
from deployments.cli.check import command as check
from deployments.cli.launch import system_info
from deployments.cli.score_files import command as score

UNAVAILABLE = 2
READER_GONE = 141  # as shells report the end of a command by SIGPIPE
SERVICE_PACKAGES = (
    "ray", "torch", "transformers", "tokenizers", "safetensors", "fastapi", "starlette", "msgspec", "httpx",
    "huggingface_hub",
)  # fmt: skip
COMMANDS = (serve, check, pull, warm, models, score, bench, keys, env)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(prog="assay", description="Scores and samples from language models, exactly.")
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    parser.set_defaults(run=lambda given: _help(parser))
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version of the package. It is read only when it is wanted."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        print(f"assay {system_info.versions()['assay-serve'] or 'of a checkout that is not installed'}")
        parser.exit()


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status. Wrong arguments end the process with status 2."""
    try:
        try:
            return _main(arguments)
        finally:
            _flush()  # here, where it can be caught, and not as Python ends
    except BrokenPipeError:
        if not _reader_gone():
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python writes what is left as it ends
        os.close(nowhere)
        return READER_GONE


def _flush() -> None:
    if sys.stdout is not None:  # else it was closed before the start
        sys.stdout.flush()


def _reader_gone() -> bool:
    """Says whether the reader of standard output has gone, as `head` goes: another pipe may have broken."""
    try:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        return bool(output.poll(0))
    except (AttributeError, OSError, ValueError):  # there is no standard output, or it is no file
        return False


def _main(arguments: Sequence[str] | None) -> int:
    given = make_parser().parse_args(arguments)
    try:
        status: int = given.run(given)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVICE_PACKAGES:
            raise
        print(f"assay: {error.name} is not installed: pip install 'assay-serve[serve]'.", file=sys.stderr)
        return UNAVAILABLE
    return status
