"""The model's tokens as the grammar engine knows them: the bytes of each, and which ones no text makes.

Owns the way from a tokenizer to llguidance's, and the packed form in which a vocabulary goes to another process.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from biphase.tokenizer.tokenizer import ModelTokenizer

Encode = Callable[[bytes], list[int]]

_HEAD = struct.Struct("<III")
_LENGTH = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[id]` are the bytes that a token adds to a text; empty for ids that have none."""

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_token_ids: frozenset[int]

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids by text, of tokens that text never makes."""
        return {self.tokens[token_id].decode("utf-8", "replace"): token_id for token_id in sorted(self.special_ids)}

    def pack(self) -> bytes:
        parts = [_HEAD.pack(len(self.tokens), len(self.special_ids), len(self.eos_token_ids))]
        parts += [struct.pack("<I", token_id) for token_id in sorted(self.special_ids)]
        parts += [struct.pack("<I", token_id) for token_id in sorted(self.eos_token_ids)]
        parts += [_LENGTH.pack(len(token)) for token in self.tokens]
        return b"".join([*parts, *self.tokens])

    @classmethod
    def unpack(cls, data: bytes) -> Vocabulary:
        num_tokens, num_special, num_eos = _HEAD.unpack_from(data)
        at = _HEAD.size
        ids = struct.unpack_from(f"<{num_special + num_eos}I", data, at)
        at += 4 * len(ids)
        lengths = struct.unpack_from(f"<{num_tokens}H", data, at)
        at += 2 * num_tokens
        tokens = []
        for length in lengths:
            tokens.append(data[at : at + length])
            at += length
        return cls(tuple(tokens), frozenset(ids[:num_special]), frozenset(ids[num_special:]))


def vocabulary_of(tokenizer: ModelTokenizer, vocab_size: int = 0) -> Vocabulary:
    """
    Args:
        vocab_size: of the model's logits, which may have more ids than the tokenizer, or fewer.
    """
    size = vocab_size or tokenizer.vocab_size
    known = min(size, tokenizer.vocab_size)
    # A token longer than the packed form can say would be a vocabulary's mistake; it is never offered.
    tokens = [token if len(token) < 2**16 else b"" for token in map(tokenizer.token_bytes, range(known))]
    tokens += [b""] * (size - known)
    return Vocabulary(
        tuple(tokens),
        frozenset(token_id for token_id in tokenizer.special_ids if token_id < size),
        frozenset(token_id for token_id in tokenizer.eos_token_ids if token_id < size),
    )


def exact_encoder(tokenizer: ModelTokenizer, vocabulary: Vocabulary) -> Encode:
    """How the model's tokenizer writes a text, where its tokens make exactly these bytes; else the longest matches.

    Where a grammar leaves one text only, the model is given its usual tokens for it.
    """
    greedy = longest_match_encoder(vocabulary.tokens, vocabulary.special_ids)

    def encode(text: bytes) -> list[int]:
        try:
            token_ids = tokenizer.encode(text.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            return greedy(text)
        exact = all(token_id < len(vocabulary.tokens) for token_id in token_ids) and text == b"".join(
            vocabulary.tokens[token_id] for token_id in token_ids
        )
        return token_ids if exact and vocabulary.special_ids.isdisjoint(token_ids) else greedy(text)

    return encode


def longest_match_encoder(tokens: Sequence[bytes], special_ids: frozenset[int]) -> Encode:
    """Encodes by the longest token at each place; bytes that no token begins with are left out."""
    ids = {token: token_id for token_id, token in enumerate(tokens) if token and token_id not in special_ids}
    longest = max(map(len, ids), default=0)

    def encode(text: bytes) -> list[int]:
        found: list[int] = []
        at = 0
        while at < len(text):
            for length in range(min(longest, len(text) - at), 0, -1):
                token_id = ids.get(text[at : at + length])
                if token_id is not None:
                    found.append(token_id)
                    at += length
                    break
            else:
                at += 1
        return found

    return encode
