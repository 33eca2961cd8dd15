"""What packed weights mean, in plain torch: the definition of correct for the dequantising kernels.

Owns the layouts in which checkpoints ship weights of 8 and 4 bits; GGUF's blocks are `biphase.model.dequantise`'s.
Results are float32 [out_features, in_features], as `torch.nn.Linear` has its weight, so that a linear layer over a
packed weight is `reference.linear` over what these return.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Where AWQ puts columns 0 to 7 of a word: nibble of each.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds each row to 255 steps: int8 [out_features, in_features] and float32 scales [out_features].

    The largest magnitude of a row becomes 127; a row of zeros has scale 0.
    """
    wide = weight.float()
    scale = wide.abs().amax(1) / 127.0
    steps = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1)
    return (wide / steps).round().clamp(-127, 127).to(torch.int8), scale


def dequantise_channels(weight: Tensor, scale: Tensor) -> Tensor:
    """Of int8 or float8 [out_features, in_features] with one float32 scale a row."""
    return weight.float() * scale.float().unsqueeze(1)


def dequantise_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Of int8 or float8 [out_features, in_features] with one scale for each block of [rows, columns].

    Args:
        scale: [out_features / rows, in_features / columns], rounded up: blocks at the ends may be smaller.
    """
    wide = scale.float().repeat_interleave(block[0], 0)[: weight.shape[0]]
    return weight.float() * wide.repeat_interleave(block[1], 1)[:, : weight.shape[1]]


def unpack_bytes(packed: Tensor) -> Tensor:
    """Of int32 [..., words], four values of 0 to 255 a word, the lowest first: int32 [..., 4 * words]."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 255).flatten(-2)


def unpack_nibbles(packed: Tensor, nibbles: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Of int32 [..., words], eight values of 0 to 15 a word: int32 [..., 8 * words]; value i lies in nibbles[i]."""
    shifts = torch.tensor(nibbles, dtype=torch.int32, device=packed.device) * 4
    return ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2)


def dequantise_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """AWQ's layout ("gemm" version, https://arxiv.org/abs/2306.00978): words run along the outputs.

    Args:
        qweight: int32 [in_features, out_features / 8]; qzeros: int32 [groups, out_features / 8].
        scales: [groups, out_features]; in_features / groups inputs, one after another, share one.
    """
    values, zeros = unpack_nibbles(qweight, AWQ_NIBBLES), unpack_nibbles(qzeros, AWQ_NIBBLES)
    group = values.shape[0] // scales.shape[0]
    wide = (values - zeros.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)
    return wide.T.contiguous()


def dequantise_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    zero_offset: int = 1,
    *,
    bits: int = 4,
) -> Tensor:
    """GPTQ's layout (https://arxiv.org/abs/2210.17323): words of weights run along the inputs, of zeros the outputs.

    Args:
        qweight: int32 [in_features * bits / 32, out_features]; qzeros: int32 [groups, out_features * bits / 32].
        scales: [groups, out_features].
        g_idx: int [in_features], the group of each input; None: in order.
        zero_offset: added to stored zeros: 1 in the usual format, 0 in "gptq_v2".
        bits: 4 or 8.
    """
    unpack = unpack_nibbles if bits == 4 else unpack_bytes
    values = unpack(qweight.T.contiguous())  # [out_features, in_features]
    num_inputs, num_groups = values.shape[1], scales.shape[0]
    if g_idx is None:
        g_idx = torch.arange(num_inputs, device=qweight.device) // -(-num_inputs // num_groups)
    zeros = unpack(qzeros)[:, : scales.shape[1]] + zero_offset  # [groups, out_features]
    return (values - zeros[g_idx.long()].T) * scales.float()[g_idx.long()].T
