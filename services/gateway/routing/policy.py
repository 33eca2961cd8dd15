"""The words of routing: what a policy sees and what it decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from biphase.request import BlockHash


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node's numbers at the moment of choosing. Token and block counts; seconds."""

    node_id: str
    num_running: int
    num_waiting: int
    # Of all its blocks, the share that requests hold; 0 to 1.
    used_block_share: float
    # Uncached prompt tokens that wait there, as far as is known.
    num_queued_prefill_tokens: int
    # Measured; 0 when not yet known.
    prefill_tokens_per_second: float
    # Leading tokens of this prompt that it holds.
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RouteRequest:
    request_id: str
    num_tokens: int
    # Longest leading run of tokens that any holder (the block store too) has.
    num_fetchable_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """`prefill_ids` in the order to try, best first; empty: decode prefills itself. `numbers` go into the log."""

    decode_id: str
    prefill_ids: tuple[str, ...]
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class RoutingPolicy(Protocol):
    """Stateless but for what spreads ties; `choose` must be quick and must not wait."""

    name: str

    def choose(self, request: RouteRequest, decodes: Sequence[NodeView], prefills: Sequence[NodeView]) -> Decision:
        """`decodes` is not empty; `prefills` may be."""
        ...


class PrefixHolders(Protocol):
    """Who holds how much of a hash chain."""

    def num_leading_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """Incarnation -> number of leading blocks it holds; nodes with none are absent."""
        ...
