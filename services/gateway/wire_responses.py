"""The body of POST /v1/responses: types of fields, nothing more."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from services.gateway.wire import GenerationFields, TextList


class ResponsesRequest(GenerationFields):
    """Sampling fields beyond OpenAI's are those of chat; `n` and `max_tokens` mean nothing here."""

    input: Any = Field(default=None, description="string, or list of input items")
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    include: TextList | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None
    # What they name is not kept here.
    conversation: SkipJsonSchema[Any] = None
    prompt: SkipJsonSchema[Any] = None
    chat_template_kwargs: dict[str, Any] | None = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    max_tool_calls: Any = None
