"""The cluster manifests are valid and hold together: names, labels, ports, settings, secrets, drain times.

Rendered as a cluster would get them, and held against Kubernetes' own schemas, strictly: a field that does not exist is
an error. No cluster and no network are needed.
"""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.gateway.routing.policy import DEFAULT_PREFILL_RATE
from tests.deploy.kustomize import render
from tests.deploy.manifests import KUBERNETES, emitted_names, environment_variables, metric_names, read_yaml

KUBECTL = shutil.which("kubectl")
BASE = KUBERNETES / "base"
EXAMPLE = KUBERNETES / "overlays" / "example"
ROLES = ("gateway", "prefill", "decode", "kvstore")
WORKLOADS = ("Deployment", "StatefulSet")
# The oldest and the newest cluster that they are for.
VERSIONS = ("1.29", "1.35")
# Kinds of operators, which bring their own schemas to a cluster.
OF_OPERATORS = {"ScaledObject", "ServiceMonitor", "PodMonitor"}


@pytest.fixture(scope="module", params=["base", "example"])
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(BASE if request.param == "base" else EXAMPLE)


@pytest.fixture(scope="module")
def example() -> list[dict[str, Any]]:
    return render(EXAMPLE)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_them(manifests: list[dict[str, Any]], version: str) -> None:
    kinds = set()
    for found in manifests:
        kinds.add(found["kind"])
        if found["kind"] not in OF_OPERATORS:
            kubernetes_validate.validate(found, version, strict=True)
    assert {"Deployment", "StatefulSet", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget"} <= kinds


def test_the_schemas_are_looked_at(example: list[dict[str, Any]]) -> None:
    """What a typing mistake would look like."""
    wrong = copy.deepcopy(_of_kind(example, "Deployment")["biphase-decode"])
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.skipif(KUBECTL is None, reason="no kubectl here to compare with")
@pytest.mark.parametrize("folder", [BASE, EXAMPLE], ids=["base", "example"])
def test_kubectl_renders_the_same(folder: Any) -> None:
    done = subprocess.run([str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True, check=True)

    def by_name(found: dict[str, Any]) -> tuple[str, str]:
        return found["kind"], found["metadata"]["name"]

    assert sorted(yaml.safe_load_all(done.stdout), key=by_name) == sorted(render(folder), key=by_name)


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
    # Of the component monitoring.
    if metrics := policies.pop("biphase-metrics", None):
        (rule,) = metrics["spec"]["ingress"]
        assert rule["ports"] == [{"protocol": "TCP", "port": "metrics"}]
        assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert policies.keys() == {"biphase-default", *(f"biphase-{role}" for role in (*ROLES, "redis"))}
    assert not policies["biphase-default"]["spec"].get("ingress")
    for name, policy in policies.items():
        if name not in ("biphase-default", "biphase-gateway"):
            for rule in policy["spec"]["ingress"]:
                assert rule["from"], name
                for source in rule["from"]:
                    assert source["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "biphase"


def test_names_can_be_looked_up(manifests: list[dict[str, Any]]) -> None:
    """Labels of ours must not be asked of the cluster's DNS."""
    rule = _of_kind(manifests, "NetworkPolicy")["biphase-default"]["spec"]["egress"][0]
    assert rule["to"][0]["podSelector"]["matchLabels"] == {"k8s-app": "kube-dns"}


@pytest.mark.parametrize("role", ROLES)
def test_secrets_come_from_secrets(manifests: list[dict[str, Any]], role: str) -> None:
    env = {item["name"]: item for item in _container(manifests, role)["env"]}
    for name, key in [("BIPHASE_SERVICE_TOKEN", "service-token"), ("BIPHASE_REDIS_URL", "redis-url")]:
        assert env[name]["valueFrom"]["secretKeyRef"] == {"name": "biphase-secrets", "key": key}
    for found in _of_kind(manifests, "ConfigMap").values():
        assert not [name for name in found["data"] if re.search("TOKEN|PASSWORD|API_KEY|REDIS", name)]


@pytest.mark.parametrize("role", ["prefill", "decode", "kvstore"])
def test_probes_can_show_the_token(manifests: list[dict[str, Any]], role: str) -> None:
    """The kubelet's own gRPC probe has no metadata and no certificate."""
    container = _container(manifests, role)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert "grpc" not in container[probe]
    assert container["readinessProbe"]["exec"]["command"][:3] == ["python", "-m", "biphase.rpc.probe"]


@pytest.mark.parametrize("role", ROLES)
def test_certificates_are_mounted_where_they_are_read(example: list[dict[str, Any]], role: str) -> None:
    container = _container(example, role)
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tls"]
    settings = _settings(example, role)
    for name in ("BIPHASE_TLS_CERT", "BIPHASE_TLS_KEY", "BIPHASE_TLS_CA"):
        assert settings[name].startswith(mount["mountPath"] + "/")


def test_scaling_reads_metrics_that_are_emitted(example: list[dict[str, Any]]) -> None:
    scaled = _of_kind(example, "ScaledObject")
    assert scaled.keys() == {"biphase-prefill", "biphase-decode"}
    for name, found in scaled.items():
        assert found["spec"]["scaleTargetRef"]["name"] == name
        for trigger in found["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            assert metric_names(query) and metric_names(query) <= emitted_names()


def test_a_pool_that_has_measured_nothing_does_not_look_swamped(example: list[dict[str, Any]]) -> None:
    (trigger,) = _of_kind(example, "ScaledObject")["biphase-prefill"]["spec"]["triggers"]
    (least_rate,) = re.findall(r"clamp_min\(.*, (\d+)\)", trigger["metadata"]["query"])
    assert float(least_rate) == DEFAULT_PREFILL_RATE


def test_rdma_reaches_the_workers_only(example: list[dict[str, Any]]) -> None:
    manifests = example
    for role in ("prefill", "decode"):
        container = _container(manifests, role)
        assert container["resources"]["limits"]["rdma/hca"] == container["resources"]["requests"]["rdma/hca"] == "1"
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert container["image"].startswith("registry.example.com/biphase/worker-gpu:")
        assert _settings(manifests, role)["BIPHASE_TRANSPORTS"] == "nixl,tcp"
    assert "rdma/hca" not in _container(manifests, "gateway")["resources"]["limits"]
