"""What every section is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Section(BaseModel):
    """Frozen, and an unknown key is an error: a typing mistake must not silently mean the default."""

    # "model" is a fine name for a section; pydantic would otherwise keep `model_` names to itself.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
