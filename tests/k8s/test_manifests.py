"""Both overlays and the variant: their form, the application's config in them, and what must hold of them (S14)."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deployments.cli.launch.ray_env import INLINE, KILL_UNHEALTHY, PROXY_CALLBACK, REPLAY, UNCOUNTED
from tests.k8s import policy, schemas, serve_config
from tests.k8s.render import Object

Objects = list[Object]


def rules_of(overlay: str) -> tuple[policy.Rule, ...]:
    return policy.ALWAYS if overlay == "dev" else policy.IN_PRODUCTION


def form(objects: Objects) -> Iterator[str]:
    """Finds faults of everything but policy."""
    for one in objects:
        yield from schemas.findings(one)
        if one["kind"] == "RayService":
            yield from serve_config.findings(one["spec"].get("serveConfigV2", ""))


@pytest.mark.risk("S14")
def test_the_form_is_right(objects: Objects) -> None:
    assert not list(form(objects))


@pytest.mark.risk("S14", figure="every rule in both overlays")
def test_what_must_hold_does(overlay: str, objects: Objects) -> None:
    assert not {rule.__name__: found for rule in rules_of(overlay) if (found := list(rule(objects)))}


def test_dev_is_not_for_production(objects_of: Callable[[str], Objects]) -> None:
    assert len(list(policy.it_survives_the_loss_of_a_node(objects_of("dev")))) == 3


# Seeded typing mistakes: each must be found, by its name.


def first(objects: Objects, kind: str) -> Object:
    return next(one for one in objects if one["kind"] == kind)


def place(objects: Objects, kind: str, path: str) -> tuple[Any, str]:
    """The parent of a place, and the last part of its path."""
    found: Any = first(objects, kind)
    *parents, last = path.split("/")
    for part in parents:
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found, last


HEAD = "spec/rayClusterConfig/headGroupSpec"
WORKER = "spec/rayClusterConfig/workerGroupSpecs/0"
POD = f"{WORKER}/template/spec"
EARLY = "ray drain-node --deadline-remaining-seconds 900"  # an ingress may take longer than that to stop
RENAMED = [
    ("RayService", "spec/serveConfigV2", "serveConfigV3"),
    ("RayService", "spec/excludeHeadPodFromServeSvc", "excludeHeadPodFromServeService"),
    ("RayService", "spec/rayClusterConfig", "rayClusterSpec"),
    ("RayService", "spec/upgradeStrategy/type", "kind"),
    ("RayService", "spec/rayClusterConfig/authOptions/secretName", "secret"),
    ("RayService", "spec/rayClusterConfig/gcsFaultToleranceOptions/redisAddress", "redisAdress"),
    ("RayService", "spec/rayClusterConfig/autoscalerOptions/idleTimeoutSeconds", "idleTimeoutSecond"),
    ("RayService", f"{HEAD}/rayStartParams", "rayStartParam"),
    ("RayService", f"{WORKER}/maxReplicas", "maxReplica"),
    ("RayService", f"{POD}/terminationGracePeriodSeconds", "terminationGracePeriodSecond"),
    ("RayService", f"{POD}/containers/0/volumeMounts", "volumeMount"),
    ("RayService", f"{POD}/containers/0/securityContext/readOnlyRootFilesystem", "readOnlyRootFileSystem"),
    ("RayService", f"{POD}/volumes/0/emptyDir/sizeLimit", "limit"),
    ("RayService", "spec/rayClusterConfig/autoscalerOptions/securityContext/runAsNonRoot", "runAsNonroot"),
    ("NetworkPolicy", "spec/podSelector", "podSelectors"),
    ("NetworkPolicy", "spec/policyTypes", "policyType"),
    ("PodDisruptionBudget", "spec/minAvailable", "minAvailability"),
    ("ServiceAccount", "automountServiceAccountToken", "automountServiceAccountTokens"),
    ("PodMonitor", "spec/podMetricsEndpoints", "podMetricEndpoints"),
    ("PodMonitor", "spec/podMetricsEndpoints/0/relabelings/0/sourceLabels", "source_labels"),
    ("ScrapeConfig", "spec/metricsPath", "metricPath"),
    ("ScrapeConfig", "spec/authorization/credentials", "credential"),
]


@pytest.mark.parametrize(("kind", "path", "name"), RENAMED)
def test_seeded_typo_of_a_key_is_found(kind: str, path: str, name: str, objects_of: Callable[[str], Objects]) -> None:
    objects = [first(objects_of("prod"), kind)]
    parent, last = place(objects, kind, path)
    parent[name] = parent.pop(last)
    assert any(name in found for found in form(objects))


CHANGED = [
    ("RayService", "spec/rayClusterConfig/authOptions/mode", "tokens"),
    ("RayService", "spec/upgradeStrategy/type", "NewClusters"),
    ("RayService", "spec/rayClusterConfig/enableInTreeAutoscaling", "yes"),
    ("RayService", f"{WORKER}/minReplicas", "2"),
    ("RayService", f"{HEAD}/rayStartParams/num-cpus", 0),
    ("RayService", f"{POD}/volumes/1/emptyDir", 3),
    ("RayService", "apiVersion", "ray.io/v1alpha1"),
    ("NetworkPolicy", "apiVersion", "networking.k8s.io/v1beta1"),
    ("NetworkPolicy", "spec/policyTypes", "Ingress"),
    ("ScrapeConfig", "spec/scrapeInterval", "15"),
    ("PodMonitor", "kind", "PodMonitors"),
]


@pytest.mark.parametrize(("kind", "path", "value"), CHANGED)
def test_seeded_typo_of_a_value_is_found(
    kind: str, path: str, value: Any, objects_of: Callable[[str], Objects]
) -> None:
    objects = [first(objects_of("prod"), kind)]
    assert not list(form(objects))
    parent, last = place(objects, kind, path)
    parent[last] = value
    assert list(form(objects))


IN_THE_CONFIG = [
    ("proxy_location: EveryNode", "proxy_locations: EveryNode", "proxy_locations"),
    ("http_options:", "htp_options:", "htp_options"),
    ("  port: 8000", "  prot: 8000", "prot"),
    ("route_prefix: /", "route_prefx: /", "route_prefx"),
    ("max_replicas_per_node: 1", "max_replica_per_node: 1", "max_replica_per_node"),
    ("- name: Ingress", "- name: Ingres", "'Ingres'"),
    ("- name: Replica", "- name: Replicas", "'Replicas'"),
    ("deployments.app:build", "deployments.app:built", "deployments.app:built"),
    ("served_name: model", "serve_name: model", "serve_name"),
    ("autoscaling:", "autoscalling:", "autoscalling"),
    ("max_replicas: 8", "max_replica: 8", "max_replica"),
    ("max_replicas: 8", "max_replicas: 2", "max_replicas"),
    ("num_gpus: 1", "num_gpu: 1", "num_gpu"),
    ("device: cuda", "device: gpu", "device"),
    ("enable_access_log: false", "enable_acces_log: false", "enable_acces_log"),
    ("proxy_location: EveryNode", "proxy_location: Everywhere", "proxy_location"),
    ("count: 3", "count: 3\n        count: 2", "count"),
]


@pytest.mark.parametrize(("right", "wrong", "name"), IN_THE_CONFIG)
def test_seeded_typo_of_the_config_is_found(
    right: str, wrong: str, name: str, objects_of: Callable[[str], Objects]
) -> None:
    objects = objects_of("prod")
    parent, last = place(objects, "RayService", "spec/serveConfigV2")
    assert right in parent[last]
    parent[last] = parent[last].replace(right, wrong, 1)
    assert any(name in found for found in serve_config.findings(parent[last]))


@pytest.mark.parametrize(
    "name", ["deploymentUnhealthySecondThreshold", "serviceUnhealthySecondThreshold", "serveService"]
)
def test_dead_and_dangerous_fields_are_refused(name: str, objects_of: Callable[[str], Objects]) -> None:
    objects = [first(objects_of("prod"), "RayService")]
    place(objects, "RayService", "spec/x")[0][name] = 300
    assert any(name in found for found in form(objects))


# Planted faults: each rule of the policy must see its own.

HEAD_POD = f"{HEAD}/template/spec"
SERVICE: Object = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "open"},
    "spec": {"ports": [{"port": 80, "targetPort": 8265}]},
}
SECRET: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"a": "b"}}
TOKEN = {"name": "autoscaler-token", "mountPath": "/token"}
OPEN_INGRESS = {"podSelector": {}, "ingress": [{"ports": [{"port": 8000}]}]}
TO_THE_WORLD = {"podSelector": {}, "egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}]}
DASHBOARD_OPEN = {
    "podSelector": {},
    "ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}], "ports": [{"port": 8265}]}],
}
ALL_PORTS_OPEN = {"podSelector": {}, "ingress": [{"from": [{"podSelector": {"matchLabels": {"a": "b"}}}]}]}
GONE = object()
PLANTED = [
    (policy.everything_is_denied_first, "NetworkPolicy", "spec/policyTypes", ["Ingress"]),
    (policy.every_peer_is_named, "NetworkPolicy", "spec", OPEN_INGRESS),
    (policy.every_peer_is_named, "NetworkPolicy", "spec", TO_THE_WORLD),
    (policy.rays_ports_are_rays, "NetworkPolicy", "spec", DASHBOARD_OPEN),
    (policy.rays_ports_are_rays, "NetworkPolicy", "spec", ALL_PORTS_OPEN),
    (policy.ray_asks_for_its_token, "RayService", "spec/rayClusterConfig/authOptions/mode", "disabled"),
    (policy.ray_asks_for_its_token, "RayService", "spec/rayClusterConfig/authOptions", GONE),
    (
        policy.secrets_are_references,
        "RayService",
        f"{POD}/containers/0/env/0",
        {"name": "RAY_AUTH_TOKEN", "value": "1"},
    ),
    (
        policy.secrets_are_references,
        "RayService",
        "spec/rayClusterConfig/gcsFaultToleranceOptions/redisPassword",
        {"value": "1"},
    ),
    (policy.containers_may_do_nothing_but_run, "RayService", f"{POD}/securityContext/runAsUser", 0),
    (policy.containers_may_do_nothing_but_run, "RayService", f"{POD}/securityContext/seccompProfile", GONE),
    (
        policy.containers_may_do_nothing_but_run,
        "RayService",
        f"{POD}/containers/0/securityContext/readOnlyRootFilesystem",
        False,
    ),
    (policy.containers_may_do_nothing_but_run, "RayService", f"{POD}/initContainers/0/securityContext", GONE),
    (
        policy.containers_may_do_nothing_but_run,
        "RayService",
        "spec/rayClusterConfig/autoscalerOptions/securityContext/capabilities",
        {"drop": ["NET_RAW"]},
    ),
    (policy.containers_may_do_nothing_but_run, "RayService", f"{HEAD_POD}/containers/0/resources/limits", GONE),
    (policy.containers_may_do_nothing_but_run, "RayService", f"{POD}/containers/0/ports/0/hostPort", 8080),
    (policy.pods_share_nothing_with_their_host, "RayService", f"{POD}/hostNetwork", True),
    (policy.pods_share_nothing_with_their_host, "RayService", f"{POD}/volumes/0/hostPath", {"path": "/"}),
    (
        policy.pods_share_nothing_with_their_host,
        "RayService",
        f"{POD}/volumes/5/persistentVolumeClaim/readOnly",
        False,
    ),
    (policy.only_the_autoscaler_has_a_token, "ServiceAccount", "automountServiceAccountToken", GONE),
    (policy.only_the_autoscaler_has_a_token, "RayService", f"{POD}/automountServiceAccountToken", True),
    (policy.only_the_autoscaler_has_a_token, "RayService", f"{HEAD_POD}/containers/0/volumeMounts/0", TOKEN),
    (policy.the_namespace_refuses_what_is_not_restricted, "Namespace", "metadata/labels", {}),
    (policy.images_are_pinned, "RayService", f"{POD}/containers/0/image", "registry:5000/assay"),
    (policy.images_are_pinned, "RayService", f"{POD}/initContainers/0/image", "assay:latest"),
    (policy.every_node_has_one_environment, "RayService", f"{POD}/containers/0/env/0/value", "0"),
    (policy.every_node_has_one_environment, "RayService", f"{HEAD_POD}/containers/0/env", []),
    (policy.probes_are_kuberays, "RayService", f"{POD}/containers/0/livenessProbe", {"tcpSocket": {"port": 8000}}),
    (policy.the_head_serves_nobody, "RayService", "spec/excludeHeadPodFromServeSvc", False),
    (policy.the_head_serves_nobody, "RayService", f"{HEAD}/rayStartParams/num-cpus", "4"),
    (policy.ray_is_the_one_of_the_image, "RayService", "spec/rayClusterConfig/rayVersion", "2.59.0"),
    (policy.ray_may_write_where_it_must, "RayService", f"{POD}/volumes/2/emptyDir", {"sizeLimit": "2Gi"}),
    (policy.ray_may_write_where_it_must, "RayService", f"{POD}/volumes/2/emptyDir/sizeLimit", "128Mi"),
    (policy.ray_may_write_where_it_must, "RayService", f"{HEAD_POD}/containers/0/volumeMounts/1/mountPath", "/logs"),
    (policy.answers_may_end, "RayService", f"{POD}/terminationGracePeriodSeconds", 600),
    (policy.answers_may_end, "RayService", "spec/rayClusterDeletionDelaySeconds", GONE),
    (policy.answers_may_end, "RayService", f"{POD}/containers/0/lifecycle", GONE),
    (policy.answers_may_end, "RayService", f"{POD}/terminationGracePeriodSeconds", 4500),
    (policy.answers_may_end, "RayService", f"{POD}/containers/0/lifecycle/preStop/exec/command/2", EARLY),
    (policy.nodes_can_be_emptied_one_at_a_time, "PodDisruptionBudget", "spec/minAvailable", 3),
    (policy.nodes_can_be_emptied_one_at_a_time, "PodDisruptionBudget", "spec/minAvailable", "50%"),
    (policy.everything_has_its_place, "RayService", f"{WORKER}/maxReplicas", 7),
    (policy.everything_has_its_place, "RayService", f"{POD}/containers/0/resources/limits/cpu", "2"),
    (policy.it_survives_the_loss_of_a_node, "RayService", "spec/rayClusterConfig/gcsFaultToleranceOptions", GONE),
    (policy.it_survives_the_loss_of_a_node, "RayService", f"{WORKER}/minReplicas", 1),
]


@pytest.mark.risk("S14", planted=True)
@pytest.mark.parametrize(("rule", "kind", "path", "value"), PLANTED)
def test_planted_fault_is_seen_by_its_rule(
    rule: policy.Rule, kind: str, path: str, value: Any, objects_of: Callable[[str], Objects]
) -> None:
    objects = objects_of("prod")
    assert not list(rule(objects))
    parent, last = place(objects, kind, path)
    key: Any = int(last) if isinstance(parent, list) else last
    if value is GONE:
        del parent[key]
    else:
        parent[key] = copy.deepcopy(value)
    assert list(rule(objects))


@pytest.mark.parametrize(
    ("rule", "added"),
    [
        (policy.no_service_names_rays_ports, SERVICE),
        (policy.no_service_names_rays_ports, SERVICE | {"spec": {"type": "LoadBalancer", "ports": [{"port": 8000}]}}),
        (policy.secrets_are_references, SECRET),
    ],
)
def test_planted_object_is_seen_by_its_rule(
    rule: policy.Rule, added: Object, objects_of: Callable[[str], Objects]
) -> None:
    assert list(rule([*objects_of("prod"), json.loads(json.dumps(added))]))


@pytest.mark.risk("S14", planted=True)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("mode: keys", "mode: disabled"), ("mode: keys", "mode: keys\n{}allow_open: true"), ("/run/secrets", "/etc")],
)
def test_planted_open_door_is_seen(right: str, wrong: str, objects_of: Callable[[str], Objects]) -> None:
    objects = objects_of("prod")
    parent, last = place(objects, "RayService", "spec/serveConfigV2")
    assert right in parent[last]
    (indent,) = re.findall(r"\n( +)mode: keys", parent[last])
    parent[last] = parent[last].replace(right, wrong.format(indent))
    assert list(policy.strangers_are_refused(objects))


@pytest.mark.risk("S14", planted=True)
def test_planted_client_port_is_seen(objects_of: Callable[[str], Objects]) -> None:
    objects = objects_of("prod")
    place(objects, "RayService", f"{HEAD_POD}/containers/0/ports/x")[0].append({"containerPort": 10001})
    assert list(policy.no_service_names_rays_ports(objects))


@pytest.mark.risk("S14", planted=True)
def test_every_rule_has_a_planted_fault() -> None:
    planted = {rule for rule, *_ in PLANTED} | {policy.no_service_names_rays_ports, policy.strangers_are_refused}
    assert planted == set(policy.IN_PRODUCTION)


def test_ray_reads_what_assay_serve_sets(objects: Objects) -> None:
    """But for what is of one machine: with other values requests were lost, or memory."""
    cluster = first(objects, "RayService")["spec"]["rayClusterConfig"]
    wanted = REPLAY | UNCOUNTED | INLINE | PROXY_CALLBACK | KILL_UNHEALTHY
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        ray = next(one for one in group["template"]["spec"]["containers"] if one["name"].startswith("ray-"))
        given = {one["name"]: one.get("value") for one in ray["env"]}
        assert {name: given.get(name) for name in wanted} == wanted
