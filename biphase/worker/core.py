"""What a worker computes with: the loaded model, its runner, the KV memory and the bookkeeping over it.

Everything that can refuse a model or a setting happens here, before the process listens anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from biphase.cache.block_pool import BlockPool
from biphase.cache.hashing import namespace_digest
from biphase.cache.manager import KVCacheManager
from biphase.cache.memory import BlockMemory, SharedGenerations
from biphase.cache.tensors import kv_block_bytes, kv_dtype_name, kv_dtype_of, kv_view, raw_tensor
from biphase.engine import SchedulerConfig
from biphase.errors import ConfigError
from biphase.grammar.library import GrammarLibrary
from biphase.model.loader import LoadedModel, load_model
from biphase.model.source import resolve_model
from biphase.rpc.v1 import node_pb2
from biphase.runner import ModelRunner
from biphase.steps import OverlappingRunner
from biphase.telemetry.events import event_logger
from biphase.tokenizer.loader import load_tokenizer
from biphase.transfer.layout import KVLayout
from biphase.worker.capacity import num_kv_blocks
from biphase.worker.devices import device_memory, resolve_device
from biphase.worker.settings import WorkerSettings
from biphase.worker.staging import HostMirror, StagedRunner

log = event_logger(__name__)

# Part of the namespace: the order of a block's bytes (biphase.cache.tensors).
_LAYOUT_NAME = "layers,kv,heads,tokens,dims"


@dataclass(frozen=True, slots=True)
class WorkerCore:
    runner: OverlappingRunner
    # To be called with blocks that were read from other nodes, before a step may use them.
    blocks_arrived: Callable[[Sequence[int]], None]
    memory: BlockMemory
    generations: SharedGenerations
    pool: BlockPool
    manager: KVCacheManager
    scheduler_config: SchedulerConfig
    layout: KVLayout
    model: node_pb2.ModelInfo
    grammars: GrammarLibrary


def build_core(settings: WorkerSettings, role: str) -> WorkerCore:
    """Loads the model and lays out the KV memory.

    Args:
        role: "prefill" or "decode"; decides the scheduling policy where none was given.

    Raises:
        ModelLoadError: the model cannot be used.
        ConfigError: a setting does not fit the model or the machine.
    """
    device = resolve_device(settings.device)
    source = resolve_model(settings.model)
    # The compiled program decodes blocks as it multiplies: the same logits from a third of the memory.
    keep_blocks = settings.native_kernels and device.type == "cpu"
    model = load_model(source, settings.dtype, device, settings.quantization, keep_blocks=keep_blocks)
    spec = model.spec
    max_model_len = settings.max_model_len or spec.max_position_embeddings
    if max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the {spec.max_position_embeddings} tokens of the model"
        )
    kv_dtype = kv_dtype_of(settings.kv_cache_dtype, model.dtype)
    shape = (spec.num_layers, spec.num_kv_heads, settings.block_size, spec.head_dim, kv_dtype)
    block_bytes = kv_block_bytes(*shape)
    free = device_memory(device, spec, settings.max_num_batched_tokens, settings.max_num_seqs, model.dtype.itemsize)
    num_blocks = num_kv_blocks(settings, block_bytes, max_model_len, free)
    # Touched now: a read that takes page faults on its way in is three times slower.
    memory = BlockMemory(num_blocks, block_bytes, populate=True)
    generations = SharedGenerations(num_blocks)
    pool = BlockPool(num_blocks, settings.enable_prefix_caching, generations=generations.table)
    layout = _layout(model, kv_dtype_name(kv_dtype), settings.block_size, block_bytes)
    manager = KVCacheManager(pool, block_size=settings.block_size, namespace=layout.namespace)
    policy = settings.scheduling_policy or ("shortest_first" if role == "prefill" else "fcfs")
    grammars = GrammarLibrary(lambda: load_tokenizer(source).tokenizer, spec.vocab_size)
    blocks = raw_tensor(memory)
    mirror = None if shares_memory(device) else HostMirror(torch.zeros_like(blocks, device=device), blocks)
    runner: OverlappingRunner = ModelRunner(
        model,
        kv_view(blocks if mirror is None else mirror.device_blocks, *shape),
        block_size=settings.block_size,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        num_threads=settings.num_threads or len(os.sched_getaffinity(0)),
        native=settings.native_kernels,
        nice=settings.nice,
        cuda_graphs=not settings.enforce_eager,
        grammars=grammars,
    )
    if mirror is not None:
        runner = StagedRunner(runner, mirror, settings.block_size)
    return WorkerCore(
        runner=runner,
        blocks_arrived=_nothing if mirror is None else mirror.load,
        memory=memory,
        generations=generations,
        pool=pool,
        manager=manager,
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_waiting=settings.max_waiting,
            policy=policy,
            max_mixed_prefill_tokens=settings.max_mixed_prefill_tokens,
            overlap=overlaps(settings.overlap_scheduling, device),
        ),
        layout=layout,
        model=node_pb2.ModelInfo(
            model=settings.model or source.default_served_name,
            served_names=settings.served_model_name or (source.default_served_name,),
            vocab_size=spec.vocab_size,
            max_model_len_tokens=max_model_len,
            dtype=str(model.dtype).removeprefix("torch."),
            architecture=spec.architecture,
            tokenizer_digest=model.tokenizer_digest,
        ),
        grammars=grammars,
    )


def shares_memory(device: torch.device) -> bool:
    """Whether steps compute in the very memory that peers read and write."""
    return device.type == "cpu"


def overlaps(overlap_scheduling: str, device: torch.device) -> bool:
    """Whether steps overlap: "auto" says so where the device computes while the host decides, which a CPU does not."""
    return overlap_scheduling == "on" or (overlap_scheduling == "auto" and device.type != "cpu")


def _nothing(block_ids: Sequence[int]) -> None:
    return None


def _layout(model: LoadedModel, kv_dtype: str, block_size: int, block_bytes: int) -> KVLayout:
    spec = model.spec
    content = {
        "weights": model.weights_digest,
        "tokenizer": model.tokenizer_digest,
        # Keys and values of rounded activations differ from those of exact ones.
        "quantization": model.quantization,
        # What keys and values were computed in, and what they are kept in.
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": kv_dtype,
        "layout": _LAYOUT_NAME,
        "rope": repr((spec.rope, spec.local_rope)),
        "adapter": "",
    }
    return KVLayout(
        namespace=namespace_digest({**content, "block_size": str(block_size)}),
        family=namespace_digest(content),
        kv_dtype=kv_dtype,
        block_size_tokens=block_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_bytes=block_bytes,
    )
