"""`biphase status`: what a running gateway knows of its nodes and its last requests, as a table or as its JSON.

Reads GET /status over HTTP and shows it; computes nothing. `--watch` is watch.py's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from biphase.errors import ConfigError, UnauthorizedError, UnavailableError
from biphase.settings import API_FLAGS, Flag, parse_flags, positive_seconds
from services.launcher.asking import RefusedError, ask
from services.launcher.watch import watch

_MAX_REQUESTS_SHOWN = 10
_PLAIN_WIDTH = 220

STATUS_FLAGS = (
    Flag("url", str, "http://127.0.0.1:8000", "address of the gateway"),
    Flag("interval", positive_seconds, 1.0, "with --watch: seconds between two looks"),
    *(flag for flag in API_FLAGS if flag.name == "api-key"),
)


@dataclass(frozen=True, slots=True)
class StatusSettings:
    """One field per flag in STATUS_FLAGS."""

    url: str
    interval: float
    api_key: tuple[str, ...]


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 shown, 1 nobody answers.

    Raises:
        BiphaseError: what went wrong, in one sentence.
    """
    arguments = list(argv)
    as_json, watches = (_take(arguments, word) for word in ("--json", "--watch"))
    settings = parse_flags(
        "biphase status",
        "Shows the nodes behind a gateway. With --json: the gateway's own JSON. With --watch: again and again.",
        STATUS_FLAGS,
        StatusSettings,
        arguments,
    )
    if as_json and watches:
        raise ConfigError("--json and --watch do not go together: the JSON is printed once")
    api_key = settings.api_key[0] if settings.api_key else ""
    if watches:
        return watch(lambda: fetch(settings.url, api_key), show, sys.stdout, interval=settings.interval)
    status = fetch(settings.url, api_key)
    if as_json:
        print(json.dumps(status, indent=2))
    else:
        show(status, sys.stdout)
    return 0


def _take(arguments: list[str], word: str) -> bool:
    """Whether the word is there; it is taken away."""
    found = word in arguments
    while word in arguments:
        arguments.remove(word)
    return found


def fetch(url: str, api_key: str = "") -> dict[str, Any]:
    """The gateway's /status.

    Raises:
        UnavailableError: nobody answers there, or something that is no biphase gateway.
        UnauthorizedError: the gateway wants a key.
    """
    try:
        status = ask(url, "/status", api_key)
    except RefusedError as error:
        if error.status == 401:
            raise UnauthorizedError(f"{url} wants an API key: set BIPHASE_API_KEY") from error
        raise UnavailableError(f"{url} answered /status with HTTP {error.status}") from error
    except ValueError as error:
        raise UnavailableError(f"{url} is no biphase gateway: {error}") from error
    if not isinstance(status, dict) or not isinstance(status.get("nodes"), list):
        raise UnavailableError(f"{url} is no biphase gateway: its /status has no nodes")
    return status


class _Console(Console):
    """Leaves a pipe that nobody reads any more to the caller; rich would end the process with 1."""

    def on_broken_pipe(self) -> None:
        raise


def show(status: Mapping[str, Any], stream: TextIO) -> None:
    """Prints nodes and the last requests.

    Raises:
        BrokenPipeError: nobody reads it any more.
    """
    console = _Console(file=stream, highlight=False)
    if not console.is_terminal:
        console = _Console(file=stream, highlight=False, width=_PLAIN_WIDTH, no_color=True)
    style = box.SIMPLE_HEAD if console.is_terminal else None
    gateway = status.get("gateway")
    console.print(_nodes_table([*([gateway] if gateway else []), *status["nodes"]], style))
    for table in (_peers_table(status["nodes"], style), _requests_table(status.get("requests") or [], style)):
        if table.row_count:
            console.print()
            console.print(table)


def _nodes_table(nodes: Sequence[Mapping[str, Any]], style: box.Box | None) -> Table:
    table = Table(box=style, pad_edge=False)
    for heading in ("node", "role", "state", "pid", "address", "blocks used", "leased", "running", "waiting"):
        table.add_column(heading, overflow="fold")
    for node in sorted(nodes, key=lambda node: str(node.get("id", ""))):
        blocks = node.get("blocks") or {}
        used = f"{blocks.get('used', 0):,} / {blocks['total']:,}" if blocks.get("total") else ""
        cells = ("id", "role", "state", "pid", "address")
        table.add_row(
            *(_text(node.get(cell)) for cell in cells),
            used,
            _text(blocks.get("leased")),
            _text(node.get("running")),
            _text(node.get("waiting")),
        )
    return table


def _peers_table(nodes: Sequence[Mapping[str, Any]], style: box.Box | None) -> Table:
    """Who has read blocks from whom, by what, and how fast the handshake's test was."""
    table = Table(box=style, pad_edge=False)
    for heading in ("holder", "reader", "transport", "GB/s", "MiB read"):
        table.add_column(heading, justify="right" if heading in ("GB/s", "MiB read") else "left")
    for node in nodes:
        for peer in node.get("peers") or ():
            rate, read = float(peer.get("gigabytes_per_second", 0)), int(peer.get("bytes_read", 0))
            table.add_row(
                _text(peer.get("id")),
                _text(node.get("id")),
                _text(peer.get("transport")),
                f"{rate:.1f}",
                f"{read / 2**20:,.1f}",
            )
    return table


def _requests_table(requests: Sequence[Mapping[str, Any]], style: box.Box | None) -> Table:
    table = Table(box=style, pad_edge=False)
    columns = {
        "request": "request_id",
        "prefilled": "prefill_mode",
        "on": "prefill_node",
        "decoded on": "decode_node",
        "via": "transport",
        "cached": "num_cached_tokens",
        "transferred": "num_transferred_tokens",
        "external": "num_external_tokens",
        "computed": "num_computed_tokens",
        "why": "reason",
    }
    for heading, name in columns.items():
        table.add_column(heading, overflow="fold", justify="right" if name.startswith("num_") else "left")
    # Newest first, as the gateway lists them.
    for request in requests[:_MAX_REQUESTS_SHOWN]:
        table.add_row(*(_text(request.get(name)) for name in columns.values()))
    return table


def _text(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) and value >= 1_000_000 else str(value)
