"""One request's place in its grammar: which tokens may come next, advanced by each that came.

A pure function of the grammar and the output so far, so that a request that was preempted, handed over or moved stands
where it stood once its output has been replayed. The mask is computed in a thread while the model computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor, Future

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from biphase.errors import BiphaseError, InternalError, InvalidRequestError


class OutputMatcher:
    """Used by one thread at a time, `begin` apart.

    Args:
        matcher: at its start, this request's own; an error instead, and no token will follow.
        vocab_size: of the logits.
        ends: ids that end the output once it is complete.
        words: True for each token with a letter in it; None: all are taken for words.
    """

    def __init__(
        self,
        matcher: LLMatcher | BiphaseError,
        vocab_size: int,
        ends: Iterable[int] = (),
        words: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        # Why there is no next token; it stays.
        self.error: BiphaseError | None = matcher if isinstance(matcher, BiphaseError) else None
        self._matcher = matcher if isinstance(matcher, LLMatcher) else None
        self._vocab_size = vocab_size
        self._words = words
        self._ends = np.array(sorted({token_id for token_id in ends if token_id < vocab_size}), dtype=np.int64)
        self._pending: Future[None] | None = None
        # bool [vocab_size]; valid once computed, until the next token.
        self._allowed: npt.NDArray[np.bool_] | None = None
        # Nothing but an end may follow.
        self.must_end = False

    def accept(self, token_id: int) -> None:
        """Takes the token that came next."""
        self._settle()
        self._allowed = None
        matcher = self._matcher
        if matcher is None or token_id in self._ends:
            return  # Nothing follows.
        if not matcher.consume_token(token_id) and self.error is None:
            self.error = InternalError(f"token {token_id} does not follow the grammar: {matcher.get_error()}"[:300])

    def is_word(self, token_id: int) -> bool:
        """Whether repeating the token is repetition: marks and digits make up every JSON text and number."""
        return self._words is None or bool(self._words[token_id])

    def begin(self, executor: Executor) -> None:
        """Starts to compute the mask elsewhere."""
        if self._allowed is None and self._pending is None:
            self._pending = executor.submit(self._compute)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """True for each token that may come next: [vocab_size]. Waits until it is computed; look at `error` after."""
        self._settle()
        if self._allowed is None:
            self._compute()
        assert self._allowed is not None
        return self._allowed

    def fail(self, message: str) -> None:
        if self.error is None:
            self.error = InvalidRequestError(message)

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _compute(self) -> None:
        matcher, size = self._matcher, self._vocab_size
        allowed = np.zeros(size, dtype=np.bool_)
        if matcher is None or self.error is not None:
            self._allowed = allowed
            return
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            self.fail(f"The output's grammar became too complex: {matcher.get_error().partition('<state>')[0]}"[:300])
        else:
            bits = np.unpackbits(packed, bitorder="little")[:size].view(np.bool_)
            allowed[: len(bits)] = bits
            # An end that the grammar's text allows is an end all the same, so it counts as one only when complete.
            accepting = matcher.is_accepting()
            allowed[self._ends] |= accepting
            inside = int(np.count_nonzero(allowed)) - int(np.count_nonzero(allowed[self._ends]))
            self.must_end = accepting and not inside
            if not allowed.any():
                self.fail("The output's grammar leaves no token that could follow.")
        self._allowed = allowed
