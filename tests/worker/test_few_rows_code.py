"""What the machine code of few rows does, and in which order. Compiled without a GPU."""

import json
from dataclasses import dataclass

import pytest
from compiled import needs_compiler, printed_by

from lockstep.worker.kernels.linear_tiles import Ring, few_rows_ring

pytestmark = needs_compiler()


@dataclass(frozen=True)
class Case:
    """A product, as few_rows_code.py takes it, and whether the next kernel may start at once."""

    out_size: int
    in_size: int
    lanes: int
    end: str
    next_first: bool

    @property
    def gated(self) -> bool:
        return self.end in ("gated", "normed")

    @property
    def ring(self) -> Ring:
        return few_rows_ring(self.out_size, self.in_size, self.lanes, gated=self.gated)

    @property
    def arguments(self) -> list[str]:
        return [str(self.out_size), str(self.in_size), str(self.lanes), self.end]


# Two of them split their sums.
CASES = [
    Case(6144, 4096, 8, "plain", next_first=True),
    Case(4096, 14336, 16, "adding", next_first=True),
    Case(4096, 4096, 32, "adding", next_first=True),
    Case(14336, 4096, 64, "normed", next_first=True),
    Case(3072, 1024, 16, "gated", next_first=False),
    Case(7168, 4096, 128, "gated", next_first=True),
    Case(14336, 4096, 128, "gated", next_first=True),
    Case(1024, 2048, 32, "plain", next_first=False),
    Case(128256, 4096, 32, "wide", next_first=True),
]


@dataclass(frozen=True)
class Code:
    case: Case
    stores: list[str]
    stack: int
    shared: int
    order: list[str]

    @property
    def before_the_wait(self) -> list[str]:
        return self.order[: self.order.index("wait")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case.arguments))
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Code:
    cache = tmp_path_factory.mktemp("triton")
    printed = printed_by("few_rows_code.py", *request.param.arguments, cache=cache)
    return Code(request.param, **json.loads(printed))


def test_results_are_stored_sixteen_bytes_at_a_time(code: Code) -> None:
    """Of eight lanes eight: a thread has no more. Sums of squares and counts are single numbers."""
    has_single = code.case.end == "adding" or code.case.ring.splits > 1
    width = 2 if code.case.lanes == 8 else 4
    assert code.stores == ["st.global.b32"] * has_single + [f"st.global.v{width}.b32"]


def test_registers_hold_everything(code: Code) -> None:
    assert code.stack == 0


def test_nothing_but_the_ring_and_its_barriers_takes_shared_memory(code: Code) -> None:
    case, ring = code.case, code.case.ring
    feature_bytes = 2 * (ring.tile_n * (1 + case.gated) + case.lanes)
    assert code.shared == ring.num_stages * (feature_bytes * ring.tile_k + 8)


def test_weights_alone_are_asked_for_before_the_kernel_ahead_has_ended(code: Code) -> None:
    weight_tiles = code.case.ring.num_stages * (1 + code.case.gated)
    assert code.before_the_wait.count("ask") == weight_tiles
    assert "store" not in code.before_the_wait


def test_the_next_kernel_starts_before_the_wait_only_where_that_pays(code: Code) -> None:
    assert code.before_the_wait.count("let next start") == code.case.next_first
    assert code.order.count("wait") == 1
    assert "let next start" in code.order[code.order.index("wait") :]


def test_room_is_made_in_the_ring_once_all_threads_have_used_it_up(code: Code) -> None:
    used_up = code.order.index("products done")
    refill = code.order.index("ask", used_up)
    assert "meet" in code.order[used_up:refill]


def test_all_parts_of_a_split_sum_are_stored_before_a_program_arrives(code: Code) -> None:
    assert ("arrive" in code.order) == (code.case.ring.splits > 1)
    if "arrive" in code.order:
        before = code.order[: code.order.index("arrive")]
        assert "store" in before
        assert "meet" in before[-before[::-1].index("store") :]
