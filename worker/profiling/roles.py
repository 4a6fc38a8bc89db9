"""What each operation of a decode step is for, by its name and its place. No torch.

Names are those of our kernels and of the libraries that stand in for them. What is not known here
has no role.
"""

import re
from collections.abc import Sequence

LINEAR = "linear"
# The products of a layer, in order.
LAYER_LINEARS = ("qkv", "o", "gate_up", "down")
LM_HEAD = "lm_head"

# (role, pattern): the first that matches counts.
ROLES = (
    ("attention", r"_decode_attention_kernel|warp_attention_kernel"),
    ("sum_norm", r"_sum_norm_kernel"),
    ("add_norm", r"_add_rms_norm_kernel"),
    ("norm", r"_rms_norm_kernel"),
    ("rope", r"_norm_rope_kernel"),
    ("store_kv", r"_store_kv_kernel"),
    ("silu", r"_silu_and_mul_kernel"),
    ("inputs", r"_decode_inputs_kernel"),
    ("embed", r"_embed_kernel"),
    ("scores", r"_split_best_kernel"),
    ("tail", r"_finish_kernel"),
    ("all_reduce", r"all_?reduce|one_shot|two_shot"),
    ("split_sum", r"splitkreduce"),
    (LINEAR, r"_one_row_kernel|few_rows_kernel|gemm|gemv|nvjet|cutlass|^aten::(?:mm|addmm)$"),
    ("copy", r"^memcpy|^memset|^aten::(?:copy_|fill_|zero_)$"),
)  # fmt: skip
_COMPILED = [(role, re.compile(pattern, re.IGNORECASE)) for role, pattern in ROLES]


def roles_of(names: Sequence[str], num_layers: int) -> list[str | None]:
    """The role of each operation of one whole decode step, in order.

    Products are told apart only if there are as many as the layers and the logits have: if a step
    runs otherwise, they are all just "linear".
    """
    found = [_role(name) for name in names]
    products = iter([*LAYER_LINEARS * num_layers, LM_HEAD])
    if found.count(LINEAR) != len(LAYER_LINEARS) * num_layers + 1:
        return found
    return [next(products) if role == LINEAR else role for role in found]


def is_gated(name: str) -> bool:
    """True for products that are one kernel with the SiLU behind them."""
    return "_one_row_kernel" in name or "few_rows_kernel" in name


def adds_residual(name: str, role: str | None, follower: str) -> bool:
    """True for products with the sum inside that is to be normed.

    That of one row is in the product that reads it. That of few is in the one that makes it, so a
    product follows and no norm.
    """
    makes_it = role in ("o", "down") and all("few_rows_kernel" in n for n in (name, follower))
    return makes_it or "_normed_one_row_kernel" in name


def _role(name: str) -> str | None:
    return next((role for role, pattern in _COMPILED if pattern.search(name)), None)
