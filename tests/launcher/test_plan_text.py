"""What ``lockstep plan`` shows a person: text, bars, a fit, a model's floor, a picture."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.launcher.cli import main
from lockstep.launcher.plan_graphs import plan_graphs
from lockstep.launcher.plan_options import PlanOptions
from lockstep.launcher.plan_report import make_report
from lockstep.launcher.plan_text import compact
from lockstep.worker.graphs.mode import AttentionSupport, GraphMode

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]):
    def run(*argv: str, code: int = 0) -> str:
        assert main(["plan", *argv]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return run


def test_everything_is_on_the_page(shown) -> None:
    page = shown("--cudagraph-mode", "FULL", "--attention-support", "UNIFORM_BATCH", "--batch", "9")
    for part in [
        "graph mode    FULL_AND_PIECEWISE\n",
        "FULL -> FULL_AND_PIECEWISE: mixed batches need attention support ALWAYS",
        "mixed sizes   51: 1, 2, 4, 8..256 by 8, 272..512 by 16\n",
        "decode sizes  35: 1, 2, 4, 8..256 by 8\n",
        "eager         mixed batches above 512 tokens\n",
        "manifest      86 entries, digest ",
        "PIECEWISE (any batch): 512..256 by 16, 248..8 by 8, 4, 2, 1\n",
        "FULL (decode, 1 a request): 256..8 by 8, 4, 2, 1\n",
        "batch         9 tokens (9 requests of 1) runs FULL\n",
        "padded to 16 tokens: 7 wasted, 43.75 %\n",
    ]:
        assert part in page
    rows = [line.split() for line in page.splitlines()]
    # Batches 5 to 8 pad 3 + 2 + 1 + 0 tokens of 4 x 8; the worst is 5 -> 8, 37.5 %: 15 marks.
    assert ["5-8", "18.75", "37.50", "5", "->", "8", "\u2588" * 15] in rows
    # 257 to 512: sixteen steps of 16 that waste 0 to 15 tokens each.
    wasted, computed = 16 * 120, 16 * sum(range(272, 513, 16))
    share = f"{100 * wasted / computed:.2f}"
    assert ["257-512", share, "5.51", "257", "->", "272", "\u2588" * 2] in rows


def test_a_page_without_graphs(shown) -> None:
    page = shown("-O0", "--batch", "7")
    assert "graphs        none: every step runs eagerly\n" in page
    assert "batch         7 tokens (7 requests of 1) runs EAGER\n" in page
    assert "the graph mode is NONE" in page
    assert "padding" not in page


def test_a_page_without_graphs_has_warnings_too(shown) -> None:
    page = shown("--enforce-eager", "--max-num-batched-tokens", "8")
    assert "\nwarning       an engine refuses these limits: --max-num-batched-tokens must" in page


def test_sizes_are_shortened() -> None:
    assert compact([1, 2, 4, 8, 16, 24, 32]) == "1, 2, 4, 8..32 by 8"
    assert compact([32, 24, 16, 8, 4]) == "32..8 by 8, 4"
    assert compact([5]) == "5" and compact([1, 2, 3]) == "1, 2, 3"


def test_a_fit_gains_over_the_standard_grid_and_its_flag_can_be_pasted(
    shown, tmp_path: Path
) -> None:
    path = tmp_path / "batches.json"
    path.write_text(json.dumps({"3": 100, "9": 1000, "17": 10, "200": 5, "4000": 7, "50": 0}))
    fit = json.loads(shown("--json", "--histogram", str(path), "--max-graphs", "3"))["fit"]
    assert fit["sizes"] == [9, 17, 200]
    # The standard grid pads 3 -> 4, 9 -> 16, 17 -> 24; the fit pads 3 -> 9 alone.
    assert fit["standard"]["wasted_tokens"] == 100 * 1 + 1000 * 7 + 10 * 7
    assert fit["fitted"]["wasted_tokens"] == 100 * 6
    assert (fit["steps"], fit["eager_steps"]) == (1115, 7)
    assert fit["flag"] == "--cudagraph-capture-sizes 9 17 200"
    assert any("201 to 256" in each for each in fit["warnings"])
    assert json.loads(shown("--json", *fit["flag"].split()))["capture_sizes"] == fit["sizes"]
    page = shown("--histogram", str(path), "--max-graphs", "3")
    assert "use           --cudagraph-capture-sizes 9 17 200\n" in page
    assert "600 padded tokens" in page and "6570 fewer" in page
    assert json.loads(shown("--json", "--histogram", str(path)))["fit"]["sizes"] == [3, 9, 17, 200]


@pytest.mark.parametrize(
    ("flags", "sizes", "eager"),
    [([], [7, 300], 0), (["--cudagraph-mode", "FULL_DECODE_ONLY"], [7], 2)],
)
def test_a_fit_is_to_what_graphs_of_the_mode_serve(
    shown, tmp_path: Path, flags: list[str], sizes: list[int], eager: int
) -> None:
    path = tmp_path / "batches.json"
    path.write_text('{"7": 5, "300": 2}')
    fit = json.loads(shown("--json", "--histogram", str(path), *flags))["fit"]
    assert (fit["sizes"], fit["eager_steps"]) == (sizes, eager)
    assert fit["standard"]["wasted_tokens"] == 5 * 1 + (2 - eager) * 4
    assert fit["fitted"]["wasted_tokens"] == 0


def test_a_fit_says_that_mixed_steps_may_hide_among_decode_steps_without_graphs_for_them(
    shown, tmp_path: Path
) -> None:
    path = tmp_path / "batches.json"
    path.write_text('{"54": 6, "55": 1}')
    flags = ("--histogram", str(path), "--max-num-seqs", "54")
    said = "warning       a histogram does not tell mixed batches, which FULL_DECODE_ONLY runs"
    assert said not in shown(*flags)
    page = shown(*flags, "--cudagraph-mode", "FULL_DECODE_ONLY")
    assert said in page and "all of up to 54 tokens are taken for these" in page
    assert "6 steps, 1 more that no graph serves" in page


@pytest.mark.parametrize(
    ("text", "flags", "part"),
    [
        ("[1]", [], "Expected `object`"),
        ('{"0": 1}', [], "got 0: 1"),
        ('{"4": -1}', [], "got 4: -1"),
        ('{"a": 1}', [], "got a: 1"),
        ('{"4": "b"}', [], "got 4: b"),
        ('{"4": true}', [], "got 4: True"),
        ("{}", [], "it counts no step"),
        ('{"4": 0}', [], "it counts no step"),
        ("", [], "the file is empty"),
        ("{", [], "truncated"),
        ('{"4": 1}', ["-O0"], "NONE serves none of its batches"),
        ('{"4": 1}', ["--max-graphs", "0"], "--max-graphs"),
        ('{"4": 1}', ["--cudagraph-capture-sizes", "4"], "--cudagraph-capture-sizes [4]"),
    ],
)
def test_histograms_that_are_refused(
    shown, tmp_path: Path, text: str, flags: list[str], part: str
) -> None:
    path = tmp_path / "batches.json"
    path.write_text(text)
    line = shown("--histogram", str(path), *flags, code=2)
    assert part in line and line.count("\n") == 1


def test_a_histogram_that_is_not_there(shown, tmp_path: Path) -> None:
    line = shown("--histogram", str(tmp_path / "none.json"), code=2)
    assert line.endswith("none.json: there is no such file\n")


def test_the_floor_of_a_model_from_its_config_alone(shown, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    model = json.loads(shown("--json", "--model", str(tmp_path)))["model"]
    assert model["gpu"] == "H200"
    assert model["step_weight_bytes"] == pytest.approx(15.01e9, rel=5e-4)
    assert model["kv_bytes_per_token"] == 128 << 10
    floors = {step["num_reqs"]: step["floor_ms"] for step in model["steps"]}
    assert floors == pytest.approx({1: 3.16, 4: 3.24, 16: 3.57, 64: 4.92, 256: 10.3}, rel=5e-3)
    assert all(step["fits"] for step in model["steps"])

    argv = ["--model", str(config), "--gpu", "a100-40gb", "-tp", "2", "--context-len", "8192"]
    half = json.loads(shown("--json", *argv, "--batch", "64"))["model"]
    assert half["step_weight_bytes"] == pytest.approx(model["step_weight_bytes"] / 2, rel=1e-3)
    [step] = half["steps"]
    assert step["step_bytes"] == half["step_weight_bytes"] + 64 * 8192 * (64 << 10)
    assert step["floor_ms"] == pytest.approx(step["step_bytes"] / 1.555e9)
    assert not step["fits"]
    page = shown(*argv, "--batch", "64")
    assert "A100-40GB (1.555 TB/s by its data sheet), context 8192" in page
    assert "does not fit" in page


def test_the_floor_is_of_a_context_that_the_model_takes(shown, tmp_path: Path) -> None:
    for longest, context_len in ((512, 512), (2048, 1024)):
        config = LLAMA_8B | {"max_position_embeddings": longest}
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = json.loads(shown("--json", "--model", str(tmp_path)))["model"]
        assert model["context_len"] == context_len


def test_models_and_gpus_that_are_refused(shown, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    refused = {
        "--gpu": ["--model", str(tmp_path), "--gpu", "H2000"],
        "did you mean 'H200'": ["--model", str(tmp_path), "--gpu", "H2000"],
        "--tensor-parallel-size must divide": ["--model", str(tmp_path), "-tp", "3"],
        "--model": ["--model", str(tmp_path / "none")],
    }
    for part, argv in refused.items():
        assert part in shown(*argv, code=2)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--gpu", "H100"], "--gpu H100 needs --model"),
        (["-tp", "2"], "--tensor-parallel-size 2 needs --model"),
        (["--context-len", "9"], "--context-len 9 needs --model"),
        (["--agree", "5:D", "--batch", "3"], "--batch 3 excludes --agree"),
        (["--model", "x/nope.gguf"], "'x/nope.gguf' is neither a path that exists"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(shown, argv: list[str], line: str) -> None:
    assert line in shown(*argv, code=2)


def test_a_picture(shown, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "waste.png"
    shown("--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "ends in .png" in shown("--plot", str(tmp_path / "waste.pdf"), code=2)
    assert "does not exist" in shown("--plot", str(tmp_path / "no" / "waste.png"), code=2)


def test_a_picture_without_matplotlib_says_what_to_install(
    shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    line = shown("--plot", str(tmp_path / "waste.png"), code=2)
    assert "--plot" in line and "pip install 'lockstep-decode[plot]'" in line


options = st.builds(
    PlanOptions,
    max_num_seqs=st.integers(1, 700),
    max_num_batched_tokens=st.integers(1, 2000),
    num_speculative_tokens=st.integers(0, 8),
    cudagraph_mode=st.sampled_from([mode.value for mode in GraphMode if mode != "FULL"]),
    attention_support=st.sampled_from([level.name for level in AttentionSupport]),
    split_points=st.booleans(),
    lora_cases=st.sampled_from([(0,), (0, 1, 4)]),
    batch=st.none() | st.just(1),
)


@settings(max_examples=60)
@given(options)
def test_any_plan_counts_its_graphs(given_options: PlanOptions) -> None:
    planned = plan_graphs(given_options)
    report = make_report(given_options, planned)
    cases = len(given_options.lora_cases)
    mode = report.cudagraph_mode.resolved
    piecewise = len(report.capture_sizes) if "PIECEWISE" in mode else 0
    full = len(report.decode_sizes) if mode.startswith("FULL") else 0
    assert (report.graphs.full, report.graphs.piecewise) == (cases * full, cases * piecewise)
    assert (report.capture_sizes == ()) == (mode == "NONE")
    if report.batch is not None:
        assert report.batch.wasted_tokens == report.batch.num_tokens_padded - 1
