"""One model's tokenizer: encoding, the bytes and names of single tokens, special tokens.

Owns what is known of tokens once the files are read (`loader` reads them). Owns no chat template and no streaming:
those are `chat_template` and `detokenizer`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from biphase.errors import InvalidRequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, reversed."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(value): value for value in shown}
    hidden = [value for value in range(256) if value not in set(shown)]
    table.update({chr(256 + place): value for place, value in enumerate(hidden)})
    return table


class ModelTokenizer:
    """Thread-safe for reading.

    Args:
        backend: the tokenizers pipeline.
        byte_level: tokens are GPT-2 byte stand-ins (else pieces with "▁" and <0xNN> bytes).
        eos_token_ids: ids that end a generation.
        bos_token, eos_token: their text, for chat templates; None where the model has none.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        byte_level: bool,
        eos_token_ids: frozenset[int],
        bos_token: str | None,
        eos_token: str | None,
        pad_token: str | None = None,
        unk_token: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.byte_level = byte_level
        self.eos_token_ids = eos_token_ids
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.pad_token = pad_token
        self.unk_token = unk_token
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Names that chat templates may use."""
        named = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "unk_token": self.unk_token,
        }
        return {name: text for name, text in named.items() if text is not None}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Lets go of the interpreter lock while it works, so that a long text can be encoded beside other things.

        Raises:
            InvalidRequestError: the text has no UTF-8 form (lone surrogates).
        """
        try:
            # Not `encode`: that one keeps the lock, and works out offsets that nobody needs.
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError("the text holds characters that have no UTF-8 form") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_string(self, token_id: int) -> str:
        """The vocabulary's own spelling ("Ġhello", "▁hello", "<0x0A>"); "" for an id outside of it."""
        return self.backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text, exact also for a part of a character."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        spelling = self.token_string(token_id)
        if self.byte_level:
            table = _byte_of_char()
            try:
                return bytes([table[char] for char in spelling])
            except KeyError:
                return spelling.encode()
        byte = _BYTE_TOKEN.fullmatch(spelling)
        return bytes([int(byte[1], 16)]) if byte else spelling.replace("▁", " ").encode()

    def token_text(self, token_id: int) -> str:
        """The token for people and in logprobs: its text, or `\\xNN` for bytes that are no whole character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{value:02x}" for value in raw)
