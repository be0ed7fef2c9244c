"""`serveConfigV2`, by the checks of `assay check`: Ray's schema, the keys that it drops without a word, our arguments,
and the names of the deployments that the builder makes."""

from collections.abc import Iterator
from typing import Any

from deployments.app import build
from deployments.cli.check import application, document
from deployments.cli.check.arguments import check_arguments
from deployments.cli.check.findings import Finding, under
from deployments.config.app_args import AppArgs
from tests.k8s.render import RenderError, documents


def findings(text: str) -> Iterator[str]:
    """Errors and warnings; a key that stands twice is one."""
    try:
        (config,) = documents(text)
    except (RenderError, ValueError) as error:
        yield f"serveConfigV2: {error}"
        return
    found = list(document.check_schema(config))
    for index, one in enumerate(config.get("applications", [])):
        found += _application(one, under("applications", index))
    yield from (f"serveConfigV2: {one.where}: {one.message}" for one in found if one.level != "note")


def _application(given: dict[str, Any], where: str) -> Iterator[Finding]:
    yield from application.check_path(given, where)
    args, found = check_arguments(given.get("args", {}), under(where, "args"))
    yield from found
    if args is not None:
        yield from application.deployments(given, args, where)[1]


def arguments_of(text: str) -> AppArgs:
    """Returns the settings of the first application."""
    (config,) = documents(text)
    return AppArgs.model_validate(config["applications"][0]["args"])


def deployments_of(args: AppArgs) -> dict[str, Any]:
    """By name, as the builder makes them."""
    ingress = build(args)._bound_deployment
    replica = ingress.init_args[1]._bound_deployment
    return {one.name: one for one in (ingress, replica)}
