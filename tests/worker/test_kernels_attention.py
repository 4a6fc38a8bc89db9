"""The Triton attention backend against dense attention; every dead slot holds NaN.

So does the padding block, here: masked loads must not even read it.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from compilations import compilations
from kernel_device import kernel_device, kernel_marks
from paged_cases import PagedCase, make_case
from torch import Tensor

DEVICE = kernel_device()

from lockstep.worker.attention.triton import TritonAttention  # noqa: E402
from lockstep.worker.config import ScheduleConfig  # noqa: E402
from lockstep.worker.kernels import (  # noqa: E402
    decode_attention,
    prefill_attention,
    store_kv,
)
from lockstep.worker.kernels.chunks import DecodeWorkspace  # noqa: E402
from lockstep.worker.rotation import Rotation  # noqa: E402
from lockstep.worker.warm_up import warm_up_plans  # noqa: E402

pytestmark = kernel_marks()
SCALE = 0.3
CASES = {
    "decode": ([1, 1, 1, 1], [1, 4, 5, 37]),
    "decode of one chunk": ([1], [256]),
    "decode over several chunks": ([1, 1], [600, 257]),
    "prefill": ([7, 1, 12], [7, 1, 12]),
    "chunk with context": ([5, 8], [9, 21]),
    "mixed": ([1, 6, 1, 3], [17, 6, 2, 11]),
    "idle rows": ([0, 1, 0, 4, 0], [1, 9, 1, 4, 1]),
    "prompt of several tiles": ([150], [170]),
    "single beside a prompt": ([1, 20], [300, 33]),
}
SHAPES = {  # num_heads, num_kv_heads, head_dim, block_size
    "small": (6, 2, 16, 4),
    "padded group and dim": (9, 3, 80, 16),
    "one head each": (2, 2, 96, 32),
    "wide group": (8, 1, 64, 64),
}


def _case(name: str, shape: str = "small") -> PagedCase:
    num_heads, num_kv_heads, head_dim, block_size = SHAPES[shape]
    case = make_case(
        *CASES[name], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        block_size=block_size, device=DEVICE.type,
    )  # fmt: skip
    case.cache.storage[0].fill_(float("nan"))
    return case


def _attend(
    case: PagedCase,
    window: int | None = None,
    backend: TritonAttention | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    out = torch.full_like(case.q, float("nan"))
    (backend or TritonAttention(case.sizes())).forward(
        case.q, case.k, case.v, case.cache.layer(0), case.metadata,
        scale=SCALE, window=window, rotation=rotation, out=out,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("name", CASES)
def test_matches_dense_attention(name: str, window: int | None) -> None:
    case = _case(name)
    torch.testing.assert_close(
        _attend(case, window), case.expected(SCALE, window), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("window", [23, 32, 64])
def test_a_window_of_several_tiles_has_two_edges(window: int) -> None:
    """8 tokens by 16 slots here: from 32 on, a window always holds a tile that all 8 see."""
    case = make_case([64, 3, 20], [78, 60, 41], device=DEVICE.type)
    torch.testing.assert_close(
        _attend(case, window), case.expected(SCALE, window), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("window", [None, 29])
def test_a_prompt_gives_the_same_bits_beside_others(window: int | None) -> None:
    case = make_case([20, 1, 33, 5], [60, 9, 70, 5], device=DEVICE.type)
    together = _attend(case, window)
    assert _attend(case.alone(2), window).equal(together[21:54])
    assert _attend(case.alone(0), window).equal(together[:20])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["decode over several chunks", "mixed"])
def test_matches_dense_attention_over_head_shapes(name: str, shape: str) -> None:
    case = _case(name, shape)
    torch.testing.assert_close(_attend(case), case.expected(SCALE, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_stores_this_steps_keys_and_values_and_nothing_else(name: str) -> None:
    case = _case(name)
    expected = case.cache.storage.clone()
    blocks, offsets = case.metadata.slots // 4, case.metadata.slots % 4
    expected[blocks, 0, 0, offsets] = case.k
    expected[blocks, 0, 1, offsets] = case.v
    _attend(case)
    torch.testing.assert_close(case.cache.storage, expected, rtol=0, atol=0, equal_nan=True)


def test_padding_tokens_get_zeros() -> None:
    case = make_case([1, 5], [9, 5], num_padding_tokens=40, device=DEVICE.type)
    assert _attend(case)[6:].eq(0).all()


def test_strided_rows_of_a_fused_projection() -> None:
    case = _case("mixed")
    expected = _attend(_case("mixed"))
    fused = torch.cat([case.q, case.k, case.v], dim=1)
    q, k, v = fused.split([6, 2, 2], dim=1)
    assert _attend(replace(case, q=q, k=k, v=v)).equal(expected)


def _with_sms(case: PagedCase, num_sms: int) -> TritonAttention:
    backend = TritonAttention(case.sizes())
    backend._workspace = replace(backend._workspace, num_sms=num_sms)
    return backend


def test_decode_does_not_depend_on_the_number_of_programs() -> None:
    outs = []
    for num_sms in (1, 4, 1000):
        case = _case("decode over several chunks")
        backend = _with_sms(case, num_sms)
        outs.append(_attend(case, backend=backend))
        assert backend._workspace.arrivals.eq(0).all()
    assert outs[0].equal(outs[1])
    assert outs[0].equal(outs[2])


def test_decode_of_a_row_does_not_depend_on_its_batch() -> None:
    case = _case("decode over several chunks")
    together = _attend(case)
    for row in range(2):
        one, at = _case("decode over several chunks"), slice(row, row + 1)
        metadata = replace(
            one.metadata,
            slots=one.metadata.slots[at],
            query_start_loc=one.metadata.query_start_loc[:2],
            context_lens=one.metadata.context_lens[at],
            block_table=one.metadata.block_table[at],
        )
        alone = replace(one, q=one.q[at], k=one.k[at], v=one.v[at], metadata=metadata)
        assert _attend(alone, backend=TritonAttention(case.sizes())).equal(together[at])


def test_a_row_of_one_query_gives_the_same_bits_beside_a_prompt() -> None:
    alone, mixed = make_case([1], [300], device=DEVICE.type), _case("single beside a prompt")
    first = slice(0, 1)
    alone = replace(alone, q=mixed.q[first], k=mixed.k[first], v=mixed.v[first])
    for mine, theirs in zip(alone.cache.layer(0), mixed.cache.layer(0), strict=True):
        blocks = alone.metadata.block_table[0, :75].long()
        mine[blocks] = theirs[mixed.metadata.block_table[0, :75].long()]
    assert _attend(alone).equal(_attend(mixed)[first])


def test_a_workspace_refuses_more_rows_than_it_has() -> None:
    case = _case("decode")
    backend = TritonAttention(replace(case.sizes(), max_num_reqs=3))
    with pytest.raises(ValueError, match=r"num_rows must be at most 3 \(workspace\), got 4"):
        _attend(case, backend=backend)


def test_what_shows_in_a_sum_does_not_follow_from_the_batch() -> None:
    for group_pad, head_pad, element_size in ((16, 128, 2), (16, 128, 4), (64, 256, 2)):
        launches = [
            decode_attention._launch(group_pad, head_pad, element_size, per_sm, is_full=is_full)
            for per_sm in (1, 2, 3, 8, 99)
            for is_full in (False, True)
        ]
        assert len({launch["TILE"] for launch in launches}) == 1


def test_programs_of_a_multiprocessor_have_at_most_eight_warps_up_to_eight_of_them() -> None:
    def warps(per_sm: int, element_size: int = 2, *, is_full: bool = False) -> int:
        return decode_attention._launch(16, 128, element_size, per_sm, is_full=is_full)["num_warps"]

    assert [warps(per_sm) for per_sm in (1, 2, 3, 4, 5, 8, 16)] == [4, 4, 2, 2, 1, 1, 1]
    assert [warps(per_sm, is_full=True) for per_sm in (1, 2)] == [8, 4]
    assert warps(16, element_size=4) == 4


def test_programs_fill_the_device_and_stop_at_the_chunks_there_are() -> None:
    workspace = DecodeWorkspace.create(256, 16, 8, 128, torch.device("cpu"))
    workspace = replace(workspace, num_sms=132)
    assert workspace.num_programs(1, 40960) == 32
    assert workspace.num_programs(8, 40960) == 4
    assert workspace.num_programs(1, 100) == 2
    assert workspace.num_programs(16, 40960) == 2
    assert workspace.num_programs(256, 40960) == 1
    of_four_heads = DecodeWorkspace.create(16, 32, 8, 128, torch.device("cpu"))
    assert replace(of_four_heads, num_sms=132).num_programs(16, 40960) == 1


GPU_SHAPES = [
    (16, 8, 128, 16), (32, 8, 128, 16), (32, 8, 128, 64), (9, 3, 64, 16), (14, 2, 64, 32),
    (12, 12, 96, 16), (8, 1, 80, 32), (4, 2, 128, 16),
]  # fmt: skip
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_model_shapes(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, dim, block_size = shape
    batches = {
        "decode": ([1] * 7, [1, 2, 63, 128, 129, 700, 1500]),
        "mixed": ([1, 200, 0, 33, 1], [900, 500, 1, 33, 1]),
    }
    for query_lens, contexts in batches.values():
        for window in (None, 100, 300):
            case = make_case(
                query_lens, contexts, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
                block_size=block_size, dtype=dtype, device="cuda",
            )  # fmt: skip
            got, expected = _attend(case, window).float(), case.expected(SCALE, window)
            limit = TOLERANCE[dtype]
            torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


@pytest.mark.gpu
def test_equal_rows_give_equal_outputs() -> None:
    for query_lens in ([1] * 8, [40] * 8):
        case = make_case(
            query_lens, [600] * 8, num_heads=16, num_kv_heads=8, head_dim=128, block_size=16,
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        tables, starts = case.metadata.block_table, case.metadata.query_start_loc.tolist()
        width = starts[1]
        for tensor in (case.q, case.k, case.v):
            tensor.view(8, width, *tensor.shape[1:])[1:] = tensor[:width]
        case.cache.storage[tables[1:].long()] = case.cache.storage[tables[:1].long()]
        out = _attend(case).view(8, width, 16, 128)
        assert (out == out[:1]).all()


@pytest.mark.gpu
def test_a_captured_decode_follows_context_lens_and_repeats_bit_for_bit() -> None:
    """Replayed for other lengths than those at capture, against a fresh eager call."""
    case = make_case(
        [1] * 4, [3000, 1, 700, 129], num_heads=16, num_kv_heads=8, head_dim=128, block_size=16,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    backend = TritonAttention(case.sizes())
    out = torch.empty_like(case.q)

    def attend(into: Tensor) -> None:
        backend.forward(
            case.q, case.k, case.v, case.cache.layer(0), case.metadata,
            scale=SCALE, window=None, out=into,
        )  # fmt: skip

    attend(out)
    graph = torch.cuda.CUDAGraph()
    lengths = case.metadata.context_lens.clone()
    case.metadata.context_lens.fill_(1)
    with torch.cuda.graph(graph):
        attend(out)
    for _ in range(50):
        for wanted in (lengths, torch.ones_like(lengths), lengths // 2 + 1):
            case.metadata.context_lens.copy_(wanted)
            out.fill_(float("nan"))
            graph.replay()
            expected = torch.empty_like(out)
            attend(expected)
            assert out.equal(expected)
            assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_in_batches_of_any_size(dtype: torch.dtype, rows: int) -> None:
    """Each of many rows is computed by other warps, and all its chunks by one program."""
    angles = torch.randn(1500, 128, device="cuda")
    weights = tuple(torch.randn(128, device="cuda").to(dtype) for _ in range(2))
    turns = (None, Rotation(angles, None, 0.0), Rotation(angles, weights, 1e-6))
    contexts = [1, 17, 208, 256, 257, 520, 700, 1500] * (rows // 8)
    case = make_case(
        [1] * rows, contexts, num_heads=32, num_kv_heads=8, head_dim=128, block_size=16,
        dtype=dtype, device="cuda",
    )  # fmt: skip
    for turn in turns:
        together = _attend(case, rotation=turn)
        for row in range(8):
            alone = _attend(case.alone(row), rotation=turn)
            assert alone.equal(together[row : row + 1])


def warm_up_lens(schedule: ScheduleConfig) -> Iterator[tuple[list[int], int]]:
    """(query lengths, most of them as the worker tells attention) of each step of its warm-up."""
    for plan in warm_up_plans(schedule, 100, schedule.max_num_batched_tokens, 1):
        replica = plan.replicas[0]
        if replica.chunks:
            lens = [len(chunk.token_ids) // 4 for chunk in replica.chunks]
            yield lens, max(2, *lens)
        elif replica.num_lanes:
            yield [1] * replica.num_lanes, 1


@pytest.mark.gpu
def test_batches_of_all_sizes_use_the_kernels_of_the_workers_warm_up() -> None:
    """Numbers of rows, tokens, blocks and programs must not be compiled in, or be met at start."""
    # No other test has this shape, so what it needs is not compiled yet.
    shape = {"num_heads": 20, "num_kv_heads": 5, "head_dim": 112, "block_size": 16}
    options = {**shape, "dtype": torch.bfloat16, "device": "cuda"}

    rotation = Rotation(torch.randn(4096, 112, device="cuda"), None, 0.0)

    def attend(
        query_lens: list[int], contexts: list[int], window: int | None = None, longest: int = 0
    ) -> None:
        """Rotating in decode form, as a model does where it calls all its layers."""
        case = make_case(
            query_lens, contexts, spare_blocks=len(contexts), max_context=900, **options
        )
        longest = max(longest, case.metadata.max_query_len)
        case.metadata = replace(case.metadata, max_query_len=longest)
        is_decode = case.metadata.is_decode(len(case.q))
        _attend(case, window, rotation=rotation if is_decode else None)

    with compilations() as at_start:
        schedule = ScheduleConfig(max_num_seqs=128, max_num_batched_tokens=256, max_model_len=900)
        for query_lens, longest in warm_up_lens(schedule):
            attend(query_lens, query_lens, longest=longest)
    space = DecodeWorkspace.create(128, 20, 5, 112, torch.device("cuda"))
    launches = {
        (
            *decode_attention._launch(
                16, 128, 2, -(-rows * 5 // space.num_sms), is_full=space.is_full(rows)
            ).values(),
            space.num_programs(rows, 900) == 1,
        )
        for rows in (1, 2, 4, 8, 16, 32, 64, 128)
    }
    # Each in decode form and not.
    assert sum("decode_attention" in name for name in at_start) == 2 * len(launches)
    with compilations() as later:
        for rows in (1, 2, 3, 8, 16, 17, 40, 60, 100, 128):
            attend([1] * rows, [17 * row + 1 for row in range(rows)])
            attend([5] * rows, [17 * row + 5 for row in range(rows)], window=16)
            # What lies between segments comes rotated in decode form too.
            _attend(make_case([1] * rows, [9] * rows, **options))
        attend([1, 0, 1], [16, 1, 33])
        attend([1], [900])
        attend([300], [300])
    assert later == []


class Recorded:
    """A kernel that notes its grid and every argument that is no tensor."""

    def __init__(self, kernel, log: list[object]) -> None:
        self._kernel = kernel
        self._log = log

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            numbers = [arg for arg in args if not isinstance(arg, Tensor)]
            self._log.append((grid, numbers, sorted(kwargs.items())))
            return self._kernel[grid](*args, **kwargs)

        return launch


GRAPH_TOKENS, LONGEST = 32, 320
ANY_BATCHES = {
    "one prompt takes all": ([32, 0, 0, 0, 0, 0], [32, 1, 1, 1, 1, 1]),
    "decodes and padding": ([1, 1, 1, 0, 1, 0], [300, 1, 17, 1, 5, 1]),
    "prompts beside decodes": ([1, 11, 0, 2, 1, 5], [40, 30, 1, 2, 1, 5]),
    "nothing at all": ([0] * 6, [1] * 6),
}


def padded_case(query_lens: list[int], contexts: list[int]) -> PagedCase:
    """In the form that a graph of any batch holds."""
    case = make_case(
        query_lens, contexts, num_padding_tokens=GRAPH_TOKENS - sum(query_lens),
        max_context=LONGEST, device=DEVICE.type,
    )  # fmt: skip
    case.metadata = replace(case.metadata, max_query_len=GRAPH_TOKENS)
    return case


def test_one_graph_holds_for_any_batch_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches are the same whatever the lengths are, and give each batch's attention."""
    logs: list[list[object]] = []
    recorded: list[object] = []
    for module in (store_kv, prefill_attention, decode_attention):
        name = f"_{module.__name__.rpartition('.')[2]}_kernel"
        monkeypatch.setattr(module, name, Recorded(getattr(module, name), recorded))
    for query_lens, contexts in ANY_BATCHES.values():
        case = padded_case(query_lens, contexts)
        out = _attend(case)
        torch.testing.assert_close(out.float(), case.expected(SCALE, None), rtol=0, atol=2e-5)
        logs.append(list(recorded))
        recorded.clear()
    assert all(log == logs[0] for log in logs) and len(logs[0]) == 3
