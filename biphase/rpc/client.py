"""Channels to other biphase processes: one per address, kept and shared.

Keepalive pings find a peer that froze or a link that went down within five seconds; TCP alone reports it after minutes,
or never. They are answered by gRPC's own threads, so that a peer that is merely busy is not taken for a frozen one.
"""

from __future__ import annotations

import grpc

from biphase.rpc.carrying import carried
from biphase.rpc.metadata import MetadataChannel
from biphase.rpc.trust import OPEN, Trust

_OPTIONS = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # What counts in practice: without it a ping waits a minute, whatever the keepalive's own timeout says.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    # A restarted worker is back within a second or two; the default back-off would leave it unused for minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class ChannelPool:
    """address ("host:port") -> channel. For one event loop.

    Args:
        trust: what is shown to whoever is called, and asked of it.
    """

    def __init__(self, trust: Trust = OPEN) -> None:
        self._trust = trust
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = MetadataChannel(self._trust.aio_channel(address, _OPTIONS), carried)
        return channel

    async def forget(self, address: str) -> None:
        """Closes the channel of a peer that is gone for good; calls in flight on it are cancelled."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
