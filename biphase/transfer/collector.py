"""Which blocks of one request have been announced, are being read, are verified: pure bookkeeping, no I/O.

Owns the judgement of a hand-off: a block belongs at the index it was announced for only if its chain hash is the one
the reader computed from its own token ids, and nothing counts as complete before the COMMIT agrees on the number of
tokens and on the chain hash over all of them. What is verified survives a change of the prefill worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from biphase.errors import CorruptBlockError
from biphase.transfer.channels import Handle, ReadRequest
from biphase.transfer.reslice import Reslice


class BlockCollector:
    """Collects the blocks of `num_tokens` tokens into reserved ones.

    Args:
        expected_hashes: chain hash of every full block of the tokens, from the first on, as the reader computed them.
        expected_commit: chain hash over all tokens, a partial last block included.
        num_tokens: tokens whose KV is wanted.
        block_size: tokens in a block.
        dest_block_ids: reserved block for each index from 0 on; at least one for every block of the tokens.
        first_index: blocks before it are here already.
        plan: how a holder's blocks, cut another way, become blocks here. Then `block_size`, `expected_hashes` and all
            indexes are the holder's; the reserved blocks are not.
        first_token: with a plan: tokens before it are here already, and are not written again.
    """

    def __init__(
        self,
        expected_hashes: Sequence[bytes],
        expected_commit: bytes,
        num_tokens: int,
        block_size: int,
        dest_block_ids: Sequence[int],
        first_index: int = 0,
        plan: Reslice | None = None,
        first_token: int = 0,
    ) -> None:
        self._hashes = expected_hashes
        self._commit = expected_commit
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._dest = dest_block_ids
        self._num_full = num_tokens // block_size
        self.num_blocks = -(-num_tokens // block_size)
        self._plan = plan
        self._first_token = first_token
        num_dest = self.num_blocks if plan is None else -(-num_tokens // plan.reader.block_size_tokens)
        assert len(expected_hashes) >= self._num_full and len(dest_block_ids) >= num_dest
        assert 0 <= first_index <= self.num_blocks
        self._verified = set(range(first_index))
        # What was verified before the present holder's turn.
        self._before = set(self._verified)
        self._distrusted = False
        self._reading: dict[int, Handle] = {}
        self._contiguous = first_index
        self._committed = False

    @property
    def num_contiguous_blocks(self) -> int:
        """Blocks that are here without a gap from the first on."""
        return self._contiguous

    @property
    def num_contiguous_tokens(self) -> int:
        """Tokens whose KV is here and verified, without a gap from the first on."""
        return min(self._contiguous * self._block_size, self._num_tokens)

    @property
    def num_full_tokens(self) -> int:
        """As `num_contiguous_tokens`, whole blocks only: what another prefill worker need not announce again."""
        return min(self._contiguous, self._num_full) * self._block_size

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    @property
    def is_complete(self) -> bool:
        """Every block verified and the COMMIT agreed: decoding may start."""
        return self._committed and self._contiguous == self.num_blocks

    def announce(self, handles: Iterable[Handle]) -> list[ReadRequest]:
        """What to read of the blocks a holder announced. Blocks verified, or being read under the same handle, are not.

        Raises:
            CorruptBlockError: a block that is not the one expected at its index: none of `handles` counts.
        """
        wanted: list[tuple[int, Handle]] = []
        for handle in handles:
            self._check(handle)
            known = self._reading.get(handle.index)
            same = known is not None and (known.block_id, known.generation) == (handle.block_id, handle.generation)
            if known is not None and not same:
                self._distrusted = True
                raise CorruptBlockError(f"block {handle.index} was announced twice, in different places")
            if handle.index not in self._verified and not same:
                wanted.append((handle.index, handle))
        self._reading.update(wanted)
        return [self._request(index, handle) for index, handle in dict(wanted).items()]

    def _request(self, index: int, handle: Handle) -> ReadRequest:
        if self._plan is None:
            return ReadRequest.from_handle(handle, self._dest[index])
        segments = self._plan.segments(index, self._dest, self._first_token, self._num_tokens)
        return ReadRequest(index, handle.block_id, handle.generation, dest_block_id=-1, segments=segments)

    def has(self, num_tokens: int) -> None:
        """The first `num_tokens` are here and verified, by way of another collector. Only when nothing is posted."""
        self._verified.update(range(min(num_tokens // self._block_size, self._num_full)))
        self._before = set(self._verified)
        while self._contiguous in self._verified:
            self._contiguous += 1

    def verified(self, indexes: Iterable[int]) -> None:
        """These blocks came in and passed every check (ReadResult.verified)."""
        for index in indexes:
            assert index in self._reading or index in self._verified, f"block {index} was never asked for"
            self._reading.pop(index, None)
            self._verified.add(index)
        while self._contiguous in self._verified:
            self._contiguous += 1

    def restart(self) -> None:
        """Forgets what was announced but not verified, and the COMMIT: the next holder starts over.

        Whole blocks stay, since their chain hashes say what is in them. The partial last one does not: only the COMMIT
        of the holder that sent it would vouch for it. Nothing stays of a holder that contradicted the tokens asked for.
        Only when no read is posted any more.
        """
        self._reading.clear()
        self._committed = False
        if self._distrusted:
            self._verified = set(self._before)
        self._verified = {index for index in self._verified if index < self._num_full or index in self._before}
        self._before = set(self._verified)
        self._distrusted = False
        self._contiguous = 0
        while self._contiguous in self._verified:
            self._contiguous += 1

    def commit(self, num_tokens: int, chain_hash: bytes) -> None:
        """What PrefillDone says.

        Raises:
            CorruptBlockError: it prefilled something else than what was asked for. Nothing it sent may be used.
        """
        # Until every check below has passed.
        self._distrusted = True
        if num_tokens != self._num_tokens:
            raise CorruptBlockError(f"the prefill covers {num_tokens} tokens, not {self._num_tokens}")
        if chain_hash != self._commit:
            raise CorruptBlockError("the prefill's chain hash is not that of the tokens asked for")
        missing = set(range(self.num_blocks)) - self._verified - self._reading.keys()
        if missing:
            raise CorruptBlockError(f"the prefill ended without announcing {len(missing)} blocks, first {min(missing)}")
        self._committed = True
        self._distrusted = False

    def _check(self, handle: Handle) -> None:
        index = handle.index
        if not 0 <= index < self.num_blocks:
            self._distrusted = True
            raise CorruptBlockError(f"block {index} was announced for a request of {self.num_blocks} blocks")
        expected = self._hashes[index] if index < self._num_full else b""
        if handle.block_hash != expected:
            self._distrusted = True
            raise CorruptBlockError(f"block {index} is announced with another chain hash than its tokens have")
