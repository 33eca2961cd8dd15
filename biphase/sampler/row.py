"""What the sampler keeps of one request between steps: its parameters, prepared, and the tokens that occurred.

Owns the penalty counts, extended token by token and never rebuilt. Costs nothing for a request that uses none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from biphase.grammar.matcher import OutputMatcher
from biphase.request import SamplingParams


class SamplingRow:
    """State of one request. `add_output` must see every output token, in order, before the next is sampled."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        matcher: OutputMatcher | None = None,
    ) -> None:
        self.params = params
        # Where the output stands in its grammar; None when its form is free.
        self.matcher = matcher
        self.num_outputs = 0
        self.has_penalties = params.has_penalties
        self._banned_words = [word for word in params.bad_words if len(word) > 1]
        self._longest_word = max((len(word) for word in self._banned_words), default=0)
        self._tail: list[int] = []
        self.always_banned = _ids((word[0] for word in params.bad_words if len(word) == 1), vocab_size)
        self.ends = _ids(params.eos_token_ids | params.stop_token_ids, vocab_size)
        self.allowed = _ids(params.allowed_token_ids, vocab_size)
        bias = [(token, value) for token, value in params.logit_bias if 0 <= token < vocab_size]
        self.bias_ids = np.array([token for token, _ in bias], dtype=np.int64)
        self.bias_values = np.array([value for _, value in bias], dtype=np.float32)
        # True when logits are used as they come, and the likeliest token is the answer.
        self.is_plain_greedy = params.is_greedy and params.logprobs is None and not self.changes_logits
        self._seen_ids = np.empty(0, dtype=np.int64)
        self._seen_counts = np.empty(0, dtype=np.float32)
        self._num_seen = 0
        self._place: dict[int, int] = {}
        if self.has_penalties:
            # Structured output takes its names and values from the prompt: only its own repetitions count.
            self._seen_ids = _ids(set(prompt_token_ids) if matcher is None else (), vocab_size)
            self._num_seen = len(self._seen_ids)
            self._seen_counts = np.zeros(self._num_seen, dtype=np.float32)
            self._place = {token: place for place, token in enumerate(self._seen_ids.tolist())}

    @property
    def changes_logits(self) -> bool:
        params = self.params
        return bool(
            self.has_penalties
            or params.logit_bias
            or params.bad_words
            or params.allowed_token_ids
            or self.matcher is not None
            or (self.num_outputs < params.min_tokens and (params.eos_token_ids or params.stop_token_ids))
        )

    def add_output(self, token_id: int) -> None:
        self.num_outputs += 1
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if self._longest_word:
            self._tail.append(token_id)
            del self._tail[: -self._longest_word]
        if not self.has_penalties or (self.matcher is not None and not self.matcher.is_word(token_id)):
            return
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._num_seen
            if place == len(self._seen_ids):
                self._seen_ids = np.concatenate((self._seen_ids, np.zeros(max(64, place), dtype=np.int64)))
                self._seen_counts = np.concatenate((self._seen_counts, np.zeros(max(64, place), dtype=np.float32)))
            self._seen_ids[place] = token_id
            self._num_seen += 1
        self._seen_counts[place] += 1.0

    @property
    def seen_ids(self) -> npt.NDArray[np.int64]:
        """Tokens of prompt and output, each once, in order of appearance after the prompt's; of structured output its
        words only."""
        return self._seen_ids[: self._num_seen]

    @property
    def seen_counts(self) -> npt.NDArray[np.float32]:
        """How often each of `seen_ids` stands in the output."""
        return self._seen_counts[: self._num_seen]

    def banned_now(self) -> list[int]:
        """Last tokens of the bad words whose other tokens the output just ended with, and the ends min_tokens bans."""
        banned = [word[-1] for word in self._banned_words if tuple(self._tail[1 - len(word) :]) == word[:-1]]
        # A grammar that is complete leaves nothing else: banned, the output could not go on either.
        if self.num_outputs < self.params.min_tokens and not (self.matcher is not None and self.matcher.must_end):
            banned.extend(self.ends.tolist())
        return banned


def _ids(tokens: Iterable[int], vocab_size: int) -> npt.NDArray[np.int64]:
    return np.array(sorted({token for token in tokens if 0 <= token < vocab_size}), dtype=np.int64)
