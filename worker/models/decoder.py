"""The dense decoder: Llama, Mistral, Qwen2 and Qwen3 are one shape told apart by its config.

It knows layers and their order. It does not know ranks, files or graphs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import Communicator
from lockstep.parallel.embedding import ParallelLMHead, VocabParallelEmbedding
from lockstep.parallel.linear import (
    GateUpParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from lockstep.parallel.placement import Placement
from lockstep.parallel.shard import HeadLayout
from lockstep.parallel.weight_shard import HasWeights, WeightShard
from lockstep.worker.attention.base import AttentionBackend
from lockstep.worker.config import ModelConfig
from lockstep.worker.flow import Flow
from lockstep.worker.forward import AttentionMetadata, ForwardInputs
from lockstep.worker.kernels.ops import linear_ops
from lockstep.worker.kv_cache import KVCache
from lockstep.worker.layers import Attention, RMSNorm, RotaryEmbedding


class DecoderAttention(nn.Module):
    """Projections, rotary embedding and attention of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        backend: AttentionBackend,
        place: Placement,
    ) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        layout = HeadLayout(config.num_heads, config.num_kv_heads, place.tp.size)
        self.head_dim = head_dim
        self.num_heads = layout.num_heads_local
        self.num_kv_heads = layout.num_kv_heads_local
        self.qkv_proj = QKVParallelLinear(hidden, layout, head_dim, place, bias=config.qkv_bias)
        self.o_proj = RowParallelLinear.of_heads(
            layout, head_dim, hidden, place, bias=config.o_bias
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, place) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, place) if config.qk_norm else None
        self.rotary = rotary
        window = config.window(layer_id)
        self.attention = Attention(layer_id, backend, scale=head_dim**-0.5, window=window)

    def heads(self, qkv: Tensor) -> Tensor:
        """``qkv_proj``'s product as [num_tokens, q, k and v heads, head_dim]."""
        return qkv.view(qkv.shape[0], -1, self.head_dim)

    def rotate(self, heads: Tensor, positions: Tensor) -> None:
        """Norm q and k of ``heads``, if this model does, and rotate them, in place."""
        q, k, _ = self._split(heads)
        self.rotary(q, k, positions, self._norms())

    def attend(self, heads: Tensor, metadata: AttentionMetadata, kv: KVCache, out: Tensor) -> None:
        """Attention of rotated heads into ``out`` [num_tokens, num_heads, head_dim]."""
        self.attention(*self._split(heads), metadata, kv, None, out)

    def rotate_and_attend(
        self, heads: Tensor, inputs: ForwardInputs, kv: KVCache, out: Tensor
    ) -> None:
        """Both, by one kernel where the backend can."""
        metadata = inputs.attention
        if self.attention.backend.rotates(metadata, len(heads)):
            rotation = self.rotary.rotation(self._norms())
            self.attention(*self._split(heads), metadata, kv, rotation, out)
        else:
            self.rotate(heads, inputs.positions)
            self.attend(heads, metadata, kv, out)

    def _split(self, heads: Tensor) -> tuple[Tensor, ...]:
        return torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)

    def _norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm, self.k_norm


class DecoderMLP(nn.Module):
    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = GateUpParallelLinear(hidden, inner, place, bias=bias)
        self.down_proj = RowParallelLinear.even(inner, hidden, place, bias=bias)


class DecoderLayer(nn.Module):
    """Attention and MLP. The residual stream travels beside what each of them has to add to it.

    That is summed over the ranks, added to the stream and normed for the product that reads it. On
    several ranks these may be one kernel, on one rank part of the products around them.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        backend: AttentionBackend,
        place: Placement,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, place)
        self.self_attn = DecoderAttention(config, layer_id, rotary, backend, place)
        self.post_attention_layernorm = RMSNorm(hidden, eps, place)
        self.mlp = DecoderMLP(config, place)

    def activate(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(what the MLP's last product reads, residual) from this layer's attention."""
        attention, norm = self.self_attn, self.post_attention_layernorm
        gate_up = self.mlp.gate_up_proj
        return attention.o_proj.into(attended.flatten(1), residual, norm, gate_up)


class SegmentFunctions(NamedTuple):
    """What lies between attentions but for the rotation, the same functions for all layers.

    They are all there is to compile.
    """

    opening: Callable[[nn.Module, DecoderLayer, Tensor], tuple[Tensor, Tensor]]
    between: Callable[[DecoderLayer, DecoderLayer, Tensor, Tensor], tuple[Tensor, Tensor]]
    closing: Callable[[DecoderLayer, RMSNorm, Tensor, Tensor], Tensor]


def _opening(
    embed_tokens: nn.Module, layer: DecoderLayer, token_ids: Tensor
) -> tuple[Tensor, Tensor]:
    x = embed_tokens(token_ids)
    attention = layer.self_attn
    return attention.heads(attention.qkv_proj(layer.input_layernorm(x))), x


