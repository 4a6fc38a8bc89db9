"""What a lockstep group fixes before a step, as a pure function of all replicas' proposals."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lockstep.comm.messages import ID_BYTES, ReplicaPlan, StepAgreement

EAGER = 0
# Run mode of a step that is not taken; it has no place in the order of run modes.
NO_STEP = -1


class Padded(Protocol):
    """Descriptor of a graph, as far as an agreement needs it."""

    @property
    def num_tokens(self) -> int: ...


class Dispatch(Protocol):
    """Best run mode of at most ``max_mode`` for a batch, and its padded descriptor."""

    def __call__(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform_query_len: int,
        num_active_loras: int,
        max_mode: int,
    ) -> tuple[int, Padded]: ...


class Proposal(NamedTuple):
    """The batch one replica wants to run; ``num_tokens`` 0 means nothing to do.

    ``uniform_query_len`` is 0 for a mixed batch. ``max_mode`` bounds the run mode (0: EAGER).
    """

    num_tokens: int
    num_reqs: int
    uniform_query_len: int
    num_active_loras: int
    max_mode: int


def agree(
    proposals: Sequence[Proposal], dispatch: Dispatch, *, query_len: int = 1
) -> StepAgreement:
    """Fix run mode and padded count for a step; ``proposals`` are in order of dp_rank.

    An idle replica takes part with a dummy request of ``query_len`` tokens. The least run mode
    wins, and the largest batch must have a graph of it; else all run EAGER, unpadded.
    """
    if not any(proposal.num_tokens for proposal in proposals):
        return StepAgreement(NO_STEP, 0, [0] * len(proposals), 0)
    dummy = Proposal(query_len, 1, query_len, 0, max(p.max_mode for p in proposals))
    batches = [proposal if proposal.num_tokens else dummy for proposal in proposals]
    run_mode = min(dispatch(*batch)[0] for batch in batches)
    counts = [batch.num_tokens for batch in batches]
    uniform = _common([batch.uniform_query_len for batch in batches])
    num_reqs = max(batch.num_reqs for batch in batches)
    loras = max(batch.num_active_loras for batch in batches)
    agreed, padded = dispatch(max(counts), num_reqs, uniform, loras, run_mode)
    if agreed != run_mode or run_mode == EAGER:
        return StepAgreement(EAGER, None, counts, uniform)
    return StepAgreement(int(run_mode), padded.num_tokens, counts, uniform)


def _common(query_lens: list[int]) -> int:
    return query_lens[0] if len(set(query_lens)) == 1 else 0


def propose(plan: ReplicaPlan, *, max_mode: int, query_len: int = 1) -> Proposal:
    """The batch a replica runs under a plan: lanes without a chunk and not idle decode."""
    if not plan.chunks and not plan.idle_lanes:
        num_tokens = plan.num_lanes * query_len
        return Proposal(num_tokens, plan.num_lanes, query_len, 0, max_mode)
    decodes = plan.num_lanes - len(plan.chunks) - len(plan.idle_lanes)
    prompt_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks) // ID_BYTES
    return Proposal(decodes * query_len + prompt_tokens, plan.num_lanes, 0, 0, max_mode)
