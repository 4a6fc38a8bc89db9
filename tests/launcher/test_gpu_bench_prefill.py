"""``lockstep bench prefill`` on GPUs, without Ray: real shapes, random weights."""

from pathlib import Path

import msgspec
import pytest

from lockstep.launcher.bench_prefill.numbers import PrefillReport
from lockstep.launcher.cli import main

QWEN = Path(__file__).parents[1] / "data" / "models" / "qwen3-0.6b"
REPETITIONS, SPANS = 2, ((1, 2), (2, 4))


def check(folder: Path, *argv: str) -> PrefillReport:
    path = folder / "report.json"
    given = ["--model", str(QWEN), "--load-format", "dummy", "--no-ray", "--json", str(path)]
    given += ["--num-chunks", "1", "2", "4", "--repetitions", str(REPETITIONS)]
    given += ["--cudagraph-capture-sizes", "1", "2048", *argv]
    assert main(["bench", "prefill", *given]) == 0
    report = msgspec.json.decode(path.read_bytes(), type=PrefillReport)
    [run] = report.runs
    for row, (shorter, longer) in zip(run.rows, SPANS, strict=True):
        assert 0.01 < row.share < 1
        assert row.device is not None
        assert row.device.num_steps == REPETITIONS * (longer - shorter)
        assert row.linear_ms < row.device.step_ms.p50 < 3 * row.chunk_ms.median
    return report


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_one_rank(tmp_path: Path) -> None:
    report = check(tmp_path)
    assert report.gemm.flops_per_s > 1e13


@pytest.mark.multigpu
@pytest.mark.timeout(300)
def test_two_ranks_compute_half_each(tmp_path: Path) -> None:
    report = check(tmp_path, "-tp", "2")
    products = report.gemm.products
    assert (products["qkv"].out_size, products["down"].in_size) == (2048, 1536)
