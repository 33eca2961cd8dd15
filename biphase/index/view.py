"""Who holds which block, in this process's memory: hash -> holders. Pure data, no connection.

Owns the rules that keep it free of ghosts (an event counts once, a gap in a holder's sequence makes everything it said
doubtful, another incarnation voids what the last one said) and what can be asked of it. Does not own where events come
from (follower.py), nor the compact table (table.py). Advisory: who believes it asks the holder, with the full hash,
before reading anything.

Voiding a holder only takes it out of the live ones; its entries go in small steps (`sweep`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from biphase.index.events import EventKind, IndexEvent, Position, Snapshot
from biphase.index.holder_sets import Slot
from biphase.index.table import BlockTable, keys_of
from biphase.request import BlockHash, NodeId

# Looked at first; most chains that miss do so early.
_FIRST_LOOK = 64
# `leading_blocks` looks at one block in so many: the length of the runs that several stores share a chain by.
_STRIDE = 64


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
        self._table = BlockTable()
        self._holders: dict[NodeId, _Holder] = {}
        self._live: dict[Slot, NodeId] = {}
        self._incarnations: dict[Slot, str] = {}
        self._loading: set[Slot] = set()
        # The last life of each node that ended: late events of it are not a new life.
        self._ended: dict[NodeId, str] = {}
        self._num_slots = 0
        # Raised by every change, so that what is derived from the view can tell whether it is current.
        self.version = 0

    # ---- what is known

    @property
    def num_entries(self) -> int:
        """Different block contents in the table, those of void holders not yet swept included."""
        return self._table.num_entries

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
        holders = self._table.holders(self._table.number_of(block_hash))
        return sorted(self._live[slot] for slot in holders if slot in self._live)

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

        For choosing among holders, in few looks at the table: at one block in 64, and between two whose holders differ
        by bisection, as if nobody had a block without those before it. A holder that lacks fewer than 64 blocks in the
        middle of what it has may be counted as if it had them.
        """
        lengths: dict[Slot, int] = {}
        if not hashes:
            return {}
        number = self._table.number_of(hashes[0])
        current = self._live.keys() & self._table.holders(number)
        place, end = 0, len(hashes) - 1
        while current and place < end:
            look = min(place + _STRIDE - place % _STRIDE, end)
            after = self._table.number_of(hashes[look])
            if after == number:
                place = look
                continue
            # Equal up to `place`, different at `look`.
            while look - place > 1:
                middle = (place + look) // 2
                found = self._table.number_of(hashes[middle])
                if found == number:
                    place = middle
                else:
                    look, after = middle, found
            left = current & self._table.holders(after)
            if len(left) < len(current):
                lengths.update(dict.fromkeys(current - left, look))
            current, number, place = left, after, look
        lengths.update(dict.fromkeys(current, len(hashes)))
        incarnations = self._incarnations
        return {incarnations[slot]: length for slot, length in lengths.items()}

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
        current: set[Slot] | None = None
        last = -1
        index = 0
        for begin, end in ((0, _FIRST_LOOK), (_FIRST_LOOK, len(hashes))):
            for number in self._table.numbers_of(hashes[begin:end]):
                if number != last:
                    last = number
                    found = self._table.holders(number)
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
        holder.num_blocks += self._table.store(holder.slot, keys_of(event.stored))
        holder.num_blocks -= self._table.remove(holder.slot, keys_of(event.removed))
        self.version += 1
        return Applied.CHANGED

    def start_load(self, node_id: NodeId, snapshot: Snapshot) -> Loading:
        """Begins to replace what is known of a holder. It stays in force until `load_some` said that it is complete."""
        holder = _Holder(node_id, snapshot.incarnation, snapshot.sequence, self._new_slot())
        self._loading.add(holder.slot)
        return Loading(holder, keys_of(snapshot.hashes))

    def load_some(self, loading: Loading, max_blocks: int = 5000) -> bool:
        """Takes in a part of the snapshot. Returns whether it was the last one."""
        part = loading.keys[loading.next : loading.next + max_blocks]
        loading.next += max_blocks
        loading.holder.num_blocks += self._table.store(loading.holder.slot, part)
        if not loading.complete:
            return False
        node_id = loading.holder.node_id
        previous = self._holders.get(node_id)
        self.void(node_id, ended=previous is not None and previous.incarnation != loading.holder.incarnation)
        self._loading.discard(loading.holder.slot)
        if self._ended.get(node_id) == loading.holder.incarnation:
            del self._ended[node_id]
        self._goes_live(loading.holder)
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
        self._table.mark_dirty()

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
        del self._live[holder.slot], self._incarnations[holder.slot]
        if holder.num_blocks:
            self._table.mark_dirty()
        self.version += 1
        return True

    def sweep(self, max_shards: int = 1) -> int:
        """Removes entries of void holders from some shards. Returns how many shards are still to do."""
        return self._table.sweep(self._live.keys() | self._loading, max_shards)

    def _replace(self, node_id: NodeId, incarnation: str, sequence: int) -> _Holder:
        previous = self._holders.get(node_id)
        self.void(node_id, ended=previous is not None)
        holder = _Holder(node_id, incarnation, sequence, self._new_slot())
        self._goes_live(holder)
        return holder

    def _goes_live(self, holder: _Holder) -> None:
        self._holders[holder.node_id] = holder
        self._live[holder.slot] = holder.node_id
        self._incarnations[holder.slot] = holder.incarnation

    def _new_slot(self) -> Slot:
        self._num_slots += 1
        return Slot(self._num_slots)

    # ---- checks

    def check_integrity(self) -> None:
        """Asserts that counts, sets and live holders agree with the table."""
        counts = self._table.check_integrity(self._live.keys(), self._loading)
        assert self._live == {h.slot: h.node_id for h in self._holders.values()}, "live slots and holders differ"
        assert self._incarnations == {h.slot: h.incarnation for h in self._holders.values()}
        for holder in self._holders.values():
            assert holder.num_blocks == counts[holder.slot], f"{holder.node_id} is counted wrong"
