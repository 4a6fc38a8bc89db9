"""What a graph cannot hold is refused while it is captured, with the descriptor and the line."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graph_toys import ToyState, ToyStep, manifest_of
from rig import make_rig, tiny_model
from torch import Tensor

from lockstep.comm.collectives import Communicator
from lockstep.parallel.topology import Topology
from lockstep.worker.attention.registry import ADAPTERS
from lockstep.worker.graphs.errors import CaptureFailed, GraphError, HostSync, OutsidePool
from lockstep.worker.graphs.guard import CaptureGuard
from lockstep.worker.graphs.host import HostBackend
from lockstep.worker.graphs.runner import GraphRunner
from lockstep.worker.models.decoder import DecoderLayer

CPU = torch.device("cpu")
kept: list[Tensor] = []


def branches(x: Tensor) -> None:
    if x.sum() > 1e9:
        x.zero_()


SYNCS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "int": lambda x: int(x[0, 0]),
    "a branch on data": branches,
    "an index": lambda x: [1, 2][x[0, 0].long()],
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a mask to write by": lambda x: x.index_put_((x > 0,), torch.zeros(())),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "repeats": lambda x: x[0].repeat_interleave(x[0].long().abs()),
}
OUTSIDE: dict[str, Callable[[Tensor], object]] = {
    "another device": lambda x: torch.empty(3, device="meta"),
    "from another device": lambda x: x + torch.zeros(16, device="meta"),
    "kept": lambda x: kept.append(x + 1),
    "a view of it kept": lambda x: kept.append((x + 1)[0, 2:]),
}


def capture(ask: Callable[[Tensor], object]) -> GraphRunner:
    """Sizes 4 and 2, of which the second asks, though not yet in the warm-up."""
    step, calls = ToyStep(ToyState(), Communicator.single()), []

    def parts(key):
        def body() -> None:
            step.body(key.num_tokens)
            calls.append(key.num_tokens)
            if calls.count(2) == 2:
                ask(step.state.y)

        return {"body": body}

    runner = GraphRunner(HostBackend(), Topology.single())
    runner.capture_all(manifest_of(4, 2), parts, step.state)
    return runner


@pytest.mark.parametrize(
    ("ask", "kind"),
    [(ask, HostSync) for ask in SYNCS.values()] + [(ask, OutsidePool) for ask in OUTSIDE.values()],
    ids=[*SYNCS, *OUTSIDE],
)
def test_the_descriptor_and_the_line_are_named(ask, kind: type[GraphError]) -> None:
    kept.clear()
    with pytest.raises(CaptureFailed) as caught:
        capture(ask)
    assert isinstance(caught.value.__cause__, kind)
    found = re.match(rf"at size 2: {kind.__name__}: .*: {__file__}:(\d+): (.*)", str(caught.value))
    assert found is not None, caught.value
    first = ask.__code__.co_firstlineno
    assert first <= int(found[1]) <= first + 1
    assert found[2] and found[2] in Path(__file__).read_text()


def test_what_a_graph_can_hold_passes() -> None:
    with CaptureGuard(CPU) as guard:
        x = torch.arange(12.0).view(3, 4)
        live = x > 4
        y = torch.where(live, x, 0).masked_fill_(live, 1.0) + torch.tensor(2.0)
        x[1:].copy_(y[torch.tensor([0, 2])])
        x.index_copy_(0, torch.zeros(1, dtype=torch.int64), y[:1])
        shape, rows = x.shape, len(x)
        del x, y, live
    guard.check_kept()
    assert (shape, rows) == ((3, 4), 3)


def test_guards_end_with_the_capture() -> None:
    capture(lambda x: x.add_(0))
    assert torch.ones(2).tolist() == [1.0, 1.0] and torch.ones(2).nonzero().shape == (2, 1)


@pytest.mark.parametrize("sizes", [{"split": (8,)}, {"mixed": (8,)}], ids=["segments", "whole"])
def test_a_layer_that_asks_is_named_in_any_graph(monkeypatch, sizes) -> None:
    activate = DecoderLayer.activate

    def asks(self, x: Tensor, *others: object) -> tuple[Tensor, Tensor]:
        return activate(self, x * float(x.abs().max() > -1), *others)

    monkeypatch.setattr(DecoderLayer, "activate", asks)
    monkeypatch.setitem(ADAPTERS, "reference", "always_attention:AlwaysAttention")
    kind = "in segments" if "split" in sizes else "of any batch"
    said = rf"at size 8 {kind}: HostSync: Tensor.__float__ .*{__file__}:\d+: return activate"
    with pytest.raises(CaptureFailed, match=said):
        make_rig(tiny_model()).capture(**sizes)


def test_no_capture_without_the_session_that_a_manifest_opens() -> None:
    with HostBackend().session() as session:
        session.capture(lambda: None)
    with pytest.raises(GraphError, match="no capture was ordered"):
        session.capture(lambda: None)


def test_what_a_thread_lets_go_a_moment_later_was_not_kept() -> None:
    with CaptureGuard(CPU) as guard:
        sent = [torch.zeros(4) + 1]
    sender = threading.Timer(0.05, sent.clear)
    sender.start()
    guard.check_kept()
    sender.join()
