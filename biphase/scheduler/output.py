"""What one engine step does: plain data, the only thing that passes from scheduler to runner and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from biphase.errors import BiphaseError
from biphase.request import Request, RequestId, TokenLogprobs


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step.

    Tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens) of the request are run. `block_ids` is
    its whole block table. `samples` says whether the last of them yields a token (the request is caught up after it).

    Where steps overlap, a share of one token may be that token which the step before samples: the request has it only
    once that step's result is in.
    """

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: Sequence[int]
    samples: bool
    # Of a share of a prompt: monotonic seconds.
    scheduled_time: float | None = None


@dataclass(slots=True)
class SchedulerOutput:
    """Decodes first, then prefill chunks; never more than max_num_batched_tokens tokens altogether."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    # Requests that ended since the last step: a runner that keeps state of them drops it.
    finished: list[RequestId] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_scheduled_tokens for s in self.scheduled)


@dataclass(slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class RunnerOutput:
    """Keyed by request id; `sampled` or `failed` has an entry for each scheduled request with `samples`."""

    sampled: dict[RequestId, SampledToken] = field(default_factory=dict)
    # Requests for which there is no next token, and why; the others of the step are not concerned.
    failed: dict[RequestId, BiphaseError] = field(default_factory=dict)
    # Logprobs of prompt positions computed in this step, in order, for requests that asked.
    prompt_logprobs: dict[RequestId, list[TokenLogprobs]] = field(default_factory=dict)
