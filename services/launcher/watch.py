"""`biphase status --watch`: what /ui shows, in a terminal, drawn anew in place until Ctrl-C.

Owns the drawing. A terminal gets a full screen; a pipe gets the plain tables, one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from biphase.errors import BiphaseError
from services.launcher.timebar import PHASE_STYLES, TimeBar, bar

# Below this many columns what is least missed is left out.
_TINY, _NARROW, _WIDE = 50, 72, 110
_STATE_STYLES = {"ready": "green", "draining": "yellow", "starting": "yellow", "waiting_for_workers": "yellow"}

Status = Mapping[str, Any]


def watch(
    fetch: Callable[[], Status],
    show: Callable[[Status, TextIO], None],
    stream: TextIO,
    *,
    interval: float,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Returns the exit code when Ctrl-C, or the end of the pipe, ends it.

    Args:
        fetch: asks the gateway. The first failure ends it; later ones are shown, and it is asked again.
        show: prints one status plainly.
        interval: seconds between two questions.

    Raises:
        BiphaseError: as the first call of `fetch`.
    """
    console = Console(file=stream, highlight=False)
    status = fetch()
    try:
        if console.is_terminal and not console.is_dumb_terminal:
            _in_place(fetch, status, console, interval, sleep)
        else:
            _one_after_another(fetch, status, show, stream, interval, sleep)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Python writes what is left at its end, and would complain again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 0
    return 0


def _one_after_another(
    fetch: Callable[[], Status],
    status: Status,
    show: Callable[[Status, TextIO], None],
    stream: TextIO,
    interval: float,
    sleep: Callable[[float], None],
) -> None:
    while True:
        print(time.strftime("--- %Y-%m-%d %H:%M:%S"), file=stream)
        show(status, stream)
        print(file=stream, flush=True)
        sleep(interval)
        while True:
            try:
                status = fetch()
                break
            except BiphaseError as error:
                print(f"biphase status: {error.message}", file=sys.stderr, flush=True)
                sleep(interval)


def _in_place(
    fetch: Callable[[], Status], status: Status, console: Console, interval: float, sleep: Callable[[float], None]
) -> None:
    problem = ""
    before: Status | None = None
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            live.update(screen(status, before, problem, *console.size), refresh=True)
            sleep(interval)
            try:
                before, status, problem = status, fetch(), ""
            except BiphaseError as error:
                problem = error.message


