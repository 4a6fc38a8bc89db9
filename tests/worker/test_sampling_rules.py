"""The sampling rules of design.md, section 4, over the whole of scheduler and worker.

The oracle is a request alone: logits by a prefill of all before a token, then the token by plain
Python. Every way of serving, with all kinds of requests in one batch, must give the same.
"""

import msgspec
import pytest
from inline import dummy_model, request, serve, worker_config
from oracle_sampling import adjusted_logits, draw
from rig import prefill_logits

from lockstep.comm.messages import unpack_ids
from lockstep.worker.schedule.seeds import draw_seed

NUM_TOKENS = 9
MIXED = {
    "greedy": ([5, 17, 3], {"temperature": 0.0}),
    "greedy with filters": ([5, 17, 3, 8], {"temperature": 0.0, "top_k": 2, "top_p": 0.1}),
    "noise alone": ([44, 9, 9, 61, 2, 80, 33, 12], {"temperature": 0.8, "seed": -3}),
    "top_k, top_p": ([12], {"temperature": 1.1, "top_k": 12, "top_p": 0.8, "seed": 2**63 - 1}),
    "min_p": ([90, 1, 2, 3, 4, 5], {"temperature": 1.5, "min_p": 0.05, "seed": 5}),
    "penalties": (
        [60, 61, 62, 60, 4, 50, 61, 60, 33, 34, 7, 96],
        {
            "seed": 6,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.3,
        },
    ),
    # Below 1 it rewards what was seen, so that every token of every chunk of the prompt matters.
    "greedy with penalties": (
        [*range(70, 94)],
        {"temperature": 0.0, "repetition_penalty": 0.3, "frequency_penalty": 2.0},
    ),
    "bias": ([1, 2, 3, 4, 5, 6, 7, 8, 9], {"seed": 7, "logit_bias": {3: 6.0, 40: -100.0}}),
    "logprobs": ([33, 34], {"temperature": 0.6, "seed": 8, "logprobs": 2}),
}
WAYS = {
    "plain loop": {"run_ahead": 0},
    "far ahead, prompts in chunks": {"run_ahead": 4, "max_num_batched_tokens": 7},
    "graphs, two at a time": {"graph_mode": "FULL_AND_PIECEWISE", "max_num_seqs": 2},
    "graphs, so few blocks that requests are preempted": {
        "graph_mode": "FULL_AND_PIECEWISE",
        "num_blocks": 11,
    },
}


def adds(**more):
    return [
        request(key, prompt, **{"max_tokens": NUM_TOKENS} | sampling | more)
        for key, (prompt, sampling) in MIXED.items()
    ]


@pytest.fixture(scope="module")
def model():
    return dummy_model(worker_config())


def by_oracle(model, add, seed):
    """Tokens of one request in plain Python over naive logits."""
    prompt, outputs, params = unpack_ids(add.prompt_ids), [], add.sampling
    for position in range(NUM_TOKENS):
        logits = prefill_logits(model, prompt + outputs).tolist()
        adjusted = adjusted_logits(logits, params, prompt, outputs, unpack_ids(add.stop_ids))
        outputs.append(draw(adjusted, params, seed, position))
    return outputs


@pytest.fixture(scope="module")
def expected(model):
    return {add.req_id: by_oracle(model, add, add.sampling.seed or 0) for add in adds()}


@pytest.mark.parametrize("way", WAYS)
def test_a_seeded_request_does_not_depend_on_how_it_is_served(way, expected):
    served, scheduler, _ = serve(worker_config(**WAYS[way]), adds())
    assert served.tokens == expected
    preempted = sum(replica.num_preemptions for replica in scheduler._replicas)
    assert (preempted > 0) == ("preempted" in way)


def unseeded():
    return [request(f"r{i}", [5, 17, 3], temperature=1.0, max_tokens=NUM_TOKENS) for i in range(5)]


def test_equal_unseeded_requests_differ_and_so_do_two_runs():
    first, *_ = serve(worker_config(), unseeded())
    again, *_ = serve(worker_config(), unseeded())
    drawn = [*first.tokens.values(), *again.tokens.values()]
    assert len({tuple(tokens) for tokens in drawn}) == 10


def test_a_base_seed_repeats_a_run_of_unseeded_requests(model):
    config = worker_config(max_num_seqs=2)
    schedule = msgspec.structs.replace(config.schedule, seed=4)
    served, *_ = serve(msgspec.structs.replace(config, schedule=schedule), unseeded())
    for arrival, add in enumerate(unseeded()):
        assert served.tokens[add.req_id] == by_oracle(model, add, draw_seed(4, arrival))


def test_min_tokens_holds_stop_ids_back(model, expected):
    for key in ("greedy", "noise alone"):
        prompt, sampling = MIXED[key]
        stop = expected[key][1]
        options = {"max_tokens": NUM_TOKENS} | sampling
        early, *_ = serve(worker_config(), [request(key, prompt, [stop], **options)])
        late_add = request(key, prompt, [stop], **options, min_tokens=4)
        late, *_ = serve(worker_config(), [late_add])
        assert early.tokens[key] == expected[key][: expected[key].index(stop) + 1]
        whole = by_oracle(model, late_add, sampling.get("seed", 0))
        assert stop not in whole[:4]
        end = whole.index(stop) + 1 if stop in whole else NUM_TOKENS
        assert late.tokens[key] == whole[:end]


def test_logprobs_are_of_the_raw_logits(model, expected):
    served, *_ = serve(worker_config(), adds())
    prompt, _ = MIXED["logprobs"]
    entries = served.logprobs["logprobs"]
    assert [entry.token_id for entry in entries] == expected["logprobs"]
    for count, entry in enumerate(entries):
        logits = prefill_logits(model, prompt + expected["logprobs"][:count])
        logprobs = logits.log_softmax(dim=-1)
        assert entry.logprob == pytest.approx(logprobs[entry.token_id].item(), abs=1e-4)
        assert entry.rank == 1 + int((logits > logits[entry.token_id]).sum())
        assert entry.top_ids == logits.topk(2).indices.tolist()
