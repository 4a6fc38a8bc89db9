"""Errors and times of the kernels on this GPU: ``python tests/gpu_kernel_report.py [part ...]``.

Parts are errors, decode, small, linear, layers and tune; all but tune by default. Not a test.
Times are medians of graph replays in which no two calls share data, so no cache is measured.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "deploy", "package"))

from lockstep.parallel.placement import LinearOps, NormedSum, TorchLinear
from lockstep.worker.attention.base import AttentionSizes
from lockstep.worker.attention.reference import ReferenceAttention
from lockstep.worker.attention.triton import TritonAttention
from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.kernels import chain, ops
from lockstep.worker.kernels.activation import silu_and_mul
from lockstep.worker.kernels.few_rows import FewRows
from lockstep.worker.kernels.linear import FewRowsLinear, KernelLinear
from lockstep.worker.kernels.linear_tiles import (
    MULTIPROCESSORS,
    TILE_N,
    Ring,
    Tiles,
    lanes_of,
)
from lockstep.worker.kernels.one_row import one_row
from lockstep.worker.rotation import Rotation

DEVICE = torch.device("cuda")
READ_TBPS = 4.68  # measured on an H200: plain 16-byte loads


@dataclass(frozen=True)
class Shape:
    """A decoder layer."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    layers: int
    vocab: int
    head_norm: bool

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    def weights(self) -> dict[str, tuple[int, int]]:
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.heads * self.dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


