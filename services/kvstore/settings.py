"""Settings of the block store."""

from __future__ import annotations

from dataclasses import dataclass

from biphase.errors import ConfigError
from biphase.settings import (
    NODE_FLAGS,
    Flag,
    NodeSettings,
    fraction,
    non_negative,
    num_bytes,
    positive,
    positive_seconds,
)
from biphase.telemetry.settings import METRICS_FLAGS, MetricsSettings
from biphase.transfer.selection import check_transports

KVSTORE_FLAGS = (
    *NODE_FLAGS,
    *METRICS_FLAGS,
    Flag("capacity", num_bytes, 2**30, "memory for KV blocks, for example 4GiB"),
    Flag("disk-path", str, "", "folder of the disk tier; empty: none"),
    Flag("disk-capacity", num_bytes, 8 * 2**30, "size of the disk tier"),
    Flag("max-namespaces", positive, 1, "models (namespaces) held at once; they share capacity equally"),
    Flag("tenant-quota", fraction, 1.0, "share of the capacity that the blocks of one cache_salt may take"),
    Flag("max-offers", positive, 8, "offers read at once; more are refused"),
    Flag("max-promoted-blocks", non_negative, 0, "blocks read from disk for one lease; 0: 64 MiB of them"),
    Flag("lease-seconds", positive_seconds, 10.0, "a block lease ends this long after its last renewal"),
    Flag("transfer-timeout-seconds", positive_seconds, 10.0, "one read of KV blocks may take this long"),
    Flag("transports", str, ("shm", "tcp"), "transports to use for KV blocks, best first", many=True),
)


@dataclass(frozen=True, kw_only=True)
class KvstoreSettings(NodeSettings, MetricsSettings):
    """One field per flag in KVSTORE_FLAGS; see there for meaning and units."""

    capacity: int
    disk_path: str
    disk_capacity: int
    max_namespaces: int
    tenant_quota: float
    max_offers: int
    max_promoted_blocks: int
    lease_seconds: float
    transfer_timeout_seconds: float
    transports: tuple[str, ...]

    def check(self) -> None:
        """
        Raises:
            ConfigError: a setting, or two together, make no sense.
        """
        check_transports(self.transports)
        if self.capacity // self.max_namespaces < 2**20:
            raise ConfigError(
                f"--capacity {self.capacity} for --max-namespaces {self.max_namespaces} leaves less than 1 MiB for each"
            )
