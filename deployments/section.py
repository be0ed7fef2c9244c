"""Defines what all sections of a configuration file share: their base class, and the types of common fields."""

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NAME = r"[\x21-\x7e]+"


def _check_name(given: object) -> object:
    """Refuses a string that is no name in words, where the pattern would be shown as it is."""
    if isinstance(given, str) and not re.fullmatch(NAME, given):
        raise ValueError("It must be of 1 to 256 characters of ASCII, without spaces.")
    return given


Name = Annotated[str, BeforeValidator(_check_name), Field(min_length=1, max_length=256, pattern=f"^{NAME}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Section(BaseModel):
    """Refuses unknown keys, because a typing mistake must not silently mean the default. Instances are frozen."""

    # "model" is a fine name for a section; pydantic would otherwise keep `model_` names to itself.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
