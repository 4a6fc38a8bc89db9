"""The reference backend against attention over dense keys and values, token by token."""

import pytest
import torch
from paged_cases import make_case

from lockstep.worker.attention.base import create_backend, resolve_backend
from lockstep.worker.attention.reference import ReferenceAttention

CASES = {
    "decode": ([1, 1, 1, 1], [1, 4, 5, 37]),
    "prefill": ([7, 1, 12], [7, 1, 12]),
    "chunk with context": ([5, 8], [9, 21]),
    "mixed": ([1, 6, 1, 3], [17, 6, 2, 11]),
    "idle rows": ([0, 1, 0, 4, 0], [1, 9, 1, 4, 1]),
}


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("name", CASES)
def test_matches_dense_attention_with_nan_in_every_dead_slot(name: str, window: int | None) -> None:
    case = make_case(*CASES[name])
    out = torch.full_like(case.q, 7.0)
    ReferenceAttention(case.sizes()).forward(
        case.q, case.k, case.v, case.cache.layer(0), case.metadata,
        scale=0.3, window=window, out=out,
    )  # fmt: skip
    torch.testing.assert_close(out, case.expected(0.3, window), rtol=1e-5, atol=1e-5)


def test_padding_tokens_get_zeros_and_touch_only_the_padding_block() -> None:
    case = make_case([1, 5], [9, 5], num_padding_tokens=3)
    before = case.cache.storage.clone()
    out = torch.full_like(case.q, 7.0)
    ReferenceAttention(case.sizes()).forward(
        case.q, case.k, case.v, case.cache.layer(0), case.metadata,
        scale=0.3, window=None, out=out,
    )  # fmt: skip
    assert out[6:].eq(0).all()
    same = (before == case.cache.storage) | (before.isnan() & case.cache.storage.isnan())
    written = (~same).any(-1).any(-1)[:, 0, 0].nonzero().tolist()
    slots = {divmod(slot, case.cache.block_size) for slot in case.metadata.slots.tolist()}
    assert {tuple(at) for at in written} <= slots


def test_many_rows_are_gathered_in_passes_with_the_same_result() -> None:
    case = make_case([1] * 9, [3, 40, 8, 1, 17, 25, 33, 2, 12])
    outs = []
    for tokens_per_gather in (10**6, 80):
        backend = ReferenceAttention(case.sizes())
        backend._tokens_per_gather = tokens_per_gather
        outs.append(torch.empty_like(case.q))
        backend.forward(
            case.q, case.k, case.v, case.cache.layer(0), case.metadata,
            scale=0.3, window=None, out=outs[-1],
        )  # fmt: skip
    torch.testing.assert_close(*outs)


def test_half_precision_accumulates_in_float32() -> None:
    case = make_case([1, 9], [30, 9], dtype=torch.bfloat16)
    out = torch.empty_like(case.q)
    ReferenceAttention(case.sizes()).forward(
        case.q, case.k, case.v, case.cache.layer(0), case.metadata,
        scale=0.3, window=None, out=out,
    )  # fmt: skip
    expected = case.expected(0.3, None)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-9)


def test_registry_names_and_refuses() -> None:
    assert resolve_backend("auto", torch.device("cpu")) == "reference"
    assert resolve_backend("auto", torch.device("cuda")) == "triton"
    assert create_backend("auto", make_case([1], [1]).sizes()).name == "reference"
    with pytest.raises(ValueError, match=r"attention_backend must be one of auto, .* got 'fast'"):
        resolve_backend("fast", torch.device("cpu"))
    with pytest.raises(ValueError, match="attention_backend triton needs a CUDA device, got cpu"):
        create_backend("triton", make_case([1], [1]).sizes())
