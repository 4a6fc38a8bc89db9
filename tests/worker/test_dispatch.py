"""Which graph serves a batch: the vectors, the article's numbers, and what holds for any batch."""

import json
from pathlib import Path

import pytest
from grids import grid_of, grids
from hypothesis import given
from hypothesis import strategies as st

from lockstep.worker.config import GraphConfig, ScheduleConfig
from lockstep.worker.graphs.dispatch import Dispatcher, create_dispatcher
from lockstep.worker.graphs.grid import Grid, build_grid
from lockstep.worker.graphs.manifest import build_manifest
from lockstep.worker.graphs.mode import GraphMode, RunMode

DATA = Path(__file__).parents[1] / "data"
VECTORS = json.loads((DATA / "dispatch_vectors.json").read_text())["vectors"]


def dispatcher_of(config: dict) -> Dispatcher:
    mode = GraphMode(config["cudagraph_mode"])
    cases = tuple(config.get("lora_cases", (0,)))
    skip = ("cudagraph_mode", "lora_cases")
    grid = grid_of({key: value for key, value in config.items() if key not in skip})
    return Dispatcher(grid, mode, cases)


@pytest.mark.parametrize("row", VECTORS, ids=lambda row: row["id"])
def test_vector(row: dict) -> None:
    batch, expect = row["batch"], row["expect"]
    run_mode, padded = dispatcher_of(row["config"]).dispatch(
        batch["num_tokens"],
        batch["num_reqs"],
        batch["uniform_query_len"] or 0,
        batch["num_active_loras"],
    )
    assert run_mode.name == expect["run_mode"]
    assert padded.num_tokens == expect["num_tokens_padded"]
    assert padded.num_reqs == expect["num_reqs_padded"]
    assert padded.num_active_loras == expect.get("num_active_loras", 0)


@pytest.mark.parametrize(
    ("seqs", "batch", "padded", "waste"), [(64, 5, 8, 37.5), (256, 500, 512, 2.34)]
)
def test_padding_of_the_article(seqs: int, batch: int, padded: int, waste: float) -> None:
    grid = build_grid(max_num_seqs=seqs, max_num_batched_tokens=8192)
    dispatcher = Dispatcher(grid, GraphMode.FULL_AND_PIECEWISE)
    uniform = 1 if batch <= seqs else 0
    _, descriptor = dispatcher.dispatch(batch, min(batch, seqs), uniform)
    assert descriptor.num_tokens == padded
    assert round(100 * (padded - batch) / padded, 2) == waste


def test_max_mode_bounds_the_choice_and_lora_without_a_graph_runs_eager() -> None:
    grid = build_grid(max_num_seqs=8, max_num_batched_tokens=64)
    dispatcher = Dispatcher(grid, GraphMode.FULL_AND_PIECEWISE)
    assert dispatcher.dispatch(3, 3, 1)[0] is RunMode.FULL
    assert dispatcher.dispatch(3, 3, 1, max_mode=RunMode.PIECEWISE)[0] is RunMode.PIECEWISE
    run_mode, own = dispatcher.dispatch(3, 3, 1, max_mode=RunMode.EAGER)
    assert (run_mode, own.num_tokens) == (RunMode.EAGER, 3)
    assert dispatcher.dispatch(3, 3, 1, num_active_loras=1)[0] is RunMode.EAGER


def test_mixed_full_graph_must_hold_the_requests() -> None:
    grid = build_grid(max_num_seqs=4, max_num_batched_tokens=64)
    dispatcher = Dispatcher(grid, GraphMode.FULL)
    run_mode, found = dispatcher.dispatch(7, 4, 0)
    assert (run_mode, found.num_tokens, found.num_reqs) == (RunMode.FULL, 8, 4)
    assert dispatcher.dispatch(7, 5, 0)[0] is RunMode.EAGER


