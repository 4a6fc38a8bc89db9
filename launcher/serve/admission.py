"""How many generations may be in the server at once."""

from lockstep.launcher.serve.api_errors import bad_request, unavailable
from lockstep.worker.config import WorkerConfig

DEFAULT_QUEUED = 4096


class Admission:
    """Counts generations from their admission to their end; a full server refuses more.

    Args:
        lanes: how many can run at once.
        queued: how many more may wait.
    """

    def __init__(self, *, lanes: int, queued: int) -> None:
        self.limit = lanes + queued
        self.in_flight = 0
        self.num_refused = 0

    def enter(self, count: int) -> None:
        """Admit all of ``count`` or none. Raises as ``check``."""
        self.check(count)
        self.in_flight += count

    def check(self, count: int) -> None:
        """Raises ApiError 503 if there is no room for ``count`` now, 400 if there never is."""
        if self.in_flight + count <= self.limit:
            return
        self.num_refused += 1
        if count > self.limit:
            raise bad_request(
                f"n and the number of prompts ask for {count} answers; the server holds "
                f"{self.limit} (--max-num-seqs and --max-num-queued-reqs)"
            )
        raise unavailable(
            f"{self.in_flight} requests are in the server and it holds {self.limit} "
            f"(--max-num-seqs and --max-num-queued-reqs), got {count} more"
        )

    def leave(self, count: int) -> None:
        self.in_flight -= count


def create_admission(worker: WorkerConfig, queued: int | None) -> Admission:
    """Room for every lane of every replica, and for ``queued`` that wait."""
    lanes = worker.schedule.max_num_seqs * worker.parallel.dp_size
    return Admission(lanes=lanes, queued=DEFAULT_QUEUED if queued is None else queued)
