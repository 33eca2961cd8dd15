"""What packed checkpoints' matrices mean: the door to `kernels.reference_quantised` for whoever loads them."""

from __future__ import annotations

from kernels.reference_quantised import dequantise_awq, dequantise_blocks, dequantise_channels, dequantise_gptq

__all__ = ["dequantise_awq", "dequantise_blocks", "dequantise_channels", "dequantise_gptq"]
