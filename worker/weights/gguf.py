"""Weights in a GGUF file of the llama family, dequantised to float32 as they are read."""

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, ReaderTensor, dequantize
from numpy.typing import NDArray
from torch import Tensor

from lockstep.worker.weights.gguf_metadata import gguf_model_config, open_gguf

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r"self_attn\.[qk]_proj\.")


class GGUFSource:
    """Tensors under their Hugging Face names; unknown ones keep their own.

    Raises:
        ValueError: see ``open_gguf``.
    """

    def __init__(self, path: Path) -> None:
        file = open_gguf(path)
        self._file = file
        self._head_dim = gguf_model_config(file).head_dim
        self._tensors = {_hf_name(name): tensor for name, tensor in file.tensors.items()}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        # GGUF counts dims from the innermost.
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str, dim: int, start: int, length: int) -> Tensor:
        tensor, shape = self._tensors[name], self.shape(name)
        stored = tensor.data.view(np.uint8).reshape(shape[0], -1)
        if dim == 0:
            rows = stored[self._stored_rows(name, start, length)]
            return self._dequantize(tensor, rows).reshape(length, *shape[1:])
        block, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
        first, last = start // block, -(-(start + length) // block)
        columns = stored[:, first * block_bytes : last * block_bytes]
        return self._dequantize(tensor, columns).narrow(1, start - first * block, length)

    def _stored_rows(self, name: str, start: int, length: int) -> slice | NDArray[np.int64]:
        """Where the file keeps these rows.

        Rotary pairs of q and k are neighbours in the file and half a head apart in Hugging Face's
        order: row (head, half, pair) lies at (head, pair, half).
        """
        if not _ROTATED.search(name):
            return slice(start, start + length)
        head, inside = np.divmod(np.arange(start, start + length), self._head_dim)
        half, pair = np.divmod(inside, self._head_dim // 2)
        stored: NDArray[np.int64] = head * self._head_dim + 2 * pair + half
        return stored

    def _dequantize(self, tensor: ReaderTensor, stored: NDArray[np.uint8]) -> Tensor:
        try:
            values = dequantize(np.ascontiguousarray(stored), tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ValueError(
                f"{self._file.path}: tensor {tensor.name!r} is of type {kind}, "
                "which the gguf library cannot dequantise"
            ) from None
        # Tensors of type F32 come back as the read-only map itself.
        return torch.from_numpy(np.require(values, np.float32, "W"))


def _hf_name(name: str) -> str:
    outer, _, kind = name.rpartition(".")
    if outer in _OUTER:
        return f"{_OUTER[outer]}.{kind}"
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in _INNER:
        return name
    return f"model.layers.{block[1]}.{_INNER[block[2]]}.{block[3]}"
