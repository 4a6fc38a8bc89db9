"""Attention on CUDA: a split-KV kernel for rows of one query, a varlen kernel for the others."""

from torch import Tensor

from lockstep.worker.attention.base import AttentionSizes
from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.graphs.mode import AttentionSupport
from lockstep.worker.kernels.chunks import DecodeWorkspace
from lockstep.worker.kernels.decode_attention import decode_attention
from lockstep.worker.kernels.prefill_attention import prefill_attention
from lockstep.worker.kernels.store_kv import store_kv
from lockstep.worker.kernels.warp_attention import WarpAttention
from lockstep.worker.rotation import Rotation


class TritonAttention:
    """Graphs of any batch may hold its launches and the address of its workspace.

    Grids follow from numbers of tokens and rows alone, the workspace is as large as it ever gets
    from the start, and everything else is read on the device.
    """

    name = "triton"
    support = AttentionSupport.ALWAYS

    def __init__(self, sizes: AttentionSizes) -> None:
        self._workspace = DecodeWorkspace.create(
            sizes.max_num_reqs,
            sizes.num_heads,
            sizes.num_kv_heads,
            sizes.head_dim,
            sizes.device,
        )
        self._by_warps = WarpAttention(sizes) if WarpAttention.fits(sizes) else None

    def rotates(self, metadata: AttentionMetadata, num_tokens: int) -> bool:
        return metadata.is_decode(num_tokens)

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
        is_decode = metadata.is_decode(q.shape[0])
        if rotation is not None and self._by_warps is not None and is_decode:
            self._by_warps(
                q, k, v, layer_kv, metadata,
                scale=scale, window=window, rotation=rotation, out=out,
            )  # fmt: skip
            return
        if not is_decode:
            store_kv(k, v, layer_kv, metadata.slots)
            prefill_attention(q, layer_kv, metadata, scale=scale, window=window, out=out)
        decode_attention(
            q, k, v, layer_kv, metadata, self._workspace,
            scale=scale, window=window, rotation=rotation, out=out,
        )  # fmt: skip
