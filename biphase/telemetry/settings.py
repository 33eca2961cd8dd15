"""Settings of /metrics of workers and stores. The gateway has its own, on the port that clients use."""

from __future__ import annotations

from dataclasses import dataclass

from biphase.settings import Flag


def port_or_off(text: str) -> int | None:
    """A port, 0 for any free one; None for "off"."""
    if text.strip().lower() == "off":
        return None
    port = int(text)
    if not 0 <= port < 65536:
        raise ValueError("must be a port, 0 for a free one, or off")
    return port


METRICS_FLAGS = (
    Flag("metrics-host", str, "127.0.0.1", "address where /metrics of this process is; it shows numbers to anybody"),
    Flag(
        "metrics-port",
        port_or_off,
        0,
        "port of it; 0: a free one, which the registry names (GET /metrics/targets of the gateway); off: no /metrics",
    ),
)


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """One field per flag in METRICS_FLAGS; see there."""

    metrics_host: str
    metrics_port: int | None