QWEN = Shape("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 28, 151936, True)
LLAMA = Shape("Llama-8B", 4096, 14336, 32, 8, 128, 32, 128256, False)
BATCHES = (1, 8, 32, 128)
LINEAR_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def say(*columns: object) -> None:
    sys.stdout.write("  ".join(f"{column!s:>12}" for column in columns) + "\n")
    sys.stdout.flush()


def microseconds(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Median time of one call, all of them replayed in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[2:])[replays // 2] / len(calls)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


@dataclass(frozen=True)
class Batch:
    """One attention call over a pool whose unused slots hold NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    layer_kv: tuple[Tensor, Tensor]
    metadata: AttentionMetadata
    sizes: AttentionSizes

    def run(self, backend: TritonAttention | ReferenceAttention, window: int | None) -> Tensor:
        out = torch.full(self.q.shape, float("nan"), dtype=self.q.dtype, device=DEVICE)
        backend.forward(
            self.q, self.k, self.v, self.layer_kv, self.metadata,
            scale=self.sizes.head_dim**-0.5, window=window, out=out,
        )  # fmt: skip
        return out


def make_batch(
    query_lens: list[int],
    contexts: list[int],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
) -> Batch:
    num_heads, kv_heads, dim = heads
    widths = [-(-context // block_size) for context in contexts]
    num_blocks = 1 + sum(widths) + 5
    pool = torch.full((num_blocks, 2, block_size, kv_heads, dim), float("nan"), device=DEVICE)
    ids = (torch.randperm(num_blocks - 1) + 1).int()
    table = torch.full((len(contexts), max(widths) + 3), int(ids[-1]), dtype=torch.int32)
    slots = []
    for row, (width, context, length) in enumerate(zip(widths, contexts, query_lens, strict=True)):
        own, ids = ids[:width], ids[width:]
        table[row, :width] = own
        places = (own.long()[:, None] * block_size + torch.arange(block_size)).flatten()[:context]
        live = places[: context - length].to(DEVICE)
        for half in range(2):
            pool[live // block_size, half, live % block_size] = torch.randn(
                len(live), kv_heads, dim, device=DEVICE
            )
        slots.append(places[context - length :])
    pool = pool.to(dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    total = int(starts[-1])
    metadata = AttentionMetadata(
        slots=torch.cat(slots).to(DEVICE),
        query_start_loc=starts.to(DEVICE),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        block_table=table.to(DEVICE),
        max_query_len=max(query_lens),
        max_context_len=max(contexts),
    )
    qkv = randn(total, num_heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split([num_heads, kv_heads, kv_heads], dim=1)
    sizes = AttentionSizes(
        num_heads, kv_heads, dim, block_size, len(contexts), total, max(contexts), dtype, DEVICE
    )
    return Batch(q, k, v, (pool[:, 0], pool[:, 1]), metadata, sizes)


def distance(got: Tensor, expected: Tensor) -> str:
    """Norm of the difference over the norm of the expected; NaN stays NaN."""
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    return f"{error.item():.1e}"


def attention_error(batch: Batch, window: int | None) -> tuple[str, bool]:
    """Distance from float32, and whether ten runs with other splits are all bit-equal."""
    backend = TritonAttention(batch.sizes)
    got = batch.run(backend, window)
    same = True
    for num_sms in (1, 2, 5, 40, 132, 132, 132, 999):
        backend._workspace = replace(backend._workspace, num_sms=num_sms)
        same &= batch.run(backend, window).equal(got)
    wide = replace(
        batch,
        q=batch.q.float(),
        k=batch.k.float(),
        v=batch.v.float(),
        layer_kv=(batch.layer_kv[0].float(), batch.layer_kv[1].float()),
    )
    return distance(got, wide.run(ReferenceAttention(batch.sizes), window)), same


def report_errors() -> None:
    say("attention", "dtype", "heads", "block", "window", "error", "bit-equal", "seconds")
    decode = ([1] * 9, [1, 2, 16, 127, 128, 129, 1000, 2049, 5000])
    mixed = ([1, 700, 0, 33, 1, 128], [3000, 1500, 1, 33, 1, 128])
    shapes = [
        ((16, 8, 128), 16, torch.bfloat16, None), ((32, 8, 128), 16, torch.bfloat16, 300),
        ((9, 3, 64), 16, torch.bfloat16, None), ((14, 2, 64), 32, torch.float16, None),
        ((8, 1, 80), 64, torch.bfloat16, None), ((16, 8, 128), 16, torch.float32, None),
        ((12, 4, 96), 16, torch.float32, 300),
    ]  # fmt: skip
    for heads, block_size, dtype, window in shapes:
        for name, lens in (("decode", decode), ("mixed", mixed)):
            start = time.perf_counter()
            error, same = attention_error(make_batch(*lens, heads, block_size, dtype), window)
            seconds = f"{time.perf_counter() - start:.1f}"
            say(name, str(dtype)[6:], heads, block_size, window, error, same, seconds)
    for name, dtype, error in small_errors():
        say(name, str(dtype)[6:], "", "", "", error)


def small_errors() -> list[tuple[str, torch.dtype, str]]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        x, residual, weight = (randn(n, 1024, dtype=dtype) for n in (37, 37, 1))
        weight = weight[0]
        expected = ops.rms_norm_torch(x.float(), weight.float(), 1e-6)
        found.append(("rms_norm", dtype, distance(ops.rms_norm(x, weight, 1e-6), expected)))
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
        expected = ops.rms_norm_torch((x + residual).float(), weight.float(), 1e-6)
        found.append(("add_rms_norm", dtype, distance(normed, expected)))
        assert total.equal(x + residual)
        gate, up = x.float().chunk(2, dim=1)
        found.append(("silu_and_mul", dtype, distance(silu_and_mul(x), F.silu(gate) * up)))
        found.append(("norm_rope", dtype, rope_error(dtype)))
    return found


def rope_error(dtype: torch.dtype) -> str:
    qkv = randn(37, 32, 128, dtype=dtype)
    positions, table = torch.randint(0, 90, (37,), device=DEVICE), randn(90, 128).float()
    weights = (randn(128, dtype=dtype), randn(128, dtype=dtype))
    host = [t.float().cpu() for t in (qkv, table, *weights)]
    q, k, _ = host[0].split([16, 8, 8], dim=1)
    ops.norm_rope_(q, k, positions.cpu(), host[1], (host[2], host[3]), 1e-6)
    got_q, got_k, _ = qkv.split([16, 8, 8], dim=1)
    ops.norm_rope_(got_q, got_k, positions, table, weights, 1e-6)
    return distance(qkv.cpu(), host[0])


def report_decode() -> None:
    say("decode", "batch", "context", "us", "TB/s of KV", "floor us")
    num_blocks = (1 << 16) + 64
    pool = randn(num_blocks, 2, 16, 8, 128)
    for shape in (QWEN, LLAMA):
        sizes = AttentionSizes(shape.heads, 8, 128, 16, 128, 128, 8192, torch.bfloat16, DEVICE)
        for batch in BATCHES:
            for context in (128, 1024, 8192):
                calls = decode_calls(sizes, pool, batch, context)
                us = microseconds(calls)
                moved = batch * context * 8 * 128 * 4
                floor = f"{moved / READ_TBPS / 1e6:.1f}"
                say(shape.name, batch, context, f"{us:.1f}", f"{moved / us / 1e6:.2f}", floor)


def decode_calls(
    sizes: AttentionSizes, pool: Tensor, batch: int, context: int
) -> list[Callable[[], object]]:
    backend = TritonAttention(sizes)
    needed = batch * (context // 16)
    count = max(3, min(200, (pool.shape[0] - 1) // needed))
    calls: list[Callable[[], object]] = []
    for _ in range(count):
        table = torch.randperm(pool.shape[0] - 1, device=DEVICE)[:needed].view(batch, -1) + 1
        qkv = randn(batch, sizes.num_heads + 16, 128)
        q, k, v = qkv.split([sizes.num_heads, 8, 8], dim=1)
        metadata = AttentionMetadata(
            slots=table[:, -1] * 16 + 15,
            query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=DEVICE),
            context_lens=torch.full((batch,), context, dtype=torch.int32, device=DEVICE),
            block_table=table.int(),
            max_query_len=1,
            max_context_len=8192,
        )
        one = Batch(q, k, v, (pool[:, 0], pool[:, 1]), metadata, sizes)
        calls.append(attention_call(backend, one, torch.empty_like(q)))
    return calls


def attention_call(backend: TritonAttention, one: Batch, out: Tensor) -> Callable[[], object]:
    return partial(
        backend.forward, one.q, one.k, one.v, one.layer_kv, one.metadata,
        scale=0.09, window=None, out=out,
    )  # fmt: skip


def report_small() -> None:
    say("us per call", "batch", "rms_norm", "add_rms_norm", "norm_rope", "silu_and_mul", "prefill")
    table = randn(4096, 128).float()
    for shape in (QWEN, LLAMA):
        head = randn(128)
        weights = (head, head) if shape.head_norm else None
        norm_weight = randn(shape.hidden)
        for batch in BATCHES:
            x = [randn(batch, shape.hidden) for _ in range(20)]
            gate_up = [randn(batch, 2 * shape.inner) for _ in range(20)]
            qkv = [randn(batch, shape.qkv // 128, 128) for _ in range(20)]
            positions = torch.arange(batch, device=DEVICE)
            split = [t.split([shape.heads, 8, 8], dim=1)[:2] for t in qkv]
            columns = (
                [partial(ops.rms_norm, t, norm_weight, 1e-6) for t in x],
                [partial(ops.add_rms_norm, t, x[0], norm_weight, 1e-6) for t in x],
                [partial(ops.norm_rope_, *t, positions, table, weights, 1e-6) for t in split],
                [partial(silu_and_mul, t) for t in gate_up],
            )
            say(shape.name, batch, *(f"{microseconds(calls):.2f}" for calls in columns))
        report_prefill(shape)


def report_prefill(shape: Shape) -> None:
    heads = (shape.heads, shape.kv_heads, shape.dim)
    for length, context in ((2048, 2048), (2048, 8192)):
        batch = make_batch([length], [context], heads, 16, torch.bfloat16)
        backend, out = TritonAttention(batch.sizes), torch.empty_like(batch.q)
        us = microseconds([attention_call(backend, batch, out)] * 3)
        flops = 4 * shape.heads * 128 * length * (context - length / 2)
        rate = f"{flops / us / 1e6:.0f} TFLOP/s"
        say(shape.name, f"{length}@{context}", "", "", "", "", f"{us:.0f}", rate)


def report_linear() -> None:
    """Both ways; gate_up goes with its activation. "+" is what is above reading the weight."""
    say("us, +us", "kernel", "batch", *QWEN.weights(), "lm_head")
    few_rows = FewRowsLinear(DEVICE)
    ways = {"cuBLAS": (F.linear, unfused_gated), "few rows": (few_rows, few_rows.gated)}
    for shape in (QWEN, LLAMA):
        sizes = {**shape.weights(), "lm_head": (shape.vocab, shape.hidden)}
        copies = {name: weight_copies(*size) for name, size in sizes.items()}
        for batch in LINEAR_BATCHES:
            for way, (plain, gated) in ways.items():
                runs = {name: gated if name == "gate_up" else plain for name in copies}
                columns = [linear_time(runs[name], copies[name], batch) for name in copies]
                say(shape.name, way, batch, *columns)
        del copies


def linear_time(run: Callable[..., object], weights: list[Tensor], batch: int) -> str:
    x = randn(batch, weights[0].shape[1])
    us = microseconds([partial(run, x, weight) for weight in weights])
    floor = weights[0].numel() * 2 / READ_TBPS / 1e6
    return f"{us:.1f} {us - floor:+.1f}"


def weight_copies(rows: int, columns: int) -> list[Tensor]:
    """More than the caches hold."""
    return [randn(rows, columns) for _ in range(max(2, int(3e8 / (2 * rows * columns))))]


def unfused_gated(x: Tensor, weight: Tensor) -> Tensor:
    return silu_and_mul(F.linear(x, weight))


ONE_ROW_TILES = [
    Tiles(n, 8192 * scale // n, num_warps=warps)
    for n, scale, warps in (
        (2, 1, 4), (4, 1, 4), (8, 1, 4), (16, 1, 4), (4, 2, 8), (8, 2, 8), (4, 1, 8), (8, 1, 8),
    )
]  # fmt: skip
FEW_ROWS_RINGS = [
    Ring(columns, k, stages, splits)
    for columns, k, stages, splits in (
        (64, 128, 8, 1), (64, 128, 6, 1), (64, 128, 4, 1), (64, 64, 12, 1), (64, 64, 6, 1),
        (56, 128, 8, 1), (56, 128, 4, 1), (48, 128, 8, 1), (48, 128, 4, 1), (64, 128, 8, 2),
        (64, 128, 6, 2), (64, 128, 8, 3), (64, 128, 8, 4), (48, 128, 8, 2),
    )
]  # fmt: skip
# Of a program that has a multiprocessor to itself, less its barriers.
RING_BYTES = 226 << 10


def report_tune() -> None:
    """The best of each weight first; what ``linear_tiles`` chooses by itself is "default"."""
    for shape in (QWEN, LLAMA):
        for name, size in shape.weights().items():
            weights, gated = weight_copies(*size), name == "gate_up"
            for batch in (1, 8, 16, 32):
                found = sorted(cut_times(weights, batch, gated))
                text = "  ".join(f"{us:.2f} {cut}" for us, cut in found[:4])
                default = next(us for us, cut in found if cut == "default")
                say(shape.name, name, batch, f"default {default:.2f}", f"best {text}")


def cut_times(weights: list[Tensor], batch: int, gated: bool) -> list[tuple[float, str]]:
    """(us, how it is cut) of one product, for each way there is."""
    x = randn(batch, weights[0].shape[1])
    runs = one_row_runs(gated) if batch == 1 else few_rows_runs(batch, weights[0], gated)
    return [
        (microseconds([partial(run, x, weight, None) for weight in weights], replays=9), text)
        for text, run in runs.items()
    ]


def one_row_runs(gated: bool) -> dict[str, Callable[..., object]]:
    found = {"default": partial(one_row, gated=gated)}
    for tiles in ONE_ROW_TILES:
        text = f"{tiles.tile_n}x{tiles.tile_k}w{tiles.num_warps}"
        found[text] = partial(one_row, gated=gated, tiles=tiles)
    return found


def few_rows_runs(batch: int, weight: Tensor, gated: bool) -> dict[str, Callable[..., object]]:
    few_rows = FewRows(DEVICE)
    found = {"default": partial(few_rows, gated=gated)}
    feature_bytes = 2 * (TILE_N * (1 + gated) + lanes_of(batch))
    num_tiles = weight.shape[0] // (1 + gated) // TILE_N
    for ring in FEW_ROWS_RINGS:
        fits = ring.num_stages * ring.tile_k * feature_bytes <= RING_BYTES
        at_once = num_tiles * ring.splits <= 2 * MULTIPROCESSORS
        if fits and (ring.splits == 1 or at_once):
            text = f"{ring.columns}x{ring.tile_k}x{ring.num_stages}/{ring.splits}"
            found[text] = partial(few_rows, gated=gated, ring=ring)
    return found


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    eps: float = 1e-6

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True)
class LayerWeights:
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Norm
    head_norm: tuple[Tensor, Tensor] | None


def report_layers() -> None:
    """All layers and the logits of a decode step, without scheduler, sampler or inputs.

    "chained" is "few rows" with kernels that start before the ones ahead of them end; "equal"
    tells whether fifty replays of it gave the bits of "few rows".
    """
    say("step ms", "batch", "context", "cuBLAS", "few rows", "chained", "equal", "weights", "KV")
    for shape in (QWEN, LLAMA):
        layers = [
            LayerWeights(
                *(randn(*size) * size[1] ** -0.5 for size in shape.weights().values()),
                norm=Norm(randn(shape.hidden)),
                head_norm=(randn(128), randn(128)) if shape.head_norm else None,
            )
            for _ in range(shape.layers)
        ]
        head = randn(shape.vocab, shape.hidden)
        weight_bytes = head.numel() * 2 + sum(
            2 * rows * columns for rows, columns in shape.weights().values()
        ) * len(layers)
        for batch, context in ((1, 128), (1, 1024), (8, 1024), (16, 512), (32, 1024), (128, 256)):
            columns = step_columns(shape, layers, head, batch, context)
            kv_ms = batch * context * 8 * 128 * 4 * shape.layers / READ_TBPS / 1e9
            weights_ms = weight_bytes / READ_TBPS / 1e9
            say(shape.name, batch, context, *columns, f"{weights_ms:.3f}", f"{kv_ms:.3f}")
        del layers, head


@contextmanager
def unchained() -> Iterator[None]:
    """No kernel starts before the one ahead of it has ended."""
    with patch.object(chain, "has_dependent_launch", lambda: False):
        yield


def step_columns(
    shape: Shape, layers: list[LayerWeights], head: Tensor, batch: int, context: int
) -> list[str]:
    step = make_step(shape, layers, head, batch, context)
    few_rows = KernelLinear(DEVICE)
    with unchained():
        columns = [f"{microseconds([partial(step, PlainLinear())]) / 1e3:.3f}"]
        columns.append(f"{microseconds([partial(step, few_rows)]) / 1e3:.3f}")
        expected = step(few_rows)
    columns.append(f"{microseconds([partial(step, few_rows)]) / 1e3:.3f}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(few_rows)
    equal = True
    for _ in range(50):
        got.fill_(float("nan"))
        graph.replay()
        equal &= got.equal(expected)
    return [*columns, str(equal)]


class PlainLinear(TorchLinear):
    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return unfused_gated(x, weight)


def make_step(
    shape: Shape, layers: list[LayerWeights], head: Tensor, batch: int, context: int
) -> Callable[[LinearOps], Tensor]:
    blocks = batch * (context // 16)
    pool = randn(blocks + 1, shape.layers, 2, 16, 8, 128)
    table = (torch.randperm(blocks, device=DEVICE) + 1).view(batch, -1).int()
    metadata = AttentionMetadata(
        slots=table[:, -1].long() * 16 + 15,
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=DEVICE),
        context_lens=torch.full((batch,), context, dtype=torch.int32, device=DEVICE),
        block_table=table,
        max_query_len=1,
        max_context_len=4096,
    )
    sizes = AttentionSizes(shape.heads, 8, 128, 16, batch, batch, 4096, torch.bfloat16, DEVICE)
    backend, cos_sin = TritonAttention(sizes), randn(4096, 128).float()
    first = randn(batch, shape.hidden)

    def attend(index: int, qkv: Tensor) -> Tensor:
        q, k, v = qkv.view(batch, -1, 128).split([shape.heads, 8, 8], dim=1)
        rotation = Rotation(cos_sin, layers[index].head_norm, 1e-6)
        out = torch.empty(q.shape, dtype=q.dtype, device=DEVICE)
        backend.forward(
            q, k, v, (pool[:, index, 0], pool[:, index, 1]), metadata,
            scale=0.09, window=None, rotation=rotation, out=out,
        )  # fmt: skip
        return out.flatten(1)

    def step(linear: LinearOps) -> Tensor:
        residual, last = first, layers[-1]
        qkv = linear(ops.rms_norm(first, layers[0].norm.weight, 1e-6), layers[0].qkv)
        for i, layer in enumerate(layers):
            summed = NormedSum(attend(i, qkv), layer.o, residual, layer.norm)
            x, residual = linear.gated_of_norm(summed, layer.gate_up)
            if layer is not last:
                after = layers[i + 1]
                summed = NormedSum(x, layer.down, residual, after.norm)
                qkv, residual = linear.of_norm(summed, after.qkv)
        normed, _ = last.norm.add(linear(x, last.down), residual)
        return torch.mm(normed, head.t(), out_dtype=torch.float32)

    return step


PARTS = {
    "errors": report_errors,
    "decode": report_decode,
    "small": report_small,
    "linear": report_linear,
    "tune": report_tune,
    "layers": report_layers,
}


def main(names: list[str]) -> None:
    torch.manual_seed(0)
    start = time.perf_counter()
    for name in names or [part for part in PARTS if part != "tune"]:
        PARTS[name]()
        say(f"{name}:", f"{time.perf_counter() - start:.0f} s so far")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
