"""Sampling, stop and answer options that chat and completions share."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from biphase.errors import InvalidRequestError, UnsupportedError
from biphase.request import SamplingParams
from biphase.tokenizer.tokenizer import ModelTokenizer
from services.gateway.domain import Limits, TextOptions
from services.gateway.http_errors import shown
from services.gateway.wire import GenerationFields

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 4096
MAX_LOGIT_BIASES = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
_INT32 = 2**31
# int() alone takes blanks, underscores and the digits of all scripts too.
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


def invalid(message: str, param: str, value: Any = None) -> InvalidRequestError:
    told = f"(parameter={param})" if value is None else f"(parameter={param}, value={shown(value)})"
    return InvalidRequestError(f"{message} {told}", param)


def parse_sampling(
    body: GenerationFields,
    *,
    limits: Limits,
    tokenizer: ModelTokenizer,
    defaults: Mapping[str, float],
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Everything but max_tokens, which depends on each prompt's length.

    Args:
        defaults: the server's own, from generation_config.json; they stand where the client says nothing.

    Raises:
        InvalidRequestError: a value out of its range, named.
    """
    sampling = SamplingParams(
        temperature=_temperature(body, defaults),
        top_p=_top_p(body, defaults),
        top_k=_top_k(body, limits, defaults),
        min_p=_in_range(body.min_p, "min_p", 0, 1, defaults.get("min_p", 0.0)),
        repetition_penalty=_repetition_penalty(body, defaults),
        presence_penalty=_in_range(body.presence_penalty, "presence_penalty", -2, 2, 0.0),
        frequency_penalty=_in_range(body.frequency_penalty, "frequency_penalty", -2, 2, 0.0),
        seed=_seed(body.seed),
        min_tokens=_min_tokens(body),
        stop_token_ids=frozenset(_token_ids(body.stop_token_ids, "stop_token_ids", limits)),
        eos_token_ids=tokenizer.eos_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logit_bias=_logit_bias(body.logit_bias, limits),
        allowed_token_ids=_allowed(body, limits),
        bad_words=_bad_words(body.bad_words, tokenizer),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=_logprob_token_ids(body, logprobs, limits),
    )
    _check_something_is_allowed(sampling)
    return sampling


