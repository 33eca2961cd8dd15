"""One sequence's messages to text: incremental decoding, stop strings, the end.

Pure: no I/O. Streaming and plain answers both go through it, so that what a stream adds up to is what the plain
answer says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from biphase.rpc.v1 import common_pb2, decode_pb2
from biphase.tokenizer.detokenizer import IncrementalDecoder, StopStrings
from biphase.tokenizer.tokenizer import ModelTokenizer
from services.gateway.domain import SequenceSpec, TextOptions
from services.gateway.message.parts import ToolCallDelta


@dataclass(slots=True)
class Delta:
    """What one message adds. `logprobs` has an entry for each of `token_ids`, or none."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[common_pb2.TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    # Chat only, where the text is read for more than content; `text` is the content then.
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


class SequenceText:
    """
    Args:
        stop: a stop string ended it: the sequence must be closed by whoever reads `finished`.
    """

    def __init__(self, tokenizer: ModelTokenizer, spec: SequenceSpec, options: TextOptions) -> None:
        self._decoder = IncrementalDecoder(tokenizer, spec.token_ids, skip_special_tokens=options.skip_special_tokens)
        self._stops = StopStrings(options.stop, include=options.include_stop)
        self._has_stops = bool(options.stop)
        self._include_stop = options.include_stop
        self._min_tokens = options.min_tokens
        self._sampling = spec.sampling
        self._ending_ids = spec.sampling.stop_token_ids | spec.sampling.eos_token_ids
        self.num_tokens = 0
        self.finished = False

    def push(self, message: decode_pb2.GenerateResponse) -> Delta:
        """Takes the next message. After `finished` no more may come."""
        token_ids = message.token_ids
        logprobs = message.logprobs
        text = ""
        for place, token_id in enumerate(token_ids):
            self.num_tokens += 1
            # The token that ends a sequence is counted, but is no part of its text.
            if (
                token_id in self._ending_ids
                and not self._include_stop
                and self._sampling.ends_at(token_id, self.num_tokens)
            ):
                continue
            piece = self._decoder.push(token_id)
            if not self._has_stops or self.num_tokens <= self._min_tokens:
                text += piece
                continue
            if piece:
                text += self._stops.push(piece)
                if self._stops.found is not None:
                    self.finished = True
                    end = place + 1
                    return Delta(text, token_ids[:end], logprobs[:end], "stop", self._stops.found)
        if not message.HasField("finish"):
            return Delta(text, token_ids, logprobs)
        self.finished = True
        text += self._stops.flush()
        finish = message.finish
        stop_reason = finish.stop_token_id if finish.HasField("stop_token_id") else None
        return Delta(text, token_ids, logprobs, finish.reason or "stop", stop_reason)
