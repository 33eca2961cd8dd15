"""One choice of an answer as the frames need it: its tokens and text so far, and what is known of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from biphase.rpc.v1 import common_pb2
from services.gateway.domain import Prompt
from services.gateway.message.parts import ToolCall


@dataclass(slots=True)
class Choice:
    """Filled while its sequence runs. Lists of tokens and logprobs are kept for whole answers only."""

    index: int
    prompt: Prompt
    # The content; what else the text held is beside it.
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    # Streams only: whether its first chunk went out.
    begun: bool = False
