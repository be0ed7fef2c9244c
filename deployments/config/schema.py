"""Finds the options of configuration sections, which are pydantic models or plain dataclasses."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import BaseModel


def options(section: type) -> dict[str, Any]:
    """Returns the type of each option of a section by name, with its constraints as annotations."""
    if not issubclass(section, BaseModel):
        return get_type_hints(section, include_extras=True)
    fields = section.model_fields.items()
    return {name: Annotated[one.annotation, *one.metadata] if one.metadata else one.annotation for name, one in fields}


def section_in(annotation: Any) -> type | None:
    """Returns the section that an option's type holds, also within a union, a list or a mapping; None if none."""
    return next((part for part in _leaves(annotation) if _is_section(part)), None)


def _leaves(annotation: Any) -> Iterator[Any]:
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for part in inner:
        yield from _leaves(part)


def _is_section(part: Any) -> bool:
    return isinstance(part, type) and (issubclass(part, BaseModel) or is_dataclass(part))
