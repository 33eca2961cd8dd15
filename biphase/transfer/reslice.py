"""Reading blocks that are cut another way: of another size, or of another part of the heads.

Owns which cuts fit together, which tokens of a holder's block go where, and the copy. A block's bytes are

    [num_layers, keys and values, heads, tokens, bytes a token]        fp8: first all codes, then all exponents of a run

so a range of tokens or heads is one strided copy for each part. Transports know nothing of it: they bring whole blocks
of the holder's into a staging memory, checked as ever, and from there their parts go where they belong.

    holder, 32 tokens   |       0       |       1       |            reader, heads 0-1   | 0 | 1 |
    reader, 16 tokens   |   0   |   1   |   2   |   3   |            holder, heads 0-3   | 0 | 1 | 2 | 3 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from biphase.cache.memory import BlockMemory
from biphase.errors import LayoutMismatchError
from biphase.transfer.layout import KVLayout

_FP8 = "fp8"
# What has to be equal whatever the cut, in the order in which a difference tells most.
_COMMON = ("kv_dtype", "num_layers", "head_dim", "family")

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens of one block at the holder, and where they go here."""

    source_token: int
    dest_block_id: int
    dest_token: int
    num_tokens: int


class Reslice:
    """How blocks of a holder's layout become blocks of a reader's.

    Raises:
        LayoutMismatchError: they do not; the message names the field.
    """

    def __init__(self, reader: KVLayout, holder: KVLayout) -> None:
        self.reader, self.holder = reader, holder
        self.is_identity = reader == holder
        if self.is_identity:
            return
        if not reader.family or not holder.family:
            reader.require_same(holder)
        for name in _COMMON:
            reader.require_same(holder, (name,))
        small, large = sorted((reader.block_size_tokens, holder.block_size_tokens))
        if not small or large % small:
            raise LayoutMismatchError(
                f"KV blocks cannot be exchanged: block_size_tokens is {reader.block_size_tokens} here and "
                f"{holder.block_size_tokens} there, and neither is a multiple of the other."
            )
        self._first_head = max(reader.first_kv_head, holder.first_kv_head)
        self._end_head = min(_end_head(reader), _end_head(holder))
        if self._first_head >= self._end_head:
            raise LayoutMismatchError(f"KV blocks cannot be exchanged: {_heads_text(reader, holder)}.")
        if _token_bytes(reader) != _token_bytes(holder):
            reader.require_same(holder)

    @property
    def covers_all_heads(self) -> bool:
        """Whether the holder has every head that the reader needs; else it takes several holders."""
        return self.is_identity or (self._first_head, self._end_head) == (
            self.reader.first_kv_head,
            _end_head(self.reader),
        )

    def require_all_heads(self) -> None:
        """
        Raises:
            LayoutMismatchError: the holder lacks some.
        """
        if not self.covers_all_heads:
            raise LayoutMismatchError(f"KV blocks cannot be taken over: {_heads_text(self.reader, self.holder)}.")

    def segments(self, index: int, dest_block_ids: Sequence[int], first_token: int, end_token: int) -> list[Segment]:
        """Where tokens of the holder's block number `index` of a request go.

        Args:
            dest_block_ids: the reader's block for each of its own numbers.
            first_token, end_token: tokens of the request that are wanted; others are left alone.
        """
        theirs, ours = self.holder.block_size_tokens, self.reader.block_size_tokens
        start = index * theirs
        token, end = max(start, first_token), min(start + theirs, end_token)
        found: list[Segment] = []
        while token < end:
            number, offset = divmod(token, ours)
            count = min(ours - offset, end - token)
            found.append(Segment(token - start, dest_block_ids[number], offset, count))
            token += count
        return found


class Scatter:
    """Copies segments from blocks of the holder's layout in `source` to blocks of the reader's in `dest`."""

    def __init__(self, plan: Reslice, source: BlockMemory, dest: BlockMemory) -> None:
        first, end = plan._first_head, plan._end_head
        self._theirs = slice(first - plan.holder.first_kv_head, end - plan.holder.first_kv_head)
        self._ours = slice(first - plan.reader.first_kv_head, end - plan.reader.first_kv_head)
        self._parts = list(zip(_views(source, plan.holder), _views(dest, plan.reader), strict=True))

    def copy(self, source_block_id: int, segments: Sequence[Segment]) -> None:
        for part in segments:
            theirs = slice(part.source_token, part.source_token + part.num_tokens)
            ours = slice(part.dest_token, part.dest_token + part.num_tokens)
            for source, dest in self._parts:
                dest[part.dest_block_id, :, :, self._ours, ours] = source[source_block_id, :, :, self._theirs, theirs]


def holders_for(reader: KVLayout, holders: Sequence[KVLayout]) -> list[int]:
    """Places of holders that together have all heads the reader needs, few of them, in the order of their heads.

    Raises:
        LayoutMismatchError: they do not, or one of them is of another kind.
    """
    for holder in holders:
        if not holder.family or holder.family != reader.family:
            Reslice(reader, holder)
    chosen: list[int] = []
    head = reader.first_kv_head
    while head < _end_head(reader):
        able = [place for place, holder in enumerate(holders) if holder.first_kv_head <= head < _end_head(holder)]
        if not able:
            raise LayoutMismatchError(f"KV blocks cannot be taken over: nobody has kv head {head}.")
        best = max(able, key=lambda place: _end_head(holders[place]))
        Reslice(reader, holders[best])
        chosen.append(best)
        head = _end_head(holders[best])
    return chosen


def _end_head(layout: KVLayout) -> int:
    return layout.first_kv_head + layout.num_kv_heads


def _heads_text(reader: KVLayout, holder: KVLayout) -> str:
    return (
        f"num_kv_heads are {reader.num_kv_heads} from {reader.first_kv_head} on here and "
        f"{holder.num_kv_heads} from {holder.first_kv_head} on there"
    )


def _token_bytes(layout: KVLayout) -> tuple[int, ...]:
    """Bytes of one token and head in each part of a run."""
    num_runs = layout.num_layers * 2 * layout.num_kv_heads * layout.block_size_tokens
    size, rest = divmod(layout.block_bytes, num_runs or 1)
    if rest or not size:
        return (layout.block_bytes,)
    return (layout.head_dim, size - layout.head_dim) if layout.kv_dtype.startswith(_FP8) else (size,)


def _views(memory: BlockMemory, layout: KVLayout) -> list[_Bytes]:
    """For each part of a run: uint8 [num_blocks, num_layers, 2, num_kv_heads, block_size, bytes a token]."""
    parts = _token_bytes(layout)
    size, heads, layers = layout.block_size_tokens, layout.num_kv_heads, layout.num_layers
    run = size * sum(parts)
    strides = (layout.block_bytes, 2 * heads * run, heads * run, run)
    return [
        np.ndarray(
            (memory.num_blocks, layers, 2, heads, size, part),
            np.uint8,
            buffer=memory.view,
            offset=size * sum(parts[:place]),
            strides=(*strides, part, 1),
        )
        for place, part in enumerate(parts)
    ]
