"""What a valid request is, once its body has been parsed: frozen, nothing optional that must be there.

Everything behind the parsers works on these types only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from biphase.request import SamplingParams
from services.gateway.message.reader import MessageForm


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model behind the decode workers allows; token counts."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int
    # Largest n, and most sequences of one request.
    max_sequences: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, already tokens. `text` is what echo repeats; empty when nobody asked."""

    token_ids: Sequence[int]
    max_tokens: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How output tokens become text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    # No stop string is looked for in the first so many tokens.
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the answer is framed."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    # Alternatives shown with each output token; None: no logprobs.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    # A scoring call (max_tokens 0): the prompt and its logprobs only.
    prompt_only: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request for text. It holds len(prompts) * n sequences, prompt-major."""

    endpoint: Endpoint
    # As the client sees it ("chatcmpl-..."), and unique among all that workers know. A stored response's own id is a
    # secret: only the other one is for logs, traces and /status.
    response_id: str
    request_id: str
    created: int
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    sampling: SamplingParams
    text: TextOptions
    answer: AnswerOptions
    priority: int = 0
    cache_salt: str = ""
    # How a chat's answers are read; None when their text is the content.
    message: MessageForm | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.n

    def sequence(self, index: int) -> SequenceSpec:
        """The index-th choice of the answer. Made when it is due: there may be thousands."""
        place, choice = divmod(index, self.n)
        prompt = self.prompts[place]
        return SequenceSpec(
            request_id=f"{self.request_id}-{index}",
            index=index,
            choice=choice,
            prompt_index=place,
            token_ids=prompt.token_ids,
            sampling=replace(
                self.sampling,
                seed=choice_seed(self.sampling.seed, choice),
                max_tokens=prompt.max_tokens,
                min_tokens=min(self.sampling.min_tokens, prompt.max_tokens),
            ),
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence as a decode worker gets it."""

    request_id: str
    index: int
    choice: int
    prompt_index: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int
    cache_salt: str


def choice_seed(seed: int, choice: int) -> int:
    """Seed of the choice-th of n: the first takes the request's own, the rest follow from it. uint64."""
    if choice == 0:
        return seed % 2**64
    raw = (seed % 2**64).to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(b"biphase.choice." + raw).digest()[:8], "little")
