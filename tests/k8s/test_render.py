"""The renderer gives what kustomize gives, and is stricter."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.render import HEADER, K8S, OVERLAYS, Object, RenderError, documents, identity, render

MAP = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {x: '1'}\n"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here to compare with")
def test_the_renderer_agrees_with_kustomize(overlay: str, objects: list[Object]) -> None:
    folder = K8S / "overlays" / overlay
    answer = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    theirs = {identity(one): one for one in documents(answer.stdout)}
    assert {identity(one): one for one in objects} == theirs


def test_every_file_is_rendered_by_an_overlay_or_an_example(objects_of: Any) -> None:
    """A file that no other refers to would rot."""
    used = {identity(one) for name in OVERLAYS for one in objects_of(name)}
    patches = {"pdb.yaml", "workers.yaml", "one-node.yaml"}
    for file in K8S.rglob("*.yaml"):
        if file.name == "kustomization.yaml" or (file.parent.parent.name == "overlays" and file.name in patches):
            continue
        for one in documents(file.read_text("utf-8")):
            own = "kind" not in one or "example" in file.name  # rules for promtool, Secrets to be written
            assert own or identity(one) in used, file


def folder_of(tmp_path: Path, plan: str, **files: str) -> Path:
    header = "\n".join(f"{key}: {value}" for key, value in HEADER.items())
    (tmp_path / "kustomization.yaml").write_text(f"{header}\n{plan}")
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_objects_patches_and_namespaces(tmp_path: Path) -> None:
    plan = """
resources: [a.yaml]
namespace: n
patches:
  - target: {kind: ConfigMap, name: a}
    patch: |
      - {op: replace, path: /data/x, value: "2"}
      - {op: add, path: /data/y~1z, value: "3"}
"""
    (found,) = render(folder_of(tmp_path, plan, a=MAP))
    assert found["metadata"] == {"name": "a", "namespace": "n"}
    assert found["data"] == {"x": "2", "y/z": "3"}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("resource: [a.yaml]", "resource"),
        ("resources: [b.yaml]", "b.yaml does not exist"),
        ("resources: [a.yaml, a.yaml]", "twice"),
        ("resources: [a.yaml]\nresources: []", "twice"),
        ("resources: [a.yaml]\nimages: [{name: other, newTag: x}]", "no container"),
        ("resources: [a.yaml]\npatches: [{target: {kind: ConfigMap, name: b}, patch: '[]'}]", "0 objects"),
        (
            "resources: [a.yaml]\n"
            "patches: [{target: {kind: ConfigMap, name: a}, patch: '[{op: replace, path: /data/y, value: 1}]'}]",
            "/data/y does not exist",
        ),
        ("configMapGenerator: [{name: m, files: [a.yaml]}]", "disableNameSuffixHash"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, plan: str, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        render(folder_of(tmp_path, plan, a=MAP))
