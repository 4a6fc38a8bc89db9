"""Bad calls harm nobody: a real scheduler and a tiny model behind the application."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from byte_model import write_byte_model
from exposed import Exposed
from hostile import COMPLETIONS, HostileCall, dropped_calls, hostile_calls
from inline_engine import start_inline_engine
from served import Reply, Served, Visit, ask, serving
from torch import Tensor

from lockstep.launcher.serve.options import ServeOptions
from lockstep.parallel.embedding import VocabParallelEmbedding

AT_ONCE = 20
SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "kv_cache_memory_bytes": 200_000, "max_num_seqs": 8,
    "max_num_queued_reqs": 64, "cudagraph_mode": "NONE",
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_byte_model(tmp_path_factory.mktemp("model"))
    options = ServeOptions(max_request_bytes=50_000)
    with serving(model, start_inline_engine, options=options, **SETTINGS) as served:
        yield served


async def ask_all(served: Served, calls: list[HostileCall]) -> list[Reply]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: HostileCall) -> Reply:
        async with gate:
            visit = Visit(leave_after_s=call.leave_after_s)
            return await ask(served.app, call.path, call.body, call.headers, visit)

    return list(await asyncio.gather(*map(one, calls)))


def normal_answers(served: Served) -> list[str]:
    calls = [
        {"prompt": f"number {i}", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        for i in range(20)
    ]

    async def all_of_them() -> list[Reply]:
        return list(await asyncio.gather(*(ask(served.app, COMPLETIONS, c) for c in calls)))

    replies = served.run(all_of_them())
    assert {reply.status for reply in replies} == {200}
    return [reply.json()["choices"][0]["text"] for reply in replies]


def check_at_rest(served: Served) -> None:
    """Every block is free or kept for its prefix, and nothing is remembered of any call."""
    assert served.state.service is not None
    assert served.state.service.admission.in_flight == 0

    async def settled() -> bool:
        for _ in range(500):
            (replica,) = served.engine.stats().replicas
            free = replica.num_free_blocks + replica.num_cached_blocks
            if (replica.num_running, replica.num_waiting, free) == (0, 0, replica.num_blocks):
                return True
            await asyncio.sleep(0.01)
        return False

    assert served.run(settled()), served.engine.stats()


def test_five_hundred_hostile_calls_and_then_twenty_normal_ones(served: Served) -> None:
    before = normal_answers(served)
    calls = hostile_calls(500, seed=4)
    replies = served.run(ask_all(served, calls))
    statuses = Counter(reply.status for reply in replies)
    # 0: a client that left before there was an answer.
    assert set(statuses) == {0, 200, 400, 404, 413}, statuses
    assert statuses[200] > 100 and statuses[400] > 150, statuses
    for call, reply in zip(calls, replies, strict=True):
        if reply.status >= 400:
            assert reply.error()["message"], call
        elif reply.status == 200 and call.leave_after_s is None:
            streams = reply.headers["content-type"].startswith("text/event-stream")
            assert reply.events() if streams else reply.json(), call
    assert normal_answers(served) == before
    check_at_rest(served)


def test_clients_dropped_at_random_leave_every_block_free(served: Served) -> None:
    served.run(ask_all(served, dropped_calls(200, seed=5)))
    assert served.engine.stats().num_finished["abort"] > 100
    check_at_rest(served)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> int:
    """A token id whose embedding is NaN, which no normal prompt has."""
    healthy = VocabParallelEmbedding.forward

    def forward(self: VocabParallelEmbedding, token_ids: Tensor) -> Tensor:
        found = healthy(self, token_ids)
        return found.masked_fill((token_ids == 255)[:, None], float("nan"))

    monkeypatch.setattr(VocabParallelEmbedding, "forward", forward)
    return 255


def test_fault_83_unusable_logits_end_their_own_request(served: Served, poisoned: int) -> None:
    before = normal_answers(served)
    calls: list[dict[str, Any]] = [
        {"prompt": [poisoned], "max_tokens": 3},
        {"prompt": "number 0", "max_tokens": 3},
    ]

    async def both() -> list[Reply]:
        return list(await asyncio.gather(*(ask(served.app, COMPLETIONS, c) for c in calls)))

    bad, good = served.run(both())
    assert (bad.status, good.status) == (500, 200)
    assert "output token 0" in bad.error()["message"]
    assert normal_answers(served) == before
    assert Exposed(served.ask("/metrics").body.decode()).total("lockstep_bad_logits_total") == 1
    check_at_rest(served)


def test_fault_99_probes_leave_no_trace(served: Served) -> None:
    check_at_rest(served)
    before = served.engine.stats()

    async def probe() -> set[int]:
        paths = ("/health", "/ready", "/ping", "/metrics", "/load")
        return {(await ask(served.app, paths[i % 5])).status for i in range(1000)}

    assert served.run(probe()) == {200}
    assert served.engine.stats() == before
