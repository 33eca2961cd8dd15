"""All regions of one store process: which namespaces it holds, and what it says about itself.

Owns the choice which namespaces get a region, and the counters. Owns no RPC and no life cycle of the process.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from biphase.errors import BiphaseError, LayoutMismatchError, UnavailableError
from biphase.index.publisher import IndexPublisher
from biphase.request import BlockHash
from biphase.telemetry.events import event_logger
from biphase.transfer.channels import ReadResult
from biphase.transfer.layout import KVLayout
from services.kvstore.disk import LAYOUT_FILE
from services.kvstore.region import Identity, Region
from services.kvstore.settings import KvstoreSettings

log = event_logger(__name__)

_NUM_DISK_READERS = 2
# A namespace that nobody has used for so long makes room for another one.
_IDLE_SECONDS = 600.0

# Makes the publisher of a namespace, given what is held in it.
PublisherFactory = Callable[[bytes, Callable[[], Sequence[BlockHash]]], IndexPublisher | None]


class BlockStore:
    """For one event loop. `start` brings back what is on disk; `close` ends everything."""

    def __init__(self, settings: KvstoreSettings, identity: Identity, publisher: PublisherFactory) -> None:
        self._settings = settings
        self._identity = identity
        self._publisher = publisher
        # Told of each read of an offer that has ended, in the thread that ended it.
        self.observe_read: Callable[[ReadResult], None] = lambda result: None
        self._regions: dict[bytes, Region] = {}
        self._choosing = asyncio.Lock()
        self._executor = ThreadPoolExecutor(_NUM_DISK_READERS, thread_name_prefix="disk-read")
        self._disk_folder = Path(settings.disk_path) if settings.disk_path else None

    @property
    def regions(self) -> Sequence[Region]:
        return tuple(self._regions.values())

    def start(self) -> None:
        """Opens the namespaces that an earlier life left on disk, the last used ones first; drops what is too many."""
        layouts = self._layouts_on_disk()
        for layout in layouts[self._settings.max_namespaces :]:
            log.info("namespace_dropped", namespace=layout.namespace.hex()[:16])
            self._remove_folder(layout.namespace)
        for layout in layouts[: self._settings.max_namespaces]:
            try:
                self._open(layout)
            except BiphaseError as error:
                log.warning("namespace_not_reopened", namespace=layout.namespace.hex()[:16], error=error.message)

    def region(self, layout: KVLayout) -> Region | None:
        """The region of a layout, or None when nothing of its namespace is held.

        Raises:
            LayoutMismatchError: the namespace is held in another layout.
        """
        region = self._regions.get(layout.namespace)
        if region is not None:
            difference = region.layout.difference(layout)
            if difference is not None:
                raise LayoutMismatchError(f"blocks of {self._identity.node_id} are of another kind: {difference}")
        return region

    async def region_for_offer(self, layout: KVLayout) -> Region:
        """The region of a layout; made, if need be in the place of one that nobody uses.

        Raises:
            LayoutMismatchError: it is another kind than those held, and there is no room for one more.
            UnavailableError: no memory for it.
        """
        async with self._choosing:
            region = self.region(layout)
            if region is not None:
                return region
            if len(layout.namespace) != 32 or not 0 < layout.block_bytes <= self._capacity_bytes:
                raise LayoutMismatchError(
                    f"a block of {layout.block_bytes} bytes does not fit into {self._capacity_bytes} bytes of "
                    f"{self._identity.node_id}: give it more --capacity"
                )
            if len(self._regions) >= self._settings.max_namespaces:
                await self._make_room(layout)
            return self._open(layout)

    def reset(self) -> bool:
        """Forgets every block, in memory and on disk, that nobody reads or writes just now. Whether none are left."""
        return all([region.reset() for region in self.regions])

    async def close(self, disk_timeout_seconds: float) -> None:
        for region in self.regions:
            await region.close(disk_timeout_seconds)
        self._regions.clear()
        self._executor.shutdown()

    def counters(self) -> dict[str, int]:
        """Everything that is counted, by name, over all regions."""
        totals: dict[str, int] = {"num_namespaces": len(self._regions)}
        for region in self.regions:
            parts = [asdict(region.counts), asdict(region.intake.counts), asdict(region.residency.counts)]
            parts.append({"num_tenants": region.residency.num_tenants})
            served = region.server.stats()
            parts.append({"num_blocks_sent": served.num_blocks_sent, "num_bytes_sent": served.num_bytes_sent})
            if region.disk is not None:
                counts = asdict(region.disk.counts)
                parts.append({f"disk_{name.removeprefix('num_')}": value for name, value in counts.items()})
                parts.append({"disk_blocks": len(region.disk)})
            if region.holdings.publisher is not None:
                counts = asdict(region.holdings.publisher.stats)
                parts.append({f"index_{name.removeprefix('num_')}": value for name, value in counts.items()})
            for part in parts:
                for name, value in part.items():
                    totals[name] = totals.get(name, 0) + value
        return totals

    @property
    def _capacity_bytes(self) -> int:
        return self._settings.capacity // self._settings.max_namespaces

    def _open(self, layout: KVLayout) -> Region:
        folder = None if self._disk_folder is None else self._disk_folder / layout.namespace.hex()
        try:
            region = Region(
                layout,
                self._identity,
                self._settings,
                capacity_bytes=self._capacity_bytes,
                disk_folder=folder,
                disk_capacity_bytes=self._settings.disk_capacity // self._settings.max_namespaces,
                publisher=lambda held: self._publisher(layout.namespace, held),
                executor=self._executor,
            )
        except (MemoryError, OSError) as error:
            raise UnavailableError(f"{self._identity.node_id} cannot hold namespace: {error}") from error
        self._regions[layout.namespace] = region
        region.reader.observe = self.observe_read
        region.start()
        log.info(
            "namespace_opened",
            namespace=layout.namespace.hex()[:16],
            num_blocks=region.pool.num_blocks,
            block_bytes=layout.block_bytes,
            disk=folder is not None,
        )
        return region

    async def _make_room(self, layout: KVLayout) -> None:
        """Closes a region that came from disk and was never asked for, or that has been idle for long."""
        limit = time.monotonic() - _IDLE_SECONDS
        idle = [
            (since, region) for region in self.regions if (since := region.idle_since()) is not None and since < limit
        ]
        if not idle:
            (held, *_) = self.regions
            raise LayoutMismatchError(
                f"{self._identity.node_id} holds another kind of blocks already ({held.layout.difference(layout)}): "
                "start it with a higher --max-namespaces"
            )
        _, region = min(idle, key=lambda entry: entry[0])
        del self._regions[region.layout.namespace]
        log.info("namespace_closed", namespace=region.layout.namespace.hex()[:16], used=region.used)
        await region.close(disk_timeout_seconds=0.0)
        await asyncio.to_thread(self._remove_folder, region.layout.namespace)

    def _remove_folder(self, namespace: bytes) -> None:
        if self._disk_folder is not None:
            shutil.rmtree(self._disk_folder / namespace.hex(), ignore_errors=True)

    def _layouts_on_disk(self) -> list[KVLayout]:
        if self._disk_folder is None:
            return []
        found: list[tuple[float, KVLayout]] = []
        for path in self._disk_folder.glob(f"*/{LAYOUT_FILE}"):
            try:
                layout = KVLayout.from_json(json.loads(path.read_text()))
                if layout.namespace.hex() != path.parent.name or not 0 < layout.block_bytes <= self._capacity_bytes:
                    raise ValueError("it does not belong there")
                found.append((path.stat().st_mtime, layout))
            except (OSError, ValueError) as error:
                log.warning("namespace_unreadable", folder=str(path.parent), error=str(error))
        return [layout for _, layout in sorted(found, key=lambda entry: -entry[0])]