@pytest.mark.parametrize("mode", GraphMode)
def test_a_running_system_dispatches_by_the_mode_that_was_resolved(mode: GraphMode) -> None:
    schedule = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=64)
    dispatcher = create_dispatcher(GraphConfig(mode=mode), schedule)
    assert dispatcher.mode is mode
    assert dispatcher.dispatch(5, 2, 0)[0] is mode.mixed
    assert dispatcher.dispatch(5, 5, 1)[0] is mode.decode


@given(grids(), st.sampled_from(GraphMode), st.data())
def test_any_batch(grid: Grid, mode: GraphMode, data: st.DataObject) -> None:
    dispatcher = Dispatcher(grid, mode)
    tokens = data.draw(st.integers(1, grid.max_num_batched_tokens))
    reqs = data.draw(st.integers(1, min(tokens, grid.max_num_seqs)))
    run_mode, padded = dispatcher.dispatch(tokens, reqs, 0)
    assert padded.num_tokens >= tokens
    assert padded.num_reqs is None or padded.num_reqs >= reqs
    assert run_mode <= mode.mixed
    if tokens < grid.max_num_batched_tokens:
        next_mode, next_padded = dispatcher.dispatch(tokens + 1, reqs, 0)
        assert next_mode <= run_mode
        assert next_padded.num_tokens >= padded.num_tokens or next_mode < run_mode


@given(grids(), st.sampled_from([mode for mode in GraphMode if mode.decode is RunMode.FULL]))
def test_every_decode_batch_has_a_full_graph_or_is_named(grid: Grid, mode: GraphMode) -> None:
    dispatcher = Dispatcher(grid, mode)
    gap = grid.uncovered_decode
    first, last = gap or (0, 0)
    sizes = f"of {first} tokens" if first == last else f"of {first} to {last} tokens"
    named = sizes in " ".join(dispatcher.warnings)
    previous = 0
    for reqs in range(1, grid.largest_decode // grid.query_len + 1):
        tokens = reqs * grid.query_len
        run_mode, padded = dispatcher.dispatch(tokens, reqs, grid.query_len)
        inside = gap is not None and gap[0] <= tokens <= gap[1]
        assert inside == (tokens > (grid.decode_sizes or (0,))[-1])
        if inside:
            assert named
            continue
        assert run_mode is RunMode.FULL
        assert padded.num_reqs is not None and padded.num_reqs >= reqs
        assert padded.num_tokens >= max(tokens, previous)
        previous = padded.num_tokens


@given(grids(), st.sampled_from(GraphMode), st.sampled_from([(0,), (0, 1, 4)]))
def test_manifest_holds_every_graph_once_in_order(
    grid: Grid, mode: GraphMode, cases: tuple[int, ...]
) -> None:
    dispatcher = Dispatcher(grid, mode, cases)
    manifest = build_manifest(dispatcher)
    keys = [(entry.run_mode, entry.descriptor) for entry in manifest.entries]
    assert len(set(keys)) == len(keys)
    order = [(key[0], -key[1].num_tokens, -key[1].num_active_loras) for key in keys]
    assert order == sorted(order)
    for run_mode, key in keys:
        reqs = key.num_reqs or 1
        batch = (key.num_tokens, reqs, key.uniform_query_len, key.num_active_loras)
        assert dispatcher.dispatch(*batch) == (run_mode, key)


def test_digest_is_stable_and_sees_every_part() -> None:
    def digest(seqs: int, choices: dict[str, str]) -> str:
        grid = build_grid(max_num_seqs=seqs, max_num_batched_tokens=64)
        return build_manifest(Dispatcher(grid, GraphMode.FULL_DECODE_ONLY), choices).digest()

    base = digest(8, {"all_reduce/64": "nccl", "attention/1": "split"})
    assert base == digest(8, {"attention/1": "split", "all_reduce/64": "nccl"})
    assert base != digest(9, {"all_reduce/64": "nccl", "attention/1": "split"})
    assert base != digest(8, {"all_reduce/64": "one_shot", "attention/1": "split"})
    assert digest(1, {})[:16] == "0dae866347322320"
