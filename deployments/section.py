"""Defines what all sections of a configuration file share: their base class, and the types of common fields."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Section(BaseModel):
    """Refuses unknown keys, because a typing mistake must not silently mean the default. Instances are frozen."""

    # "model" is a fine name for a section; pydantic would otherwise keep `model_` names to itself.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
