"""``lockstep plan`` from flags to output: the vectors, the article's numbers, every refusal."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from byte_model import write_byte_model

from lockstep.launcher.cli import main
from lockstep.launcher.config import LaunchConfig, build_config
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.flags import with_flags
from lockstep.launcher.resolve import resolve

DATA = Path(__file__).parents[1] / "data"


def vectors(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DATA / f"{name}_vectors.json").read_text())["vectors"]
    return found


def flags_of(config: dict[str, Any]) -> list[str]:
    """The keys of the vectors are the flags' names."""
    argv = list[str]()
    for key, value in config.items():
        if key == "compute_capability":
            value = ".".join(map(str, value))
        values = value if isinstance(value, list) else [value]
        argv += [f"--{key.replace('_', '-')}", *map(str, values)]
    return argv


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]):
    def run(*argv: str) -> Any:
        """The JSON object of a plan, or the line on standard error of one that is refused."""
        code = main(["plan", *argv])
        out, err = capsys.readouterr()
        if code:
            assert (code, out, err.count("\n")) == (2, "", 1)
            return err
        assert not err
        return json.loads(out)

    return run


@pytest.mark.parametrize("row", vectors("grid"), ids=lambda row: row["id"])
def test_grid_vector(plan, row: dict) -> None:
    found = plan("--json", *flags_of(row["input"]))
    if "error" in row["expect"]:
        assert "--cudagraph-capture-sizes" in found
        return
    assert found["capture_sizes"] == row["expect"]["sizes"]
    assert found["max_capture_size"] == row["expect"]["max_size"]
    assert len(found["capture_sizes"]) == row["expect"]["num_sizes"]


@pytest.mark.parametrize("row", vectors("dispatch"), ids=lambda row: row["id"])
def test_dispatch_vector(plan, row: dict) -> None:
    batch = row["batch"]
    argv = flags_of({
        **row["config"],
        "batch": batch["num_tokens"],
        "batch_reqs": batch["num_reqs"],
        "uniform_query_len": batch["uniform_query_len"] or 0,
        "num_active_loras": batch["num_active_loras"],
    })  # fmt: skip
    found = plan("--json", *argv)["batch"]
    assert {key: found[key] for key in row["expect"]} == row["expect"]


@pytest.mark.parametrize("row", vectors("mode"), ids=lambda row: "-".join(map(str, row.values())))
def test_mode_vector(plan, row: dict) -> None:
    argv = [
        "--cudagraph-mode", row["requested"], "--attention-support", row["support"],
        "--num-speculative-tokens", str(row["query_len"] - 1),
    ]  # fmt: skip
    found = plan("--json", *argv, *([] if row["piecewise_available"] else ["--no-split-points"]))
    if row["expect"] == "ERROR":
        assert "--cudagraph-mode FULL" in found and "NEVER" in found
        return
    mode = found["cudagraph_mode"]
    assert (mode["requested"], mode["resolved"]) == (row["requested"], row["expect"])
    assert bool(mode["reasons"]) == (row["requested"] != row["expect"])


@pytest.mark.parametrize("row", vectors("agreement"), ids=lambda row: row["id"])
def test_agreement_vector(plan, row: dict) -> None:
    batches = [f"{each['num_tokens']}:{each['kind']}" for each in row["replicas"]]
    assert plan("--agree", *batches) == row["expect"]


@pytest.mark.parametrize(
    ("batches", "flags", "expect"),
    [
        ("5:D 300:M 1:I", "", ("PIECEWISE", 304)),
        ("0:Z 0:Z", "", ("NO_STEP", 0)),
        ("7:D 1:I", "", ("FULL", 8)),
        ("8:D 4:I", "--num-speculative-tokens 3", ("FULL", 8)),
        ("590:D 5:M", "--max-num-seqs 600", ("EAGER", None)),
        ("3:D 40:M", "--cudagraph-mode FULL_DECODE_ONLY", ("EAGER", None)),
    ],
)
def test_agreement(plan, batches: str, flags: str, expect: tuple) -> None:
    found = plan("--agree", *batches.split(), *flags.split())
    assert (found["run_mode"], found["num_tokens_padded"]) == expect
    assert len(found) == 2


