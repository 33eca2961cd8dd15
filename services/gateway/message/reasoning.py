"""Reasoning and answer, told apart by the marks that a model puts around its thoughts.

Where an answer begins is told by the prompt: some templates open the reasoning themselves, with others the model does.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.message.calls import held_length
from services.gateway.message.parts import MessagePart


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts before and after a model's thoughts.

    `starts_open`: the model begins with its thoughts, whether or not anybody wrote the first mark.
    """

    start: str
    end: str
    starts_open: bool = False

    def is_open_after(self, prompt: str) -> bool:
        """Whether the text that follows the prompt begins within thoughts."""
        if self.starts_open:
            return self.end not in prompt[-len(self.end) - 8 :]
        return prompt.rstrip().endswith(self.start)

    def is_closed_after(self, prompt: str) -> bool:
        """Whether the prompt has written the thoughts itself, empty ones as a rule: none follow."""
        return prompt.rstrip().endswith(self.end)


_THINK = ReasoningFormat("<think>", "</think>")
FORMATS = {
    "think": _THINK,
    # vLLM's names for models that have these marks.
    "qwen3": _THINK,
    "deepseek_r1": ReasoningFormat("<think>", "</think>", starts_open=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def detect(template: str) -> ReasoningFormat | None:
    """The format of a chat template's model; None when its template knows no reasoning."""
    if _THINK.end in template:
        return _THINK
    if "[/THINK]" in template:
        return FORMATS["mistral"]
    return None


class ReasoningReader:
    """
    Args:
        is_open: the text begins within thoughts.
    """

    def __init__(self, reasoning: ReasoningFormat, *, is_open: bool) -> None:
        self._format = reasoning
        self.is_open = is_open
        # It is not settled yet whether thoughts come at all.
        self._at_start = True
        # White space at the end of thoughts and before the answer belongs to neither.
        self._held = ""
        self._strips = False

    def push(self, text: str) -> MessagePart:
        part = MessagePart()
        text, self._held = self._held + text, ""
        if self._at_start:
            rest = text.lstrip()
            if rest.startswith(self._format.start):
                self.is_open, self._at_start = True, False
                text = rest[len(self._format.start) :]
                self._strips = True
            elif self._format.start.startswith(rest):
                self._held = text
                return part
            else:
                self._at_start = False
                self._strips = self.is_open
        if not self.is_open:
            self._answer(text, part)
            return part
        place = text.find(self._format.end)
        if place >= 0:
            self._think(text[:place].rstrip(), part)
            self.is_open, self._strips = False, True
            self._answer(text[place + len(self._format.end) :], part)
            return part
        held = held_length(text, self._format.end)
        kept = text[: len(text) - held].rstrip()
        self._think(kept, part)
        self._held = text[len(kept) :] if kept else text
        return part

    def finish(self) -> MessagePart:
        """The text is over. Thoughts that were cut short are thoughts all the same."""
        part = MessagePart()
        held, self._held = self._held, ""
        if self.is_open and not self._at_start:
            self._think(held.rstrip(), part)
        elif not self.is_open:
            part.content = held
        return part

    def _think(self, text: str, part: MessagePart) -> None:
        if self._strips:
            text = text.lstrip()
        if text:
            self._strips = False
            part.reasoning += text

    def _answer(self, text: str, part: MessagePart) -> None:
        if self._strips:
            text = text.lstrip()
        if text:
            self._strips = False
            part.content += text
