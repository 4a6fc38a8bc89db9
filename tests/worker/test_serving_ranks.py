"""Serving over real gloo ranks: tensor parallel, and replicas in lockstep with an idle one."""

import random
import time

import msgspec
import pytest
from grammar_cases import constrained, patient_compiler
from inline import dummy_model, make_scheduler, request, worker_config
from inline import serve as serve_inline
from lockstep_ranks import run_but_skip, run_together, serve_on_ranks
from ranks import Rank, rank_outcomes, run_ranks
from ranks import join as join_ranks
from rig import chunk, decode_alone, eager, join

from lockstep.comm.codec import decode_plan, decode_result, encode
from lockstep.comm.errors import CommError, PeerLost, RankMismatch
from lockstep.comm.messages import (
    AddRequest,
    ReplicaPlan,
    StepPlan,
    StepResult,
    WorkerFailed,
)
from lockstep.parallel.config import ParallelConfig
from lockstep.worker import start_up
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker

# With at most 6 lanes the largest captured size is 8, or the most tokens of a step up to 12.
GRAPHS = {"graph_mode": "FULL_AND_PIECEWISE"}
PROMPTS = {"a": [5, 17, 3], "b": [44, 9, 9, 61, 2, 80, 33, 12, 12, 7], "c": [12], "d": [90, 1]}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    model = dummy_model(worker_config())
    return {key: decode_alone(model, prompt, 9) for key, prompt in PROMPTS.items()}


def requests(keys: str = "abcd", **sampling: object) -> list[AddRequest]:
    return [request(key, PROMPTS[key], **{"max_tokens": 9} | sampling) for key in keys]


@pytest.fixture(scope="module")
def structured() -> dict[str, list[int]]:
    served, *_ = serve_inline(worker_config(), constrained([0]), patient_compiler())
    assert set(served.finish.values()) == {"stop"}
    return served.tokens


def serve(parallel: ParallelConfig, adds: list[AddRequest], **options: object):
    config = worker_config(parallel=parallel, **options)
    return run_ranks(
        serve_on_ranks, parallel.world_size, msgspec.msgpack.encode(config), adds, gloo=False
    )


def test_two_tensor_parallel_ranks_give_the_tokens_of_one(expected) -> None:
    parallel = ParallelConfig(tp_size=2, timeout_s=20)
    outcomes = serve(parallel, requests(), **GRAPHS, max_num_batched_tokens=13)
    assert [tokens for tokens, _ in outcomes] == [expected, expected]
    assert run_modes(outcomes[0][1]) == {RunMode.EAGER, RunMode.PIECEWISE, RunMode.FULL}


def test_sampled_tokens_are_those_of_one_rank(structured) -> None:
    options = {"temperature": 0.9, "seed": 5, "top_k": 20, "repetition_penalty": 1.2}
    one, _ = serve(ParallelConfig(timeout_s=20), requests(**options))[0]
    two = serve(ParallelConfig(tp_size=2, timeout_s=20), requests(**options) + constrained([0]))
    assert [tokens for tokens, _ in two] == [one | structured] * 2


def run_modes(plans: list[StepPlan]) -> set[int]:
    return {plan.agreement.run_mode for plan in plans}


@pytest.mark.parametrize("keys", ["abcd", "b"], ids=["both busy", "one idle"])
def test_replicas_in_lockstep_take_every_step_together(expected, structured, keys: str) -> None:
    parallel = ParallelConfig(dp_size=2, dp_lockstep="always", verify_agreement=True, timeout_s=20)
    more, tokens = ([], {}) if keys == "b" else (constrained([0]), structured)
    outcomes = serve(parallel, requests(keys) + more, **GRAPHS, max_num_batched_tokens=9)
    tokens = {key: expected[key] for key in keys} | tokens
    assert [tokens for tokens, _ in outcomes] == [tokens] * 2
    idle_steps = [0 in [r.num_lanes for r in plan.replicas] for plan in outcomes[0][1]]
    assert all(idle_steps) == (keys == "b")
    assert run_modes(outcomes[0][1]) == {RunMode.PIECEWISE, RunMode.FULL}


def operations_by_step(rank: Rank, config_bytes: bytes) -> tuple[list[list[str]], list[StepPlan]]:
    """What this rank communicated in each step, while replicas run dry at different times."""
    config = msgspec.msgpack.decode(config_bytes, type=WorkerConfig)
    topology = join_ranks(rank, **msgspec.structs.asdict(config.parallel))
    worker = Worker(config, topology.spec, topology)
    scheduler = make_scheduler(config, worker.start().num_blocks)
    launch, rng, steps, plans = worker.launch, random.Random(3), [], []

    def noted(plan: StepPlan):
        with topology.ledger.recorded() as entries:
            launched = list(launch(plan))
        steps.append([str(entry) for entry in entries])
        return launched

    worker.launch = noted
    for turn in range(6):
        for index in range(rng.randrange(1, 4)):
            prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 9))]
            scheduler.add(request(f"{turn}/{index}", prompt, max_tokens=rng.randrange(1, 9)))
        plans += run_together(worker, scheduler, topology)[1]
    return steps, plans


