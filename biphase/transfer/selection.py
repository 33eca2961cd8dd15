"""Which transport carries the bytes between two nodes: what both sides can do, in the order of the reader's choice.

Owns the choice and the saying of it: a transport that was asked for and cannot be had is an error, or a warning where
falling back is allowed; never silence.
"""

from __future__ import annotations

from biphase.errors import ConfigError, TransferFailedError
from biphase.telemetry.events import event_logger
from biphase.transfer.channels import Channel, ReaderContext, Tick
from biphase.transfer.endpoint import Endpoint, host_id
from biphase.transfer.nixl import NixlChannel
from biphase.transfer.nixl_agent import load_nixl
from biphase.transfer.shm import ShmChannel
from biphase.transfer.tcp import TcpChannel

log = event_logger(__name__)

TRANSPORTS = ("shm", "tcp", "nixl")
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
    """Connects by the first transport that works.

    Raises:
        LayoutMismatchError, StaleHandleError, UnauthorizedError: the holder refused; no other transport would help.
        TransferFailedError: none works, or the first does not and falling back is not allowed.
    """
    passed_over: list[str] = []
    for name in context.transports:
        reason = _obstacle(name, endpoint)
        if reason is not None and reason != _FAR:
            log.warning("transport_unavailable", peer=endpoint.node_id, transport=name, reason=reason)
        elif reason is None:
            try:
                channel = _connect(name, endpoint, context, deadline, on_tick)
            except TransferFailedError as error:
                # It should have worked: worth a warning even where the next one does.
                log.warning("transport_failed", peer=endpoint.node_id, transport=name, reason=error.message)
                reason = error.message
            else:
                log.info(
                    "transport_chosen",
                    peer=endpoint.node_id,
                    transport=name,
                    gigabytes_per_second=round(channel.gigabytes_per_second, 2),
                    passed_over="; ".join(passed_over) or "none",
                )
                return channel
        passed_over.append(f"{name}: {reason}")
        if not context.allow_fallback:
            break
    raise TransferFailedError(f"no transport to {endpoint.node_id}: {'; '.join(passed_over)}")


def _obstacle(name: str, endpoint: Endpoint) -> str | None:
    if name not in endpoint.transports:
        return "not offered"
    if name == "shm" and (not endpoint.host_id or endpoint.host_id != host_id()):
        return _FAR
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
