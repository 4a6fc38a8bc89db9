"""A replayed decode step, as the profiler and as its graphs tell it. One GPU."""

from functools import partial

import pytest
import torch
from gpu_rig import GPU_TINY, MAX_LANES, MAX_MODEL_LEN, GpuRig, gpu_config

from lockstep.worker.bare_steps import BareSteps, blocks_per_lane
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.profiling.decode import DecodeProfiler, Effort, StepRecord
from lockstep.worker.profiling.launches import time_launch
from lockstep.worker.profiling.operation import num_submissions, own_times
from lockstep.worker.profiling.roles import LAYER_LINEARS, LM_HEAD, roles_of

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
EFFORT = Effort(steps=40, repetitions=5)
WIDTH = -(-MAX_MODEL_LEN // 16)


def open_rig(dtype: str) -> GpuRig:
    config = gpu_config(
        dtype=dtype, graph_mode="FULL_DECODE_ONLY", num_blocks=1 + MAX_LANES * WIDTH
    )
    assert blocks_per_lane(config) == WIDTH
    return GpuRig(config)


def profiled(steps: BareSteps, num_reqs: int, mode: RunMode) -> StepRecord:
    return DecodeProfiler(steps, DEVICE, EFFORT).profile(num_reqs, 32, mode)


def replays(rig: GpuRig) -> dict[tuple[object, str], int]:
    records = rig.parts.graphs._runner.records
    return {
        (key, part): count
        for key, record in records.items()
        for part, count in record.num_replays.items()
    }


def num_nodes(rig: GpuRig, descriptor: object, part: str) -> int:
    """Kernels, copies and fills that a graph holds."""
    from cuda.bindings import driver

    graph = rig.parts.graphs._runner.records[descriptor].parts[part]._graph.raw_cuda_graph()
    error, _, count = driver.cuGraphGetNodes(graph)
    assert error == driver.CUresult.CUDA_SUCCESS
    _, nodes, _ = driver.cuGraphGetNodes(graph, count)
    types = [driver.cuGraphNodeGetType(node)[1] for node in nodes]
    kinds = driver.CUgraphNodeType
    working = (
        kinds.CU_GRAPH_NODE_TYPE_KERNEL,
        kinds.CU_GRAPH_NODE_TYPE_MEMCPY,
        kinds.CU_GRAPH_NODE_TYPE_MEMSET,
    )
    return sum(kind in working for kind in types)


def test_operations_of_a_replayed_step_are_the_nodes_of_its_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", partial(torch.cuda.CUDAGraph, keep_graph=True))
    rig = open_rig("float32")
    try:
        before = replays(rig)
        found = profiled(BareSteps(rig.worker), 8, RunMode.FULL)
        # Prompts, a lane at a time, replay tails of their own.
        often = EFFORT.steps
        used = [key for key, count in replays(rig).items() if count - before[key] >= often]
        assert sorted(part.split()[0] for _, part in used) == ["body", "tail"]
        nodes = sum(num_nodes(rig, *key) for key in used)
        # The result's row goes home behind the graphs.
        inside = [each for each in found.operations if not each.name.startswith("Memcpy DtoH")]
        assert (found.run_mode, len(inside)) == ("FULL", nodes)
        assert num_submissions(found.operations) == 3
    finally:
        rig.close()


def test_work_is_about_as_long_as_the_step() -> None:
    """Of another replay than the step that was timed, and a traced one, so that they differ."""
    rig = open_rig("float32")
    try:
        steps = BareSteps(rig.worker)
        for num_reqs in (1, MAX_LANES):
            found = profiled(steps, num_reqs, RunMode.FULL)
            busy_us = sum(own_times(found.operations))
            print(f"{num_reqs}: {busy_us:.1f} us of {found.step_us:.1f}, {found.host_us:.1f} host")  # noqa: T201
            assert found.step_us / 3 < busy_us < found.step_us * 1.5
    finally:
        rig.close()


@pytest.mark.parametrize("num_reqs", [1, 8, MAX_LANES])
def test_products_are_recognised_with_and_without_graphs(num_reqs: int) -> None:
    rig = open_rig("bfloat16")
    try:
        steps = BareSteps(rig.worker)
        for mode in (RunMode.FULL, RunMode.EAGER):
            operations = profiled(steps, num_reqs, mode).operations
            names = [each.name for each in operations]
            roles = roles_of(names, GPU_TINY.num_layers)
            products = [role for role in roles if role in (*LAYER_LINEARS, LM_HEAD)]
            assert products == [*LAYER_LINEARS * GPU_TINY.num_layers, LM_HEAD], names
            assert roles.count("attention") == GPU_TINY.num_layers, names
    finally:
        rig.close()


def test_an_eager_step_submits_each_operation() -> None:
    rig = open_rig("bfloat16")
    try:
        operations = profiled(BareSteps(rig.worker), 4, RunMode.EAGER).operations
        assert num_submissions(operations) == len(operations) > 3 * 7
        assert 0.5 < time_launch(DEVICE) < 100
    finally:
        rig.close()
