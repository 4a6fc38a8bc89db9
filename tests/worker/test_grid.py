"""The grid of the vectors and of the article, and what must hold for any input."""

import json
from pathlib import Path

import pytest
from grids import grid_of, grids
from hypothesis import given

from lockstep.worker.graphs.grid import Grid, build_grid

VECTORS = json.loads((Path(__file__).parents[1] / "data/grid_vectors.json").read_text())["vectors"]


@pytest.mark.parametrize("row", VECTORS, ids=lambda row: row["id"])
def test_vector(row: dict) -> None:
    if "error" in row["expect"]:
        with pytest.raises(ValueError, match="cudagraph_capture_sizes"):
            grid_of(row["input"])
        return
    grid = grid_of(row["input"])
    assert list(grid.capture_sizes) == row["expect"]["sizes"]
    assert len(grid.capture_sizes) == row["expect"]["num_sizes"]
    assert grid.max_capture_size == row["expect"]["max_size"]


@pytest.mark.parametrize(
    ("seqs", "capability", "count"),
    [
        (16, (9, 0), 7),
        (32, (9, 0), 11),
        (64, (9, 0), 19),
        (128, (9, 0), 35),
        (256, (9, 0), 51),
        (264, (9, 0), 52),
        (1024, (10, 0), 83),
    ],
)
def test_counts_of_the_article(seqs: int, capability: tuple[int, int], count: int) -> None:
    grid = build_grid(max_num_seqs=seqs, max_num_batched_tokens=8192, compute_capability=capability)
    assert len(grid.capture_sizes) == count


@pytest.mark.parametrize(
    ("args", "tail", "gap"),
    [
        ({"max_num_seqs": 256}, [248, 256], None),
        ({"max_num_seqs": 600}, [512, 544, 576, 600], None),
        ({"max_num_seqs": 100, "max_capture_size": 128}, [96, 100], None),
        ({"max_num_seqs": 128, "max_capture_size": 100}, [88, 96], (97, 128)),
        ({"max_num_seqs": 8, "query_len": 3, "capture_sizes": [1, 24]}, [3, 24], None),
        ({"max_num_seqs": 8, "capture_sizes": [4, 1024]}, [4], (5, 8)),
        ({"max_num_seqs": 300, "query_len": 3}, [864, 897, 900], None),
    ],
)
def test_decode_sizes(args: dict, tail: list[int], gap: tuple[int, int] | None) -> None:
    grid = build_grid(max_num_batched_tokens=8192, **args)
    sizes = list(grid.decode_sizes)
    assert sizes[-len(tail) :] == tail
    assert grid.uncovered_decode == gap


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_capture_size": 0}, "max_cudagraph_capture_size must be at least 1, got 0"),
        ({"capture_sizes": [0, 4]}, r"cudagraph_capture_sizes.*got \[0, 4\]"),
        ({"capture_sizes": [9000]}, r"max_num_batched_tokens=8192, got \[9000\]"),
        ({"capture_sizes": [1, 8], "max_capture_size": 9}, "8, got 9"),
    ],
)
def test_bad_input_names_field_value_and_limit(args: dict, message: str) -> None:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 8192}
    with pytest.raises(ValueError, match=message):
        build_grid(**{**limits, **args})


def test_warnings_only_where_the_wish_was_changed() -> None:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    assert build_grid(**limits, capture_sizes=[8, 2, 2, 8]).warnings == ()
    (dropped,) = build_grid(**limits, capture_sizes=[1, 65, 70]).warnings
    assert "[65, 70]" in dropped and "64" in dropped
    (lowered,) = build_grid(**limits, max_capture_size=13).warnings
    assert "13 lowered to 8" in lowered


@given(grids())
def test_any_grid(grid: Grid) -> None:
    for sizes in (grid.capture_sizes, grid.decode_sizes):
        assert list(sizes) == sorted(set(sizes))
        assert all(0 < size <= grid.max_num_batched_tokens for size in sizes)
    assert all(size % grid.query_len == 0 for size in grid.decode_sizes)
    assert all(size <= grid.largest_decode for size in grid.decode_sizes)
