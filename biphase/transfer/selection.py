"""Which transport carries the bytes between two nodes: what both can do, the fastest or the first the reader names.

Owns the choice and the saying of it: a transport that was asked for and cannot be had is an error, or a warning where
falling back is allowed; never silence.
"""

from __future__ import annotations

import platform
import time
from dataclasses import replace

from biphase.errors import ConfigError, TransferFailedError
from biphase.telemetry.events import event_logger
from biphase.transfer.channels import Channel, ReaderContext, Tick
from biphase.transfer.endpoint import Endpoint, host_id
from biphase.transfer.nixl import NixlChannel
from biphase.transfer.nixl_agent import load_nixl
from biphase.transfer.reslice import Reslice
from biphase.transfer.shm import ShmChannel
from biphase.transfer.staged import StagedChannel, staging_memory
from biphase.transfer.tcp import TcpChannel

log = event_logger(__name__)

TRANSPORTS = ("shm", "tcp", "nixl")
# Processors that show one process's writes to another in the order in which they were made. A copy out of shared memory
# is checked by reading the block's generation before and after; elsewhere that would take fences.
_STRONGLY_ORDERED = ("x86_64", "AMD64")
# Where one transport works, so long is spent on trying another; and it has to be so much faster to be taken.
_COMPARE_SECONDS = 1.0
_LEAD = 1.25
# Why shared memory is no option between most nodes of a cluster: nothing to warn of.
_FAR = "another host or network namespace"


def check_transports(transports: tuple[str, ...]) -> None:
    """
    Raises:
        ConfigError: an unknown transport, or none.
    """
    unknown = [name for name in transports if name not in TRANSPORTS]
    if unknown or not transports:
        raise ConfigError(f"transports {','.join(transports)!r}: choose from {', '.join(TRANSPORTS)}")


def open_channel(endpoint: Endpoint, context: ReaderContext, deadline: float, on_tick: Tick) -> Channel:
    """Connects by the first transport that works, to a holder of the same layout or of one cut another way.

    Raises:
        LayoutMismatchError, StaleHandleError, UnauthorizedError: the holder refused; no other transport would help.
        TransferFailedError: none works, or the first does not and falling back is not allowed.
    """
    plan = Reslice(context.layout, endpoint.layout)
    if plan.is_identity:
        return _open(endpoint, context, deadline, on_tick)
    staging = staging_memory(endpoint.layout.block_bytes)
    try:
        inner = _open(endpoint, replace(context, memory=staging, layout=endpoint.layout), deadline, on_tick)
        return StagedChannel(inner, staging, plan, context.memory)
    except BaseException:
        staging.close()
        raise


def _open(endpoint: Endpoint, context: ReaderContext, deadline: float, on_tick: Tick) -> Channel:
    passed_over: list[str] = []
    best: Channel | None = None
    for name in context.transports:
        reason = _obstacle(name, endpoint)
        if reason is not None and reason != _FAR:
            log.warning("transport_unavailable", peer=endpoint.node_id, transport=name, reason=reason)
        elif reason is None:
            limit = deadline if best is None else min(deadline, time.monotonic() + _COMPARE_SECONDS)
            try:
                channel = _connect(name, endpoint, context, limit, on_tick)
            except TransferFailedError as error:
                # It should have worked: worth a warning even where the next one does.
                log.warning("transport_failed", peer=endpoint.node_id, transport=name, reason=error.message)
                reason = error.message
            except BaseException:
                if best is not None:
                    best.close()
                raise
            else:
                best, slower = _faster(best, channel)
                if slower is not None:
                    passed_over.append(f"{slower.transport}: {slower.gigabytes_per_second:.2f} GB/s")
                    slower.close()
                if not context.by_speed:
                    break
        if reason is not None:
            passed_over.append(f"{name}: {reason}")
        if not context.allow_fallback:
            break
    if best is None:
        raise TransferFailedError(f"no transport to {endpoint.node_id}: {'; '.join(passed_over)}")
    log.info(
        "transport_chosen",
        peer=endpoint.node_id,
        transport=best.transport,
        gigabytes_per_second=round(best.gigabytes_per_second, 2),
        passed_over="; ".join(passed_over) or "none",
    )
    return best


def _faster(one: Channel | None, other: Channel) -> tuple[Channel, Channel | None]:
    """The faster of two by their test patterns, and the one to close. Without a clear lead, the one named first."""
    if one is None:
        return other, None
    if other.gigabytes_per_second > _LEAD * one.gigabytes_per_second:
        return other, one
    return one, other


def _obstacle(name: str, endpoint: Endpoint) -> str | None:
    if name not in endpoint.transports:
        return "not offered"
    if name == "shm" and (not endpoint.host_id or endpoint.host_id != host_id()):
        return _FAR
    if name == "shm" and platform.machine() not in _STRONGLY_ORDERED:
        return f"generations are not checked safely on {platform.machine()}"
    if name == "nixl":
        try:
            load_nixl()
        except ConfigError as error:
            return error.message
    return None


def _connect(name: str, endpoint: Endpoint, context: ReaderContext, deadline: float, on_tick: Tick) -> Channel:
    if name == "shm":
        return ShmChannel.connect(endpoint, context, deadline, on_tick)
    if name == "nixl":
        return NixlChannel.connect(endpoint, context, deadline, on_tick)
    return TcpChannel.connect(endpoint, context, deadline, on_tick)
