"""The numbers of the table, from records with known times."""

from pathlib import Path

import pytest

from lockstep.launcher.bench.metrics import Spread, spread, summarize
from lockstep.launcher.bench.records import RequestRecord
from lockstep.launcher.bench.saved import Run, load_run, save_run
from lockstep.launcher.bench.text import failures, run_table

# Tokens at 0.1, 0.2 and 0.5 s; at 0.3 s alone; at 0.2, 0.25 (two tokens in one frame) s.
RECORDS = [
    RequestRecord(start_s=0.0, latency_s=0.5, ttft_s=0.1, itl_s=[0.1, 0.3],
                  num_prompt_tokens=10, num_output_tokens=3),
    RequestRecord(start_s=0.1, latency_s=0.3, ttft_s=0.3, itl_s=[],
                  num_prompt_tokens=20, num_output_tokens=1),
    RequestRecord(start_s=0.2, latency_s=0.25, ttft_s=0.2, itl_s=[0.05],
                  num_prompt_tokens=30, num_output_tokens=3),
    RequestRecord(start_s=0.3, error="HTTP 503: full"),
]  # fmt: skip


def approximately(mean: float, median: float, p99: float) -> tuple[object, ...]:
    return tuple(pytest.approx(value) for value in (mean, median, p99))


def test_counts_and_throughput_are_of_what_was_completed() -> None:
    found = summarize(RECORDS, 2.0, 0.5)
    assert (found.num_completed, found.num_failed, found.duration_s) == (3, 1, 2.0)
    assert (found.num_prompt_tokens, found.num_output_tokens) == (60, 7)
    assert found.requests_per_s == 1.5
    assert (found.output_tokens_per_s, found.total_tokens_per_s) == (3.5, 33.5)


def test_latencies_in_milliseconds() -> None:
    found = summarize(RECORDS, 2.0, 0.5)
    ttft, tpot, itl = (vars_of(each) for each in (found.ttft_ms, found.tpot_ms, found.itl_ms))
    assert ttft == approximately(200.0, 200.0, 298.0)
    # (0.5 - 0.1) / 2 and (0.25 - 0.2) / 2; a single token has no time per further token.
    assert tpot == approximately(112.5, 112.5, 25.0 + 0.99 * 175.0)
    assert itl == approximately(150.0, 100.0, 100.0 + 0.98 * 200.0)


def vars_of(found: Spread) -> tuple[float, ...]:
    return found.mean, found.median, found.p99


def test_percentiles_lie_between_the_two_nearest() -> None:
    hundred = spread([number / 1000 for number in range(1, 101)])
    assert vars_of(hundred) == approximately(50.5, 50.5, 99.01)
    assert spread([]) == Spread(0.0, 0.0, 0.0)


def a_run(label: str, duration_s: float) -> Run:
    return Run(
        label=label,
        options={"num_prompts": 4},
        summary=summarize(RECORDS, duration_s, 0.5),
        requests=RECORDS,
    )


def test_a_run_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    run = a_run("eager", 2.0)
    save_run(run, tmp_path / "a.json")
    assert load_run(tmp_path / "a.json") == run
    (tmp_path / "b.json").write_text('{"label": 3}')
    with pytest.raises(ValueError, match=r"b\.json is no saved run: .*label"):
        load_run(tmp_path / "b.json")
    with pytest.raises(ValueError, match=r"c\.json: No such file"):
        load_run(tmp_path / "c.json")


def test_runs_side_by_side_have_ratios_to_the_first() -> None:
    table = run_table([a_run("eager", 2.0), a_run("graphs", 1.0)])
    cells = [list(column.cells) for column in table.columns]
    rows = {name: rest for name, *rest in zip(*cells, strict=True)}
    assert [column.header for column in table.columns] == ["", "eager", "graphs", "ratio"]
    assert rows["output tok/s"] == ["3.50", "7.00", "2.000"]
    assert rows["mean TTFT (ms)"] == ["200.00", "200.00", "1.000"]
    assert rows["failed requests"] == ["1", "1", ""]
    assert rows["generator's CPU (%)"] == ["25", "50", ""]
    assert len(rows) == 18


def test_failures_are_counted_by_kind() -> None:
    assert failures(a_run("eager", 1.0)) == ["1 failed: HTTP 503: full"]
