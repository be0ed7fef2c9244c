"""States what must hold of the rendered objects in every form: S14 of the hazards, and what keeps the service up."""

import ipaddress
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.k8s.render import Object, documents
from tests.k8s.schemas import templates
from tests.k8s.serve_config import arguments_of, deployments_of

ROOT = Path(__file__).resolve().parents[2]
RAYS_OWN = {6379, 8265, 10001}  # a client that reaches one of them runs code in the cluster
OPERATORS = {8265}  # and 8000; of them, what KubeRay needs
RAY_PODS = {"app": "assay"}
ENVIRONMENT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # else a log stays empty for its first thousand lines
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.proxy_middleware.middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
SECRETIVE = ("TOKEN", "PASSWORD", "SECRET", "KEY", "CREDENTIAL")
NO_SECRETS = {"TOKENIZERS_PARALLELISM"}
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}
ROOM_S = 900  # how long a replica of a node that drains waits for room elsewhere
Rule = Callable[[list[Object]], Iterator[str]]


def _kind(objects: list[Object], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def _service(objects: list[Object]) -> Object:
    (found,) = _kind(objects, "RayService")
    return found


def _cluster(objects: list[Object]) -> Object:
    found: Object = _service(objects)["spec"]["rayClusterConfig"]
    return found


def _containers(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """(pod's spec, container), of every pod, the autoscaler's among them."""
    for template in templates(_service(objects)):
        pod = template["spec"]
        for one in (*pod.get("initContainers", ()), *pod["containers"]):
            yield pod, one


# Who reaches what.


def everything_is_denied_first(objects: list[Object]) -> Iterator[str]:
    wanted = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    if wanted not in [one["spec"] for one in _kind(objects, "NetworkPolicy")]:
        yield "NetworkPolicy: none denies all, in and out."


def every_peer_is_named(objects: list[Object]) -> Iterator[str]:
    for policy in _kind(objects, "NetworkPolicy"):
        name = policy["metadata"]["name"]
        rules = [(rule, "from") for rule in policy["spec"].get("ingress", [])]
        rules += [(rule, "to") for rule in policy["spec"].get("egress", [])]
        for rule, side in rules:
            for peer in rule.get(side) or [{}]:
                if "ipBlock" in peer:
                    if not ipaddress.ip_network(peer["ipBlock"]["cidr"]).is_private:
                        yield f"NetworkPolicy {name}: {peer['ipBlock']['cidr']} is not a private range."
                elif not any(selector for selector in peer.values()):
                    yield f"NetworkPolicy {name}: {side} must name who."


def rays_ports_are_rays(objects: list[Object]) -> Iterator[str]:
    """Only Ray's own pods reach any port; the operator reaches the dashboard's; no other pod reaches one of Ray's."""
    for policy in _kind(objects, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            if all(peer == {"podSelector": {"matchLabels": RAY_PODS}} for peer in rule.get("from", [{}])):
                continue
            ports = {port.get("port") for port in rule.get("ports", [{}])}
            operator = "kuberay-operator" in str(rule["from"]) if "from" in rule else False
            open_to = RAYS_OWN - (OPERATORS if operator else set())
            if ports & open_to or None in ports:
                yield f"NetworkPolicy {policy['metadata']['name']}: opens {sorted(map(str, ports))}."


def no_service_names_rays_ports(objects: list[Object]) -> Iterator[str]:
    for one in (*_kind(objects, "Service"), *_kind(objects, "Ingress"), *_kind(objects, "Gateway")):
        for port in one["spec"].get("ports", []):
            if {port.get("port"), port.get("targetPort")} & RAYS_OWN:
                yield f"{one['kind']} {one['metadata']['name']}: port {port.get('port')}."
        if one["spec"].get("type", "ClusterIP") != "ClusterIP":
            yield f"{one['kind']} {one['metadata']['name']}: type must be ClusterIP."
    for _, container in _containers(objects):
        for port in container.get("ports", ()):
            if port["containerPort"] == 10001:
                yield f"{container['name']}: Ray's client port is open."


def ray_asks_for_its_token(objects: list[Object]) -> Iterator[str]:
    if _cluster(objects).get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode must be token."


def secrets_are_references(objects: list[Object]) -> Iterator[str]:
    for one in _kind(objects, "Secret"):
        yield f"Secret {one['metadata']['name']}: secrets are no part of the manifests."
    for _, container in _containers(objects):
        for variable in container.get("env", ()):
            name = variable["name"]
            if name not in NO_SECRETS and any(word in name for word in SECRETIVE) and "value" in variable:
                yield f"{container['name']}: {name} must come from a Secret."
    redis = _cluster(objects).get("gcsFaultToleranceOptions", {}).get("redisPassword", {})
    if "value" in redis:
        yield "redisPassword must come from a Secret."


def strangers_are_refused(objects: list[Object]) -> Iterator[str]:
    """The service listens on every address of its pods. The file of its keys, which are hashes, is a mounted Secret."""
    spec = _service(objects)["spec"]
    auth = arguments_of(spec["serveConfigV2"]).auth
    if auth.mode != "keys" or auth.allow_open:
        yield "auth.mode must be keys."
    if auth.keys:
        yield "auth.keys: keys are no part of the manifests."
    for group in _cluster(objects)["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        secrets = {one["name"] for one in pod["volumes"] if "secret" in one}
        mounts = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] in secrets and one.get("readOnly")]
        if not any(str(auth.keys_file).startswith(f"{one['mountPath']}/") for one in mounts):
            yield f"auth.keys_file: {auth.keys_file} must lie in a mounted Secret."


# Permissions of a container.


def containers_may_do_nothing_but_run(objects: list[Object]) -> Iterator[str]:
    for pod, container in _containers(objects):
        own = container.get("securityContext", {})
        both = pod.get("securityContext", {}) | own
        name = container["name"]
        if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
            yield f"{name}: must not run as root."
        if own.get("readOnlyRootFilesystem") is not True:
            yield f"{name}: readOnlyRootFilesystem must be true."
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield f"{name}: allowPrivilegeEscalation must be false."
        if own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{name}: capabilities must be dropped, all."
        if both.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{name}: seccompProfile must be RuntimeDefault."
        if "limits" not in container.get("resources", {}):
            yield f"{name}: resources must have limits."
        if any("hostPort" in port for port in container.get("ports", ())):
            yield f"{name}: no port of the host."


def pods_share_nothing_with_their_host(objects: list[Object]) -> Iterator[str]:
    for template in templates(_service(objects)):
        pod = template["spec"]
        yield from (f"{key} must not be true." for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key))
        yield from (f"volume {one['name']}: no hostPath." for one in pod["volumes"] if "hostPath" in one)
        for one in pod["volumes"]:
            if "persistentVolumeClaim" in one and not one["persistentVolumeClaim"].get("readOnly"):
                yield f"volume {one['name']}: readOnly must be true."


def only_the_autoscaler_has_a_token(objects: list[Object]) -> Iterator[str]:
    for account in _kind(objects, "ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount {account['metadata']['name']}: automountServiceAccountToken must be false."
    for template in templates(_service(objects)):
        pod = template["spec"]
        if pod.get("automountServiceAccountToken") is not False:
            yield "pod: automountServiceAccountToken must be false."
        tokens = {one["name"] for one in pod["volumes"] if "serviceAccountToken" in str(one.get("projected"))}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            mounted = tokens & {one["name"] for one in container.get("volumeMounts", ())}
            if mounted and container["name"] != "autoscaler":
                yield f"{container['name']}: mounts a service account's token."


def the_namespace_refuses_what_is_not_restricted(objects: list[Object]) -> Iterator[str]:
    for one in _kind(objects, "Namespace"):
        if one["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted":
            yield "Namespace: pod-security.kubernetes.io/enforce must be restricted."


def images_are_pinned(objects: list[Object]) -> Iterator[str]:
    for _, container in _containers(objects):
        tag = container["image"].rpartition(":")[2]
        if "/" in tag or tag in ("latest", container["image"]):
            yield f"{container['name']}: {container['image']} must have a tag of its own."


# Availability.


def every_node_has_one_environment(objects: list[Object]) -> Iterator[str]:
    """Ray reads it as it starts, and modes cannot be mixed in one cluster."""
    found = [container.get("env", []) for _, container in _containers(objects) if container["name"].startswith("ray-")]
    if any(one != found[0] for one in found):
        yield "env: the head and the workers must have the same."
    given = {one["name"]: one.get("value") for one in found[0]}
    for name, value in ENVIRONMENT.items():
        if given.get(name) != value:
            yield f"env: {name} must be {value}. Given: {given.get(name)}."


def probes_are_kuberays(objects: list[Object]) -> Iterator[str]:
    for _, container in _containers(objects):
        for name in ("livenessProbe", "readinessProbe", "startupProbe"):
            if name in container:
                yield f"{container['name']}: {name} must be KubeRay's own."


def the_head_serves_nobody(objects: list[Object]) -> Iterator[str]:
    if _service(objects)["spec"].get("excludeHeadPodFromServeSvc") is not True:
        yield "excludeHeadPodFromServeSvc must be true."
    if _cluster(objects)["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        yield 'headGroupSpec: num-cpus must be "0".'


def ray_is_the_one_of_the_image(objects: list[Object]) -> Iterator[str]:
    pinned = next(
        line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line.startswith("ray==")
    )
    if pinned != f"ray=={_cluster(objects)['rayVersion']}":
        yield f"rayVersion must be that of constraints.txt, {pinned}."


def ray_may_write_where_it_must(objects: list[Object]) -> Iterator[str]:
    """And shared memory holds the object store: on disk it would be slow, and too small it would crash."""
    cluster = _cluster(objects)
    for group, template in zip(
        (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]), templates(_service(objects)), strict=True
    ):
        volumes = {one["name"]: one for one in template["spec"]["volumes"]}
        ray = next(one for one in template["spec"]["containers"] if one["name"].startswith("ray-"))
        at = {one["mountPath"]: volumes[one["name"]].get("emptyDir") for one in ray["volumeMounts"]}
        for path in ("/tmp", "/tmp/ray", "/dev/shm", "/var/cache/assay"):
            if at.get(path) is None:
                yield f"{ray['name']}: {path} must be an emptyDir."
        shared = at.get("/dev/shm") or {}
        size = shared.get("sizeLimit", "0Mi")
        if shared.get("medium") != "Memory":
            yield f"{ray['name']}: /dev/shm must be in memory."
        elif int(size[:-2]) * UNITS[size[-2:]] < int(group["rayStartParams"]["object-store-memory"]):
            yield f"{ray['name']}: /dev/shm must hold object-store-memory."


def answers_may_end(objects: list[Object]) -> Iterator[str]:
    """A pod that is being stopped, and an old cluster, live as long as the longest answer."""
    spec = _service(objects)["spec"]
    made = deployments_of(arguments_of(spec["serveConfigV2"]))
    longest = max(one._deployment_config.graceful_shutdown_timeout_s for one in made.values())
    given = {
        "rayClusterDeletionDelaySeconds": spec.get("rayClusterDeletionDelaySeconds", 60),
        "terminationGracePeriodSeconds": min(
            group["template"]["spec"].get("terminationGracePeriodSeconds", 30)
            for group in _cluster(objects)["workerGroupSpecs"]
        ),
    }
    for name, seconds in given.items():
        if seconds < longest:
            yield f"{name} must be at least {longest:g}. Given: {seconds}."
    for group in _cluster(objects)["workerGroupSpecs"]:
        hook = group["template"]["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {})
        if "ray drain-node" not in str(hook):
            yield "lifecycle.preStop must drain the node: Ray ends its processes immediately when a pod is stopped."
        deadline = re.search(r"--deadline-remaining-seconds (\d+)", str(hook))
        if deadline is None or int(deadline[1]) < longest + ROOM_S:
            yield (
                f"lifecycle.preStop must drain with a deadline of at least {longest + ROOM_S:g} s: Serve keeps a "
                "replica without room elsewhere until what is left is the time that it may take to stop."
            )
        elif int(deadline[1]) > group["template"]["spec"].get("terminationGracePeriodSeconds", 30):
            yield f"terminationGracePeriodSeconds must be at least the drain's deadline, {deadline[1]}."


def nodes_can_be_emptied_one_at_a_time(objects: list[Object]) -> Iterator[str]:
    fewest = sum(group["minReplicas"] for group in _cluster(objects)["workerGroupSpecs"])
    for budget in _kind(objects, "PodDisruptionBudget"):
        least = budget["spec"].get("minAvailable")
        if not isinstance(least, int):
            yield "PodDisruptionBudget: a custom resource's pods need a whole number of minAvailable."
        elif least != fewest - 1:
            yield f"PodDisruptionBudget: minAvailable must be {fewest - 1}, one fewer than minReplicas. Given: {least}."


def everything_has_its_place(objects: list[Object]) -> Iterator[str]:
    """The replicas at their fewest fit on the workers at their fewest, and at their most on their most."""
    (group,) = _cluster(objects)["workerGroupSpecs"]
    text = _service(objects)["spec"]["serveConfigV2"]
    args = arguments_of(text)
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus, cpus = float(limits.get("nvidia.com/gpu", 0)), float(limits["cpu"])
    most = args.autoscaling.max_replicas or args.replica.count
    for workers, replicas in ((group["minReplicas"], args.replica.count), (group["maxReplicas"], most)):
        if replicas * args.replica.num_gpus > workers * gpus:
            yield f"{replicas} replicas need more GPUs than {workers} workers have."
        if replicas * args.replica.num_cpus + args.ingress.count * args.ingress.num_cpus > workers * cpus:
            yield f"{replicas} replicas and the ingresses need more CPUs than {workers} workers have."
    (config,) = documents(text)
    apart = {one["name"]: one.get("max_replicas_per_node") for one in config["applications"][0].get("deployments", [])}
    if apart.get("Ingress") == 1 and args.ingress.count > group["minReplicas"]:
        yield f"{args.ingress.count} ingresses, one a node, need more than {group['minReplicas']} workers."


def it_survives_the_loss_of_a_node(objects: list[Object]) -> Iterator[str]:
    """Not asked of `dev`."""
    cluster = _cluster(objects)
    if "gcsFaultToleranceOptions" not in cluster:
        yield "gcsFaultToleranceOptions: without them a head that restarts takes the workers with it."
    if min(group["minReplicas"] for group in cluster["workerGroupSpecs"]) < 2:
        yield "workerGroupSpecs: minReplicas must be at least 2."
    text = _service(objects)["spec"]["serveConfigV2"]
    (config,) = documents(text)
    apart = {one["name"]: one.get("max_replicas_per_node") for one in config["applications"][0].get("deployments", [])}
    if arguments_of(text).ingress.count < 2 or apart.get("Ingress") != 1:
        yield "Ingress: two or more, max_replicas_per_node 1."


ALWAYS: tuple[Rule, ...] = (
    everything_is_denied_first,
    every_peer_is_named,
    rays_ports_are_rays,
    no_service_names_rays_ports,
    ray_asks_for_its_token,
    secrets_are_references,
    strangers_are_refused,
    containers_may_do_nothing_but_run,
    pods_share_nothing_with_their_host,
    only_the_autoscaler_has_a_token,
    the_namespace_refuses_what_is_not_restricted,
    images_are_pinned,
    every_node_has_one_environment,
    probes_are_kuberays,
    the_head_serves_nobody,
    ray_is_the_one_of_the_image,
    ray_may_write_where_it_must,
    answers_may_end,
    nodes_can_be_emptied_one_at_a_time,
    everything_has_its_place,
)
IN_PRODUCTION: tuple[Rule, ...] = (*ALWAYS, it_survives_the_loss_of_a_node)
