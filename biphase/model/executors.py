"""Which executor runs a model: the compiled program on CPU, Triton and CUDA graphs on a GPU, plain torch elsewhere.

Owns the choice and saying it loudly when it is not the fast one.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from biphase.model.eager import EagerForward
from biphase.model.forward import Forward
from biphase.model.loader import LoadedModel
from biphase.telemetry.events import event_logger

log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Sizes of steps, and what to use. `num_threads` and `nice` are the CPU program's."""

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_threads: int
    nice: int
    # Compiled kernels; without, plain torch.
    native: bool
    # On a GPU: record decode batches in CUDA graphs.
    cuda_graphs: bool


@dataclass(frozen=True, slots=True)
class Executor:
    """`name` is "native" (CPU), "gpu" or "eager"."""

    forward: Forward
    name: str
    # Whether a call waits for a device before it returns; never said of calls that compute on the host.
    waits: bool = False

    @property
    def feeds(self) -> bool:
        """Whether the forward pass puts tokens that are on the device alone into the batch (`ForwardBatch.fed`)."""
        return self.name == "gpu"

    @property
    def takes_host_batches(self) -> bool:
        """Whether batches come on CPU whatever the device."""
        return self.name != "eager"


def choose_executor(model: LoadedModel, kv_cache: Tensor, options: ExecutorOptions) -> Executor:
    """The fastest executor that there is for the model where its KV cache lies."""
    if options.native:
        try:
            if kv_cache.device.type == "cpu":
                return Executor(_native(model, kv_cache, options), "native")
            # Experts are chosen on the host.
            return Executor(_gpu(model, kv_cache, options), "gpu", waits=model.spec.moe is not None)
        except _Unavailable as error:
            log.warning(
                "native_kernels_unavailable",
                reason=str(error),
                consequence="this worker runs plain torch and is several times slower",
            )
    eager = EagerForward(model.spec, model.dense_weights(), kv_cache, max_model_len=options.max_model_len)
    return Executor(eager, "eager", waits=kv_cache.device.type != "cpu")


class _Unavailable(Exception):
    pass


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise _Unavailable(str(error) or type(error).__name__) from error


def _native(model: LoadedModel, kv_cache: Tensor, options: ExecutorOptions) -> Forward:
    module = _load("biphase.ops.cpu_program")
    try:
        program = module.CpuProgram(
            model.spec,
            model.weights,
            kv_cache,
            block_size=options.block_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            dtype=model.dtype,
            num_threads=options.num_threads,
            nice=options.nice,
            integer_dot=model.quantization != "none",
        )
    except (ImportError, OSError, NotImplementedError, module.LibraryUnavailableError) as error:
        raise _Unavailable(str(error) or type(error).__name__) from error
    return cast(Forward, program)


def _gpu(model: LoadedModel, kv_cache: Tensor, options: ExecutorOptions) -> Forward:
    module = _load("biphase.model.gpu_forward")
    forward = module.GpuForward(
        model.spec,
        model.weights_for(module.ops.can_multiply),
        kv_cache,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        recorder=module.CudaGraphs() if options.cuda_graphs else None,
    )
    return cast(Forward, forward)
