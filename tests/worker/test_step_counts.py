"""What a scheduler counts of its steps, against the plans it gave."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_worker import Rig

from lockstep.comm.messages import ID_BYTES, ReplicaPlan
from lockstep.worker.graphs.mode import RunMode

prompts = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=30), min_size=1, max_size=9)


def real_tokens(plan: ReplicaPlan) -> int:
    chunks = sum(len(chunk.token_ids) // ID_BYTES for chunk in plan.chunks)
    return chunks + plan.num_lanes - len(plan.chunks) - len(plan.idle_lanes)


@settings(max_examples=25)
@given(prompts, st.sampled_from([(1, "auto"), (2, "auto"), (3, "always")]))
def test_counts_add_up_to_the_plans(requests: list[list[int]], replicas: tuple[int, str]) -> None:
    rig = Rig(dp_size=replicas[0], lockstep=replicas[1])
    for index, prompt in enumerate(requests):
        rig.add(f"r{index}", prompt, 7)
    rig.run()
    stats = rig.scheduler.stats()
    steps: Counter[tuple] = Counter()
    padding = 0
    for plan in rig.plans:
        agreement = plan.agreement
        steps[RunMode(agreement.run_mode).name, agreement.num_tokens_padded] += 1
        for replica, count in zip(plan.replicas, agreement.num_tokens_across_dp, strict=True):
            padding += (agreement.num_tokens_padded or count) - real_tokens(replica)
    counted: Counter[tuple] = Counter()
    for use in stats.graph_uses:
        counted[use.run_mode, use.num_tokens_padded] += use.num_steps
        assert bool(use.reason) == (use.run_mode == "EAGER") == (use.num_tokens_padded is None)
    batches = Counter(real_tokens(each) for plan in rig.plans for each in plan.replicas)
    assert counted == steps
    assert stats.num_padding_tokens == padding
    assert stats.batch_sizes == {n: batches[n] for n in sorted(batches) if n}
    assert stats.num_tokens == sum(n * steps for n, steps in stats.batch_sizes.items())


@pytest.mark.parametrize(
    ("mode", "reasons"),
    [
        ("NONE", {"the graph mode is NONE"}),
        ("FULL_DECODE_ONLY", {"FULL_DECODE_ONLY has no graphs for mixed batches"}),
    ],
)
def test_eager_steps_have_their_reason(mode: str, reasons: set[str]) -> None:
    rig = Rig(mode=mode)
    rig.add("a", [1, 2, 3], 4)
    rig.run()
    uses = rig.scheduler.stats().graph_uses
    assert {use.reason for use in uses if use.run_mode == "EAGER"} == reasons
    replays = {use.num_tokens_padded: use.num_steps for use in uses if use.run_mode == "FULL"}
    assert replays == ({} if mode == "NONE" else {1: 3})
