"""What `kubectl kustomize` makes of our overlays, for machines without kubectl: the parts of kustomize in use here.

Knows resources, components, JSON patches with a target, namespace, images, and labels in templates. Anything else in a
kustomization is an error, so that it does not get lost silently. Where kubectl is installed the tests compare the two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests import read_yaml

Manifest = dict[str, Any]

_KNOWN = {"apiVersion", "kind", "resources", "components", "namespace", "images", "patches", "labels"}
_CLUSTER_WIDE = {"Namespace"}


def render(folder: Path) -> list[Manifest]:
    """
    Raises:
        ValueError: something in a kustomization that is not known here, or a patch without a target.
    """
    return _build(folder, [])


def _build(folder: Path, given: list[Manifest]) -> list[Manifest]:
    (settings,) = read_yaml(folder / "kustomization.yaml")
    if unknown := settings.keys() - _KNOWN:
        raise ValueError(f"{folder}: {', '.join(sorted(unknown))} is not known here")
    manifests = list(given)
    for name in settings.get("resources", ()):
        path = folder / name
        manifests += _build(path.resolve(), []) if path.is_dir() else read_yaml(path)
    for name in settings.get("components", ()):
        manifests = _build((folder / name).resolve(), manifests)
    for patch in settings.get("patches", ()):
        _patch(manifests, patch, folder)
    for labels in settings.get("labels", ()):
        for manifest in manifests:
            _label(manifest, labels)
    for image in settings.get("images", ()):
        for manifest in manifests:
            _name_image(manifest, image)
    if namespace := settings.get("namespace"):
        for manifest in manifests:
            if manifest["kind"] not in _CLUSTER_WIDE:
                manifest["metadata"]["namespace"] = namespace
    return manifests


def _patch(manifests: Sequence[Manifest], patch: Manifest, folder: Path) -> None:
    target = patch["target"]
    chosen = [
        manifest
        for manifest in manifests
        if re.fullmatch(target.get("kind", ".*"), manifest["kind"])
        and re.fullmatch(target.get("name", ".*"), manifest["metadata"]["name"])
    ]
    if not chosen:
        raise ValueError(f"{folder}: no manifest for the patch of {target}")
    for manifest in chosen:
        for change in yaml.safe_load(patch["patch"]):
            _change(manifest, change["op"], change["path"], change.get("value"))


def _change(manifest: Manifest, op: str, path: str, value: Any) -> None:
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    place: Any = manifest
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if isinstance(place, list):
        if op != "add" or last != "-":
            raise ValueError(f"{op} {path} is not known here")
        place.append(value)
    elif op == "add" or (op == "replace" and last in place):
        place[last] = value
    else:
        raise ValueError(f"{op} {path}: there is nothing")


def _label(manifest: Manifest, labels: Manifest) -> None:
    if labels.keys() - {"pairs", "includeTemplates"}:
        raise ValueError(f"labels: {sorted(labels)} is not known here")
    places = [manifest["metadata"]]
    if labels.get("includeTemplates") and "template" in manifest.get("spec", {}):
        places.append(manifest["spec"]["template"]["metadata"])
    if labels.get("includeTemplates"):
        places += [claim["metadata"] for claim in manifest.get("spec", {}).get("volumeClaimTemplates", ())]
    for place in places:
        # The manifests share labels by YAML anchors, which are one object here.
        place["labels"] = {**place.get("labels", {}), **labels["pairs"]}


def _name_image(manifest: Manifest, image: Manifest) -> None:
    pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
    for container in (*pod.get("containers", ()), *pod.get("initContainers", ())):
        if container["image"].partition(":")[0] == image["name"]:
            container["image"] = f"{image['newName']}:{image['newTag']}"
