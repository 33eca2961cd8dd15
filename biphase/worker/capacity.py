"""How many KV blocks fit: from a number, from bytes, or from the memory there is."""

from __future__ import annotations

from dataclasses import dataclass

from biphase.errors import ConfigError
from biphase.model.spec import ModelSpec
from biphase.worker.settings import WorkerSettings

_CPU_SHARE = 0.1
# Of the host's available memory that a GPU's mirrored blocks may take.
_MIRROR_SHARE = 0.7
# CUDA graphs, kernels, libraries' workspaces and what the allocator loses to fragments.
_DEVICE_RESERVE_BYTES = 2 * 2**30
_CPU_LIMIT_BYTES = 2 * 2**30


def available_memory_bytes() -> int:
    """MemAvailable of the host, or what is left of the control group's limit when that is less."""
    available = 0
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            text = limit.read().strip()
            if text != "max":
                available = min(available, int(text) - int(current.read()))
    except OSError:
        pass  # No control group v2 here: the host's figure stands.
    return max(available, 0)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU's memory after the weights were loaded, in bytes, and what a step will need beside weights and cache."""

    total_bytes: int
    free_bytes: int
    working_bytes: int


def working_bytes(spec: ModelSpec, max_num_tokens: int, max_num_seqs: int, item_bytes: int) -> int:
    """Bytes that the largest step needs for what flows between layers, logits included. An estimate from above."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    intermediate = spec.intermediate_size
    if spec.moe is not None:
        intermediate = spec.moe.expert_intermediate_size * spec.moe.num_experts_per_token
    per_token = (6 * spec.hidden_size + 2 * heads + 3 * intermediate) * item_bytes
    per_row = spec.vocab_size * (item_bytes + 4 * 4)
    return max_num_tokens * per_token + max_num_seqs * per_row + _DEVICE_RESERVE_BYTES


def num_kv_blocks(
    settings: WorkerSettings, block_bytes: int, max_model_len: int, device: DeviceMemory | None = None
) -> int:
    """Blocks of the KV pool.

    Args:
        block_bytes: size of one block.
        max_model_len: tokens of the longest request.
        device: a GPU's memory; None on CPU. The host mirrors a GPU's blocks, so they have to fit there too.

    Raises:
        ConfigError: not even one request of full length would fit.
    """
    if settings.num_blocks:
        num_blocks, origin = settings.num_blocks, "--num-blocks"
    elif settings.kv_cache_bytes is not None:
        num_blocks, origin = settings.kv_cache_bytes // block_bytes, "--kv-cache-bytes"
    elif device is not None:
        kept = int(device.total_bytes * (1.0 - settings.gpu_memory_utilization))
        size, origin = device.free_bytes - kept - device.working_bytes, "--gpu-memory-utilization"
        mirror = int(available_memory_bytes() * _MIRROR_SHARE)
        if mirror < size:
            size, origin = mirror, "the host's available memory, where a GPU's KV blocks are mirrored,"
        num_blocks = max(size, 0) // block_bytes
    else:
        size = min(int(available_memory_bytes() * _CPU_SHARE), _CPU_LIMIT_BYTES)
        num_blocks, origin = size // block_bytes, "a tenth of the available memory"
    needed = -(-max_model_len // settings.block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"{origin} gives {num_blocks} KV blocks of {block_bytes} bytes, but one request of --max-model-len "
            f"{max_model_len} tokens needs {needed}: give more memory or a smaller --max-model-len"
        )
    return int(num_blocks)
