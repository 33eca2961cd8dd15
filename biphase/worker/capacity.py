"""How many KV blocks fit: from a number, from bytes, or from the memory there is."""

from __future__ import annotations

from biphase.errors import ConfigError
from biphase.worker.settings import WorkerSettings

_CPU_SHARE = 0.1
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


def num_kv_blocks(settings: WorkerSettings, block_bytes: int, max_model_len: int) -> int:
    """Blocks of the KV pool on CPU.

    Args:
        block_bytes: size of one block.
        max_model_len: tokens of the longest request.

    Raises:
        ConfigError: not even one request of full length would fit.
    """
    if settings.num_blocks:
        num_blocks, origin = settings.num_blocks, "--num-blocks"
    elif settings.kv_cache_bytes is not None:
        num_blocks, origin = settings.kv_cache_bytes // block_bytes, "--kv-cache-bytes"
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