def test_an_idle_replica_communicates_in_every_step_as_a_busy_one_does() -> None:
    parallel = ParallelConfig(dp_size=2, dp_lockstep="always", timeout_s=20)
    config = msgspec.msgpack.encode(worker_config(parallel=parallel, **GRAPHS))
    (one, plans), (other, _) = run_ranks(operations_by_step, 2, config, gloo=False)
    assert one == other and all(one) and len(one) == len(plans)
    for replica in (0, 1):
        idle = {p.agreement.run_mode for p in plans if not p.replicas[replica].num_lanes}
        assert idle == {RunMode.PIECEWISE, RunMode.FULL}, "an idle replica in both modes"


@pytest.mark.parametrize("verify", [False, True])
def test_a_replica_that_skips_a_step_is_named_and_nothing_hangs(verify: bool) -> None:
    parallel = ParallelConfig(
        dp_size=2, dp_lockstep="always", verify_agreement=verify, timeout_s=20
    )
    config = msgspec.msgpack.encode(worker_config(parallel=parallel))
    began = time.monotonic()
    other, skipped = rank_outcomes(run_but_skip, 2, config, gloo=False)
    assert time.monotonic() - began < 15
    assert isinstance(skipped.error, RankMismatch)
    assert str(skipped.error) == "rank 1 got step 2, but its next step is 1"
    assert isinstance(other.error, CommError) and "rank 1" in str(other.error)


def start_with_one_layer_less(rank: Rank, config_bytes: bytes) -> None:
    """Rank 1 was given another model than rank 0."""
    config = msgspec.msgpack.decode(config_bytes, type=WorkerConfig)
    if rank.rank == 1:
        model = msgspec.structs.replace(config.model, num_layers=1)
        config = msgspec.structs.replace(config, model=model)
    topology = join_ranks(rank, **msgspec.structs.asdict(config.parallel))
    Worker(config, topology.spec, topology).start()


def test_ranks_that_would_communicate_differently_are_told_apart_before_they_hang() -> None:
    config = msgspec.msgpack.encode(worker_config(parallel=ParallelConfig(tp_size=2)))
    began = time.monotonic()
    outcomes = rank_outcomes(start_with_one_layer_less, 2, config, gloo=False)
    assert time.monotonic() - began < 15
    for outcome in outcomes:
        assert isinstance(outcome.error, RankMismatch)
        assert "warm-up step 0" in str(outcome.error) and "rank 1" in str(outcome.error)


def start_without_a_tensor(rank: Rank, config_bytes: bytes) -> None:
    config = msgspec.msgpack.decode(config_bytes, type=WorkerConfig)
    topology = join_ranks(rank, **msgspec.structs.asdict(config.parallel))

    def load(*args):
        raise ValueError("tensor 'model.norm.weight' is missing from here")

    if rank.rank == 1:
        start_up.load_weights = load
    Worker(config, topology.spec, topology).start()


def test_a_rank_that_cannot_load_is_the_cause_that_all_tell() -> None:
    config = msgspec.msgpack.encode(worker_config(parallel=ParallelConfig(tp_size=2)))
    began = time.monotonic()
    other, failed = rank_outcomes(start_without_a_tensor, 2, config, gloo=False)
    assert time.monotonic() - began < 15
    assert isinstance(failed.error, ValueError) and "load_weights" in failed.traceback
    assert isinstance(other.error, PeerLost) and other.error.global_rank == 1
    assert "tensor 'model.norm.weight' is missing" in str(other.error)


class Plans:
    """A ring of plans that are all there already."""

    def __init__(self, plans: list[StepPlan]) -> None:
        self._data = [encode(plan) for plan in plans]

    def read(self, timeout_s: float) -> bytes | None:
        return self._data.pop(0)

    poll = read


class Results(list):
    def write(self, data: bytes, timeout_s: float = 10.0) -> None:
        self.append(decode_result(data))


def fail_in_the_second_step(rank: Rank, config_bytes: bytes) -> list[StepResult | WorkerFailed]:
    config = msgspec.msgpack.decode(config_bytes, type=WorkerConfig)
    topology = join_ranks(rank, **msgspec.structs.asdict(config.parallel))
    worker = Worker(config, topology.spec, topology)
    worker.start()
    prompt = ReplicaPlan(1, joins=[join(0, [1, 2], num_prompt=4)], chunks=[chunk(0, [7] * 4)])
    plans = Plans([eager(0, prompt), eager(1, ReplicaPlan(1)), eager(2, ReplicaPlan(1))])
    if rank.rank == 1:
        worker.execute(decode_plan(plans.read(0)))
        worker._started.bench.parts.step.model.logits = None
    results = Results()
    try:
        worker.run(plans, results)
    except Exception:
        return results
    raise AssertionError("the worker went on")


def test_a_rank_that_fails_wakes_the_others_with_its_reason() -> None:
    config = msgspec.msgpack.encode(worker_config(parallel=ParallelConfig(tp_size=2)))
    began = time.monotonic()
    other, failed = run_ranks(fail_in_the_second_step, 2, config, gloo=False)
    assert time.monotonic() - began < 15
    assert isinstance(failed[-1], WorkerFailed) and "NoneType" in failed[-1].error
    assert isinstance(other[-1], WorkerFailed)
    assert "rank 1" in other[-1].error and "NoneType" in other[-1].error
