"""``lockstep bench decode`` on a CPU, without Ray: what it measures, writes and prints."""

from collections.abc import Iterator
from pathlib import Path

import jsonschema
import msgspec
import pytest
from fake_engine import FakeEngine
from msgspec import structs

from lockstep.launcher.bench_decode import command
from lockstep.launcher.bench_decode.numbers import DecodeReport, DecodeRow
from lockstep.launcher.bench_decode.options import parse
from lockstep.launcher.bench_decode.text import gate_text, report_table
from lockstep.launcher.bench_engine.load import Load
from lockstep.launcher.child_engine import start_child_engine
from lockstep.launcher.cli import main
from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.consoles import open_console
from lockstep.launcher.errors import EngineDead, StartError
from lockstep.launcher.front_end import open_front_end
from lockstep.launcher.resolve import resolve

SHORT, LONG, REPETITIONS, PROMPT = 4, 12, 2, 9
# Of the tiny model in float32: qkv, o, three of the MLP and two norms in each of two layers, the
# last norm, the LM head; keys and values of one head of 8 in two layers.
LAYER = 16 * (16 + 2 * 8) + 16 * 16 + 3 * 16 * 32 + 2 * 16
WEIGHTS = 4 * (2 * LAYER + 16 + 260 * 16)
KV_OF_A_TOKEN = 4 * 2 * 2 * 8


class Measured:
    def __init__(self, folder: Path, out: str, code: int) -> None:
        self.json = (folder / "report.json").read_bytes()
        self.report = msgspec.json.decode(self.json, type=DecodeReport)
        self.out, self.code = out, code


