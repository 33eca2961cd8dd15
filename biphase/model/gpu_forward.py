"""The forward pass on a GPU: decode batches are replayed from CUDA graphs, all others run launch by launch.

Owns the batch sizes that are recorded, and the padding to the next of them. The graphs hold addresses: of the inputs
(`gpu_inputs`), the weights, the KV cache and the logits, all of which stay where they are. Not yet run on a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from biphase.model.forward import ForwardBatch
from biphase.model.gpu import GpuModel
from biphase.model.gpu_inputs import StepInputs
from biphase.model.quantised import Weight
from biphase.model.spec import ModelSpec
from biphase.ops import gpu as ops
from biphase.telemetry.events import event_logger

log = event_logger(__name__)


class Recorder(Protocol):
    """Makes launches repeatable."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs `run` as often as it takes to record its launches. Returns what launches them again."""
        ...


class CudaGraphs:
    """Records CUDA graphs that share one pool of memory. One thread uses it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        # Once in earnest: kernels are compiled and libraries set up, which a recording must not see.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


def recorded_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to record: close together where a decode step is short, and the largest that can come."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 32)]
    return (*(size for size in steps if size < max_num_seqs), max_num_seqs)


class GpuForward:
    """A `Forward`. Batches come on CPU; logits are on the device."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, Weight],
        kv_cache: Tensor,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        recorder: Recorder | None = None,
    ) -> None:
        """
        Args:
            weights: canonical names; see `GpuModel` for what happens to them.
            kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
            recorder: records decode batches now; None runs them launch by launch.
        """
        self._spec = spec
        device = kv_cache.device
        self._model = GpuModel(spec, weights, kv_cache, max_model_len=max_model_len)
        max_blocks = -(-(max_model_len + 1) // kv_cache.shape[4])
        self._inputs = StepInputs(device, max_num_batched_tokens, max_num_seqs, max_blocks)
        self._logits = torch.zeros(max_num_seqs, spec.vocab_size, dtype=torch.float32, device=device)
        self._sizes = recorded_sizes(max_num_seqs)
        self._replays: dict[int, Callable[[], None]] = {}
        if recorder is not None and self._model.can_be_recorded:
            self._record(recorder)

    @torch.inference_mode()
    def _record(self, recorder: Recorder) -> None:
        empty = ForwardBatch(
            token_ids=torch.empty(0, dtype=torch.int32),
            positions=torch.empty(0, dtype=torch.int32),
            slot_mapping=torch.empty(0, dtype=torch.int64),
            query_start_loc=torch.zeros(1, dtype=torch.int32),
            seq_lens=torch.empty(0, dtype=torch.int32),
            block_tables=torch.empty(0, 0, dtype=torch.int32),
            logits_indices=torch.empty(0, dtype=torch.int32),
        )
        # The largest first: what it took from the pool does for the others.
        for size in reversed(self._sizes):
            self._inputs.load(empty, size)
            batch = self._inputs.view(size, size, size)
            self._replays[size] = recorder.record(lambda batch=batch: self._run(batch))  # type: ignore[misc]
        log.info("decode_recorded", num_batch_sizes=len(self._replays))

    def _run(self, batch: ForwardBatch) -> None:
        logits = self._model(batch)
        self._logits[: logits.shape[0]].copy_(ops.softcap(logits.float(), self._spec.final_softcap))

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Float32 logits [num_logits, vocab_size] on the device, valid until the next call."""
        num_tokens, num_seqs = batch.token_ids.shape[0], batch.seq_lens.shape[0]
        num_logits = batch.logits_indices.shape[0]
        if num_tokens == 0:
            return self._logits[:0]
        if num_tokens == num_seqs and self._replays:
            size = self._sizes[bisect_left(self._sizes, num_seqs)]
            loaded = self._inputs.load(batch, size)
            # Logits of every row were recorded.
            self._replays[size]()
            if num_logits == num_seqs:
                return self._logits[:num_seqs]
            return self._logits[loaded.logits_indices]
        self._run(self._inputs.load(batch, num_seqs))
        return self._logits[:num_logits]
