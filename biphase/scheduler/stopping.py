"""When a sequence is over, and which ones can be at all: pure functions of a request and the limits."""

from __future__ import annotations

from biphase.errors import InvalidRequestError
from biphase.request import FinishReason, Request


def finish_reason(request: Request, max_model_len: int) -> FinishReason | None:
    """Whether the newest output token ends the request; sets `stop_token_id` when a stop token did.

    Preset output counts: a moved stream ends where it would have ended. End of sequence and stop tokens end nothing
    before min_tokens; the sampler does not draw them there in the first place.
    """
    sampling = request.sampling
    num_output_tokens = len(request.output_token_ids)
    token_id = request.output_token_ids[-1]
    if sampling.ends_at(token_id, num_output_tokens):
        if sampling.is_named_stop(token_id):
            request.stop_token_id = token_id
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens or request.num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None


def max_kv_tokens(request: Request, max_model_len: int) -> int:
    """The most tokens whose KV the request can ever need to hold at once.

    The newest token's KV is needed only to sample another, except where blocks are reserved with a place for it.
    """
    if request.prefill_only:
        return request.num_tokens
    longest = min(request.num_prompt_tokens + request.sampling.max_tokens, max_model_len)
    return max(longest - 1, request.num_tokens + (1 if request.awaits_kv else 0))


def check_request(request: Request, *, max_model_len: int, num_blocks: int, block_size: int) -> None:
    """Refuses what no waiting would make possible.

    Raises:
        InvalidRequestError: no tokens, more than max_model_len, nothing left to generate, or more blocks than exist.
    """
    if not request.prompt_token_ids:
        raise InvalidRequestError("the prompt has no tokens", param="prompt")
    if request.num_tokens >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {request.num_tokens} tokens and the model's context ends at {max_model_len}, "
            "with room for at least one new token",
            param="prompt",
        )
    if request.num_output_tokens >= request.sampling.max_tokens:
        raise InvalidRequestError(
            f"nothing is left to generate: max_tokens is {request.sampling.max_tokens} and "
            f"{request.num_output_tokens} output tokens are given",
            param="max_tokens",
        )
    num_tokens = max_kv_tokens(request, max_model_len)
    if num_tokens > num_blocks * block_size:
        raise InvalidRequestError(
            f"the request may need KV cache for {num_tokens} tokens and this worker has {num_blocks} blocks of "
            f"{block_size} ({num_blocks * block_size} tokens): lower max_tokens or give it more blocks",
            param="max_tokens",
        )
