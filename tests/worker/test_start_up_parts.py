"""Small parts of starting: budgets, uploads, threads, warm-up plans, counters."""

import gc

import pytest
import torch
from inline import alone_topology, request, serve, worker_config

from lockstep.comm.messages import GraphCost
from lockstep.worker import threads
from lockstep.worker.config import ScheduleConfig
from lockstep.worker.graphs.dispatch import BatchDescriptor
from lockstep.worker.graphs.memory import bytes_of_more_graphs, kv_budget
from lockstep.worker.graphs.mode import AttentionSupport, GraphMode, RunMode
from lockstep.worker.loop import Worker
from lockstep.worker.start_up import check_support
from lockstep.worker.upload import Uploader
from lockstep.worker.warm_up import SAMPLING_OPTIONS, warm_up_plans

CPU = torch.device("cpu")


def test_the_budget_is_what_is_left_of_the_promise() -> None:
    others = {"weights": 200 << 20, "driver": 100 << 20}
    sizes = {"total_bytes": 1000 << 20, "others": others}
    assert kv_budget(**sizes, utilization=0.9, least_bytes=10) == 600 << 20
    with pytest.raises(
        ValueError,
        match=r"gpu_memory_utilization must be at least 0\.350, got 0\.3: weights 200\.0 \+ "
        r"driver 100\.0 = 300\.0 MiB of 1000\.0 are taken, and the KV cache needs 50\.0",
    ):
        kv_budget(**sizes, utilization=0.3, least_bytes=50 << 20)


def test_more_graphs_cost_as_much_as_the_last_of_their_kind_and_never_nothing() -> None:
    mib = 1 << 20
    costs = [(8, 0, 90), (4, 0, 7), (8, 1, 30), (4, 1, 0)]
    captured = [GraphCost(tokens, length, 0.1, size * mib, 1) for tokens, length, size in costs]
    mixed, decode = BatchDescriptor(2, None, 0), BatchDescriptor(2, 2, 1)
    assert bytes_of_more_graphs(captured, [mixed, mixed]) == 14 * mib
    assert bytes_of_more_graphs(captured, [mixed, decode, decode]) == (7 + 1 + 1) * mib
    assert bytes_of_more_graphs(captured, []) == 0


def test_uploads_give_back_the_lists_and_refuse_too_many() -> None:
    upload = Uploader(6, 2, CPU)
    for shift in range(5):
        a, b, c = upload.send([1 + shift, 2], [], [7, 8, 9])
        assert (a.tolist(), b.tolist(), c.tolist()) == ([1 + shift, 2], [], [7, 8, 9])
    with pytest.raises(ValueError, match="a plan holds 7 numbers or more, the upload buffer 6"):
        upload.send([1] * 3, [2] * 4)


def test_the_user_s_thread_count_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    threads.set_thread_counts(CPU, 2)
    assert counts == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads.set_thread_counts(CPU, 2)
    threads.set_thread_counts(CPU, 16)
    threads.set_thread_counts(torch.device("cuda"), 1)
    assert counts == [4, 1, 1]


@pytest.mark.parametrize("max_model_len", [7, 64, 1000])
def test_warm_up_reaches_every_limit_and_goes_beyond_none(max_model_len: int) -> None:
    schedule = ScheduleConfig(
        max_num_seqs=6, max_num_batched_tokens=100, max_model_len=max_model_len
    )
    plans = warm_up_plans(schedule, 97, 100, 2)
    most_tokens = most_lanes = 0
    for plan in plans:
        assert len(plan.replicas) == 2 and plan.agreement.run_mode == RunMode.EAGER
        for replica in plan.replicas:
            lens = [len(chunk.token_ids) // 4 for chunk in replica.chunks]
            assert replica.num_lanes <= 6 and sum(lens) <= 100
            assert all(length < max_model_len for length in lens)
            most_tokens, most_lanes = max(most_tokens, sum(lens)), max(most_lanes, len(lens))
    assert most_lanes == 6 and most_tokens == min(100, 6 * (max_model_len - 1))
    joined = [join.sampling for plan in plans for join in plan.replicas[0].joins]
    assert all(option in joined for option in SAMPLING_OPTIONS)


@pytest.mark.parametrize("num_tokens", [1, 2, 100, 129, 516, 2064, 8192])
def test_warm_up_leaves_out_no_range_between_powers_of_two(num_tokens: int) -> None:
    schedule = ScheduleConfig(max_num_seqs=4, max_model_len=8192, max_num_batched_tokens=8192)
    plans = warm_up_plans(schedule, 97, num_tokens, 1)
    sizes = {plan.agreement.num_tokens_across_dp[0] for plan in plans}
    ranges = {(size - 1).bit_length() for size in sizes if size}
    assert ranges == set(range((num_tokens - 1).bit_length() + 1))


def test_a_worker_counts_what_it_ran() -> None:
    adds = [request("a", [1, 2, 3], max_tokens=5), request("b", [4], max_tokens=5)]
    _, _, worker = serve(worker_config(graph_mode="FULL_AND_PIECEWISE", run_ahead=0), adds)
    metrics = worker.metrics
    assert metrics.num_steps == {RunMode.EAGER: 0, RunMode.PIECEWISE: 1, RunMode.FULL: 4}
    assert metrics.num_tokens == 4 + 4 * 2 and metrics.num_padding_tokens == 0


def test_start_freezes_the_heap_and_close_thaws_it() -> None:
    worker = Worker(worker_config(), alone_topology().spec, alone_topology())
    assert gc.get_freeze_count() == 0
    worker.start()
    assert gc.get_freeze_count() > 0
    collections = worker.heap.num_collections
    gc.collect()
    assert worker.heap.num_collections == collections + 1 and worker.heap.longest_pause_s > 0
    worker.close()
    gc.collect()
    assert worker.heap.num_collections == collections + 1
    assert gc.get_freeze_count() == 0


class Backend:
    name = "half"

    def __init__(self, support: AttentionSupport) -> None:
        self.support = support


def test_a_backend_that_cannot_be_captured_is_refused_with_its_reason() -> None:
    check_support(GraphMode.NONE, Backend(AttentionSupport.NEVER))
    check_support(GraphMode.FULL_DECODE_ONLY, Backend(AttentionSupport.UNIFORM_BATCH))
    with pytest.raises(ValueError, match="'half': .* need attention support .* got NEVER"):
        check_support(GraphMode.FULL_DECODE_ONLY, Backend(AttentionSupport.NEVER))
