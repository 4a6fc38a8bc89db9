"""Times that graphs write on a GPU: in order, without overlap, and two kernels a step."""

from collections import Counter

import pytest
import torch
from gpu_rig import GpuRig, gpu_config
from msgspec import structs

from lockstep.comm.messages import DeviceTimes, ReplicaPlan, StepAgreement, StepPlan
from lockstep.worker.graphs.mode import RunMode

pytestmark = pytest.mark.gpu
LANES, STEPS, AT_ONCE = 4, 30, 3
_OTHERS = ("memcpy", "memset", "cublas", "gemv", "gemm", "cutlass")


def rig_with(step_timestamps: int) -> GpuRig:
    config = gpu_config(capture_sizes=(LANES,), graph_mode="FULL_DECODE_ONLY")
    rig = GpuRig(structs.replace(config, step_timestamps=step_timestamps))
    rig.prefill(LANES)
    return rig


def decode_ahead(rig: GpuRig) -> None:
    """Several steps a plan, launched without waiting for any."""
    agreement = StepAgreement(RunMode.FULL, LANES, [LANES], 1)
    for first in range(0, STEPS, AT_ONCE):
        plan = StepPlan(0, 1 + first, agreement, [ReplicaPlan(LANES)], AT_ONCE)
        for pending in list(rig.worker.launch(plan)):
            pending.result()


def kernels_of_a_step(rig: GpuRig) -> Counter[str]:
    """By name, but for copies, which may be the driver's, and cuBLAS.

    It makes one or two of a product as its operands are aligned.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        rig.decode(RunMode.FULL, LANES)
        torch.cuda.synchronize()
    names = (event.name for event in profile.events() if event.device_type.name == "CUDA")
    return Counter(name for name in names if not any(other in name.lower() for other in _OTHERS))


def test_steps_do_not_overlap_and_follow_each_other_within_a_millisecond() -> None:
    rig = rig_with(64)
    decode_ahead(rig)
    times = rig.worker.device_times()
    rig.close()
    assert times.num_steps == 1 + STEPS == len(times.begin_ns)
    in_order = [ns for pair in zip(times.begin_ns, times.end_ns, strict=True) for ns in pair]
    assert in_order == sorted(in_order)
    assert all(b < e for b, e in zip(times.begin_ns, times.end_ns, strict=True))
    gaps = gaps_within_plans(times)
    print(f"gaps of steps launched together, us: {sorted(gap / 1e3 for gap in gaps)}")  # noqa: T201
    assert max(gaps) < 1e6


def gaps_within_plans(times: DeviceTimes) -> list[int]:
    pairs = zip(times.end_ns[:-1], times.begin_ns[1:], strict=True)
    return [begin - end for step, (end, begin) in enumerate(pairs) if step % AT_ONCE]


def test_a_step_has_two_kernels_more_only_when_asked() -> None:
    found = {}
    for asked in (0, 64):
        rig = rig_with(asked)
        rig.decode(RunMode.FULL, LANES)
        found[asked] = kernels_of_a_step(rig)
        rig.close()
    more, fewer = found[64] - found[0], found[0] - found[64]
    assert (dict(more), dict(fewer)) == ({"_stamp_kernel": 2}, {})
