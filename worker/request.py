"""One request as the scheduler sees it: its tokens, its place, and how far it is planned."""

import time
from enum import Enum

from msgspec import structs

from lockstep.comm.messages import ID_BYTES, AddRequest, unpack_ids
from lockstep.worker.grammars.matcher import Matcher


class RequestState(Enum):
    """WAITING in a queue, RUNNING in a lane, DRAINING (out of its lane, results in flight)."""

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"


class Request:
    """Prompt and outputs of one generation, and the blocks its lane owns.

    Args:
        max_outputs: it ends by length with this many output tokens.
        seed: keys its sampling noise.
        arrival: its number in order of arrival.
    """

    __slots__ = (
        "arrival",
        "arrived_s",
        "block_ids",
        "block_keys",
        "cache_salt",
        "charge",
        "check_at",
        "due_step",
        "finish_reason",
        "lane",
        "matcher",
        "max_outputs",
        "max_positions",
        "num_cached_tokens",
        "num_planned",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "packed_ids",
        "passed",
        "prefill_target",
        "replica",
        "req_id",
        "sampling",
        "seed",
        "state",
        "stop_ids",
        "stop_set",
    )

    def __init__(self, add: AddRequest, *, max_outputs: int, seed: int, arrival: int) -> None:
        self.req_id = add.req_id
        # Stop strings are the front end's and grammars the scheduler's; ranks need not read them.
        self.sampling = structs.replace(add.sampling, stop=(), structured_outputs=None)
        # Where it is in its grammar, after all committed tokens.
        self.matcher: Matcher | None = None
        self.stop_ids = add.stop_ids
        self.stop_set = frozenset(unpack_ids(add.stop_ids))
        self.cache_salt = add.cache_salt
        # Prompt and committed outputs as they travel: appending and cutting need no conversion.
        self.packed_ids = bytearray(add.prompt_ids)
        self.num_prompt_tokens = self.num_tokens
        self.max_outputs = max_outputs
        # Positions it may compute in all: the last output token needs no KV.
        self.max_positions = self.num_prompt_tokens + max_outputs - 1
        self.seed = seed
        self.arrival = arrival
        self.arrived_s = time.monotonic()
        self.replica = 0
        self.charge = 0
        self.state = RequestState.WAITING
        self.finish_reason: str | None = None
        self.num_preemptions = 0
        self.passed = 0
        self.lane = 0
        self.num_cached_tokens = 0
        # Keys outlive a preemption: they depend on tokens alone.
        self.block_keys: list[bytes] = []
        self._own_nothing()

    def _own_nothing(self) -> None:
        self.block_ids: list[int] = []
        # Its lane needs a look at this step of the replica; until then it just decodes. At the
        # step, num_planned positions are planned. 0 in prefill, and while out of a lane.
        self.due_step = 0
        self.num_planned = 0
        self.prefill_target = 0
        self.num_published = 0
        # Bytes of packed_ids at which a commit looks: a block is full or the last output there.
        # It looks at every token of a grammar.
        self.check_at = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and committed outputs."""
        return len(self.packed_ids) // ID_BYTES

    @property
    def num_outputs(self) -> int:
        """Committed output tokens."""
        return self.num_tokens - self.num_prompt_tokens

    def ids(self, start: int, end: int) -> bytes:
        """Packed ids of the tokens ``start`` .. ``end - 1``."""
        return bytes(self.packed_ids[start * ID_BYTES : end * ID_BYTES])

    @property
    def is_prefilling(self) -> bool:
        return self.num_planned < self.prefill_target

    def num_planned_by(self, step: int) -> int:
        """Positions planned before ``step`` of the replica."""
        return self.num_planned - max(0, self.due_step - step)

    def begin(self, block_ids: list[int], num_computed: int) -> None:
        """Take a lane with blocks for all known tokens, the first ``num_computed`` in the cache."""
        self.state = RequestState.RUNNING
        self.block_ids = block_ids
        self.num_planned = num_computed
        self.prefill_target = self.num_tokens

    def surrender(self, state: RequestState) -> list[int]:
        """Go on to ``state`` without blocks, and return those it had.

        The lane number stays, since a plan has still to name the lane that leaves.
        """
        block_ids = self.block_ids
        self._own_nothing()
        self.state = state
        return block_ids
