"""What the answers of chat and completions share: the fields around the choices, and the chunks of a stream."""

from __future__ import annotations

from typing import Any

from services.gateway.domain import Generation
from services.gateway.frames.text import event, json_string
from services.gateway.frames.usage import Usage


class Chunks:
    """Writes the chunks of one request.

    Args:
        kind: their "object".
        before, after: JSON in a choice around its text, in a chunk that says nothing else.
    """

    def __init__(self, generation: Generation, kind: str, fingerprint: str, *, before: str, after: str) -> None:
        self._generation = generation
        self._kind = kind
        self._fingerprint = fingerprint
        # Nearly every chunk is text alone: two constants around it. By choice, made when it is due.
        self._heads: dict[int, bytes] = {}
        self._before = (
            f'data: {{"id":{json_string(generation.response_id)},"object":"{kind}","created":{generation.created},'
            f'"model":{json_string(generation.model)},"choices":[{{"index":'
        )
        self._middle = f",{before}"
        self._after = f"{after}}}]}}\n\n".encode()

    def text(self, index: int, text: str) -> bytes:
        """Text of a choice that goes on."""
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = f"{self._before}{index}{self._middle}".encode()
        return head + json_string(text).encode() + self._after

    def chunk(self, choice: dict[str, Any], usage: Usage | None, **more: Any) -> bytes:
        """
        Args:
            usage: so far, where every chunk tells it.
        """
        told = {} if usage is None else {"usage": usage.to_object()}
        return event({**around(self._generation, self._kind), "choices": [choice], **told, **more})

    def usage(self, usage: Usage) -> bytes:
        """The chunk after all others."""
        told = {"choices": [], "usage": usage.to_object(), "system_fingerprint": self._fingerprint}
        return event(around(self._generation, self._kind) | told)


def around(generation: Generation, kind: str) -> dict[str, Any]:
    """The fields that are the same in all chunks and in the whole answer."""
    return {
        "id": generation.response_id,
        "object": kind,
        "created": generation.created,
        "model": generation.model,
    }
