"""The limits and the policy of one engine's scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from biphase.errors import ConfigError

POLICIES = ("fcfs", "priority", "shortest_first")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Checked when made: ConfigError names the setting that makes no sense."""

    # Sequences that run or wait for KV from elsewhere, at most.
    max_num_seqs: int = 64
    # Tokens in one step at most; every running sequence gets its one token first.
    max_num_batched_tokens: int = 512
    # Prompt plus output of one sequence, in tokens.
    max_model_len: int = 8192
    # Requests that wait for a place, at most; more are refused.
    max_waiting: int = 1024
    # Share of all blocks that an admission leaves free, so that running sequences can grow.
    watermark: float = 0.01
    # "fcfs": in order of arrival. "priority": lower `priority` first, then arrival. "shortest_first" (for prefill
    # workers): within a priority the prompt with the fewest tokens left to compute, so that a short one does not sit
    # behind a long one.
    policy: str = "fcfs"
    # Under shortest_first: a prompt that got no tokens for so long goes before shorter ones.
    ageing_seconds: float = 5.0
    # Prompt tokens in a step that also decodes, at most; what a local prefill may add to everyone's inter-token
    # latency. 0: max_num_batched_tokens is the only limit.
    max_mixed_prefill_tokens: int = 0
    # Steps are decided while the one before runs. Needs a runner that begins and finishes steps.
    overlap: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must not be below max_num_seqs "
                f"({self.max_num_seqs}): each running sequence takes one token of a step"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be at least 0 and below 1, not {self.watermark}")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy {self.policy!r} is not one of {', '.join(POLICIES)}")
        if self.ageing_seconds <= 0:
            raise ConfigError(f"ageing_seconds must be above 0, not {self.ageing_seconds}")
        if self.max_mixed_prefill_tokens < 0:
            raise ConfigError(f"max_mixed_prefill_tokens must not be negative, not {self.max_mixed_prefill_tokens}")
