"""Compares what the ranks of a replica sampled, under ``--verify-agreement``."""

from collections import Counter

from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import StepResult
from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.mesh import global_rank


class ResultComparison:
    """Holds results until all tp ranks have answered a step, then wants them equal."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._parallel = parallel
        # By (dp_rank, step_id), then by tp_rank.
        self._heard: dict[tuple[int, int], dict[int, StepResult]] = {}

    def hear(self, result: StepResult) -> StepResult | None:
        """Take one rank's result, and return tp_rank 0's once all have come and are equal.

        Raises:
            RankMismatch: names the rank that differs from most (from tp_rank 0, of two).
        """
        key = (result.dp_rank, result.step_id)
        heard = self._heard.setdefault(key, {})
        heard[result.tp_rank] = result
        if len(heard) == self._parallel.tp_size:
            self._compare(self._heard.pop(key))
            return heard[0]
        return None

    def silent(self, dp_rank: int, step_id: int) -> list[int]:
        """tp ranks of a replica that have not answered a step."""
        heard = self._heard.get((dp_rank, step_id), {})
        return [tp for tp in range(self._parallel.tp_size) if tp not in heard]

    def _compare(self, heard: dict[int, StepResult]) -> None:
        sampled = {
            tp_rank: (result.counts, result.token_ids, tuple(result.bad_lanes))
            for tp_rank, result in sorted(heard.items())
        }
        (common, _), *others = Counter(sampled.values()).most_common()
        if not others:
            return
        tp_rank = next(tp_rank for tp_rank, each in sampled.items() if each != common)
        result = heard[tp_rank]
        rank = global_rank(result.dp_rank, tp_rank, self._parallel)
        raise RankMismatch(
            f"rank {rank} (dp_rank {result.dp_rank} tp_rank {tp_rank}) sampled other tokens in "
            f"step {result.step_id} than the other ranks of its replica"
        )
