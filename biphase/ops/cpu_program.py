"""The native forward pass on CPU: one call of the compiled library runs a whole step.

Owns the program's life and the border to C. What it runs is written by `cpu_tape`, computed in kernels/cpu/src.

Batch-invariant: a token's logits depend on its own sequence alone, bit for bit. It makes no difference what else is in
the batch, how the prompt was cut into chunks, or how many threads run; only the instruction set does.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from biphase.model.forward import ForwardBatch
from biphase.model.quantised import Weight
from biphase.model.spec import ModelSpec
from biphase.ops.cpu_tape import DTYPES, TapeBuilder, refusal
from kernels.cpu.library import Dtype, Isa, LibraryUnavailableError, Model, Op, Step, available_isas, best_isa, load
from kernels.reference_fp8 import is_codes_view

__all__ = ["CpuProgram", "LibraryUnavailableError"]


class CpuProgram:
    """A `Forward`. One step at a time; its threads sleep between steps. Weights are copied, packed: the caller may
    drop its own (an untied embedding table is read in place and kept alive)."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        kv_cache: Tensor,
        *,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        num_threads: int = 0,
        nice: int = 0,
        isa: Isa | None = None,
        integer_dot: bool = False,
    ) -> None:
        """
        Args:
            weights: canonical names, see `biphase.model.spec`. Quantised matrices stay packed where there is a kernel
                for their blocks; the result is the same, bit for bit, as with the dequantised ones.
            kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of `dtype`, contiguous; or in
                fp8 with exponents, as `kernels.reference_fp8` says.
            dtype: bfloat16 (float32 sums and residual stream) or float32 (everything).
            num_threads: the calling thread included; 0 takes every core this process may use.
            nice: added to the niceness of the pool's threads, and of a thread that calls the program.
            isa: instruction set; None takes the machine's best.
            integer_dot: multiply packed matrices as small integers, with activations quantised to int8 in groups of
                32: faster, and approximate.

        Raises:
            NotImplementedError: the model needs what no kernel here does; run it eagerly.
            LibraryUnavailableError: the kernels are not compiled.
            ValueError: the KV cache does not fit the model.
        """
        reason = refusal(spec, dtype)
        if reason is not None:
            raise NotImplementedError(f"the CPU kernels do not support {reason}")
        shape = (spec.num_layers, 2, spec.num_kv_heads, block_size, spec.head_dim)
        lies_well = (kv_cache.dtype == dtype and kv_cache.is_contiguous()) or is_codes_view(kv_cache)
        if kv_cache.shape[1:] != shape or not lies_well:
            raise ValueError(
                f"the KV cache must be contiguous [num_blocks, {', '.join(map(str, shape))}] of {dtype}, or fp8, "
                f"not {list(kv_cache.shape)} of {kv_cache.dtype}"
            )
        lib = load()
        self.isa = best_isa() if isa is None else isa
        if self.isa not in available_isas():
            raise NotImplementedError(f"this machine does not run {self.isa.name}")
        self.num_threads = num_threads or len(os.sched_getaffinity(0))
        self._lib = lib
        self._spec = spec
        self._max_tokens, self._max_seqs = max_num_batched_tokens, max_num_seqs
        self._kv_cache = kv_cache
        self._lock = threading.Lock()
        self._logits = torch.empty(max_num_seqs, spec.vocab_size, dtype=torch.float32)
        tape = TapeBuilder(lib, spec, weights, dtype, max_num_batched_tokens, max_model_len, integer_dot)
        self._arena, self._kept = tape.arena, tape.kept
        self.num_ops = len(tape.ops)
        self.op_kinds = [op.kind for op in tape.ops]
        model = Model(
            dtype=DTYPES[dtype],
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rope.rotary_dim,
            num_layers=spec.num_layers,
            block_size=block_size,
            max_tokens=max_num_batched_tokens,
            max_seqs=max_num_seqs,
            norm_eps=spec.norm_eps,
            kv_cache=kv_cache.data_ptr(),
            kv_dtype=Dtype.FP8 if kv_cache.dtype != dtype else DTYPES[dtype],
        )
        ops = (Op * self.num_ops)(*tape.ops)
        self._step = Step()
        self._program = lib.bp_program_create(
            ctypes.byref(model), ctypes.byref(ops), self.num_ops, self.num_threads, nice, self.isa
        )
        if not self._program:
            self._arena.close()
            raise MemoryError("cannot start the CPU program")

    @property
    def num_weight_and_buffer_bytes(self) -> int:
        """Memory that the program holds of its own."""
        return self._arena.num_bytes_used

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Float32 logits [num_logits, vocab_size], valid until the next call.

        Raises:
            ValueError: more tokens than the buffers hold.
        """
        num_tokens, num_seqs = batch.token_ids.shape[0], batch.seq_lens.shape[0]
        num_logits = batch.logits_indices.shape[0]
        if num_tokens > self._max_tokens:
            raise ValueError(f"{num_tokens} tokens in one step; this program holds {self._max_tokens}")
        assert batch.slot_mapping.dtype == torch.int64 and batch.block_tables.is_contiguous()
        assert batch.token_ids.dtype == batch.positions.dtype == batch.block_tables.dtype == torch.int32
        assert batch.query_start_loc.dtype == batch.seq_lens.dtype == batch.logits_indices.dtype == torch.int32
        logits = self._logits
        if num_logits > self._max_seqs:
            # Prompt logprobs: rare, and too big to keep.
            logits = torch.empty(num_logits, self._spec.vocab_size, dtype=torch.float32)
        if num_tokens == 0:
            return logits[:0]
        with self._lock:
            step = self._step
            step.num_tokens, step.num_seqs, step.num_logits = num_tokens, num_seqs, num_logits
            step.block_table_stride = batch.block_tables.shape[1]
            step.token_ids = batch.token_ids.data_ptr()
            step.positions = batch.positions.data_ptr()
            step.slot_mapping = batch.slot_mapping.data_ptr()
            step.query_start_loc = batch.query_start_loc.data_ptr()
            step.seq_lens = batch.seq_lens.data_ptr()
            step.block_tables = batch.block_tables.data_ptr()
            step.logits_indices = batch.logits_indices.data_ptr()
            step.logits = logits.data_ptr()
            self._lib.bp_program_run(self._program, ctypes.byref(step))
        return logits[:num_logits]

    def profile(self, enable: bool) -> None:
        """Turns the clock around every op on or off; see `op_seconds`."""
        self._lib.bp_program_profile(self._program, int(enable))

    def op_seconds(self) -> list[float]:
        """Seconds in each op of the tape, waiting included, since the last call of this; kinds are in `op_kinds`."""
        seconds = (ctypes.c_double * self.num_ops)()
        self._lib.bp_program_times(self._program, seconds, 1)
        return list(seconds)

    def close(self) -> None:
        """Ends the threads and frees the memory. Idempotent."""
        if self._program:
            self._lib.bp_program_destroy(self._program)
            self._program = None
            self._arena.close()

    def __del__(self) -> None:
        if getattr(self, "_program", None):
            self.close()
