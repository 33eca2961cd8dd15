"""How long decode waits for a prefill worker before it does without: by what the alternative would cost.

Owns the bounds. A worker that is frozen, cut off or starved (on one box it computes at low priority, and a busy decode
worker takes its cores) looks just like one that is merely slow; so what counts is what else could be done. A short
prompt is quickly computed here; for a long one there may be another candidate; without either there is nothing to gain
by giving up early.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Accepting is a matter of milliseconds; but a worker's event loop may wait for a core on a busy machine.
_MIN_ACCEPT_SECONDS = 0.5
_MAX_ACCEPT_SECONDS = 5.0
# Assumed before this worker has computed prompts itself.
_ASSUMED_TOKENS_PER_SECOND = 500.0
# A worker that let someone wait in vain is asked last for so long.
_DISTRUST_SECONDS = 5.0


@dataclass(slots=True)
class Patience:
    """One per decode worker. All times are monotonic seconds or durations in seconds.

    Args:
        max_local_tokens: prompts with so many uncached tokens at most are computed here rather than waited for long;
            0: none.
    """

    max_local_tokens: int
    # Smoothed time that candidates took to accept.
    _accept_seconds: float = 0.05
    # By incarnation of a candidate: until when it is asked last.
    _distrusted: dict[str, float] = field(default_factory=dict)

    def accepted(self, incarnation: str, seconds: float) -> None:
        self._accept_seconds += 0.2 * (seconds - self._accept_seconds)
        self._distrusted.pop(incarnation, None)

    def was_silent(self, incarnation: str, now: float) -> None:
        """It neither accepted nor refused within `accept_seconds`."""
        self._distrusted = {known: until for known, until in self._distrusted.items() if until > now}
        self._distrusted[incarnation] = now + _DISTRUST_SECONDS

    def is_distrusted(self, incarnation: str, now: float) -> bool:
        return self._distrusted.get(incarnation, 0.0) > now

    def accept_seconds(self, *, is_last: bool) -> float:
        """How long a candidate may take to accept.

        Args:
            is_last: there is nobody else to ask.
        """
        if is_last:
            return _MAX_ACCEPT_SECONDS
        return min(_MAX_ACCEPT_SECONDS, max(_MIN_ACCEPT_SECONDS, 10 * self._accept_seconds))

    def prefill_seconds(self, num_uncached: int, tokens_per_second: float, *, is_decoding: bool) -> float | None:
        """How long the first token of a prompt may take before it is computed here; None: as long as it wants.

        Args:
            tokens_per_second: at which this worker computes prompts; 0: not known.
            is_decoding: whether sequences run here. Then a prefill worker on this machine may get no core, and one
                more short prompt in the next step is the quicker way.
        """
        if num_uncached > self.max_local_tokens:
            return None
        here = num_uncached / (tokens_per_second or _ASSUMED_TOKENS_PER_SECOND)
        return 0.1 + 2 * here if is_decoding else 1.5 + 4 * here
