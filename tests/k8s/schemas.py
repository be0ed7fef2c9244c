"""Says what each object may hold. Core kinds: the API server's own schemas, strict. RayService of KubeRay 1.6 and kinds
of prometheus-operator: the fields that we use, written down here, and no others."""

import functools
import json
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.k8s.render import Object, identity

KUBERNETES = ("1.30", "1.37")
TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
LABELS = {"type": "object", "additionalProperties": TEXT}
COUNT = {"type": "integer", "minimum": 0}
DURATION = {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"}


def closed(required: str = "", /, **fields: Any) -> dict[str, Any]:
    """An object of these fields and no others. `required`: names apart by spaces."""
    return {"type": "object", "properties": fields, "additionalProperties": False, "required": required.split()}


def listed(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


def custom(api: str, kind: str, spec: Any) -> dict[str, Any]:
    metadata = closed("name", name=TEXT, namespace=TEXT, labels=LABELS)
    return closed(
        "apiVersion kind metadata spec", apiVersion={"const": api}, kind={"const": kind}, metadata=metadata, spec=spec
    )


SECRET_KEY = closed("name key", name=TEXT, key=TEXT)
TEMPLATE = {"type": "object"}  # held against the core schema of a pod template, see `findings`
PARAMETERS = {"type": "object", "additionalProperties": {"type": "string"}}
RESOURCES = {"type": "object"}

RAY_CLUSTER = closed(
    "rayVersion authOptions headGroupSpec workerGroupSpecs",
    rayVersion=TEXT,
    authOptions=closed("mode secretName", mode={"enum": ["token", "disabled"]}, secretName=TEXT),
    gcsFaultToleranceOptions=closed(
        "redisAddress redisPassword",
        redisAddress=TEXT,
        redisPassword=closed("valueFrom", valueFrom=closed("secretKeyRef", secretKeyRef=SECRET_KEY)),
    ),
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions=closed(
        version={"enum": ["v1", "v2"]},
        idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        resources=RESOURCES,
        securityContext=TEMPLATE,
        volumeMounts=listed(TEMPLATE),
    ),
    headGroupSpec=closed("rayStartParams template", rayStartParams=PARAMETERS, template=TEMPLATE),
    workerGroupSpecs=listed(
        closed(
            "groupName replicas minReplicas maxReplicas rayStartParams template",
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            idleTimeoutSeconds=COUNT,
            rayStartParams=PARAMETERS,
            template=TEMPLATE,
        )
    ),
)
PERCENT = {"type": "integer", "minimum": 0, "maximum": 100}
RAY_SERVICE = custom(
    "ray.io/v1",
    "RayService",
    closed(
        "serveConfigV2 rayClusterConfig excludeHeadPodFromServeSvc upgradeStrategy",
        serveConfigV2=TEXT,
        rayClusterConfig=RAY_CLUSTER,
        excludeHeadPodFromServeSvc={"type": "boolean"},
        rayClusterDeletionDelaySeconds=COUNT,
        upgradeStrategy={
            "oneOf": [
                closed("type", type={"enum": ["NewCluster", "None"]}),
                closed(
                    "type clusterUpgradeOptions",
                    type={"const": "NewClusterWithIncrementalUpgrade"},
                    clusterUpgradeOptions=closed(
                        "gatewayClassName stepSizePercent intervalSeconds",
                        gatewayClassName=TEXT,
                        maxSurgePercent=PERCENT,
                        stepSizePercent=PERCENT,
                        intervalSeconds=COUNT,
                    ),
                ),
            ]
        },
    ),
)
RELABELING = closed(action={"enum": ["replace", "keep", "drop"]}, sourceLabels=TEXTS, targetLabel=TEXT, regex=TEXT)
POD_MONITOR = custom(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    closed(
        "selector podMetricsEndpoints",
        selector=closed("matchLabels", matchLabels=LABELS),
        podMetricsEndpoints=listed(
            closed("port", port=TEXT, path=TEXT, interval=DURATION, relabelings=listed(RELABELING))
        ),
    ),
)
SCRAPE_CONFIG = custom(
    "monitoring.coreos.com/v1alpha1",
    "ScrapeConfig",
    closed(
        "staticConfigs metricsPath authorization",
        metricsPath=TEXT,
        scrapeInterval=DURATION,
        scrapeTimeout=DURATION,
        honorLabels={"type": "boolean"},
        authorization=closed("credentials", type=TEXT, credentials=SECRET_KEY),
        staticConfigs=listed(closed("targets", targets=TEXTS, labels=LABELS)),
    ),
)
RULE = closed("expr", alert=TEXT, record=TEXT, expr=TEXT, labels=LABELS, annotations=LABELS, keep_firing_for=DURATION)
RULE["properties"]["for"] = DURATION
RULE["oneOf"] = [{"required": ["alert"]}, {"required": ["record"]}]
PROMETHEUS_RULE = custom(
    "monitoring.coreos.com/v1",
    "PrometheusRule",
    closed("groups", groups=listed(closed("name rules", name=TEXT, interval=DURATION, rules=listed(RULE)))),
)
CUSTOM = {
    "RayService": RAY_SERVICE,
    "PodMonitor": POD_MONITOR,
    "ScrapeConfig": SCRAPE_CONFIG,
    "PrometheusRule": PROMETHEUS_RULE,
}


def findings(one: Object) -> Iterator[str]:
    """Yields what is wrong in the form of an object: its place, and what was expected there."""
    kind, name = identity(one)
    schema = CUSTOM.get(kind)
    if schema is None:
        yield from _core(one)
        return
    for error in _validator(kind).iter_errors(one):
        yield f"{kind} {name}: {'.'.join(map(str, error.absolute_path))}: {error.message}"
    if kind == "RayService":
        for template in templates(one):
            yield from _core(
                {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
            )


def templates(service: Object) -> list[Object]:
    """The pods of a RayService, the head's first. Its autoscaler's resources are put in as a container of the head."""
    cluster = service["spec"].get("rayClusterConfig", {})
    groups = [cluster.get("headGroupSpec", {}), *cluster.get("workerGroupSpecs", [])]
    found = [group.get("template", {}) for group in groups]
    options = cluster.get("autoscalerOptions")
    if options is not None:
        parts = {key: options[key] for key in ("resources", "securityContext", "volumeMounts") if key in options}
        head = found[0]
        containers = [*head["spec"]["containers"], {"name": "autoscaler", "image": "autoscaler:ray"} | parts]
        found[0] = head | {"spec": head["spec"] | {"containers": containers}}
    return found


def _core(one: Object) -> Iterator[str]:
    """In each version of Kubernetes; the first in which something is wrong tells."""
    kind, name = identity(one)
    for version in KUBERNETES:
        try:
            validator = _core_validator(version, f"{kind.lower()}-{_short(one['apiVersion'])}")
        except FileNotFoundError:
            yield f"{kind} {name}: Kubernetes {version} has no {one['apiVersion']} {kind}."
            return
        found = [
            f"{kind} {name}: {'.'.join(map(str, error.absolute_path))}: {error.message}"
            for error in validator.iter_errors(one)
        ]
        if found:
            yield from found
            return


def _short(api: str) -> str:
    """networking.k8s.io/v1: networking-v1."""
    group, _, version = api.rpartition("/")
    return f"{group.partition('.')[0]}-{version}" if group else version


@functools.cache
def _core_validator(version: str, name: str) -> Any:
    """Caches what `kubernetes_validate.validate` makes anew for each object. FileNotFoundError for an unknown kind."""
    own = _folder(version).joinpath(f"{name}.json").read_text("utf-8")
    return Draft202012Validator(json.loads(own), registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Any:
    text = _folder(version).joinpath("_definitions.json").read_text("utf-8")
    return Resource.from_contents(json.loads(text)) @ Registry()


def _folder(version: str) -> Traversable:
    return files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"


@functools.cache
def _validator(kind: str) -> Any:
    return Draft202012Validator(CUSTOM[kind])
