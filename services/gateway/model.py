"""The model as the gateway knows it: names, tokenizer, template, defaults; and encoding that never blocks the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from biphase.errors import InvalidRequestError, NotFoundError
from biphase.tokenizer.chat_template import ChatTemplate
from biphase.tokenizer.loader import LoadedTokenizer
from biphase.tokenizer.tokenizer import ModelTokenizer
from services.gateway.http_errors import shown

# Longer texts are encoded in a thread (the tokenizer lets go of the interpreter lock): about 4 ms of work.
_INLINE_CHARACTERS = 20_000
# No vocabulary has longer tokens than this, but for runs of one character.
_MAX_CHARACTERS_PER_TOKEN = 256
_USUAL_CHARACTERS_PER_TOKEN = 8
_CUT_WORD_TOKENS = 64


class ServedModel:
    """
    Args:
        names: what clients may call it; the first is the one shown.
        root: what was given to --model.
    """

    def __init__(self, loaded: LoadedTokenizer, names: Sequence[str], root: str) -> None:
        self.tokenizer: ModelTokenizer = loaded.tokenizer
        self.chat_template: ChatTemplate | None = loaded.chat_template
        self.generation_defaults: Mapping[str, float] = loaded.generation_defaults
        self.names = tuple(names)
        self.root = root
        self.created = int(time.time())
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")

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
        """The chat as text; many messages are rendered in a thread."""
        template = self.require_chat_template()
        if len(messages) <= 64:
            return template.render(messages, **options)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: template.render(messages, **options))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
