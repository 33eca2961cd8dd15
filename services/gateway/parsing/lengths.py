"""How long a prompt and its answer may be."""

from __future__ import annotations

from collections.abc import Sequence

from biphase.errors import InvalidRequestError
from services.gateway.domain import Limits
from services.gateway.http_errors import shown
from services.gateway.parsing.sampling import invalid


def check_max_tokens(asked: int | None, limits: Limits, param: str) -> None:
    """
    Args:
        asked: what the client said; None leaves it to the server.
    """
    if asked is None:
        return
    if asked < 1:
        raise invalid(f"{param} must be at least 1, got {shown(asked)}.", param, asked)
    if asked > limits.max_model_len:
        raise invalid(
            f"{param}={shown(asked)} cannot be greater than max_model_len={limits.max_model_len}. "
            "Please request fewer output tokens.",
            param,
            asked,
        )


def check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {shown(min_tokens)}.",
            "min_tokens",
            min_tokens,
        )


def too_long(num_tokens: int, limits: Limits, *, at_least: bool = False) -> InvalidRequestError:
    """Clients match the words "maximum context length"."""
    count = f"at least {num_tokens}" if at_least else f"{num_tokens}"
    return InvalidRequestError(
        f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
        f"{count} input tokens, which leaves no room for any output. Please reduce the length of the input "
        f"prompt. (parameter=input_tokens, value={num_tokens})",
        "input_tokens",
    )


def room_for_output(num_prompt_tokens: int, asked: int | None, limits: Limits) -> int:
    """Output tokens this prompt may have: what was asked, cut to what the context leaves. At least 1.

    Raises:
        InvalidRequestError: the prompt fills the context.
    """
    room = limits.max_model_len - num_prompt_tokens
    if room < 1:
        raise too_long(num_prompt_tokens, limits)
    return room if asked is None else min(asked, room)


def truncated(
    token_ids: Sequence[int], keep: int | None, side: str | None, limits: Limits, reserve: int
) -> Sequence[int]:
    """The prompt cut to `keep` tokens (-1: to what fits the context beside `reserve` output tokens)."""
    if keep is None:
        return token_ids
    if keep < -1 or keep == 0:
        raise invalid("truncate_prompt_tokens must be -1 or at least 1.", "truncate_prompt_tokens", keep)
    if side not in (None, "left", "right"):
        raise invalid("truncation_side must be left or right.", "truncation_side", side)
    if keep > limits.max_model_len:
        raise invalid(
            f"truncate_prompt_tokens cannot be greater than max_model_len={limits.max_model_len}.",
            "truncate_prompt_tokens",
            keep,
        )
    if keep == -1:
        keep = max(1, limits.max_model_len - reserve)
    if len(token_ids) <= keep:
        return token_ids
    return token_ids[:keep] if side == "right" else token_ids[-keep:]
