"""Attention backends as data: what each can do inside a graph, and why it runs here or not.

No torch: planners read this where no backend can be loaded.
"""

from difflib import get_close_matches
from importlib.util import find_spec
from typing import NamedTuple

from lockstep.worker.graphs.mode import AttentionSupport

_NEVER = AttentionSupport.NEVER
_ALWAYS = AttentionSupport.ALWAYS
_BATCH = AttentionSupport.UNIFORM_BATCH
_SINGLE = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE

_MLA = "for models with latent attention (MLA); none is supported"
_SAME = "no adapter: triton serves the same models"
_AMD = "for AMD GPUs; none is supported"


class BackendInfo(NamedTuple):
    """One backend.

    ``support`` is what it can do here if it has an adapter, else what vLLM's documentation says
    of it. ``adapter`` is "module:Class", "" if there is none; ``package`` is what that imports.
    """

    name: str
    support: AttentionSupport
    why: str
    adapter: str = ""
    package: str = "torch"

    @property
    def missing(self) -> str:
        """The package that it needs and this machine lacks; "" if there is none."""
        return "" if find_spec(self.package) else self.package


BACKENDS = (
    BackendInfo(
        "reference",
        _SINGLE,
        "plain torch on any device; lays other batches out on the host",
        "lockstep.worker.attention.reference:ReferenceAttention",
    ),
    BackendInfo(
        "triton",
        _ALWAYS,
        "own kernels, on CUDA; they find rows and lengths on the device",
        "lockstep.worker.attention.triton:TritonAttention",
        "triton",
    ),
    BackendInfo(
        "flashinfer",
        _NEVER,
        "on CUDA; plans each step on the host by lengths that the device must tell first "
        "(vLLM lists it as UNIFORM_SINGLE_TOKEN_DECODE)",
        "lockstep.worker.attention.flashinfer:FlashInferAttention",
        "flashinfer",
    ),
    BackendInfo("flash_attn_2", _BATCH, _SAME),
    BackendInfo("flash_attn_3", _ALWAYS, _SAME),
    BackendInfo("flashmla", _BATCH, _MLA),
    BackendInfo("flashinfer_mla", _BATCH, _MLA),
    BackendInfo("flashinfer_mla_sparse", _BATCH, _MLA),
    BackendInfo("cutlass_mla", _SINGLE, _MLA),
    BackendInfo("aiter_mla", _SINGLE, _AMD),
    BackendInfo("aiter_flash_attn", _BATCH, _AMD),
    BackendInfo("mamba", _SINGLE, "for models with state-space layers; none is supported"),
)

ADAPTERS = {info.name: info.adapter for info in BACKENDS if info.adapter}


def backend_for(name: str, device_type: str) -> BackendInfo:
    """The backend that ``name`` means on a "cuda" or "cpu" device.

    Raises:
        ValueError: there is none of this name, or it has no adapter or not for this device.
    """
    if name == "auto":
        return find_backend("triton" if device_type == "cuda" else "reference")
    if name not in ADAPTERS:
        known = ", ".join(["auto", *ADAPTERS])
        raise ValueError(f"attention_backend must be one of {known}, got {name!r}")
    if name != "reference" and device_type != "cuda":
        raise ValueError(f"attention_backend {name} needs a CUDA device, got {device_type}")
    return find_backend(name)


def find_backend(name: str) -> BackendInfo:
    """The backend of that name.

    Raises:
        ValueError: there is none; lists those that are known.
    """
    for info in BACKENDS:
        if info.name == name:
            return info
    names = [info.name for info in BACKENDS]
    close = get_close_matches(name, names, n=1)
    known = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
    raise ValueError(f"attention_backend {name!r} is not known; {known}")
