"""``lockstep bench prefill`` on a CPU, with the rank in this process."""

from collections.abc import Iterator
from pathlib import Path

import jsonschema
import msgspec
import pytest
from fake_engine import FakeEngine
from inline_engine import start_inline_engine

from lockstep.comm.messages import DeviceTimes, unpack_ids
from lockstep.launcher.bench_engine import engines
from lockstep.launcher.bench_engine.device_steps import NotedSteps
from lockstep.launcher.bench_engine.load import Load
from lockstep.launcher.bench_prefill.chunk_steps import chunk_steps
from lockstep.launcher.bench_prefill.numbers import PrefillReport, PrefillRow
from lockstep.launcher.bench_prefill.options import parse
from lockstep.launcher.bench_prefill.runs import measure_all
from lockstep.launcher.cli import main

CHUNK, REPETITIONS = 32, 2
SPANS = [(1, 2), (2, 5)]
# Of the tiny model: qkv, o and three of the MLP in each of two layers; two heads of 8.
WEIGHTS = 2 * (16 * (16 + 2 * 8) + 16 * 16 + 3 * 16 * 32)
ATTENTION_OF_A_PAIR = 2 * 4 * 2 * 8


def flags(model: str) -> list[str]:
    argv = ["--model", model, "--load-format", "dummy", "--device", "cpu", "--no-ray"]
    argv += ["--max-num-batched-tokens", str(CHUNK), "--num-chunks", "1", "2", "5"]
    return [*argv, "--repetitions", str(REPETITIONS)]


class Measured:
    def __init__(self, folder: Path, out: str, code: int) -> None:
        self.json = (folder / "report.json").read_bytes()
        self.report = msgspec.json.decode(self.json, type=PrefillReport)
        self.out, self.code = out, code


