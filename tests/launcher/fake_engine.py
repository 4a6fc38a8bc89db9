"""An ``EngineClient`` without a model: a function of the prompt's ids gives the answer's ids."""

import time
from collections.abc import Callable, Iterator

from lockstep.comm.messages import (
    AddRequest,
    MemoryReport,
    TokenDelta,
    TokenLogprobs,
    WorkerReady,
    lost_request,
    pack_ids,
    unpack_ids,
)
from lockstep.launcher.engine import EngineSummary, Progress
from lockstep.launcher.errors import EngineDead
from lockstep.launcher.resolve import Resolved
from lockstep.worker.schedule.stats import SchedulerStats

_DEATH = "rank 1 is lost: it was told to be"

Answer = Callable[[list[int]], list[int]]


def echo(prompt_ids: list[int]) -> list[int]:
    return prompt_ids


def endless(prompt_ids: list[int]) -> list[int]:
    """An answer that a test does not see the end of."""
    return prompt_ids * 500


class FakeEngine:
    """Gives each running request up to ``tokens_per_poll`` tokens a poll, last request first.

    A poll with requests takes ``step_s``. When it dies, it first ends what is in flight.
    """

    def __init__(
        self,
        answer: Answer = echo,
        *,
        tokens_per_poll: int = 1,
        max_model_len: int = 10_000,
        dies_after: int | None = None,
        step_s: float = 0.0,
    ) -> None:
        self._answer = answer
        self._tokens_per_poll = tokens_per_poll
        self._max_model_len = max_model_len
        self._polls_left = dies_after
        self._step_s = step_s
        self._running: dict[str, tuple[AddRequest, list[int]]] = {}
        self._refused: list[TokenDelta] = []
        self.added: list[AddRequest] = []
        self.aborted: list[str] = []
        self.most_running = 0
        self.shutdowns = 0

    def add(self, request: AddRequest) -> None:
        self.added.append(request)
        prompt_ids = unpack_ids(request.prompt_ids)
        if len(prompt_ids) >= self._max_model_len:
            error = f"prompt must be below max_model_len={self._max_model_len} tokens"
            self._refused.append(TokenDelta(request.req_id, finish_reason="error", error=error))
            return
        self._running[request.req_id] = (request, list(self._answer(prompt_ids)))
        self.most_running = max(self.most_running, len(self._running))

    def abort(self, req_id: str) -> None:
        self.aborted.append(req_id)
        if self._running.pop(req_id, None):
            self._refused.append(TokenDelta(req_id, finish_reason="abort"))

    def poll(self, timeout_s: float) -> list[TokenDelta]:
        if self._polls_left is not None:
            self._polls_left -= 1
            if self._polls_left < 0:
                return self._die()
        if self._running:
            time.sleep(self._step_s)
        deltas, self._refused = self._refused, []
        return deltas + [d for req_id in reversed(list(self._running)) for d in self._step(req_id)]

    def stats(self) -> SchedulerStats:
        return SchedulerStats([], {}, 0, 0, {}, 0, 0)

    def summary(self) -> EngineSummary:
        if self._polls_left is not None and self._polls_left < 0:
            raise EngineDead(_DEATH)
        memory = MemoryReport(parts={})
        ready = WorkerReady(0, 1, "host", "cpu", 99, "FULL_DECODE_ONLY", 4, {}, memory)
        return EngineSummary(launcher="fake", ready=[ready])

    def shutdown(self) -> None:
        self.shutdowns += 1

    def start(self, resolved: Resolved, progress: Progress) -> "FakeEngine":
        """A ``StartEngine``."""
        self.resolved = resolved
        progress("fake", 1, 1)
        return self

    def kill(self) -> None:
        """Die at the next poll."""
        self._polls_left = 0

    def _die(self) -> list[TokenDelta]:
        lost, self._running = list(self._running), {}
        if not lost:
            raise EngineDead(_DEATH)
        return [lost_request(req_id, _DEATH) for req_id in lost]

    def _step(self, req_id: str) -> Iterator[TokenDelta]:
        request, left = self._running[req_id]
        sampling = request.sampling
        budget = (sampling.max_tokens or 1 << 30) - (len(self._all(request)) - len(left))
        ids = left[: min(self._tokens_per_poll, budget)]
        ends = [i for i, token_id in enumerate(ids) if token_id in unpack_ids(request.stop_ids)]
        ids = ids[: ends[0] + 1] if ends else ids
        del left[: len(ids)]
        reason = "stop" if ends else "length" if not left or len(ids) == budget else None
        if reason:
            del self._running[req_id]
        logprobs = [TokenLogprobs(i, -0.5, 1, [i], [-0.5]) for i in ids]
        yield TokenDelta(
            req_id,
            pack_ids(ids),
            finish_reason=reason,
            logprobs=None if sampling.logprobs is None else logprobs,
        )

    def _all(self, request: AddRequest) -> list[int]:
        return list(self._answer(unpack_ids(request.prompt_ids)))


class HeldEngine(FakeEngine):
    """Gives nothing to prompts, as ids, of which ``holds`` is true; that may be changed."""

    def __init__(self, holds: Callable[[list[int]], bool], answer: Answer = echo) -> None:
        super().__init__(answer, step_s=0.005)
        self.holds = holds

    def _step(self, req_id: str) -> Iterator[TokenDelta]:
        request, _ = self._running[req_id]
        held = self.holds(unpack_ids(request.prompt_ids))
        return iter(()) if held else super()._step(req_id)
