"""What the machine code of attention by warps does, and in which order. Compiled without a GPU."""

import json
from dataclasses import dataclass

import pytest
from compiled import needs_compiler, printed_by

from lockstep.worker.kernels.warp_share import TILE, Share, share_of

pytestmark = needs_compiler()

SMS = 132
SHARED_MEMORY, REGISTERS = 228 << 10, 64 << 10  # of a multiprocessor of Hopper
OWN = 1 << 10  # bytes of shared memory that each program takes beside its own


@dataclass(frozen=True)
class Case:
    """Heads and their size, and how many rows; none of them leaves rows to wait for others."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rows: int

    @property
    def share(self) -> Share:
        return share_of(self.rows * self.num_kv_heads, SMS)

    @property
    def per_sm(self) -> int:
        return -(-self.rows * self.num_kv_heads * self.share.num_programs // SMS)


CASES = [
    Case(32, 8, 128, 1), Case(16, 8, 128, 32), Case(32, 8, 128, 64), Case(32, 8, 128, 128),
    Case(9, 3, 64, 4), Case(32, 2, 128, 8),
]  # fmt: skip


@dataclass(frozen=True)
class Code:
    case: Case
    registers: int
    stack: int
    shared: int
    copies: list[str]
    order: list[str]

    @property
    def before_the_wait(self) -> list[str]:
        return self.order[: self.order.index("wait")]


@pytest.fixture(scope="module", params=CASES, ids=str)
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Code:
    case, cache = request.param, tmp_path_factory.mktemp("triton")
    numbers = (case.num_heads, case.num_kv_heads, case.head_dim)
    arguments = map(str, (*numbers, case.share.num_warps, case.share.key_slots))
    printed = printed_by("warp_attention_code.py", *arguments, cache=cache)
    return Code(case, **json.loads(printed))


def test_registers_hold_everything(code: Code) -> None:
    assert code.stack == 0


def test_all_programs_of_a_multiprocessor_fit(code: Code) -> None:
    assert (code.shared + OWN) * code.case.per_sm <= SHARED_MEMORY
    threads = 32 * code.case.share.num_warps * code.case.per_sm
    # A warp gets registers by eight for each of its threads.
    assert -(-code.registers // 8) * 8 * threads <= REGISTERS


def test_dead_slots_are_zeros_that_nobody_reads(code: Code) -> None:
    """The number of bytes to read is a register's: nothing for a dead slot."""
    assert code.copies == [", 0x10, %"]


def test_the_first_keys_and_values_are_asked_for_before_the_kernel_ahead_has_ended(
    code: Code,
) -> None:
    """Keys and values of a tile, or the keys of two."""
    tile = TILE * code.case.head_dim * 2 // (32 * 16)
    assert code.before_the_wait.count("ask") == 2 * tile
    assert "let next start" in code.before_the_wait
    assert "store" not in code.before_the_wait


def test_slots_are_used_for_something_else_once_all_warps_have_loaded_values(code: Code) -> None:
    last = len(code.order) - 1 - code.order[::-1].index("load values")
    reused = next(at for at in range(last, len(code.order)) if code.order[at] in ("keep", "ask"))
    assert "meet" in code.order[last:reused]


def test_copies_are_seen_by_all_threads(code: Code) -> None:
    for at, mark in enumerate(code.order):
        if mark == "copied":
            assert code.order[at + 1] == "meet"


def test_all_partial_results_are_stored_before_a_program_arrives(code: Code) -> None:
    arrival = code.order.index("arrive")
    assert "store" in code.order[:arrival]
    assert code.order[arrival - 1] == "meet"
