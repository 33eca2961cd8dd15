"""Wire messages to plain data and back, for what more than one service sends."""

from __future__ import annotations

from biphase.request import SamplingParams, StructuredOutput, TokenLogprobs
from biphase.rpc.v1 import common_pb2


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    message = common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sorted(sampling.stop_token_ids),
        eos_token_ids=sorted(sampling.eos_token_ids),
        ignore_eos=sampling.ignore_eos,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=[common_pb2.TokenIds(token_ids=word) for word in sampling.bad_words],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        logprob_token_ids=sampling.logprob_token_ids,
    )
    if sampling.structured_output is not None:
        asked = sampling.structured_output
        message.structured_output.kind = asked.kind
        message.structured_output.spec = asked.spec
        message.structured_output.reasoning_start = asked.reasoning_start
        message.structured_output.reasoning_end = asked.reasoning_end
    return message


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    structured = None
    if message.HasField("structured_output"):
        asked = message.structured_output
        structured = StructuredOutput(asked.kind, asked.spec, asked.reasoning_start, asked.reasoning_end)
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        eos_token_ids=frozenset(message.eos_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        logprob_token_ids=tuple(message.logprob_token_ids),
        structured_output=structured,
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(token_ids=logprobs.token_ids, logprobs=logprobs.logprobs, rank=logprobs.rank)


def logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(tuple(message.token_ids), tuple(message.logprobs), message.rank)
