"""Makes Redis clients that are safe to serve behind: bounded waits, one retry on a dead connection, no surprises.

Owns the URL schemes and the names of the keys. All keys of one biphase cluster carry the same hash tag, so that they
share a slot in a Redis Cluster and can be read and written together.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias, cast
from urllib.parse import parse_qs, unquote, urlsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, RedisClusterException, RedisError

from biphase.errors import ConfigError
from biphase.telemetry.events import event_logger

log = event_logger(__name__)

# What a call on a client may raise when the server is away, refuses or hangs. Cancellation is none of them.
REDIS_FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError)

Client: TypeAlias = Redis

# What this process was refused so far, in the server's words; no more than these are kept, and told.
_refusals: set[str] = set()
_MAX_REFUSALS = 64

_SCHEMES = "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"


def connect(url: str, *, timeout_seconds: float = 2.0) -> Client:
    """A client for `url`; nothing is sent before the first command.

    `redis+sentinel://[user:password@]host:port[,host:port]/<service>[?db=0]` asks sentinels for the master;
    `redis+cluster://host:port` joins a Redis Cluster; `rediss+...` is the same with TLS to the data nodes.

    Args:
        timeout_seconds: longest wait for a connection or an answer. Blocking reads must ask for less than this.

    Raises:
        ConfigError: not a URL of a known scheme.
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        # A pooled connection may have died with its server. A timeout is not retried: it would only double the wait.
        "retry": Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
    }
    scheme = urlsplit(url).scheme
    try:
        if scheme in ("redis+sentinel", "rediss+sentinel"):
            return _through_sentinel(url, options)
        if scheme in ("redis+cluster", "rediss+cluster"):
            cluster = RedisCluster.from_url(url.replace("+cluster", "", 1), socket_timeout=timeout_seconds)
            # The commands used here exist on both, and all keys share one slot.
            return cast(Client, cluster)
        if scheme in ("redis", "rediss", "unix"):
            return Redis.from_pool(ConnectionPool.from_url(url, **options))
    except (ValueError, RedisClusterException) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--redis-url: {reason}") from error
    raise ConfigError(f"--redis-url must start with {_SCHEMES}")


def _through_sentinel(url: str, options: dict[str, Any]) -> Client:
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    service = parts.path.strip("/")
    if not service:
        raise ConfigError("--redis-url: redis+sentinel:// needs the master's name as its path")
    addresses = []
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        addresses.append((name or port, int(port) if name else 26379))
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        addresses, sentinel_kwargs={"socket_timeout": options["socket_timeout"]}
    )
    database = int(parse_qs(parts.query).get("db", ["0"])[0])
    if parts.scheme == "rediss+sentinel":
        options = {**options, "ssl": True}
    secrets = {"username": unquote(username) or None, "password": unquote(password) or None}
    return cast(
        Client,
        sentinel.master_for(service, connection_pool_class=_MasterPool, db=database, **secrets, **options),
    )


class _MasterPool(SentinelConnectionPool):
    """Connections to the master. Closes those to the sentinels with them, which nobody else does."""

    async def aclose(self) -> None:
        await super().aclose()
        for client in self.sentinel_manager.sentinels:
            await client.aclose()


def tell_refusal(error: BaseException) -> None:
    """For whoever goes on after one of REDIS_FAILURES: says once, by name, what the server's ACL does not let us do.

    It looks like an outage to those who call, and never passes by itself.
    """
    words = str(error)
    # Of a script's own calls it is told as an error of the script.
    if not isinstance(error, NoPermissionError) and "ACL failure" not in words:
        return
    if words not in _refusals and len(_refusals) < _MAX_REFUSALS:
        _refusals.add(words)
        log.error("redis_permission_missing", error=words, help="docs/redis.md: A user with just what is needed")


def heed_cancellation() -> None:
    """For loops around Redis calls: raises CancelledError where a cancellation was asked for and got lost.

    The client turns cancellations into time-outs of its own when the two meet; a loop that goes on after failures
    would then go on for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def key(cluster: str, *parts: str) -> str:
    """`biphase:{cluster}:part:part`; the braces are Redis Cluster's hash tag."""
    return ":".join((f"biphase:{{{cluster}}}", *parts))