def parse_text_options(body: GenerationFields) -> TextOptions:
    return TextOptions(
        stop=_stop(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=_min_tokens(body),
    )


def parse_n(body: GenerationFields, limits: Limits, num_prompts: int = 1) -> int:
    n = 1 if body.n is None else body.n
    if n < 1:
        raise invalid(f"n must be at least 1, got {shown(n)}.", "n")
    if n > limits.max_sequences:
        raise invalid(f"n must be at most {limits.max_sequences}, got {shown(n)}.", "n")
    if n * num_prompts > limits.max_sequences:
        raise invalid(
            f"{num_prompts} prompts with n={n} make more than {limits.max_sequences} sequences in one request.", "n"
        )
    return n


def parse_priority(body: GenerationFields) -> int:
    priority = body.priority or 0
    if not -_INT32 <= priority < _INT32:
        raise invalid("priority must be a 32-bit integer.", "priority", priority)
    return priority


def parse_cache_salt(body: GenerationFields) -> str:
    if body.cache_salt is None:
        return ""
    if not 1 <= len(body.cache_salt) <= 128 or any(char in body.cache_salt for char in "@/\\\0"):
        raise invalid("cache_salt must have 1 to 128 characters and none of @ / \\ NUL.", "cache_salt")
    return body.cache_salt


def refuse_unsupported(body: GenerationFields) -> None:
    """What would change the text if it were left out silently."""
    if body.use_beam_search:
        raise UnsupportedError("Beam search is not supported.", "use_beam_search")


def num_alternatives(logprobs: int | None, sampling: SamplingParams) -> int | None:
    """How many are shown with each output token: the most likely, and those asked for by their ids."""
    return None if logprobs is None else logprobs + len(sampling.logprob_token_ids)


def check_logprobs(count: int | None, limits: Limits, param: str) -> int | None:
    if count is None:
        return None
    if count < 0:
        raise invalid(f"`{param}` must not be negative.", param, count)
    if count > limits.max_logprobs:
        raise InvalidRequestError(
            f"Requested sample logprobs of {shown(count)}, which is greater than max allowed: {limits.max_logprobs} "
            f"(parameter={param}, value={shown(count)})",
            param,
        )
    return count


def _finite(value: float, param: str) -> float:
    if not math.isfinite(value):
        raise invalid(f"{param} must be a finite number, got {value}.", param, value)
    return value


def _in_range(value: float | None, param: str, low: float, high: float, default: float) -> float:
    if value is None:
        return default
    if not low <= _finite(value, param) <= high:
        raise invalid(f"{param} must be in [{low}, {high}], got {value}.", param, value)
    return value


def _temperature(body: GenerationFields, defaults: Mapping[str, float]) -> float:
    value = body.temperature
    if value is None:
        return min(max(defaults.get("temperature", 1.0), 0.0), 2.0)
    if _finite(value, "temperature") < 0:
        raise invalid(f"temperature must be non-negative, got {value}.", "temperature", value)
    if value > 2:
        raise invalid(f"temperature must be at most 2, got {value}.", "temperature", value)
    return value


def _top_p(body: GenerationFields, defaults: Mapping[str, float]) -> float:
    value = defaults.get("top_p", 1.0) if body.top_p is None else _finite(body.top_p, "top_p")
    if not 0 < value <= 1:
        raise invalid(f"top_p must be in (0, 1], got {value}.", "top_p", value)
    return value


def _top_k(body: GenerationFields, limits: Limits, defaults: Mapping[str, float]) -> int:
    value = int(defaults.get("top_k", 0)) if body.top_k is None else body.top_k
    if value < -1:
        raise invalid(f"top_k must be 0 or -1 (off), or at least 1, got {shown(value)}.", "top_k", value)
    return 0 if value <= 0 or value >= limits.vocab_size else value


def _repetition_penalty(body: GenerationFields, defaults: Mapping[str, float]) -> float:
    value = body.repetition_penalty
    if value is None:
        return defaults.get("repetition_penalty", 1.0)
    if not 0 < _finite(value, "repetition_penalty") <= 1e6:
        raise invalid(f"repetition_penalty must be greater than zero, got {value}.", "repetition_penalty", value)
    return value


def _seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(63)
    if not -(2**63) <= seed < 2**63:
        raise invalid("seed must be a 64-bit integer.", "seed", seed)
    return seed % 2**64


def _min_tokens(body: GenerationFields) -> int:
    value = body.min_tokens or 0
    if value < 0:
        raise invalid(f"min_tokens must be greater than or equal to 0, got {shown(value)}.", "min_tokens", value)
    return value


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else list(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}.", "stop")
    if "" in strings:
        raise invalid("stop cannot contain an empty string.", "stop")
    if any(len(text) > MAX_STOP_CHARACTERS for text in strings):
        raise invalid(f"a stop string may have at most {MAX_STOP_CHARACTERS} characters.", "stop")
    return tuple(strings)


def _token_ids(ids: list[int] | None, param: str, limits: Limits) -> list[int]:
    if not ids:
        return []
    bad = [token_id for token_id in ids if not 0 <= token_id < limits.vocab_size]
    if bad:
        some = ", ".join(shown(token_id) for token_id in bad[:5])
        raise InvalidRequestError(
            f"token_id(s) [{some}] in {param} contain out-of-vocab token ids. Vocabulary size: {limits.vocab_size} "
            f"(parameter={param})",
            param,
        )
    return ids


def _allowed(body: GenerationFields, limits: Limits) -> tuple[int, ...]:
    if body.allowed_token_ids is None:
        return ()
    if not body.allowed_token_ids:
        raise invalid("allowed_token_ids must not be empty.", "allowed_token_ids")
    return tuple(dict.fromkeys(_token_ids(body.allowed_token_ids, "allowed_token_ids", limits)))


def _check_something_is_allowed(sampling: SamplingParams) -> None:
    """
    Raises:
        InvalidRequestError: every allowed token is banned by another field from the first token on.
    """
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens:
        banned |= sampling.stop_token_ids | sampling.eos_token_ids
    if sampling.allowed_token_ids and banned.issuperset(sampling.allowed_token_ids):
        raise invalid(
            "allowed_token_ids holds nothing but tokens that bad_words or min_tokens forbid.", "allowed_token_ids"
        )


def _logprob_token_ids(body: GenerationFields, logprobs: int | None, limits: Limits) -> tuple[int, ...]:
    ids = body.logprob_token_ids or ()
    if ids and logprobs is None:
        raise invalid("`logprob_token_ids` are told with `logprobs`, which must be set.", "logprob_token_ids")
    if len(ids) > MAX_LOGPROB_TOKEN_IDS:
        raise invalid(
            f"logprob_token_ids may hold at most {MAX_LOGPROB_TOKEN_IDS} tokens, got {len(ids)}.", "logprob_token_ids"
        )
    return tuple(dict.fromkeys(_token_ids(list(ids), "logprob_token_ids", limits)))


def _logit_bias(given: Any, limits: Limits) -> tuple[tuple[int, float], ...]:
    if given is None:
        return ()
    if not isinstance(given, dict):
        raise invalid("logit_bias must be an object of token ids and numbers.", "logit_bias")
    if len(given) > MAX_LOGIT_BIASES:
        raise invalid(f"logit_bias may name at most {MAX_LOGIT_BIASES} tokens, got {len(given)}.", "logit_bias")
    biases: dict[int, float] = {}
    for key, value in given.items():
        if not _TOKEN_ID.fullmatch(key):
            raise invalid(
                f"logit_bias contains key(s) that cannot be converted to integer token IDs: ['{shown(key)}']",
                "logit_bias",
            )
        token_id = int(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise invalid("logit_bias values must be finite numbers.", "logit_bias", value)
        biases[token_id] = min(100.0, max(-100.0, float(value)))
    _token_ids(list(biases), "logit_bias", limits)
    return tuple(sorted(biases.items()))


def _bad_words(words: list[str] | None, tokenizer: ModelTokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenised at a text's start and after a space."""
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS:
        raise invalid(f"bad_words may hold at most {MAX_BAD_WORDS} words, got {len(words)}.", "bad_words")
    if any(not word.strip() or len(word) > MAX_STOP_CHARACTERS for word in words):
        raise invalid(f"bad_words must be words of 1 to {MAX_STOP_CHARACTERS} characters.", "bad_words")
    found: dict[tuple[int, ...], None] = {}
    encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    for word in words:
        bare = word.lstrip()
        plain, spaced = tuple(encode(bare)), tuple(encode(" " + bare))
        found[plain] = None
        # A tokenizer that spells the space as a token of its own adds nothing by it.
        if spaced and spaced[0] != (plain[0] if plain else None) and len(spaced) == len(plain):
            found[spaced] = None
    if sum(map(len, found)) > MAX_BAD_WORD_TOKENS:
        raise invalid(f"bad_words make more than {MAX_BAD_WORD_TOKENS} tokens.", "bad_words")
    return tuple(found)
