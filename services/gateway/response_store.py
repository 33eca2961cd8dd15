"""Responses that can be asked for again and continued: in Redis for all gateways, or here when there is none.

Owns their keys, their time to live and their size limits. What is here alone ends with this process and is known to
this gateway alone; that is the case without Redis, and for what is stored while Redis is away.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from biphase.index.connection import REDIS_FAILURES, Client, key, tell_refusal
from biphase.telemetry.events import event_logger

log = event_logger(__name__)

MAX_RECORD_BYTES = 4 * 2**20
_MAX_LOCAL_RECORDS = 1024
_MAX_LOCAL_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`history` is every item before this response's own input; `owner` names the API key it belongs to."""

    response: dict[str, Any]
    input: list[dict[str, Any]]
    history: list[dict[str, Any]]
    owner: str

    def conversation(self) -> list[dict[str, Any]]:
        """All items up to and with this response's output: what the next one goes on from."""
        return [*self.history, *self.input, *self.response["output"]]

    def to_json(self) -> str:
        fields = {"response": self.response, "input": self.input, "history": self.history, "owner": self.owner}
        return json.dumps(fields, separators=(",", ":"))


class ResponseStore:
    """
    Args:
        redis: None without one.
        seconds: how long a response is kept.
    """

    def __init__(
        self, redis: Client | None, cluster: str, *, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis = redis
        self._cluster = cluster
        self._seconds = seconds
        self._clock = clock
        self._local: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._local_bytes = 0

    async def put(self, record: StoredResponse) -> bool:
        """Whether it is kept: what is too large is not, and the caller's answer stands all the same."""
        text = record.to_json()
        response_id = str(record.response["id"])
        if len(text) > MAX_RECORD_BYTES:
            # Without its id, which is a secret.
            log.warning("response_too_large_to_store", bytes=len(text))
            return False
        await self._set(response_id, text)
        return True

    async def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """None when there is none, it is too old, or it is somebody else's."""
        text = await self._get(response_id)
        if text is None:
            return None
        record = StoredResponse(**json.loads(text))
        return record if record.owner == owner else None

    async def append_events(self, response_id: str, events: Sequence[bytes], *, anew: bool = False) -> bool:
        """Adds to the events that the response has told.

        Args:
            anew: they are all of them, in place of what is there.

        Returns:
            False: Redis is away. It may have them or not, so that the next time all are to be told anew.
        """
        name = _events_id(response_id)
        if self._redis is None:
            before = None if anew else self._held(name)
            self._keep_here(name, (before or "") + b"".join(events).decode())
            return True
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                if anew:
                    pipe.delete(self._key(name))
                pipe.rpush(self._key(name), *events)
                pipe.pexpire(self._key(name), self._milliseconds)
                await pipe.execute()
        except REDIS_FAILURES as error:
            _unreachable(error)
            return False
        return True

    def keep_events_here(self, response_id: str, events: Sequence[bytes]) -> None:
        """For all events of a response that has ended while Redis was away."""
        self._keep_here(_events_id(response_id), b"".join(events).decode())

    async def events(self, response_id: str, start: int) -> list[bytes]:
        """The events that were stored, from the start-th on."""
        name = _events_id(response_id)
        held = self._held(name)
        if held is not None:
            return [f"{event}\n\n".encode() for event in held.split("\n\n")[:-1]][start:]
        if self._redis is None:
            return []
        redis: Any = self._redis
        try:
            return list(await redis.lrange(self._key(name), start, -1))
        except REDIS_FAILURES as error:
            _unreachable(error)
            return []

    async def delete(self, response_id: str) -> None:
        names = (response_id, _events_id(response_id))
        for name in names:
            self._forget(name)
        if self._redis is not None:
            try:
                await self._redis.delete(*map(self._key, names))
            except REDIS_FAILURES as error:
                _unreachable(error)

    async def ask_cancel(self, response_id: str) -> None:
        """Tells the gateway that runs it, whichever it is."""
        await self._set(_cancel_id(response_id), "1")

    async def is_cancel_asked(self, response_id: str) -> bool:
        return await self._get(_cancel_id(response_id)) is not None

    async def _set(self, name: str, text: str) -> None:
        if self._redis is not None:
            try:
                await self._redis.set(self._key(name), text, px=self._milliseconds)
            except REDIS_FAILURES as error:
                _unreachable(error)
            else:
                self._forget(name)
                return
        self._keep_here(name, text)

    def _keep_here(self, name: str, text: str) -> None:
        self._forget(name)
        self._local[name] = (self._clock() + self._seconds, text)
        self._local_bytes += len(text)
        while len(self._local) > _MAX_LOCAL_RECORDS or self._local_bytes > _MAX_LOCAL_BYTES:
            self._forget(next(iter(self._local)))

    async def _get(self, name: str) -> str | None:
        held = self._held(name)
        if held is not None:
            return held
        if self._redis is None:
            return None
        try:
            value: Any = await self._redis.get(self._key(name))
        except REDIS_FAILURES as error:
            _unreachable(error)
            return None
        return value.decode() if isinstance(value, bytes) else value

    def _held(self, name: str) -> str | None:
        held = self._local.get(name)
        if held is None:
            return None
        if held[0] > self._clock():
            return held[1]
        self._forget(name)
        return None

    def _forget(self, name: str) -> None:
        held = self._local.pop(name, None)
        if held is not None:
            self._local_bytes -= len(held[1])

    @property
    def _milliseconds(self) -> int:
        return max(1, int(self._seconds * 1000))

    def _key(self, name: str) -> str:
        return key(self._cluster, "response", name)


def _cancel_id(response_id: str) -> str:
    return f"{response_id}:cancel"


def _events_id(response_id: str) -> str:
    return f"{response_id}:events"


def _unreachable(error: Exception) -> None:
    tell_refusal(error)
    log.warning("response_store_unreachable", error=type(error).__name__)
