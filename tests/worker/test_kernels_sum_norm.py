"""The fused sum and norm kernel: its arithmetic and where it writes, with all ranks in one process.

What waits for a peer is machine code that no interpreter has; it is replaced by plain loads and
stores, and every call runs twice on each rank: once so that its rows are written everywhere, once
to read them.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from kernel_device import kernel_device, kernel_marks
from torch import Tensor

if kernel_device().type == "cuda":
    pytest.skip("a GPU runs the real thing: test_gpu_sum_norm.py", allow_module_level=True)

import triton
import triton.language as tl

from lockstep.comm.all_reduce.push_buffer import PushBuffer, buffer_bytes
from lockstep.comm.all_reduce.symmetric import SymmetricBuffer
from lockstep.worker.kernels import ops, sum_norm
from lockstep.worker.kernels.push import waiting
from lockstep.worker.sums.fused import Case

pytestmark = kernel_marks()
EPS = 1e-5
MAX_ROWS = 5


@triton.jit
def _store_lines(addresses, values, epoch, live):
    places = addresses.to(tl.pointer_type(tl.int32))
    epochs = epoch + addresses.to(tl.int32) * 0
    tl.store(places, values.to(tl.int32), mask=live)
    tl.store(places + 1, epochs, mask=live)
    tl.store(places + 2, (values >> 32).to(tl.int32), mask=live)
    tl.store(places + 3, epochs, mask=live)


@triton.jit
def _load_lines(addresses, epoch, live, looks, ASM, CONSTRAINTS, AT_ONCE, WORLD):
    words, late = [], epoch * 0
    for offset in dict.fromkeys(re.findall(r"\+(\d+)\]", getattr(ASM, "value", ASM))):
        places = (addresses + int(offset)).to(tl.pointer_type(tl.int32))
        for word in (0, 2):
            words.append(tl.load(places + word, mask=live, other=0))
            found = tl.load(places + word + 1, mask=live, other=0)
            late = late | (live & (found != epoch)).to(tl.int32)
    return (*words, late)


class Norm(SimpleNamespace):
    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return ops.rms_norm_torch(total, self.weight, self.eps), total


class Ranks:
    """As many fused all-reduces over memory that is theirs in turn, of 2, 3 ... programs."""

    def __init__(self, world: int, row_bytes: int) -> None:
        size = buffer_bytes(world, MAX_ROWS, row_bytes)
        self.memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(world)]
        handle = SimpleNamespace(get_buffer=lambda peer, shape, dtype, offset: self.memory[peer])
        self.fused = [
            sum_norm.SumNorm(
                PushBuffer.over(
                    SymmetricBuffer(memory, handle, "tp", world), rank, MAX_ROWS, row_bytes
                ),
                programs=rank + 2,
            )
            for rank, memory in enumerate(self.memory)
        ]

    def call(self, case: Case, norm: Norm) -> list[tuple[Tensor, Tensor]]:
        for _ in range(2):
            before = [fused.memory.epochs.clone() for fused in self.fused]
            for fused in self.fused:
                fused.memory.late.zero_()
            found = [fused(case.xs[i], case.residual, norm) for i, fused in enumerate(self.fused)]
            after = [fused.memory.epochs.clone() for fused in self.fused]
            for fused, epochs in zip(self.fused, before, strict=True):
                fused.memory.epochs.copy_(epochs)
        for fused, epochs in zip(self.fused, after, strict=True):
            fused.memory.epochs.copy_(epochs)
        assert not any(fused.gave_up for fused in self.fused)
        return found


@pytest.fixture(autouse=True)
def plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_norm, "send_lines", _store_lines)
    monkeypatch.setattr(sum_norm, "await_lines", _load_lines)


def _drawn(world: int, rows: int, seed: int, weight: Tensor) -> Case:
    """The interpreter does not round to bfloat16 as a device does: quarters need no rounding."""
    case = Case.draw(world, rows, seed, weight)
    if weight.dtype is torch.bfloat16:
        for values in case:
            values.mul_(4).round_().div_(4)
    return case


def _check(found: list[tuple[Tensor, Tensor]], case: Case, norm: Norm) -> None:
    wanted, total = norm.add(case.summed(), case.residual)
    for normed, new_residual in found:
        assert new_residual.view(torch.uint8).equal(total.view(torch.uint8))
        torch.testing.assert_close(normed, wanted, rtol=0.02, atol=1e-3)
        assert normed.view(torch.uint8).equal(found[0][0].view(torch.uint8))


@pytest.mark.parametrize(
    "world, size, dtype",
    [
        (2, 64, torch.bfloat16), (3, 24, torch.float32), (2, 40, torch.float16),
    ],
)  # fmt: skip
def test_calls_of_all_sizes_follow_each_other(world: int, size: int, dtype: torch.dtype) -> None:
    weight = torch.randn(size).to(dtype)
    norm, ranks = Norm(weight=weight, eps=EPS), Ranks(world, 2 * weight.nbytes)
    for seed, rows in enumerate((1, 5, 2, 1)):
        case = _drawn(world, rows, seed, weight)
        _check(ranks.call(case, norm), case, norm)
        for memory in ranks.memory:
            written = memory.view(2, -1).any(1).tolist()
            assert written == [seed > 0, True], "two buffers in turn"
    assert [fused.memory.epochs.tolist() for fused in ranks.fused] == [[4, 2, 1, 1, 1]] * world


def test_counts_wrap_and_infinity_and_nan_are_numbers_like_others() -> None:
    weight = torch.ones(16, dtype=torch.bfloat16)
    norm, ranks = Norm(weight=weight, eps=EPS), Ranks(2, weight.nbytes)
    for fused in ranks.fused:
        fused.memory.epochs.fill_(-2)
    for seed in range(3):
        case = _drawn(2, 1, seed, weight)
        case.xs[0, 0, :3] = torch.tensor([float("inf"), float("nan"), 1.0])
        found = ranks.call(case, norm)
        wanted, total = norm.add(case.summed(), case.residual)
        for normed, new_residual in found:
            torch.testing.assert_close(new_residual, total, rtol=0, atol=0, equal_nan=True)
            assert normed.isnan().all()
    assert ranks.fused[0].memory.epochs.tolist() == [1, -2, -2, -2, -2]


def test_what_it_cannot_hold_is_left_to_others() -> None:
    [fused, _] = Ranks(2, 64).fused
    assert fused.supports(torch.zeros(MAX_ROWS, 32, dtype=torch.bfloat16))
    unsupported = (
        torch.zeros(MAX_ROWS + 1, 32, dtype=torch.bfloat16),
        torch.zeros(1, 36, dtype=torch.bfloat16),
        torch.zeros(1, 30, dtype=torch.bfloat16),
        torch.zeros(1, 8, dtype=torch.float64),
        torch.zeros(0, 32, dtype=torch.bfloat16),
        torch.zeros(32, 2, dtype=torch.bfloat16).t(),
    )
    assert not any(fused.supports(x) for x in unsupported)


@pytest.mark.parametrize("lines, at_once", [(1, 1), (2, 2), (4, 2)])
def test_waiting_asks_for_all_before_it_looks_and_gives_up(lines: int, at_once: int) -> None:
    text, constraints, taken = waiting(3, 4096, lines)
    assert taken == at_once and waiting(8, 4096, lines)[2] == 1
    kinds = ["=&r"] * 7 * at_once + ["l"] * at_once + ["r"] * 3 * at_once
    assert constraints == ",".join(kinds)
    look = text[text.index("look:") : text.index("@q bra look;")]
    asked, seen = look[: look.rindex("ld.")], look[look.rindex("ld.") :]
    addresses = [f"${7 * at_once + line}" for line in range(at_once)]
    for address in addresses:
        assert re.findall(rf"\[\{address}\+(\d+)\]", look) == ["0", "4096", "8192"]
    assert "setp.ne.or" not in asked and seen.count("setp.ne.or") == 6 * at_once
    assert len(re.findall(r"mov\.b32 \$\d+, 0;", text)) == 6 * at_once