@pytest.mark.parametrize(
    ("seqs", "capability", "count"),
    [(16, "9.0", 7), (32, "9.0", 11), (64, "9.0", 19), (128, "9.0", 35), (256, "9.0", 51),
     (1024, "9.0", 51), (264, "9.0", 52), (1024, "10.0", 83)],
)  # fmt: skip
def test_counts_of_the_article(plan, seqs: int, capability: str, count: int) -> None:
    found = plan("--json", "--max-num-seqs", str(seqs), "--compute-capability", capability)
    assert len(found["capture_sizes"]) == found["graphs"]["piecewise"] == count
    assert found["graphs"]["full"] == len(found["decode_sizes"])
    assert found["decode_sizes"][-1] == seqs


def test_batches_of_the_article(plan) -> None:
    small = plan("--json", "--max-num-seqs", "64", "--batch", "5")["batch"]
    assert small == {
        "num_tokens": 5, "num_reqs": 5, "uniform_query_len": 1, "num_active_loras": 0,
        "run_mode": "FULL", "num_tokens_padded": 8, "num_reqs_padded": 8,
        "wasted_tokens": 3, "waste_percent": 37.5,
    }  # fmt: skip
    large = plan("--json", "--batch", "500")["batch"]
    assert large == {
        "num_tokens": 500, "num_reqs": 256, "uniform_query_len": 0, "num_active_loras": 0,
        "run_mode": "PIECEWISE", "num_tokens_padded": 512, "num_reqs_padded": None,
        "wasted_tokens": 12, "waste_percent": 12 / 512 * 100,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "expect"),
    [
        ("--batch 12 --num-speculative-tokens 2", (4, 3, "FULL", 12, 4)),
        ("--batch 11 --num-speculative-tokens 2", (11, 0, "PIECEWISE", 12, None)),
        ("--batch 12 --batch-reqs 4", (4, 0, "PIECEWISE", 16, None)),
        ("--batch 12 --uniform-query-len 0", (12, 0, "PIECEWISE", 16, None)),
        ("--batch 12 --uniform-query-len 2", (6, 2, "PIECEWISE", 16, None)),
        ("--batch 513", (256, 0, "EAGER", 513, 256)),
        ("--batch 12 --num-active-loras 1", (12, 1, "EAGER", 12, 12)),
        ("--batch 12 --num-active-loras 1 --lora-cases 0 2", (12, 1, "FULL", 16, 16)),
    ],
)
def test_how_a_batch_is_read(plan, argv: str, expect: tuple) -> None:
    batch = plan("--json", *argv.split())["batch"]
    keys = ("num_reqs", "uniform_query_len", "run_mode", "num_tokens_padded", "num_reqs_padded")
    assert tuple(batch[key] for key in keys) == expect


def test_the_whole_object_of_a_plan_without_graphs(plan) -> None:
    for argv in (["-O0"], ["--cudagraph-mode", "NONE"], ["-O", "3", "--cudagraph-mode", "NONE"]):
        assert plan("--json", *argv) == {
            "capture_sizes": [],
            "decode_sizes": [],
            "max_capture_size": 0,
            "cudagraph_mode": {"requested": "NONE", "resolved": "NONE", "reasons": []},
            "graphs": {"full": 0, "piecewise": 0},
            "batch": None,
            "warnings": [],
        }


def test_modes_come_from_the_level_and_from_the_backend(plan) -> None:
    def resolved(*argv: str) -> str:
        mode: str = plan("--json", *argv)["cudagraph_mode"]["resolved"]
        return mode

    assert [resolved(f"-O{level}") for level in range(4)] == [
        "NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE",
    ]  # fmt: skip
    assert resolved("--enforce-eager") == "NONE"
    assert resolved("--cudagraph-mode", "piecewise") == "PIECEWISE"
    full = ("--cudagraph-mode", "FULL", "--attention-backend")
    assert resolved(*full, "flash_attn_3") == "FULL"
    assert resolved(*full, "flash_attn_2") == "FULL_AND_PIECEWISE"
    spec = ("--num-speculative-tokens", "1")
    assert resolved("--attention-backend", "cutlass_mla", *spec) == "PIECEWISE"


def test_warnings_name_what_has_no_graph(plan) -> None:
    found = plan("--json", "--cudagraph-capture-sizes", "4", "100", "9000")
    assert found["capture_sizes"] == [4, 100]
    assert any("[9000]" in each for each in found["warnings"])
    assert any("101 to 256 tokens" in each for each in found["warnings"])


