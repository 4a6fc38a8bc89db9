"""Sum over ranks, residual add and RMSNorm as one kernel, without a barrier. CUDA, Triton.

A program writes its row into every rank's memory, waits for that row of every rank in its own, and
sums in rank order, so that all ranks get the same bits. Where rows are more than programs, each
takes several: it sends them all, then awaits and finishes one after another, so that later words
fly while it works on earlier ones.

No wait is for ever. A device runs all programs of a call at once, and each sends before it waits;
so all rows of a rank are sent once its call has begun, whatever its programs then wait for. Which
program takes a row, when, and how many there are is nobody else's matter: each rank has as many as
its own device runs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.comm.all_reduce.base import AddNorm
from lockstep.comm.all_reduce.push_buffer import PushBuffer
from lockstep.comm.all_reduce.table import FUSED
from lockstep.worker.kernels.chain import chained, follow
from lockstep.worker.kernels.push import await_lines, send_lines, waiting

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Minutes, far beyond the deadline of a step; then the rest is computed from what is there.
PATIENCE = 2**31 - 1


@triton.jit
def _values(first, second, TYPE: tl.constexpr):
    """The numbers in the two words of each line, [lines, numbers a line] float32."""
    words = tl.join(first, second)
    if TYPE.primitive_bitwidth == 32:
        values = words.to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        values = tl.reshape(tl.join(low, high), [first.shape[0], 4])
    return values


@triton.jit
def _place(row, epoch, lines, MAX_ROWS: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Where a row's lines of the first source are in a rank's memory, in bytes, [lines] int64."""
    return ((epoch & 1) * MAX_ROWS + row).to(tl.int64) * ROW_BYTES + lines * 16


@triton.jit(do_not_specialize=["rows", "rank", "looks"])
def _sum_norm_kernel(
    out_ptr, new_residual_ptr, x_ptr, residual_ptr, weight_ptr, eps, rows,
    addresses_ptr, epochs_ptr, late_ptr, rank, looks,
    SIZE: tl.constexpr, RESIDUAL_ROW: tl.constexpr, LINES: tl.constexpr, WORLD: tl.constexpr,
    MAX_ROWS: tl.constexpr, SOURCE_BYTES: tl.constexpr, ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr, AT_ONCE: tl.constexpr, SEVERAL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    PER_LINE: tl.constexpr = 64 // TYPE.primitive_bitwidth
    first, stride = tl.program_id(0), tl.num_programs(0)
    # A constant 1, not the same from ``rows``: then the loops are none to the compiler.
    turns = tl.cdiv(rows - first, stride) if SEVERAL else 1
    # Not known as neighbours: a thread would take two, and its writes half of a sector each.
    lines = tl.max_contiguous(tl.arange(0, LINES), 1)
    live = lines < SIZE // PER_LINE
    columns = lines[:, None] * PER_LINE + tl.arange(0, PER_LINE)[None, :]
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(addresses_ptr + rank)
    follow(CHAINED, NEXT_FIRST=True)
    epoch = 0
    for turn in range(turns):
        row = first + turn * stride
        epoch = tl.load(epochs_ptr + row) + 1
        packed_ptr = (x_ptr + row * SIZE).to(tl.pointer_type(tl.int64))
        packed = tl.load(packed_ptr + lines, mask=live, other=0)
        place = _place(row, epoch, lines, MAX_ROWS, WORLD * SOURCE_BYTES)
        for step in range(1, WORLD + 1):
            peer = tl.load(addresses_ptr + (rank + step) % WORLD)
            send_lines(peer + place + rank * SOURCE_BYTES, packed, epoch, live)
    for turn in range(turns):
        row = first + turn * stride
        if SEVERAL:
            epoch = tl.load(epochs_ptr + row) + 1
        residual = tl.load(residual_ptr + row * RESIDUAL_ROW + columns, mask=inside, other=0.0)
        place = _place(row, epoch, lines, MAX_ROWS, WORLD * SOURCE_BYTES)
        words = await_lines(own + place, epoch, live, looks, ASM, CONSTRAINTS, AT_ONCE, WORLD)
        tl.store(late_ptr + lines * 0, 1, mask=words[2 * WORLD] != 0)
        # Begun with the first rank's and not with 0, which would lose the sign of -0.0.
        summed = _values(words[0], words[1], TYPE)
        for source in tl.static_range(1, WORLD):
            summed += _values(words[2 * source], words[2 * source + 1], TYPE)
        # From here on as where sum and norm are two operations: each result is rounded.
        total = summed.to(TYPE).to(tl.float32) + residual.to(tl.float32)
        total = total.to(new_residual_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + row * SIZE + columns, total, mask=inside)
        total = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(total * total, 1), 0) / SIZE + eps)
        normed = (total * scale * weight).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * SIZE + columns, normed, mask=inside)
        tl.store(epochs_ptr + row, epoch)


def constants(row_bytes: int, world: int, source_bytes: int) -> dict[str, int | str]:
    """Of the kernel for such rows in such memory, and its ``num_warps``."""
    lines = triton.next_power_of_2(row_bytes // 8)
    num_warps = min(32, max(1, lines // 32))
    asm, constraints, at_once = waiting(world, source_bytes, max(1, lines // (32 * num_warps)))
    return {
        "LINES": lines, "WORLD": world, "SOURCE_BYTES": source_bytes, "ASM": asm,
        "CONSTRAINTS": constraints, "AT_ONCE": at_once, "num_warps": num_warps,
    }  # fmt: skip


@dataclass(frozen=True)
class SumNorm:
    """The fused all-reduce of one group.

    Args:
        programs: at most as many as the device runs at once.
        looks: after so many a wait for a peer is given up.
    """

    memory: PushBuffer
    programs: int
    looks: int = PATIENCE
    name: str = FUSED
    buffer: str = "push"

    @property
    def num_bytes(self) -> int:
        return self.memory.shared.data.nbytes

    @property
    def gave_up(self) -> bool:
        """True if a wait ever was. Waits for the device."""
        return bool(self.memory.late.item())

    def supports(self, x: Tensor) -> bool:
        rows, size = x.shape
        row_bytes = size * x.itemsize
        return (
            x.dtype in _DTYPES
            and x.is_contiguous()
            and 0 < rows <= self.memory.max_rows
            and 0 < row_bytes <= self.memory.row_bytes
            and row_bytes % 8 == 0
        )

    def __call__(self, x: Tensor, residual: Tensor, norm: AddNorm) -> tuple[Tensor, Tensor]:
        memory, (rows, size) = self.memory, x.shape
        out, new_residual = torch.empty_like(x), torch.empty_like(x)
        _sum_norm_kernel[(min(rows, self.programs),)](
            out, new_residual, x, residual, norm.weight, norm.eps, rows,
            memory.addresses, memory.epochs, memory.late, memory.rank, self.looks,
            SIZE=size, RESIDUAL_ROW=residual.stride(0), MAX_ROWS=memory.max_rows,
            SEVERAL=rows > self.programs, **chained(),
            **constants(size * x.itemsize, memory.world, memory.source_bytes),
        )  # fmt: skip
        return out, new_residual
