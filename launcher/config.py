"""What a user may set, named as vLLM names it, and how "auto" becomes concrete.

``LaunchConfig`` is the single list: flags, TOML keys, help texts and the ``LLM`` class's keyword
arguments are all made from it.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lockstep.launcher.errors import ConfigError
from lockstep.launcher.files import check_readable
from lockstep.launcher.other_flags import advice_on_setting
from lockstep.launcher.strict import convert
from lockstep.parallel.config import DpLockstep
from lockstep.worker.config import CaptureTime, GraphModeName

Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
OptimizationLevel = Annotated[int, Meta(ge=0, le=3)]
Device = Literal["cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]


def _help(text: str) -> Meta:
    return Meta(description=text)


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of an engine. None means: chosen from the model and the device.

    Raises:
        ValueError: settings that exclude each other.
    """

    model: Annotated[str, _help("directory, GGUF file, hub id, or 'smollm2'")]
    served_model_name: Annotated[
        Name | tuple[Name, ...] | None, _help("names that clients use; answers have the first")
    ] = None
    tokenizer: Annotated[str | None, _help("path to read the tokenizer from instead")] = None
    chat_template: Annotated[str | None, _help("jinja file used instead of the model's")] = None
    load_format: Annotated[LoadFormat, _help("'dummy': seeded random weights")] = "auto"
    dtype: Annotated[
        Literal["auto", "half", "float16", "bfloat16", "float", "float32"],
        _help("auto: float32 on a CPU, the model's own on CUDA"),
    ] = "auto"
    device: Annotated[Literal["auto", "cuda", "cpu"], _help("auto: cuda if there is one")] = "auto"
    seed: Annotated[
        Seed | None, _help("of dummy weights, and of the seeds that requests without one draw")
    ] = None

    tensor_parallel_size: Annotated[Count, _help("ranks that share one copy of the model")] = 1
    data_parallel_size: Annotated[Count, _help("copies of the model")] = 1
    dp_lockstep: Annotated[DpLockstep, _help("which replicas take every step together")] = "auto"
    verify_agreement: Annotated[
        bool, _help("compare every step's agreement and tokens over all ranks")
    ] = False
    max_prefill_defer_steps: Annotated[
        int, _help("steps a prefill may wait for other replicas of its lockstep group")
    ] = 8
    distributed_timeout_seconds: Annotated[float, Meta(gt=0), _help("deadline of a collective")] = (
        60.0
    )

    placement_timeout_seconds: Annotated[
        float, Meta(gt=0), _help("how long Ray may look for room for all ranks")
    ] = 120.0

    max_model_len: Annotated[Count | None, _help("prompt and output tokens of a request")] = None
    max_num_seqs: Annotated[Count | None, _help("requests in a batch, per replica")] = None
    max_num_batched_tokens: Annotated[Count | None, _help("tokens in a step, per replica")] = None
    max_num_queued_reqs: Annotated[Count | None, _help("requests refused above it")] = None
    async_scheduling: Annotated[bool, _help("overlap planning with the device")] = True
    run_ahead: Annotated[
        int | None, _help("steps granted beyond the last committed one (2; 0: plain loop)")
    ] = None

    preemption: Annotated[
        Literal["youngest", "least_computed"], _help("whom a full KV pool preempts")
    ] = "youngest"

    block_size: Annotated[Count, _help("tokens in a KV block")] = 16
    gpu_memory_utilization: Annotated[float, _help("share of a GPU's memory to use")] = 0.9
    kv_cache_memory_bytes: Annotated[
        Count | None, _help("KV memory a rank (on a CPU 1 GiB unless given)")
    ] = None
    num_gpu_blocks_override: Annotated[int | None, _help("KV blocks, instead of measuring")] = None
    enable_prefix_caching: Annotated[bool, _help("reuse KV blocks of equal prefixes")] = True

    enforce_eager: Annotated[bool, _help("no graphs")] = False
    optimization_level: Annotated[
        OptimizationLevel | None, _help("0 to 3: the mode where --cudagraph-mode does not say it")
    ] = None
    cudagraph_mode: Annotated[
        GraphModeName | None, _help("which steps are graphs (default FULL_AND_PIECEWISE)")
    ] = None
    cudagraph_capture_sizes: Annotated[
        tuple[int, ...] | None, _help("sizes to capture, in tokens")
    ] = None
    max_cudagraph_capture_size: Annotated[int | None, _help("largest size of the grid")] = None
    capture: Annotated[
        CaptureTime,
        _help("lazy: serve once the largest graphs exist, others come between steps"),
    ] = "eager"
    performance_mode: Annotated[
        Literal["balanced", "interactivity", "throughput"], _help("how fine the grid is")
    ] = "balanced"
    compile: Annotated[bool, _help("torch.compile what lies between attentions")] = False
    attention_backend: Annotated[
        Literal["auto", "reference", "triton", "flashinfer"], _help("auto: triton on CUDA")
    ] = "auto"
    all_reduce: Annotated[
        str, _help("auto: by measurement; or a table by bytes: fused:65536,one_shot:65536,nccl")
    ] = "auto"
    step_timestamps: Annotated[
        int, Meta(ge=0), _help("last steps whose times on the device are kept, by two more kernels")
    ] = 0

    def __post_init__(self) -> None:
        check_eager(self.enforce_eager, self.cudagraph_mode)
        if not self.async_scheduling and self.run_ahead:
            raise ValueError(f"run_ahead={self.run_ahead} needs async_scheduling")

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model; the first is what it calls itself."""
        named = self.served_model_name or self.model
        return (named,) if isinstance(named, str) else named


def check_eager(enforce_eager: bool, cudagraph_mode: GraphModeName | None) -> None:
    """Raises ValueError if both are asked for: no graphs, and graphs."""
    if enforce_eager and cudagraph_mode not in (None, "NONE"):
        raise ValueError(f"enforce_eager excludes cudagraph_mode={cudagraph_mode}")


class NoSettings(msgspec.Struct, frozen=True):
    """What a file holds beside the settings of an engine, for a command that has no others."""


def read_toml(path: Path, beside: type[msgspec.Struct] = NoSettings) -> dict[str, Any]:
    """Keys of a TOML file as field names; ``max-num-seqs`` is read as ``max_num_seqs``.

    Args:
        beside: settings of this struct may stand in the file too.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a key or value that cannot be;
            names the file.
    """
    check_readable("--config", path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        settings = _by_field(data)
        others = {k: v for k, v in settings.items() if k in beside.__struct_fields__}
        convert(others, beside)
        own = {key: value for key, value in settings.items() if key not in others}
        _launch_config({"model": "", **own})
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    return settings


def _by_field(data: dict[str, Any]) -> dict[str, Any]:
    """Values by the names of their fields; raises ValueError for a field with two spellings."""
    spelled = dict[str, str]()
    for key in data:
        first = spelled.setdefault(key.replace("-", "_"), key)
        if first != key:
            raise ValueError(f"{first} and {key} are one setting, given twice")
    return {name: data[key] for name, key in spelled.items()}


def build_config(given: dict[str, Any], file: Path | None = None) -> LaunchConfig:
    """Settings of ``file`` overridden by those ``given``.

    Raises:
        ConfigError: names the field, the value and the limit.
    """
    settings = {**(read_toml(file) if file else {}), **given}
    if "model" not in settings:
        raise ConfigError("model is required: pass --model, or set it in the --config file")
    try:
        return _launch_config(settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _launch_config(settings: dict[str, Any]) -> LaunchConfig:
    """As ``convert``; a setting that other servers have is answered with what to write instead."""
    known = LaunchConfig.__struct_fields__
    told = (advice_on_setting(name) for name in settings if name not in known)
    for text in filter(None, told):
        raise ValueError(text)
    return convert(settings, LaunchConfig)
