"""The model as the gateway knows it: names, tokenizer, template, defaults; and encoding that never blocks the loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from biphase.errors import InvalidRequestError, NotFoundError, UnsupportedError
from biphase.grammar.checker import GrammarChecker
from biphase.grammar.vocabulary import vocabulary_of
from biphase.request import StructuredOutput
from biphase.tokenizer.chat_template import ChatTemplate
from biphase.tokenizer.loader import LoadedTokenizer
from biphase.tokenizer.tokenizer import ModelTokenizer
from services.gateway.http_errors import shown
from services.gateway.message import reasoning, tool_formats
from services.gateway.message.reasoning import ReasoningFormat
from services.gateway.message.tool_formats import ToolFormat

# Longer texts are encoded in a thread (the tokenizer lets go of the interpreter lock): about 4 ms of work.
_INLINE_CHARACTERS = 20_000
# No vocabulary has longer tokens than this, but for runs of one character.
_MAX_CHARACTERS_PER_TOKEN = 256
_USUAL_CHARACTERS_PER_TOKEN = 8
_CUT_WORD_TOKENS = 64
_NICE = 5


class ServedModel:
    """
    Args:
        names: what clients may call it; the first is the one shown.
        root: what was given to --model.
        tool_call_parser, reasoning_parser: names of formats; "auto" is what the chat template shows.
    """

    def __init__(
        self,
        loaded: LoadedTokenizer,
        names: Sequence[str],
        root: str,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        self.tokenizer: ModelTokenizer = loaded.tokenizer
        self.chat_template: ChatTemplate | None = loaded.chat_template
        self.generation_defaults: Mapping[str, float] = loaded.generation_defaults
        self.names = tuple(names)
        self.root = root
        self.created = int(time.time())
        template = "" if self.chat_template is None else self.chat_template.text
        self.tool_format: ToolFormat = (
            tool_formats.detect(template) if tool_call_parser == "auto" else tool_formats.FORMATS[tool_call_parser]
        )
        self.reasoning_format: ReasoningFormat | None = (
            reasoning.detect(template) if reasoning_parser == "auto" else reasoning.FORMATS.get(reasoning_parser)
        )
        # Texts of tokens that are left out of answers.
        self.special_texts = frozenset(self.tokenizer.token_string(token_id) for token_id in self.tokenizer.special_ids)
        self._grammars = GrammarChecker(lambda: vocabulary_of(self.tokenizer))
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="encode", initializer=_yield_to_others)

    def check_name(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            NotFoundError: the client asks for another model.
        """
        if not name:
            return self.names[0]
        if name not in self.names:
            raise NotFoundError(
                f"The model `{shown(name)}` does not exist. Valid aliases: {', '.join(self.names)}", "model"
            )
        return name

    def require_chat_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InvalidRequestError(
                "The model has no chat template; use /v1/completions, or start the gateway with --chat-template.",
                "messages",
            )
        return self.chat_template

    async def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool) -> list[int] | None:
        """Token ids, or None when the text is so long that it must be over max_tokens.

        Raises:
            InvalidRequestError: no UTF-8 form.
        """
        if len(text) > max_tokens * _MAX_CHARACTERS_PER_TOKEN:
            return None
        if len(text) <= _INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        likely = max_tokens * _USUAL_CHARACTERS_PER_TOKEN
        if len(text) > likely:
            # The beginning alone mostly shows that it is too long; its last word may be cut, hence the margin.
            head = await loop.run_in_executor(self._threads, self.tokenizer.encode, text[:likely])
            if len(head) > max_tokens + _CUT_WORD_TOKENS:
                return None
        return await loop.run_in_executor(
            self._threads, lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The chat as text; many messages, or tools, are rendered in a thread."""
        template = self.require_chat_template()
        if len(messages) + len(options.get("tools") or ()) <= 64:
            return template.render(messages, **options)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: template.render(messages, **options))

    async def check_grammar(self, structured: StructuredOutput, param: str) -> None:
        """
        Args:
            param: the field that asked for it.

        Raises:
            InvalidRequestError: it does not compile, or not within the limits.
            UnsupportedError: the model has no token that ends a text.
        """
        if not self.tokenizer.eos_token_ids:
            raise UnsupportedError("Structured output needs a model with an end-of-sequence token.", param)
        try:
            await self._grammars.check(structured)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{error.message} (parameter={param})", param) from None

    async def close(self) -> None:
        await self._grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _yield_to_others() -> None:
    """Long texts wait for short ones, and for the tokens that workers compute on the same machine."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
