"""From a call's message to a Request, the same for both roles: parsed here once, believed everywhere after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from biphase.errors import InvalidRequestError
from biphase.request import Request, RequestId
from biphase.rpc.messages import sampling_from_proto
from biphase.rpc.v1 import common_pb2


class PromptMessage(Protocol):
    """What GenerateRequest and PrefillRequest have in common."""

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def sampling(self) -> common_pb2.SamplingParams: ...
    @property
    def priority(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


def parse_request(message: PromptMessage, request_id: RequestId, vocab_size: int, **more: Any) -> Request:
    """
    Args:
        request_id: of this call; the message's own is the client's.
        more: further fields of the Request.

    Raises:
        InvalidRequestError: no tokens, one that the model does not have, or counts that contradict each other.
    """
    token_ids = list(message.token_ids)
    if not token_ids:
        raise InvalidRequestError("the prompt has no tokens")
    if max(token_ids) >= vocab_size:
        raise InvalidRequestError(f"token id {max(token_ids)} is not in the vocabulary of {vocab_size}")
    if not 0 < message.num_prompt_tokens <= len(token_ids):
        raise InvalidRequestError(f"num_prompt_tokens is {message.num_prompt_tokens} of {len(token_ids)} tokens")
    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids[: message.num_prompt_tokens],
        output_token_ids=token_ids[message.num_prompt_tokens :],
        num_preset_output_tokens=len(token_ids) - message.num_prompt_tokens,
        sampling=sampling_from_proto(message.sampling),
        priority=message.priority,
        cache_salt=message.cache_salt,
        **more,
    )
