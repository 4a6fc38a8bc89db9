"""The scheduler over a simulated worker."""

import random

import pytest
from sim_worker import Rig, expected_outputs

from lockstep.comm.messages import unpack_ids


def random_requests(seed: int, count: int = 20, longest: int = 30) -> list[dict]:
    """Prompts of which many share a prefix, with lengths and stop ids at random."""
    rng = random.Random(seed)
    stems = [[rng.randrange(90) for _ in range(longest)] for _ in range(3)]
    return [
        {
            "req_id": f"r{index}",
            "prompt": rng.choice(stems)[: rng.randint(1, longest)]
            + [rng.randrange(90) for _ in range(rng.randint(0, 6))],
            "max_tokens": rng.randint(1, 20),
            "stops": tuple(rng.sample(range(97), rng.choice([0, 3]))),
            "seed": rng.randrange(1000),
        }
        for index in range(count)
    ]


@pytest.mark.parametrize("num_blocks", [16, 30, 200])
@pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("dp_size", "lockstep"), [(1, "auto"), (2, "auto"), (2, "always")])
def test_outputs_do_not_depend_on_pool_run_ahead_cache_or_replicas(
    num_blocks: int, run_ahead: int, caching: bool, dp_size: int, lockstep: str
) -> None:
    rig = Rig(
        num_blocks=num_blocks, run_ahead=run_ahead, caching=caching, dp_size=dp_size,
        lockstep=lockstep,
    )  # fmt: skip
    for request in random_requests(7):
        rig.add(**request)
    rig.run()
    for req_id, outputs in rig.outputs().items():
        add = rig.adds[req_id]
        assert outputs == expected_outputs(add, add.sampling.max_tokens), req_id
    for req_id, reason in rig.reasons().items():
        stopped = rig.outputs()[req_id][-1] in unpack_ids(rig.adds[req_id].stop_ids)
        assert reason == ("stop" if stopped else "length")
    stats = rig.scheduler.stats()
    if num_blocks == 16 and dp_size == 1:
        assert stats.replicas[0].num_preemptions > 0
