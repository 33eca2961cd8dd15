"""From logits to tokens on the device: the likeliest, a random draw, and the logprob of what was chosen.

Owns one row per program. The draw is the inverse CDF of `biphase.sampler`: weights exp((logit - max) / temperature) in
float32, summed in float64 in the order of token ids, and the first id whose running sum exceeds uniform * total. So a
row's token depends on nothing else in the batch. It is the sampler's own token but where the target lies within
rounding of a step of the running sum: sums here run in tiles.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


@triton.jit
def _best(row, vocab_size, TILE: tl.constexpr):
    """The largest value of a row and the first place that holds it."""
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_at = tl.zeros((TILE,), tl.int32)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        value = tl.load(row + at, mask=at < vocab_size, other=float("-inf"))
        better = value > best
        best = tl.where(better, value, best)
        best_at = tl.where(better, at, best_at)
    largest = tl.max(best, 0)
    return largest, tl.min(tl.where(best == largest, best_at, 2147483647), 0)


@triton.jit
def argmax_kernel(logits, tokens, stride, vocab_size, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, at = _best(logits + row * stride, vocab_size, TILE)
    tl.store(tokens + row, at.to(tl.int64))


def argmax(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the lowest id of equals: int64 [num_rows].

    Args:
        logits: float32 [num_rows, vocab_size], last dimension contiguous, no NaN.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if tokens.numel():
        argmax_kernel[(logits.shape[0],)](logits, tokens, logits.stride(0), logits.shape[1], TILE=_TILE, num_warps=8)
    return tokens


@triton.jit
def _weights(row, at, used, largest, temperature, floor):
    value = tl.load(row + at, mask=used, other=float("-inf"))
    weight = tl.exp((value - largest) / temperature)
    return tl.where(used & (weight >= floor), weight, 0.0).to(tl.float64)


@triton.jit
def draw_kernel(logits, temperatures, min_p, uniforms, tokens, stride, vocab_size, TILE: tl.constexpr):
    row_id = tl.program_id(0).to(tl.int64)
    row = logits + row_id * stride
    temperature = tl.load(temperatures + row_id)
    largest, best_at = _best(row, vocab_size, TILE)
    if temperature <= 0.0:
        tl.store(tokens + row_id, best_at.to(tl.int64))
        return
    floor = tl.load(min_p + row_id)
    total = tl.zeros((), tl.float64)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        total += tl.sum(_weights(row, at, at < vocab_size, largest, temperature, floor), 0)
    target = tl.load(uniforms + row_id) * total
    before = tl.zeros((), tl.float64)
    found = best_at
    open_ = True
    for start in range(0, vocab_size, TILE):
        if open_:
            at = start + tl.arange(0, TILE)
            weight = _weights(row, at, at < vocab_size, largest, temperature, floor)
            after = before + tl.sum(weight, 0)
            if after > target:
                passed = before + tl.cumsum(weight, 0) > target
                # The sum and the running sum may differ in their last bit.
                chosen = tl.min(tl.where(passed, at, 2147483647), 0)
                found = tl.where(chosen < vocab_size, chosen, best_at)
                open_ = False
            before = after
    tl.store(tokens + row_id, found.to(tl.int64))


def draw(logits: Tensor, temperatures: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """One token for each row: int64 [num_rows]. Temperature and min_p only; top_k and top_p are cut before.

    Args:
        logits: float32 [num_rows, vocab_size], last dimension contiguous, -inf where banned, no NaN.
        temperatures: float32 [num_rows]; 0 takes the likeliest token.
        min_p: float32 [num_rows]: tokens with less than this share of the likeliest one's weight are left out.
        uniforms: float64 [num_rows], in [0, 1).
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and uniforms.dtype == torch.float64
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if tokens.numel():
        draw_kernel[(logits.shape[0],)](
            logits, temperatures, min_p, uniforms, tokens, logits.stride(0), logits.shape[1], TILE=_TILE, num_warps=8
        )
    return tokens


@triton.jit
def logprob_kernel(logits, tokens, logprobs, ranks, stride, vocab_size, TILE: tl.constexpr):
    row_id = tl.program_id(0).to(tl.int64)
    row = logits + row_id * stride
    chosen = tl.load(row + tl.load(tokens + row_id))
    largest, _ = _best(row, vocab_size, TILE)
    total = tl.zeros((), tl.float32)
    above = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        value = tl.load(row + at, mask=at < vocab_size, other=float("-inf"))
        total += tl.sum(tl.exp(value - largest), 0)
        above += tl.sum((value > chosen).to(tl.int32), 0)
    tl.store(logprobs + row_id, chosen - largest - tl.log(total))
    tl.store(ranks + row_id, (above + 1).to(tl.int64))


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability (float32) and rank (int64, 1 is the likeliest) of one token in each row, both [num_rows].

    Args:
        logits: float32 [num_rows, vocab_size], last dimension contiguous.
        token_ids: int64 [num_rows].
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    logprobs = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    ranks = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logprobs.numel():
        logprob_kernel[(logits.shape[0],)](
            logits, token_ids, logprobs, ranks, logits.stride(0), logits.shape[1], TILE=_TILE, num_warps=8
        )
    return logprobs, ranks