@pytest.fixture(scope="module")
def measured(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    folder = tmp_path_factory.mktemp("out")
    argv = [*flags(model), "--json", str(folder / "report.json"), "--modes", "piecewise"]
    argv += ["--cudagraph-capture-sizes", "1", str(CHUNK), "--kv-cache-memory-bytes", "1000000"]
    with pytest.MonkeyPatch.context() as patch, open(folder / "out", "w+") as out:
        patch.setitem(engines._START, "processes", start_inline_engine)
        patch.setattr("sys.stdout", out)
        code = main(["bench", "prefill", *argv])
        out.seek(0)
        yield Measured(folder, out.read(), code)


def test_every_span_is_measured(measured: Measured) -> None:
    assert measured.code == 0 and measured.report.chunk_size == CHUNK
    [run] = measured.report.runs
    assert run.graph_mode == "PIECEWISE" and "first token" in run.seconds
    for row, (shorter, longer) in zip(run.rows, SPANS, strict=True):
        assert (row.from_len, row.to_len) == (shorter * CHUNK, longer * CHUNK)
        assert row.chunk_ms.least <= row.chunk_ms.median <= row.chunk_ms.most


def test_operations_and_share_are_those_of_the_chunks(measured: Measured) -> None:
    rate = measured.report.gemm.flops_per_s
    for row, (shorter, longer) in zip(measured.report.runs[0].rows, SPANS, strict=True):
        pairs = sum(token + 1 for token in range(shorter * CHUNK, longer * CHUNK))
        assert row.flops.linear == 2 * CHUNK * WEIGHTS
        assert row.flops.attention * (longer - shorter) == ATTENTION_OF_A_PAIR * pairs
        per_s = (row.flops.linear + row.flops.attention) / row.chunk_ms.median * 1e3
        assert row.flops_per_s == pytest.approx(per_s)
        assert row.share == pytest.approx(per_s / rate)
        assert row.linear_ms == pytest.approx(row.flops.linear / rate * 1e3)
        assert row.tokens_per_s == pytest.approx(CHUNK / row.chunk_ms.median * 1e3)


def test_products_are_those_of_a_layer_at_as_many_rows(measured: Measured) -> None:
    products = measured.report.gemm.products
    sizes = {name: (each.in_size, each.out_size) for name, each in products.items()}
    assert sizes == {"qkv": (16, 32), "o": (16, 16), "gate_up": (16, 64), "down": (32, 16)}
    assert {each.num_rows for each in products.values()} == {CHUNK}


def test_every_chunk_is_one_step(measured: Measured) -> None:
    for row, (shorter, longer) in zip(measured.report.runs[0].rows, SPANS, strict=True):
        assert row.device is not None
        assert row.device.num_steps == REPETITIONS * (longer - shorter)
        assert 0 < row.device.host_us.p50 < row.device.step_ms.p50 * 1e3


def test_what_is_written_is_as_its_schema_says(measured: Measured) -> None:
    written = msgspec.json.decode(measured.json)
    jsonschema.validate(written, msgspec.json.schema(PrefillReport))
    assert set(written["runs"][0]["rows"][0]) == set(PrefillRow.__struct_fields__)
    assert written["setup"]["options"]["num_chunks"] == [1, 2, 5]


def test_the_table_comes_last(measured: Measured) -> None:
    *_, rates, names, first, last = measured.out.splitlines()
    assert rates.startswith("multiplies at ") and "gate_up" in rates
    assert names.split()[4:6] == ["tokens", "ms/chunk"]
    assert [line.split()[2] for line in (first, last)] == ["32-64", "64-160"]


def test_what_is_common_to_prompts_falls_out(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of a millisecond for each token and one of that many seconds for all others."""
    asked = list[list[int]]()

    def seconds(load: Load, prompts: list[list[int]], num_tokens: int) -> float:
        assert num_tokens == 1
        asked.extend(prompts)
        return 3.0 + len(prompts[0]) / 1e3

    monkeypatch.setitem(engines._START, "processes", FakeEngine().start)
    monkeypatch.setattr(Load, "seconds", seconds)
    command = parse([*flags(model), "--step-timestamps", "0"])
    [run] = measure_all(command, 1e9)
    assert [row.chunk_ms.median for row in run.rows] == pytest.approx([CHUNK] * 2)
    assert [row.tokens_per_s for row in run.rows] == pytest.approx([1000.0] * 2)
    assert [row.device for row in run.rows] == [None, None]
    # No prefix cache can help: no two prompts begin alike.
    assert len({tuple(prompt[:8]) for prompt in asked}) == len(asked) == 1 + 3 * REPETITIONS


def test_requests_end_with_their_first_token(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    monkeypatch.setitem(engines._START, "processes", fake.start)
    argv = [*flags(model), "--step-timestamps", "0", "--modes", "eager,full"]
    assert len(measure_all(parse(argv), 1e9)) == 2
    assert {request.sampling.max_tokens for request in fake.added} == {1}
    lens = [len(unpack_ids(request.prompt_ids)) // CHUNK for request in fake.added]
    assert lens == [5, *[1, 2, 5] * REPETITIONS] * 2


@pytest.mark.parametrize(
    ("num_lost", "expected"),
    [
        (0, NotedSteps([10] * 3, [4] * 3)),
        # What was noted no longer reaches back to the end before the first of them.
        (5, NotedSteps([10] * 2, [4] * 2)),
    ],
)
def test_chunks_are_timed_from_end_to_end(num_lost: int, expected: NotedSteps) -> None:
    ends = [10 * step for step in range(1, 9)]
    times = DeviceTimes(8, [end - 6 for end in ends][num_lost:], ends[num_lost:])
    assert chunk_steps(times, 3, first=2, num_chunks=5) == expected


def test_a_call_with_other_steps_is_not_taken() -> None:
    times = DeviceTimes(4, [0, 10, 20, 30], [5, 15, 25, 35])
    assert chunk_steps(times, 1, first=1, num_chunks=2) == NotedSteps([], [])


def test_an_engine_is_as_large_as_one_prompt_needs(model: str) -> None:
    launch = parse(["--model", model, "--max-num-batched-tokens", "40"]).launch("")
    assert (launch.max_num_batched_tokens, launch.max_num_seqs) == (40, 1)
    assert launch.max_model_len == 8 * 40 + 1 and not launch.enable_prefix_caching


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--num-chunks", "4"], "--num-chunks must be two or more rising numbers, got 4"),
        (["--num-chunks", "2", "2"], "--num-chunks must be two or more rising numbers, got 2 2"),
        (["--num-chunks", "0", "2"], "--num-chunks[0]: expected `int` >= 1"),
        ([], "--num-chunks=8 of 2048 tokens and one of an answer need 16385, but --max-model-len"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens: expected `int` >= 1"),
        (["--modes", "egaer"], "--modes: 'egaer' is not known; did you mean 'eager'?"),
    ],
)
def test_what_cannot_work_is_a_line(model: str, capsys, argv: list[str], line: str) -> None:
    assert main(["bench", "prefill", "--model", model, "--device", "cpu", *argv]) == 2
    assert line in capsys.readouterr().err
