"""Where a holder serves block reads, as plain data.

Owns addresses and who is behind them. Owns no sockets. A handle is valid only together with the incarnation here.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from biphase.errors import InvalidRequestError
from biphase.rpc.v1 import common_pb2
from biphase.transfer.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Field by field as TransferEndpoint in common.proto."""

    node_id: str
    incarnation: str
    tcp_address: str
    transports: tuple[str, ...]
    layout: KVLayout
    shm_address: str = ""
    host_id: str = ""

    def to_proto(self) -> common_pb2.TransferEndpoint:
        return common_pb2.TransferEndpoint(
            node_id=self.node_id,
            incarnation=self.incarnation,
            tcp_address=self.tcp_address,
            transports=self.transports,
            layout=self.layout.to_proto(),
            shm_address=self.shm_address,
            host_id=self.host_id,
        )

    @classmethod
    def from_proto(cls, message: common_pb2.TransferEndpoint) -> Endpoint:
        """
        Raises:
            InvalidRequestError: the endpoint names nobody.
        """
        if not message.node_id or not message.incarnation:
            raise InvalidRequestError("a transfer endpoint needs a node id and an incarnation")
        return cls(
            node_id=message.node_id,
            incarnation=message.incarnation,
            tcp_address=message.tcp_address,
            transports=tuple(message.transports),
            layout=KVLayout.from_proto(message.layout),
            shm_address=message.shm_address,
            host_id=message.host_id,
        )


@functools.cache
def host_id() -> str:
    """Equal for two processes that can reach each other's abstract unix sockets: same boot, same network namespace.

    Containers of one machine usually have different ones, and then talk tcp.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""
