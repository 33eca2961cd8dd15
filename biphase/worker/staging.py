"""KV blocks of a device, mirrored in the host memory that peers read and write.

Transports move host memory only. So every block that others may read is copied to the host before anybody hears of
it, and every block that was read from others is copied to the device before a step may use it:

    a runner's step ─> device blocks ─ save ─> host blocks ─> committed, announced, read by peers
    reads of peers' blocks ─> host blocks ─ load ─> device blocks ─> committed, run

Owns the copies and when they happen. Block n of the host mirrors block n of the device; bookkeeping knows one pool.
Not yet run with a GPU: tested with two memories on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from biphase.request import SamplingParams
from biphase.scheduler.output import RunnerOutput, SchedulerOutput
from biphase.steps import OverlappingRunner
from biphase.telemetry.events import event_logger

log = event_logger(__name__)

_CUDA_SUCCESS = 0


class HostMirror:
    """Copies whole blocks between two memories, whatever their bytes mean. Called in the engine's thread only."""

    def __init__(self, device_blocks: Tensor, host_blocks: Tensor) -> None:
        """
        Args:
            device_blocks, host_blocks: uint8 [num_blocks, block_bytes], contiguous, the latter on CPU.
        """
        assert device_blocks.shape == host_blocks.shape and device_blocks.dtype == host_blocks.dtype
        self.device_blocks = device_blocks
        self._device, self._host = device_blocks, host_blocks
        self._is_cuda = device_blocks.device.type == "cuda"
        self.num_saved = self.num_loaded = 0
        if self._is_cuda:
            _lock_pages(host_blocks)

    def save(self, block_ids: Sequence[int]) -> None:
        """Device to host; done when this returns."""
        for block_id in block_ids:
            self._host[block_id].copy_(self._device[block_id], non_blocking=True)
        self.num_saved += len(block_ids)
        self._wait()

    def begin_save(self, block_ids: Sequence[int]) -> torch.cuda.Event | None:
        """Device to host behind what was launched so far. The event says when; None and nothing done without a GPU."""
        if not self._is_cuda:
            return None
        for block_id in block_ids:
            self._host[block_id].copy_(self._device[block_id], non_blocking=True)
        self.num_saved += len(block_ids)
        saved = torch.cuda.Event()  # type: ignore[no-untyped-call]
        saved.record(torch.cuda.current_stream(self._device.device))
        return saved

    def load(self, block_ids: Sequence[int]) -> None:
        """Host to device; done when this returns, so that the host's block may be given to another read."""
        for block_id in block_ids:
            self._device[block_id].copy_(self._host[block_id], non_blocking=True)
        self.num_loaded += len(block_ids)
        self._wait()

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.current_stream(self._device.device).synchronize()


@dataclass(frozen=True, slots=True)
class _Staged:
    """A step of the other runner in flight; `final` is to be saved, or is on its way when `saved` is there."""

    pending: Any
    final: list[int]
    saved: torch.cuda.Event | None


class StagedRunner:
    """A Runner over another one: when a step is done, the blocks that became final lie in host memory too."""

    def __init__(self, runner: OverlappingRunner, mirror: HostMirror, block_size: int) -> None:
        self._runner, self._mirror, self._block_size = runner, mirror, block_size

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        result = self._runner.execute(output)
        final = final_blocks(output, self._block_size)
        if final:
            self._mirror.save(final)
        return result

    def begin(self, output: SchedulerOutput) -> _Staged:
        pending = self._runner.begin(output)
        final = final_blocks(output, self._block_size)
        # Before the next step is launched, for which a copy later on would have to wait.
        return _Staged(pending, final, self._mirror.begin_save(final) if final else None)

    def finish(self, pending: _Staged) -> RunnerOutput:
        try:
            result = self._runner.finish(pending.pending)
        finally:
            # Whatever came of the step: its blocks are free after this.
            if pending.saved is not None:
                pending.saved.synchronize()
        if pending.saved is None and pending.final:
            self._mirror.save(pending.final)
        return result

    def num_awaited_outputs(self, sampling: SamplingParams) -> int:
        return self._runner.num_awaited_outputs(sampling)


def final_blocks(output: SchedulerOutput, block_size: int) -> list[int]:
    """Blocks that a step brings into the state in which others may read them.

    Those are the blocks it fills, and at the end of a prefill_only request the last one, filled or not.
    """
    final: list[int] = []
    for scheduled in output.scheduled:
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        first, last = scheduled.num_computed_tokens // block_size, end // block_size
        if scheduled.samples and scheduled.request.prefill_only:
            last = -(-end // block_size)
        final.extend(scheduled.block_ids[first:last])
    return final


def _lock_pages(blocks: Tensor) -> None:
    """Lets the device copy at full speed, and beside the host's work."""
    code = int(torch.cuda.cudart().cudaHostRegister(blocks.data_ptr(), blocks.nbytes, 0))  # type: ignore[no-untyped-call]
    if code != _CUDA_SUCCESS:
        log.warning("host_memory_not_locked", cuda_error=code, consequence="blocks are staged at a lower speed")
