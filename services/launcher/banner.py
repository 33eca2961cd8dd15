"""What a user reads when everything is up: who listens where, what is served, how to ask it. A table or plain lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from biphase.index.embedded import EmbeddedValkey
from services.launcher.child import ReadyLine
from services.launcher.settings import ServeSettings

# Wide enough that plain output is never wrapped.
_PLAIN_WIDTH = 200
_ANY_ADDRESS = ("0.0.0.0", "::", "[::]")


def show_ready(
    lines: Mapping[str, ReadyLine],
    settings: ServeSettings,
    seconds: float,
    *,
    valkey: EmbeddedValkey | None,
    stream: TextIO,
) -> None:
    """Prints the table of services and one command to try.

    Args:
        lines: each child's ready line, by name.
        seconds: how long the start took.
    """
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console = Console(file=stream, highlight=False, width=_PLAIN_WIDTH, no_color=True)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for heading in ("service", "pid", "listens on", "what"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "pid" else "left")
    if valkey is not None:
        table.add_row("valkey", str(valkey.pid), str(valkey.socket_path), "index and node registry")
    for name, line in lines.items():
        table.add_row(name, str(line.get("pid", "")), str(line.get("address", "")), _what(line))
    console.print()
    console.print(table)
    mode = "aggregated: decode workers prefill for themselves" if settings.prefill == 0 else "disaggregated"
    console.print(f"ready in {seconds:.1f} s ({mode})", style="bold" if console.is_terminal else "")
    console.print()
    for line_of_text in first_request(str(lines["gateway-0"]["address"]), settings, _served_name(lines, settings)):
        console.print(line_of_text, soft_wrap=True, markup=False)
    console.print()
    if not any("--disable-ui" in argument for argument in settings.gateway_args):
        console.print(f"{_url(str(lines['gateway-0']['address']))}/ui shows what goes on, and has a chat", markup=False)
        console.print()


def first_request(address: str, settings: ServeSettings, model: str) -> Iterator[str]:
    """One curl line that works as it stands."""
    key = ' -H "Authorization: Bearer $BIPHASE_API_KEY"' if settings.api_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    yield f"curl {_url(address)}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


def _url(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"http://{'127.0.0.1' if host in _ANY_ADDRESS else host}:{port}"


def _served_name(lines: Mapping[str, ReadyLine], settings: ServeSettings) -> str:
    if settings.served_model_name:
        return settings.served_model_name[0]
    names = lines["gateway-0"].get("served_names") or next(
        (line["served_names"] for line in lines.values() if line.get("served_names")), ()
    )
    return str(names[0]) if names else settings.model


def _what(line: ReadyLine) -> str:
    """The facts of a ready line that a person wants to see, in a few words."""
    parts = []
    if line.get("role") == "gateway":
        parts.append("OpenAI API")
    if line.get("model"):
        parts.append(" ".join(str(line[key]) for key in ("model", "dtype") if line.get(key)))
    if line.get("num_blocks"):
        num_blocks, num_bytes = int(line["num_blocks"]), int(line["num_blocks"]) * int(line.get("block_bytes", 0))
        parts.append(f"{num_blocks:,} blocks" + (f" ({num_bytes / 2**20:,.0f} MiB)" if num_bytes else ""))
    if line.get("transports"):
        parts.append("transports " + ", ".join(str(name) for name in line["transports"]))
    return "; ".join(parts)