@pytest.fixture(scope="module")
def measured(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    folder = tmp_path_factory.mktemp("out")
    argv = ["bench", "decode", "--model", model, "--load-format", "dummy", "--device", "cpu"]
    argv += ["--no-ray", "--batch", "1", "2", "--cudagraph-capture-sizes", "1", "2"]
    argv += ["--input-len", str(PROMPT), "--short-len", str(SHORT), "--long-len", str(LONG)]
    argv += ["--repetitions", str(REPETITIONS), "--json", str(folder / "report.json")]
    with pytest.MonkeyPatch.context() as patch, open(folder / "out", "w+") as out:
        patch.setattr("sys.stdout", out)
        code = main(argv)
        out.seek(0)
        yield Measured(folder, out.read(), code)


def test_every_batch_is_measured_in_one_start(measured: Measured) -> None:
    assert measured.code == 0
    [run] = measured.report.runs
    assert (run.launcher, run.graph_mode) == ("processes", "FULL_AND_PIECEWISE")
    assert {"workers", "load", "capture", "first token"} <= set(run.seconds)
    assert [row.batch for row in run.rows] == [1, 2]
    for row in run.rows:
        assert row.step_ms.least <= row.step_ms.median <= row.step_ms.most
        assert row.tokens_per_s == pytest.approx(row.batch / row.step_ms.median * 1e3)


def test_the_floor_is_that_of_the_middle_step(measured: Measured) -> None:
    rows, per_s = measured.report.runs[0].rows, measured.report.ceiling.bytes_per_s
    context = PROMPT + (SHORT + LONG) // 2
    assert [row.floor_bytes for row in rows] == [
        WEIGHTS + batch * context * KV_OF_A_TOKEN for batch in (1, 2)
    ]
    for row in rows:
        assert row.floor_ms == pytest.approx(row.floor_bytes / per_s * 1e3)
        assert row.share == pytest.approx(row.floor_ms / row.step_ms.median)


def test_steps_are_timed_where_they_run(measured: Measured) -> None:
    one, two = [row.device for row in measured.report.runs[0].rows]
    # A step's time ends with the next one's begin, so the last of each repetition has none.
    most = REPETITIONS * (LONG - SHORT - 1)
    assert one is not None and one.num_steps == most
    # Two requests may be far apart on a busy machine.
    assert two is None or two.num_steps <= most
    assert 0 < one.step_ms.p50 <= one.step_ms.p99
    assert 0 < one.host_us.p50 < one.step_ms.p50 * 1e3


def test_answers_of_every_batch_are_judged(measured: Measured) -> None:
    for row in measured.report.runs[0].rows:
        assert row.accuracy is not None and row.accuracy.passed
        assert row.accuracy.num_positions == 64


def test_what_is_written_is_as_its_schema_says(measured: Measured) -> None:
    schema = msgspec.json.schema(DecodeReport)
    jsonschema.validate(msgspec.json.decode(measured.json), schema)
    row = msgspec.json.decode(measured.json)["runs"][0]["rows"][0]
    assert set(row) == set(DecodeRow.__struct_fields__)
    assert measured.report.setup.options["repetitions"] == REPETITIONS
    assert measured.report.setup.engine["max_num_seqs"] == 2


def test_the_table_comes_last(measured: Measured) -> None:
    *_, names, one, two = measured.out.splitlines()
    assert names.split()[:5] == ["ranks", "as", "graph", "mode", "batch"]
    assert [line.split()[2] for line in (one, two)] == ["1", "2"]
    assert all("ok 64/64" in line for line in (one, two))


def test_a_wrong_answer_is_shown_and_is_an_exit_code(
    measured: Measured, model: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    [run] = measured.report.runs
    first, second = run.rows
    assert first.accuracy is not None
    wrong = structs.replace(first, accuracy=structs.replace(first.accuracy, num_agreed=63))
    report = structs.replace(
        measured.report, runs=[structs.replace(run, rows=[wrong, second]), run]
    )
    monkeypatch.setattr(command, "measure", lambda command: report)
    assert command.main(["--model", model]) == 1
    assert "WRONG 63/64" in capsys.readouterr().out


def test_several_runs_have_a_ratio_and_fit_in_their_lines(measured: Measured, capsys) -> None:
    [run] = measured.report.runs
    slower = structs.replace(run.rows[0].step_ms, median=2 * run.rows[0].step_ms.median)
    other = structs.replace(run, rows=[structs.replace(run.rows[0], step_ms=slower), run.rows[1]])
    open_console().print(report_table([run, other]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert [line.split()[-1] for line in lines] == ["ratio", "1.000", "1.000", "2.000", "1.000"]


def test_a_time_below_zero_is_not_passed_over(measured: Measured, capsys) -> None:
    [run] = measured.report.runs
    noisy = structs.replace(run.rows[0].step_ms, least=-1.5)
    rows = [structs.replace(run.rows[0], step_ms=noisy), run.rows[1]]
    open_console().print(report_table([structs.replace(run, rows=rows)]))
    assert capsys.readouterr().out.splitlines()[-1].startswith("not to be trusted: ")


def test_what_is_not_asked_for_is_left_out(measured: Measured, capsys) -> None:
    [run] = measured.report.runs
    bare = structs.replace(run.rows[0], device=None, accuracy=None)
    open_console().print(report_table([structs.replace(run, rows=[bare])]))
    assert capsys.readouterr().out.splitlines()[-1].split()[-5:] == ["-"] * 5
    assert gate_text(run.rows[0].accuracy).startswith("ok 64/64 ")


def test_an_answer_that_ends_early_is_no_measurement(model: str) -> None:
    config = LaunchConfig(model=model, load_format="dummy", device="cpu")
    front = open_front_end(config, FakeEngine().start, lambda *stage: None)
    load = Load(front)
    prompts = load.prompts(2, PROMPT, seed=1)
    assert load.seconds(prompts, PROMPT) > 0
    with pytest.raises(EngineDead, match="request 0 of the load failed: it has 9 tokens"):
        load.seconds(prompts, PROMPT + 1)


@pytest.mark.parametrize(
    ("argv", "launchers", "modes"),
    [
        ([], ("ray",), ("",)),
        (["--no-ray"], ("processes",), ("",)),
        (["--compare-no-ray"], ("ray", "processes"), ("",)),
        (["--modes", "eager,Full_And_Piecewise"], ("ray",), ("eager", "full_and_piecewise")),
    ],
)
def test_runs_that_are_asked_for(
    model: str, argv: list[str], launchers: tuple[str, ...], modes: tuple[str, ...]
) -> None:
    parsed = parse(["--model", model, *argv])
    assert (parsed.options.launchers, parsed.options.mode_names) == (launchers, modes)


def test_modes_and_batches_become_settings(model: str) -> None:
    parsed = parse(["--model", model, "--batch", "3", "70", "-tp", "2"])
    eager, full = parsed.launch("eager"), parsed.launch("full")
    assert (eager.enforce_eager, full.cudagraph_mode) == (True, "FULL")
    assert eager.max_num_seqs == 70 and eager.tensor_parallel_size == 2
    assert eager.max_model_len == 512 and not eager.enable_prefix_caching
    fewer = parse(["--model", model, "--batch", "3", "--max-num-seqs", "9"])
    assert fewer.launch("").max_num_seqs == 9


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--modes", "egaer"], "--modes: 'egaer' is not known; did you mean 'eager'?"),
        (["--short-len", "9", "--long-len", "9"], "--long-len must be above --short-len=9, got 9"),
        (["--compare-no-ray", "--no-ray"], "--compare-no-ray needs a run with Ray"),
        (["--batch", "0"], "batch[0]: expected `int` >= 1"),
        (
            ["--batch", "9", "--max-num-seqs", "8"],
            "--batch must be at most --max-num-seqs=8, got 9",
        ),
        (["--input-len", "400"], "need 544, but --max-model-len is 512"),
        (["--max-model-len", "150"], "need 272, but --max-model-len is 150"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: its folder does not exist"),
        (["--enforce-eager", "--modes", "full"], "enforce_eager excludes cudagraph_mode=FULL"),
    ],
)
def test_what_cannot_work_is_a_line(model: str, capsys, argv: list[str], line: str) -> None:
    assert main(["bench", "decode", "--model", model, "--device", "cpu", *argv]) == 2
    assert line in capsys.readouterr().err


def test_a_model_must_be_named(capsys) -> None:
    assert main(["bench", "decode"]) == 2
    assert "--model is required" in capsys.readouterr().err


def test_a_child_rank_that_cannot_start_is_named(model: str) -> None:
    config = LaunchConfig(model=model, load_format="dummy", device="cpu", max_num_seqs=1)
    resolved = resolve(config)
    broken = structs.replace(resolved.worker, load_format="gguf")
    with pytest.raises(StartError, match="rank 0 failed: "):
        start_child_engine(structs.replace(resolved, worker=broken), lambda *stage: None)
