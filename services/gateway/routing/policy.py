"""The words of routing: what a policy sees and what it decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from biphase.request import BlockHash


@dataclass(slots=True, eq=False)
class NodeView:
    """One node's numbers at the moment of choosing. Token and block counts; seconds. For policies to read only."""

    incarnation: str
    num_running: int = 0
    num_waiting: int = 0
    # Of all its blocks, the share that requests hold; 0 to 1.
    used_block_share: float = 0.0
    # Uncached prompt tokens that wait there, as far as is known.
    num_queued_prefill_tokens: int = 0
    # Measured; 0 when not yet known.
    prefill_tokens_per_second: float = 0.0
    # Uncached prompt tokens that this gateway gave it so far.
    num_tokens_given: int = 0


@dataclass(frozen=True, slots=True)
class RouteRequest:
    request_id: str
    num_tokens: int
    # Incarnation -> leading blocks of this prompt that the node holds; nodes with none are absent. Block stores too.
    num_cached_blocks: Mapping[str, int] = field(default_factory=dict)
    block_size: int = 0
    # What any node can read from another: no fewer tokens than the most above, or 0 where nodes read nothing.
    num_fetchable_tokens: int = 0

    def num_cached_tokens(self, incarnation: str) -> int:
        return self.num_cached_blocks.get(incarnation, 0) * self.block_size


@dataclass(frozen=True, slots=True)
class Decision:
    """Nodes by incarnation. `prefills` in the order to try, best first; empty: decode prefills itself.

    `numbers` go into the log.
    """

    decode: str
    prefills: tuple[str, ...]
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class RoutingPolicy(Protocol):
    """Stateless but for what spreads ties; `choose` must be quick and must not wait."""

    name: str
    # Whether a request waits when the best node is too busy to take it; else it goes to the best of the others.
    waits_for_best: bool

    def choose(self, request: RouteRequest, decodes: Sequence[NodeView], prefills: Sequence[NodeView]) -> Decision:
        """`decodes` is not empty; `prefills` may be."""
        ...


class PrefixHolders(Protocol):
    """Who holds how much of a hash chain."""

    def num_leading_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Incarnation -> number of leading blocks it holds; nodes with none are absent."""
        ...
