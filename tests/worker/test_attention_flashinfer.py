"""The FlashInfer adapter on a CPU: a stand-in attends by what it was given to plan with.

What FlashInfer's own kernels make of it is tested on a GPU.
"""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from paged_cases import PagedCase, attend_one, make_case
from torch import Tensor

from lockstep.worker.attention import flashinfer as adapter
from lockstep.worker.attention.base import resolve_backend
from lockstep.worker.attention.flashinfer import FlashInferAttention, check_sizes, workspace_bytes
from lockstep.worker.attention.registry import find_backend

SCALE = 0.3
SHAPE = {"head_dim": 64, "dtype": torch.bfloat16}
CASES = {
    "decode": ([1, 1, 1, 1], [1, 4, 5, 37]),
    "mixed": ([1, 6, 1, 3], [17, 6, 2, 11]),
    "idle rows": ([0, 1, 0, 4, 0], [1, 9, 1, 4, 1]),
}


class StandIn:
    """Plans and runs as BatchPrefillWithPagedKVCacheWrapper is documented to."""

    made: list["StandIn"]

    def __init__(self, workspace: Tensor, kv_layout: str, *, backend: str) -> None:
        assert (workspace.dtype, kv_layout, backend) == (torch.uint8, "NHD", "fa2")
        self.num_plans = 0
        StandIn.made.append(self)

    def plan(self, *args: Any, causal: bool, sm_scale: float, window_left: int, **types: Any):
        self.num_plans += 1
        self.layout, self.shape = [tensor.tolist() for tensor in args[:4]], args[4:]
        self.scale, self.window_left = sm_scale, window_left
        assert causal and set(types.values()) == {torch.bfloat16}

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        query_starts, block_starts, block_ids, last_lens = self.layout
        num_heads, num_kv_heads, head_dim, block_size = self.shape
        assert q.shape == out.shape == (query_starts[-1], num_heads, head_dim)
        assert kv[0].shape[1:] == (block_size, num_kv_heads, head_dim)
        for row, last_len in enumerate(last_lens):
            ids = block_ids[block_starts[row] : block_starts[row + 1]]
            context = (len(ids) - 1) * block_size + last_len
            k, v = (cache[ids].flatten(0, 1) for cache in kv)
            tokens = range(query_starts[row], query_starts[row + 1])
            for token in tokens:
                end = context - tokens.stop + token + 1
                begin = 0 if self.window_left < 0 else max(0, end - 1 - self.window_left)
                out[token] = attend_one(q[token], k[begin:end], v[begin:end], self.scale)


def store_kv(k: Tensor, v: Tensor, layer_kv: tuple[Tensor, Tensor], slots: Tensor) -> None:
    block_size = layer_kv[0].shape[1]
    for cache, new in zip(layer_kv, (k, v), strict=True):
        cache[slots // block_size, slots % block_size] = new


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """FlashInfer and the kernel that stores, replaced; the wrappers that get made."""
    package, kernel = ModuleType("flashinfer"), ModuleType("store_kv")
    package.BatchPrefillWithPagedKVCacheWrapper = StandIn  # type: ignore[attr-defined]
    kernel.store_kv = store_kv  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "lockstep.worker.kernels.store_kv", kernel)
    gpu = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(adapter.torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(StandIn, "made", [], raising=False)
    return StandIn.made


def attend(
    backend: FlashInferAttention, case: PagedCase, window: int | None = None, layer: int = 0
) -> Tensor:
    out = torch.full_like(case.q, 7.0)
    backend.forward(
        case.q, case.k, case.v, case.cache.layer(layer), case.metadata,
        scale=SCALE, window=window, out=out,
    )  # fmt: skip
    return out


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("name", CASES)
def test_what_is_planned_and_run_is_causal_attention(
    name: str, window: int | None, made: list[StandIn]
) -> None:
    case = make_case(*CASES[name], num_padding_tokens=3 * (name != "decode"), **SHAPE)
    found = attend(FlashInferAttention(case.sizes()), case, window)
    assert_close(found, case.expected(SCALE, window))


def test_a_step_is_planned_once_for_all_layers_with_one_window(made: list[StandIn]) -> None:
    first, second = (make_case(*CASES[name], **SHAPE) for name in ("decode", "mixed"))
    backend = FlashInferAttention(first.sizes())
    for _ in range(3):
        attend(backend, first)
    assert [wrapper.num_plans for wrapper in made] == [1]
    for window in (None, 6, None, 6):
        assert_close(attend(backend, second, window), second.expected(SCALE, window))
    assert [wrapper.num_plans for wrapper in made] == [2, 1]
    again = replace(first, metadata=replace(first.metadata))
    assert_close(attend(backend, again), first.expected(SCALE, None))
    assert [wrapper.num_plans for wrapper in made] == [3, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 80}, "flashinfer needs a head_dim of 64, 128, 256, got 80"),
        ({"head_dim": 96}, "flashinfer needs a head_dim of 64, 128, 256, got 96"),
        ({"dtype": torch.float32}, "flashinfer needs dtype float16 or bfloat16, got float32"),
    ],
)
def test_what_flashinfer_has_no_kernel_for_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    sizes = replace(make_case([1], [1], **SHAPE).sizes(), **changes)
    with pytest.raises(ValueError, match=f"attention_backend {message}"):
        check_sizes(sizes)


def test_the_workspace_holds_the_partial_results_of_the_widest_split() -> None:
    sizes = replace(make_case([1], [1], **SHAPE).sizes(), num_heads=32, num_kv_heads=8)
    # 264 programs, 33 a group of 4 heads, each of 128 queries of 64 numbers and a sum.
    assert workspace_bytes(sizes, 132) == 33 * 32 * 128 * 65 * 4 + (1 << 20)


def test_where_it_cannot_run_it_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, made: list[StandIn]
) -> None:
    with pytest.raises(ValueError, match="flashinfer needs a CUDA device, got cpu"):
        resolve_backend("flashinfer", torch.device("cpu"))
    monkeypatch.setattr("lockstep.worker.attention.registry.find_spec", lambda name: None)
    assert find_backend("flashinfer").missing == "flashinfer"
    with pytest.raises(ValueError, match="flashinfer needs the package flashinfer, not found here"):
        resolve_backend("flashinfer", torch.device("cuda"))
