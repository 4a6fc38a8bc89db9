"""Rotary position embedding of q and k after an optional RMSNorm of each head. CUDA, Triton.

In place, or on the way into decode attention, with the same bits but for the order of a norm's
sum. A rotated pair is (i, i + head_dim / 2), as in Hugging Face's Llama.
"""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.kernels.chain import chained, follow

_MANY_TOKENS = 1024


@triton.jit
def _turned(x, partner, cos, signed_sin):
    """Fused by hand: the compiler might round the one half of a pair otherwise than the other."""
    return tl.fma(x, cos, partner * signed_sin)


@triton.jit
def load_turn(cos_sin_ptr, position, dims, HEAD_DIM: tl.constexpr):
    """(cosine, signed sine) that ``dims`` of a head and their partners are multiplied by."""
    HALF: tl.constexpr = HEAD_DIM // 2
    live = dims < HEAD_DIM
    places = cos_sin_ptr + position.to(tl.int64) * HEAD_DIM + dims % HALF
    cos = tl.load(places, mask=live, other=0.0).to(tl.float32)
    sin = tl.load(places + HALF, mask=live, other=0.0).to(tl.float32)
    return cos, tl.where(dims < HALF, -sin, sin)


@triton.jit
def load_head_norm(weight_ptr, dims, HEAD_DIM: tl.constexpr):
    """Weights of ``dims`` and of their partners."""
    live = dims < HEAD_DIM
    weight = tl.load(weight_ptr + dims, mask=live, other=0.0).to(tl.float32)
    partner = tl.load(weight_ptr + _partners(dims, HEAD_DIM), mask=live, other=0.0)
    return weight, partner.to(tl.float32)


@triton.jit
def load_rotated(
    heads_ptr, dims, live, cos, signed_sin, weight, partner_weight, eps,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """``dims`` of the heads that begin at ``heads_ptr``, normed and rotated; 0 if not ``live``."""
    loaded = tl.load(heads_ptr + dims, mask=live, other=0.0)
    partner = tl.load(heads_ptr + _partners(dims, HEAD_DIM), mask=live, other=0.0).to(tl.float32)
    x = loaded.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, -1, keep_dims=True) / HEAD_DIM + eps)
        x = x * scale * weight
        partner = partner * scale * partner_weight
    return _turned(x, partner, cos, signed_sin).to(loaded.dtype)


@triton.jit
def _partners(dims, HEAD_DIM: tl.constexpr):
    return (dims + HEAD_DIM // 2) % HEAD_DIM


@triton.jit
def _norm_and_rotate(
    x_ptr, weight_ptr, cos, sin, first_head, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    heads = first_head + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF_PAD)
    live = (heads < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
    places = x_ptr + heads[:, None] * HEAD_DIM + pair[None, :]
    low = tl.load(places, mask=live, other=0.0).to(tl.float32)
    high = tl.load(places + HALF, mask=live, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / HEAD_DIM + eps)[:, None]
        low_weight = tl.load(weight_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        high_weight = tl.load(weight_ptr + HALF + pair, mask=pair < HALF, other=0.0)
        low = low * scale * low_weight[None, :]
        high = high * scale * high_weight.to(tl.float32)[None, :]
    rotated_low = _turned(low, high, cos[None, :], -sin[None, :])
    rotated_high = _turned(high, low, cos[None, :], sin[None, :])
    tl.store(places, rotated_low.to(x_ptr.dtype.element_ty), mask=live)
    tl.store(places + HALF, rotated_high.to(x_ptr.dtype.element_ty), mask=live)


@triton.jit
def _norm_rope_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, positions_ptr, cos_sin_ptr, eps,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    pair = tl.arange(0, HALF_PAD)
    follow(CHAINED)
    position = tl.load(positions_ptr + token).to(tl.int64)
    angles = cos_sin_ptr + position * HEAD_DIM + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0).to(tl.float32)
    if group < Q_GROUPS:
        _norm_and_rotate(
            q_ptr + token * Q_ROW, q_weight_ptr, cos, sin, group * HEADS, eps,
            NUM_HEADS, HEAD_DIM, HALF_PAD, HEADS, NORM,
        )  # fmt: skip
    else:
        _norm_and_rotate(
            k_ptr + token * K_ROW, k_weight_ptr, cos, sin, (group - Q_GROUPS) * HEADS, eps,
            NUM_KV_HEADS, HEAD_DIM, HALF_PAD, HEADS, NORM,
        )  # fmt: skip


def _heads_a_program(num_tokens: int, num_heads: int) -> int:
    """Many small programs for the few tokens of a decode step, fewer that do more for a prompt."""
    if num_tokens < _MANY_TOKENS:
        return 4
    wanted: int = triton.next_power_of_2(num_heads)
    return min(16, max(4, wanted))


def norm_rope_(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Change q [num_tokens, num_heads, head_dim] and k [num_tokens, num_kv_heads, head_dim].

    cos_sin is [max_positions, head_dim], cosines in its first half. ``weights`` are those of the
    q and k norms, each [head_dim], or None for no norm. The heads of a token must be contiguous.
    """
    num_tokens, num_heads, head_dim = q.shape
    if not num_tokens:
        return
    num_kv_heads = k.shape[1]
    q_weight, k_weight = weights or (q, k)
    heads = _heads_a_program(num_tokens, num_heads)
    grid = (num_tokens, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
    _norm_rope_kernel[grid](
        q, k, q_weight, k_weight, positions, cos_sin, eps,
        Q_ROW=q.stride(0), K_ROW=k.stride(0), NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HALF_PAD=triton.next_power_of_2(head_dim // 2), HEADS=heads,
        NORM=weights is not None, num_warps=2, **chained(),
    )  # fmt: skip
