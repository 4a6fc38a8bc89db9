"""What an attention backend must do, and how one is found by its name."""

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from lockstep.worker.attention.registry import ADAPTERS, backend_for
from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.graphs.mode import AttentionSupport
from lockstep.worker.rotation import Rotation


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The largest a rank will ask for: workspaces are allocated once from it, before capture."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device


class AttentionBackend(Protocol):
    """Stores this step's keys and values, then attends through the block table, causally.

    ``support`` says which batches it can attend to inside a graph.
    """

    name: str
    support: AttentionSupport

    def rotates(self, metadata: AttentionMetadata, num_tokens: int) -> bool:
        """True if ``forward`` can take the rotation of such a batch, from host numbers alone."""
        ...

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
        """Write the attention of ``q`` into ``out``.

        The last query of a row stands at ``context_lens - 1``. Tokens beyond
        ``query_start_loc[-1]`` get zeros. The result does not depend on what lies in slots
        outside live contexts, NaN included.

        Args:
            q, out: [num_tokens, num_heads, head_dim].
            k, v: [num_tokens, num_kv_heads, head_dim], stored at ``metadata.slots``.
            layer_kv: the layer's cache, each [num_blocks, block_size, num_kv_heads, head_dim].
            window: how many tokens a query sees, itself included; None for all.
            rotation: what q and k still have to go through, only where ``rotates``; what is
                left in them is then unspecified. None if they have been rotated.
        """
        ...


def resolve_backend(name: str, device: torch.device) -> str:
    """The backend that ``name`` means on this device.

    Raises:
        ValueError: no backend has this name, it cannot run on this device, or what it imports is
            not installed.
    """
    info = backend_for(name, device.type)
    if name != "auto" and info.missing:
        raise ValueError(
            f"attention_backend {name} needs the package {info.missing}, not found here"
        )
    return info.name


def create_backend(name: str, sizes: AttentionSizes) -> AttentionBackend:
    """Import the backend's module and build it; only the one that is used gets imported."""
    module, _, class_name = ADAPTERS[resolve_backend(name, sizes.device)].partition(":")
    backend: AttentionBackend = getattr(import_module(module), class_name)(sizes)
    return backend
