"""Checks the arguments of the applications in a Serve config, without Ray."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from deployments.cli.check.findings import Finding, error, meant, under
from deployments.config.app_args import AppArgs
from deployments.config.schema import options, section_in
from deployments.limits import Limits

IMPORT_PATH = "deployments.app:build"  # of an application of ours
SECRET = "auth"  # values of this section are not repeated
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's errors for a key of a model or a dataclass


def arguments_of(config: dict[str, Any]) -> Iterator[tuple[str, AppArgs | None, list[Finding]]]:
    """Yields for each application of ours the path of its arguments, and what `check_arguments` returns."""
    applications = config.get("applications")
    for index, one in enumerate(applications if isinstance(applications, list) else []):
        if isinstance(one, dict) and one.get("import_path") == IMPORT_PATH:
            where = under(under("applications", index), "args")
            yield where, *check_arguments(one.get("args") or {}, where)


def check_arguments(args: object, where: str) -> tuple[AppArgs | None, list[Finding]]:
    """Validates the `args` of an application, which are at `where`; without errors it returns them too."""
    try:
        return AppArgs.model_validate(args), []
    except ValidationError as refused:
        return None, list(_findings(refused, where))


def check_section(model: type[BaseModel], given: object, where: str) -> list[Finding]:
    """Validates values, which are at `where`, as a section of its own."""
    try:
        model.model_validate(given)
    except ValidationError as refused:
        return list(_findings(refused, where, model))
    return []


def _findings(refused: ValidationError, where: str, root: type[BaseModel] = AppArgs) -> Iterator[Finding]:
    for one in refused.errors(include_url=False, include_context=False):
        loc = one["loc"]
        place = path_of((where, *loc))
        if one["type"] in UNKNOWN:
            yield error(place, f"There is no such option. {_instead(loc, root)}")
        elif loc and loc[0] == "limits":
            yield error(place, f"{_plain(one['msg'])} {_limit(one['input'])}".strip())
        else:
            message = _plain(one["msg"])
            shown = "" if "Given" in message or loc[:1] == (SECRET,) else given(one["input"])
            yield error(place, f"{message.rstrip('.')}.{shown}")


def _instead(loc: tuple[int | str, ...], root: type[BaseModel]) -> str:
    """Names the section that has an option of this name, else the nearest name in the same section."""
    name = str(loc[-1])
    if root is AppArgs:
        sections = {key: section_in(annotation) for key, annotation in options(AppArgs).items()}
        known = {key: set(options(section)) for key, section in sections.items() if section}
        for key, names in (known | {"limits": set(Limits().flat())}).items():
            if name in names and key != loc[0]:
                return f"`{under(key, name)}` is: move it there."
    return meant(name, _option_names(loc[:-1], root))


def _option_names(loc: tuple[int | str, ...], root: type[BaseModel]) -> set[str]:
    """Returns the names of the options in the section at `loc`."""
    section: type = root
    for key in loc:  # a key that is no option is the name of a template: its section is the value of a mapping
        section = section_in(options(section).get(str(key))) or section
    return set(options(section))


def _limit(given: object) -> str:
    known = Limits().flat()
    wrong = [name for name in given if name not in known] if isinstance(given, dict) else []
    return meant(wrong[0], known) if wrong else ""


def _plain(message: str) -> str:
    """Removes what pydantic puts in front of a validator's own message."""
    return message.removeprefix("Value error, ")


def path_of(loc: tuple[int | str, ...]) -> str:
    """Returns the path of a place that pydantic names."""
    where = ""
    for key in loc:
        where = under(where, key)
    return where


def given(value: object) -> str:
    """Repeats a value that is short."""
    return f" Given: {value!r}." if isinstance(value, bool | int | float | str) and len(str(value)) <= 80 else ""
