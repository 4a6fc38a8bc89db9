"""Attention on CUDA by FlashInfer's kernels, which the host plans once a step from its lengths."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.worker.attention.base import AttentionSizes
from lockstep.worker.attention.paged_layout import PagedLayout, paged_layout
from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.graphs.mode import AttentionSupport
from lockstep.worker.rotation import Rotation

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)

# FlashInfer splits contexts until two programs a multiprocessor have work, of 128 queries at most.
_PROGRAMS_PER_SM = 2
_QUERIES_PER_PROGRAM = 128
_SLACK_BYTES = 1 << 20


class _Kind(NamedTuple):
    """What a plan depends on beside the step: layers that share it share the plan."""

    window: int | None
    scale: float


class FlashInferAttention:
    """One kernel for all rows, prompt chunks and single queries alike.

    It cannot be captured: what the host plans is launched with numbers of this very step.

    Raises:
        ValueError: FlashInfer has no kernel for the head size or the type.
    """

    name = "flashinfer"
    support = AttentionSupport.NEVER

    def __init__(self, sizes: AttentionSizes) -> None:
        check_sizes(sizes)
        import flashinfer

        from lockstep.worker.kernels.store_kv import store_kv

        self._sizes = sizes
        self._store_kv = store_kv
        num_sms = torch.cuda.get_device_properties(sizes.device).multi_processor_count
        workspace = torch.zeros(
            workspace_bytes(sizes, num_sms), dtype=torch.uint8, device=sizes.device
        )
        self._create_wrapper = partial(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper, workspace, "NHD", backend="fa2"
        )
        self._wrappers: dict[_Kind, Any] = {}
        self._planned: set[_Kind] = set()
        self._step: tuple[AttentionMetadata, PagedLayout] | None = None

    def rotates(self, metadata: AttentionMetadata, num_tokens: int) -> bool:
        return False

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer_kv: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        rotation: Rotation | None = None,
        out: Tensor,
    ) -> None:
        self._store_kv(k, v, layer_kv, metadata.slots)
        layout, kind = self._layout(metadata), _Kind(window, scale)
        if kind not in self._planned:
            self._plan(layout, kind)
        num_tokens = layout.num_tokens
        self._wrappers[kind].run(q[:num_tokens], layer_kv, out=out[:num_tokens])
        out[num_tokens:].zero_()

    def _layout(self, metadata: AttentionMetadata) -> PagedLayout:
        """The step's layout, made by its first layer: another metadata object is another step."""
        if self._step is None or self._step[0] is not metadata:
            self._planned.clear()
            self._step = metadata, paged_layout(metadata, self._sizes.block_size)
        return self._step[1]

    def _plan(self, layout: PagedLayout, kind: _Kind) -> None:
        sizes = self._sizes
        if kind not in self._wrappers:
            self._wrappers[kind] = self._create_wrapper()
        self._wrappers[kind].plan(
            layout.query_starts,
            layout.block_starts,
            layout.block_ids,
            layout.last_block_lens,
            sizes.num_heads,
            sizes.num_kv_heads,
            sizes.head_dim,
            sizes.block_size,
            causal=True,
            sm_scale=kind.scale,
            # FlashInfer counts the tokens before the query, and -1 is no window.
            window_left=-1 if kind.window is None else kind.window - 1,
            q_data_type=sizes.dtype,
            kv_data_type=sizes.dtype,
        )
        self._planned.add(kind)


def check_sizes(sizes: AttentionSizes) -> None:
    """Raise ValueError if FlashInfer has no kernel for the head size or the type."""
    if sizes.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(
            f"attention_backend flashinfer needs a head_dim of {known}, got {sizes.head_dim}"
        )
    if sizes.dtype not in DTYPES:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        found = str(sizes.dtype).removeprefix("torch.")
        raise ValueError(f"attention_backend flashinfer needs dtype {names}, got {found}")


def workspace_bytes(sizes: AttentionSizes, num_sms: int) -> int:
    """Float32 partial results, with a sum each, of every program of a split context."""
    programs = _PROGRAMS_PER_SM * num_sms // sizes.num_kv_heads
    rows = programs * sizes.num_heads * _QUERIES_PER_PROGRAM
    return rows * (sizes.head_dim + 1) * torch.float32.itemsize + _SLACK_BYTES
