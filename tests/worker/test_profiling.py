"""Decode steps of a worker, timed and recorded on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from inline import SPEC, alone_topology, worker_config
from rig import MAX_LANES, MAX_MODEL_LEN
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from lockstep.comm.messages import ReplicaPlan
from lockstep.worker.bare_steps import BareSteps, blocks_per_lane
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker
from lockstep.worker.profiling import record as recording
from lockstep.worker.profiling.decode import DecodeProfiler, Effort
from lockstep.worker.profiling.launches import time_launch
from lockstep.worker.profiling.operation import Operation
from lockstep.worker.profiling.record import ProfilerError, record

CPU = torch.device("cpu")


@pytest.fixture
def worker():
    config = worker_config(graph_mode="FULL_DECODE_ONLY", num_blocks=1 + MAX_LANES * 16)
    assert blocks_per_lane(config) == 16
    made = Worker(config, SPEC, alone_topology())
    made.start()
    yield made
    made.close()


def contexts(worker: Worker) -> list[int]:
    """Tokens that each lane has computed."""
    assert worker._started is not None
    return worker._started.bench.parts.state.num_computed.tolist()


def test_lanes_decode_as_many_steps_as_are_timed(worker: Worker) -> None:
    steps = BareSteps(worker)
    steps.start_lanes(3, 5)
    assert contexts(worker) == [5, 5, 5, 0, 0, 0]
    times = steps.time(ReplicaPlan(3), 4)
    assert 0 < times.host_us <= times.step_us
    assert contexts(worker) == [9, 9, 9, 0, 0, 0]
    steps.start_lanes(2, 7)
    assert contexts(worker) == [7, 7, 0, 0, 0, 0]


@pytest.mark.parametrize(("mode", "rows"), [(RunMode.EAGER, 3), (RunMode.FULL, 4)])
def test_a_profile_says_what_ran(worker: Worker, mode: RunMode, rows: int) -> None:
    profiler = DecodeProfiler(BareSteps(worker), CPU, Effort(steps=2, repetitions=2))
    found = profiler.profile(3, 9, mode)
    assert (found.run_mode, found.num_reqs, found.num_tokens) == (mode.name, 3, rows)
    # The last step took its lanes from context_len - 1 to context_len tokens.
    assert contexts(worker)[:3] == [found.context_len] * 3
    assert found.context_len < MAX_MODEL_LEN
    starts = [each.start_us for each in found.operations]
    assert starts[0] == 0.0 and starts == sorted(starts)
    # Four products a layer and one for the logits.
    assert [each.name for each in found.operations].count("aten::mm") == 4 * 2 + 1


def test_operations_are_those_that_do_work() -> None:
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    out = torch.empty(4, 12)

    def work() -> None:
        y = F.linear(x, weight).view(2, 12).t().contiguous()
        torch.cat((y.t(), y.t()), out=out)

    names = [each.name for each in record(CPU, work)]
    assert names == ["aten::mm", "aten::copy_", "aten::cat"]


class MadeUpProfile:
    """What the profiler of a GPU gives: what the host did, kernels, and a range that was named."""

    def __init__(self, *, use_device: str | None, use_cpu: bool, use_kineto: bool) -> None:
        assert (use_device, use_cpu, use_kineto) == ("cuda", False, True)

    def __enter__(self) -> "MadeUpProfile":
        return self

    def __exit__(self, *raised: object) -> None:
        self.function_events = [
            made_up_event("cudaGraphLaunch", 50, 60, DeviceType.CPU),
            made_up_event("second", 72, 75, DeviceType.CUDA),
            made_up_event("first", 70, 72.5, DeviceType.CUDA),
            made_up_event("a range", 70, 75, DeviceType.CUDA, is_user_annotation=True),
        ]


def made_up_event(
    name: str, start: float, end: float, device: DeviceType, *, is_user_annotation: bool = False
) -> FunctionEvent:
    return FunctionEvent(
        id=9,
        name=name,
        thread=1,
        start_us=start,
        end_us=end,
        device_type=device,
        is_user_annotation=is_user_annotation,
    )


def test_on_a_gpu_operations_are_what_ran_there(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[object]()
    monkeypatch.setattr(recording, "profile", MadeUpProfile)
    monkeypatch.setattr(torch.cuda, "synchronize", called.append)
    gpu = torch.device("cuda:0")
    found = record(gpu, lambda: called.append("work"))
    assert called == ["work", gpu]
    assert found == [Operation("first", 0.0, 2.5, 9), Operation("second", 2.0, 3.0, 9)]


def test_a_profiler_that_sees_nothing_is_an_error() -> None:
    with pytest.raises(ProfilerError, match="saw no operation on cpu; KINETO_LOG_LEVEL"):
        record(CPU, lambda: torch.empty(3).view(1, 3))


def test_a_launch_takes_time() -> None:
    assert 0 < time_launch(CPU) < 1000
