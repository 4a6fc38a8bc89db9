"""One request as the scheduler sees it: its tokens, its place, and how far it is planned."""

import sys
from array import array
from enum import Enum

from msgspec import structs

from lockstep.comm.messages import AddRequest, unpack_ids

NEVER = sys.maxsize


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
        "block_ids",
        "block_keys",
        "cache_salt",
        "charge",
        "finish_reason",
        "lane",
        "max_outputs",
        "max_positions",
        "next_event",
        "num_cached_tokens",
        "num_planned",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "passed",
        "prefill_target",
        "publish_at",
        "replica",
        "req_id",
        "sampling",
        "seed",
        "state",
        "stop_ids",
        "stop_set",
        "token_ids",
    )

    def __init__(self, add: AddRequest, *, max_outputs: int, seed: int, arrival: int) -> None:
        self.req_id = add.req_id
        # Stop strings are the front end's; ranks need not read them.
        self.sampling = structs.replace(add.sampling, stop=())
        self.stop_ids = add.stop_ids
        self.stop_set = frozenset(unpack_ids(add.stop_ids))
        self.cache_salt = add.cache_salt
        self.token_ids = array("i", unpack_ids(add.prompt_ids))
        self.num_prompt_tokens = len(self.token_ids)
        self.max_outputs = max_outputs
        # Positions it may compute in all: the last output token needs no KV.
        self.max_positions = self.num_prompt_tokens + max_outputs - 1
        self.seed = seed
        self.arrival = arrival
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
        self.num_planned = 0
        self.prefill_target = 0
        self.num_published = 0
        self.publish_at = NEVER
        # A lane whose num_planned reached this needs a look; 0 while out of a lane or in prefill.
        self.next_event = 0

    @property
    def num_outputs(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_planned < self.prefill_target

    def begin(self, block_ids: list[int], num_computed: int) -> None:
        """Take a lane with blocks for all known tokens, the first ``num_computed`` in the cache."""
        self.state = RequestState.RUNNING
        self.block_ids = block_ids
        self.num_planned = num_computed
        self.prefill_target = len(self.token_ids)

    def surrender(self, state: RequestState) -> list[int]:
        """Go on to ``state`` without blocks, and return those it had.

        The lane number stays, since a plan has still to name the lane that leaves.
        """
        block_ids = self.block_ids
        self._own_nothing()
        self.state = state
        return block_ids
