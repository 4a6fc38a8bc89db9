"""Agreement of a lockstep group: the vectors, what must hold for any batches, and gloo."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proposals import batches, dispatcher, proposal

from lockstep.comm.messages import Chunk, ReplicaPlan, StepAgreement, pack_ids
from lockstep.parallel.agreement import NO_STEP, Proposal, agree, propose
from lockstep.worker.graphs.mode import GraphMode, RunMode

DATA = Path(__file__).parents[1] / "data/agreement_vectors.json"
VECTORS = json.loads(DATA.read_text())["vectors"]


@pytest.mark.parametrize("row", VECTORS, ids=lambda row: row["id"])
def test_vector(row: dict) -> None:
    proposals = [proposal(each["kind"], each["num_tokens"]) for each in row["replicas"]]
    agreed = agree(proposals, dispatcher().dispatch)
    assert RunMode(agreed.run_mode).name == row["expect"]["run_mode"]
    assert agreed.num_tokens_padded == row["expect"]["num_tokens_padded"]
    assert agreed.num_tokens_across_dp == [each["num_tokens"] for each in row["replicas"]]


@pytest.mark.parametrize(
    ("mode", "batches", "expect"),
    [
        ("FULL_AND_PIECEWISE", "Z:0 Z:0", (NO_STEP, 0, [0, 0], 0)),
        ("FULL_AND_PIECEWISE", "D:7 I:1", (RunMode.FULL, 8, [7, 1], 1)),
        ("FULL_AND_PIECEWISE", "M:600 D:3", (RunMode.EAGER, None, [600, 3], 0)),
        ("FULL_AND_PIECEWISE", "M:40 I:1", (RunMode.PIECEWISE, 40, [40, 1], 0)),
        ("FULL_DECODE_ONLY", "D:3 M:5", (RunMode.EAGER, None, [3, 5], 0)),
        ("FULL_DECODE_ONLY", "D:3 D:250", (RunMode.FULL, 256, [3, 250], 1)),
        ("FULL", "D:3 M:300", (RunMode.FULL, 304, [3, 300], 0)),
        ("FULL", "M:3 E:4", (RunMode.EAGER, None, [3, 4], 0)),
        ("NONE", "D:3 D:4", (RunMode.EAGER, None, [3, 4], 1)),
    ],
)
def test_cases(mode: str, batches: str, expect: tuple) -> None:
    pairs = [each.split(":") for each in batches.split()]
    proposals = [proposal(kind, int(tokens)) for kind, tokens in pairs]
    assert agree(proposals, dispatcher(GraphMode(mode)).dispatch) == StepAgreement(*expect)


def test_decode_beyond_the_mixed_grid_with_a_prefill_runs_eager() -> None:
    wide = dispatcher(seqs=600)
    decode, prefill = proposal("D", 590), proposal("M", 5)
    assert agree([decode, decode], wide.dispatch).run_mode == RunMode.FULL
    assert agree([decode, prefill], wide.dispatch) == StepAgreement(0, None, [590, 5], 0)


@given(
    st.lists(batches, min_size=1, max_size=8),
    st.sampled_from(GraphMode),
    st.sampled_from([4, 100, 256, 600]),
)
def test_any_batches(proposals: list[Proposal], mode: GraphMode, seqs: int) -> None:
    one = dispatcher(mode, seqs)
    agreed = agree(proposals, one.dispatch)
    if not any(each.num_tokens for each in proposals):
        assert agreed.run_mode == NO_STEP
        return
    assert agreed.num_tokens_across_dp == [each.num_tokens or 1 for each in proposals]
    if agreed.run_mode == RunMode.EAGER:
        assert agreed.num_tokens_padded is None
        return
    largest = max(agreed.num_tokens_across_dp)
    assert agreed.num_tokens_padded is not None and agreed.num_tokens_padded >= largest
    uniform = agreed.uniform_query_len
    keys = {
        one.dispatch(agreed.num_tokens_padded, max(each.num_reqs, 1), uniform)
        for each in proposals
        if agreed.run_mode == RunMode.FULL
    }
    assert len(keys) <= 1
    wishes = [one.dispatch(*each)[0] for each in proposals if each.num_tokens]
    assert agreed.run_mode == min(wishes)


def test_proposal_of_a_plan() -> None:
    full = RunMode.FULL
    assert propose(ReplicaPlan(3), max_mode=full) == (3, 3, 1, 0, 2)
    assert propose(ReplicaPlan(0), max_mode=full).num_tokens == 0
    chunks = [Chunk(2, pack_ids([5, 6, 7]), True)]
    mixed = ReplicaPlan(4, chunks=chunks, idle_lanes=[3])
    assert propose(mixed, max_mode=full) == (5, 4, 0, 0, 2)
