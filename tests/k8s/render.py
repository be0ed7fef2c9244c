"""Renders the part of kustomize that k8s/ uses. An unknown construct is an error, also where kustomize would let
it pass: a key that stands twice, an image that no container has, a patch without an object."""

import copy
import json
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
K8S = Path(__file__).resolve().parents[2] / "k8s"
OVERLAYS = ("dev", "prod", "incremental")
HEADER = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
KNOWN = {"apiVersion", "kind", "resources", "namespace", "patches", "images", "configMapGenerator", "generatorOptions"}
CLUSTER_WIDE = {"Namespace"}


class RenderError(Exception):
    """Names the file and what is wrong in it."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise RenderError(f"{node.start_mark}: {sorted(map(str, twice))} stands twice.")
        return super().construct_mapping(node, deep)


def documents(text: str) -> list[Any]:
    """Reads YAML in which no key stands twice; what anchors share is copied."""
    found = yaml.load_all(text, Loader=_Loader)  # a SafeLoader
    return [json.loads(json.dumps(one)) for one in found if one is not None]


def render(folder: Path) -> list[Object]:
    """The objects that `kubectl apply -k folder` would send, in no certain order."""
    plan = _plan(folder)
    objects: list[Object] = []
    for name in plan.get("resources", []):
        path = (folder / name).resolve()
        if not path.exists():
            raise RenderError(f"{folder}: {name} does not exist.")
        objects += render(path) if path.is_dir() else documents(path.read_text("utf-8"))
    objects += [_config_map(folder, plan, one) for one in plan.get("configMapGenerator", [])]
    for one in plan.get("patches", []):
        _patch(folder, one, objects)
    for one in plan.get("images", []):
        _set_image(folder, one, objects)
    for one in objects:
        if "namespace" in plan and one["kind"] not in CLUSTER_WIDE:
            one["metadata"]["namespace"] = plan["namespace"]
    names = [identity(one) for one in objects]
    if len(set(names)) < len(names):
        raise RenderError(f"{folder}: an object stands twice.")
    return objects


def identity(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def containers(value: Any) -> Iterator[Object]:
    """Every container and init container anywhere in an object."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("containers", "initContainers"):
                yield from inner
            yield from containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from containers(inner)


def _plan(folder: Path) -> Object:
    file = folder / "kustomization.yaml"
    if not file.is_file():
        raise RenderError(f"{folder}: there is no kustomization.yaml.")
    (plan,) = documents(file.read_text("utf-8"))
    if any(plan.get(key) != value for key, value in HEADER.items()):
        raise RenderError(f"{file}: apiVersion and kind must be {HEADER}.")
    _only(file, plan, KNOWN)
    found: Object = plan
    return found


def _only(where: Path, given: Object, known: Iterable[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise RenderError(f"{where}: {unknown} must be among {sorted(known)}.")


def _config_map(folder: Path, plan: Object, given: Object) -> Object:
    _only(folder, given, {"name", "files", "options"})
    options = plan.get("generatorOptions", {}) | given.get("options", {})
    _only(folder, options, {"disableNameSuffixHash", "labels"})
    if options.get("disableNameSuffixHash") is not True:
        raise RenderError(f"{folder}: {given['name']} must have disableNameSuffixHash.")
    data = {Path(name).name: (folder / name).read_text("utf-8") for name in given["files"]}
    metadata: Object = {"name": given["name"]}
    if options.get("labels"):
        metadata["labels"] = dict(options["labels"])
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patch(folder: Path, given: Object, objects: list[Object]) -> None:
    _only(folder, given, {"path", "patch", "target"})
    _only(folder, given["target"], {"kind", "name"})
    wanted = given["target"]["kind"], given["target"]["name"]
    targets = [one for one in objects if identity(one) == wanted]
    if len(targets) != 1:
        raise RenderError(f"{folder}: {wanted} is patched, and {len(targets)} objects are called so.")
    text = given["patch"] if "patch" in given else (folder / given["path"]).read_text("utf-8")
    (operations,) = documents(text)
    for operation in operations:
        _only(folder, operation, {"op", "path", "value"})
        _apply(folder, operation, targets[0])


def _apply(folder: Path, operation: Object, target: Object) -> None:
    """RFC 6902's add, replace and remove."""
    *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
    place: Any = target
    try:
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        key: Any = int(last) if isinstance(place, list) and last != "-" else last
        match operation["op"]:
            case "add" if isinstance(place, list):
                place.insert(len(place) if key == "-" else key, copy.deepcopy(operation["value"]))
            case "add":
                place[key] = copy.deepcopy(operation["value"])
            case "replace":
                place[key]
                place[key] = copy.deepcopy(operation["value"])
            case "remove":
                del place[key]
            case other:
                raise RenderError(f"{folder}: op must be add, replace or remove. Given: {other}.")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RenderError(f"{folder}: {operation['path']} does not exist.") from error


def _set_image(folder: Path, given: Object, objects: list[Object]) -> None:
    _only(folder, given, {"name", "newName", "newTag", "digest"})
    found = [one for one in containers(objects) if _name_of(one["image"]) == given["name"]]
    if not found:
        raise RenderError(f"{folder}: no container has the image {given['name']}.")
    for one in found:
        name = given.get("newName", given["name"])
        if "digest" in given:
            one["image"] = f"{name}@{given['digest']}"
        else:
            one["image"] = f"{name}:{given.get('newTag', one['image'].rpartition(':')[2])}"


def _name_of(image: str) -> str:
    return image.partition("@")[0].rpartition(":")[0] or image
