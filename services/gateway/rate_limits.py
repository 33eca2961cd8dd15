"""Requests and tokens per minute of each API key: token buckets in Redis, so that several gateways share them.

A bucket holds one minute's worth and fills evenly. A request takes one from the one bucket and its prompt from the
other when it comes in, and its output when it ends; output may leave a debt, which the next requests wait for.
Without Redis the buckets are here. While Redis is away everybody passes, which is counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from biphase.errors import OverloadedError
from biphase.index.connection import REDIS_FAILURES, Client, key, tell_refusal
from biphase.telemetry.events import event_logger
from services.gateway.key_file import KeyGrant

log = event_logger(__name__)

_MINUTE = 60.0
# A Redis that failed is left alone for so long: a hanging one must not slow every request.
_PAUSE_SECONDS = 1.0
_MAX_LOCAL = 100_000

# KEYS[1]: the key's buckets. ARGV: requests and tokens per minute (0: no limit), requests and tokens to take, and 1
# when they are taken in any case. Returns whether it may pass, and both levels after it, as text since Lua's numbers
# are cut. Redis's own clock, so that gateways need not agree on theirs.
_SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local limits = {tonumber(ARGV[1]), tonumber(ARGV[2])}
local costs = {tonumber(ARGV[3]), tonumber(ARGV[4])}
local held = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local since = now - (tonumber(held[3]) or now)
if since < 0 then since = 0 end
local levels = {}
local passes = 1
for i = 1, 2 do
  local level = tonumber(held[i]) or limits[i]
  levels[i] = math.min(limits[i], level + since * limits[i] / 60)
  if limits[i] > 0 and costs[i] > 0 and levels[i] < math.min(costs[i], limits[i]) then passes = 0 end
end
if passes == 1 or ARGV[5] == '1' then
  for i = 1, 2 do levels[i] = levels[i] - costs[i] end
end
redis.call('HSET', KEYS[1], 'requests', tostring(levels[1]), 'tokens', tostring(levels[2]), 'at', tostring(now))
redis.call('EXPIRE', KEYS[1], 3600)
return {passes, tostring(levels[1]), tostring(levels[2])}
"""


@dataclass(slots=True)
class _Buckets:
    requests: float
    tokens: float
    at: float


@dataclass(frozen=True, slots=True)
class RateState:
    """What is left of a key's minute, for the headers."""

    grant: KeyGrant
    requests: float
    tokens: float

    def headers(self) -> dict[str, str]:
        told = {}
        for name, limit, level in (
            ("requests", self.grant.requests_per_minute, self.requests),
            ("tokens", self.grant.tokens_per_minute, self.tokens),
        ):
            if limit:
                told[f"x-ratelimit-limit-{name}"] = str(limit)
                told[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(level)))
                told[f"x-ratelimit-reset-{name}"] = f"{max(0.0, (limit - level) * _MINUTE / limit):.3f}s"
        return told


class RateLimitedError(OverloadedError):
    """The key has used up its minute."""

    def __init__(self, message: str, retry_after_seconds: float, state: RateState) -> None:
        super().__init__(message, retry_after_seconds)
        self.state = state


class RateLimits:
    """
    Args:
        redis: None without one.
        on_failure: called when a request passes unchecked.
    """

    def __init__(
        self,
        redis: Client | None,
        cluster: str,
        *,
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._cluster = cluster
        self._on_failure = on_failure
        self._clock = clock
        self._paused_until = 0.0
        self._local: dict[str, _Buckets] = {}

    async def take(self, grant: KeyGrant, *, requests: int = 0, tokens: int = 0) -> RateState | None:
        """Takes what a request needs; None when the key has no limits, or nobody could be asked.

        Raises:
            RateLimitedError: not now.
        """
        found = await self._apply(grant, requests, tokens, forced=False)
        if found is None:
            return None
        passes, state = found
        if passes:
            return state
        rpm, tpm = grant.requests_per_minute, grant.tokens_per_minute
        if requests and rpm and state.requests < 1:
            wait, told = (1 - state.requests) * _MINUTE / rpm, f"{rpm} requests"
        else:
            wait, told = (min(tokens, tpm) - state.tokens) * _MINUTE / max(1, tpm), f"{tpm} tokens"
        wait = max(0.0, wait)
        raise RateLimitedError(
            f"Rate limit reached: this API key may use {told} per minute. Please try again in {wait:.1f}s.", wait, state
        )

    async def debit(self, grant: KeyGrant, tokens: int) -> None:
        """Takes tokens that were used already."""
        if tokens:
            await self._apply(grant, 0, tokens, forced=True)

    async def _apply(
        self, grant: KeyGrant, requests: int, tokens: int, *, forced: bool
    ) -> tuple[bool, RateState] | None:
        rpm, tpm = grant.requests_per_minute, grant.tokens_per_minute
        if not rpm and not tpm:
            return None
        requests, tokens = requests if rpm else 0, tokens if tpm else 0
        if not requests and not tokens:
            return None
        if self._redis is None:
            return self._apply_here(grant, requests, tokens, forced)
        if self._clock() < self._paused_until:
            self._on_failure()
            return None
        name = key(self._cluster, "rate", grant.key_id)
        redis: Any = self._redis
        try:
            passes, left, left_tokens = await redis.eval(_SCRIPT, 1, name, rpm, tpm, requests, tokens, int(forced))
        except REDIS_FAILURES as error:
            tell_refusal(error)
            self._paused_until = self._clock() + _PAUSE_SECONDS
            self._on_failure()
            log.warning("rate_limits_unreachable", error=type(error).__name__)
            return None
        return bool(passes), RateState(grant, float(left), float(left_tokens))

    def _apply_here(self, grant: KeyGrant, requests: int, tokens: int, forced: bool) -> tuple[bool, RateState]:
        now = self._clock()
        limits = (float(grant.requests_per_minute), float(grant.tokens_per_minute))
        held = self._local.pop(grant.key_id, None) or _Buckets(*limits, now)
        if len(self._local) >= _MAX_LOCAL:
            del self._local[next(iter(self._local))]
        levels = [
            min(limit, level + (now - held.at) * limit / _MINUTE)
            for limit, level in zip(limits, (held.requests, held.tokens), strict=True)
        ]
        costs = (requests, tokens)
        passes = all(
            not limit or not cost or level >= min(cost, limit)
            for limit, cost, level in zip(limits, costs, levels, strict=True)
        )
        if passes or forced:
            levels = [level - cost for level, cost in zip(levels, costs, strict=True)]
        self._local[grant.key_id] = _Buckets(levels[0], levels[1], now)
        return passes, RateState(grant, levels[0], levels[1])
