"""Bodies as they come in: types of fields, nothing more. Unknown fields are ignored, as clients expect.

Values are checked by the parsers, which know the model. Fields that can hold very many items are left loose here and
checked by hand there, so that a bad list does not become as many error entries. What is known and refused has no JSON
schema: /openapi.json offers what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema


def _one_error(kind: type) -> Callable[[Any], Any]:
    """Refuses a list with one error, however many of its items are wrong."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and not all(type(item) is kind for item in value):
            raise ValueError(f"must be a list of {'integers' if kind is int else 'strings'}")
        return value

    return check


IntList = Annotated[list[int], BeforeValidator(_one_error(int))]
TextList = Annotated[list[str], BeforeValidator(_one_error(str))]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(Body):
    """What chat and completions share. null is the same as absent everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | TextList | None = None
    stop_token_ids: IntList | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: Any = None
    allowed_token_ids: IntList | None = None
    bad_words: TextList | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: IntList | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    use_beam_search: SkipJsonSchema[bool | None] = None
    add_special_tokens: bool | None = None


class ChatRequest(GenerationFields):
    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    documents: list[Any] | None = None


class CompletionRequest(GenerationFields):
    prompt: Any = Field(default=None, description="string, list of strings, token ids, or list of lists of them")
    logprobs: int | None = None
    echo: bool | None = None
    suffix: SkipJsonSchema[str | None] = None
    prompt_embeds: SkipJsonSchema[Any] = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: IntList
