"""What bounds a step, and its operations as a table: numbers made by hand."""

import re
from pathlib import Path

import pytest
from made_up_step import EACH_US, NAMES, made_up_step
from msgspec import structs

from lockstep.launcher.profile.bound import StepCosts, compare, explain
from lockstep.launcher.profile.kernels import Kernel, group_kernels, short_name
from lockstep.launcher.profile.report import Machine, step_profile
from lockstep.worker.config import ModelConfig
from lockstep.worker.models.footprint import Footprint
from lockstep.worker.profiling.decode import StepRecord
from lockstep.worker.profiling.operation import Operation, last_step, num_submissions, own_times
from lockstep.worker.profiling.roles import LAYER_LINEARS, LM_HEAD, ROLES, roles_of
from lockstep.worker.profiling.traffic import Traffic

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)
KERNELS = Path(__file__).parents[2] / "worker" / "kernels"
CEILING = 1e9  # bytes a second, so that a kilobyte takes a microsecond
COSTS = StepCosts(
    device="GPU",
    num_operations=400,
    num_submissions=400,
    launch_us=2.5,
    device_us=600.0,
    host_us=9000.0,
    step_us=9100.0,
)
REPLAYED = structs.replace(COSTS, num_submissions=3, host_us=80.0, step_us=650.0)


def test_many_launches_bound_a_step_whatever_else_the_host_does() -> None:
    assert COSTS.bound == "launch-bound"
    assert explain(COSTS) == (
        "launch-bound: 400 launches x 2.50 us = 1.000 ms, more than 0.600 ms of work on the GPU; "
        "the host takes 9.000 ms a step"
    )


def test_the_device_bounds_a_step_once_its_work_outlasts_launches_and_host() -> None:
    assert REPLAYED.bound == "GPU-bound"
    assert explain(REPLAYED) == (
        "GPU-bound: 0.600 ms of work on the GPU, more than 3 launches x 2.50 us = 0.007 ms; "
        "the host takes 0.080 ms a step"
    )
    assert structs.replace(REPLAYED, device="CPU").bound == "CPU-bound"


def test_a_slow_host_bounds_a_step_whose_launches_alone_would_do() -> None:
    slow = structs.replace(REPLAYED, host_us=700.0)
    assert slow.bound == "host-bound"
    assert "host-bound: the host takes 0.700 ms a step, more than 0.600 ms" in explain(slow)


def test_as_much_work_as_launches_is_the_devices() -> None:
    even = structs.replace(COSTS, device_us=1000.0, host_us=1000.0)
    assert even.bound == "GPU-bound"


def test_what_graphs_change() -> None:
    assert compare(COSTS, REPLAYED) == (
        "400 submissions become 3, and a step of 9.100 ms one of 0.650 ms (14.00 times as fast)"
    )


def test_time_counts_once_however_early_an_operation_starts() -> None:
    inside = [
        Operation("a", 0.0, 10.0, 0),
        Operation("b", 2.0, 3.0, 0),
        Operation("c", 4.0, 8.0, 0),
        Operation("d", 20.0, 1.0, 1),
    ]
    assert own_times(inside) == [10.0, 0.0, 2.0, 1.0]
    assert num_submissions(inside) == 2
    assert own_times(made_up_step()) == [EACH_US] * len(NAMES)
    assert num_submissions(made_up_step()) == 2


def test_the_last_of_equal_steps_starts_at_zero() -> None:
    step = made_up_step()
    again = [structs.replace(each, start_us=each.start_us + 500.0) for each in step]
    assert last_step([*step, *again], 2) == step
    assert last_step([*step, *again[1:]], 2) is None
    assert last_step([*step[1:], step[0], *again], 2) is None
    assert last_step([*step[1:], *again], 2) is None


def test_products_are_told_apart_by_their_order() -> None:
    roles = roles_of(NAMES, MODEL.num_layers)
    layer = ["qkv", "attention", "o", "add_norm", "gate_up", "down"]
    opening, closing = ["inputs", None, "norm"], ["add_norm", "lm_head", "scores", "tail", "copy"]
    assert roles == [*opening, *layer, "add_norm", *layer, *closing]


def test_our_kernels_are_known_by_the_names_they_have() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in KERNELS.glob("*.py"))
    named = re.findall(r"\w+_kernel", " ".join(pattern for _, pattern in ROLES))
    assert len(named) >= 10
    assert [name for name in named if f"def {name}(" not in sources] == []


def test_products_of_another_number_stay_products() -> None:
    roles = roles_of(NAMES, MODEL.num_layers + 1)
    assert roles.count("linear") == 9
    assert not {*LAYER_LINEARS, LM_HEAD} & {*roles}


