"""Flags, the TOML file, and what "auto" becomes."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
from byte_model import write_byte_model

from lockstep.launcher.config import LaunchConfig, build_config
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.flags import add_flags, given
from lockstep.launcher.resolve import CPU_KV_BYTES, Resolved, resolve
from lockstep.launcher.serve.command import parse as parse_serve
from lockstep.worker.attention.registry import ADAPTERS

# Every flag that the README and other tools name, with a value and where it must end up.
FLAGS: list[tuple[str, Any]] = [
    ("--tensor-parallel-size 2", ("worker.parallel.tp_size", 2)),
    ("-tp 2", ("worker.parallel.tp_size", 2)),
    ("-dp 3", ("worker.parallel.dp_size", 3)),
    ("--data-parallel-size 3", ("worker.parallel.dp_size", 3)),
    ("--dp-lockstep always", ("worker.parallel.dp_lockstep", "always")),
    ("--verify-agreement", ("worker.parallel.verify_agreement", True)),
    ("--max-prefill-defer-steps 3", ("worker.schedule.max_prefill_defer_steps", 3)),
    ("--max-num-seqs 5", ("worker.schedule.max_num_seqs", 5)),
    ("--max-num-batched-tokens 64", ("worker.schedule.max_num_batched_tokens", 64)),
    ("--max-model-len 100", ("worker.schedule.max_model_len", 100)),
    ("--max-num-batched-tokens 2k", ("worker.schedule.max_num_batched_tokens", 2000)),
    ("--max-num-batched-tokens 2K", ("worker.schedule.max_num_batched_tokens", 2048)),
    ("--max-num-batched-tokens 25.6k", ("worker.schedule.max_num_batched_tokens", 25600)),
    ("--kv-cache-memory-bytes 3G", ("worker.cache.kv_cache_memory_bytes", 3 << 30)),
    ("--no-async-scheduling", ("worker.schedule.run_ahead", 0)),
    ("--async-scheduling", ("worker.schedule.run_ahead", 2)),
    ("--run-ahead 4", ("worker.schedule.run_ahead", 4)),
    ("--block-size 32", ("worker.cache.block_size", 32)),
    ("--gpu-memory-utilization 0.5", ("worker.cache.gpu_memory_utilization", 0.5)),
    ("--kv-cache-memory-bytes 4096", ("worker.cache.kv_cache_memory_bytes", 4096)),
    ("--num-gpu-blocks-override 7", ("worker.cache.num_gpu_blocks_override", 7)),
    ("--enable-prefix-caching", ("worker.cache.enable_prefix_caching", True)),
    ("--no-enable-prefix-caching", ("worker.cache.enable_prefix_caching", False)),
    ("--enforce-eager", ("worker.graph.mode", "NONE")),
    ("--cudagraph-mode FULL_DECODE_ONLY", ("worker.graph.mode", "FULL_DECODE_ONLY")),
    ("-O0", ("worker.graph.mode", "NONE")),
    ("-O1", ("worker.graph.mode", "PIECEWISE")),
    ("-O1 --cudagraph-mode FULL_DECODE_ONLY", ("worker.graph.mode", "FULL_DECODE_ONLY")),
    ("--cudagraph-mode FULL --device cuda", ("worker.graph.mode", "FULL")),
    ("--compile", ("worker.compile", True)),
    ("--step-timestamps 8", ("worker.step_timestamps", 8)),
    ("--cudagraph-capture-sizes 1 2 4", ("worker.graph.capture_sizes", (1, 2, 4))),
    ("--max-cudagraph-capture-size 8", ("worker.graph.max_capture_size", 8)),
    ("--load-format dummy", ("worker.load_format", "dummy")),
    ("--dtype bfloat16", ("worker.dtype", "bfloat16")),
    ("--dtype half", ("worker.dtype", "float16")),
    ("--seed 3", ("worker.seed", 3)),
    ("--seed 3", ("worker.schedule.seed", 3)),
    ("--preemption least_computed", ("worker.schedule.preempt", "least_computed")),
    ("--performance-mode interactivity", ("worker.graph.performance_mode", "interactivity")),
    ("--max-num-queued-reqs 3", ("worker.schedule.max_queued_requests", 3)),
    ("--distributed-timeout-seconds 5", ("worker.parallel.timeout_s", 5.0)),
    ("--device cuda", ("device", "cuda")),
    ("--served-model-name it", ("launch.model_names", ("it",))),
    ("--served-model-name it that", ("launch.model_names", ("it", "that"))),
]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_byte_model(tmp_path)


def settings(line: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, LaunchConfig)
    return given(parser.parse_args(line.split()), LaunchConfig)


def resolved(model: str, line: str = "", *, gpu: tuple[int, int] | None = None) -> Resolved:
    return resolve(build_config({"model": model} | settings(line)), capability=lambda: gpu)


@pytest.mark.parametrize(("line", "expected"), FLAGS)
def test_each_flag_arrives(model: str, line: str, expected: tuple[str, Any]) -> None:
    path, value = expected
    found: Any = resolved(model, line)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_help_tells_what_every_flag_does() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, LaunchConfig)
    text = " ".join(parser.format_help().split())
    for field, hint in LaunchConfig.__annotations__.items():
        description = next(each.description for each in hint.__metadata__ if each.description)
        assert description in text, field


def test_a_file_sets_what_flags_do_not(model: str, tmp_path: Path) -> None:
    file = tmp_path / "lockstep.toml"
    file.write_text(f'model = "{model}"\nmax-num-seqs = 3\ntensor_parallel_size = 2\n')
    config = build_config(settings("-tp 4"), file)
    assert (config.max_num_seqs, config.tensor_parallel_size) == (3, 4)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tensor_paralel_size = 2", "did you mean 'tensor_parallel_size'"),
        ("max-num-seqs = 3\nmax_num_seqs = 4", "max-num-seqs and max_num_seqs are one setting"),
        ("[worker]\nseed = 1", "unknown field 'worker'"),
        ('max_num_seqs = "3"', "max_num_seqs: expected `int | null`, got `str`"),
        ("temperature = 1.0", "lockstep.toml: unknown field 'temperature'"),
        ("max_num_seqs = true", "max_num_seqs: expected `int | null`, got `bool`"),
        ("model = 1", "model: expected `str`, got `int`"),
        ("enforce_eager", "lockstep.toml"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "lockstep.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        build_config({} if "model" in text else {"model": "m"}, file)


def test_auto_on_a_cpu(model: str) -> None:
    found = resolved(model)
    assert (found.device, found.worker.dtype) == ("cpu", "float32")
    assert found.worker.cache.kv_cache_memory_bytes == CPU_KV_BYTES
    assert found.worker.schedule.max_model_len == 512


def test_auto_on_cuda(model: str) -> None:
    found = resolved(model, gpu=(10, 0))
    assert found.device == "cuda"
    assert found.worker.dtype == found.worker.model.dtype
    assert found.worker.cache.kv_cache_memory_bytes is None
    assert found.worker.graph.compute_capability == (10, 0)


def test_every_attention_backend_with_an_adapter_can_be_chosen(model: str) -> None:
    for name in ADAPTERS:
        found = resolved(model, f"--device cuda --attention-backend {name}")
        assert found.worker.attention_backend == name


def test_a_backend_that_cannot_be_captured_leaves_graphs_of_segments(model: str) -> None:
    line = "--device cuda --attention-backend flashinfer"
    found = resolved(model, line)
    assert found.worker.graph.mode == "PIECEWISE"
    assert any("need attention support" in note and "got NEVER" in note for note in found.notes)
    with pytest.raises(ConfigError, match="cudagraph_mode FULL needs attention that can be"):
        resolved(model, f"{line} --cudagraph-mode FULL")


def test_notes_say_what_was_chosen(model: str) -> None:
    notes = resolved(model, "--max-num-seqs 8 --max-cudagraph-capture-size 4").notes
    assert any("5 to 8 tokens have no FULL decode graph" in note for note in notes)
    said = "capture lazy captures nothing: the graph mode is NONE"
    assert resolved(model, "--enforce-eager --capture lazy").notes.count(said) == 1
    assert said not in resolved(model, "--capture lazy").notes + resolved(model, "-O0").notes


def test_without_a_model_or_with_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        build_config({})
    with pytest.raises(ConfigError, match="nowhere"):
        resolved(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--enforce-eager --cudagraph-mode FULL", "enforce_eager excludes cudagraph_mode=FULL"),
        ("--no-async-scheduling --run-ahead 2", "run_ahead=2 needs async_scheduling"),
        ("--max-num-seqs 65 --max-num-batched-tokens 64", "at least max_num_seqs=65, got 64"),
        ("--gpu-memory-utilization nan", "gpu_memory_utilization"),
        ("--gpu-memory-utilization 1.1", "gpu_memory_utilization"),
        ("--num-gpu-blocks-override 1", "num_gpu_blocks_override"),
        ("--distributed-timeout-seconds 0", "distributed_timeout_seconds"),
        ("--cudagraph-capture-sizes 0", "cudagraph_capture_sizes must be sizes of at least 1"),
        ("-tp 3", "tensor_parallel_size must be at most num_heads=2, got 3"),
        ("--max-model-len 513", "at most the model's 512, got 513"),
        ("--max-model-len 1", "max_model_len must be at least 2, got 1"),
        ("--attention-backend triton", "triton needs a CUDA device, got cpu"),
        ("--kv-cache-memory-bytes 100", "kv_cache_memory_bytes must be at least .*, got 100"),
        ("--all-reduce foo", "all_reduce must be auto or of gloo on cpu, got 'foo'"),
        ("--load-format gguf", "load_format gguf cannot read .*, which is no GGUF file"),
        ("--seed -1", "seed"),
        ("--seed 9223372036854775808", "seed"),
    ],
)
def test_settings_that_cannot_work(model: str, line: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolved(model, line)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8x", "int such as 8192, 8k (8000) or 8K (8192), got '8x'"),
        ("1.5K", "got '1.5K'"),
        ("1.2345k", "got '1.2345k'"),
        ("auto", "'auto' is what leaving the flag out means"),
    ],
)
def test_what_is_no_whole_number_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        parse_serve(["m", "--max-model-len", text])
    assert "--max-model-len" in str(refused.value)
