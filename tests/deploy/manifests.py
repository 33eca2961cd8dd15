"""Reading what is deployed: compose files, cluster manifests, units. For the tests of this folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from biphase.settings import Flag
from biphase.telemetry.table import TABLE
from biphase.worker.settings import WORKER_FLAGS
from services.gateway.settings import GATEWAY_FLAGS
from services.kvstore.settings import KVSTORE_FLAGS

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
KUBERNETES = ROOT / "deploy" / "kubernetes"
SYSTEMD = ROOT / "deploy" / "systemd"

FLAGS_OF_ROLE: dict[str, tuple[Flag, ...]] = {
    "gateway": GATEWAY_FLAGS,
    "prefill": WORKER_FLAGS,
    "decode": WORKER_FLAGS,
    "kvstore": KVSTORE_FLAGS,
}


class _Loader(yaml.SafeLoader):
    """Knows compose's `!reset`, which takes away what an earlier file said."""


_Loader.add_constructor("!reset", lambda loader, node: None)


def read_yaml(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all(path.read_text(), Loader=_Loader) if document is not None]


def environment_variables(role: str) -> set[str]:
    return {flag.env for flag in FLAGS_OF_ROLE[role]}


_VARIABLE = re.compile(r"\$\{(\w+)(:?-[^}]*)?\}")


def variables(text: str) -> dict[str, str]:
    """`${NAME:-default}` -> name to default."""
    return {name: default.lstrip(":").removeprefix("-") for name, default in _VARIABLE.findall(text)}


def substituted(text: str) -> str:
    return _VARIABLE.sub(lambda match: match[2].lstrip(":").removeprefix("-") if match[2] else "", text)


def metric_names(expression: str) -> set[str]:
    """The metrics a PromQL expression reads. All of ours have a colon in their name."""
    return set(re.findall(r"\b(?:vllm|biphase):\w+", expression))


def emitted_names() -> set[str]:
    """What some service's /metrics has, with the suffixes of counters and histograms."""
    return {name for metric in TABLE for name in metric.sample_names}
