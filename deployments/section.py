"""Defines what all sections of a configuration file share: their base class, and the types of common fields."""

import os
import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NAME = r"[\x21-\x7e]+"


def matches(pattern: str, words: str) -> BeforeValidator:
    """Returns a validator that refuses strings in words, where pydantic shows the pattern that they do not match."""

    def check(given: object) -> object:
        if isinstance(given, str) and not re.fullmatch(pattern, given):
            raise ValueError(words)
        return given

    return BeforeValidator(check)


_check_name = matches(NAME, "It must be of 1 to 256 characters of ASCII, without spaces.")
Name = Annotated[str, _check_name, Field(min_length=1, max_length=256, pattern=f"^{NAME}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def why_unreadable(error: OSError | UnicodeError) -> str:
    """Says in words why a text file cannot be read, without its path or content."""
    if isinstance(error, UnicodeError):
        return "it is not UTF-8"
    return "unknown" if error.errno is None else os.strerror(error.errno).lower()


class Section(BaseModel):
    """Refuses unknown keys, because a typing mistake must not silently mean the default. Instances are frozen."""

    # "model" is a fine name for a section; pydantic would otherwise keep `model_` names to itself.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
