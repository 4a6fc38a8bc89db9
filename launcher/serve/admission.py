"""What may be in the server at once, generations and prompt tokens; and for how long they wait."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lockstep.launcher.serve.api_errors import ApiError, bad_request, unavailable
from lockstep.launcher.serve.options import ServeOptions
from lockstep.worker.config import WorkerConfig

DEFAULT_QUEUED = 4096


class Admission:
    """Counts generations from their admission to their end; a full server refuses more.

    Args:
        lanes: how many can run at once.
        queued: how many more may wait.
        queued_tokens: how many tokens of prompts without an answer yet there may be; None for any.
            A call is taken whatever its length if no prompt waits.
        queue_seconds: how long a generation may have nothing of its answer; None for ever.
    """

    def __init__(
        self,
        *,
        lanes: int,
        queued: int,
        queued_tokens: int | None = None,
        queue_seconds: float | None = None,
    ) -> None:
        self.limit = lanes + queued
        self.in_flight = 0
        self.waiting_tokens = 0
        self.num_refused = 0
        self.num_ended = 0
        self.queue_seconds = queue_seconds
        self._queued_tokens = queued_tokens

    @contextmanager
    def admit(self, lengths: Sequence[int]) -> Iterator["Admitted"]:
        """Admit generations with prompts of these lengths, all or none. Raises as ``check``."""
        self.check(len(lengths), sum(lengths))
        admitted = Admitted(self, lengths)
        try:
            yield admitted
        finally:
            admitted.leave()

    def check(self, count: int, num_tokens: int = 0) -> None:
        """Raises ApiError 503 if there is no room for ``count`` now, 400 if there never is."""
        if count > self.limit:
            self.num_refused += 1
            raise bad_request(
                f"n and the number of prompts ask for {count} answers; the server holds "
                f"{self.limit} (--max-num-seqs and --max-num-queued-reqs)"
            )
        reason = self._reason_to_wait(count, num_tokens)
        if reason is not None:
            self.num_refused += 1
            raise unavailable(reason)

    def _reason_to_wait(self, count: int, num_tokens: int) -> str | None:
        if self.in_flight + count > self.limit:
            return (
                f"{self.in_flight} requests are in the server and it holds {self.limit} "
                f"(--max-num-seqs and --max-num-queued-reqs), got {count} more"
            )
        waiting, most = self.waiting_tokens, self._queued_tokens
        if most is not None and waiting and waiting + num_tokens > most:
            return (
                f"prompts of {waiting} tokens wait and at most {most} may "
                f"(--max-num-queued-tokens), got {num_tokens} more"
            )
        return None


class Admitted:
    """What one call takes of an ``Admission``."""

    def __init__(self, admission: Admission, lengths: Sequence[int]) -> None:
        self._admission = admission
        self._count = len(lengths)
        self._began = time.monotonic()
        self._waiting = dict(enumerate(lengths))
        admission.in_flight += self._count
        admission.waiting_tokens += sum(lengths)

    def begin(self, index: int) -> None:
        """Generation ``index`` has something of its answer, for the first time or again."""
        self._admission.waiting_tokens -= self._waiting.pop(index, 0)

    @contextmanager
    def deadline(self, fail: Callable[[ApiError], None]) -> Iterator[None]:
        """Meanwhile, in this event loop, ``fail`` hears if a generation waits for too long."""
        most = self._admission.queue_seconds
        if most is None:
            yield
            return
        timer = asyncio.get_running_loop().call_later(most, self._refuse_late, most, fail)
        try:
            yield
        finally:
            timer.cancel()

    def _refuse_late(self, most: float, fail: Callable[[ApiError], None]) -> None:
        if not self._waiting:
            return
        self._admission.num_refused += 1
        waited = time.monotonic() - self._began
        message = (
            f"{len(self._waiting)} of {self._count} answers had not begun after {waited:.2f} "
            f"seconds, and may wait {most:g} (--max-queue-seconds)"
        )
        fail(unavailable(message))

    def leave(self) -> None:
        self._admission.in_flight -= self._count
        self._admission.num_ended += self._count
        self._admission.waiting_tokens -= sum(self._waiting.values())


def create_admission(worker: WorkerConfig, queued: int | None, options: ServeOptions) -> Admission:
    """Room for every lane of every replica, and for ``queued`` that wait."""
    return Admission(
        lanes=worker.schedule.max_num_seqs * worker.parallel.dp_size,
        queued=DEFAULT_QUEUED if queued is None else queued,
        queued_tokens=options.max_num_queued_tokens,
        queue_seconds=options.max_queue_seconds,
    )