def test_kernels_of_a_step() -> None:
    traffic = Traffic(Footprint(MODEL), num_reqs=1, num_tokens=1, context_len=40)
    kernels = group_kernels(made_up_step(), traffic, CEILING)
    assert sum(kernel.time_us for kernel in kernels) == pytest.approx(EACH_US * len(NAMES))
    assert sum(kernel.calls for kernel in kernels) == len(NAMES)
    by_role = {kernel.role: kernel for kernel in kernels if kernel.role}
    # Weights [128, 64] in two bytes, one row in and one out, in each of two layers.
    num_bytes = 2 * 2 * (64 * 128 + 64 + 128)
    assert by_role["qkv"] == Kernel(
        name="_one_row_kernel",
        role="qkv",
        calls=2,
        time_us=20.0,
        num_bytes=num_bytes,
        ceiling_share=pytest.approx(num_bytes / 20e3),
    )
    assert by_role["gate_up"].num_bytes == 2 * 2 * (64 * 192 + 64 + 96)
    assert by_role["lm_head"].num_bytes == 2 * (64 * 1000 + 64) + 4 * 1000
    assert by_role["attention"].num_bytes == 2 * (40 * 2 * 2 * 32 + 2 * (2 * 64 + 4 * 32))
    unknown = {kernel.name: kernel for kernel in kernels if kernel.role is None}
    gather = unknown["at::native::indexSelectSmallIndex"]
    assert (gather.num_bytes, gather.ceiling_share) == (None, None)


def test_products_read_every_weight_once() -> None:
    norms = MODEL.num_layers * 2 * MODEL.hidden_size + MODEL.hidden_size
    for tp_size in (1, 2):
        traffic = Traffic(Footprint(MODEL, tp_size), num_reqs=0, num_tokens=0, context_len=1)
        layer = sum(traffic.bytes_of(role) or 0 for role in LAYER_LINEARS)
        found = MODEL.num_layers * layer + (traffic.bytes_of(LM_HEAD) or 0)
        assert found == Footprint(MODEL, tp_size).step_weight_bytes - 2 * norms


def test_a_gate_that_is_not_fused_is_written_and_read_again() -> None:
    traffic = Traffic(Footprint(MODEL), num_reqs=3, num_tokens=4, context_len=40)
    written, fused = traffic.bytes_of("gate_up"), traffic.bytes_of("gate_up", gated=True)
    assert written is not None and fused is not None
    assert written - fused == 4 * 96 * 2
    assert traffic.bytes_of("silu") == 4 * 3 * 96 * 2
    assert traffic.bytes_of("add_norm") == (4 * 4 + 1) * 64 * 2
    assert traffic.bytes_of("copy") is traffic.bytes_of(None) is None


@pytest.mark.parametrize(
    ("making", "reading", "adding"),
    [
        ("_one_row_kernel", "_normed_one_row_kernel", {"gate_up": 2, "qkv": 1}),
        ("few_rows_kernel", "few_rows_kernel", {"o": 2, "down": 1}),
        ("nvjet_tst", "few_rows_kernel", {}),
    ],
    ids=["one row", "few rows", "many rows"],
)
def test_the_residual_is_moved_where_it_is_added(
    making: str, reading: str, adding: dict[str, int]
) -> None:
    """In two layers, whose last sum is normed apart."""
    layer = ("_norm_rope_kernel", "_decode_attention_kernel", making, reading, making)
    first = ("_rms_norm_kernel", making)
    names = [*first, *layer, reading, *layer, "_add_rms_norm_kernel", "nvjet_tst"]
    step = [Operation(name, float(at), 1.0, 0) for at, name in enumerate(names)]
    traffic = Traffic(Footprint(MODEL), num_reqs=3, num_tokens=4, context_len=40)
    found = dict[str, int]()
    for kernel in group_kernels(step, traffic, CEILING):
        if kernel.role in LAYER_LINEARS and kernel.num_bytes is not None:
            gated = "nvjet" not in kernel.name
            alone = kernel.calls * (traffic.bytes_of(kernel.role, gated=gated) or 0)
            found[kernel.role] = found.get(kernel.role, 0) + kernel.num_bytes - alone
    each = (2 * 4 + 1) * 64 * 2
    assert found == {role: each * adding.get(role, 0) for role in LAYER_LINEARS}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_one_row_kernel", "_one_row_kernel"),
        ("void at::native::elementwise<4, f<int>>(int, g)", "at::native::elementwise"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH (Device -> Pinned)"),
        ("aten::mm", "aten::mm"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_a_step_as_a_whole() -> None:
    machine = Machine(name="made up", is_gpu=True, ceiling_bytes_per_s=CEILING, launch_us=2.0)
    record = StepRecord(
        run_mode="FULL",
        num_reqs=1,
        num_tokens=1,
        context_len=40,
        step_us=250.0,
        host_us=30.0,
        operations=made_up_step(),
    )
    step = step_profile(record, Footprint(MODEL), machine)
    costs = step.costs
    assert (costs.num_operations, costs.num_submissions) == (len(NAMES), 2)
    assert (costs.device_us, costs.host_us) == (EACH_US * len(NAMES), 30.0)
    assert step.bound == "GPU-bound"
    floor_bytes = Footprint(MODEL).step_weight_bytes + 40 * Footprint(MODEL).kv_bytes_per_token
    assert step.floor_us == pytest.approx(floor_bytes / 1e3)
    assert [span.start_us for span in step.timeline][:3] == [0.0, 10.0, 20.0]
    on_cpu = step_profile(record, Footprint(MODEL), structs.replace(machine, is_gpu=False))
    assert on_cpu.costs.host_us == 0.0
