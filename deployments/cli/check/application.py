"""One application of a Serve config: its import path, and the deployments whose options it changes.

Who reaches the service, and whether they are asked for a key.

Ports that two parts of one service, or somebody else, would both listen on.
"""

import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from deployments.auth.authenticator import open_to_world
from deployments.auth.settings import UserConfig
from deployments.cli.check import document
from deployments.cli.check.findings import Finding, error, meant, note, under, warning
from deployments.config.app_args import AppArgs

EVERY_INTERFACE = "0.0.0.0"  # Serve's default for a config file


def check_exposure(config: dict[str, Any], args: AppArgs, where: str) -> Iterator[Finding]:
    """`where`: of the application's `args`."""
    options = config.get("http_options") or {}
    named = isinstance(options, dict) and options.get("host") is not None
    host = str(options["host"]) if named else EVERY_INTERFACE
    if not open_to_world(host, args.auth.mode):
        yield from _keys(args, where)
        return
    place = "http_options.host"
    if args.auth.allow_open:
        yield note(place, f"Whoever reaches {host} may use the service: auth.allow_open is set.")
        return
    why = f"Given: {host}." if named else f"Not given, and Serve's own default is {EVERY_INTERFACE}."
    yield error(place, f"Whoever reaches it may use the service without a key: set 127.0.0.1, or auth.mode keys. {why}")


def _keys(args: AppArgs, where: str) -> Iterator[Finding]:
    """A file of keys may be mounted elsewhere only."""
    try:
        args.auth.settings()
    except ValueError as problem:
        yield warning(under(where, "auth.keys_file"), f"On this machine: {problem}")


HTTP, GRPC = 8000, 9000  # Serve's defaults
OF_RAY = {6379: "Ray's GCS", 8265: "Ray's dashboard", 10001: "Ray's client server", 8076: "Ray's object manager"}
OF_FAST_MODE = {
    9101: "HAProxy's metrics",
    8404: "HAProxy's statistics",
    8500: "the proxy behind HAProxy",
    9500: "the gRPC proxy behind HAProxy",
}
DIRECT = ((30_000, 31_000, "HTTP"), (40_000, 41_000, "gRPC"))  # where ingresses listen in fast mode
LEAST, MOST = 1, 65_535


def check_ports(config: dict[str, Any]) -> Iterator[Finding]:
    http = _port(config, "http_options", HTTP)
    grpc = _port(config, "grpc_options", GRPC)
    if http is None:
        return
    where = "http_options.port"
    if not LEAST <= http <= MOST:
        yield error(where, f"A port must be in [{LEAST}, {MOST}]. Given: {http}.")
        return
    if http in OF_RAY:
        yield error(where, f"{OF_RAY[http]} listens there: choose another. Given: {http}.")
    if _grpc_listens(config) and http == grpc:
        yield error("grpc_options.port", f"The HTTP proxy has this port: choose another. Given: {grpc}.")
    if http in OF_FAST_MODE:
        yield warning(where, f"In fast mode {OF_FAST_MODE[http]} listens there: choose another. Given: {http}.")
    for low, high, kind in DIRECT:
        if low <= http <= high:
            yield warning(where, f"In fast mode ingresses take ports {low} to {high} for {kind}. Given: {http}.")
    if taken(http):
        yield warning(where, f"On this machine another process listens on {http}: here `assay serve` would refuse.")


def taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _grpc_listens(config: dict[str, Any]) -> bool:
    options = config.get("grpc_options")
    return isinstance(options, dict) and bool(options.get("grpc_servicer_functions"))


def _port(config: dict[str, Any], section: str, default: int) -> int | None:
    """None where what stands there is no number: the schema says so."""
    options = config.get(section) or {}
    found = options.get("port", default) if isinstance(options, dict) else default
    return found if isinstance(found, int) and not isinstance(found, bool) else None


IMPORT_PATH = "deployments.app:build"
INGRESS = "Ingress"


class Deployed(NamedTuple):
    """A deployment as `build` makes it, and what the file says of it."""

    name: str
    options: dict[str, Any]  # derived by `build`
    override: dict[str, Any]
    where: str  # of the override, or of the application

    def option(self, name: str) -> Any:
        found = self.override.get(name)
        return self.options[name] if found is None else found


