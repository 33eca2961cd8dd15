"""The compose files and what stands beside them say what the code understands."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.deploy.manifests import (
    COMPOSE,
    FLAGS_OF_ROLE,
    ROOT,
    emitted_names,
    environment_variables,
    metric_names,
    read_yaml,
    substituted,
    variables,
)

ROLES = tuple(FLAGS_OF_ROLE)
OURS = (*ROLES, "gateway-2", "redis", "prometheus", "grafana")


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    (document,) = read_yaml(COMPOSE / "compose.yaml")
    services: dict[str, Any] = document["services"]
    return services


def test_every_service_is_there(stack: dict[str, Any]) -> None:
    assert set(stack) == set(OURS)


@pytest.mark.parametrize("role", ROLES)
def test_settings_are_ones_the_service_has(stack: dict[str, Any], role: str) -> None:
    given = {name for name in stack[role]["environment"] if name.startswith("BIPHASE_")}
    assert given <= environment_variables(role)


@pytest.mark.parametrize("role", ROLES)
def test_default_settings_can_be_used(stack: dict[str, Any], role: str) -> None:
    flags = {flag.env: flag for flag in FLAGS_OF_ROLE[role]}
    for name, text in stack[role]["environment"].items():
        if value := substituted(str(text)):
            flags[name].parse(value)
            assert flags[name].choices is None or value in flags[name].choices


@pytest.mark.parametrize("name", OURS)
def test_nothing_runs_with_more_than_it_needs(stack: dict[str, Any], name: str) -> None:
    service = stack[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]


@pytest.mark.parametrize("role", ["prefill", "decode", "kvstore"])
def test_workers_can_be_scaled(stack: dict[str, Any], role: str) -> None:
    """A fixed name or published port can exist once."""
    assert not {"container_name", "ports", "hostname"} & stack[role].keys()


@pytest.mark.parametrize("role", ROLES)
def test_stopping_takes_longer_than_draining(stack: dict[str, Any], role: str) -> None:
    drain = float(substituted(stack[role]["environment"]["BIPHASE_DRAIN_TIMEOUT"]))
    assert float(stack[role]["stop_grace_period"].removesuffix("s")) > drain


def test_published_ports_stay_on_this_machine(stack: dict[str, Any]) -> None:
    ports = [substituted(port) for service in stack.values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_every_dependency_has_a_health_check(stack: dict[str, Any]) -> None:
    for service in stack.values():
        for needed, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in stack[needed]


def test_health_checks_ask_the_port_the_image_listens_on(stack: dict[str, Any]) -> None:
    dockerfile = (COMPOSE / "Dockerfile").read_text()
    ports = dict(re.findall(r"^FROM base AS (\S+)(?:(?!^FROM).)*?BIPHASE_PORT=(\d+)", dockerfile, re.M | re.S))
    for role in ROLES:
        assert f":{ports[stack[role]['build']['target']]}" in " ".join(stack[role]["healthcheck"]["test"])


def test_env_example_names_every_variable_with_its_default() -> None:
    wanted = variables((COMPOSE / "compose.yaml").read_text())
    text = (COMPOSE / ".env.example").read_text()
    given = dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))
    assert given == wanted


def test_gpu_file_changes_services_that_exist(stack: dict[str, Any]) -> None:
    (document,) = read_yaml(COMPOSE / "compose.gpu.yaml")
    assert document["services"].keys() <= stack.keys()
    for role in ROLES:
        given = {name for name in document["services"][role]["environment"] if name.startswith("BIPHASE_")}
        assert given <= environment_variables(role)


def test_tls_file_gives_every_service_its_certificates(stack: dict[str, Any]) -> None:
    (document,) = read_yaml(COMPOSE / "compose.tls.yaml")
    assert document["services"].keys() == {name for name in stack if name.partition("-")[0] in ROLES}
    for name, service in document["services"].items():
        assert service["environment"].keys() == {"BIPHASE_TLS_CERT", "BIPHASE_TLS_KEY", "BIPHASE_TLS_CA"}
        assert service["environment"].keys() <= environment_variables(name.partition("-")[0])
        (folder,) = (substituted(volume).split(":")[1] for volume in service["volumes"])
        assert all(path.startswith(f"{folder}/") for path in service["environment"].values())


def test_torch_has_the_pinned_version() -> None:
    version = re.search(r"^ARG TORCH_VERSION=(\S+)", (COMPOSE / "Dockerfile").read_text(), re.M)
    assert version is not None
    assert f"\ntorch=={version[1]}\n" in (ROOT / "constraints.txt").read_text()


def test_dashboard_reads_metrics_that_are_emitted() -> None:
    dashboard = json.loads((COMPOSE / "grafana" / "dashboards" / "biphase.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) > 20
    for expression in expressions:
        assert metric_names(expression)
        assert metric_names(expression) <= emitted_names(), expression


def test_prometheus_asks_every_service_on_its_port() -> None:
    (config,) = read_yaml(COMPOSE / "prometheus" / "prometheus.yml")
    found = {job["dns_sd_configs"][0]["names"][0]: job["dns_sd_configs"][0]["port"] for job in config["scrape_configs"]}
    assert found == {"gateway": 8000, "prefill": 9100, "decode": 9100, "kvstore": 9100}
    stages = re.split(r"^FROM ", (COMPOSE / "Dockerfile").read_text(), flags=re.M)
    for image in ("kvstore", "worker-cpu", "worker-gpu"):
        (stage,) = [stage for stage in stages if stage.startswith(f"base AS {image}\n")]
        assert "BIPHASE_METRICS_HOST=0.0.0.0 BIPHASE_METRICS_PORT=9100" in stage and " 9100\n" in stage


def test_dashboard_asks_the_provisioned_data_source() -> None:
    (source,) = read_yaml(COMPOSE / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")[0]["datasources"]
    dashboard = json.loads((COMPOSE / "grafana" / "dashboards" / "biphase.json").read_text())
    used = {target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel.get("targets", [])}
    assert used == {source["uid"]}
