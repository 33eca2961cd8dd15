"""Generates docs/configuration.md and docs/metrics.md from the tables in the code, or with --check finds old ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from biphase.settings import API_FLAGS, ENGINE_FLAGS, MODEL_FLAGS, NODE_FLAGS, Flag, num_bytes
from biphase.telemetry.settings import METRICS_FLAGS
from biphase.telemetry.table import GATEWAY, TABLE, Metric
from biphase.worker.settings import WORKER_FLAGS
from services.gateway.settings import GATEWAY_FLAGS
from services.kvstore.settings import KVSTORE_FLAGS
from services.launcher.plan import flag_text
from services.launcher.settings import SERVE_FLAGS
from services.launcher.status import STATUS_FLAGS

FOLDER = Path(__file__).parent

INTRODUCTION = """\
# Configuration

Generated from the code by `make docs`; do not edit.

Every setting is a flag and an environment variable; the flag wins. Where vLLM has the setting, it has vLLM's name.
Sizes take units (`2GiB`), lists take commas or the flag several times. A value that cannot be used is refused with one
sentence and exit code 2, before any port is opened. Secrets are best given as variables: arguments can be read by
every user of a machine.

`biphase serve` takes the common, model and engine settings and hands them on to the services it starts; what else a
service knows goes through `--prefill-args`, `--decode-args`, `--kvstore-args` and `--gateway-args`.
"""

GROUPS: Sequence[tuple[str, str, Sequence[Flag]]] = (
    ("Common", "Of every service; all but `--node-id` of `serve` too.", NODE_FLAGS),
    ("Model", "Of `serve`, `gateway`, `prefill` and `decode`.", MODEL_FLAGS),
    ("Engine", "Of `serve`, `prefill` and `decode`.", ENGINE_FLAGS),
    ("API", "Of `serve` and `gateway`.", API_FLAGS),
    ("Metrics", "Of `prefill`, `decode` and `kvstore`; the gateway has `/metrics` on its own port.", METRICS_FLAGS),
)
# Each with the flags that it shares with others, and that the groups above have described.
SERVICES: Sequence[tuple[str, str, Sequence[Flag], Sequence[Flag]]] = (
    ("serve", "`biphase serve [MODEL]`: common, model, engine, API, and", SERVE_FLAGS,
     (*NODE_FLAGS, *MODEL_FLAGS, *ENGINE_FLAGS, *API_FLAGS)),
    ("gateway", "`biphase gateway`: common, model, API, and", GATEWAY_FLAGS, (*NODE_FLAGS, *MODEL_FLAGS, *API_FLAGS)),
    ("prefill and decode", "`biphase prefill` and `biphase decode`: common, model, engine, and", WORKER_FLAGS,
     (*NODE_FLAGS, *MODEL_FLAGS, *ENGINE_FLAGS, *METRICS_FLAGS)),
    ("kvstore", "`biphase kvstore`: common, and", KVSTORE_FLAGS, (*NODE_FLAGS, *METRICS_FLAGS)),
    ("status", "`biphase status [--json | --watch]`:", STATUS_FLAGS, ()),
)  # fmt: skip


def document() -> str:
    parts = [INTRODUCTION]
    parts += [section(title, words, flags) for title, words, flags in GROUPS]
    for title, words, flags, shared in SERVICES:
        # A shared flag with another default or meaning here is described again.
        parts.append(section(title, words, [flag for flag in flags if flag not in shared]))
    return "\n".join(parts)


def section(title: str, words: str, flags: Sequence[Flag]) -> str:
    return "\n".join([f"## {title}\n", f"{words}\n", *table(flags), ""])


def table(flags: Sequence[Flag]) -> Iterator[str]:
    yield "| flag | variable | default | meaning |"
    yield "|---|---|---|---|"
    for flag in flags:
        default = "" if flag.default in ("", (), None) else f"`{shown(flag)}`"
        meaning = flag.help.replace("|", "\\|")
        if flag.choices:
            missing = [choice for choice in flag.choices if choice not in flag.help]
            meaning += f" (one of {', '.join(flag.choices)})" if missing else ""
        yield f"| `--{flag.name}` | `{flag.env}` | {default} | {meaning} |"


def shown(flag: Flag) -> str:
    """The default as one would type it."""
    if flag.parse is num_bytes:
        for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
            if flag.default % scale == 0:
                return f"{flag.default // scale}{unit}"
    return flag_text(flag.default)


METRICS_INTRODUCTION = """\
# Metrics

Generated from the code by `make docs`; do not edit.

Every process has a `/metrics` in Prometheus's text format: the gateway on the port that clients use, workers and stores
on `--metrics-port`, by default a free port of loopback. `GET /metrics/targets` of the gateway lists those for
`http_sd_configs`; with API keys configured it asks for one.

`vllm:*` has vLLM's names and meanings. The same name at the gateway and at a worker is the same thing seen from there:
the gateway's series have `engine="0"`, a worker's its node id, so a sum over a cluster names one of the two. What the
gateway tells of every node (`vllm:kv_cache_usage_perc`, `biphase:leased_blocks`) the nodes tell as well:
take `max by (engine)` or `max by (node)` first. `node` and `role` say which process a `biphase:*` series is about.

Counters are exposed with `_total`, histograms with `_bucket`, `_sum` and `_count`. Labels have few values: no request,
client or prompt is ever one.
"""


def metrics_document() -> str:
    ours = [metric for metric in TABLE if metric.name.startswith("biphase:")]
    parts = [
        METRICS_INTRODUCTION,
        metrics_section("As in vLLM", [metric for metric in TABLE if metric.name.startswith("vllm:")]),
        metrics_section("Requests and routing, at the gateway", [m for m in ours if m.services == (GATEWAY,)]),
        metrics_section("Workers and stores", [m for m in ours if m.services != (GATEWAY,)]),
    ]
    return "\n".join(parts)


def metrics_section(title: str, metrics: Sequence[Metric]) -> str:
    lines = [f"## {title}\n", "| metric | type | unit | labels | of | meaning |", "|---|---|---|---|---|---|"]
    for metric in metrics:
        labels, services = ", ".join(metric.labels), ", ".join(metric.services)
        lines.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {services} | {metric.help} |")
    return "\n".join([*lines, ""])


def main() -> int:
    code = 0
    for name, fresh in (("configuration.md", document()), ("metrics.md", metrics_document())):
        target = FOLDER / name
        if "--check" not in sys.argv:
            target.write_text(fresh)
        elif not target.exists() or target.read_text() != fresh:
            print(f"docs/{name} is not what the code says; run `make docs`", file=sys.stderr)
            code = 1
        else:
            print(f"docs/{name} is what the code says")
    return code


if __name__ == "__main__":
    sys.exit(main())
