"""Capture between the steps of live requests, on GPUs: tokens, lanes, memory, order over ranks."""

import msgspec
import pytest
import torch
from gpu_rig import MAX_LANES, GpuRig, gpu_config, gpu_requests
from inline import Served, make_scheduler, run_turns
from layouts import layouts, name_of
from lockstep_ranks import serve_and_capture
from ranks import num_gpus, run_ranks

from lockstep.comm.messages import ReplicaPlan, StepAgreement, StepPlan
from lockstep.parallel.agreement import NO_STEP
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.schedule import late_captures

_BETWEEN_STEPS = {"logits", "chunk_ids", "token_lanes", "from_chunk", "sampling_history"}


def tokens_of(rig: GpuRig) -> dict[str, list[int]]:
    scheduler, served = make_scheduler(rig.worker.config, rig.ready.num_blocks), Served()
    sampling = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.3}]
    for index, options in enumerate(sampling):
        for add in gpu_requests(MAX_LANES, max_tokens=40, **options):
            scheduler.add(msgspec.structs.replace(add, req_id=f"{add.req_id}/{index}"))
    run_turns(rig.worker, scheduler, served)
    scheduler.check_conserved()
    return served.tokens


@pytest.mark.gpu
def test_tokens_are_those_of_eager_capture_and_memory_stays_in_its_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(late_captures, "STEPS_BETWEEN", 2)
    found = {}
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        rig = GpuRig(gpu_config(graph_mode=mode))
        found[mode] = tokens_of(rig)
        rig.close()
    rig = GpuRig(gpu_config(num_blocks=None, utilization=0.9, capture="lazy"))
    report, num_early = rig.ready.memory, len(rig.ready.graph_costs)
    assert 0 < report.graph_reserve and 0 < rig.ready.num_late_graphs
    assert tokens_of(rig) == found["FULL_AND_PIECEWISE"] == found["NONE"]
    late = rig.worker._started.bench.graph_runner.costs()[num_early:]
    assert len(late) == rig.ready.num_late_graphs
    taken = sum(cost.num_bytes for cost in late)
    free, total = torch.cuda.mem_get_info()
    rig.close()
    assert taken <= report.graph_reserve + (32 << 20), (taken, report.graph_reserve)
    assert (total - free) / total == pytest.approx(0.9, abs=0.01)


@pytest.mark.gpu
def test_live_lanes_and_their_blocks_are_bit_for_bit_as_before() -> None:
    rig = GpuRig(gpu_config(capture="lazy"))
    rig.prefill(5)
    rig.decode(RunMode.FULL, rig.sizes[-1])
    num_early, num_late = len(rig.ready.graph_costs), rig.ready.num_late_graphs
    for position in range(num_early, num_early + num_late):
        before = {name: value.clone() for name, value in live(rig).items()}
        order = StepAgreement(NO_STEP, 0, [0], 1)
        plan = StepPlan(0, rig._step_id, order, [ReplicaPlan(0)], capture=position)
        [result] = rig.worker.execute(plan)
        rig._step_id += 1
        assert result.captured is not None and result.captured.seconds > 0
        after = live(rig)
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        rig.decode(RunMode.FULL, rig.sizes[-1])
    rig.close()


def live(rig: GpuRig) -> dict[str, torch.Tensor]:
    statics = rig.parts.state.statics() | rig.parts.sampling.statics()
    kept = {name: value for name, value in statics.items() if name not in _BETWEEN_STEPS}
    return kept | {"kv": rig.kv.storage[1 : rig.kv.num_blocks]}


@pytest.mark.multigpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("parallel", layouts(num_gpus()), ids=name_of)
def test_all_ranks_capture_alike_and_give_the_tokens_of_one(parallel: ParallelConfig) -> None:
    adds = gpu_requests(30, max_tokens=40)
    one = msgspec.msgpack.encode(gpu_config())
    [(expected, ordered, _)] = run_ranks(
        serve_and_capture, 1, one, adds, "cuda", gloo=False, timeout_s=240
    )
    assert ordered == []
    lazy = msgspec.msgpack.encode(gpu_config(parallel=parallel, capture="lazy"))
    ranks = run_ranks(serve_and_capture, num_gpus(), lazy, adds, "cuda", gloo=False, timeout_s=240)
    _, ordered, _ = ranks[0]
    assert [rank[:2] for rank in ranks] == [(expected, ordered)] * num_gpus()
    sizes = [[(c.num_tokens, c.uniform_query_len) for c in rank[2]] for rank in ranks]
    assert sizes == [sizes[0]] * num_gpus() and len(sizes[0]) == len(ordered) > 0
