"""Who owns the KV blocks of a replica: numbers only, the memory is the rank's."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from lockstep.comm.messages import PADDING_BLOCK


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free or evictable."""


class BlockPool:
    """Reference-counted blocks 1..num_blocks-1; block 0 is the padding block and never handed out.

    A block is held (by one or more requests), cached (full of known tokens, held by nobody, found
    by its key, evicted least recently used first) or free.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is padding), got {num_blocks}")
        self.total = num_blocks - 1
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self._references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.total - self.available

    @property
    def available(self) -> int:
        """Blocks that ``take`` can hand out."""
        return len(self._free) + len(self._cached)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, evicting cached ones once none is free."""
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.available} of {self.total} available")
        return [self.take_one() for _ in range(count)]

    def take_one(self) -> int:
        """``take(1)`` without the list: what growing lanes need at every step."""
        block_id = self._free.pop() if self._free else self._evict()
        self._references[block_id] = 1
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that ``find`` returned."""
        for block_id in block_ids:
            if not self._references[block_id]:
                del self._cached[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give blocks back, last first, so that the tail of a request is evicted before its head.

        Raises:
            ValueError: a block is not held (given back twice, or never taken).
        """
        for block_id in reversed(block_ids):
            if not 0 < block_id <= self.total or not self._references[block_id]:
                raise ValueError(f"block {block_id} is given back but not held")
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if block_id in self._key_of:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of ``keys``; still to be held by ``share``."""
        found = list[int]()
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these are held by nobody, so that sharing them uses up ``available``."""
        return sum(block_id in self._cached for block_id in block_ids)

    def publish(self, block_id: int, key: bytes) -> None:
        """Let others find a held block; the first block of a key stays the one that is found."""
        if not self._references[block_id]:
            raise ValueError(f"block {block_id} is published but not held")
        if key not in self._block_of and block_id not in self._key_of:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, since what they hold is not to be trusted."""
        for block_id in block_ids:
            key = self._key_of.pop(block_id, None)
            if key is None:
                continue
            del self._block_of[key]
            if block_id in self._cached:
                del self._cached[block_id]
                self._free.append(block_id)

    def check_conserved(self, owners: Iterable[Sequence[int]] = ()) -> None:
        """Raise AssertionError unless free + cached + held = total and references match owners."""
        held = {block: count for block, count in enumerate(self._references) if count}
        owned = Counter(block_id for block_ids in owners for block_id in block_ids)
        assert held == owned, f"blocks held {held}, owned by requests {dict(owned)}"
        everywhere = [*self._free, *self._cached, *held]
        assert len(everywhere) == self.total, f"{len(everywhere)} blocks, total {self.total}"
        assert set(everywhere) == set(range(1, self.total + 1)), "a block is lost or doubled"
        assert self._key_of == {block: key for key, block in self._block_of.items()}

    def _evict(self) -> int:
        if not self._cached:
            raise OutOfBlocks(f"1 block wanted, 0 of {self.total} available")
        block_id, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block_id)]
        return block_id
