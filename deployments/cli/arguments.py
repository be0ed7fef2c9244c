"""Reads numbers of the command line, and says in plain words why a text or a file cannot be read."""

import argparse
import re

import yaml


def number(text: str) -> float:
    """Reads a number. Raises ArgumentTypeError, whose words argparse shows."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number. Given: {text or 'nothing'}.") from None


def integer(text: str) -> int:
    """Reads a whole number. Raises ArgumentTypeError, whose words argparse shows."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number. Given: {text or 'nothing'}.") from None


def reason(error: BaseException) -> str:
    """Returns in one line why a file cannot be read or a host be reached, without Python's own terms."""
    match error:
        case yaml.MarkedYAMLError(problem_mark=yaml.Mark() as mark):
            return f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}"
        case UnicodeError():
            return "it is not UTF-8"
        case OSError(strerror=str() as found):
            return found
    text = " ".join(re.sub(r"\[Errno -?\d+\] ", "", str(error)).split())
    return text or type(error).__name__
