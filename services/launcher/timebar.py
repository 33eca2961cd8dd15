"""A request's timeline as a line of coloured blocks, eighths of a column where it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

# phase -> (rank, word, style); where two lie on one column, the higher rank shows.
PHASE_STYLES: dict[str, tuple[int, str, str]] = {
    "prepare": (0, "prepare", "bright_black"),
    "queue": (1, "queue", "bright_black"),
    "worker_queue": (2, "worker queue", "white"),
    "decode": (3, "decode", "green"),
    "fetch": (4, "fetch", "cyan"),
    "chunk": (5, "prefill", "blue"),
    "read": (0, "transfer", "magenta"),
    "exposed": (6, "exposed", "yellow"),
    "lost": (7, "lost", "red"),
    "handoff": (7, "lost", "red"),
}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float, width: int) -> Text:
    """A share of 0 to 1, in so many columns."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    text = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return Text(text.ljust(width, "·"), style="yellow" if share > 0.9 else "blue")


class TimeBar:
    """A request on a scale of seconds, as wide as its place in the table."""

    def __init__(self, row: Mapping[str, Any], scale: float) -> None:
        self._row = row
        self._scale = scale

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield render(self._row, self._scale, options.max_width)


def render(row: Mapping[str, Any], scale: float, width: int) -> Text:
    """One character for each column of `width`; cut, with a mark, where the request is longer than the scale."""
    seconds = float(row.get("seconds") or 0.0)
    columns: list[tuple[int, str]] = [(-1, "")] * width
    for phase in row.get("timeline") or ():
        name = phase.get("phase")
        if name not in PHASE_STYLES or (name == "handoff" and not phase.get("error_code")):
            continue
        rank, _, style = PHASE_STYLES[name]
        first = int(float(phase["start"]) / scale * width)
        last = max(first, min(width - 1, int(float(phase["end"]) / scale * width - 1e-9)))
        for column in range(max(0, first), min(width, last + 1)):
            if rank > columns[column][0]:
                columns[column] = rank, style
    text = Text(no_wrap=True)
    for column, (_, style) in enumerate(columns):
        if style:
            text.append("█", style=style)
        else:
            text.append("─" if column / width * scale < seconds else " ", style="dim")
    if seconds > scale * 1.001 and width:
        text = text[: width - 1]
        text.append("»", style="bold")
    return text
