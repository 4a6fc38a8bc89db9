"""Proposals and dispatchers for tests of agreement."""

from hypothesis import strategies as st

from lockstep.parallel.agreement import Proposal
from lockstep.worker.graphs.dispatch import Dispatcher
from lockstep.worker.graphs.grid import build_grid
from lockstep.worker.graphs.mode import GraphMode, RunMode


def dispatcher(mode: GraphMode = GraphMode.FULL_AND_PIECEWISE, seqs: int = 256) -> Dispatcher:
    return Dispatcher(build_grid(max_num_seqs=seqs, max_num_batched_tokens=8192), mode)


def proposal(kind: str, tokens: int) -> Proposal:
    """In the notation of the vectors."""
    return {
        "D": Proposal(tokens, tokens, 1, 0, RunMode.FULL),
        "M": Proposal(tokens, min(tokens, 4), 0, 0, RunMode.FULL),
        "I": Proposal(0, 0, 1, 0, RunMode.FULL),
        "E": Proposal(tokens, tokens, 1, 0, RunMode.EAGER),
        "Z": Proposal(0, 0, 1, 0, RunMode.FULL),
    }[kind]


batches = st.builds(proposal, st.sampled_from("DMIE"), st.integers(1, 600))
