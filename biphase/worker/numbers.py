"""A worker's numbers as others read them: its status for probes and people, its load for the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from biphase.index.registry import NodeLoad
from biphase.rpc.v1 import node_pb2
from biphase.scheduler.stats import EngineStats
from biphase.transfer.leases import LeaseCounts
from biphase.transfer.peer import PeerStats
from biphase.worker.offers import BlockOffers
from biphase.worker.prefixes import PrefixCounts


def node_status(
    state: str,
    uptime_seconds: float,
    stats: EngineStats,
    leases: LeaseCounts,
    peers: Sequence[PeerStats],
    counters: Mapping[str, int],
) -> node_pb2.NodeStatus:
    return node_pb2.NodeStatus(
        state=state,
        num_blocks=stats.num_blocks,
        num_used_blocks=stats.num_used_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_leased_blocks=leases.num_leased_blocks,
        num_draining_blocks=stats.num_draining_blocks,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_waiting_for_remote_kv=stats.num_waiting_for_remote_kv,
        num_queued_prefill_tokens=stats.num_queued_prefill_tokens,
        prefill_tokens_per_second=stats.prefill_tokens_per_second,
        decode_step_seconds=stats.decode_step_seconds,
        num_prefix_cache_queries_tokens=stats.prefix_cache_queries_tokens,
        num_prefix_cache_hits_tokens=stats.prefix_cache_hits_tokens,
        num_preemptions=stats.num_preemptions,
        uptime_seconds=uptime_seconds,
        peers=[
            node_pb2.PeerTransport(
                node_id=peer.node_id,
                transport=peer.transport,
                gigabytes_per_second=peer.gigabytes_per_second,
                bytes_read=peer.num_bytes,
            )
            for peer in peers
        ],
        counters=counters,
    )


def block_counters(offers: BlockOffers, prefixes: PrefixCounts) -> dict[str, int]:
    """What was offered to block stores and read from other nodes, for /status."""
    return {
        **{f"offers_{name.removeprefix('num_')}": value for name, value in asdict(offers.counts).items()},
        "offers_lost_blocks": offers.evictions.num_lost_blocks,
        "prefix_fetches": prefixes.num_fetches,
        "prefix_fetches_failed": prefixes.num_failed,
        "prefix_fetched_blocks": prefixes.num_fetched_blocks,
        "prefix_fetches_not_worth_it": prefixes.num_not_worth_it,
    }


def node_load(stats: EngineStats) -> NodeLoad:
    return NodeLoad(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_waiting_for_remote_kv=stats.num_waiting_for_remote_kv,
        num_blocks=stats.num_blocks,
        num_used_blocks=stats.num_used_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_queued_prefill_tokens=stats.num_queued_prefill_tokens,
        prefill_tokens_per_second=stats.prefill_tokens_per_second,
        decode_step_seconds=stats.decode_step_seconds,
    )