def test_limits_that_an_engine_refuses_are_planned_with_its_sentence(plan, tmp_path: Path) -> None:
    config = build_config({
        "model": write_byte_model(tmp_path), "max_num_seqs": 64, "max_num_batched_tokens": 8,
    })  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        resolve(config)
    found = plan("--json", "--max-num-seqs", "64", "--max-num-batched-tokens", "8")
    said = with_flags(str(refused.value), LaunchConfig)
    assert found["warnings"][0] == f"an engine refuses these limits: {said}"
    eager = plan("--json", "--enforce-eager", "--max-num-batched-tokens", "8")
    assert "256, got 8" in eager["warnings"][0]


def test_tokens_in_a_step_grow_with_requests_unless_they_are_given(plan) -> None:
    found = plan("--json", "--max-num-seqs", "9000", "--batch", "9000", "--batch-reqs", "9000")
    assert found["batch"]["num_tokens"] == 9000
    assert not any("refuses" in each for each in found["warnings"])


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ("--max-num-seqs 0", ["--max-num-seqs", "0", "1"]),
        ("--max-num-seqs many", ["--max-num-seqs", "many", "int"]),
        ("--max-num-batched-tokens -1", ["--max-num-batched-tokens", "-1", ">= 1"]),
        ("--num-speculative-tokens -1", ["--num-speculative-tokens", "-1", ">= 0"]),
        ("--cudagraph-capture-sizes 0 4", ["--cudagraph-capture-sizes", "[0, 4]", "at least 1"]),
        ("--cudagraph-capture-sizes 9000", ["--max-num-batched-tokens=8192", "9000"]),
        ("--max-cudagraph-capture-size 0", ["--max-cudagraph-capture-size", "0", "at least 1"]),
        (
            "--cudagraph-capture-sizes 1 8 --max-cudagraph-capture-size 9",
            ["--max-cudagraph-capture-size", "9", "8"],
        ),
        ("--cudagraph-mode whole", ["--cudagraph-mode", "'whole'", "FULL_DECODE_ONLY"]),
        ("--enforce-eager --cudagraph-mode full", ["--enforce-eager", "--cudagraph-mode=FULL"]),
        (
            "--cudagraph-mode FULL --attention-support NEVER",
            ["--cudagraph-mode FULL", "NEVER"],
        ),
        ("-O4", ["--optimization-level", "4", "<= 3"]),
        ("--compute-capability hopper", ["--compute-capability", "hopper", "9.0"]),
        ("--lora-cases 2 1", ["--lora-cases", "(2, 1)", "ascend"]),
        ("--attention-backend foo", ["--attention-backend", "'foo'", "triton"]),
        (
            "--attention-backend triton --attention-support ALWAYS",
            ["--attention-backend triton", "--attention-support"],
        ),
        ("--batch 0", ["--batch", "0", ">= 1"]),
        ("--batch 9000", ["--batch", "9000", "--max-num-batched-tokens=8192"]),
        ("--batch 400 --batch-reqs 300", ["--batch-reqs", "300", "--max-num-seqs=256"]),
        ("--batch 4 --batch-reqs 5", ["--batch-reqs", "5", "batch=4"]),
        ("--batch 6 --batch-reqs 4 --uniform-query-len 1", ["--batch 6", "4", "1"]),
        ("--batch 7 --uniform-query-len 2", ["--batch 7", "--uniform-query-len 2"]),
        ("--batch-reqs 4", ["--batch-reqs 4", "--batch"]),
        ("--agree 5:Q", ["--agree", "'5:Q'", "D, M, E, I or Z"]),
        ("--agree 257:D", ["--agree 257:D", "--max-num-seqs=256"]),
        ("--agree 9000:M", ["--agree 9000:M", "--max-num-batched-tokens=8192"]),
        ("--agree 2:I", ["--agree 2:I", "0 or 1"]),
        ("--agree 5:D 1:Z", ["--agree 1:Z: tokens without work must be 0\n"]),
        ("--agree 5:D -1:D", ["--agree", "at least 0, got '-1:D'"]),
        ("--max-graphs 4", ["--max-graphs 4", "--histogram"]),
        ("--fast", ["--fast"]),
        ("--max-num-seq 4", ["--max-num-seq"]),
    ],
)
def test_refusals_are_one_line_with_flag_value_and_limit(plan, argv: str, names: list[str]) -> None:
    line = plan(*argv.split())
    assert line.startswith("lockstep: ")
    for name in names:
        assert name in line


def test_neither_torch_nor_ray_nor_this_machines_gpu_is_touched() -> None:
    check = (
        "import sys\n"
        "from lockstep.launcher.cli import main\n"
        "assert main(['plan', '--batch', '5']) == 0\n"
        "found = {'torch', 'ray', 'triton', 'matplotlib'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "runs FULL" in done.stdout
