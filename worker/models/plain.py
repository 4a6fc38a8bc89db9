"""The dense decoder once more, in plain torch over whole requests: what the fast one is held to.

No cache, no ranks, no kernels of ours. It shares no arithmetic with ``decoder``.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from lockstep.worker.config import ModelConfig
from lockstep.worker.layers import rotary_frequencies
from lockstep.worker.weights.source import TensorSource


class PlainDecoder:
    """Reads each weight when it is needed, so that a layer at a time is in memory.

    Args:
        weight_dtype: weights are rounded to it first, as those are that it is compared with.
        dtype: of all arithmetic; norms and softmax take float32 where it is narrower.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        device: torch.device,
        *,
        weight_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._source = source
        self._device = device
        self._weight_dtype = weight_dtype
        self._dtype = dtype
        self._wide = torch.promote_types(dtype, torch.float32)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, last: int) -> Tensor:
        """Of the last positions of requests of one length.

        Args:
            token_ids: [num_reqs, length] int64.

        Returns:
            [num_reqs, last, vocab_size] in ``dtype``, or float32 if that is narrower.
        """
        embedding = self._weight("model.embed_tokens")
        x = embedding[token_ids.to(self._device)]
        for layer_id in range(self._config.num_layers):
            name = f"model.layers.{layer_id}"
            normed = self._norm(f"{name}.input_layernorm", x)
            x = x + self._attention(f"{name}.self_attn", normed, self._config.window(layer_id))
            x = x + self._mlp(f"{name}.mlp", self._norm(f"{name}.post_attention_layernorm", x))
        hidden = self._norm("model.norm", x[:, -last:])
        head = embedding if self._config.tie_embeddings else self._weight("lm_head")
        return (hidden @ head.T).to(self._wide)

    def _attention(self, name: str, x: Tensor, window: int | None) -> Tensor:
        """x and the result are [num_reqs, length, hidden_size]."""
        config = self._config
        q, k, v = (
            self._heads(self._linear(f"{name}.{part}_proj", x, config.qkv_bias)) for part in "qkv"
        )
        if config.qk_norm:
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        shared = config.num_heads // config.num_kv_heads
        k, v = self._rotated(k).repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = (self._rotated(q) @ k.mT).to(self._wide) * config.head_dim**-0.5
        seen = self._seen(x.shape[1], window)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(self._dtype)
        attended = (weights @ v).transpose(1, 2).flatten(2)
        return self._linear(f"{name}.o_proj", attended, config.o_bias)

    def _heads(self, x: Tensor) -> Tensor:
        """[num_reqs, heads, length, head_dim]."""
        return x.view(*x.shape[:2], -1, self._config.head_dim).transpose(1, 2)

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        bias = self._config.mlp_bias
        gate, up = (self._linear(f"{name}.{part}_proj", x, bias) for part in ("gate", "up"))
        return self._linear(f"{name}.down_proj", silu(gate) * up, bias)

    def _rotated(self, x: Tensor) -> Tensor:
        """x is [num_reqs, heads, length, head_dim]."""
        config = self._config
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        angles = torch.outer(torch.arange(x.shape[2]), frequencies).to(self._device, self._wide)
        low, high = x.to(self._wide).chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(self._dtype)

    def _seen(self, length: int, window: int | None) -> Tensor:
        """[length, length] bool: what each position attends to."""
        place = torch.arange(length, device=self._device)
        ago = place[:, None] - place
        return (ago >= 0) & (ago < (window or length))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        wide = x.to(self._wide)
        size = wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps
        return (wide * size.rsqrt()).to(self._dtype) * self._weight(name)

    def _linear(self, name: str, x: Tensor, bias: bool) -> Tensor:
        y = x @ self._weight(name).T
        return y + self._weight(name, "bias") if bias else y

    def _weight(self, name: str, kind: str = "weight") -> Tensor:
        full = f"{name}.{kind}"
        tensor = self._source.read(full, 0, 0, self._source.shape(full)[0])
        return tensor.to(self._device, self._weight_dtype).to(self._dtype)