def screen(status: Status, before: Status | None, problem: str, width: int, height: int) -> RenderableType:
    """Everything, for a terminal of this size. What does not fit below is left out: nodes first, then requests.

    Args:
        before: the status before, for what is per second.
        problem: why `status` is an old one; "" when it is not.
    """
    parts: list[RenderableType] = [_head(status, before, width)]
    if problem:
        parts.append(Text(f"! {problem}; what follows is old", style="bold red", overflow="ellipsis", no_wrap=True))
    nodes = status["nodes"]
    # Of the head, of the tables' headings, and between them.
    left = height - len(parts) - (6 if width >= _WIDE else 7)
    num_nodes = min(len(nodes), max(3, left // 2))
    parts += [Text(), _nodes(_foremost(nodes, num_nodes), width)]
    if hidden := len(nodes) - num_nodes:
        parts.append(Text(f"  and {hidden} more", style="dim"))
        left -= 1
    rows = [*status.get("active", ()), *status.get("requests", ())]
    room = max(0, left - num_nodes)
    if rows and room:
        parts += [Text(), _requests(rows[:room], float(status.get("time") or time.time()), width), _legend(width)]
    elif room:
        parts += [Text(), Text("No request yet.", style="dim")]
    return Group(*parts)


def _foremost(nodes: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """So many nodes, by pool: of each pool in turn the next that is not ready, or else the busiest."""

    def key(node: Mapping[str, Any]) -> tuple[bool, int, str]:
        busy = int(node.get("running") or 0) + int(node.get("waiting") or 0)
        return node.get("state") == "ready", -busy, str(node.get("id"))

    pools: dict[str, list[Mapping[str, Any]]] = {}
    for node in sorted(nodes, key=key):
        pools.setdefault(str(node.get("role")), []).append(node)
    in_turn = (node for row in itertools.zip_longest(*pools.values()) for node in row if node is not None)
    return sorted(itertools.islice(in_turn, count), key=lambda node: (str(node.get("role")), *key(node)))


def _head(status: Status, before: Status | None, width: int) -> RenderableType:
    gateway, totals = status.get("gateway") or {}, status.get("totals") or {}
    state = str(gateway.get("state", ""))
    names = (status.get("model") or {}).get("names") or [""]
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("biphase", style="bold")
    line.append(f"  {names[0]}  ")
    line.append(state.replace("_", " "), style=_STATE_STYLES.get(state, "red"))
    told = [f"{gateway.get('running', 0)} running", f"{gateway.get('waiting', 0)} waiting"]
    if before is not None and (passed := float(status.get("time", 0)) - float(before.get("time", 0))) > 0:
        old = before.get("totals") or {}
        for name, word in (("num_finished", "requests/s"), ("num_output_tokens", "tok/s")):
            told.append(f"{max(0, totals.get(name, 0) - old.get(name, 0)) / passed:,.1f} {word}")
    if totals.get("num_prompt_tokens"):
        told.append(f"{totals['num_cached_tokens'] / totals['num_prompt_tokens']:.0%} cached")
    if totals.get("num_failed"):
        told.append(f"{totals['num_failed']:,} failed")
    figures = Text("  ".join(told), style="dim", no_wrap=True, overflow="ellipsis")
    if width < _WIDE:
        return Group(line, figures)
    line.append("  ")
    line.append_text(figures)
    return line


def _nodes(nodes: Sequence[Mapping[str, Any]], width: int) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("node", no_wrap=True, overflow="ellipsis", ratio=3)
    table.add_column("state", no_wrap=True)
    table.add_column("running", justify="right", no_wrap=True)
    if width >= _TINY:
        table.add_column("waiting", justify="right", no_wrap=True)
    table.add_column("blocks", no_wrap=True, overflow="crop")
    if width >= _NARROW:
        table.add_column("hits", justify="right", no_wrap=True)
        table.add_column("speed", justify="right", no_wrap=True)
    if width >= _WIDE:
        table.add_column("reads from", no_wrap=True, overflow="ellipsis", ratio=4)
    for node in nodes:
        blocks, state = node.get("blocks") or {}, str(node.get("state", ""))
        share = blocks.get("used", 0) / blocks["total"] if blocks.get("total") else None
        is_store = node.get("role") == "kvstore"
        cells: list[RenderableType] = [
            Text(str(node.get("id") or node.get("address") or "")),
            Text(state.replace("_", " "), style=_STATE_STYLES.get(state, "red")),
            "" if is_store else f"{node.get('running', 0):,}",
        ]
        if width >= _TINY:
            waiting = int(node.get("waiting") or 0) + int(node.get("waiting_for_remote_kv") or 0)
            cells.append("" if is_store else f"{waiting:,}")
        cells.append(_blocks(share, width))
        if width >= _NARROW:
            cells += [_hits(node), _speed(node)]
        if width >= _WIDE:
            cells.append(Text(_peers(node), style="dim"))
        table.add_row(*cells)
    return table


def _blocks(share: float | None, width: int) -> Text:
    if share is None:
        return Text()
    if width < _TINY:
        return Text(f"{share:4.0%}")
    return bar(share, 8 if width < _NARROW else 12).append(f" {share:4.0%}")


def _hits(node: Mapping[str, Any]) -> str:
    queries = int(node.get("prefix_cache_queries_tokens") or 0)
    return f"{int(node.get('prefix_cache_hits_tokens') or 0) / queries:.0%}" if queries else ""


def _speed(node: Mapping[str, Any]) -> str:
    if node.get("role") == "decode" and node.get("decode_step_seconds"):
        return f"{float(node['decode_step_seconds']) * 1000:.1f} ms/step"
    rate = float(node.get("prefill_tokens_per_second") or 0)
    return f"{rate:,.0f} tok/s" if rate else ""


def _peers(node: Mapping[str, Any]) -> str:
    peers = sorted(node.get("peers") or (), key=lambda peer: -int(peer.get("bytes_read", 0)))
    return ", ".join(
        f"{peer.get('id')} {peer.get('transport')} {float(peer.get('gigabytes_per_second', 0)):.1f} GB/s"
        for peer in peers
    )


def _requests(rows: Sequence[Mapping[str, Any]], now: float, width: int) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("", width=1)
    table.add_column("ago", justify="right", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    if width >= _NARROW:
        table.add_column("path", no_wrap=True, overflow="ellipsis", max_width=30)
    if width >= _WIDE:
        table.add_column("cached", justify="right", no_wrap=True)
        table.add_column("first token", justify="right", no_wrap=True)
    table.add_column("", ratio=1, no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    lengths = sorted(float(row.get("seconds") or 0) for row in rows)
    scale = max(0.005, min(lengths[-1], 2 * lengths[int(0.9 * (len(lengths) - 1))]))
    for row in rows:
        mark, style = _mark(row)
        seconds = float(row.get("seconds") or 0)
        ended = float(row.get("arrival_time") or now) + seconds
        cells: list[RenderableType] = [
            Text(mark, style=style),
            _ago(now - ended) if row.get("finish_reason") else "now",
            f"{row.get('num_prompt_tokens', 0):,}→{row.get('num_output_tokens', 0):,}",
        ]
        if width >= _NARROW:
            cells.append(
                Text(str(row.get("error_code") or _path(row)), style="red" if row.get("error_code") else "dim")
            )
        if width >= _WIDE:
            cells += [f"{cached:,}" if (cached := _cached(row)) else "", _seconds(row.get("ttft_seconds"))]
        cells += [TimeBar(row, scale), _seconds(seconds)]
        table.add_row(*cells)
    return table


def _mark(row: Mapping[str, Any]) -> tuple[str, str]:
    reason = row.get("finish_reason")
    if reason == "error":
        return "x", "bold red"
    if row.get("num_moves") or row.get("num_prefill_failures"):
        return "r", "bold yellow"
    if reason is None:
        return "*", "blue"
    return ("-", "dim") if reason == "abort" else ("+", "green")


def _path(row: Mapping[str, Any]) -> str:
    routing = row.get("routing") or {}
    decode = row.get("decode_node") or routing.get("decode") or ""
    prefill = row.get("prefill_node") or next(iter(routing.get("prefill") or ()), "")
    return f"{prefill} → {decode}" if prefill and prefill != decode else str(decode or "waits")


def _cached(row: Mapping[str, Any]) -> int:
    return sum(int(row.get(f"num_{name}_tokens") or 0) for name in ("cached", "prefill_cached", "external"))


def _ago(seconds: float) -> str:
    for limit, unit, word in ((60, 1, "s"), (3600, 60, "m"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds / unit))}{word}"
    return f"{int(seconds / 86400)}d"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def _legend(width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis", style="dim")
    for name, (_, word, style) in PHASE_STYLES.items():
        if name in ("prepare", "handoff") or (width < _NARROW and name in ("fetch", "worker_queue")):
            continue
        text.append("■ ", style=style)
        text.append(f"{word}  ")
    return text
