"""The nouns of the block bookkeeping: plain data, no policy.

Owns the arithmetic between tokens and blocks, a request's block table, and the name under which a computed block is
announced. Does not own who may take a block (block_pool) or what a block holds (prefix_index).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens, the last one perhaps in part."""
    return -(-num_tokens // block_size)


class ComputedBlock(NamedTuple):
    """A block whose content is final, as the owner names it to a reader.

    `index` is its place in the request: it covers tokens [index * block_size, ...). `block_hash` is the chain hash of
    a full block and empty for a request's partial last one.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody wants here
    block_id: int
    generation: int
    block_hash: bytes


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request, in token order:

    | 0 ... num_committed           | ... len(block_ids)     | ... + num_promised  |
    | full, in the prefix index,    | the request's own,     | not taken yet, but  |
    | shared, never written again   | being written          | counted at admission |
    """

    block_ids: list[int] = field(default_factory=list)
    num_committed: int = 0
    # Blocks that this request's tokens still need. Other admissions leave them free, so that two prompts that fit
    # only one after the other do not start together and throw each other out.
    num_promised: int = 0
