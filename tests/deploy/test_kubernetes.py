"""The cluster manifests hold together: names, labels, ports, settings, drain times. Without a cluster or a network.

Where kubectl is installed the overlay is rendered too, which is what a cluster would get.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import KUBERNETES, emitted_names, environment_variables, metric_names, read_yaml

KUBECTL = shutil.which("kubectl")
BASE = KUBERNETES / "base"
EXAMPLE = KUBERNETES / "overlays" / "example"
ROLES = ("gateway", "prefill", "decode", "kvstore")
WORKLOADS = ("Deployment", "StatefulSet")


def _resources(folder: Path) -> Iterator[dict[str, Any]]:
    (kustomization,) = read_yaml(folder / "kustomization.yaml")
    for name in (*kustomization.get("resources", ()), *kustomization.get("components", ())):
        path = (folder / name).resolve()
        yield from _resources(path) if path.is_dir() else read_yaml(path)


def _rendered() -> list[dict[str, Any]]:
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", str(EXAMPLE)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module", params=["files", "rendered"])
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    if request.param == "files":
        return list(_resources(EXAMPLE))
    if KUBECTL is None:
        pytest.skip("no kubectl here to render with")
    return _rendered()


def _of_kind(manifests: list[dict[str, Any]], *kinds: str) -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found for found in manifests if found["kind"] in kinds}


def _container(manifests: list[dict[str, Any]], role: str) -> dict[str, Any]:
    workload = _of_kind(manifests, *WORKLOADS)[f"biphase-{role}"]
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def _settings(manifests: list[dict[str, Any]], role: str) -> dict[str, str]:
    maps, container = _of_kind(manifests, "ConfigMap"), _container(manifests, role)
    settings: dict[str, str] = {}
    for source in container["envFrom"]:
        settings |= maps[source["configMapRef"]["name"]]["data"]
    return settings | {item["name"]: item.get("value", "") for item in container["env"]}


def test_every_file_is_used() -> None:
    for folder in [BASE, EXAMPLE, *sorted((KUBERNETES / "components").iterdir())]:
        (kustomization,) = read_yaml(folder / "kustomization.yaml")
        files = {path.name for path in folder.iterdir()} - {"kustomization.yaml"}
        assert files == {name for name in kustomization.get("resources", ()) if not name.startswith("..")}


def test_names_are_unique(manifests: list[dict[str, Any]]) -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in manifests]
    assert len(names) == len(set(names))


def test_every_manifest_says_what_it_is(manifests: list[dict[str, Any]]) -> None:
    for found in manifests:
        assert {"apiVersion", "kind", "metadata"} <= found.keys()
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", found["metadata"]["name"])


def test_selectors_choose_the_pods_they_mean(manifests: list[dict[str, Any]]) -> None:
    pods = {
        name: found["spec"]["template"]["metadata"]["labels"] for name, found in _of_kind(manifests, *WORKLOADS).items()
    }
    assert set(pods) == {f"biphase-{role}" for role in (*ROLES, "redis")}
    for name, found in _of_kind(manifests, *WORKLOADS).items():
        assert found["spec"]["selector"]["matchLabels"].items() <= pods[name].items()
    for kind in ("Service", "PodDisruptionBudget"):
        for name, found in _of_kind(manifests, kind).items():
            selector = found["spec"]["selector"]
            chosen = [
                pod for pod, labels in pods.items() if selector.get("matchLabels", selector).items() <= labels.items()
            ]
            assert chosen == [name], f"{kind} {name}"


def test_settings_are_ones_the_service_has(manifests: list[dict[str, Any]]) -> None:
    for role in ROLES:
        assert _settings(manifests, role).keys() <= environment_variables(role), role


def test_no_injected_variable_is_taken_for_a_setting(manifests: list[dict[str, Any]]) -> None:
    for found in _of_kind(manifests, *WORKLOADS).values():
        assert found["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_pods_are_locked_down(manifests: list[dict[str, Any]]) -> None:
    for found in _of_kind(manifests, *WORKLOADS).values():
        pod = found["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert "limits" in container["resources"]


def test_mounts_have_volumes_and_probes_have_ports(manifests: list[dict[str, Any]]) -> None:
    for found in _of_kind(manifests, *WORKLOADS).values():
        pod = found["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in found["spec"].get("volumeClaimTemplates", ())}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for how in ("tcpSocket", "httpGet", "grpc"):
                    port = container.get(probe, {}).get(how, {}).get("port")
                    assert port is None or port in ports or port in ports.values()


@pytest.mark.parametrize("role", ROLES)
def test_a_draining_pod_is_not_killed(manifests: list[dict[str, Any]], role: str) -> None:
    workload = _of_kind(manifests, *WORKLOADS)[f"biphase-{role}"]
    container = _container(manifests, role)
    assert "grpc" not in container["livenessProbe"] and "/health" not in str(container["livenessProbe"])
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    drain = float(_settings(manifests, role)["BIPHASE_DRAIN_TIMEOUT"])
    grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert drain < grace
    if "--drain" in hook:
        assert float(hook[-1]) == drain
    else:
        assert drain + float(hook[-1]) < grace


def test_only_the_gateway_is_open(manifests: list[dict[str, Any]]) -> None:
    policies = _of_kind(manifests, "NetworkPolicy")
    assert policies.keys() == {"biphase-default", *(f"biphase-{role}" for role in (*ROLES, "redis"))}
    assert not policies["biphase-default"]["spec"].get("ingress")
    for name, policy in policies.items():
        if name not in ("biphase-default", "biphase-gateway"):
            for rule in policy["spec"]["ingress"]:
                assert rule["from"], name
                for source in rule["from"]:
                    assert source["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "biphase"


def test_scaling_reads_metrics_that_are_emitted(manifests: list[dict[str, Any]]) -> None:
    scaled = _of_kind(manifests, "ScaledObject")
    assert scaled.keys() == {"biphase-prefill", "biphase-decode"}
    for name, found in scaled.items():
        assert found["spec"]["scaleTargetRef"]["name"] == name
        for trigger in found["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            assert metric_names(query) and metric_names(query) <= emitted_names()


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl here to render with")
def test_rdma_reaches_the_workers_only() -> None:
    manifests = _rendered()
    for role in ("prefill", "decode"):
        container = _container(manifests, role)
        assert container["resources"]["limits"]["rdma/hca"] == container["resources"]["requests"]["rdma/hca"] == "1"
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert container["image"].startswith("registry.example.com/biphase/worker-gpu:")
        assert _settings(manifests, role)["BIPHASE_TRANSPORTS"] == "nixl,tcp"
    assert "rdma/hca" not in _container(manifests, "gateway")["resources"]["limits"]
