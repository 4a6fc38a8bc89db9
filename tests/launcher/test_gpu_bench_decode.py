"""``lockstep bench decode`` on GPUs, without Ray: real shapes, random weights."""

from pathlib import Path

import msgspec
import pytest

from lockstep.launcher.bench_decode.numbers import DecodeReport
from lockstep.launcher.cli import main

QWEN = Path(__file__).parents[1] / "data" / "models" / "qwen3-0.6b"


def measured(folder: Path, *argv: str) -> DecodeReport:
    report = folder / "report.json"
    given = ["--model", str(QWEN), "--load-format", "dummy", "--batch", "1", "8", *argv]
    given += ["--no-ray", "--repetitions", "2", "--json", str(report)]
    given += ["--cudagraph-capture-sizes", "1", "8"]
    assert main(["bench", "decode", *given]) == 0
    return msgspec.json.decode(report.read_bytes(), type=DecodeReport)


def check(report: DecodeReport) -> None:
    [run] = report.runs
    for row in run.rows:
        assert row.accuracy is not None and row.accuracy.passed
        assert 0.05 < row.share < 1
        assert row.device is not None and row.device.num_steps == 2 * (144 - 16 - 1)
        assert row.floor_ms < row.device.step_ms.p50 < 2 * row.step_ms.median
        assert 0 <= row.device.host_us.p50 < 1000


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_one_rank(tmp_path: Path) -> None:
    check(measured(tmp_path))


@pytest.mark.multigpu
@pytest.mark.timeout(300)
def test_two_ranks_read_half_each(tmp_path: Path) -> None:
    report = measured(tmp_path, "-tp", "2")
    check(report)
    assert report.runs[0].rows[0].floor_bytes == pytest.approx(1.22e9 / 2, rel=0.02)
