"""Who prefills a prompt: a prefill worker, or decode itself (conditional disaggregation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from biphase.request import Request
from biphase.rpc.v1 import decode_pb2
from biphase.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class PrefillMode:
    """`reason` is the word in RequestReport.reason and in metrics."""

    remote: bool
    reason: str


def choose_prefill_mode(
    worker: Worker,
    request: Request,
    candidates: Sequence[decode_pb2.PrefillCandidate],
    local_reason: str,
) -> PrefillMode:
    """Decides by how many tokens nobody here has computed yet.

    A short rest after a hit in decode's own cache is quicker computed here than by a worker that may have to read that
    prefix first. The gateway sends no candidates, and says why, when all are busy with longer work. Prompts below
    `min_remote_prefill_tokens` stay here as well, if the operator says so.
    """
    if not candidates:
        if local_reason:
            return PrefillMode(False, local_reason)
        return PrefillMode(False, "no_candidate" if worker.has_prefill_nodes() else "aggregated_mode")
    worker.manager.prepare(request)
    uncached = request.num_uncached_tokens
    num_cached = request.num_tokens - uncached
    if num_cached and uncached <= worker.settings.max_local_suffix_tokens:
        return PrefillMode(False, "cached")
    if uncached < worker.settings.min_remote_prefill_tokens:
        return PrefillMode(False, "short_prompt")
    return PrefillMode(True, "disaggregated")
