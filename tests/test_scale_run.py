"""The scale run itself: its commands can be run, what is slow is cut, and its tables are right."""

import json
from pathlib import Path

import msgspec
import pytest
import scale_run
from scale_parts import LONG_S, Part, cpu_parts, gpu_parts
from scale_tables import Done, tables

from lockstep.launcher.bench_decode.numbers import DecodeReport, DecodeRow, DecodeRun
from lockstep.launcher.bench_decode.options import parse
from lockstep.launcher.bench_engine.numbers import Setup, spread
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.ceiling import Ceiling


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_every_command_names_files_that_exist_and_settings_that_can_run(num_gpus: int) -> None:
    for part in [*gpu_parts(num_gpus), *cpu_parts(num_gpus)]:
        named = [word.partition("::")[0] for word in part.argv if word.startswith("tests/")]
        assert all((scale_run.ROOT / name).exists() for name in named)
        if part.decode:
            bench = part.argv[part.argv.index("decode") + 1 :]
            launch = parse(bench).launch("")
            sizes = launch.tensor_parallel_size, launch.data_parallel_size
            assert ParallelConfig(tp_size=sizes[0], dp_size=sizes[1]).world_size in (1, num_gpus)


def test_what_is_measured_comes_within_ten_minutes() -> None:
    limits = [part.limit_s for part in gpu_parts(8) if part.limit_s < LONG_S]
    assert sum(limits[:4]) <= 580 and len(limits) == 7


def test_a_part_that_is_slow_or_fails_loses_itself_only(tmp_path: Path) -> None:
    slow = Part("slow", ("-uc", "import time; print('begun'); time.sleep(60)"), 2)
    fails = Part(
        "fails", ("-c", "print('tests/a.py::b[1-x y] FAILED [ 50%]'); raise SystemExit(3)"), 9
    )
    works = Part("works", ("-c", "print('tests/a.py::c PASSED [100%]')"), 9)
    done = [scale_run.run(part, part.limit_s, 2) for part in (slow, fails, works)]
    assert [each.code for each in done] == [None, 3, 0]
    assert done[0].output == "begun\n" and 2 <= done[0].seconds < 15
    scale_run.write(tmp_path, [*done, Done(works, None, 0.0, "")])
    text = (tmp_path / "scale.md").read_text()
    assert "| slow | 2 | cut after 2 s |" in text and "| fails | 0 | exit code 3 |" in text
    assert "| fails | 0 | 0 | 1 |" in text and "FAILED: tests/a.py::b[1-x y]" in text
    assert "| works | 1 | 0 | 0 |" in text and "| works | 0 | no time was left |" in text
    told = json.loads((tmp_path / "scale.json").read_text())
    assert [each["code"] for each in told] == [None, 3, 0, None]
    assert "=== slow: -uc import time" in (tmp_path / "scale.log").read_text()


def decoded(name: str, tp: int, dp: int, batch: int, tokens_per_s: float) -> Done:
    setup = Setup(
        model="m", dtype="bfloat16", device="d", versions={}, tensor_parallel_size=tp,
        data_parallel_size=dp, options={}, engine={},
    )  # fmt: skip
    row = DecodeRow(
        batch=batch, step_ms=spread([4.0, 5.0, 9.0]), tokens_per_s=tokens_per_s,
        floor_bytes=1, floor_ms=2.5, share=0.5,
    )  # fmt: skip
    run = DecodeRun(
        launcher="ray", graph_mode="FULL", num_graphs=7, seconds={"load": 1.26, name: 2.0},
        rows=[row],
    )  # fmt: skip
    report = DecodeReport(setup=setup, ceiling=Ceiling(1.0, 1, 1), runs=[run])
    assert msgspec.json.decode(msgspec.json.encode(report), type=DecodeReport) == report
    return Done(Part(name, (), 1, decode=True), 0, 1.0, "", report)


def test_steps_throughput_and_starts_are_tables() -> None:
    text = "\n".join(
        tables([
            decoded("all", 4, 1, 128, 900.0), decoded("one", 1, 1, 32, 1000.0),
            decoded("mixed", 2, 2, 64, 3600.0), decoded("other size", 1, 4, 8, 1.0),
        ])
    )  # fmt: skip
    assert "| one | 32 | 5.000 | 4.000-9.000 | - | - | - | 2.500 | 50.0% | - |" in text
    _, _, throughput = text.partition("## Throughput")
    assert "| all | 32 | 900 | 0.90 |" in throughput and "| one | 32 | 1000 | 1.00 |" in throughput
    assert "| mixed | 32 | 3600 | 3.60 |" in throughput and "| other size | 8 |" not in throughput
    assert "|  | load | all | one | mixed | other size | graphs |" in text
    assert "| one | 1.3 | - | 2.0 | - | - | 7 |" in text
