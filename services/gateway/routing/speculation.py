"""What the gateway has just sent where: prefixes that a node will hold in a moment, before the index says so.

Without an index these entries are all that routing knows of caches, so they live longer then.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from biphase.request import BlockHash

_MAX_BLOCKS = 200_000


class SpeculativeHolders:
    """Block hash -> nodes expected to hold it, each with an expiry. Oldest entries go first when it is full.

    Holders go by their incarnation, so that what a restarted node held before is never expected of it.
    """

    def __init__(
        self,
        *,
        lifetime_seconds: float,
        max_blocks: int = _MAX_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifetime_seconds = lifetime_seconds
        self._max_blocks = max_blocks
        self._clock = clock
        self._holders: OrderedDict[BlockHash, dict[str, float]] = OrderedDict()

    def add(self, holder: str, hashes: Sequence[BlockHash]) -> None:
        expiry = self._clock() + self._lifetime_seconds
        for block_hash in hashes:
            self._holders.setdefault(block_hash, {})[holder] = expiry
            self._holders.move_to_end(block_hash)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def num_leading_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        now = self._clock()
        lengths: dict[str, int] = {}
        for place, block_hash in enumerate(hashes):
            holders = self._holders.get(block_hash)
            if not holders:
                break
            going_on = False
            for holder, expiry in holders.items():
                if expiry > now and lengths.get(holder, 0) == place:
                    lengths[holder] = place + 1
                    going_on = True
            if not going_on:
                break
        return lengths
