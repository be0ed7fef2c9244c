"""The `args` of an application: typing mistakes, values out of range, options that do not go together."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from deployments.checks import schema
from deployments.checks.finding import Finding, error, meant, under
from deployments.config import AppArgs
from deployments.limits import Limits

SECRET = "auth"  # what is given there is not repeated


def check(args: object, where: str) -> tuple[AppArgs | None, list[Finding]]:
    """The arguments, None where there are errors."""
    try:
        return AppArgs.model_validate(args), []
    except ValidationError as refused:
        return None, list(_findings(refused, where))


def findings_of(model: type[BaseModel], given: object, where: str) -> list[Finding]:
    """Of values for another model than AppArgs."""
    try:
        model.model_validate(given)
    except ValidationError as refused:
        return list(_findings(refused, where, model))
    return []


def _findings(refused: ValidationError, where: str, root: type[BaseModel] = AppArgs) -> Iterator[Finding]:
    for one in refused.errors(include_url=False, include_context=False):
        loc = one["loc"]
        place = schema.path((where, *loc))
        if one["type"] == "extra_forbidden":
            yield error(place, f"There is no such option. {_instead(loc, root)}")
        elif loc and loc[0] == "limits":
            yield error(place, f"{_plain(one['msg'])} {_limit(one['input'])}".strip())
        else:
            said = _plain(one["msg"])
            shown = "" if "Given" in said or loc[:1] == (SECRET,) else schema.given(one["input"])
            yield error(place, f"{said.rstrip('.')}.{shown}")


def _instead(loc: tuple[int | str, ...], root: type[BaseModel]) -> str:
    """The option of the same section with the nearest name, or the section that has one of this very name."""
    name, known = str(loc[-1]), fields_of(loc[:-1], root)
    elsewhere = [section for section, fields in sections() if name in fields and section != loc[0]]
    if elsewhere and root is AppArgs:
        return f"`{under(elsewhere[0], name)}` is: move it there."
    return meant(name, known)


def fields_of(loc: tuple[int | str, ...], root: type[BaseModel] = AppArgs) -> set[str]:
    """Names of the options in the section at `loc`."""
    model = root
    for key in loc:
        field = model.model_fields.get(str(key))
        if field is None:  # the name of a template: its section is a mapping's value
            continue
        models = [part for part in _leaves(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        if models:
            model = models[0]
    return set(model.model_fields)


def sections() -> Iterator[tuple[str, set[str]]]:
    """Each section with the names of its options."""
    for name, field in AppArgs.model_fields.items():
        for part in _leaves(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield name, set(part.model_fields)
    yield "limits", set(Limits().flat())


def _leaves(annotation: Any) -> Iterator[Any]:
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for part in inner:
        yield from _leaves(part)


def _limit(given: object) -> str:
    known = Limits().flat()
    wrong = [name for name in given if name not in known] if isinstance(given, dict) else []
    return meant(wrong[0], known) if wrong else ""


def _plain(message: str) -> str:
    """Without what pydantic puts in front of a validator's own words."""
    return message.removeprefix("Value error, ")
