"""What no interpreter shows: that parts of the fused sum which are assembly can be assembled."""

from pathlib import Path

from compiled import needs_compiler, printed_by

pytestmark = needs_compiler()


def test_the_fused_sum_is_machine_code_for_up_to_eight_ranks(tmp_path: Path) -> None:
    printed = printed_by("machine_code.py", "8192", "2", "4", "8", cache=tmp_path)
    numbers = list(map(int, printed.split()))
    one_row, several, two_lines = numbers[::3], numbers[1::3], numbers[2::3]
    for two, four, eight in (one_row, several):
        assert 0 < two < four < eight, "each waits for more sources"
    assert two_lines == [0] * 3, "what a warp stores at once has no gaps"
