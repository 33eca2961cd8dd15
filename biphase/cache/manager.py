"""Which request has which blocks: the façade through which the scheduler sees the cache.

Owns block tables, prefix hits, the promises made at admission, and the hashing of blocks as they fill. Does not own the
free list (block_pool) nor the order in which requests get blocks (scheduler). A request passes through it so:

    prepare      any thread      chain hashes of its tokens; an estimate of what is cached
    admit        engine thread   takes its cached prefix and blocks for the first tokens after it
    allocate_slots               blocks for the next tokens; False: none left, somebody has to go
    cache_blocks                 full blocks become findable
    free                         gives everything back; full blocks stay cached until their memory is needed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from biphase.cache.block_pool import BlockPool
from biphase.cache.blocks import BlockTable, ComputedBlock, num_blocks_for
from biphase.cache.hashing import chain, root_hash
from biphase.request import Request, RequestId


class KVCacheManager:
    """Block tables of the requests of one engine.

    Args:
        pool: may be shared with leases and transfers; they hold references of their own.
        block_size: tokens in a block.
        namespace: digest of what KV bytes depend on (`hashing.namespace_digest`), root of every hash chain.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, namespace: bytes) -> None:
        assert block_size >= 1
        self.pool = pool
        self.block_size = block_size
        self.namespace = namespace
        self._tables: dict[RequestId, BlockTable] = {}
        # Tables that name each block, and how many blocks are named by any.
        self._table_refs = [0] * pool.num_blocks
        self._num_held_blocks = 0
        self._num_promised_blocks = 0
        # Tokens looked up in the prefix cache, and found, at first admissions.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    # ---- what stands where

    @property
    def num_held_blocks(self) -> int:
        """Different blocks that some request's table names."""
        return self._num_held_blocks

    @property
    def num_draining_blocks(self) -> int:
        """Blocks in use that no request names any more: a lease or posted I/O still refers to them."""
        with self.pool.lock:
            return self.pool.num_used - self._num_held_blocks

    def block_ids(self, request: Request) -> list[int]:
        """The request's whole block table; grows in place, for the caller to read only."""
        return self._tables[request.request_id].block_ids

    def has_blocks(self, request: Request) -> bool:
        return request.request_id in self._tables

    def num_unused_slots(self, request: Request) -> int:
        """Token slots that the request holds and has not filled."""
        return len(self.block_ids(request)) * self.block_size - request.num_computed_tokens

    def waste_ratio(self, requests: Iterable[Request]) -> float:
        """Share of the token slots in all held blocks that hold no token.

        A shared block counts once, and what is reserved for KV on its way counts as filled. Any thread; costs a few
        additions for each request, whatever its length.

        Args:
            requests: those that run. One that gave its blocks up meanwhile is passed over.
        """
        num_held_slots = self._num_held_blocks * self.block_size
        num_unused_slots = 0
        for request in requests:
            table = self._tables.get(request.request_id)
            if table is not None:
                num_unused_slots += max(0, len(table.block_ids) * self.block_size - request.num_computed_tokens)
        # Below 1 also where the engine's thread freed blocks between the two counts.
        return min(num_unused_slots / num_held_slots, 1.0) if num_held_slots else 0.0

    def computed_blocks(self, request: Request, start: int, stop: int) -> tuple[ComputedBlock, ...]:
        """Blocks [start, stop) of the request, as they are announced to a reader."""
        block_ids, hashes, generations = self.block_ids(request), request.block_hashes, self.pool.generations
        num_full = request.num_computed_tokens // self.block_size
        return tuple(
            ComputedBlock(i, block_ids[i], generations[block_ids[i]], hashes[i] if i < num_full else b"")
            for i in range(start, stop)
        )

    # ---- a request's way

    def prepare(self, request: Request) -> None:
        """Hashes the full blocks of the request's tokens and estimates what is to compute. Touches no table."""
        request.num_uncached_tokens = request.num_tokens - self.num_cached_tokens(request)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of the request that are in the prefix cache now. Hashes what is not yet; nothing is held."""
        if self._is_hashed(request):
            self._extend_hashes(request, request.num_tokens // self.block_size)
        return len(self._find_prefix(request)) * self.block_size

    def admit(self, request: Request, *, num_new_tokens: int, num_total_tokens: int, num_reserved_blocks: int) -> bool:
        """Takes the request's cached prefix, and blocks for the first tokens after it.

        Sets `num_computed_tokens`, and `num_cached_tokens` when it was never admitted before.

        Args:
            num_new_tokens: take blocks for this many tokens after the prefix now, or for as many as there are.
            num_total_tokens: tokens that it will certainly need; blocks for all of them have to be free, beside
                those promised to others.
            num_reserved_blocks: blocks that have to stay free besides.

        Returns:
            False, with nothing taken, when the blocks do not suffice.
        """
        assert request.request_id not in self._tables, f"{request.request_id} has blocks already"
        with self.pool.lock:
            cached = self._find_prefix(request)
            needed = num_blocks_for(num_total_tokens, self.block_size) - len(cached)
            spare = self.pool.num_free - self.pool.num_free_among(cached) - self._num_promised_blocks
            if needed + num_reserved_blocks > spare:
                return False
            self.pool.acquire(cached)
            self._tables[request.request_id] = BlockTable([], len(cached), needed)
            self._num_promised_blocks += needed
            self._append(self._tables[request.request_id], cached)
            num_cached_tokens = len(cached) * self.block_size
            took = self.allocate_slots(request, min(num_total_tokens, num_cached_tokens + num_new_tokens))
            assert took, "blocks counted as free were not"
        request.num_computed_tokens = num_cached_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached_tokens
            self.num_query_tokens += request.num_tokens
            self.num_hit_tokens += num_cached_tokens
        return True

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Grows the request's table to hold `num_tokens` tokens. False, with nothing taken, when blocks run out."""
        table = self._tables[request.request_id]
        missing = num_blocks_for(num_tokens, self.block_size) - len(table.block_ids)
        if missing <= 0:
            return True
        with self.pool.lock:
            block_ids = self.pool.allocate(missing)
            if block_ids is None:
                return False
            self._append(table, block_ids)
            kept = min(missing, table.num_promised)
            table.num_promised -= kept
            self._num_promised_blocks -= kept
        return True

    def cache_blocks(self, request: Request) -> None:
        """Makes the blocks that `num_computed_tokens` fills findable."""
        table = self._tables[request.request_id]
        first, end = table.num_committed, request.num_computed_tokens // self.block_size
        if end <= first or not self._is_hashed(request):
            return
        self._extend_hashes(request, end)
        self.pool.commit_chain(table.block_ids[first:end], request.block_hashes[first:end])
        table.num_committed = end

    def free(self, request: Request) -> None:
        """Gives up the request's blocks. Others may still refer to them."""
        with self.pool.lock:
            table = self._tables.pop(request.request_id)
            self._num_promised_blocks -= table.num_promised
            refs = self._table_refs
            for block_id in table.block_ids:
                refs[block_id] -= 1
                if refs[block_id] == 0:
                    self._num_held_blocks -= 1
            self.pool.release(table.block_ids)

    # ---- inside

    def _append(self, table: BlockTable, block_ids: Sequence[int]) -> None:
        refs = self._table_refs
        for block_id in block_ids:
            if refs[block_id] == 0:
                self._num_held_blocks += 1
            refs[block_id] += 1
        table.block_ids.extend(block_ids)

    def _is_hashed(self, request: Request) -> bool:
        """Hashes are needed to find blocks, and to name those that another node reads."""
        return self.pool.enable_caching or request.prefill_only

    def _extend_hashes(self, request: Request, num_full_blocks: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        if len(hashes) >= num_full_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(self.namespace, request.cache_salt)
        for index in range(len(hashes), num_full_blocks):
            parent = chain(parent, request.token_slice(index * size, (index + 1) * size))
            hashes.append(parent)

    def _find_prefix(self, request: Request) -> list[int]:
        """Cached leading blocks; never all tokens, as the last one has to be run for its logits."""
        if request.sampling.prompt_logprobs is not None and request.first_token_time is None:
            return []  # Its prompt's logits are wanted, so all of it is run.
        usable = (request.num_tokens - 1) // self.block_size
        return self.pool.find_chain(request.block_hashes[:usable])

    # ---- checks

    def check_integrity(self) -> None:
        """Asserts that tables, references, promises and committed hashes agree with each other and with the pool."""
        with self.pool.lock:
            self.pool.check_integrity()
            refs = [0] * self.pool.num_blocks
            for request_id, table in self._tables.items():
                assert len(set(table.block_ids)) == len(table.block_ids), f"{request_id} has a block twice"
                assert 0 <= table.num_committed <= len(table.block_ids)
                assert table.num_promised >= 0
                for block_id in table.block_ids:
                    refs[block_id] += 1
                for block_id in table.block_ids[: table.num_committed] if self.pool.enable_caching else ():
                    assert self.pool.hash_of(block_id) is not None, f"{request_id}: committed block {block_id} unnamed"
                for block_id in table.block_ids[table.num_committed :]:
                    assert self.pool.hash_of(block_id) is None, f"{request_id} writes into findable block {block_id}"
            assert refs == self._table_refs
            for request_id, table in self._tables.items():
                for block_id in table.block_ids[table.num_committed :]:
                    assert refs[block_id] == 1, f"{request_id} shares block {block_id}, which is being written"
            assert all(count <= self.pool.ref_count(block_id) for block_id, count in enumerate(refs))
            assert self._num_held_blocks == sum(1 for count in refs if count)
            assert self._num_promised_blocks == sum(table.num_promised for table in self._tables.values())
            assert self.num_draining_blocks >= 0
