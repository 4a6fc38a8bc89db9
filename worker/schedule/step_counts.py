"""Steps counted by what they ran as: replays a graph, eager steps a reason, batches a size."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.comm.messages import StepAgreement
from lockstep.parallel.agreement import Proposal
from lockstep.worker.graphs.dispatch import Dispatcher
from lockstep.worker.graphs.fallback import fallback_reason
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.schedule.stats import GraphUse


class _Kind(NamedTuple):
    run_mode: int
    num_tokens_padded: int | None
    uniform_query_len: int
    reason: str
    dp_rank: int


class StepCounts:
    """Counts since the start; another thread may ask for them."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        # steps, real tokens, padding tokens
        self._kinds: dict[_Kind, list[int]] = {}
        self._batches: Counter[int] = Counter()

    def count(self, dp_rank: int, agreement: StepAgreement, proposals: Sequence[Proposal]) -> None:
        """One step of the lockstep group from ``dp_rank`` on, which proposed these batches."""
        padded, computed = agreement.num_tokens_padded, agreement.num_tokens_across_dp
        real = 0
        for proposal in proposals:
            if proposal.num_tokens:
                real += proposal.num_tokens
                self._batches[proposal.num_tokens] += 1
        reason = fallback_reason(self._dispatcher, proposals) if padded is None else ""
        kind = _Kind(agreement.run_mode, padded, agreement.uniform_query_len, reason, dp_rank)
        counts = self._kinds.setdefault(kind, [0, 0, 0])
        counts[0] += 1
        counts[1] += real
        counts[2] += (sum(computed) if padded is None else padded * len(computed)) - real

    def graph_uses(self) -> list[GraphUse]:
        """The best run mode first, then by size."""
        # Copied in one go, since the scheduler's thread may add a kind meanwhile.
        kinds = list(self._kinds.copy().items())
        kinds.sort(key=lambda each: (-each[0].run_mode, each[0].num_tokens_padded or 0, each[0]))
        return [
            GraphUse(
                run_mode=RunMode(kind.run_mode).name,
                num_tokens_padded=kind.num_tokens_padded,
                uniform_query_len=kind.uniform_query_len,
                num_steps=steps,
                num_tokens=real,
                num_padding_tokens=padding,
                reason=kind.reason,
                dp_rank=kind.dp_rank,
            )
            for kind, (steps, real, padding) in kinds
        ]

    def batch_sizes(self) -> dict[int, int]:
        """Steps of a replica by the real tokens of its batch, ascending; no dummy steps."""
        return dict(sorted(dict(self._batches).items()))
