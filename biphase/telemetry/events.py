"""One log line per event: a name and fields, as text for people or as JSON for machines.

`configure()` is called once per process; everywhere else `log = event_logger(__name__)` and
`log.info("prefill_done", num_tokens=...)`. What concerns a request has its `request_id`: the one
that the call names, or the one that the task works for (context.py). Secrets never go in: callers pass fields by name.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from biphase.telemetry import context


class EventLogger:
    """Writes events; a thin face on `logging` so that levels, capture and handlers work as everywhere."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """As `error`, with the traceback of the exception being handled."""
        self._logger.error(event, extra={"event_fields": _of_request(fields)}, exc_info=True)

    def _emit(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"event_fields": _of_request(fields)})


def _of_request(fields: dict[str, Any]) -> dict[str, Any]:
    """With the id of the request that the task works for, unless the caller named one."""
    request_id = context.request_id.get()
    return {"request_id": request_id, **fields} if request_id and "request_id" not in fields else fields


def event_logger(name: str) -> EventLogger:
    return EventLogger(logging.getLogger(name))


class TextFormatter(logging.Formatter):
    """One line for people: time, level, component, event, fields."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = getattr(record, "event_fields", {})
        rest = "".join(f" {key}={_text(value)}" for key, value in fields.items())
        head = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self._component} {record.getMessage()}{rest}"
        return head if not record.exc_info else head + "\n" + self.formatException(record.exc_info)


class _JsonFormatter(logging.Formatter):
    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "component": self._component,
            "event": record.getMessage(),
            **getattr(record, "event_fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text) if not text or any(c.isspace() or c in "\"'" for c in text) else text


def configure(component: str, *, log_format: str = "text", level: str = "info") -> None:
    """Sends all logging of this process to stderr.

    Args:
        component: who speaks, for example "decode-0".
        log_format: "text" or "json".
        level: "debug", "info", "warning" or "error".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(component) if log_format == "json" else TextFormatter(component))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("uvicorn.error", "uvicorn.access", "httpx", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
