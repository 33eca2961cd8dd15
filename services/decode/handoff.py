"""The hand-off: a prompt's KV from a prefill worker into the blocks reserved here, chunk by chunk.

Owns asking the candidates in order, reading blocks while the next chunk is computed, and the check that what came is
what was asked for. What one candidate delivered and was verified is kept when the next one takes over; when nobody is
left, the engine here computes the rest. No token leaves before the worker named token count and chain hash, and no
decoding starts before every block is in and verified.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from biphase.cache.hashing import commit_hash, extend_block_hashes, root_hash
from biphase.engine import Reserved
from biphase.errors import BiphaseError
from biphase.request import BlockHash, Request
from biphase.rpc.messages import logprobs_from_proto, sampling_to_proto
from biphase.rpc.spans import shifted
from biphase.rpc.v1 import common_pb2, decode_pb2, prefill_pb2
from biphase.scheduler.output import SampledToken
from biphase.telemetry.events import event_logger
from biphase.transfer.channels import ReadResult
from biphase.transfer.collector import BlockCollector
from biphase.transfer.layout import KVLayout
from biphase.transfer.reslice import Reslice
from biphase.worker.worker import Worker
from services.decode.attempt import Attempt, OutOfPatienceError
from services.decode.patience import Patience

log = event_logger(__name__)

# Reads told in a report, about; a long prompt has more.
_MAX_READS_TOLD = 64


@dataclass(slots=True)
class HandoffCounts:
    """What reads of this request came to, over all candidates."""

    num_failures: int = 0
    num_bytes: int = 0
    read_seconds: float = 0.0
    exposed_seconds: float = 0.0
    transport: str = "none"
    # Incarnations of candidates that did not answer, or not any more.
    silent: list[str] = field(default_factory=list)


class Handoff:
    """One request's hand-off. `run` once, after the engine reserved the blocks."""

    def __init__(
        self,
        worker: Worker,
        patience: Patience,
        request: Request,
        candidates: Sequence[decode_pb2.PrefillCandidate],
        deadline: float | None = None,
    ) -> None:
        """
        Args:
            deadline: of the whole request, monotonic seconds; None: there is none.
        """
        self.worker = worker
        self.patience = patience
        self._deadline = deadline
        self._request = request
        self._candidates = candidates
        self._started = time.monotonic()
        self._dest_block_ids: Sequence[int] = ()
        # Why the prompt was computed here after all.
        self._local_reason = "prefill_failed"
        self._token_ids = request.all_token_ids
        self._counts = HandoffCounts()
        self._done: prefill_pb2.PrefillDone | None = None
        self._prefill_node_id = ""
        # To be sent with the first token.
        self.prompt_logprobs: list[common_pb2.TokenLogprobs] = []
        # Where the time went, in seconds since the request came here.
        self.spans: list[common_pb2.Span] = []

    async def run(self, reserved: Reserved) -> None:
        """Fills the reserved blocks and lets the engine go on.

        The caller holds references to the blocks until this returns. Cancelled: returns when no read is posted any
        more, and the engine is not told.
        """
        worker, request = self.worker, self._request
        engine, block_size = worker.engine, worker.settings.block_size
        self._dest_block_ids = reserved.block_ids
        collector = BlockCollector(
            request.block_hashes,
            commit_hash(request.block_hashes, worker.root_hash(request.cache_salt), self._token_ids, block_size),
            num_tokens=len(self._token_ids),
            block_size=block_size,
            dest_block_ids=reserved.block_ids,
            first_index=reserved.num_cached_tokens // block_size,
        )
        self._started = time.monotonic()
        candidates = sorted(
            self._candidates, key=lambda known: self.patience.is_distrusted(known.incarnation, self._started)
        )
        for place, candidate in enumerate(candidates, 1):
            collector.restart()
            attempt = Attempt(self, candidate, collector, is_last=place == len(candidates))
            started, code = time.monotonic(), ""
            try:
                done = await attempt.run()
            except BiphaseError as error:
                self._counts.num_failures += 1
                if attempt.is_silent:
                    self._counts.silent.append(candidate.incarnation)
                code = error.code.value
                log.warning(
                    "handoff_failed",
                    request_id=request.request_id,
                    prefill_node=candidate.node_id,
                    code=error.code.value,
                    error=error.message,
                    num_kept_tokens=collector.num_full_tokens,
                )
                continue
            except OutOfPatienceError:
                self._local_reason = code = "prefill_slow"
                log.info("prefill_slow", request_id=request.request_id, prefill_node=candidate.node_id,
                         waited_seconds=time.monotonic() - self._started)  # fmt: skip
                break
            finally:
                self._note("handoff", candidate.node_id, started, error_code=code)
                await attempt.quiesce()
            self.spans += shifted(done.spans, started - request.arrival_time)
            self._done, self._prefill_node_id = done, candidate.node_id
            self.prompt_logprobs = list(done.prompt_logprobs)
            engine.kv_ready(
                request.request_id,
                num_valid_tokens=len(self._token_ids),
                num_external_tokens=len(self._token_ids) - reserved.num_cached_tokens,
                first_token=SampledToken(
                    done.first_token_id,
                    logprobs_from_proto(done.first_logprobs) if done.HasField("first_logprobs") else None,
                ),
            )
            return
        collector.restart()
        # The last token is computed here even if its block came: its logits are what is missing.
        num_valid = min(collector.num_contiguous_tokens, len(self._token_ids) - 1)
        if request.sampling.prompt_logprobs is not None:
            # What tokens that came would have been predicted from was only ever on the other worker.
            num_valid = 0
        log.warning(
            "prefill_falls_back", request_id=request.request_id, reason=self._local_reason, num_kept_tokens=num_valid
        )
        engine.kv_ready(
            request.request_id,
            num_valid_tokens=num_valid,
            num_external_tokens=max(0, num_valid - reserved.num_cached_tokens),
        )

    def fill(self, report: common_pb2.RequestReport, num_tokens: int) -> None:
        """Says in the report how the request's KV came about. Token counts add up to `num_tokens`."""
        counts = self._counts
        report.num_prefill_failures = counts.num_failures
        report.ClearField("silent_prefill_incarnations")
        report.silent_prefill_incarnations.extend(counts.silent)
        report.transport = counts.transport
        report.transfer_bytes = counts.num_bytes
        report.transfer_seconds = counts.read_seconds
        report.exposed_transfer_seconds = counts.exposed_seconds
        if self._done is None:
            report.prefill_mode, report.reason = "local", self._local_reason
            report.prefill_node_id = report.decode_node_id
            report.num_transferred_tokens = self._request.num_external_tokens
            report.num_computed_tokens = num_tokens - report.num_cached_tokens
            return
        done = self._done
        report.prefill_node_id = self._prefill_node_id
        report.num_transferred_tokens = num_tokens - report.num_cached_tokens
        # The prefill worker's tokens stand in this order: cached, read from a third node, computed. What decode had
        # itself covers the first of them, whatever they were there.
        own = report.num_cached_tokens
        cached_end = max(own, done.num_cached_tokens)
        external_end = max(cached_end, done.num_cached_tokens + done.num_external_tokens)
        report.num_prefill_cached_tokens = cached_end - own
        report.num_external_tokens = external_end - cached_end
        report.num_computed_tokens = num_tokens - external_end
        report.queue_seconds += done.queue_seconds
        report.prefill_seconds = done.prefill_seconds

    def collector_for(self, holder: KVLayout, num_held_tokens: int) -> BlockCollector:
        """For a candidate whose blocks are cut another way: its indexes and its hash chain, our blocks.

        Args:
            num_held_tokens: as the candidate was told.

        Raises:
            LayoutMismatchError: they do not fit.
        """
        plan = Reslice(self.worker.layout, holder)
        plan.require_all_heads()
        size = holder.block_size_tokens
        root = root_hash(holder.namespace, self._request.cache_salt)
        hashes: list[BlockHash] = []
        extend_block_hashes(hashes, root, self._token_ids, size)
        return BlockCollector(
            hashes,
            commit_hash(hashes, root, self._token_ids, size),
            num_tokens=len(self._token_ids),
            block_size=size,
            dest_block_ids=self._dest_block_ids,
            first_index=num_held_tokens // size,
            plan=plan,
            first_token=num_held_tokens,
        )

    def remaining_seconds(self) -> float | None:
        """What is left of the request's time; the prefill worker gets no more."""
        return None if self._deadline is None else max(0.001, self._deadline - time.monotonic())

    def patience_seconds(self) -> float | None:
        """How much longer it is worth waiting for the first token; None: as long as it takes."""
        stats = self.worker.engine.stats()
        seconds = self.patience.prefill_seconds(
            self._request.num_uncached_tokens, stats.prefill_tokens_per_second, is_decoding=stats.num_running > 0
        )
        return None if seconds is None else self._started + seconds - time.monotonic()

    def message(self, num_held_tokens: int) -> prefill_pb2.PrefillRequest:
        worker, request = self.worker, self._request
        return prefill_pb2.PrefillRequest(
            request_id=request.request_id,
            token_ids=self._token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=sampling_to_proto(request.sampling),
            num_held_tokens=num_held_tokens,
            priority=request.priority,
            cache_salt=request.cache_salt,
            layout=worker.layout.to_proto(),
            reader_node_id=worker.node_id,
            reader_incarnation=worker.incarnation,
        )

    def _note(self, phase: str, node_id: str, started: float, *, num_bytes: int = 0, error_code: str = "") -> None:
        """A stretch of the request's way that ends now."""
        arrival = self._request.arrival_time
        self.spans.append(
            common_pb2.Span(
                phase=phase,
                node_id=node_id,
                start_seconds=started - arrival,
                end_seconds=time.monotonic() - arrival,
                num_bytes=num_bytes,
                error_code=error_code,
            )
        )

    def took(self, result: ReadResult) -> None:
        if len(self.spans) < _MAX_READS_TOLD and (result.num_bytes or result.error is not None):
            started = time.monotonic() - result.seconds
            self._note("read", self.worker.node_id, started, num_bytes=result.num_bytes, error_code=result.error_code)
        self._counts.num_bytes += result.num_bytes
        self._counts.read_seconds += result.seconds
        if result.transport != "none":
            self._counts.transport = result.transport

    def exposed(self, since: float) -> None:
        """Blocks have come since then, monotonic seconds, that nothing else was waited for."""
        self._counts.exposed_seconds += time.monotonic() - since
        self._note("exposed", self.worker.node_id, since)
