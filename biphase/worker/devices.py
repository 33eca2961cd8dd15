"""What `--device` means, and what a GPU's memory holds. The one place of this room that asks torch about devices."""

from __future__ import annotations

import torch

from biphase.errors import ConfigError
from biphase.model.spec import ModelSpec
from biphase.worker.capacity import DeviceMemory, working_bytes


def resolve_device(name: str) -> torch.device:
    """The device that a worker computes on. "auto" is the CPU: the GPU path has not yet run on a GPU.

    Raises:
        ConfigError: "cuda", and torch sees no GPU here.
    """
    if name != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = "torch sees no GPU" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise ConfigError(f"--device cuda: {reason} on this machine; use --device cpu")
    return torch.device("cuda", torch.cuda.current_device())


def device_memory(
    device: torch.device, spec: ModelSpec, max_num_tokens: int, max_num_seqs: int, item_bytes: int
) -> DeviceMemory | None:
    """The GPU's memory as it is now, with the weights loaded; None for the CPU."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, working_bytes(spec, max_num_tokens, max_num_seqs, item_bytes))
