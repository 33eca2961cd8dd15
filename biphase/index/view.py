"""Who holds which block, in this process's memory: hash -> holders. Pure data, no connection.

Owns the table, its compact form, and the rules that keep it free of ghosts: an event counts once, a gap in a holder's
sequence makes everything it said doubtful, another incarnation voids what the last one said. Does not own where events
come from (follower.py). Advisory: who believes it asks the holder, with the full hash, before reading anything.

Memory. Of a hash the table keeps 60 bits: two of a million blocks share them with probability 5e-7, and the price is
one lease that finds nothing. Each set of holders has a number, and the table maps hashes to such numbers: plain ints,
so that the garbage collector never walks a million entries. Voiding a holder only takes its number out of the
live ones; its entries go in small steps (`sweep`), so that losing a node with a million blocks stalls nobody.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NewType

from biphase.index.events import HASH_BYTES, EventKind, IndexEvent, Position, Snapshot
from biphase.request import BlockHash, NodeId

Slot = NewType("Slot", int)  # one life of one holder, as numbered here; never used twice
_Holders = frozenset[Slot]

_NUM_SHARDS = 64
_NOBODY = 0  # number of the empty set
# Looked at first; most chains that miss do so early.
_FIRST_LOOK = 64
# `leading_blocks` looks at one block in so many.
_STRIDE = 8
_WORDS_PER_HASH = HASH_BYTES // 8


class Applied(Enum):
    """What became of an event."""

    CHANGED = auto()
    # Seen before, or of a life that is over.
    IGNORED = auto()
    # Events before it are missing: the holder is void until a snapshot is loaded.
    GAP = auto()


@dataclass(slots=True)
class _Holder:
    node_id: NodeId
    incarnation: str
    sequence: int
    slot: Slot
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """`node_id` holds hashes[start:stop] of the chain that was asked for."""

    node_id: NodeId
    start: int
    stop: int


class Loading:
    """A snapshot on its way into the view, in parts; made by `IndexView.start_load`."""

    def __init__(self, holder: _Holder, keys: array[int]) -> None:
        self.holder = holder
        self.keys = keys
        self.next = 0

    @property
    def complete(self) -> bool:
        return self.next >= len(self.keys)


class IndexView:
    """The index of one namespace. For one thread."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._holders: dict[NodeId, _Holder] = {}
        self._live: dict[Slot, NodeId] = {}
        self._loading: set[Slot] = set()
        # The last life of each node that ended: late events of it are not a new life.
        self._ended: dict[NodeId, str] = {}
        self._num_slots = 0
        # Number -> set and back. Numbers of sets that no entry can have any more are free for others.
        self._sets: list[_Holders] = [frozenset()]
        self._numbers: dict[_Holders, int] = {frozenset(): _NOBODY}
        self._free_numbers: list[int] = []
        self._dirty: set[int] = set()
        # Raised by every change, so that what is derived from the view can tell whether it is current.
        self.version = 0

    # ---- what is known

    @property
    def num_entries(self) -> int:
        """Different block contents in the table, those of void holders not yet swept included."""
        return sum(map(len, self._shards))

    def holders(self) -> dict[NodeId, Position]:
        """Whose events are current up to where."""
        return {h.node_id: Position(h.incarnation, h.sequence) for h in self._holders.values()}

    def position(self, node_id: NodeId) -> Position | None:
        holder = self._holders.get(node_id)
        return None if holder is None else Position(holder.incarnation, holder.sequence)

    def num_blocks(self, node_id: NodeId) -> int:
        """Blocks that a holder said it has; 0 for an unknown one."""
        holder = self._holders.get(node_id)
        return 0 if holder is None else holder.num_blocks

    def holders_of(self, block_hash: BlockHash) -> list[NodeId]:
        (key,) = _keys(block_hash)
        number = self._shards[key % _NUM_SHARDS].get(key, _NOBODY)
        return sorted(self._live[slot] for slot in self._sets[number] if slot in self._live)

    def longest_chain(self, hashes: Sequence[BlockHash], exclude: Collection[NodeId] = ()) -> list[tuple[NodeId, int]]:
        """Who holds how many leading blocks of a chain.

        Returns:
            (holder, number of leading blocks, at least 1), longest first, then by name.
        """
        lengths: dict[NodeId, int] = {}
        for slot, length in self._prefix_lengths(hashes).items():
            node_id = self._live[slot]
            if node_id not in exclude:
                lengths[node_id] = length
        return sorted(lengths.items(), key=lambda found: (-found[1], found[0]))

    def leading_blocks(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Incarnation -> leading blocks of a chain that this life of a holder has; those with none are absent.

        For choosing among holders: looks at every eighth block, and at all between two whose holders differ. A holder
        that lacks fewer than eight blocks in the middle of what it has may be counted as if it had them.
        """
        runs: list[tuple[int, int]] = []
        for start in range(0, len(hashes), _STRIDE * _FIRST_LOOK):
            part = hashes[start : start + _STRIDE * _FIRST_LOOK]
            samples = self._numbers_of(part[::_STRIDE])
            for place, number in enumerate(samples):
                if runs and number != runs[-1][0]:
                    before = max(0, place * _STRIDE - _STRIDE)
                    runs += zip(self._numbers_of(part[before : place * _STRIDE]), itertools.count(start + before))
                runs.append((number, start + place * _STRIDE))
                if number == _NOBODY:
                    break
            else:
                continue
            break
        else:
            tail = len(hashes) - 1 - (len(hashes) - 1) % _STRIDE
            if hashes:
                runs += zip(self._numbers_of(hashes[tail:]), itertools.count(tail))
        lengths: dict[Slot, int] = {}
        current: set[Slot] | frozenset[Slot] = self._live.keys() & self._sets[runs[0][0]] if runs else set()
        last = runs[0][0] if runs else _NOBODY
        for number, place in runs:
            if number == last:
                continue
            last = number
            found = self._sets[number]
            if not current <= found:
                lengths.update(dict.fromkeys(current - found, place))
                current = current & found
        lengths.update(dict.fromkeys(current, len(hashes)))
        live, holders = self._live, self._holders
        return {holders[live[slot]].incarnation: length for slot, length in lengths.items() if length}

    def _numbers_of(self, hashes: Sequence[BlockHash]) -> list[int]:
        shards = self._shards
        return [shards[key % _NUM_SHARDS].get(key, _NOBODY) for key in _keys(b"".join(hashes))]

    def plan(self, hashes: Sequence[BlockHash], exclude: Collection[NodeId] = ()) -> list[Span]:
        """Covers the longest leading part of a chain that some holders have together, with few holders.

        Each span goes to whoever holds most from its start on, and goes as far as that holder does.
        """
        spans: list[Span] = []
        start = 0
        while start < len(hashes):
            best = self.longest_chain(hashes[start:] if start else hashes, exclude)
            if not best:
                break
            node_id, length = best[0]
            spans.append(Span(node_id, start, start + length))
            start += length
        return spans

    def _prefix_lengths(self, hashes: Sequence[BlockHash]) -> dict[Slot, int]:
        lengths: dict[Slot, int] = {}
        shards = self._shards
        current: set[Slot] | None = None
        last = -1
        index = 0
        for begin, end in ((0, _FIRST_LOOK), (_FIRST_LOOK, len(hashes))):
            for key in _keys(b"".join(hashes[begin:end])):
                number = shards[key % _NUM_SHARDS].get(key, _NOBODY)
                if number != last:
                    last = number
                    found = self._sets[number]
                    if current is None:
                        current = {slot for slot in found if slot in self._live}
                    else:
                        for slot in current - found:
                            lengths[slot] = index
                        current &= found
                    if not current:
                        return lengths
                index += 1
        for slot in current or ():
            lengths[slot] = index
        return lengths

    # ---- what changes it

    def apply(self, event: IndexEvent) -> Applied:
        """Takes one event into the view, once. After GAP the holder counts as holding nothing."""
        holder = self._holders.get(event.node_id)
        if holder is None or holder.incarnation != event.incarnation:
            if self._ended.get(event.node_id) == event.incarnation:
                return Applied.IGNORED
            if event.sequence != 1:
                self.void(event.node_id)
                return Applied.GAP
            holder = self._replace(event.node_id, event.incarnation, 0)
        if event.sequence <= holder.sequence:
            return Applied.IGNORED
        if event.kind is EventKind.GONE:
            self.void(event.node_id, ended=True)
            return Applied.CHANGED
        if event.sequence != holder.sequence + 1 or event.kind is EventKind.RELOAD:
            self.void(event.node_id)
            return Applied.GAP
        holder.sequence = event.sequence
        self._store(holder, _keys(event.stored))
        self._remove(holder, _keys(event.removed))
        self.version += 1
        return Applied.CHANGED

    def start_load(self, node_id: NodeId, snapshot: Snapshot) -> Loading:
        """Begins to replace what is known of a holder. It stays in force until `load_some` said that it is complete."""
        holder = _Holder(node_id, snapshot.incarnation, snapshot.sequence, self._new_slot())
        self._loading.add(holder.slot)
        return Loading(holder, _keys(snapshot.hashes))

    def load_some(self, loading: Loading, max_blocks: int = 5000) -> bool:
        """Takes in a part of the snapshot. Returns whether it was the last one."""
        part = loading.keys[loading.next : loading.next + max_blocks]
        loading.next += max_blocks
        self._store(loading.holder, part)
        if not loading.complete:
            return False
        node_id = loading.holder.node_id
        previous = self._holders.get(node_id)
        self.void(node_id, ended=previous is not None and previous.incarnation != loading.holder.incarnation)
        self._loading.discard(loading.holder.slot)
        if self._ended.get(node_id) == loading.holder.incarnation:
            del self._ended[node_id]
        self._holders[node_id] = loading.holder
        self._live[loading.holder.slot] = node_id
        self.version += 1
        return True

    def load(self, node_id: NodeId, snapshot: Snapshot) -> None:
        """Replaces what is known of a holder, in one go."""
        loading = self.start_load(node_id, snapshot)
        while not self.load_some(loading):
            pass

    def abandon_load(self, loading: Loading) -> None:
        """Gives up a snapshot half way; what it brought is swept."""
        self._loading.discard(loading.holder.slot)
        self._dirty = set(range(_NUM_SHARDS))

    def void(self, node_id: NodeId, *, ended: bool = False) -> bool:
        """Forgets everything a holder said. Returns whether there was anything.

        Args:
            ended: this life of the node is over for good, so that late events of it count for nothing.
        """
        holder = self._holders.pop(node_id, None)
        if holder is None:
            return False
        if ended:
            self._ended[node_id] = holder.incarnation
        del self._live[holder.slot]
        if holder.num_blocks:
            self._dirty = set(range(_NUM_SHARDS))
        self.version += 1
        return True

    def sweep(self, max_shards: int = 1) -> int:
        """Removes entries of void holders from some shards. Returns how many shards are still to do."""
        if not self._dirty:
            return 0
        for _ in range(min(max_shards, len(self._dirty))):
            self._sweep_shard(self._shards[self._dirty.pop()])
        if not self._dirty:
            kept = self._live.keys() | self._loading
            for holders, number in list(self._numbers.items()):
                if not holders <= kept:
                    del self._numbers[holders]
                    self._free_numbers.append(number)
        return len(self._dirty)

    def _sweep_shard(self, shard: dict[int, int]) -> None:
        kept = self._live.keys() | self._loading
        reduced = _Step(lambda number: self._number(self._sets[number] & kept))
        changes = {key: after for key, number in shard.items() if (after := reduced[number]) != number}
        for key, number in changes.items():
            self._put(shard, key, number)

    def _replace(self, node_id: NodeId, incarnation: str, sequence: int) -> _Holder:
        previous = self._holders.get(node_id)
        self.void(node_id, ended=previous is not None)
        holder = _Holder(node_id, incarnation, sequence, self._new_slot())
        self._holders[node_id] = holder
        self._live[holder.slot] = node_id
        return holder

    def _store(self, holder: _Holder, keys: Sequence[int]) -> None:
        own = {holder.slot}
        larger = _Step(lambda number: self._number(self._sets[number] | own))
        for key in keys:
            shard = self._shards[key % _NUM_SHARDS]
            before = shard.get(key, _NOBODY)
            after = larger[before]
            if after != before:
                shard[key] = after
                holder.num_blocks += 1

    def _remove(self, holder: _Holder, keys: Sequence[int]) -> None:
        own = {holder.slot}
        smaller = _Step(lambda number: self._number(self._sets[number] - own))
        for key in keys:
            shard = self._shards[key % _NUM_SHARDS]
            before = shard.get(key, _NOBODY)
            after = smaller[before]
            if after != before:
                self._put(shard, key, after)
                holder.num_blocks -= 1

    def _put(self, shard: dict[int, int], key: int, number: int) -> None:
        if number == _NOBODY:
            del shard[key]
        else:
            shard[key] = number

    def _number(self, holders: _Holders) -> int:
        """The number that stands for this set: one int object for all entries."""
        number = self._numbers.get(holders)
        if number is None:
            if self._free_numbers:
                number = self._free_numbers.pop()
                self._sets[number] = holders
            else:
                number = len(self._sets)
                self._sets.append(holders)
            self._numbers[holders] = number
        return number

    def _new_slot(self) -> Slot:
        self._num_slots += 1
        return Slot(self._num_slots)

    # ---- checks

    def check_integrity(self) -> None:
        """Asserts that counts, sets and live holders agree with the table."""
        counts = dict.fromkeys(self._live, 0)
        for number, shard in enumerate(self._shards):
            for key, set_number in shard.items():
                holders = self._sets[set_number]
                assert key % _NUM_SHARDS == number, "an entry is in the wrong shard"
                assert holders, "an entry without a holder"
                assert self._numbers.get(holders) == set_number, "a set of holders has two numbers"
                for slot in holders:
                    if slot in counts:
                        counts[slot] += 1
                    else:
                        assert slot in self._loading or number in self._dirty, "an entry of a void holder would stay"
        assert self._live == {h.slot: h.node_id for h in self._holders.values()}, "live slots and holders differ"
        for holder in self._holders.values():
            assert holder.num_blocks == counts[holder.slot], f"{holder.node_id} is counted wrong"


class _Step(dict[int, int]):
    """Number of a set -> number of the set after one change, worked out once per call."""

    def __init__(self, change: Callable[[int], int]) -> None:
        super().__init__()
        self._change = change

    def __missing__(self, before: int) -> int:
        after = self[before] = self._change(before)
        return after


def _keys(packed: bytes) -> array[int]:
    """60 bits of each packed hash: as much as a Python int of 32 bytes holds."""
    words = array("Q", packed)[::_WORDS_PER_HASH]
    return array("Q", [word >> 4 for word in words])
