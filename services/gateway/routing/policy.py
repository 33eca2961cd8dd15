"""The words of routing: what a policy sees and what it decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from biphase.request import BlockHash

# Before a node has measured itself. Only ratios between nodes matter then, and these are equal for all.
DEFAULT_PREFILL_RATE = 2000.0
# What one more running sequence costs a decode worker, and a full block pool, in seconds.
_RUNNING_SECONDS = 0.002
_WAITING_SECONDS = 0.05
_FULL_POOL_SECONDS = 2.0
# Of the tokens that a node was given lately, the share that counts against it.
_SPREAD_SHARE = 0.02
# Of what a node has in flight, at most so much counts as done before it says so.
_MOST_PROGRESS = 0.9


@dataclass(slots=True, eq=False)
class NodeView:
    """One node's numbers at the moment of choosing. Token and block counts; seconds. For policies to read only.

    Whoever changes one calls `weigh`, which works out what policies read of all nodes at every decision.
    """

    incarnation: str
    num_running: int = 0
    num_waiting: int = 0
    # Of all its blocks, the share that requests hold; 0 to 1.
    used_block_share: float = 0.0
    # Uncached prompt tokens that wait there, as far as is known.
    num_queued_prefill_tokens: int = 0
    # Of these, what this gateway has there, and since when the node is at it: how far it is shows only at its end.
    num_prefill_tokens_in_flight: int = 0
    prefill_since: float = 0.0
    # Measured; 0 when not yet known.
    prefill_tokens_per_second: float = 0.0
    # Prompt tokens to compute that this gateway gave it lately: what is longer ago counts for less.
    num_tokens_given: float = 0.0

    seconds_per_token: float = field(init=False)
    # What a sequence more pays, on decode, for what is there already.
    load_seconds: float = field(init=False)
    # When what is queued for prefill is expected to be done, as far as it can be on the clock of `prefill_since`, and
    # how long that takes from now on at least. Both with a little for what the node was given lately.
    prefilled_at: float = field(init=False)
    least_wait_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.weigh()

    def weigh(self) -> None:
        self.seconds_per_token = seconds = 1.0 / (self.prefill_tokens_per_second or DEFAULT_PREFILL_RATE)
        self.load_seconds = (
            self.num_running * _RUNNING_SECONDS
            + self.num_waiting * _WAITING_SECONDS
            # A pool that is nearly full will preempt; half full is no reason to avoid it.
            + self.used_block_share**4 * _FULL_POOL_SECONDS
        )
        queued = self.num_queued_prefill_tokens + self.num_tokens_given * _SPREAD_SHARE
        in_flight = self.num_prefill_tokens_in_flight
        self.least_wait_seconds = (queued - in_flight * _MOST_PROGRESS) * seconds
        self.prefilled_at = self.prefill_since + queued * seconds if in_flight else -math.inf


@dataclass(frozen=True, slots=True)
class RouteRequest:
    request_id: str
    num_tokens: int
    # Incarnation -> leading blocks of this prompt that the node holds; nodes with none are absent. Block stores too.
    num_cached_blocks: Mapping[str, int] = field(default_factory=dict)
    block_size: int = 0
    # What any node can read from another now; not what some are only about to hold. 0 where nodes read nothing.
    num_fetchable_tokens: int = 0
    # On the clock of NodeView.prefill_since.
    now: float = 0.0

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
