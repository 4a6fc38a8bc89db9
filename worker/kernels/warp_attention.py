"""Decode attention of rotating rows through the matrix units of each warp. CUDA, Triton's Gluon.

``warp_attention_kernel`` is the kernel. Its grid follows from the number of rows alone, and all
else is read on the device, so that a graph holds for any contexts.
"""

import torch
import triton
from torch import Tensor

from lockstep.worker.attention.base import AttentionSizes
from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.kernels.chain import chained
from lockstep.worker.kernels.chunks import num_multiprocessors
from lockstep.worker.kernels.linear import has_units
from lockstep.worker.kernels.prefill_attention import LOG2_E, NO_WINDOW
from lockstep.worker.kernels.store_kv import cache_strides
from lockstep.worker.kernels.warp_attention_kernel import warp_attention_kernel
from lockstep.worker.kernels.warp_share import (
    HEAD_DIMS,
    MAX_CHUNKS,
    MAX_GROUP,
    most_split_rows,
    share_of,
)
from lockstep.worker.rotation import Rotation


class WarpAttention:
    """The kernel and its workspace; its calls must be on one stream.

    ``arrivals`` is all zero between launches: the last program of a row and head resets its count.
    """

    def __init__(self, sizes: AttentionSizes) -> None:
        device = sizes.device
        self._num_sms = num_multiprocessors(device)
        rows = most_split_rows(sizes.max_num_reqs, sizes.num_kv_heads, self._num_sms)
        shape = (rows, sizes.num_heads, MAX_CHUNKS)
        self._parts = (
            torch.empty(shape, dtype=torch.float32, device=device),  # maxima, in units of log2
            torch.empty(shape, dtype=torch.float32, device=device),  # sums
            torch.empty((*shape, sizes.head_dim), dtype=torch.float32, device=device),  # values
        )
        self.arrivals = torch.zeros((rows, sizes.num_kv_heads), dtype=torch.int32, device=device)

    @staticmethod
    def fits(sizes: AttentionSizes) -> bool:
        """Whether there is a kernel for such heads on this device."""
        return (
            sizes.device.type == "cuda"
            and has_units(sizes.device)
            and sizes.dtype.itemsize == 2
            and sizes.head_dim in HEAD_DIMS
            and sizes.num_heads <= MAX_GROUP * sizes.num_kv_heads
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer_kv: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        rotation: Rotation,
        out: Tensor,
    ) -> None:
        """As ``decode_attention`` of a batch in decode form, with its rotation.

        Raises:
            ValueError: more rows of several programs than the workspace holds.
        """
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads, k_cache = k.shape[1], layer_kv[0]
        q_weight, k_weight = rotation.weights or (q, k)
        group = num_heads // num_kv_heads
        # A power of two: the worker's warm-up meets those, and no kernel may be compiled later.
        about = triton.next_power_of_2(num_rows)
        share = share_of(about * num_kv_heads, self._num_sms)
        if share.num_programs > 1 and num_rows > len(self.arrivals):
            limit = len(self.arrivals)
            raise ValueError(f"num_rows must be at most {limit} (workspace), got {num_rows}")
        warp_attention_kernel[(share.num_programs, num_kv_heads, num_rows)](
            out, q, k, v, *layer_kv, metadata.slots, metadata.context_lens,
            metadata.block_table, *self._parts, self.arrivals,
            rotation.cos_sin, q_weight, k_weight,
            window or NO_WINDOW, metadata.block_table.stride(0), scale * LOG2_E, rotation.eps,
            Q_ROW=q.stride(0), K_ROW=k.stride(0), V_ROW=v.stride(0), OUT_ROW=out.stride(0),
            BLOCKS=_blocks(k_cache), NUM_KV_HEADS=num_kv_heads, GROUP=group,
            HEADS=max(8, triton.next_power_of_2(group)), HEAD_DIM=head_dim,
            KEY_SLOTS=share.key_slots, NORM=rotation.weights is not None,
            num_warps=share.num_warps, **chained(),
        )  # fmt: skip


def _blocks(cache: Tensor) -> tuple[int, ...]:
    """``BLOCKS`` of a view [blocks, block_size, heads, dim]: strides are multiples of a head."""
    strides = cache_strides(cache).values()
    return cache.shape[1], *(stride // cache.shape[3] for stride in strides)