def check_path(application: dict[str, Any], where: str) -> Iterator[Finding]:
    given = application.get("import_path")
    if given != IMPORT_PATH:
        yield error(under(where, "import_path"), f"It must be {IMPORT_PATH} for this service. Given: {given!r}.")


def deployments(application: dict[str, Any], args: AppArgs, where: str) -> tuple[list[Deployed], list[Finding]]:
    """The deployments with their overrides, and overrides of what does not exist."""
    derived = built(args)
    overrides: dict[str, tuple[dict[str, Any], str]] = {}
    findings = []
    for index, one in enumerate(application.get("deployments") or []):
        place = under(under(where, "deployments"), index)
        name = one.get("name") if isinstance(one, dict) else None
        if name not in derived:
            findings.append(error(under(place, "name"), f"There is no deployment {name!r}. {meant(name, derived)}"))
        else:
            overrides[str(name)] = (one, place)
            findings += _user_config(one, place)
    found = [Deployed(name, options, *overrides.get(name, ({}, where))) for name, options in derived.items()]
    return found, findings


def _user_config(given: dict[str, Any], where: str) -> list[Finding]:
    """What changes without a rollout: for the ingress alone, and by its own names."""
    found = given.get("user_config")
    if found is None:
        return []
    place = under(where, "user_config")
    if given["name"] != INGRESS:
        return [error(place, f"Only {INGRESS} takes one: move it there.")]
    return document.check_section(UserConfig, found, place)


def built(args: AppArgs) -> dict[str, dict[str, Any]]:
    """Options of each deployment by name, the ingress first. Nothing is started."""
    from deployments.app import build

    found: dict[str, dict[str, Any]] = {}
    waiting: list[Any] = [build(args)]
    while waiting:
        deployment = waiting.pop()._bound_deployment
        found[deployment.name] = {
            "num_replicas": deployment.num_replicas,
            "autoscaling_config": _scaling(deployment),
            "max_ongoing_requests": deployment.max_ongoing_requests,
            "max_queued_requests": deployment.max_queued_requests,
            "graceful_shutdown_timeout_s": deployment._deployment_config.graceful_shutdown_timeout_s,
            "ray_actor_options": deployment.ray_actor_options or {},
        }
        waiting += [one for one in deployment.init_args if hasattr(one, "_bound_deployment")]
    return found


def _scaling(deployment: Any) -> dict[str, Any] | None:
    """The bounds that autoscaling keeps; None for a fixed count."""
    found = deployment._deployment_config.autoscaling_config
    return None if found is None else {"min_replicas": found.min_replicas, "max_replicas": found.max_replicas}


def check_overrides(found: list[Deployed], args: AppArgs) -> Iterator[Finding]:
    ingress = found[0]
    for one in found:
        for name, value in one.override.items():
            if name in one.options and value is not None and value != one.options[name]:
                yield note(under(one.where, name), f"{value} replaces {one.options[name]}, which follows from `args`.")
    gate = args.admission.max_inflight_requests
    ongoing = int(ingress.option("max_ongoing_requests"))
    if ongoing <= gate:
        yield error(
            under(ingress.where, "max_ongoing_requests"),
            f"It must be over admission.max_inflight_requests, {gate}: else requests wait in Ray's queue, where no "
            f"limit and no deadline of ours is. Given: {ongoing}.",
        )
    grace = float(ingress.option("graceful_shutdown_timeout_s"))
    if "graceful_shutdown_timeout_s" in ingress.override and grace < args.deadlines.max_s:
        yield warning(
            under(ingress.where, "graceful_shutdown_timeout_s"),
            f"A rollout cuts streams that are older than this; deadlines.max_s is {args.deadlines.max_s:g}. "
            f"Given: {grace:g}.",
        )


def check_timeout(config: dict[str, Any], args: AppArgs) -> Iterator[Finding]:
    http = config.get("http_options")
    given = http.get("request_timeout_s") if isinstance(http, dict) else None
    if isinstance(given, int | float) and given <= args.deadlines.max_s:
        yield error(
            "http_options.request_timeout_s",
            f"Serve would cut what our deadlines allow: it must be over deadlines.max_s, {args.deadlines.max_s:g}, or "
            f"absent. Given: {given:g}.",
        )
