"""Scheduler and worker together: the tokens of a request do not depend on how it was served."""

import random

import msgspec
import pytest
from inline import (
    SPEC,
    Served,
    alone_topology,
    dummy_model,
    make_scheduler,
    request,
    run_turns,
    serve,
    worker_config,
)
from rig import decode_alone

from lockstep.comm.messages import AddRequest
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker

PROMPTS = {
    "a": [5, 17, 3],
    "b": [44, 9, 9, 61, 2, 80, 33, 12, 12, 7],
    "c": [12],
    "d": [90, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14],
    "e": [5, 17, 3, 8],
    "f": [44, 9, 9, 61, 2, 80, 33, 12, 1],
    "g": [60, 61, 62],
    "h": [5, 17, 3, 8, 20, 21, 22, 23, 24],
}
NUM_TOKENS = 11


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    model = dummy_model(worker_config())
    return {key: decode_alone(model, prompt, NUM_TOKENS) for key, prompt in PROMPTS.items()}


def requests(**sampling: object) -> list[AddRequest]:
    options = {"max_tokens": NUM_TOKENS} | sampling
    return [request(key, prompt, **options) for key, prompt in PROMPTS.items()]


WAYS = {
    "plain": {"run_ahead": 0},
    "overlapped": {"run_ahead": 2},
    "far ahead": {"run_ahead": 4},
    "prompts in chunks of one block": {"max_num_batched_tokens": 7},
    "two at a time": {"max_num_seqs": 2},
    "no prefix cache": {"caching": False},
    "graphs": {"graph_mode": "FULL_AND_PIECEWISE"},
    "graphs of decode steps alone": {"graph_mode": "FULL_DECODE_ONLY"},
    "graphs in segments alone": {"graph_mode": "PIECEWISE"},
    "graphs in the plain loop, few blocks": {
        "graph_mode": "FULL_AND_PIECEWISE",
        "run_ahead": 0,
        "num_blocks": 12,
    },
    "so few blocks that requests are preempted": {"num_blocks": 12},
}
# No mixed batch is larger than the largest captured size unless the way says so.
RAN = {
    "NONE": {"EAGER"},
    "FULL_DECODE_ONLY": {"EAGER", "FULL"},
    "PIECEWISE": {"EAGER", "PIECEWISE"},
    "FULL_AND_PIECEWISE": {"EAGER", "PIECEWISE", "FULL"},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_serving_gives_the_tokens_of_each_request_alone(
    way: str, expected: dict[str, list[int]]
) -> None:
    served, scheduler, worker = serve(worker_config(**WAYS[way]), requests())
    assert served.tokens == expected
    assert set(served.finish.values()) == {"length"}
    preempted = sum(replica.num_preemptions for replica in scheduler._replicas)
    assert (preempted > 0) == ("few blocks" in way)
    ran = {mode.name for mode, number in worker.metrics.num_steps.items() if number}
    assert ran == RAN[WAYS[way].get("graph_mode", "NONE")]


@pytest.mark.parametrize(
    ("sizes", "replays"), [((1,), False), ((7,), False), ((4, 64), True), ((6, 2, 2, 4), True)]
)
def test_any_list_of_sizes_that_is_accepted_serves(
    sizes: tuple[int, ...], replays: bool, expected: dict[str, list[int]]
) -> None:
    config = worker_config(graph_mode="FULL_AND_PIECEWISE")
    graph = msgspec.structs.replace(config.graph, capture_sizes=sizes)
    served, _, worker = serve(msgspec.structs.replace(config, graph=graph), requests())
    assert served.tokens == expected
    assert (worker.metrics.num_steps[RunMode.FULL] > 0) == replays


def test_stop_ids_end_requests_with_run_ahead_as_without(expected: dict[str, list[int]]) -> None:
    stops = [tokens[4] for tokens in expected.values()]
    ended = {}
    for run_ahead in (0, 2):
        adds = [
            request(key, prompt, stop_ids=stops, max_tokens=NUM_TOKENS)
            for key, prompt in PROMPTS.items()
        ]
        served, *_ = serve(worker_config(run_ahead=run_ahead), adds)
        ended[run_ahead] = served.tokens
        assert set(served.finish.values()) == {"stop"}
    for key, tokens in ended[0].items():
        first = min(expected[key].index(stop) for stop in stops if stop in expected[key])
        assert tokens == expected[key][: first + 1]
    assert ended[0] == ended[2]


def test_seeded_sampling_does_not_depend_on_who_shares_the_batch() -> None:
    options = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "presence_penalty": 0.5}
    together, *_ = serve(worker_config(), requests(**options))
    few_blocks, *_ = serve(worker_config(num_blocks=12), requests(**options))
    assert few_blocks.tokens == together.tokens
    assert len({tuple(tokens) for tokens in together.tokens.values()}) == len(PROMPTS)
    for each in requests(**options)[:3]:
        alone, *_ = serve(worker_config(run_ahead=0), [each])
        assert alone.tokens == {each.req_id: together.tokens[each.req_id]}


def test_logprobs_arrive_with_their_tokens(expected: dict[str, list[int]]) -> None:
    served, *_ = serve(worker_config(), requests(logprobs=3))
    for key, tokens in expected.items():
        assert [entry.token_id for entry in served.logprobs[key]] == tokens
        assert all(entry.rank == 1 and len(entry.top_ids) == 3 for entry in served.logprobs[key])


@pytest.mark.parametrize("seed", [1, 2])
def test_requests_that_come_and_go_at_random_keep_their_own_tokens(seed: int) -> None:
    rng = random.Random(seed)
    config = worker_config(
        graph_mode="FULL_AND_PIECEWISE",
        run_ahead=3,
        num_blocks=14,
        max_num_batched_tokens=9,
        max_num_seqs=5,
    )
    worker = Worker(config, SPEC, alone_topology())
    scheduler = make_scheduler(config, worker.start().num_blocks)
    served, prompts, aborted = Served(), {}, set()

    def come_or_go() -> None:
        if len(prompts) < 24 and rng.random() < 0.5:
            name = f"r{len(prompts)}"
            prompts[name] = [rng.randrange(97) for _ in range(rng.randrange(1, 14))]
            scheduler.add(request(name, prompts[name], max_tokens=rng.randrange(1, 12)))
        if prompts and rng.random() < 0.1:
            name = rng.choice(list(prompts))
            aborted.add(name)
            scheduler.abort(name)

    while len(prompts) < 24:
        come_or_go()
        run_turns(worker, scheduler, served, after_launch=come_or_go)
    worker.close()
    scheduler.check_conserved()
    assert set(served.finish) == set(prompts)
    assert {name for name, how in served.finish.items() if how == "abort"} <= aborted
    model = dummy_model(config)
    for name, prompt in prompts.items():
        made = served.tokens[name]
        assert made == decode_alone(model, prompt, len(made))