def _between(
    before: DecoderLayer, after: DecoderLayer, attended: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    activated, residual = before.activate(attended, residual)
    attention, norm = after.self_attn, after.input_layernorm
    qkv, residual = before.mlp.down_proj.into(activated, residual, norm, attention.qkv_proj)
    return attention.heads(qkv), residual


def _closing(layer: DecoderLayer, norm: RMSNorm, attended: Tensor, residual: Tensor) -> Tensor:
    activated, residual = layer.activate(attended, residual)
    return layer.mlp.down_proj.add_norm(activated, residual, norm)[0]


class DecoderBody(nn.Module):
    """Embedding, layers and the last norm, in segments that lie between the attentions.

    Segment i, counted from 0, is what stands before the attention of layer i; the one after the
    last attention closes. Only attention looks at more than one token.
    """

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, place: Placement, max_positions: int
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, place)
        rotary = RotaryEmbedding(
            config.head_dim,
            max_positions,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
            device=place.device,
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_id, rotary, backend, place)
            for layer_id in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.segments = SegmentFunctions(_opening, _between, _closing)

    def opening(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(heads not rotated yet, residual) for the first attention."""
        return self.segments.opening(self.embed_tokens, self.layer(0), token_ids)

    def between(self, layer_id: int, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """From the attention before ``layer_id``'s to (heads not rotated yet, residual) for it."""
        before, after = self.layer(layer_id - 1), self.layer(layer_id)
        return self.segments.between(before, after, attended, residual)

    def closing(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The final-normed hidden state, from the last attention."""
        return self.segments.closing(self.layer(-1), self.norm, attended, residual)

    def layer(self, layer_id: int) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[layer_id])


class DecoderModel(nn.Module):
    """A decoder on one rank, with zero weights until ``weights.load`` fills them.

    Args:
        tp: the ranks that share the model.
        max_positions: rows of the rotary table, ``max_position_embeddings`` if None.

    Raises:
        ValueError: heads or intermediate size cannot be split; the message has the numbers.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: Communicator,
        backend: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_positions: int | None = None,
    ) -> None:
        super().__init__()
        place = Placement(tp, device, dtype, linear_ops(device))
        max_positions = max_positions or config.max_position_embeddings
        self.config = config
        self.num_layers = config.num_layers
        self.model = DecoderBody(config, backend, place, max_positions)
        self.lm_head = ParallelLMHead(self.model.embed_tokens, tied=config.tie_embeddings)
        self.vocab_local = self.lm_head.shard.local_size
        self.vocab_start = self.lm_head.start
        layout = HeadLayout(config.num_heads, config.num_kv_heads, tp.size)
        self.num_heads_local = layout.num_heads_local
        self.num_kv_heads_local = layout.num_kv_heads_local

    def forward(self, inputs: ForwardInputs, kv: KVCache) -> Tensor:
        """The final-normed hidden state of every token, [num_tokens, hidden_size]."""
        body = self.model
        heads, residual = body.opening(inputs.token_ids)
        attended = self._attend(0, heads, inputs, kv)
        for layer_id in range(1, self.num_layers):
            heads, residual = body.between(layer_id, attended, residual)
            attended = self._attend(layer_id, heads, inputs, kv)
        return body.closing(attended, residual)

    def new_flow(self, num_tokens: int) -> Flow:
        """Room for what passes between the segments of a step of up to ``num_tokens``."""
        config, heads = self.config, self.num_heads_local
        return Flow.create(
            num_tokens,
            hidden_size=config.hidden_size,
            num_heads=heads,
            num_all_heads=heads + 2 * self.num_kv_heads_local,
            head_dim=config.head_dim,
            like=self.model.norm.weight,
        )

    def run_segment(self, index: int, flow: Flow) -> None:
        """One of ``num_layers + 1`` segments, from ``flow`` to ``flow``; its heads are rotated."""
        body = self.model
        if index == self.num_layers:
            flow.hidden.copy_(body.closing(flow.attended, flow.residual))
            return
        if index == 0:
            heads, residual = body.opening(flow.token_ids)
        else:
            heads, residual = body.between(index, flow.attended, flow.residual)
        body.layer(index).self_attn.rotate(heads, flow.positions)
        flow.heads.copy_(heads)
        flow.residual.copy_(residual)

    def attend(self, index: int, flow: Flow, metadata: AttentionMetadata, kv: KVCache) -> None:
        """The attention behind segment ``index``, from ``flow`` to ``flow``."""
        self.model.layer(index).self_attn.attend(flow.heads, metadata, kv, flow.attended)

    def _attend(self, layer_id: int, heads: Tensor, inputs: ForwardInputs, kv: KVCache) -> Tensor:
        attended = heads.new_empty(heads.shape[0], self.num_heads_local, heads.shape[2])
        self.model.layer(layer_id).self_attn.rotate_and_attend(heads, inputs, kv, attended)
        return attended

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, hidden_size] to float32 [n, vocab_local]; padded vocabulary rows are -inf."""
        logits: Tensor = self.lm_head(hidden, out)
        return logits

    def weight_shards(self) -> Iterator[WeightShard]:
        """Every checkpoint tensor the model needs, under its Hugging Face name."""
        for path, module in self.named_modules():
            parent, _, name = path.rpartition(".")
            if module is not self and isinstance(module, HasWeights):
                for weight in module.weight_shards(name):
                    yield replace(weight, name=f"{parent}.{weight.name}" if parent else weight.name)
