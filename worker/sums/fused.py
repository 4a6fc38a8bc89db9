"""The fused all-reduce of a group, made and tried before anything relies on it."""

import hashlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lockstep.comm.all_reduce.agreed import agreed, attempted
from lockstep.comm.all_reduce.base import AddNorm
from lockstep.comm.all_reduce.push_buffer import PushBuffer
from lockstep.comm.collectives import Communicator

if TYPE_CHECKING:
    from lockstep.worker.kernels.sum_norm import SumNorm

# To all peers together: a flag travels with each word, so beyond this operations without flags win.
_MAX_SENT_BYTES = 4 << 20
# Some seconds: the ranks come straight from a meeting on the host.
_TRIAL_LOOKS = 1 << 23
# Both buffers of a row, and the first again.
_TURNS = 3


class Case(NamedTuple):
    """Rows of random numbers that every rank knows of all ranks, negative zeros among them."""

    xs: Tensor  # [ranks, rows, size]
    residual: Tensor  # [rows, size]

    @classmethod
    def draw(cls, world: int, rows: int, seed: int, weight: Tensor) -> "Case":
        source = torch.Generator().manual_seed(seed)
        drawn = torch.randn(world + 1, rows, len(weight), generator=source)
        drawn[..., ::7] = -0.0
        drawn = drawn.to(weight)
        return cls(drawn[:world], drawn[world])

    def summed(self) -> Tensor:
        """In rank order, in float32, rounded once."""
        total = self.xs[0].float()
        for x in self.xs[1:]:
            total = total + x
        return total.to(self.xs)


def create_fused(tp: Communicator, norm: AddNorm) -> "SumNorm | str":
    """For rows of the norm's size and type; or why not, the same answer on all ranks of ``tp``.

    To be called by all of them, on CUDA, where they can read each other's memory.
    """
    fused, reason = attempted(tp, partial(_make, tp, norm))
    if fused is None:
        return reason or "it was not made"
    cases = _cases(fused, norm)
    _, reason = attempted(tp, partial(_compile, fused, norm, cases[-1].xs[tp.rank]))
    if reason is not None:
        return reason
    reason, digest = trial(replace(fused, looks=_TRIAL_LOOKS), norm, tp.rank, cases)
    digests = tp.all_gather_object(digest)
    if reason is None and len(set(digests)) > 1:
        reason = "ranks get different bits"
    return agreed(tp, reason) or fused


def _compile(fused: "SumNorm", norm: AddNorm, x: Tensor) -> None:
    """Calls of which nothing is expected: compiling takes each rank its own time."""
    norm.add(x, x)
    for rows in (x[:1], x):
        replace(fused, looks=1)(rows, rows, norm)
    torch.cuda.synchronize(x.device)
    fused.memory.late.zero_()


def trial(fused: "SumNorm", norm: AddNorm, rank: int, cases: list[Case]) -> tuple[str | None, str]:
    """(what is wrong with its answers or None, digest of them); the same calls on all ranks."""
    digest = hashlib.sha256()
    for case in cases:
        normed, total = fused(case.xs[rank], case.residual, norm)
        wanted, wanted_total = norm.add(case.summed(), case.residual)
        rows = len(case.residual)
        if fused.gave_up:
            return f"with {rows} rows, words of a peer do not arrive", ""
        if not torch.equal(total.view(torch.uint8), wanted_total.view(torch.uint8)):
            return f"with {rows} rows, sums differ from those in rank order", ""
        if not torch.allclose(normed, wanted, rtol=0.02, atol=1e-3):
            return f"with {rows} rows, norms differ from those of the sums", ""
        digest.update(normed.view(torch.uint8).cpu().numpy().tobytes())
    return None, digest.hexdigest()


def _make(tp: Communicator, norm: AddNorm) -> "SumNorm":
    from lockstep.worker.kernels.sum_norm import SumNorm

    assert tp.group is not None
    row_bytes = norm.weight.nbytes
    max_rows = max(1, _MAX_SENT_BYTES // ((tp.size - 1) * row_bytes))
    memory = PushBuffer.create(tp.group, max_rows, row_bytes)
    # So many run at once at least, since one fits each, however large its row.
    properties = torch.cuda.get_device_properties(norm.weight.device)
    return SumNorm(memory, programs=properties.multi_processor_count)


def _cases(fused: "SumNorm", norm: AddNorm) -> list[Case]:
    most = fused.memory.max_rows
    rows = [rows for rows in sorted({1, min(3, most), most}) for _ in range(_TURNS)]
    world, weight = fused.memory.world, norm.weight
    return [Case.draw(world, count, seed, weight) for seed, count in enumerate(rows)]
