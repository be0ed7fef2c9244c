"""Checks one application of a Serve config: its import path, ports, authentication and the options of deployments."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from deployments.auth.authenticator import open_to_world
from deployments.auth.settings import AuthArgs, UserConfig
from deployments.cli.check.arguments import IMPORT_PATH, check_section
from deployments.cli.check.findings import Finding, error, meant, note, under, warning
from deployments.cli.launch.local_serve import taken
from deployments.config.app_args import AppArgs

EVERY_INTERFACE = "0.0.0.0"  # Serve's default for a config file
INGRESS = "Ingress"


def check_exposure(config: dict[str, Any], args: AppArgs, where: str) -> Iterator[Finding]:
    """Checks whether other machines can use the service without a key. `where` is the path of `args`."""
    options = config.get("http_options") or {}
    named = isinstance(options, dict) and options.get("host") is not None
    host = str(options["host"]) if named else EVERY_INTERFACE
    place = "http_options.host"
    for auth, source in _auth_sections(config, args, where):
        if not open_to_world(host, auth.mode):
            yield from _keys(auth, source)
        elif auth.allow_open:
            yield note(place, f"Every client that reaches {host} may use the service: {source}.allow_open is set.")
        else:
            why = f"Given: {host}." if named else f"Not given, and Serve's own default is {EVERY_INTERFACE}."
            section = "auth" if auth is args.auth else source
            remedy = f"set 127.0.0.1, or {section}.mode keys"
            yield error(place, f"Other machines may use the service without a key: {remedy}. {why}")


def _auth_sections(config: dict[str, Any], args: AppArgs, where: str) -> Iterator[tuple[AuthArgs, str]]:
    """Yields the sections `auth` of an application with their paths: an ingress starts with that of its arguments, and
    goes over to that of its `user_config`."""
    yield args.auth, under(where, "auth")
    for index, application in enumerate(config.get("applications") or []):
        inside = under("applications", index)
        if under(inside, "args") != where:
            continue
        for number, one in enumerate(application.get("deployments") or []):
            found = one.get("user_config") if isinstance(one, dict) and one.get("name") == INGRESS else None
            if found is not None and not check_section(UserConfig, found, ""):
                auth = UserConfig.model_validate(found).auth
                if auth is not None:
                    yield auth, under(under(under(inside, "deployments"), number), "user_config.auth")


def _keys(auth: AuthArgs, where: str) -> Iterator[Finding]:
    """Reads the file of keys. It may be missing, since it may exist on other machines only."""
    try:
        auth.settings()
    except ValueError as problem:
        place = under(where, "keys_file")
        if os.path.exists(auth.keys_file or ""):
            yield error(place, str(problem))
        else:
            yield warning(place, f"On this machine: {problem}")


def check_reach(config: dict[str, Any], application: dict[str, Any], where: str) -> Iterator[Finding]:
    """Checks that clients reach an application at all."""
    if config.get("proxy_location") == "Disabled":
        yield error("proxy_location", "No proxy would listen for requests: set HeadOnly or EveryNode. Given: Disabled.")
    if application.get("route_prefix", "/") is None:
        yield error(under(where, "route_prefix"), "No route would lead to the service: set a path. Given: null.")


HTTP_PORT, GRPC_PORT = 8000, 9000  # Serve's defaults
RAY_PORTS = {6379: "Ray's GCS", 8265: "Ray's dashboard", 10001: "Ray's client server", 8076: "Ray's object manager"}
FAST_MODE_PORTS = {
    9101: "HAProxy's metrics",
    8404: "HAProxy's statistics",
    8500: "the proxy behind HAProxy",
    9500: "the gRPC proxy behind HAProxy",
}
DIRECT_INGRESS_PORTS = ((30_000, 31_000, "HTTP"), (40_000, 41_000, "gRPC"))  # where ingresses listen in fast mode
MIN_PORT, MAX_PORT = 1, 65_535


def check_port(config: dict[str, Any]) -> Iterator[Finding]:
    """Checks that the HTTP port is one."""
    http = _port(config, "http_options", HTTP_PORT)
    if http is not None and not MIN_PORT <= http <= MAX_PORT:
        yield error("http_options.port", f"A port must be in [{MIN_PORT}, {MAX_PORT}]. Given: {http}.")


def check_ports(config: dict[str, Any]) -> Iterator[Finding]:
    """Checks that no two parts of the service, and no other process, listen on the same port."""
    http = _port(config, "http_options", HTTP_PORT)
    grpc = _port(config, "grpc_options", GRPC_PORT)
    wrong = list(check_port(config))
    yield from wrong
    if http is None or wrong:
        return
    where = "http_options.port"
    if http in RAY_PORTS:
        yield error(where, f"{RAY_PORTS[http]} listens there: choose another. Given: {http}.")
    if _grpc_listens(config) and http == grpc:
        yield error("grpc_options.port", f"The HTTP proxy has this port: choose another. Given: {grpc}.")
    if http in FAST_MODE_PORTS:
        yield warning(where, f"In fast mode {FAST_MODE_PORTS[http]} listens there: choose another. Given: {http}.")
    for low, high, kind in DIRECT_INGRESS_PORTS:
        if low <= http <= high:
            yield warning(where, f"In fast mode ingresses take ports {low} to {high} for {kind}. Given: {http}.")
    if taken(f"http://127.0.0.1:{http}"):
        yield warning(where, f"On this machine another process listens on {http}: here `assay serve` would refuse.")


def _grpc_listens(config: dict[str, Any]) -> bool:
    options = config.get("grpc_options")
    return isinstance(options, dict) and bool(options.get("grpc_servicer_functions"))


def _port(config: dict[str, Any], section: str, default: int) -> int | None:
    """Returns the port of a section; None for a value that is not a number, which the schema check reports."""
    options = config.get(section) or {}
    found = options.get("port", default) if isinstance(options, dict) else default
    return found if isinstance(found, int) and not isinstance(found, bool) else None


class DeploymentOptions(NamedTuple):
    """Holds the options of a deployment as `build` makes them, and those that the file overrides."""

    name: str
    options: dict[str, Any]  # from `build`
    override: dict[str, Any]
    where: str  # path of the override, or of the application

    def option(self, name: str) -> Any:
        """Returns the value in force."""
        found = self.override.get(name)
        return self.options[name] if found is None else found


def check_path(application: dict[str, Any], where: str) -> Iterator[Finding]:
    """Checks the import path."""
    given = application.get("import_path")
    if given != IMPORT_PATH:
        yield error(under(where, "import_path"), f"It must be {IMPORT_PATH} for this service. Given: {given!r}.")


def deployments(
    application: dict[str, Any], args: AppArgs, where: str
) -> tuple[list[DeploymentOptions], list[Finding]]:
    """Returns the deployments with their overrides, the ingress first, and findings on unknown deployments."""
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
    found = [DeploymentOptions(name, options, *overrides.get(name, ({}, where))) for name, options in derived.items()]
    return found, findings


def _user_config(given: dict[str, Any], where: str) -> list[Finding]:
    """Checks `user_config`, which only the ingress takes."""
    found = given.get("user_config")
    if found is None:
        return []
    place = under(where, "user_config")
    if given["name"] != INGRESS:
        return [error(place, f"Only {INGRESS} takes one: move it there.")]
    return check_section(UserConfig, found, place)


def built(args: AppArgs) -> dict[str, dict[str, Any]]:
    """Returns the options of each deployment by name, the ingress first. Starts nothing."""
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
    """Returns the bounds of autoscaling; None for a fixed count."""
    found = deployment._deployment_config.autoscaling_config
    return None if found is None else {"min_replicas": found.min_replicas, "max_replicas": found.max_replicas}


def check_overrides(found: list[DeploymentOptions], args: AppArgs) -> Iterator[Finding]:
    """Checks overrides of options that `build` derives from `args`."""
    ingress = found[0]
    for one in found:
        for name, value in one.override.items():
            if name in one.options and value is not None and value != one.options[name]:
                yield note(under(one.where, name), f"{value} replaces {one.options[name]}, which follows from `args`.")
    limit = args.admission.max_inflight_requests
    ongoing = int(ingress.option("max_ongoing_requests"))
    if ongoing <= limit:
        yield error(
            under(ingress.where, "max_ongoing_requests"),
            f"It must be over admission.max_inflight_requests, {limit}: else requests wait in Ray's queue, where no "
            f"limit and no deadline of the service applies. Given: {ongoing}.",
        )
    grace = float(ingress.option("graceful_shutdown_timeout_s"))
    if "graceful_shutdown_timeout_s" in ingress.override and grace < args.deadlines.max_s:
        yield warning(
            under(ingress.where, "graceful_shutdown_timeout_s"),
            f"A rollout cuts streams that are older than this; deadlines.max_s is {args.deadlines.max_s:g}. "
            f"Given: {grace:g}.",
        )


def check_timeout(config: dict[str, Any], args: AppArgs) -> Iterator[Finding]:
    """Checks that Serve's own timeout is longer than every deadline."""
    http = config.get("http_options")
    given = http.get("request_timeout_s") if isinstance(http, dict) else None
    if isinstance(given, int | float) and given <= args.deadlines.max_s:
        yield error(
            "http_options.request_timeout_s",
            f"Serve would cut requests early: it must be over deadlines.max_s, {args.deadlines.max_s:g}, or "
            f"absent. Given: {given:g}.",
        )
