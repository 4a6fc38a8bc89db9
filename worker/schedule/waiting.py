"""The queue of one replica: who waits, and who of them fits into the block pool now."""

import time
from collections import OrderedDict
from collections.abc import Iterator

from lockstep.worker.request import Request
from lockstep.worker.schedule.block_keys import extend_keys
from lockstep.worker.schedule.block_pool import BlockPool
from lockstep.worker.schedule.histogram import empty_histogram
from lockstep.worker.schedule.policy import RESERVE_AFTER, in_reach

_QUEUE_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0,
    15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class WaitingQueue:
    """Requests in order of arrival, preempted ones first.

    A request is admitted with blocks for all its known tokens, so that a prompt once begun can
    always be finished. One that was preempted often is admitted only with a reserve for all that
    it and the running ones may still need, so that it is not preempted again.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, caching: bool) -> None:
        self.requests: OrderedDict[str, Request] = OrderedDict()
        self.num_cached_tokens = 0
        self.num_looked_up_tokens = 0
        self.queue_seconds = empty_histogram(_QUEUE_S)
        self._pool = pool
        self._block_size = block_size
        self._caching = caching
        # False while nothing has happened that could let in a request that did not fit.
        self._worth_trying = True

    def __len__(self) -> int:
        return len(self.requests)

    def enqueue(self, request: Request) -> None:
        self.requests[request.req_id] = request
        self._worth_trying = True

    def put_back(self, request: Request) -> None:
        """Queue a preempted request before all others."""
        self.enqueue(request)
        self.requests.move_to_end(request.req_id, last=False)

    def remove(self, request: Request) -> None:
        self.requests.pop(request.req_id, None)
        self._worth_trying = True

    def try_again(self) -> None:
        """Say that blocks came free or were published."""
        self._worth_trying = True

    def could_admit(self, running: list[Request]) -> bool:
        if self._worth_trying:
            reach = in_reach(self.requests.values())
            self._worth_trying = any(self._fits(request, running) for request in reach)
        return self._worth_trying

    def admissions(self, running: list[Request]) -> Iterator[Request]:
        """Admit requests one by one as the caller asks for them, and append them to ``running``.

        Later requests pass one that does not fit, but only so often (``MAX_PASSED``).
        """
        passed = list[Request]()
        if not self._worth_trying:
            return
        for request in list(in_reach(self.requests.values())):
            if not self._fits(request, running):
                passed.append(request)
                continue
            self._admit(request)
            running.append(request)
            for each in passed:
                each.passed += 1
            yield request
        self._worth_trying = False

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _fits(self, request: Request, running: list[Request]) -> bool:
        hits = self._find(request)
        new = self.num_blocks(request.num_tokens) - len(hits) + self._pool.count_idle(hits)
        return self._pool.available >= new + self._reserve(request, running)

    def _reserve(self, request: Request, running: list[Request]) -> int:
        """Blocks that must stay available, so that running requests can grow."""
        if not running:
            return 0
        if request.num_preemptions < RESERVE_AFTER:
            return -(-len(running) // 4)
        growth = sum(self.num_blocks(each.max_positions) - len(each.block_ids) for each in running)
        own = self.num_blocks(request.max_positions) - self.num_blocks(request.num_tokens)
        return growth + own

    def _find(self, request: Request) -> list[int]:
        """Cached blocks of the request's tokens; its last token is always computed anew.

        A request whose logits depend on all its tokens looks none up, so that ranks see them all.
        """
        if not self._caching or request.sampling.needs_history:
            return []
        full = (request.num_tokens - 1) // self._block_size
        extend_keys(request, full, self._block_size)
        return self._pool.find(request.block_keys[:full])

    def _admit(self, request: Request) -> None:
        del self.requests[request.req_id]
        hits = self._find(request)
        self._pool.share(hits)
        new = self.num_blocks(request.num_tokens) - len(hits)
        request.begin(hits + self._pool.take(new), len(hits) * self._block_size)
        request.num_published = len(hits)
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_planned
            self.queue_seconds.observe(time.monotonic() - request.arrived_s)
        self.num_cached_tokens += request.num_planned
        self.num_looked_up_tokens += request.num_tokens
